//! Schedules continue from a checkpoint as if they had not been interrupted.

use serde_json::json;
use tch::Kind;
use tch_amp::checkpoint::Checkpoint;
use tch_amp::optim::{Optimizer, Sgd};
use tch_amp::schedule::{
    CosineAnnealingLr, CosineAnnealingWarmRestarts, ExponentialLr, LinearWithWarmup, OneCycleLr,
    ReduceLrOnPlateau, Schedule, Scheduler,
};
use tch_amp::{Error, GradScaler};

use super::{optimizer, rates, schedule};
use testkit::for_each_device;
use testkit::rng::Rng;
use testkit::tensors::leaf;

fn saved(scheduler: &mut Scheduler) -> Checkpoint {
    let mut checkpoint = Checkpoint::new();
    checkpoint.add("scheduler", scheduler).unwrap();
    checkpoint
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
        let mut checkpoint = saved(&mut whole);
        checkpoint.add("opt", &mut opt).unwrap();

        let mut new_opt = optimizer(true, &lrs);
        let mut new = schedule.clone().build(&mut new_opt).unwrap();
        let restore = checkpoint.restore().add("scheduler", &mut new);
        restore.add("opt", &mut new_opt).apply().unwrap();
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
        let mut checkpoint = Checkpoint::new();
        checkpoint.add("plateau", &mut whole).unwrap();
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
    let error = groups.restore().add("scheduler", &mut scheduler).apply().unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
    let cycle =
        CosineAnnealingWarmRestarts { t_0: 5, t_mult: 1, eta_min: 0.0 }.build(&mut one).unwrap();
    let cycle = saved(&mut { cycle });
    let error = cycle.restore().add("scheduler", &mut scheduler).apply().unwrap_err();
    assert!(matches!(error, Error::Checkpoint(_)), "{error:?}");
    assert_eq!((scheduler.lrs(), scheduler.steps()), (&[0.05][..], 1));
}

#[test]
fn a_position_outside_of_its_cycle_is_refused() {
    let mut opt = optimizer(false, &[0.1]);
    let mut scheduler =
        CosineAnnealingWarmRestarts { t_0: 5, t_mult: 1, eta_min: 0.0 }.build(&mut opt).unwrap();
    for (position, length) in [(u64::MAX, u64::MAX), (5, 5), (0, 0)] {
        let state = json!({
            "last_epoch": 3, "base_lrs": [0.1], "_last_lr": [0.1], "T_cur": position, "T_i": length,
        });
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_value("scheduler", &state).unwrap();
        let error = checkpoint.restore().add("scheduler", &mut scheduler).apply().unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
    }
    scheduler.advance(&mut opt).unwrap();
    assert_eq!(scheduler.steps(), 1);
}

/// The state of a schedule of Python for three groups, of which the options here know two.
#[test]
fn a_state_of_more_groups_is_refused() {
    let mut opt = optimizer(false, &[0.5, 0.25]);
    let options = OneCycleLr { max_lr: vec![0.5, 0.25], ..OneCycleLr::new(0.5, 20) };
    let mut scheduler = options.build(&mut opt).unwrap();
    let mut state = saved(&mut scheduler).value::<serde_json::Value>("scheduler").unwrap();
    state["base_lrs"] = json!([0.02, 0.01, 0.004]);
    state["_step_count"] = json!(1);
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_value("scheduler", &state).unwrap();
    let error = checkpoint.restore().add("scheduler", &mut scheduler).apply().unwrap_err();
    assert!(error.to_string().contains("of 3 groups, and the optimizer 2"), "{error}");
}

/// Python's position is a float after `step(epoch)` with one.
#[test]
fn a_position_that_is_a_whole_float_is_read_and_a_fraction_refused() {
    let mut opt = optimizer(false, &[0.1]);
    let mut scheduler =
        CosineAnnealingWarmRestarts { t_0: 5, t_mult: 1, eta_min: 0.0 }.build(&mut opt).unwrap();
    for (position, text) in [(3.0, None), (2.5, Some("whole steps")), (-1.0, Some("whole steps"))] {
        let state = json!({
            "last_epoch": 3, "base_lrs": [0.1], "_last_lr": [0.1], "T_cur": position, "T_i": 5,
        });
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_value("scheduler", &state).unwrap();
        let restored = checkpoint.restore().add("scheduler", &mut scheduler).apply();
        let error = restored.err().map(|error| error.to_string());
        assert_eq!(error.is_some(), text.is_some(), "{position}: {error:?}");
        let text = text.unwrap_or_default();
        assert!(error.unwrap_or_default().contains(text), "{position}");
    }
}

#[test]
fn the_momentum_of_a_restored_optimizer_stays() {
    let mut opt = optimizer(true, &[0.1]);
    let mut scheduler = ExponentialLr { gamma: 0.5 }.build(&mut opt).unwrap();
    opt.set_momentum(0.7).unwrap();
    scheduler.advance(&mut opt).unwrap();
    let mut checkpoint = saved(&mut scheduler);
    checkpoint.add("opt", &mut opt).unwrap();
    let mut new_opt = optimizer(true, &[0.3]);
    let mut new = ExponentialLr { gamma: 0.5 }.build(&mut new_opt).unwrap();
    let restore = checkpoint.restore().add("scheduler", &mut new);
    restore.add("opt", &mut new_opt).apply().unwrap();
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
    let mut checkpoint = saved(&mut short);
    checkpoint.add("opt", &mut opt).unwrap();
    let mut opt = optimizer(true, &[0.1]);
    let mut long = make(20).build(&mut opt).unwrap();
    checkpoint.restore().add("scheduler", &mut long).add("opt", &mut opt).apply().unwrap();
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
