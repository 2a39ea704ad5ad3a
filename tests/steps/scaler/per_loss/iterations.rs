//! Iterations that fail, are abandoned, or combine several optimizers and losses.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::gradients::GradientError::Unsupported;
use tch_amp::optim::{AmpOptimizer, OptimizerError, Step};
use tch_amp::scaler::ScalerError::{AlreadyStepped, IterationOpen, NoInfChecks, TooManySkips};
use tch_amp::scaler::{GradScalerConfig, PerLossScalers};
use tch_amp::{Error, function};

use super::{begin, scales, two};
use crate::scaler::{Descent, INF, loss, with_scale};
use testkit::tensors::leaf;
use testkit::{assert_refused, for_each_device, to_f64};

#[test]
fn fp16_gradients_are_accepted_if_both_losses_allow_them() {
    let w = leaf(&[1.0, 1.0], Kind::Half, Device::Cpu);
    let mut opt = Descent::of([&w]);
    let config = GradScalerConfig { allow_fp16_gradients: true, ..with_scale(8.0) };
    let mut scalers = PerLossScalers::with_configs(Device::Cpu, &[config; 2]).unwrap();
    scalers.backward(0, &loss(&w, &[1.0, 2.0]), &mut opt).unwrap();
    scalers.backward(1, &loss(&w, &[1.0, 2.0]), &mut opt).unwrap();
    assert!(scalers.step(&mut opt).unwrap().is_stepped().unwrap());
    assert_eq!(to_f64(&w), [-1.0, -3.0]);
}

/// An optimizer that fails or panics on request.
struct Moody {
    inner: Descent,
    fails: bool,
    panics: bool,
    wants_f32: bool,
}

impl AmpOptimizer for Moody {
    fn parameters(&self) -> tch_amp::optim::Parameters<'_> {
        self.inner.parameters()
    }

    fn wants_f32_gradients(&self) -> bool {
        assert!(!self.panics, "in a bad mood");
        self.wants_f32
    }

    fn update(&mut self, step: &Step<'_>) -> tch_amp::Result<()> {
        match self.fails {
            true => Err(Error::Optimizer(OptimizerError::Step("in a bad mood".into()))),
            false => self.inner.update(step),
        }
    }
}

fn moody(device: Device) -> (Tensor, Moody) {
    let w = leaf(&[1.0; 3], Kind::Float, device);
    let inner = Descent::of([&w]);
    (w, Moody { inner, fails: false, panics: false, wants_f32: false })
}

#[test]
fn after_a_failed_step_further_losses_count_for_the_retry() {
    for_each_device(|device| {
        for (value, want) in [(1.0, -1.0), (INF, 1.0)] {
            let (w, mut opt) = moody(device);
            let mut scalers = two(device);
            scalers.backward(0, &loss(&w, &[1.0; 3]), &mut opt).unwrap();
            opt.fails = true;
            assert!(scalers.step(&mut opt).is_err());
            opt.fails = false;
            scalers.backward(1, &loss(&w, &[value; 3]), &mut opt).unwrap();
            let skipped = scalers.step(&mut opt).unwrap().is_skipped().unwrap();
            assert_eq!(skipped, value == INF);
            assert_eq!(to_f64(&w), [want; 3]);
            scalers.update().unwrap();
        }
    });
}

#[test]
fn a_backward_after_the_step_is_refused_and_changes_nothing() {
    let (w, mut opt, mut scalers) = begin(Device::Cpu);
    scalers.backward(0, &loss(&w, &[1.0; 3]), &mut opt).unwrap();
    drop(scalers.step(&mut opt).unwrap());
    let late = scalers.backward(1, &loss(&w, &[1.0; 3]), &mut opt);
    assert_refused!(late, Error::Scaler(AlreadyStepped));
    assert_eq!(to_f64(&w.grad()), [1.0; 3]);
}

#[test]
fn a_panic_in_the_optimizer_leaves_the_previous_gradients() {
    let (w, mut opt) = moody(Device::Cpu);
    let mut scalers = two(Device::Cpu);
    scalers.backward(0, &loss(&w, &[3.0; 3]), &mut opt).unwrap();
    opt.panics = true;
    let backward = || scalers.backward(1, &loss(&w, &[1.0; 3]), &mut opt);
    assert!(catch_unwind(AssertUnwindSafe(backward)).is_err());
    assert_eq!(to_f64(&w.grad()), [3.0; 3]);
}

