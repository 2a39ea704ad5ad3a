//! Values that are refused, and setters.

use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Error, GradScaler};

use crate::scaler::{INF, NAN, iterate, loss, model, with_scale};
use testkit::{assert_refused, for_each_device, to_f64};

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
    assert_refused!(GradScaler::new(beyond), Error::DeviceUnavailable { .. });
    let config = GradScalerConfig { enabled: false, ..Default::default() };
    assert!(!config.build(beyond).unwrap().is_enabled());
}

#[test]
fn setters_refuse_what_the_configuration_refuses_and_keep_the_old_value() {
    let options = |scaler: &GradScaler| {
        (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    };
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    iterate(&mut scaler, Device::Cpu, false).unwrap();
    scaler.set_growth_factor(0.5).unwrap_err();
    scaler.set_backoff_factor(1.5).unwrap_err();
    scaler.set_growth_interval(0).unwrap_err();
    assert_eq!((options(&scaler), scaler.get_growth_tracker().unwrap()), ((2.0, 0.5, 2000), 1));
    scaler.set_growth_factor(4.0).unwrap();
    scaler.set_backoff_factor(0.25).unwrap();
    scaler.set_growth_interval(7).unwrap();
    assert_eq!(options(&scaler), (4.0, 0.25, 7));
}

#[test]
fn an_interval_below_the_tracker_grows_the_scale_at_the_next_step() {
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    let next = |scaler: &mut GradScaler| {
        iterate(scaler, Device::Cpu, false).unwrap();
        scaler.get_scale().unwrap()
    };
    assert_eq!([(); 10].map(|()| next(&mut scaler)), [65536.0; 10]);
    scaler.set_growth_interval(3).unwrap();
    assert_eq!([(); 4].map(|()| next(&mut scaler)), [131072.0, 131072.0, 131072.0, 262144.0]);
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

#[test]
fn a_new_scale_that_is_refused_leaves_the_iteration_open() {
    let (_vs, w, mut opt) = model(Device::Cpu);
    let mut scaler = with_scale(8.0).build(Device::Cpu).unwrap();
    scaler.backward(&loss(&w, &[8.0; 3])).unwrap();
    scaler.unscale_(&mut opt).unwrap();
    assert!(scaler.update_with(NAN).is_err());
    // The gradient is not unscaled a second time.
    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
    assert_eq!(to_f64(&w), [-7.0; 3]);
}

/// Where it is in a tensor on a GPU, the next call that reads the scale has the error, and the one after it has the
/// scale.
#[rstest]
fn an_invalid_new_scale_is_refused_and_leaves_the_scale(
    #[values(NAN, INF, 1e39, 0.0, -3.0, 0.5, 2048.0)] new_scale: f64,
    #[values(false, true)] is_bounded: bool,
) {
    if !is_bounded && [0.5, 2048.0].contains(&new_scale) {
        return;
    }
    for_each_device(|device| {
        let mut config = with_scale(8.0);
        if is_bounded {
            (config.min_scale, config.max_scale) = (1.0, 1024.0);
        }
        let mut scaler = config.build(device).unwrap();
        assert_refused!(scaler.update_with(new_scale), Error::InvalidArgument { .. });
        assert_eq!(scaler.get_scale().unwrap(), 8.0);
        let tensor = |value: f64| Tensor::from(value).to_device(device);
        let updated = scaler.update_with_tensor(&tensor(new_scale));
        assert_eq!(updated.is_err(), device == Device::Cpu);
        let told = updated.and_then(|()| {
            // A valid one does not hide it.
            scaler.update_with_tensor(&tensor(8.0))?;
            scaler.state_dict().map(drop)
        });
        assert_refused!(told, Error::InvalidArgument { name: "new_scale", .. });
        assert_eq!(scaler.get_scale().unwrap(), 8.0);
    });
}

#[test]
fn a_new_scale_in_a_tensor_is_that_of_the_next_loss_whatever_is_written_to_it_later() {
    for_each_device(|device| {
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Int64] {
            let mut scaler = GradScaler::new(device).unwrap();
            let mut new_scale = Tensor::from(4.0f32).to_kind(kind).to_device(device).view(1);
            scaler.update_with_tensor(&new_scale).unwrap();
            let _changed = new_scale.fill_(16.0);
            let one = Tensor::ones([], (Kind::Float, device));
            assert_eq!(to_f64(&scaler.scale(&one).unwrap()), [4.0], "{kind:?}");
            assert_eq!(scaler.get_scale().unwrap(), 4.0, "{kind:?}");
        }
    });
}

#[test]
fn a_new_scale_that_is_not_one_real_number_is_refused() {
    for_each_device(|device| {
        let mut scaler = GradScaler::new(device).unwrap();
        let ones = |size: &[i64], kind| Tensor::ones(size, (kind, device));
        for tensor in [ones(&[2], Kind::Float), ones(&[], Kind::ComplexFloat), Tensor::new()] {
            scaler.update_with_tensor(&tensor).unwrap_err();
            assert_eq!(scaler.get_scale().unwrap(), 65536.0);
        }
    });
}
