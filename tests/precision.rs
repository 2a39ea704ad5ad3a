//! The measured speed of a device in each precision.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use tch::{Device, Kind};
use tch_amp::precision::{MatmulPrecision, ReducedPrecisionReduction, bf16_is_native};
use tch_amp::{Amp, Error, autocast};

use testkit::gpus;
use testkit::simulation::{is_model, rounds_as_the_cpu};

#[test]
fn advice_is_measured_once_and_is_what_auto_decides_by() {
    // What stands for a GPU computes a large product in fp16 for a minute.
    let real = gpus().into_iter().filter(|_| !rounds_as_the_cpu());
    for device in std::iter::once(Device::Cpu).chain(real) {
        // A region, which would cast the matrices of f32, makes no difference.
        let advice = autocast(device, || Amp::advice(device)).unwrap().unwrap();
        let dtypes: Vec<_> = advice.speedups.iter().map(|(dtype, _)| *dtype).collect();
        let measured = [Kind::BFloat16, Kind::Half];
        assert_eq!(dtypes, measured[..if device == Device::Cpu { 1 } else { 2 }]);
        for (_, [low, median, high]) in &advice.speedups {
            assert!(
                0.0 < *low && low <= median && median <= high && high.is_finite(),
                "{advice:?}"
            );
        }
        // A second measurement would hardly give the same numbers, so the result is cached.
        assert_eq!(Amp::advice(device).unwrap(), advice);
        let auto = Amp::Auto.on(device).unwrap();
        assert_eq!((auto.dtype(), auto.device()), (advice.dtype, advice.device));
        let (auto, advice) = (auto.to_string(), advice.to_string());
        let (_, reason) = auto.split_once(": ").unwrap();
        let undecided = format!("no advice for {device:?}: {reason}");
        assert!([format!("train in {auto}"), undecided].contains(&advice), "{advice}");
    }
}

/// The simulated device 0 has instructions for bf16, and the other one has none.
#[test]
fn a_device_says_whether_it_computes_in_bf16() {
    for device in gpus() {
        if is_model() {
            assert_eq!(bf16_is_native(device).unwrap(), device == Device::Cuda(0));
        }
        bf16_is_native(device).unwrap();
    }
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if flags.contains("flags") {
        assert_eq!(bf16_is_native(Device::Cpu).unwrap(), flags.contains(" avx512_bf16"));
    }
}

#[test]
fn the_precision_of_products_is_that_of_the_last_guard_that_lives() {
    use MatmulPrecision::{High, Highest, Medium};
    let before = Medium.set().unwrap();
    {
        let _outer = Highest.enter().unwrap();
        let inner = High.enter().unwrap();
        drop(inner);
        assert_eq!(Highest.set().unwrap(), Highest);
    }
    assert_eq!(before.set().unwrap(), Medium);
}

#[test]
fn half_precision_sums_are_those_of_the_last_guard_that_lives() {
    use ReducedPrecisionReduction::{Allowed, Disallowed};
    {
        let _outer = Disallowed.enter().unwrap();
        let inner = Allowed.enter().unwrap();
        assert_eq!(Allowed.set().unwrap(), Allowed);
        drop(inner);
        assert_eq!(Disallowed.set().unwrap(), Disallowed);
    }
    assert_eq!(Allowed.set().unwrap(), Allowed);
}

#[test]
fn a_missing_device_is_refused() {
    let refused = Amp::advice(Device::Vulkan);
    assert!(matches!(refused, Err(Error::DeviceUnavailable { .. })));
}
