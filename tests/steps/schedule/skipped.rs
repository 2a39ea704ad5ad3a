//! Skipped steps do not advance a schedule, however late their outcomes arrive.

use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::optim::Sgd;
use tch_amp::schedule::{ExponentialLr, Schedule};

use super::{optimizer, optimizer_on, rates, schedule};
use testkit::rng::Rng;
use testkit::tensors::leaf;

#[test]
fn a_schedule_advances_by_the_steps_that_were_taken() {
    testkit::for_each_device(|device| {
        let w = leaf(&[1.0], Kind::Float, device);
        let mut opt = Sgd::default().build(&[w.shallow_clone()], 1.0).unwrap();
        let mut scaler = GradScaler::new(device).unwrap();
        let mut scheduler = ExponentialLr { gamma: 0.5 }.build(&mut opt).unwrap();
        let mut rng = Rng::new(3);
        let mut taken = 0;
        for step in 0..40 {
            let is_bad = rng.one_in(4);
            opt.zero_grad().unwrap();
            // A step without gradients counts neither way.
            if !rng.one_in(5) {
                let factor = if is_bad { f64::INFINITY } else { 1.0 };
                scaler.backward(&(&w * factor).sum(None)).unwrap();
                taken += u64::from(!is_bad);
            }
            let outcome = scaler.step(&mut opt).unwrap();
            if outcome.has_no_gradients() {
                scheduler.step(&mut opt, &outcome).unwrap();
                continue;
            }
            scaler.update().unwrap();
            // The host has the answer, which a GPU would send a little later.
            outcome.is_stepped().unwrap();
            scheduler.step(&mut opt, &outcome).unwrap();
            assert_eq!(scheduler.steps(), taken, "{device:?}, step {step}");
            assert_eq!(opt.lr(0).unwrap(), 0.5f64.powi(taken as i32));
        }
        assert!(taken > 10 && taken < 35);
    });
}

/// A random training beside one whose schedule is told of the steps that were taken alone, as by a host that asks for
/// each outcome. On the CPU outcomes are known at once, and on a GPU later, or only when the host waits.
fn compare_with_known_outcomes(device: Device, seed: u64) {
    let mut rng = Rng::new(seed);
    let (lrs, adam) = ([0.5, 0.125], rng.one_in(2));
    let schedule = schedule(&mut rng, lrs.len());
    let (mut opt, mut twin) = (optimizer_on(device, adam, &lrs), optimizer(adam, &lrs));
    let mut scheduler = schedule.clone().build(&mut opt).unwrap();
    let mut plain = schedule.build(&mut twin).unwrap();
    let mut scaler = GradScaler::new(device).unwrap();
    let mut skipped = 0;
    let ends = 20 + rng.below(30);
    for step in 0..=ends {
        // Several steps in a row are skipped, so that several are taken back together.
        let (is_bad, is_empty) = (rng.one_in(2), rng.one_in(8));
        opt.zero_grad().unwrap();
        if !is_empty {
            let factor = if is_bad { f64::INFINITY } else { 1.0 };
            let sums = opt.trainable_variables().into_iter().map(|w| w.sum(Kind::Float));
            scaler.backward(&(sums.sum::<Tensor>() * factor)).unwrap();
        }
        let outcome = scaler.step(&mut opt).unwrap();
        if !is_empty {
            scaler.update().unwrap();
        }
        // Rates that the program sets before the schedule is told of a step.
        for group in 0..lrs.len() {
            if rng.one_in(4) {
                let lr = 0.01 + rng.below(1000) as f64 / 3000.0;
                opt.set_lr_group(group, lr).unwrap();
                twin.set_lr_group(group, lr).unwrap();
            }
        }
        scheduler.step(&mut opt, &outcome).unwrap();
        if !is_bad && !is_empty {
            plain.advance(&mut twin).unwrap();
        }
        skipped += u64::from(is_bad && !is_empty);
        if rng.one_in(9) || step == ends {
            scheduler.catch_up().unwrap();
            assert_eq!(scheduler.pending(), 0);
        }
        if scheduler.pending() == 0 {
            let ours = (scheduler.lrs(), scheduler.steps(), scheduler.skipped());
            // The other schedule is not told of a rate that was set before a step that was skipped.
            let lrs: Vec<_> = rates(&twin).iter().map(|rates| rates[0]).collect();
            let theirs = (&lrs[..], plain.steps(), skipped);
            assert_eq!(ours, theirs, "step {step} of {seed} on {device:?}");
        }
    }
    scheduler.advance(&mut opt).unwrap();
    plain.advance(&mut twin).unwrap();
    assert_eq!(rates(&opt), rates(&twin), "the end of {seed} on {device:?}");
}

#[test]
fn a_schedule_that_learns_late_what_was_skipped_comes_to_the_same_rates() {
    testkit::for_each_device(|device| {
        (0..60).for_each(|seed| compare_with_known_outcomes(device, seed));
    });
}

#[test]
fn a_rate_that_is_set_between_two_open_steps_stays_if_both_are_skipped() {
    testkit::for_each_device(|device| {
        for both in [false, true] {
            let mut opt = optimizer_on(device, false, &[1.0]);
            let mut scaler = GradScaler::new(device).unwrap();
            let mut scheduler = ExponentialLr { gamma: 0.5 }.build(&mut opt).unwrap();
            for (set, is_bad) in [(None, true), (Some(3.0), both)] {
                set.into_iter().for_each(|lr| opt.set_lr(lr).unwrap());
                let factor = if is_bad { f64::INFINITY } else { 1.0 };
                let loss = opt.trainable_variables()[0].sum(Kind::Float) * factor;
                let outcome = scaler.backward_step(&mut opt, &loss).unwrap();
                scheduler.step(&mut opt, &outcome).unwrap();
            }
            scheduler.catch_up().unwrap();
            let taken = if both { 0 } else { 1 };
            assert_eq!((scheduler.steps(), scheduler.skipped()), (taken, 2 - taken));
            assert_eq!(scheduler.lrs(), [if both { 3.0 } else { 1.5 }], "{device:?}");
            scheduler.advance(&mut opt).unwrap();
            assert_eq!(opt.lr(0).unwrap(), if both { 1.5 } else { 0.75 }, "{device:?}");
        }
    });
}

#[test]
fn without_an_optimizer_the_program_sets_the_rates() {
    let w = leaf(&[1.0], Kind::Float, Device::Cpu);
    let mut opt = Sgd::default().build(&[w.shallow_clone()], 1.0).unwrap();
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    let mut scheduler =
        Schedule::from(ExponentialLr { gamma: 0.5 }).build_for_lrs(&[1.0, 4.0]).unwrap();
    for gradient in [1.0, f64::NAN, 1.0] {
        opt.zero_grad().unwrap();
        scaler.backward(&(&w * Tensor::from(gradient)).sum(None)).unwrap();
        scheduler.record(&scaler.step(&mut opt).unwrap()).unwrap();
        scaler.update().unwrap();
    }
    assert_eq!(scheduler.lrs(), [0.25, 1.0]);
    assert_eq!(opt.lr(0).unwrap(), 1.0);
    assert_eq!((scheduler.steps(), scheduler.skipped(), scheduler.pending()), (2, 1, 0));
}