/// Gradients that were made f32 for the optimizer before the call failed have their dtype back, and so have later ones.
#[rstest]
fn a_refused_backward_does_not_widen_gradients(#[values(Kind::BFloat16, Kind::Half)] kind: Kind) {
    for_each_device(|device| {
        let (_, mut opt) = moody(device);
        let low = leaf(&[1.0; 3], kind, device);
        // Its gradient is refused because it is fp16, and stays so.
        let complex = Tensor::zeros([2], (Kind::ComplexHalf, device)).set_requires_grad(true);
        opt.inner = Descent::of([&low, &complex]);
        opt.wants_f32 = true;
        let mut scalers = two(device);
        let both = || loss(&low, &[1.0; 3]) + complex.view_as_real().sum(kind);
        assert_refused!(
            scalers.backward(0, &both(), &mut opt),
            Error::Gradient(Unsupported { .. })
        );
        assert!(!low.grad().defined() && !complex.grad().defined());
        loss(&low, &[1.0; 3]).backward();
        assert_eq!((low.grad().kind(), to_f64(&low.grad())), (kind, vec![1.0; 3]));
    });
}

/// What its backward has given it is scaled, and is not added to the sum.
#[test]
fn a_parameter_that_is_frozen_in_a_backward_keeps_the_previous_gradient() {
    for_each_device(|device| {
        let [w, other] = [(); 2].map(|()| leaf(&[1.0; 3], Kind::Float, device));
        let mut opt = Descent::of([&w, &other]);
        let mut scalers = two(device);
        scalers.backward(0, &loss(&w, &[2.0; 3]), &mut opt).unwrap();
        let frozen = w.shallow_clone();
        let freezes = function(
            |_, x| Ok(x[0] * 1.0),
            move |_, grads| {
                assert!(frozen.grad().defined(), "what came later in the forward runs before");
                let _frozen = frozen.set_requires_grad(false);
                Ok(grads[0].shallow_clone())
            },
        );
        let part = loss(&freezes.apply(&[&other]).unwrap(), &[1.0; 3]);
        scalers.backward(1, &(part + loss(&w, &[1.0; 3])), &mut opt).unwrap();
        let _trained = w.set_requires_grad(true);
        assert_eq!((to_f64(&w.grad()), to_f64(&other.grad())), (vec![2.0; 3], vec![1.0; 3]));
        assert!(scalers.step(&mut opt).unwrap().is_stepped().unwrap());
        assert_eq!((to_f64(&w), to_f64(&other)), (vec![-1.0; 3], vec![0.0; 3]));
    });
}

#[test]
fn gradients_of_no_loss_are_stepped_and_the_iteration_ends() {
    let (w, mut opt, mut scalers) = begin(Device::Cpu);
    loss(&w, &[1.0; 3]).backward();
    drop(scalers.step(&mut opt).unwrap());
    scalers.update().unwrap();
    assert_refused!(scalers.update(), Error::Scaler(NoInfChecks));
    scalers.backward(0, &loss(&w, &[1.0; 3]), &mut opt).unwrap();
    assert!(scalers.step(&mut opt).unwrap().is_stepped().unwrap());
}

#[test]
fn an_abandoned_iteration_has_no_effect() {
    for_each_device(|device| {
        let (mut w, mut opt, mut scalers) = begin(device);
        scalers.backward(0, &loss(&w, &[INF; 3]), &mut opt).unwrap();
        assert_eq!(scalers.overflowed().unwrap(), [true, false]);
        scalers.abandon(&mut opt).unwrap();
        assert_eq!(scalers.overflowed().unwrap(), [false, false]);
        w.zero_grad();
        scalers.backward(1, &loss(&w, &[1.0; 3]), &mut opt).unwrap();
        assert!(scalers.step(&mut opt).unwrap().is_stepped().unwrap());
        scalers.update().unwrap();
        assert_eq!(scales(&scalers), [8.0, 1024.0]);
    });
}

