//! Skipped steps do not advance a schedule.

use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::optim::Sgd;
use tch_amp::schedule::{ExponentialLr, Schedule};

use crate::common::rng::Rng;
use crate::common::tensors::leaf;

#[test]
fn a_schedule_advances_by_the_steps_that_were_taken() {
    crate::common::for_each_device(|device| {
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
