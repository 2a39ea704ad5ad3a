//! Values that are refused, and setters.

use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Error, GradScaler};

use crate::scaler::{INF, NAN, loss, model, step_and_update};
use testkit::{for_each_device, to_f64};

/// The default configuration with one field changed.
macro_rules! config {
    ($($field:ident: $value:expr),+) => {
        GradScalerConfig { $($field: $value,)+ ..Default::default() }
    };
}

#[rstest]
#[case("growth_factor", config!(growth_factor: 1.0))]
#[case("growth_factor", config!(growth_factor: NAN))]
#[case("growth_factor", config!(growth_factor: INF))]
#[case("backoff_factor", config!(backoff_factor: 1.0))]
#[case("backoff_factor", config!(backoff_factor: 0.0))]
#[case("backoff_factor", config!(backoff_factor: -0.5))]
#[case("backoff_factor", config!(backoff_factor: NAN))]
#[case("growth_interval", config!(growth_interval: 0))]
#[case("growth_interval", config!(growth_interval: -5))]
#[case("growth_interval", config!(growth_interval: 1 << 31))]
#[case("init_scale", config!(init_scale: 0.0))]
#[case("init_scale", config!(init_scale: -1.0))]
#[case("init_scale", config!(init_scale: NAN))]
#[case("init_scale", config!(init_scale: 1e39))]
#[case("init_scale", config!(max_scale: 1024.0))]
#[case("min_scale", config!(min_scale: 1e-40))]
#[case("min_scale", config!(min_scale: NAN))]
#[case("max_scale", config!(max_scale: INF))]
#[case("max_scale", config!(max_scale: 1e-30, min_scale: 1e-20))]
#[case("hysteresis", config!(hysteresis: 0))]
#[case("max_consecutive_skips", config!(max_consecutive_skips: Some(0)))]
fn a_configuration_outside_its_range_is_refused(
    #[case] field: &str,
    #[case] config: GradScalerConfig,
) {
    match config.build(Device::Cpu) {
        Err(Error::InvalidArgument { name: named, .. }) => assert_eq!(named, field),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_value_of_many_digits_is_shown_with_an_exponent() {
    let shown = |config: GradScalerConfig| config.build(Device::Cpu).unwrap_err().to_string();
    assert_eq!(
        shown(config!(init_scale: 1e-300)),
        "init_scale is 1e-300, but must be a number from min_scale to max_scale"
    );
    assert_eq!(
        shown(config!(max_scale: 1e300)),
        "max_scale is 1e300, but must be at most the largest f32"
    );
    assert_eq!(shown(config!(tolerance: 1.5)), "tolerance is 1.5, but must be from 0 to 1");
}

#[test]
fn a_device_that_cannot_be_used_is_refused_unless_the_scaler_is_disabled() {
    // No machine has that many GPUs.
    let beyond = Device::Cuda(4096);
    let error = GradScaler::new(beyond).unwrap_err();
    assert!(matches!(error, Error::DeviceUnavailable { .. }), "{error}");
    let config = GradScalerConfig { enabled: false, ..Default::default() };
    assert!(!config.build(beyond).unwrap().is_enabled());
}

#[test]
fn setters_refuse_what_the_configuration_refuses_and_keep_the_old_value() {
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    assert!(scaler.set_growth_factor(0.5).is_err());
    assert!(scaler.set_backoff_factor(1.5).is_err());
    assert!(scaler.set_growth_interval(0).is_err());
    let got =
        (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval());
    assert_eq!(got, (2.0, 0.5, 2000));
    scaler.set_growth_factor(4.0).unwrap();
    scaler.set_backoff_factor(0.25).unwrap();
    scaler.set_growth_interval(7).unwrap();
    let got =
        (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval());
    assert_eq!(got, (4.0, 0.25, 7));
}

#[test]
fn an_interval_below_the_tracker_grows_the_scale_at_the_next_step() {
    let (_vs, w, mut opt) = model(Device::Cpu);
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    let mut iterate = |scaler: &mut GradScaler| {
        opt.zero_grad();
        scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
        step_and_update(scaler, &mut opt);
        scaler.get_scale().unwrap()
    };
    for _ in 0..10 {
        assert_eq!(iterate(&mut scaler), 65536.0);
    }
    scaler.set_growth_interval(3).unwrap();
    assert_eq!(iterate(&mut scaler), 131072.0);
    assert_eq!([(); 3].map(|()| iterate(&mut scaler)), [131072.0, 131072.0, 262144.0]);
}

#[test]
fn a_new_scale_ends_the_iteration() {
    let (_vs, w, mut opt) = model(Device::Cpu);
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
    scaler.step(&mut opt).unwrap();
    scaler.update_with(16.0).unwrap();
    assert_eq!(scaler.get_scale().unwrap(), 16.0);
    opt.zero_grad();
    scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
    scaler.update_with_tensor(&Tensor::from(4.0f32)).unwrap();
    assert_eq!(scaler.get_scale().unwrap(), 4.0);
}

#[rstest]
#[case(0.0)]
#[case(-3.0)]
#[case(NAN)]
#[case(INF)]
#[case(1e39)]
fn an_invalid_new_scale_is_refused(#[case] new_scale: f64) {
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    assert!(matches!(scaler.update_with(new_scale), Err(Error::InvalidArgument { .. })));
    assert!(scaler.update_with_tensor(&Tensor::from(new_scale)).is_err());
    assert_eq!(scaler.get_scale().unwrap(), 65536.0);
}

#[test]
fn a_new_scale_that_is_refused_leaves_the_iteration_open() {
    let (_vs, w, mut opt) = model(Device::Cpu);
    let mut scaler =
        GradScalerConfig { init_scale: 8.0, ..Default::default() }.build(Device::Cpu).unwrap();
    scaler.backward(&loss(&w, &[8.0; 3])).unwrap();
    scaler.unscale_(&mut opt).unwrap();
    assert!(scaler.update_with(NAN).is_err());
    // The gradient is not unscaled a second time.
    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
    assert_eq!(to_f64(&w), [-7.0; 3]);
}

/// The next call that reads the scale has the error, and the one after it has the scale.
#[rstest]
#[case(NAN)]
#[case(1e39)]
#[case(0.5)]
#[case(2048.0)]
fn an_invalid_new_scale_in_a_tensor_leaves_the_scale(#[case] new_scale: f64) {
    for_each_device(|device| {
        let config = GradScalerConfig { min_scale: 1.0, max_scale: 1024.0, ..Default::default() };
        let mut scaler = GradScalerConfig { init_scale: 8.0, ..config }.build(device).unwrap();
        let tensor = |value: f64| Tensor::from(value).to_device(device);
        let updated = scaler.update_with_tensor(&tensor(new_scale));
        assert_eq!(updated.is_err(), device == Device::Cpu);
        let told = updated.and_then(|()| {
            // A valid one does not hide it.
            scaler.update_with_tensor(&tensor(8.0))?;
            scaler.state_dict().map(drop)
        });
        assert!(matches!(told, Err(Error::InvalidArgument { name: "new_scale", .. })), "{told:?}");
        assert_eq!(scaler.get_scale().unwrap(), 8.0);
    });
}

#[test]
fn a_new_scale_in_a_tensor_is_that_of_the_next_loss() {
    for_each_device(|device| {
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Int64] {
            let mut scaler = GradScaler::new(device).unwrap();
            let new_scale = Tensor::from(4.0f32).to_kind(kind).to_device(device).view(1);
            scaler.update_with_tensor(&new_scale).unwrap();
            let one = Tensor::ones([], (Kind::Float, device));
            assert_eq!(to_f64(&scaler.scale(&one).unwrap()), [4.0], "{kind:?}");
            assert_eq!(scaler.get_scale().unwrap(), 4.0, "{kind:?}");
        }
        let complex = Tensor::ones([], (Kind::ComplexFloat, device));
        assert!(GradScaler::new(device).unwrap().update_with_tensor(&complex).is_err());
    });
}

#[test]
fn a_later_change_of_a_new_scale_in_a_tensor_has_no_effect() {
    for_each_device(|device| {
        let mut scaler = GradScaler::new(device).unwrap();
        let mut new_scale = Tensor::from(4.0f32).to_device(device);
        scaler.update_with_tensor(&new_scale).unwrap();
        let _changed = new_scale.fill_(16.0);
        let one = Tensor::ones([], (Kind::Float, device));
        assert_eq!(to_f64(&scaler.scale(&one).unwrap()), [4.0]);
        assert_eq!(scaler.get_scale().unwrap(), 4.0);
    });
}

#[test]
fn a_new_scale_of_several_elements_is_refused() {
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    let several = Tensor::ones([2], (Kind::Float, Device::Cpu));
    assert!(scaler.update_with_tensor(&several).is_err());
    assert!(scaler.update_with_tensor(&Tensor::new()).is_err());
    assert_eq!(scaler.get_scale().unwrap(), 65536.0);
}

#[test]
fn an_interval_that_is_refused_leaves_the_growth_tracker_unchanged() {
    let (_vs, w, mut opt) = model(Device::Cpu);
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
    step_and_update(&mut scaler, &mut opt);
    assert!(scaler.set_growth_interval(0).is_err());
    assert_eq!(scaler.get_growth_tracker().unwrap(), 1);
}
