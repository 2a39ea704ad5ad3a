//! Schedules that are refused, and what is unchanged then.

use tch::{Device, Kind};
use tch_amp::Error;
use tch_amp::average::{Averaging, Ema};
use tch_amp::optim::Adagrad;
use tch_amp::schedule::{
    Annealing, ChainedScheduler, ConstantLr, CosineAnnealingLr, CosineAnnealingWarmRestarts,
    ExponentialLr, InverseSqrtLr, LinearLr, LinearWithWarmup, OneCycleLr, PolynomialLr,
    ReduceLrOnPlateau, Schedule, SequentialLr, StepLr,
};

use super::{optimizer, rates};
use testkit::assert_refused;
use testkit::tensors::leaf;

#[test]
fn options_outside_their_range_are_named_and_the_optimizer_is_unchanged() {
    let good = || ExponentialLr { gamma: 0.5 };
    let cycle = || OneCycleLr::new(0.1, 100);
    let cases: Vec<(Schedule, &str)> = vec![
        (StepLr { step_size: 0, gamma: 0.1 }.into(), "step_size"),
        (StepLr { step_size: 2, gamma: -0.1 }.into(), "gamma"),
        (ExponentialLr { gamma: f64::NAN }.into(), "gamma"),
        (ConstantLr { factor: 0.0, ..Default::default() }.into(), "factor"),
        (ConstantLr { total_iters: 0, ..Default::default() }.into(), "total_iters"),
        (LinearLr { start_factor: 1.5, ..Default::default() }.into(), "start_factor"),
        (LinearLr { end_factor: -0.5, ..Default::default() }.into(), "end_factor"),
        (LinearLr { total_iters: 0, ..Default::default() }.into(), "total_iters"),
        (PolynomialLr { power: f64::INFINITY, ..Default::default() }.into(), "power"),
        (CosineAnnealingLr { t_max: 0, eta_min: 0.0 }.into(), "t_max"),
        (CosineAnnealingLr { t_max: 5, eta_min: -1.0 }.into(), "eta_min"),
        (CosineAnnealingWarmRestarts { t_0: 0, t_mult: 1, eta_min: 0.0 }.into(), "t_0"),
        (CosineAnnealingWarmRestarts { t_0: 1, t_mult: 0, eta_min: 0.0 }.into(), "t_mult"),
        (LinearWithWarmup { warmup_steps: 3, total_steps: 0 }.into(), "total_steps"),
        (InverseSqrtLr { warmup_steps: 0 }.into(), "warmup_steps"),
        (OneCycleLr::new(0.1, 0).into(), "total_steps"),
        (OneCycleLr { max_lr: vec![0.1; 3], ..cycle() }.into(), "max_lr"),
        (OneCycleLr { max_lr: vec![], ..cycle() }.into(), "max_lr"),
        (OneCycleLr { max_lr: vec![-0.1], ..cycle() }.into(), "max_lr"),
        (OneCycleLr { div_factor: 0.0, ..cycle() }.into(), "div_factor"),
        (OneCycleLr { final_div_factor: f64::NAN, ..cycle() }.into(), "final_div_factor"),
        (OneCycleLr { pct_start: 1.1, ..cycle() }.into(), "pct_start"),
        // PyTorch raises a ZeroDivisionError.
        (OneCycleLr { pct_start: 0.01, ..cycle() }.into(), "pct_start"),
        (OneCycleLr { base_momentum: 1.0, ..cycle() }.into(), "base_momentum"),
        (OneCycleLr { max_momentum: -0.5, ..cycle() }.into(), "max_momentum"),
        (SequentialLr::new(good()).then_at(0, good()).into(), "milestones"),
        (SequentialLr::new(good()).then_at(4, good()).then_at(4, good()).into(), "milestones"),
        (SequentialLr::new(good()).then_at(4, SequentialLr::new(good())).into(), "schedules"),
        (SequentialLr::new(ChainedScheduler::new(good())).into(), "schedules"),
        (ChainedScheduler::new(good()).and(ChainedScheduler::new(good())).into(), "schedules"),
        (
            ChainedScheduler::new(good()).and(StepLr { step_size: 0, gamma: 0.1 }).into(),
            "step_size",
        ),
    ];
    for (schedule, argument) in cases {
        let mut opt = optimizer(true, &[0.1, 0.2]);
        let before = rates(&opt);
        let result = schedule.build(&mut opt);
        assert_refused!(result, Error::InvalidArgument { name, .. } if name == argument);
        assert_eq!(rates(&opt), before);
    }
    for (options, argument) in [
        (ReduceLrOnPlateau { factor: 1.0, ..Default::default() }, "factor"),
        (ReduceLrOnPlateau { threshold: -1.0, ..Default::default() }, "threshold"),
        (ReduceLrOnPlateau { min_lr: f64::NAN, ..Default::default() }, "min_lr"),
        (ReduceLrOnPlateau { eps: -1.0, ..Default::default() }, "eps"),
    ] {
        let result = options.build(&optimizer(false, &[0.1]));
        assert_refused!(result, Error::InvalidArgument { name, .. } if name == argument);
    }
}