#[test]
fn each_loss_has_options_of_its_own() {
    let (w, mut opt, mut scalers) = begin(Device::Cpu);
    let [first, second] = [0, 1].map(|loss| *scalers.config(loss).unwrap());
    let chosen = GradScalerConfig { growth_factor: 4.0, growth_interval: 1, ..first };
    scalers.set_config(0, chosen).unwrap();
    scalers.set_config(1, GradScalerConfig { backoff_factor: 0.25, ..second }).unwrap();
    let refused = [
        (GradScalerConfig { growth_factor: 1.0, ..chosen }, "growth_factor"),
        (GradScalerConfig { growth_factor: f64::NAN, ..chosen }, "growth_factor"),
        (GradScalerConfig { backoff_factor: 1.0, ..chosen }, "backoff_factor"),
        (GradScalerConfig { growth_interval: 0, ..chosen }, "growth_interval"),
        (GradScalerConfig { init_scale: 2.0, ..chosen }, "config"),
        (GradScalerConfig { hysteresis: 2, growth_factor: 8.0, ..chosen }, "config"),
        (GradScalerConfig { enabled: false, ..chosen }, "config"),
    ];
    for (config, field) in refused {
        let error = scalers.set_config(0, config).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { name, .. } if name == field), "{error}");
        assert_eq!(*scalers.config(0).unwrap(), chosen);
    }
    let options = [0, 1].map(|loss| {
        let config = scalers.config(loss).unwrap();
        (config.growth_factor, config.backoff_factor, config.growth_interval)
    });
    assert_eq!(options, [(4.0, 0.5, 1), (2.0, 0.25, 3)]);
    scalers.backward(0, &loss(&w, &[1.0; 3]), &mut opt).unwrap();
    scalers.backward(1, &loss(&w, &[INF; 3]), &mut opt).unwrap();
    assert!(scalers.step(&mut opt).unwrap().is_skipped().unwrap());
    scalers.update().unwrap();
    assert_eq!(scales(&scalers), [32.0, 256.0]);
}

#[test]
fn a_checkpoint_contains_all_scalers() {
    let (w, mut opt, mut scalers) = begin(Device::Cpu);
    scalers.backward(1, &loss(&w, &[INF; 3]), &mut opt).unwrap();
    let mut checkpoint = Checkpoint::new();
    assert!(checkpoint.add("scalers", &mut scalers).is_err(), "in an iteration");
    drop(scalers.step(&mut opt).unwrap());
    scalers.update().unwrap();
    checkpoint.add_value("scalers.1", &1).unwrap();
    assert!(checkpoint.add("scalers", &mut scalers).is_err(), "the name is in use");
    assert_eq!(checkpoint.names().count(), 1, "nothing was added");
    let mut checkpoint = Checkpoint::new();
    checkpoint.add("scalers", &mut scalers).unwrap();
    let mut loaded = PerLossScalers::new(Device::Cpu, 2).unwrap();
    checkpoint.restore().add("scalers", &mut loaded).apply().unwrap();
    assert_eq!(loaded.state_dict().unwrap(), scalers.state_dict().unwrap());
    assert_eq!(scales(&loaded), [8.0, 512.0]);
}

#[test]
fn one_disabled_loss_disables_all() {
    let configs = [true, false].map(|enabled| GradScalerConfig { enabled, ..Default::default() });
    let scalers = PerLossScalers::with_configs(Device::Cpu, &configs).unwrap();
    assert!(!scalers.is_enabled());
    assert!([0, 1].iter().all(|&loss| !scalers.config(loss).unwrap().enabled));
    assert_eq!([0, 1].map(|loss| scalers.get_scale(loss).unwrap()), [1.0; 2]);
    assert_eq!([0, 1].map(|loss| scalers.get_growth_tracker(loss).unwrap()), [0; 2]);
}

/// Abandoning one optimizer ends the iteration of a loss only if no other optimizer takes part in it.
#[test]
fn abandoning_one_of_two_optimizers_leaves_the_iteration_open() {
    let ws = [(); 2].map(|()| leaf(&[1.0; 3], Kind::Float, Device::Cpu));
    let mut opts = ws.each_ref().map(|w| Descent::of([w]));
    let mut scalers = two(Device::Cpu);
    for (w, opt) in ws.iter().zip(&mut opts) {
        scalers.backward(0, &loss(w, &[1.0; 3]), opt).unwrap();
    }
    for (opt, is_open) in opts.iter_mut().zip([true, false]) {
        scalers.abandon(opt).unwrap();
        match (is_open, scalers.state_dict()) {
            (false, state) => drop(state.unwrap()),
            (true, state) => assert_refused!(state, Error::Scaler(IterationOpen { .. })),
        }
    }
}

