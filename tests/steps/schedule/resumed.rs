//! Schedules continue from a checkpoint as if they had not been interrupted.

use serde_json::{Value, json};
use tch::Kind;
use tch_amp::checkpoint::Checkpoint;
use tch_amp::optim::{Optimizer, Sgd};
use tch_amp::schedule::{
    CosineAnnealingLr, CosineAnnealingWarmRestarts, ExponentialLr, LinearWithWarmup, OneCycleLr,
    ReduceLrOnPlateau, Schedule, Scheduler,
};
use tch_amp::{Error, GradScaler};

use super::{optimizer, rates, schedule};
use testkit::checkpoints::checkpoint_of;
use testkit::rng::Rng;
use testkit::tensors::leaf;
use testkit::{assert_refused, assert_says, for_each_device};

fn saved(scheduler: &mut Scheduler) -> Checkpoint {
    checkpoint_of([("scheduler", scheduler)])
}

/// A checkpoint with a state that Python could have saved.
fn state_of_python(state: &Value) -> Checkpoint {
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_value("scheduler", state).unwrap();
    checkpoint
}

/// Another scheduler and optimizer, with the states of these.
fn resumed(
    scheduler: &mut Scheduler,
    opt: &mut Optimizer,
    lrs: &[f64],
    options: impl Into<Schedule>,
) -> (Scheduler, Optimizer) {
    let mut checkpoint = saved(scheduler);
    checkpoint.add("opt", opt).unwrap();
    let mut opt = optimizer(true, lrs);
    let mut scheduler = options.into().build(&mut opt).unwrap();
    checkpoint.restore().add("scheduler", &mut scheduler).add("opt", &mut opt).apply().unwrap();
    (scheduler, opt)
}

#[test]
fn random_schedules_continue_with_the_same_numbers() {
    let mut rng = Rng::new(29);
    for seed in 0..200 {
        let lrs = [0.1, 1e-3];
        let schedule = schedule(&mut rng, lrs.len());
        let mut opt = optimizer(true, &lrs);
        let mut whole = schedule.clone().build(&mut opt).unwrap();
        (0..rng.below(30)).for_each(|_| whole.advance(&mut opt).unwrap());
        let (mut new, mut new_opt) = resumed(&mut whole, &mut opt, &lrs, schedule);
        for step in 0..25 {
            assert_eq!(
                (new.lrs(), new.steps()),
                (whole.lrs(), whole.steps()),
                "case {seed}, step {step}"
            );
            assert_eq!(rates(&new_opt), rates(&opt));
            whole.advance(&mut opt).unwrap();
            new.advance(&mut new_opt).unwrap();
        }
    }
}

#[test]
fn a_plateau_continues() {
    let options = ReduceLrOnPlateau { patience: 2, cooldown: 1, ..Default::default() };
    let mut opt = optimizer(false, &[1.0]);
    let mut whole = options.build(&opt).unwrap();
    // Saved before the first metric, when the best one is infinite, and in the middle.
    for metrics in [&[][..], &[1.0, 2.0, 2.0]] {
        for &metric in metrics {
            whole.step(&mut opt, metric).unwrap();
        }
        let checkpoint = checkpoint_of([("plateau", &mut whole)]);
        let mut new = options.build(&opt).unwrap();
        checkpoint.restore().add("plateau", &mut new).apply().unwrap();
        assert_eq!(new.best(), whole.best());
        let mut new_opt = optimizer(false, &[opt.lr(0).unwrap()]);
        for metric in [3.0, 3.0, 3.0, 3.0, 0.5, 3.0, 3.0, 3.0] {
            new.step(&mut new_opt, metric).unwrap();
            whole.step(&mut opt, metric).unwrap();
            assert_eq!(rates(&new_opt), rates(&opt));
        }
    }
    assert_eq!((whole.best(), opt.lr(0).unwrap() < 0.01), (0.5, true));
}

