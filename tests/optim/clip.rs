//! Clipping.

use tch::{Device, Kind, Tensor};
use tch_amp::optim::{Sgd, clip_grad_norm, clip_grad_norm_error_if_nonfinite, clip_grad_value};
use tch_amp::{Error, GradScaler};

use crate::common::for_each_device;
use crate::{INF, NAN, leaf, set_grad, to_f64};

#[test]
fn the_norm_is_that_of_an_f64_loop() {
    for_each_device(|device| {
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
            for count in [1, 5, 16, 47, 200_000] {
                let w = leaf(&vec![0.0; count], kind, device);
                let other = leaf(&[0.0; 3], Kind::Float, device);
                let values: Vec<f64> = (0..count).map(|i| ((i * 37) % 101) as f64 / 16.0).collect();
                set_grad(&w, &values);
                set_grad(&other, &[0.25; 3]);
                let squares: f64 = to_f64(&w.grad()).iter().map(|g| g * g).sum();
                let want = (squares + 3.0 * 0.0625).sqrt();
                let all = [w.shallow_clone(), other.shallow_clone()];
                let norm = clip_grad_norm(&all, want / 4.0).unwrap();
                let off = norm.double_value(&[]) / want - 1.0;
                assert!(off.abs() < 1e-6, "{kind:?} {count}: {off}");
                // PyTorch adds 1e-6 to the norm before it divides.
                let want = want * want / (want + 1e-6);
                let after = clip_grad_norm(&all, INF).unwrap().double_value(&[]);
                let rounding = if kind.elt_size_in_bytes() == 2 { 4e-3 } else { 1e-6 };
                assert!((after * 4.0 / want - 1.0).abs() < rounding, "{kind:?} {count}: {after}");
            }
        }
    });
}

#[test]
fn gradients_within_the_limit_stay() {
    let w = leaf(&[0.0; 3], Kind::Float, Device::Cpu);
    set_grad(&w, &[0.1, 0.2, 0.3]);
    let before = to_f64(&w.grad());
    let _norm = clip_grad_norm(&[w.shallow_clone()], 1.0).unwrap();
    clip_grad_value(&[w.shallow_clone()], 0.3f32.into()).unwrap();
    assert_eq!(to_f64(&w.grad()), before);
}

#[test]
fn an_infinite_norm_is_an_error_where_it_is_asked_for() {
    for_each_device(|device| {
        for bad in [INF, NAN] {
            let w = leaf(&[0.0; 3], Kind::Float, device);
            let all = [w.shallow_clone()];
            set_grad(&w, &[1.0, bad, 2.0]);
            let error = clip_grad_norm_error_if_nonfinite(&all, 1.0).unwrap_err();
            assert!(matches!(error, Error::NonFiniteNorm { norm } if !norm.is_finite()));
            assert_eq!(to_f64(&w.grad())[2], 2.0, "not clipped");
            let norm = clip_grad_norm(&all, 1.0).unwrap();
            assert!(!norm.double_value(&[]).is_finite());
            set_grad(&w, &[3.0, 0.0, 4.0]);
            let norm = clip_grad_norm_error_if_nonfinite(&all, 1.0).unwrap();
            assert_eq!(norm.double_value(&[]), 5.0);
        }
    });
}

#[test]
fn a_transaction_can_refuse_an_infinite_norm() {
    let w = leaf(&[1.0; 2], Kind::Float, Device::Cpu);
    let mut opt = Sgd::default().build(vec![w.shallow_clone()], 1.0).unwrap();
    let scaler = GradScaler::new(Device::Cpu).unwrap();
    set_grad(&w, &[INF, 65536.0]);
    let mut unscaled = scaler.unscale(&mut opt).unwrap();
    let error = unscaled.clip_grad_norm_error_if_nonfinite(1.0).unwrap_err();
    assert!(matches!(error, Error::NonFiniteNorm { .. }));
    assert!(unscaled.step().unwrap().is_skipped().unwrap());
}

#[test]
fn folded_clipping_steps_as_clipping_first_does() {
    for_each_device(|device| {
        let run = |folded: bool| {
            let w = leaf(&[1.0; 4], Kind::Float, device);
            let mut opt = Sgd::default().build(vec![w.shallow_clone()], 0.3).unwrap();
            let mut scaler = GradScaler::new(device).unwrap();
            set_grad(&w, &[65536.0, 3e5, -1e5, 7e4]);
            let norm = if folded {
                let outcome = scaler.step_clip_norm(&mut opt, 0.7).unwrap();
                outcome.total_norm().unwrap().shallow_clone()
            } else {
                let mut unscaled = scaler.unscale(&mut opt).unwrap();
                let norm = unscaled.clip_grad_norm(0.7).unwrap();
                drop(unscaled.step().unwrap());
                norm
            };
            (to_f64(&norm), to_f64(&w))
        };
        let (folded, first) = (run(true), run(false));
        if device == Device::Cpu {
            assert_eq!(folded, first);
        }
        for (a, b) in folded.1.iter().zip(&first.1) {
            assert!((a - b).abs() < 1e-6, "{folded:?} {first:?}");
        }
    });
}

#[test]
fn limits_and_layouts_that_make_no_sense_are_refused() {
    let w = leaf(&[0.0; 2], Kind::Float, Device::Cpu);
    let all = [w.shallow_clone()];
    set_grad(&w, &[1.0, 2.0]);
    for limit in [-1.0, NAN] {
        assert!(matches!(clip_grad_norm(&all, limit), Err(Error::InvalidValue { .. })));
        assert!(matches!(clip_grad_value(&all, limit), Err(Error::InvalidValue { .. })));
    }
    assert_eq!(to_f64(&w.grad()), [1.0, 2.0]);
    assert_eq!(clip_grad_norm(&[], 1.0).unwrap().double_value(&[]), 0.0);
    let empty = Tensor::zeros([0], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    empty.sum(Kind::Float).backward();
    assert_eq!(clip_grad_norm(&[empty], 1.0).unwrap().double_value(&[]), 0.0);
}

#[test]
fn a_parameter_that_is_there_twice_counts_once() {
    let w = leaf(&[0.0; 2], Kind::Float, Device::Cpu);
    set_grad(&w, &[3.0, 4.0]);
    let norm = clip_grad_norm(&[w.shallow_clone(), w.shallow_clone()], 2.5).unwrap();
    assert_eq!(norm.double_value(&[]), 5.0);
    let got = to_f64(&w.grad());
    assert!((got[0] - 1.5).abs() < 1e-5 && (got[1] - 2.0).abs() < 1e-5, "{got:?}");
}
