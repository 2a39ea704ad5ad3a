//! Tests of paths of unscaling that the public interface does not reach on its own.

use tch::{Device, Kind, Tensor};

use crate::ffi::{FoundInf, ScaleRule, ScaleUpdate, Unscaling, gradients_unscale, scales_update};

const GENERIC: Unscaling = Unscaling { check_only: false, recheck: false, generic: true };

fn with_gradient(values: &[f64], kind: Kind) -> Tensor {
    let factors = Tensor::from_slice(values).to_kind(kind);
    let w = factors.zeros_like().set_requires_grad(true);
    (&w * factors).sum(kind).backward();
    w
}

fn unscale(w: &Tensor, scale: f32, unscaling: Unscaling) -> (Option<bool>, Vec<f64>) {
    let found = gradients_unscale([w], &Tensor::from(scale), 1, unscaling).unwrap();
    let [FoundInf { tensor, host: found }] = found.try_into().unwrap();
    assert_eq!(Some(tensor.double_value(&[]) == 1.0), found, "the tensor and the answer agree");
    (found, Vec::try_from(w.grad().to_kind(Kind::Double)).unwrap())
}

/// Compares the path for devices and dtypes without a kernel with the kernel.
#[test]
fn plain_operations_give_the_kernels_numbers() {
    let values: Vec<f64> = (0..1000).map(|i| 0.37 * f64::from(i) - 100.0).collect();
    for kind in [Kind::BFloat16, Kind::Float, Kind::Double, Kind::Half] {
        for bad in [None, Some(f64::NAN), Some(f64::INFINITY), Some(f64::NEG_INFINITY)] {
            let mut values = values.clone();
            values[500] = bad.unwrap_or(values[500]);
            let make = || with_gradient(&values, kind);
            let (found, got) = unscale(&make(), 3.0, GENERIC);
            let (want_found, want) = unscale(&make(), 3.0, Unscaling::new(false, false));
            assert_eq!((found, found), (want_found, Some(bad.is_some())), "{kind:?} {bad:?}");
            // The bits of a NaN do not matter.
            let bits = |all: Vec<f64>| {
                let all = all.into_iter().map(|x| if x.is_nan() { f64::NAN } else { x });
                all.map(f64::to_bits).collect::<Vec<_>>()
            };
            assert_eq!(bits(got), bits(want), "{kind:?} {bad:?}");
        }
    }
}

#[test]
fn plain_operations_find_what_only_the_multiplication_made_infinite() {
    let tiny = 2f32.powi(-100);
    for recheck in [false, true] {
        for generic in [false, true] {
            let w = with_gradient(&[2f64.powi(40)], Kind::Float);
            let unscaling = Unscaling { generic, ..Unscaling::new(false, recheck) };
            assert_eq!(unscale(&w, tiny, unscaling).0, Some(recheck));
        }
    }
}

#[test]
fn an_empty_gradient_passes_every_path() {
    let recheck = Unscaling::new(false, true);
    for unscaling in [Unscaling::new(false, false), GENERIC, recheck] {
        let w = Tensor::zeros([0], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        w.sum(None).backward();
        assert_eq!(unscale(&w, 2.0, unscaling), (Some(false), vec![]));
    }
}

#[test]
fn libtorchs_message_comes_without_its_backtrace() {
    let update = |found_infs: &[&Tensor]| {
        let (scale, tracker) = (&Tensor::new(), &Tensor::new());
        let update = ScaleUpdate { scale, tracker, counts: None, found_infs, rule: rule() };
        scales_update(&[update]).unwrap_err().to_string()
    };
    assert_eq!(update(&[]), "libtorch: no found_inf tensor");
    let error = update(&[&Tensor::from(0f32)]);
    assert!(!error.contains("frame #"), "{error}");
}

fn rule() -> ScaleRule {
    let (growth_factor, backoff_factor, growth_interval) = (2.0, 0.5, 1);
    ScaleRule {
        growth_factor,
        backoff_factor,
        growth_interval,
        min_scale: 1.0,
        max_scale: 2.0,
        hysteresis: 1,
        tolerance: 0.0,
        consecutive: true,
    }
}
