//! What autograd may ask of the loss: a second pass, second derivatives, changes in place.

use tch::{Device, Kind, Reduction, Tensor, no_grad};
use tch_amp::autocast;
use tch_amp::lean::LinearCrossEntropyConfig;
use tch_amp::recompute::checkpointed;

use super::{Operands, assert_near, assert_same_bits, assert_skipped, region};
use testkit::assert_says;

fn configs() -> [LinearCrossEntropyConfig; 4] {
    let new = LinearCrossEntropyConfig::default;
    let none = || LinearCrossEntropyConfig { reduction: Reduction::None, ..new() };
    [
        new(),
        LinearCrossEntropyConfig { max_bytes: Some(256), ..new() },
        none(),
        LinearCrossEntropyConfig { max_bytes: Some(256), ..none() },
    ]
}

fn gradients(loss: &Tensor, own: &Operands, keep: bool, create: bool) -> Vec<Tensor> {
    Tensor::run_backward(&[loss.sum(Kind::Float)], &[&own.hidden, &own.weight], keep, create)
}

#[test]
fn a_second_pass_has_the_bits_of_the_first_and_a_third_one_is_refused() {
    testkit::for_each_device(|device| {
        for config in configs() {
            let own = Operands::random(device, [6, 4, 10], false);
            let loss = autocast(device, || own.loss(&config)).unwrap();
            let first = gradients(&loss, &own, true, false);
            let second = gradients(&loss, &own, false, false);
            assert_same_bits(&first, &second, &format!("{config:?}"));
            let third =
                Tensor::f_run_backward(&[loss.sum(Kind::Float)], &[&own.hidden], false, false);
            assert_says(third.map(drop), "backward through the graph a second time");
        }
    });
}

/// The loss of each target is the program's alone.
#[test]
fn a_loss_can_be_changed_in_place() {
    for config in configs() {
        let [ours, theirs] = [0, 1].map(|_| Operands::random(Device::Cpu, [6, 4, 10], false));
        let mut loss = ours.loss(&config);
        let _changed = loss.g_mul_scalar_(3.0);
        loss.sum(Kind::Float).backward();
        (theirs.loss(&config) * 3.0).sum(Kind::Float).backward();
        assert_same_bits(&ours.gradients(), &theirs.gradients(), &format!("{config:?}"));
    }
}

#[test]
fn second_derivatives_are_refused_in_words() {
    for config in configs() {
        let own = Operands::random(Device::Cpu, [6, 4, 10], false);
        let loss = own.loss(&config);
        let first = gradients(&loss, &own, true, true);
        let failed = first[0].square().sum(Kind::Float).f_backward();
        assert_says(failed, "cannot be differentiated");
    }
}

#[test]
fn an_operand_that_was_changed_in_place_is_refused() {
    for config in configs() {
        let own = Operands::random(Device::Cpu, [6, 4, 10], false);
        let loss = own.loss(&config).sum(Kind::Float);
        drop(no_grad(|| own.weight.shallow_clone().fill_(0.0)));
        assert_says(loss.f_backward(), "modified by an inplace operation");
    }
}

#[test]
fn a_recomputed_loss_has_the_same_bits() {
    testkit::for_each_device(|device| {
        for config in configs() {
            let [ours, theirs] = [0, 1].map(|_| Operands::random(device, [6, 4, 10], false));
            let loss = autocast(device, || ours.loss(&config)).unwrap();
            loss.sum(Kind::Float).backward();
            let what = format!("{config:?}");
            let inside = theirs.with_hidden(Tensor::new());
            let part =
                move |x: &[&Tensor]| Ok(inside.with_hidden(x[0].shallow_clone()).loss(&config));
            let again: Tensor =
                autocast(device, || checkpointed(&[&theirs.hidden], part)).unwrap().unwrap();
            again.sum(Kind::Float).backward();
            assert_same_bits(&ours.gradients(), &theirs.gradients(), &what);
        }
    });
}

/// An infinite logit makes the loss infinite or NaN, and the step is skipped.
#[test]
fn an_overflow_skips_the_step() {
    testkit::for_each_device(|device| {
        for config in configs() {
            let own = Operands::random(device, [6, 4, 10], false);
            drop(no_grad(|| own.hidden.get(2).fill_(1e30)));
            let loss = region(device, Kind::Half).run(|| own.loss(&config)).unwrap();
            assert_skipped(&loss.mean(Kind::Float), &own.weight, &format!("{config:?}"));
        }
    });
}

/// The parts of a batch add up to its gradient.
#[test]
fn accumulated_parts_add_up() {
    let whole = Operands::random(Device::Cpu, [8, 4, 10], false);
    let parts = whole.to(Kind::Float);
    let sum = LinearCrossEntropyConfig { reduction: Reduction::Sum, ..Default::default() };
    whole.loss(&sum).backward();
    for at in [0, 4] {
        let targets = parts.targets.narrow(0, at, 4);
        let part = Operands { targets, ..parts.with_hidden(parts.hidden.narrow(0, at, 4)) };
        part.loss(&sum).backward();
    }
    assert_near(&parts.gradients(), &whole.gradients(), 1e-6, "of two parts");
}
