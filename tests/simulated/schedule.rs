//! Schedules on a device that answers late.

use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::checkpoint::Checkpoint;
use tch_amp::optim::AdamW;
use tch_amp::schedule::ExponentialLr;

use crate::common::simulation::{Simulation, let_answers_come};

#[test]
fn a_schedule_follows_the_device_without_synchronizing() {
    let Some(simulation) = Simulation::find() else { return };
    let device = Device::Cuda(0);
    let w = Tensor::ones([8], (Kind::Float, device)).set_requires_grad(true);
    let mut opt = AdamW::default().build(&[w.shallow_clone()], 1.0).unwrap();
    let mut scaler = GradScaler::new(device).unwrap();
    let mut scheduler = ExponentialLr::new(0.5).build(&mut opt).unwrap();
    let mut iterate = |factor: f64| {
        opt.zero_grad().unwrap();
        scaler.backward(&(&w * factor).sum(Kind::Float)).unwrap();
        let outcome = scaler.step(&mut opt).unwrap();
        scaler.update().unwrap();
        scheduler.step(&mut opt, outcome).unwrap();
    };
    // The first iteration makes the state.
    iterate(1.0);
    let skipped = [2, 5, 6];
    let (_, counts) = simulation.count(|| {
        for i in 1..10 {
            iterate(if skipped.contains(&i) { f64::INFINITY } else { 1.0 });
        }
    });
    assert_eq!(counts.host_syncs, 0);
    // Steps whose outcome has not arrived count as taken, and their rates are those of PyTorch.
    assert_eq!(scheduler.steps() + scheduler.skipped(), 10);
    assert_eq!(opt.lr(0).unwrap(), 0.5f64.powi(scheduler.steps() as i32));
    while scheduler.pending() > 0 {
        let_answers_come(device);
        // An outcome without gradients is known at once, and makes the scheduler look.
        opt.zero_grad().unwrap();
        let outcome = scaler.step(&mut opt).unwrap();
        scheduler.step(&mut opt, outcome).unwrap();
    }
    assert_eq!((scheduler.steps(), scheduler.skipped()), (7, 3));
    assert_eq!(opt.lr(0).unwrap(), 0.5f64.powi(7));
}

#[test]
fn a_checkpoint_has_the_outcomes_that_were_open() {
    let Some(_simulation) = Simulation::find() else { return };
    let device = Device::Cuda(0);
    let w = Tensor::ones([8], (Kind::Float, device)).set_requires_grad(true);
    let mut opt = AdamW::default().build(&[w.shallow_clone()], 1.0).unwrap();
    let mut scaler = GradScaler::new(device).unwrap();
    let mut scheduler = ExponentialLr::new(0.5).build(&mut opt).unwrap();
    for factor in [1.0, f64::INFINITY, 1.0, 1.0] {
        opt.zero_grad().unwrap();
        scaler.backward(&(&w * factor).sum(Kind::Float)).unwrap();
        let outcome = scaler.step(&mut opt).unwrap();
        scaler.update().unwrap();
        scheduler.step(&mut opt, outcome).unwrap();
    }
    let mut checkpoint = Checkpoint::new();
    checkpoint.add("scheduler", &mut scheduler).unwrap();
    let mut new = ExponentialLr::new(0.5).build(&mut opt).unwrap();
    checkpoint.restore().add("scheduler", &mut new).apply().unwrap();
    assert_eq!((new.steps(), new.lrs()), (3, &[0.125][..]));
    // The first step sets the rate, although the optimizer has another.
    new.advance(&mut opt).unwrap();
    assert_eq!(opt.lr(0).unwrap(), 0.0625);
}
