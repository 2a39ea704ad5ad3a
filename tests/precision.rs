//! The measured speed of a device in each precision.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use tch::{Device, nn};
use tch_amp::precision::{MatmulPrecision, MatmulSpeeds, ReducedPrecisionReduction};
use tch_amp::precision::{advice_for_model, bf16_is_native};
use tch_amp::{Error, autocast};

use common::simulation::is_model;
use common::{for_each_device, gpus};

#[test]
fn every_size_is_measured_once_per_process() {
    for_each_device(|device| {
        // A region, which would cast the matrices of f32, makes no difference.
        let precision = autocast(device, || MatmulSpeeds::measure(device)).unwrap().unwrap();
        let speeds = &precision.speeds;
        let sizes: Vec<_> = speeds.iter().map(|speed| speed.size).collect();
        assert!(sizes.starts_with(&[64, 128, 256, 512, 1024]) && sizes.is_sorted(), "{sizes:?}");
        let gpu = device != Device::Cpu;
        for speed in speeds {
            assert!(speed.f32 > 0.0 && speed.tf32.is_some() == gpu, "{speed:?}");
            assert!([speed.tf32, speed.bf16, speed.fp16].into_iter().flatten().all(|s| s > 0.0));
        }
        assert!(speeds[0].bf16.is_some() && speeds[0].fp16.is_some());
        let text = precision.to_string();
        assert!(text.contains("bf16: ") && text.contains(" as fast as f32 at "), "{text}");
        // A second measurement would hardly give the same numbers, so the result is cached.
        assert_eq!(MatmulSpeeds::measure(device).unwrap(), precision);
    });
}

#[test]
fn layers_that_tensor_cores_compute_less_efficiently_are_named() {
    for_each_device(|device| {
        let vs = nn::VarStore::new(device);
        let root = vs.root();
        let _convolution = nn::conv2d(&root / "convolution", 3, 7, 3, Default::default());
        let _fitting = nn::linear(&root / "fitting", 64, 128, Default::default());
        let _outputs = nn::linear(&root / "outputs", 128, 10, Default::default());
        let _words = nn::embedding(&root / "words", 50_257, 64, Default::default());
        let advice = advice_for_model(&vs);
        assert_eq!(advice.len(), 2, "{advice:?}");
        assert!(advice[0].starts_with("outputs.weight: a layer from 128 to 10 "), "{advice:?}");
        assert!(advice[0].ends_with("pad it to 128 and 16"), "{advice:?}");
        assert!(advice[1].starts_with("words.weight: "), "{advice:?}");
        assert!(advice[1].ends_with("pad it to 64 and 50264"), "{advice:?}");
    });
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
    let refused = MatmulSpeeds::measure(Device::Vulkan);
    assert!(matches!(refused, Err(Error::DeviceUnavailable { .. })));
}
