//! Skipping without scaling, and reports of what was skipped.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::optim::{AdamW, MasterWeights, Sgd};
use tch_amp::scaler::StepCounter;

use crate::scaler::{Descent, INF, NAN, loss, model, rows, step_and_update};
use testkit::tensors::leaf;
use testkit::{for_each_device, to_f64};

fn set_grad(w: &Tensor, values: &[f64]) {
    let mut old = w.grad();
    if old.defined() {
        let _zeroed = tch::no_grad(|| old.zero_());
    }
    loss(w, values).backward();
}

#[test]
fn losses_are_unchanged_and_non_finite_steps_are_skipped() {
    for_each_device(|device| {
        let (_vs, w, mut opt) = model(device);
        let mut scaler = GradScaler::skip_only(device).unwrap();
        for kind in [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16] {
            let loss = Tensor::ones([], (kind, device));
            let scaled = scaler.scale(&loss).unwrap();
            assert_eq!((scaled.kind(), scaled.data_ptr()), (kind, loss.data_ptr()));
        }
        for value in [1.0, INF, NAN, 2.0] {
            opt.zero_grad();
            scaler.backward(&loss(&w, &[value, 0.0, 0.0])).unwrap();
            let skipped = scaler.step(&mut opt).unwrap().is_skipped().unwrap();
            assert_eq!(skipped, !value.is_finite());
            scaler.update().unwrap();
            assert_eq!(scaler.get_scale().unwrap(), 1.0);
        }
        assert_eq!(to_f64(&w), [-2.0, 1.0, 1.0], "the finite steps were taken");
    });
}

#[test]
fn the_scale_is_always_one() {
    let mut scaler = GradScaler::skip_only(Device::Cpu).unwrap();
    scaler.set_growth_interval(1).unwrap();
    let w = leaf(&[0.0], Kind::Float, Device::Cpu);
    let mut opt = Sgd::default().build(vec![w.shallow_clone()], 1.0).unwrap();
    for value in [1.0, INF, 1.0, 1.0, NAN] {
        set_grad(&w, &[value]);
        step_and_update(&mut scaler, &mut opt);
        assert_eq!(scaler.get_scale().unwrap(), 1.0);
    }
}

#[test]
fn bf16_weights_with_masters_survive_a_non_finite_batch() {
    for_each_device(|device| {
        let w = leaf(&[1.0, -2.0, 3.0], Kind::BFloat16, device);
        let adamw = AdamW::default().master_weights(MasterWeights::Float);
        let mut opt = adamw.build(vec![w.shallow_clone()], 0.1).unwrap();
        let mut scaler = GradScaler::skip_only(device).unwrap();
        set_grad(&w, &[1.0, INF, 1.0]);
        assert!(scaler.step(&mut opt).unwrap().is_skipped().unwrap());
        scaler.update().unwrap();
        assert_eq!(to_f64(&w), [1.0, -2.0, 3.0]);
        set_grad(&w, &[1.0, 1.0, 1.0]);
        assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
        assert_ne!(to_f64(&w), [1.0, -2.0, 3.0]);
    });
}

#[test]
fn taken_and_skipped_steps_are_counted_and_reported() {
    for_each_device(|device| {
        let mut scaler = GradScaler::skip_only(device).unwrap();
        let w = leaf(&[0.0], Kind::Float, device);
        let mut opt = Sgd::default().build(vec![w.shallow_clone()], 1.0).unwrap();
        let mut steps = StepCounter::default();
        // A step without any gradient is neither taken nor skipped.
        steps.record(&scaler.step(&mut opt).unwrap());
        let mut rows = Vec::new();
        for value in [1.0, NAN, 1.0, INF, INF, INF, 1.0, NAN] {
            set_grad(&w, &[value]);
            steps.record(&scaler.step(&mut opt).unwrap());
            scaler.update().unwrap();
            // Synchronizes, so that no step is in flight.
            let _reached = to_f64(&w);
            while steps.skipped().is_ok() && steps.pending() > 0 {}
            rows.push(steps.consecutive_skips().unwrap());
        }
        assert_eq!(rows, [0, 1, 0, 1, 2, 3, 0, 1]);
        assert_eq!((steps.count().unwrap(), steps.skipped().unwrap()), (3, 5));
        assert_eq!(steps.to_string(), "3 steps taken, 5 skipped (at most 3 in a row)");
        assert_eq!(StepCounter::default().to_string(), "0 steps taken, 0 skipped");
    });
}

#[test]
fn non_finite_gradients_are_named_and_counted() {
    for_each_device(|device| {
        let vs = VarStore::new(device);
        let good = vs.root().ones("good", &[2]);
        let bad = vs.root().ones("bad", &[4]);
        let _unused = vs.root().ones("unused", &[1]);
        let mut opt = AdamW::default().build(&vs, 0.1).unwrap();
        let mut scaler = GradScaler::new(device).unwrap();
        let factors = Tensor::from_slice(&[NAN, INF, 1.0, -INF]).to_device(device);
        let sum = good.sum(Kind::Float) + (&bad * factors).sum(Kind::Float);
        scaler.backward(&sum).unwrap();
        assert!(scaler.step(&mut opt).unwrap().is_skipped().unwrap());
        let found = scaler.non_finite_gradients(&opt).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].to_string(), "parameter `bad` [4]: 2 infinite, 1 NaN");
        scaler.update().unwrap();
        opt.zero_grad().unwrap();
        assert!(scaler.non_finite_gradients(&opt).unwrap().is_empty());
    });
}

#[test]
fn a_sparse_gradient_that_adds_up_to_infinity_is_named() {
    let table = Tensor::zeros([2, 1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    (rows(&table, &[1, 1]) * f64::from(f32::MAX)).sum(None).backward();
    assert!(table.grad().is_sparse());
    let opt = Descent(vec![table]);
    let scaler = GradScaler::new(Device::Cpu).unwrap();
    let found = scaler.non_finite_gradients(&opt).unwrap();
    assert_eq!((found[0].infinite, found[0].nan), (1, 0));
}

#[test]
fn only_gradients_that_are_stepped_are_named_and_each_once() {
    let [bad, frozen] = [0, 1].map(|_| leaf(&[0.0], Kind::Float, Device::Cpu));
    for w in [&bad, &frozen] {
        set_grad(w, &[INF]);
    }
    let frozen = frozen.set_requires_grad(false);
    let opt = Descent(vec![bad.shallow_clone(), Tensor::new(), frozen, bad]);
    let scaler = GradScaler::new(Device::Cpu).unwrap();
    let found = scaler.non_finite_gradients(&opt).unwrap();
    assert_eq!((found.len(), found[0].infinite), (1, 1));
}

/// They are not written to, so no small value is lost.
#[test]
fn fp16_gradients_are_checked_without_a_change() {
    let w = leaf(&[1.0], Kind::Half, Device::Cpu);
    let mut opt = Descent::of([&w]);
    let mut scaler = GradScaler::skip_only(Device::Cpu).unwrap();
    set_grad(&w, &[2f64.powi(-24)]);
    scaler.unscale_(&mut opt).unwrap();
    assert_eq!(to_f64(&w.grad()), [2f64.powi(-24)]);
    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
}