#[test]
fn a_state_of_another_schedule_is_refused_and_nothing_changes() {
    let mut one = optimizer(false, &[0.1]);
    let mut two = optimizer(false, &[0.1, 0.2]);
    let mut scheduler = ExponentialLr { gamma: 0.5 }.build(&mut one).unwrap();
    scheduler.advance(&mut one).unwrap();
    let groups = saved(&mut ExponentialLr { gamma: 0.5 }.build(&mut two).unwrap());
    let restored = groups.restore().add("scheduler", &mut scheduler).apply();
    assert_refused!(restored, Error::InvalidArgument { .. });
    let cycle =
        CosineAnnealingWarmRestarts { t_0: 5, t_mult: 1, eta_min: 0.0 }.build(&mut one).unwrap();
    let cycle = saved(&mut { cycle });
    let restored = cycle.restore().add("scheduler", &mut scheduler).apply();
    assert_refused!(restored, Error::Checkpoint(_));
    assert_eq!((scheduler.lrs(), scheduler.steps()), (&[0.05][..], 1));
}

/// The state of a schedule of Python for three groups, of which the options here know two.
#[test]
fn a_state_of_more_groups_is_refused() {
    let mut opt = optimizer(false, &[0.5, 0.25]);
    let options = OneCycleLr { max_lr: vec![0.5, 0.25], ..OneCycleLr::new(0.5, 20) };
    let mut scheduler = options.build(&mut opt).unwrap();
    let mut state = saved(&mut scheduler).value::<Value>("scheduler").unwrap();
    state["base_lrs"] = json!([0.02, 0.01, 0.004]);
    state["_step_count"] = json!(1);
    let checkpoint = state_of_python(&state);
    let restored = checkpoint.restore().add("scheduler", &mut scheduler).apply();
    assert_says(restored, "of 3 groups, and the optimizer 2");
}

/// Python's position is a float after `step(epoch)` with one.
#[test]
fn a_position_is_a_whole_number_of_steps_within_its_cycle() {
    let mut opt = optimizer(false, &[0.1]);
    let mut scheduler =
        CosineAnnealingWarmRestarts { t_0: 5, t_mult: 1, eta_min: 0.0 }.build(&mut opt).unwrap();
    let checkpoint = |position: &Value, length: u64| {
        state_of_python(&json!({
            "last_epoch": 3, "base_lrs": [0.1], "_last_lr": [0.1], "T_cur": position, "T_i": length,
        }))
    };
    for (position, length, text) in [
        (json!(u64::MAX), u64::MAX, ""),
        (json!(5), 5, ""),
        (json!(0), 0, ""),
        (json!(2.5), 5, "whole steps"),
        (json!(-1.0), 5, "whole steps"),
    ] {
        let refused = checkpoint(&position, length);
        let restored = refused.restore().add("scheduler", &mut scheduler).apply();
        assert_refused!(restored, Error::InvalidArgument { .. }, text);
        assert_eq!(scheduler.steps(), 0, "{position}");
    }
    let whole = checkpoint(&json!(3.0), 5);
    whole.restore().add("scheduler", &mut scheduler).apply().unwrap();
    scheduler.advance(&mut opt).unwrap();
    assert_eq!(scheduler.steps(), 4);
}

#[test]
fn the_momentum_of_a_restored_optimizer_stays() {
    let mut opt = optimizer(true, &[0.1]);
    let mut scheduler = ExponentialLr { gamma: 0.5 }.build(&mut opt).unwrap();
    opt.set_momentum(0.7).unwrap();
    scheduler.advance(&mut opt).unwrap();
    let (mut new, mut new_opt) =
        resumed(&mut scheduler, &mut opt, &[0.3], ExponentialLr { gamma: 0.5 });
    new.advance(&mut new_opt).unwrap();
    assert_eq!(rates(&new_opt), [[0.025, 0.7]]);
}

