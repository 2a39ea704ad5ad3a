//! Overflows that the scale tolerates, compared with plain loops that count as other systems do.

mod systems;

use rstest::rstest;
use tch::{Device, Tensor};
use tch_amp::scaler::{GradScalerConfig, ScalerError};
use tch_amp::{Error, GradScaler};

use crate::scaler::{INF, loss, model};
use systems::reference;
use testkit::for_each_device;
use testkit::rng::Rng;

/// Runs one iteration, with or without an overflow, and returns whether the step was skipped.
fn iterate(scaler: &mut GradScaler, device: Device, overflow: bool) -> tch_amp::Result<bool> {
    let (_vs, w, mut opt) = model(device);
    loss(&w, &[if overflow { INF } else { 1.0 }; 3]).backward();
    let skipped = scaler.step(&mut opt)?.is_skipped()?;
    scaler.update()?;
    Ok(skipped)
}

#[rstest]
#[case("Megatron", false, 0.0)]
#[case("DeepSpeed", false, 0.0)]
#[case("DeepSpeed", true, 0.0)]
#[case("fairseq", true, 0.05)]
#[case("fairseq", true, 0.3)]
#[case("fairseq", true, 1.0)]
fn the_scale_changes_as_in_other_systems(
    #[case] system: &str,
    #[case] consecutive_hysteresis: bool,
    #[case] tolerance: f64,
) {
    for_each_device(|device| {
        let mut rng = Rng::new(11);
        let mut changes = 0;
        for program in 0..20 {
            let config = GradScalerConfig {
                growth_interval: 1 + rng.below(6) as i64,
                hysteresis: if tolerance > 0.0 { 1 } else { 1 + rng.below(4) as u32 },
                min_scale: 2.0,
                consecutive_hysteresis,
                tolerance,
                ..Default::default()
            };
            let mut want = reference(system, config);
            let mut scaler = config.build(device).unwrap();
            let often = 2 + rng.below(5);
            let mut before = config.init_scale;
            for step in 0..60 {
                let overflow = rng.one_in(often);
                assert_eq!(iterate(&mut scaler, device, overflow).unwrap(), overflow);
                let want = want.update(overflow);
                let got = scaler.get_scale().unwrap();
                assert_eq!(got, want, "{system}, program {program}, step {step}: {config:?}");
                let one = Tensor::from(1.0f32).to_device(device);
                assert_eq!(scaler.scale(&one).unwrap().double_value(&[]), got, "on the device");
                changes += i32::from(got < before);
                before = got;
            }
        }
        assert!(changes > 20, "the scale backed off only {changes} times");
    });
}

#[test]
fn both_options_must_be_exhausted() {
    let config = GradScalerConfig {
        init_scale: 8.0,
        hysteresis: 2,
        consecutive_hysteresis: false,
        tolerance: 0.5,
        ..Default::default()
    };
    let mut scaler = config.build(Device::Cpu).unwrap();
    // One finite iteration; then a second overflow exhausts the hysteresis, and two of three iterations have
    // overflowed.
    let scales = [false, true, true, false, false, true].map(|overflow| {
        iterate(&mut scaler, Device::Cpu, overflow).unwrap();
        scaler.get_scale().unwrap()
    });
    assert_eq!(scales, [8.0, 8.0, 4.0, 4.0, 4.0, 4.0]);
}

#[test]
fn a_tolerant_scaler_resumes_from_its_state() {
    for_each_device(|device| {
        let config = GradScalerConfig {
            hysteresis: 3,
            consecutive_hysteresis: false,
            tolerance: 0.2,
            growth_interval: 7,
            error_at_min_scale: true,
            ..Default::default()
        };
        let mut rng = Rng::new(3);
        let mut whole = config.build(device).unwrap();
        let mut parts = config.build(device).unwrap();
        for step in 0..200 {
            let overflow = rng.one_in(4);
            iterate(&mut whole, device, overflow).unwrap();
            iterate(&mut parts, device, overflow).unwrap();
            if rng.one_in(3) {
                let json = serde_json::to_string(&parts.state_dict().unwrap()).unwrap();
                parts = GradScaler::new(device).unwrap();
                parts.load_state_dict(&serde_json::from_str(&json).unwrap()).unwrap();
            }
            let states = [whole.state_dict(), parts.state_dict()].map(Result::unwrap);
            assert_eq!(states[0], states[1], "step {step}");
        }
    });
}

