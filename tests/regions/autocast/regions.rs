//! What a region sets, and what it refuses.

use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tch_amp::autocast::{
    AutocastError, AutocastGuard, autocast_dtype, is_autocast_available, is_autocast_enabled,
};
use tch_amp::{Autocast, Error, autocast};

use crate::autocast::{OUTSIDE, alone, for_each_device_alone, seen};
use testkit::python::Oracle;
use testkit::{cuda_or_skip, gpus, skipped};

fn square(device: Device) -> Tensor {
    Tensor::ones([4, 4], (Kind::Float, device))
}

#[test]
fn the_default_dtype_equals_pytorchs() {
    for_each_device_alone(|device| {
        let want = if device.is_cuda() { Kind::Half } else { Kind::BFloat16 };
        let product = autocast(device, || square(device).matmul(&square(device))).unwrap();
        assert_eq!(product.kind(), want);
        let _guard = AutocastGuard::new(device).unwrap();
        assert_eq!(autocast_dtype(device).unwrap(), want);
    });
}

#[rstest]
#[case(Kind::BFloat16)]
#[case(Kind::Half)]
fn operations_run_in_the_dtype_of_the_region(#[case] dtype: Kind) {
    for_each_device_alone(|device| {
        let region = Autocast::new(device).dtype(dtype);
        let (low, high) =
            region.run(|| (square(device).mm(&square(device)), square(device).exp())).unwrap();
        assert_eq!(low.kind(), dtype);
        // exp is on CUDA's f32 list and on none of the CPU's lists.
        assert_eq!(high.kind(), Kind::Float);
        assert!(!is_autocast_enabled(device));
    });
}

#[test]
fn a_disabled_region_inside_an_enabled_one_runs_in_full_precision() {
    let _alone = alone();
    let _outer = AutocastGuard::new(Device::Cpu).unwrap();
    let inner = Autocast::new(Device::Cpu).enabled(false);
    let product = inner.run(|| square(Device::Cpu).mm(&square(Device::Cpu))).unwrap();
    assert_eq!(product.kind(), Kind::Float);
    assert_eq!(square(Device::Cpu).mm(&square(Device::Cpu)).kind(), Kind::BFloat16);
}

#[test]
fn the_cache_flag_is_inherited_unless_it_is_set() {
    let _alone = alone();
    let off = Autocast::new(Device::Cpu).cache(false).enter().unwrap();
    assert_eq!(seen(), (true, Kind::BFloat16, false));
    let inherited = AutocastGuard::new(Device::Cpu).unwrap();
    assert_eq!(seen(), (true, Kind::BFloat16, false));
    let on = Autocast::new(Device::Cpu).cache(true).enter().unwrap();
    assert_eq!(seen(), (true, Kind::BFloat16, true));
    drop((on, inherited, off));
    assert_eq!(seen(), OUTSIDE);
}

#[rstest]
#[case(Kind::Float)]
#[case(Kind::Double)]
#[case(Kind::Int)]
#[case(Kind::ComplexFloat)]
fn another_dtype_is_refused_and_changes_nothing(#[case] dtype: Kind) {
    for_each_device_alone(|device| {
        let error = Autocast::new(device).dtype(dtype).enter().unwrap_err();
        assert!(matches!(error, Error::Autocast(AutocastError::Dtype { .. })), "{error}");
        assert!(error.to_string().contains("BFloat16"), "{error}");
        assert_eq!(seen(), OUTSIDE);
    });
}

#[test]
fn a_disabled_region_takes_any_floating_dtype_but_no_integer() {
    let _alone = alone();
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
    let _alone = alone();
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
    let _alone = alone();
    for gpu in gpus() {
        let _cuda = AutocastGuard::new(gpu).unwrap();
        assert!(!is_autocast_enabled(Device::Cpu));
        let _cpu = AutocastGuard::new(Device::Cpu).unwrap();
        let products = [Device::Cpu, gpu].map(|device| square(device).mm(&square(device)));
        assert_eq!(products.map(|product| product.kind()), [Kind::BFloat16, Kind::Half], "{gpu:?}");
    }
}

#[test]
fn f64_integer_and_complex_tensors_are_not_cast() {
    let _alone = alone();
    for kind in [Kind::Double, Kind::Int64, Kind::ComplexFloat] {
        let t = Tensor::ones([2, 2], (kind, Device::Cpu));
        assert_eq!(autocast(Device::Cpu, || t.mm(&t)).unwrap().kind(), kind);
    }
}

#[test]
fn a_region_without_a_dtype_inherits_that_of_the_enclosing_region() {
    for_each_device_alone(|device| {
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
    let _alone = alone();
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
