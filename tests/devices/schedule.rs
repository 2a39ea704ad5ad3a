//! Schedules on a device that answers late.

use std::ops::Range;

use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::checkpoint::Checkpoint;
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::schedule::{ExponentialLr, Scheduler};

use testkit::simulation::{Simulation, let_answers_come};

const DEVICE: Device = Device::Cuda(0);

/// A training whose learning rate begins with 1 and is halved by each step.
struct Training {
    w: Tensor,
    opt: Optimizer,
    scaler: GradScaler,
    scheduler: Scheduler,
}

impl Training {
    fn new() -> Self {
        let w = Tensor::ones([8], (Kind::Float, DEVICE)).set_requires_grad(true);
        let mut opt = AdamW::default().build(&[w.shallow_clone()], 1.0).unwrap();
        let scaler = GradScaler::new(DEVICE).unwrap();
        let scheduler = ExponentialLr { gamma: 0.5 }.build(&mut opt).unwrap();
        Self { w, opt, scaler, scheduler }
    }

    /// An iteration whose gradients are this factor.
    fn iterate(&mut self, factor: f64) {
        self.opt.zero_grad().unwrap();
        self.scaler.backward(&(&self.w * factor).sum(Kind::Float)).unwrap();
        let outcome = self.scaler.step(&mut self.opt).unwrap();
        self.scaler.update().unwrap();
        self.scheduler.step(&mut self.opt, &outcome).unwrap();
    }

    /// Lets the outcomes of all steps arrive.
    fn settle(&mut self) {
        let_answers_come(DEVICE);
        // An outcome without gradients is known at once, and makes the scheduler look.
        self.opt.zero_grad().unwrap();
        for _ in 0..1000 {
            if self.scheduler.pending() == 0 {
                return;
            }
            let outcome = self.scaler.step(&mut self.opt).unwrap();
            self.scheduler.step(&mut self.opt, &outcome).unwrap();
            let_answers_come(DEVICE);
        }
        panic!("{} outcomes do not arrive", self.scheduler.pending());
    }
}

/// The gradients of the iteration with this number. Three overflow.
fn factor(number: usize) -> f64 {
    if [2, 5, 6].contains(&number) { f64::INFINITY } else { 1.0 }
}

#[test]
fn a_schedule_follows_the_device_without_synchronizing() {
    let Some(simulation) = Simulation::find() else { return };
    let mut training = Training::new();
    // The first iteration makes the state.
    training.iterate(1.0);
    let (_, counts) = simulation.count(|| (1..10).for_each(|i| training.iterate(factor(i))));
    assert_eq!(counts.host_syncs, 0);
    // Steps whose outcome has not arrived count as taken, and their rates are those of PyTorch.
    let steps = training.scheduler.steps();
    assert_eq!(steps + training.scheduler.skipped(), 10);
    assert_eq!(training.opt.lr(0).unwrap(), 0.5f64.powi(steps as i32));
    training.settle();
    assert_eq!((training.scheduler.steps(), training.scheduler.skipped()), (7, 3));
    assert_eq!(training.opt.lr(0).unwrap(), 0.5f64.powi(7));
}

#[test]
fn a_checkpoint_has_the_outcomes_that_were_open() {
    let Some(_simulation) = Simulation::find() else { return };
    let mut training = Training::new();
    for factor in [1.0, f64::INFINITY, 1.0, 1.0] {
        training.iterate(factor);
    }
    let mut checkpoint = Checkpoint::new();
    checkpoint.add("scheduler", &mut training.scheduler).unwrap();
    let opt = &mut training.opt;
    let mut new = ExponentialLr { gamma: 0.5 }.build(opt).unwrap();
    checkpoint.restore().add("scheduler", &mut new).apply().unwrap();
    assert_eq!((new.steps(), new.lrs()), (3, &[0.125][..]));
    // The first step sets the rate, although the optimizer has another.
    new.advance(opt).unwrap();
    assert_eq!(opt.lr(0).unwrap(), 0.0625);
}

#[test]
fn a_rate_that_the_program_sets_outlives_a_step_that_is_taken_back() {
    let Some(_simulation) = Simulation::find() else { return };
    let mut training = Training::new();
    training.iterate(1.0);
    training.iterate(f64::INFINITY);
    training.opt.set_lr(0.375).unwrap();
    training.iterate(1.0);
    // As if once an epoch: it is followed whatever the open steps turn out to be.
    training.scheduler.advance(&mut training.opt).unwrap();
    training.settle();
    assert_eq!((training.scheduler.steps(), training.scheduler.skipped()), (3, 1));
    // The rate that the program has set was followed by a step and an advance.
    assert_eq!(training.opt.lr(0).unwrap(), 0.375 / 4.0);
}

/// The rate of each iteration.
fn rates(training: &mut Training, iterations: Range<usize>) -> Vec<f64> {
    let mut rate = |i| {
        let rate = training.opt.lr(0).unwrap();
        training.iterate(factor(i));
        let_answers_come(DEVICE);
        rate
    };
    iterations.map(&mut rate).collect()
}

/// A run that has not saved learns later that a step was skipped.
#[test]
fn a_run_that_is_resumed_after_a_skip_has_the_rates_of_the_one_that_saved_it() {
    let Some(_simulation) = Simulation::find() else { return };
    for at in 1..10 {
        let mut saved = Training::new();
        rates(&mut saved, 0..at);
        let mut checkpoint = Checkpoint::new();
        checkpoint.add("scheduler", &mut saved.scheduler).unwrap();
        checkpoint.add("opt", &mut saved.opt).unwrap();
        checkpoint.add("scaler", &mut saved.scaler).unwrap();
        let mut resumed = Training::new();
        let Training { opt, scaler, scheduler, .. } = &mut resumed;
        let restore = checkpoint.restore().add("scheduler", scheduler).add("opt", opt);
        restore.add("scaler", scaler).apply().unwrap();
        let rest = rates(&mut saved, at..12);
        assert_eq!(rates(&mut resumed, at..12), rest, "resumed at {at}");
    }
}
