//! Schedules that are refused, and what is unchanged then.

use tch::{Device, Kind};
use tch_amp::Error;
use tch_amp::optim::Adagrad;
use tch_amp::schedule::{
    Annealing, ChainedScheduler, ConstantLr, CosineAnnealingLr, CosineAnnealingWarmRestarts,
    ExponentialLr, InverseSqrtLr, LinearLr, LinearWithWarmup, OneCycleLr, PolynomialLr,
    ReduceLrOnPlateau, Schedule, SequentialLr, StepLr,
};

use super::{optimizer, rates};
use crate::common::tensors::leaf;

#[test]
fn options_outside_their_range_are_named_and_the_optimizer_is_unchanged() {
    let good = || ExponentialLr::new(0.5);
    let cycle = || OneCycleLr::new(0.1, 100);
    let cases: Vec<(Schedule, &str)> = vec![
        (StepLr::new(0).into(), "step_size"),
        (StepLr::new(2).gamma(-0.1).into(), "gamma"),
        (ExponentialLr::new(f64::NAN).into(), "gamma"),
        (ConstantLr::default().factor(0.0).into(), "factor"),
        (ConstantLr::default().total_iters(0).into(), "total_iters"),
        (LinearLr::default().start_factor(1.5).into(), "start_factor"),
        (LinearLr::default().end_factor(-0.5).into(), "end_factor"),
        (LinearLr::default().total_iters(0).into(), "total_iters"),
        (PolynomialLr::default().power(f64::INFINITY).into(), "power"),
        (CosineAnnealingLr::new(0).into(), "t_max"),
        (CosineAnnealingLr::new(5).eta_min(-1.0).into(), "eta_min"),
        (CosineAnnealingWarmRestarts::new(0).into(), "t_0"),
        (CosineAnnealingWarmRestarts::new(1).t_mult(0).into(), "t_mult"),
        (LinearWithWarmup::new(3, 0).into(), "total_steps"),
        (InverseSqrtLr::new(0).into(), "warmup_steps"),
        (OneCycleLr::new(0.1, 0).into(), "total_steps"),
        (cycle().max_lr(vec![0.1; 3]).into(), "max_lr"),
        (cycle().max_lr(vec![]).into(), "max_lr"),
        (cycle().max_lr(vec![-0.1]).into(), "max_lr"),
        (cycle().div_factor(0.0).into(), "div_factor"),
        (cycle().final_div_factor(f64::NAN).into(), "final_div_factor"),
        (cycle().pct_start(1.1).into(), "pct_start"),
        // PyTorch raises a ZeroDivisionError.
        (cycle().pct_start(0.01).into(), "pct_start"),
        (cycle().base_momentum(1.0).into(), "base_momentum"),
        (cycle().max_momentum(-0.5).into(), "max_momentum"),
        (SequentialLr::new(good()).then_at(0, good()).into(), "milestones"),
        (SequentialLr::new(good()).then_at(4, good()).then_at(4, good()).into(), "milestones"),
        (SequentialLr::new(good()).then_at(4, SequentialLr::new(good())).into(), "schedules"),
        (SequentialLr::new(ChainedScheduler::new(good())).into(), "schedules"),
        (ChainedScheduler::new(good()).and(ChainedScheduler::new(good())).into(), "schedules"),
        (ChainedScheduler::new(good()).and(StepLr::new(0)).into(), "step_size"),
    ];
    for (schedule, argument) in cases {
        let mut opt = optimizer(true, &[0.1, 0.2]);
        let before = rates(&opt);
        let error = schedule.clone().build(&mut opt).unwrap_err();
        let named = matches!(error, Error::InvalidArgument { name, .. } if name == argument);
        assert!(named, "{schedule:?}: {error:?}");
        assert_eq!(rates(&opt), before);
    }
    for (options, argument) in [
        (ReduceLrOnPlateau::default().factor(1.0), "factor"),
        (ReduceLrOnPlateau::default().threshold(-1.0), "threshold"),
        (ReduceLrOnPlateau::default().min_lr(f64::NAN), "min_lr"),
        (ReduceLrOnPlateau::default().eps(-1.0), "eps"),
    ] {
        let error = options.build(&optimizer(false, &[0.1])).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { name, .. } if name == argument));
    }
}

#[test]
fn sequences_from_text_are_checked() {
    for (text, argument) in [
        (r#"{"schedule": "SequentialLr", "schedules": [], "milestones": []}"#, "milestones"),
        (r#"{"schedule": "ChainedScheduler", "schedules": []}"#, "schedules"),
    ] {
        let schedule: Schedule = serde_json::from_str(text).unwrap();
        let error = schedule.build_for_lrs(&[0.1]).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { name, .. } if name == argument));
    }
}

#[test]
fn momentum_is_cycled_only_where_there_is_one() {
    let mut adagrad =
        Adagrad::default().build(&[leaf(&[1.0], Kind::Float, Device::Cpu)], 0.1).unwrap();
    let cycle = OneCycleLr::new(0.5, 10);
    let error = cycle.clone().build(&mut adagrad).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { name: "cycle_momentum", .. }), "{error:?}");
    assert_eq!(adagrad.lr(0).unwrap(), 0.1);
    let error = Schedule::from(cycle.clone()).build_for_lrs(&[0.1]).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { name: "cycle_momentum", .. }), "{error:?}");
    cycle.cycle_momentum(false).build(&mut adagrad).unwrap();
    assert!((adagrad.lr(0).unwrap() - 0.5 / 25.0).abs() < 1e-15);
}

#[test]
fn learning_rates_that_no_optimizer_takes_are_refused() {
    let schedule = || Schedule::from(ExponentialLr::new(0.5));
    for lrs in [&[][..], &[-0.1], &[0.1, f64::NAN], &[f64::INFINITY]] {
        let error = schedule().build_for_lrs(lrs).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { name: "lrs", .. }), "{lrs:?}");
    }
}

#[test]
fn a_cycle_that_has_ended_is_an_error_and_nothing_changes() {
    let mut opt = optimizer(false, &[0.1]);
    let cycle = OneCycleLr::new(0.5, 7).anneal_strategy(Annealing::Linear);
    let mut scheduler = cycle.build(&mut opt).unwrap();
    (0..6).for_each(|_| scheduler.advance(&mut opt).unwrap());
    let before = rates(&opt);
    assert!((before[0][0] - 0.5 / 25.0 / 1e4).abs() < 1e-15);
    // The loop advances after its last step, too.
    scheduler.advance(&mut opt).unwrap();
    assert_eq!(rates(&opt), before);
    let error = scheduler.advance(&mut opt).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { name: "total_steps", .. }), "{error:?}");
    assert_eq!((rates(&opt), scheduler.steps()), (before, 7));
}

#[test]
fn groups_that_are_added_later_are_refused() {
    let mut opt = optimizer(false, &[0.1]);
    let mut scheduler = ExponentialLr::new(0.5).build(&mut opt).unwrap();
    let later = leaf(&[1.0], Kind::Float, Device::Cpu);
    opt.add_param_group(vec![("later", later)]).unwrap();
    let error = scheduler.advance(&mut opt).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { name: "optimizer", .. }), "{error:?}");
    assert_eq!((opt.lr(0).unwrap(), scheduler.steps()), (0.1, 0));
}