#[test]
fn sequences_from_text_are_checked() {
    for (text, argument) in [
        (r#"{"schedule": "SequentialLr", "schedules": [], "milestones": []}"#, "milestones"),
        (r#"{"schedule": "ChainedScheduler", "schedules": []}"#, "schedules"),
    ] {
        let schedule: Schedule = serde_json::from_str(text).unwrap();
        let result = schedule.build_for_lrs(&[0.1]);
        assert_refused!(result, Error::InvalidArgument { name, .. } if name == argument);
    }
}

/// Also in a build of the whole workspace, in which serde_json keeps the numbers of a text as they are there.
#[test]
fn schedules_and_averagings_are_read_from_their_text() {
    let cosine = CosineAnnealingLr { t_max: 10, eta_min: 1e-5 };
    let linear = LinearLr { start_factor: 0.25, end_factor: 0.5, total_iters: 8 };
    let schedule: Schedule = SequentialLr::new(linear).then_at(8, cosine).into();
    let text = serde_json::to_string(&schedule).unwrap();
    assert!(text.starts_with(r#"{"schedule":"SequentialLr","#), "{text}");
    assert_eq!(serde_json::from_str::<Schedule>(&text).unwrap(), schedule);
    let averaging = Averaging::from(Ema { decay: 0.75, ..Ema::default() });
    let text = serde_json::to_string(&averaging).unwrap();
    assert!(text.starts_with(r#"{"averaging":"Ema","decay":0.75,"#), "{text}");
    assert_eq!(serde_json::from_str::<Averaging>(&text).unwrap(), averaging);
}

#[test]
fn momentum_is_cycled_only_where_there_is_one() {
    let mut adagrad =
        Adagrad::default().build(&[leaf(&[1.0], Kind::Float, Device::Cpu)], 0.1).unwrap();
    let cycle = OneCycleLr::new(0.5, 10);
    let built = cycle.clone().build(&mut adagrad);
    assert_refused!(built, Error::InvalidArgument { name: "cycle_momentum", .. });
    assert_eq!(adagrad.lr(0).unwrap(), 0.1);
    let built = Schedule::from(cycle.clone()).build_for_lrs(&[0.1]);
    assert_refused!(built, Error::InvalidArgument { name: "cycle_momentum", .. });
    OneCycleLr { cycle_momentum: false, ..cycle }.build(&mut adagrad).unwrap();
    assert!((adagrad.lr(0).unwrap() - 0.5 / 25.0).abs() < 1e-15);
}

#[test]
fn learning_rates_that_no_optimizer_takes_are_refused() {
    let schedule = || Schedule::from(ExponentialLr { gamma: 0.5 });
    for lrs in [&[][..], &[-0.1], &[0.1, f64::NAN], &[f64::INFINITY]] {
        let built = schedule().build_for_lrs(lrs);
        assert_refused!(built, Error::InvalidArgument { name: "lrs", .. });
    }
}

#[test]
fn a_cycle_that_has_ended_is_an_error_and_nothing_changes() {
    let mut opt = optimizer(false, &[0.1]);
    let cycle = OneCycleLr { anneal_strategy: Annealing::Linear, ..OneCycleLr::new(0.5, 7) };
    let mut scheduler = cycle.build(&mut opt).unwrap();
    (0..6).for_each(|_| scheduler.advance(&mut opt).unwrap());
    let before = rates(&opt);
    assert!((before[0][0] - 0.5 / 25.0 / 1e4).abs() < 1e-15);
    // The loop advances after its last step, too.
    scheduler.advance(&mut opt).unwrap();
    assert_eq!(rates(&opt), before);
    let result = scheduler.advance(&mut opt);
    assert_refused!(result, Error::InvalidArgument { name: "total_steps", .. });
    assert_eq!((rates(&opt), scheduler.steps()), (before, 7));
}

#[test]
fn groups_that_are_added_later_are_refused() {
    let mut opt = optimizer(false, &[0.1]);
    let mut scheduler = ExponentialLr { gamma: 0.5 }.build(&mut opt).unwrap();
    let later = leaf(&[1.0], Kind::Float, Device::Cpu);
    opt.add_param_group(vec![("later", later)]).unwrap();
    let result = scheduler.advance(&mut opt);
    assert_refused!(result, Error::InvalidArgument { name: "optimizer", .. });
    assert_eq!((opt.lr(0).unwrap(), scheduler.steps()), (0.1, 0));
}
