//! The order of calls: which calls are refused, and that a refused call changes nothing.

use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::gradients::GradientError::Shared;
use tch_amp::optim::{AmpOptimizer, OptimizerError, Parameters, Step};
use tch_amp::scaler::ScalerError::{
    AlreadyStepped, AlreadyUnscaled, NoInfChecks, UnscaleAfterStep,
};
use tch_amp::{Error, GradScaler, Result};

use crate::scaler::{
    Descent, INF, NAN, after_backward, after_unscaled, loss, model, ones, rows, scaler,
};
use testkit::tensors::leaf;
use testkit::{assert_refused, assert_says, for_each_device, to_f64};

#[test]
fn a_finite_iteration_steps_with_the_unscaled_gradient() {
    for_each_device(|device| {
        let (_vs, w, mut opt, mut scaler) = after_backward(device, &[1.0, 2.0, -3.0]);
        assert_eq!(to_f64(&w.grad()), [8.0, 16.0, -24.0]);
        assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
        assert_eq!(to_f64(&w), [0.0, -1.0, 4.0]);
        scaler.update().unwrap();
        assert_eq!((scaler.get_scale().unwrap(), scaler.get_growth_tracker().unwrap()), (8.0, 1));
    });
}

#[test]
fn an_infinite_or_nan_gradient_skips_the_step_and_halves_the_scale() {
    for_each_device(|device| {
        for bad in [INF, -INF, NAN] {
            let (_vs, w, mut opt, mut scaler) = after_backward(device, &[1.0, bad, 1.0]);
            let outcome = scaler.step(&mut opt).unwrap();
            assert!(outcome.is_skipped().unwrap() && !outcome.is_stepped().unwrap());
            assert_eq!(to_f64(&w), [1.0; 3]);
            scaler.update().unwrap();
            assert_eq!(scaler.get_scale().unwrap(), 4.0);
        }
    });
}

#[test]
fn unscaling_twice_is_refused_and_the_gradient_is_unchanged() {
    let (_vs, w, mut opt, mut scaler) = after_unscaled(Device::Cpu, &[1.0, 2.0, 3.0]);
    assert_refused!(scaler.unscale_(&mut opt), Error::Scaler(AlreadyUnscaled));
    assert_eq!(to_f64(&w.grad()), [1.0, 2.0, 3.0]);
    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
}

#[test]
fn unscaling_or_stepping_after_a_step_is_refused_and_nothing_changes() {
    let (_vs, w, mut opt, mut scaler) = after_backward(Device::Cpu, &[1.0; 3]);
    scaler.step(&mut opt).unwrap();
    assert_refused!(scaler.unscale_(&mut opt), Error::Scaler(UnscaleAfterStep));
    assert_refused!(scaler.step(&mut opt), Error::Scaler(AlreadyStepped));
    assert_eq!((to_f64(&w), to_f64(&w.grad())), (vec![0.0; 3], vec![1.0; 3]));
    scaler.update().unwrap();
}

#[test]
fn update_without_a_check_is_refused_and_the_scale_is_unchanged() {
    let mut scaler = scaler(Device::Cpu);
    assert_refused!(scaler.update(), Error::Scaler(NoInfChecks));
    assert_eq!((scaler.get_scale().unwrap(), scaler.get_growth_tracker().unwrap()), (8.0, 0));
}

#[test]
fn an_optimizer_without_gradients_is_not_stepped_and_not_counted() {
    let (_vs, w, mut opt) = model(Device::Cpu);
    let mut scaler = scaler(Device::Cpu);
    let outcome = scaler.step(&mut opt).unwrap();
    assert!(outcome.has_no_gradients() && !outcome.is_stepped().unwrap());
    assert!(!outcome.is_skipped().unwrap());
    assert_refused!(scaler.update(), Error::Scaler(NoInfChecks));
    assert_eq!(to_f64(&w), [1.0; 3]);
    scaler.unscale_(&mut opt).unwrap();
    assert_refused!(scaler.update(), Error::Scaler(NoInfChecks));
    // Nothing is left over: the next iteration is like any other.
    scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
    scaler.update().unwrap();
    assert_eq!(to_f64(&w), [0.0; 3]);
}

#[test]
fn an_optimizer_without_parameters_is_ignored() {
    let mut empty = Descent(Vec::new());
    let mut scaler = scaler(Device::Cpu);
    scaler.unscale_(&mut empty).unwrap();
    scaler.unscale_(&mut empty).unwrap();
    assert!(scaler.step(&mut empty).unwrap().has_no_gradients());
    let empty_store = VarStore::new(Device::Cpu);
    let mut opt = nn::Adam::default().build(&empty_store, 1e-3).unwrap();
    assert!(scaler.step(&mut opt).unwrap().has_no_gradients());
}

