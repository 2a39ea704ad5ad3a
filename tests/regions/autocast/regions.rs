//! What a region sets, and what it refuses.

use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tch_amp::autocast::{
    AutocastError, AutocastGuard, autocast_dtype, is_autocast_available, is_autocast_enabled,
};
use tch_amp::{Autocast, Error, autocast};

use crate::autocast::{OUTSIDE, product, refusal, seen, weight};
use testkit::python::Oracle;
use testkit::{cuda_or_skip, for_each_device, gpus, skipped};

#[test]
fn the_default_dtype_equals_pytorchs() {
    for_each_device(|device| {
        let want = if device.is_cuda() { Kind::Half } else { Kind::BFloat16 };
        assert_eq!(autocast(device, || product(device)).unwrap(), want);
        let _guard = AutocastGuard::new(device).unwrap();
        assert_eq!(autocast_dtype(device).unwrap(), want);
    });
}

#[rstest]
#[case(Kind::BFloat16)]
#[case(Kind::Half)]
fn operations_run_in_the_dtype_of_the_region(#[case] dtype: Kind) {
    for_each_device(|device| {
        let region = Autocast::new(device).dtype(dtype);
        // exp is on CUDA's f32 list and on none of the CPU's lists.
        let kinds = region.run(|| (product(device), weight(device).exp().kind())).unwrap();
        assert_eq!(kinds, (dtype, Kind::Float));
        assert!(!is_autocast_enabled(device));
    });
}

#[test]
fn a_disabled_region_inside_an_enabled_one_runs_in_full_precision() {
    let _outer = AutocastGuard::new(Device::Cpu).unwrap();
    let inner = Autocast::new(Device::Cpu).enabled(false);
    assert_eq!(inner.run(|| product(Device::Cpu)).unwrap(), Kind::Float);
    assert_eq!(product(Device::Cpu), Kind::BFloat16);
}

#[rstest]
#[case(Kind::Float)]
#[case(Kind::Double)]
#[case(Kind::Int)]
#[case(Kind::ComplexFloat)]
fn another_dtype_is_refused_and_changes_nothing(#[case] dtype: Kind) {
    for_each_device(|device| {
        let error = refusal(Autocast::new(device).dtype(dtype));
        assert!(matches!(error, AutocastError::Dtype { .. }), "{error}");
        assert!(error.to_string().contains("BFloat16"), "{error}");
        assert_eq!(seen(), OUTSIDE);
    });
}

#[test]
fn a_disabled_region_takes_any_floating_dtype_but_no_integer() {
    let region = Autocast::new(Device::Cpu).enabled(false);
    assert!(region.dtype(Kind::Float).run(|| ()).is_ok());
    assert!(region.dtype(Kind::Int64).run(|| ()).is_err());
    assert_eq!(seen(), OUTSIDE);
}

#[rstest]
#[case(Device::Vulkan, "Vulkan")]
#[case(Device::Mps, "MPS")]
fn a_device_without_autocast_is_refused_with_the_reason(
    #[case] device: Device,
    #[case] reason: &str,
) {
    if is_autocast_available(device) {
        skipped("this machine has MPS");
        return;
    }
    let error = AutocastGuard::new(device).unwrap_err();
    assert!(matches!(error, Error::DeviceUnavailable { .. }), "{error}");
    assert!(error.to_string().contains(reason), "{error}");
    assert!(!is_autocast_enabled(device));
}

#[test]
fn cuda_that_cannot_be_used_is_refused_with_the_reason_and_allowed_when_disabled() {
    if cuda_or_skip() {
        let beyond = Device::Cuda(4096);
        let error = AutocastGuard::new(beyond).unwrap_err();
        assert!(error.to_string().contains("CUDA devices"), "{error}");
        return;
    }
    let device = Device::Cuda(0);
    assert!(!is_autocast_available(device));
    let error = AutocastGuard::new(device).unwrap_err().to_string();
    assert!(error.contains("CUDA") || error.contains("NVIDIA"), "{error}");
    // As in a loop that runs on any device with `.enabled(use_amp)`.
    assert_eq!(Autocast::new(device).enabled(false).run(|| 7).unwrap(), 7);
}

#[test]
fn regions_of_several_devices_are_independent() {
    for gpu in gpus() {
        let _cuda = AutocastGuard::new(gpu).unwrap();
        assert!(!is_autocast_enabled(Device::Cpu));
        let _cpu = AutocastGuard::new(Device::Cpu).unwrap();
        let products = [Device::Cpu, gpu].map(product);
        assert_eq!(products, [Kind::BFloat16, Kind::Half], "{gpu:?}");
    }
}

#[test]
fn f64_integer_and_complex_tensors_are_not_cast() {
    for kind in [Kind::Double, Kind::Int64, Kind::ComplexFloat] {
        let t = Tensor::ones([2, 2], (kind, Device::Cpu));
        assert_eq!(autocast(Device::Cpu, || t.mm(&t)).unwrap().kind(), kind);
    }
}

#[test]
fn a_region_without_a_dtype_inherits_that_of_the_enclosing_region() {
    for_each_device(|device| {
        for dtype in [Kind::Half, Kind::BFloat16] {
            let _outer = Autocast::new(device).dtype(dtype).enter().unwrap();
            assert_eq!(autocast(device, || autocast_dtype(device).unwrap()).unwrap(), dtype);
        }
    });
}

/// Called twice outside of all regions and once in one of fp16. Without a dtype of its own the region takes that of the
/// region around the call, and PyTorch's that of the region around the decorator.
#[test]
fn a_wrapped_function_returns_what_pytorchs_decorated_one_does() {
    let Some(oracle) = Oracle::find("autocast_decorator.py") else { return };
    let plain = Autocast::new(Device::Cpu);
    let cases = [
        ("{}", plain),
        (r#"{"dtype": "float16"}"#, plain.dtype(Kind::Half)),
        (
            r#"{"dtype": "bfloat16", "cache_enabled": false}"#,
            plain.dtype(Kind::BFloat16).cache(false),
        ),
        (r#"{"enabled": false}"#, plain.enabled(false)),
    ];
    let settings: Vec<_> = cases.iter().map(|(settings, _)| *settings).collect();
    let python = oracle.run(&[], &format!("[{}]", settings.join(",")));
    let python: Vec<Vec<(String, Vec<f32>)>> = serde_json::from_str(&python).unwrap();
    assert_eq!(python.len(), cases.len());
    let x = (Tensor::arange(16, (Kind::Float, Device::Cpu)) * 0.37).sin().view([4, 4]);
    for ((settings, region), expected) in cases.into_iter().zip(python) {
        let forward = region.wrap(|x: &Tensor| x.matmul(x));
        let call = || {
            let product = forward(&x).unwrap();
            let dtype = match product.kind() {
                Kind::BFloat16 => "bfloat16",
                Kind::Half => "float16",
                _ => "float32",
            };
            let numbers = product.to_kind(Kind::Float).flatten(0, 1);
            (dtype.to_owned(), Vec::<f32>::try_from(numbers).unwrap())
        };
        let outside = [call(), call()];
        assert_eq!(seen(), OUTSIDE, "{settings}");
        let inside = plain.dtype(Kind::Half).run(call).unwrap();
        assert_eq!(
            [&outside[0], &outside[1], &inside],
            [&expected[0], &expected[1], &expected[2]],
            "{settings}"
        );
        assert_eq!(inside == expected[3], settings != "{}", "{settings}");
    }
}