#[test]
fn steps_whose_outcome_is_unknown_are_forgotten_by_a_restore() {
    for_each_device(|device| {
        let w = leaf(&[1.0], Kind::Float, device);
        let mut opt = Sgd::default().build(&[w.shallow_clone()], 1.0).unwrap();
        let mut scaler = GradScaler::new(device).unwrap();
        let mut scheduler = ExponentialLr { gamma: 0.5 }.build(&mut opt).unwrap();
        let mut checkpoint = saved(&mut scheduler);
        checkpoint.add("opt", &mut opt).unwrap();
        let mut step = |opt: &mut Optimizer, factor: f64| {
            opt.zero_grad().unwrap();
            scaler.backward(&(&w * factor).sum(None)).unwrap();
            let outcome = scaler.step(opt).unwrap();
            scaler.update().unwrap();
            outcome
        };
        // On a GPU, the last of these are pending.
        for _ in 0..3 {
            let outcome = step(&mut opt, f64::INFINITY);
            scheduler.step(&mut opt, &outcome).unwrap();
        }
        let restore = checkpoint.restore().add("scheduler", &mut scheduler);
        restore.add("opt", &mut opt).apply().unwrap();
        assert_eq!((scheduler.pending(), scheduler.skipped(), scheduler.steps()), (0, 0, 0));
        // Only the steps that follow count.
        for taken in 1..4 {
            let outcome = step(&mut opt, 1.0);
            assert!(outcome.is_stepped().unwrap());
            scheduler.step(&mut opt, &outcome).unwrap();
            assert_eq!((scheduler.skipped(), scheduler.steps()), (0, taken), "{device:?}");
            assert_eq!(opt.lr(0).unwrap(), 0.5f64.powi(taken as i32), "{device:?}");
        }
    });
}

/// A schedule of 10 steps after `steps` of them, resumed as one of 20.
fn prolonged(make: impl Fn(u64) -> Schedule, steps: u64) -> (Vec<f64>, Scheduler, Optimizer) {
    let mut opt = optimizer(true, &[0.1]);
    let mut short = make(10).build(&mut opt).unwrap();
    (0..steps).for_each(|_| short.advance(&mut opt).unwrap());
    let (long, opt) = resumed(&mut short, &mut opt, &[0.1], make(20));
    (short.lrs().to_vec(), long, opt)
}

/// What the page on checkpoints says of a run that is to train longer.
#[test]
fn a_longer_schedule_goes_on_from_the_saved_steps_and_rates() {
    let closed: [fn(u64) -> Schedule; 2] = [
        |total| LinearWithWarmup { warmup_steps: 2, total_steps: total }.into(),
        |total| OneCycleLr::new(0.1, total).into(),
    ];
    for make in closed {
        let (_, mut resumed, mut opt) = prolonged(make, 5);
        let mut whole_opt = optimizer(true, &[0.1]);
        let mut whole = make(20).build(&mut whole_opt).unwrap();
        (0..5).for_each(|_| whole.advance(&mut whole_opt).unwrap());
        for _ in 0..5 {
            resumed.advance(&mut opt).unwrap();
            whole.advance(&mut whole_opt).unwrap();
            assert_eq!((resumed.lrs(), resumed.steps()), (whole.lrs(), whole.steps()));
        }
    }
    let cosine = |t_max| CosineAnnealingLr { t_max, eta_min: 0.0 }.into();
    let (saved, mut resumed, mut opt) = prolonged(cosine, 5);
    assert_eq!(resumed.lrs(), saved);
    resumed.advance(&mut opt).unwrap();
    assert!(resumed.lrs()[0] < saved[0] && resumed.lrs()[0] > 0.9 * saved[0], "{saved:?}");
    // At its end it is 0, and stays there.
    let (saved, mut resumed, mut opt) = prolonged(cosine, 10);
    resumed.advance(&mut opt).unwrap();
    assert_eq!((saved[0], resumed.lrs()[0]), (0.0, 0.0));
}