#[test]
fn step_and_update_work_before_the_first_scale() {
    let (_vs, w, mut opt) = model(Device::Cpu);
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    (loss(&w, &[1.0; 3]) * 65536.0).backward();
    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
    scaler.update().unwrap();
    assert_eq!(to_f64(&w), [0.0; 3]);
}

#[test]
fn two_optimizers_of_which_one_overflows_share_only_the_backoff() {
    for_each_device(|device| {
        let (_a, wa, mut opt_a) = model(device);
        let (_b, wb, mut opt_b) = model(device);
        let mut scaler = scaler(device);
        let losses = [loss(&wa, &[1.0; 3]), loss(&wb, &[INF, 1.0, 1.0])];
        for scaled in scaler.scale(&losses).unwrap() {
            scaled.backward();
        }
        assert!(scaler.step(&mut opt_a).unwrap().is_stepped().unwrap());
        assert!(scaler.step(&mut opt_b).unwrap().is_skipped().unwrap());
        scaler.update().unwrap();
        assert_eq!((to_f64(&wa), to_f64(&wb)), (vec![0.0; 3], vec![1.0; 3]));
        assert_eq!(scaler.get_scale().unwrap(), 4.0);
    });
}

#[test]
fn an_optimizer_that_moves_between_unscale_and_step_is_recognized() {
    let (_vs, w, opt, mut scaler) = after_unscaled(Device::Cpu, &[1.0; 3]);
    let mut moved = Box::new(opt);
    assert_refused!(scaler.unscale_(&mut *moved), Error::Scaler(AlreadyUnscaled));
    assert!(scaler.step(&mut *moved).unwrap().is_stepped().unwrap());
    assert_eq!(to_f64(&w), [0.0; 3]);
}

#[test]
fn a_parameter_of_two_optimizers_is_unscaled_once() {
    let (w, other) = (ones(Kind::Float, Device::Cpu), ones(Kind::Float, Device::Cpu));
    let mut first = Descent::of([&w]);
    let mut second = Descent::of([&other, &w]);
    let mut scaler = scaler(Device::Cpu);
    scaler.backward(&(loss(&w, &[1.0; 3]) + loss(&other, &[1.0; 3]))).unwrap();
    scaler.unscale_(&mut first).unwrap();
    assert_refused!(
        scaler.unscale_(&mut second),
        Error::Gradient(Shared { .. }),
        "parameter 1 [3]"
    );
    assert!(scaler.step(&mut second).is_err());
    assert_eq!((to_f64(&w.grad()), to_f64(&other.grad())), (vec![1.0; 3], vec![8.0; 3]));
}

#[test]
fn a_parameter_listed_twice_in_one_optimizer_is_unscaled_once() {
    let w = ones(Kind::Float, Device::Cpu);
    let mut opt = Descent::of([&w, &w]);
    let mut scaler = scaler(Device::Cpu);
    scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
    scaler.unscale_(&mut opt).unwrap();
    assert_eq!(to_f64(&w.grad()), [1.0; 3]);
}

#[test]
fn a_variable_added_after_the_optimizer_was_built_is_unscaled_and_stepped() {
    let (vs, w, mut opt) = model(Device::Cpu);
    let late = vs.root().ones("late", &[3]);
    let mut scaler = scaler(Device::Cpu);
    scaler.backward(&(loss(&w, &[1.0; 3]) + loss(&late, &[2.0; 3]))).unwrap();
    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
    assert_eq!((to_f64(&w), to_f64(&late)), (vec![0.0; 3], vec![-1.0; 3]));
}

#[test]
fn abandon_lets_the_next_iteration_begin_without_update() {
    let (_vs, w, mut opt) = model(Device::Cpu);
    let (_other, v, mut kept) = model(Device::Cpu);
    let mut scaler = scaler(Device::Cpu);
    scaler.backward(&(loss(&w, &[INF; 3]) + loss(&v, &[1.0; 3]))).unwrap();
    scaler.unscale_(&mut opt).unwrap();
    scaler.unscale_(&mut kept).unwrap();
    scaler.abandon(&mut opt).unwrap();
    scaler.abandon(&mut opt).unwrap();
    opt.zero_grad();
    scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
    scaler.unscale_(&mut opt).unwrap();
    assert_eq!((to_f64(&w.grad()), to_f64(&v.grad())), (vec![1.0; 3], vec![1.0; 3]));
    assert!(scaler.step(&mut kept).unwrap().is_stepped().unwrap());
    scaler.update().unwrap();
    assert_eq!(scaler.get_growth_tracker().unwrap(), 1, "the abandoned overflow is not counted");
}