#[test]
fn the_error_is_that_of_the_first_of_two_losses_that_exceed_their_limit() {
    let configs = [8.0, 1024.0]
        .map(|scale| GradScalerConfig { max_consecutive_skips: Some(1), ..with_scale(scale) });
    let mut scalers = PerLossScalers::with_configs(Device::Cpu, &configs).unwrap();
    let (w, mut opt) = moody(Device::Cpu);
    for id in [0, 1] {
        scalers.backward(id, &loss(&w, &[INF; 3]), &mut opt).unwrap();
    }
    drop(scalers.step(&mut opt).unwrap());
    assert_refused!(scalers.update(), Error::Scaler(TooManySkips { scale: 4.0, .. }));
}

/// A layer that both optimizers have, and that comes first in their lists, does not make them one.
#[rstest]
fn optimizers_with_a_common_frozen_parameter_are_told_apart(#[values(false, true)] first: bool) {
    for_each_device(|device| {
        let [frozen, a, b] = [(); 3].map(|()| leaf(&[1.0; 3], Kind::Float, device));
        let _frozen = frozen.set_requires_grad(false);
        let list = |own: &Tensor| {
            let mut list = vec![frozen.shallow_clone(), own.shallow_clone()];
            if !first {
                list.reverse();
            }
            Descent(list)
        };
        let [mut opt_a, mut opt_b] = [&a, &b].map(list);
        let mut scalers = two(device);
        scalers.backward(0, &loss(&a, &[INF; 3]), &mut opt_a).unwrap();
        scalers.backward(0, &loss(&b, &[1.0; 3]), &mut opt_b).unwrap();
        assert!(scalers.step(&mut opt_b).unwrap().is_stepped().unwrap());
        assert!(scalers.step(&mut opt_a).unwrap().is_skipped().unwrap());
        scalers.update().unwrap();
        assert_eq!(scales(&scalers), [4.0, 1024.0]);
        assert_eq!((to_f64(&a), to_f64(&b)), (vec![1.0; 3], vec![0.0; 3]));
        // Abandoning one keeps the overflow of the other.
        scalers.backward(0, &loss(&a, &[INF; 3]), &mut opt_a).unwrap();
        scalers.backward(1, &loss(&b, &[1.0; 3]), &mut opt_b).unwrap();
        scalers.abandon(&mut opt_b).unwrap();
        assert_eq!(scalers.overflowed().unwrap(), [true, false]);
        scalers.update().unwrap();
        assert_eq!(scales(&scalers), [2.0, 1024.0]);
    });
}

/// One list begins with all of the other's parameters.
#[test]
fn an_optimizer_that_begins_with_the_parameters_of_another_is_told_apart() {
    for_each_device(|device| {
        let [a, b] = [(); 2].map(|()| leaf(&[1.0; 3], Kind::Float, device));
        let short = || Descent::of([&a]);
        let long = || Descent::of([&a, &b]);
        let mut scalers = two(device);
        scalers.backward(0, &loss(&b, &[INF; 3]), &mut long()).unwrap();
        scalers.backward(1, &loss(&a, &[1.0; 3]), &mut short()).unwrap();
        assert!(scalers.step(&mut short()).unwrap().is_stepped().unwrap());
        scalers.update().unwrap();
        scalers.backward(0, &loss(&a, &[INF; 3]), &mut short()).unwrap();
        scalers.backward(1, &loss(&b, &[INF; 3]), &mut long()).unwrap();
        scalers.abandon(&mut long()).unwrap();
        assert_eq!(scalers.overflowed().unwrap(), [true, false]);
    });
}

/// The optimizer is the same although its list has grown.
#[test]
fn an_optimizer_that_has_grown_keeps_its_overflow_and_can_be_abandoned() {
    let [a, late] = [(); 2].map(|()| leaf(&[1.0; 3], Kind::Float, Device::Cpu));
    let before = || Descent::of([&a]);
    let after = || Descent::of([&a, &late]);
    let mut scalers = two(Device::Cpu);
    scalers.backward(0, &loss(&a, &[INF; 3]), &mut before()).unwrap();
    let _clamped = tch::no_grad(|| a.grad().clamp_(-1.0, 1.0));
    assert!(scalers.step(&mut after()).unwrap().is_skipped().unwrap());
    scalers.update().unwrap();
    scalers.backward(0, &loss(&a, &[INF; 3]), &mut before()).unwrap();
    scalers.abandon(&mut after()).unwrap();
    assert_eq!(scalers.overflowed().unwrap(), [false, false]);
}