#[test]
fn a_state_without_counts_starts_with_the_whole_hysteresis() {
    let usual = GradScaler::new(Device::Cpu).unwrap().state_dict().unwrap();
    let config = GradScalerConfig { hysteresis: 2, init_scale: 16.0, ..Default::default() };
    let mut scaler = config.build(Device::Cpu).unwrap();
    iterate(&mut scaler, Device::Cpu, true).unwrap();
    scaler.load_state_dict(&usual).unwrap();
    iterate(&mut scaler, Device::Cpu, true).unwrap();
    assert_eq!(scaler.get_scale().unwrap(), 65536.0, "the first of two is tolerated");
    iterate(&mut scaler, Device::Cpu, true).unwrap();
    assert_eq!(scaler.get_scale().unwrap(), 32768.0);
}

#[rstest]
#[case("_hysteresis_tracker", -1)]
#[case("_iterations_since_rescale", -1)]
#[case("_overflows_since_rescale", 5)]
fn impossible_counts_are_refused(#[case] key: &str, #[case] value: i64) {
    let config = GradScalerConfig { hysteresis: 3, ..Default::default() };
    let mut scaler = config.build(Device::Cpu).unwrap();
    let before = scaler.state_dict().unwrap();
    let mut json = serde_json::to_value(&before).unwrap();
    json[key] = value.into();
    let state = serde_json::from_value(json).unwrap();
    let error = scaler.load_state_dict(&state).unwrap_err().to_string();
    assert!(error.contains(key), "{error}");
    assert_eq!(scaler.state_dict().unwrap(), before);
}

#[test]
fn an_overflow_at_the_smallest_scale_is_an_error_that_ends_the_iteration() {
    for_each_device(|device| {
        let config = GradScalerConfig {
            init_scale: 2.0,
            min_scale: 1.0,
            hysteresis: 2,
            growth_interval: 2,
            error_at_min_scale: true,
            ..Default::default()
        };
        let mut scaler = config.build(device).unwrap();
        let mut end = |overflow| iterate(&mut scaler, device, overflow).map(drop);
        // Tolerated; backs off to 1; cannot back off; restores the hysteresis; tolerated; cannot back off.
        end(true).unwrap();
        end(true).unwrap();
        let error = end(true).unwrap_err();
        assert!(
            matches!(error, Error::Scaler(ScalerError::ScaleAtMinimum { scale: 1.0 })),
            "{error}"
        );
        end(false).unwrap();
        end(true).unwrap();
        assert!(matches!(end(true), Err(Error::Scaler(ScalerError::ScaleAtMinimum { .. }))));
        // Without an overflow it grows again, also after an error.
        end(false).unwrap();
        end(false).unwrap();
        assert_eq!(scaler.get_scale().unwrap(), 2.0);
    });
}

/// As an f32, 0.1 is more than the f64 of that name.
#[test]
fn a_smallest_scale_that_is_not_an_f32_is_reached() {
    for_each_device(|device| {
        let config = GradScalerConfig { init_scale: 0.1, min_scale: 0.1, ..Default::default() };
        let mut scaler =
            GradScalerConfig { error_at_min_scale: true, ..config }.build(device).unwrap();
        let error = iterate(&mut scaler, device, true).unwrap_err();
        assert!(matches!(error, Error::Scaler(ScalerError::ScaleAtMinimum { .. })), "{error}");
    });
}

#[test]
fn the_limit_of_skips_takes_precedence_over_the_smallest_scale() {
    let config = GradScalerConfig {
        init_scale: 1.0,
        min_scale: 1.0,
        max_consecutive_skips: Some(2),
        error_at_min_scale: true,
        ..Default::default()
    };
    let mut scaler = config.build(Device::Cpu).unwrap();
    let mut end = || iterate(&mut scaler, Device::Cpu, true).unwrap_err();
    assert!(matches!(end(), Error::Scaler(ScalerError::ScaleAtMinimum { .. })));
    assert!(matches!(end(), Error::Scaler(ScalerError::TooManySkips { skips: 2, .. })));
}

#[test]
fn a_limit_of_skips_allows_overflows_at_the_smallest_scale() {
    let config = GradScalerConfig { init_scale: 1.0, min_scale: 1.0, ..Default::default() };
    let mut scaler =
        GradScalerConfig { max_consecutive_skips: Some(3), ..config }.build(Device::Cpu).unwrap();
    for _ in 0..2 {
        assert!(iterate(&mut scaler, Device::Cpu, true).unwrap());
    }
    let end = iterate(&mut scaler, Device::Cpu, true).unwrap_err();
    assert!(matches!(end, Error::Scaler(ScalerError::TooManySkips { skips: 3, .. })), "{end}");
}