#[test]
fn a_non_finite_gradient_that_is_not_cleared_skips_again_and_is_reported() {
    let (_vs, _w, mut opt, mut scaler) = after_backward(Device::Cpu, &[INF; 3]);
    for want in [4.0, 2.0, 1.0] {
        assert!(scaler.step(&mut opt).unwrap().is_skipped().unwrap());
        scaler.update().unwrap();
        assert_eq!(scaler.get_scale().unwrap(), want);
    }
}

pub struct Failing(pub Tensor);

impl AmpOptimizer for Failing {
    fn parameters(&self) -> Parameters<'_> {
        vec![self.0.shallow_clone()].into()
    }

    fn update(&mut self, _step: &Step<'_>) -> Result<()> {
        Err(Error::Optimizer(OptimizerError::Step("no space left".into())))
    }
}

#[test]
fn the_error_of_an_optimizer_is_returned_and_the_step_can_be_retried() {
    let w = leaf(&[1.0; 3], Kind::Float, Device::Cpu);
    let mut scaler = scaler(Device::Cpu);
    scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
    assert_says(scaler.step(&mut Failing(w.shallow_clone())), "no space left");
    assert!(scaler.step(&mut Descent::of([&w])).unwrap().is_stepped().unwrap());
    assert_eq!(to_f64(&w), [0.0; 3]);
}

#[test]
fn a_failure_of_tchs_optimizer_becomes_an_error() {
    let vs = VarStore::new(Device::Cpu);
    let table = vs.root().ones("table", &[4, 2]);
    let mut opt = nn::Adam::default().build(&vs, 0.1).unwrap();
    let mut scaler = scaler(Device::Cpu);
    scaler.backward(&rows(&table, &[0, 1]).sum(Kind::Float)).unwrap();
    assert_refused!(scaler.step(&mut opt), Error::Optimizer(OptimizerError::Step(_)), "sparse");
}

/// Memory is reused at once: a new object must not be mistaken for one that was freed.
#[test]
fn models_created_and_dropped_within_an_iteration_are_distinguished() {
    let mut scaler = scaler(Device::Cpu);
    for _ in 0..50 {
        let (_vs, w, mut opt) = model(Device::Cpu);
        scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
        assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
        opt.zero_grad();
        let (_other, v, mut next) = model(Device::Cpu);
        scaler.backward(&loss(&v, &[1.0; 3])).unwrap();
        scaler.unscale_(&mut next).unwrap();
        assert_eq!(to_f64(&v.grad()), [1.0; 3]);
    }
    scaler.update().unwrap();
}

#[test]
fn an_optimizer_that_has_gained_a_variable_is_refused_and_can_be_abandoned() {
    let (vs, w, mut opt, mut scaler) = after_unscaled(Device::Cpu, &[1.0; 3]);
    let late = vs.root().ones("late", &[3]);
    scaler.backward(&loss(&late, &[1.0; 3])).unwrap();
    assert_refused!(scaler.step(&mut opt), Error::Gradient(Shared { .. }));
    assert_eq!((to_f64(&w), to_f64(&late)), (vec![1.0; 3], vec![1.0; 3]));
    scaler.abandon(&mut opt).unwrap();
    opt.zero_grad();
    scaler.backward(&(loss(&w, &[1.0; 3]) + loss(&late, &[1.0; 3]))).unwrap();
    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
    assert_eq!((to_f64(&w), to_f64(&late)), (vec![0.0; 3], vec![0.0; 3]));
}

#[test]
fn an_optimizer_that_was_stepped_cannot_be_abandoned() {
    let (_vs, _w, mut opt, mut scaler) = after_backward(Device::Cpu, &[INF; 3]);
    let _skipped = scaler.step(&mut opt).unwrap();
    assert_refused!(scaler.abandon(&mut opt), Error::Scaler(AlreadyStepped));
    scaler.update().unwrap();
    assert_eq!(scaler.get_scale().unwrap(), 4.0);
}

/// Abandoning one optimizer keeps what is recorded of the others.
#[test]
fn abandoning_one_optimizer_keeps_the_parameters_of_another_from_being_unscaled_again() {
    let w = [(); 3].map(|()| ones(Kind::Float, Device::Cpu));
    let list = |places: &[usize]| Descent(places.iter().map(|&i| w[i].shallow_clone()).collect());
    let mut scaler = scaler(Device::Cpu);
    w.iter().for_each(|w| scaler.backward(&loss(w, &[1.0; 3])).unwrap());
    scaler.unscale_(&mut list(&[0])).unwrap();
    scaler.unscale_(&mut list(&[1])).unwrap();
    scaler.abandon(&mut list(&[0])).unwrap();
    assert_refused!(scaler.unscale_(&mut list(&[2, 1])), Error::Gradient(Shared { .. }));
    assert_eq!(to_f64(&w[1].grad()), [1.0; 3]);
}
