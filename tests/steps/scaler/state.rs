//! Saving and loading the state of a scaler.

use std::collections::BTreeSet;

use rstest::rstest;
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use tch_amp::scaler::ScalerError::{EmptyState, IterationOpen, OtherPrecision, TooManySkips};
use tch_amp::scaler::{GradScalerConfig, GradScalerState};
use tch_amp::{Error, GradScaler};

use crate::scaler::{iterate, loss, model, with_scale};
use testkit::python::Oracle;
use testkit::{assert_refused, assert_says, for_each_device};

const PYTHONS: &str = r#"{"scale": 131072.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 3}"#;

fn parse(json: &str) -> GradScalerState {
    serde_json::from_str(json).unwrap()
}

#[test]
fn the_state_has_pytorchs_five_keys() {
    let state = GradScaler::new(Device::Cpu).unwrap().state_dict().unwrap();
    let [ours, pythons] = [serde_json::to_value(&state), serde_json::from_str(PYTHONS)]
        .map(|json| json.unwrap().as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>());
    assert_eq!(ours, pythons);
}

#[test]
fn a_state_from_python_loads() {
    for_each_device(|device| {
        let mut scaler = GradScaler::new(device).unwrap();
        scaler.load_state_dict(&parse(PYTHONS)).unwrap();
        assert_eq!(scaler.get_scale().unwrap(), 131072.0);
        assert_eq!(scaler.get_growth_tracker().unwrap(), 3);
        assert_eq!(scaler.state_dict().unwrap(), parse(PYTHONS));
    });
}

#[test]
fn states_are_exchanged_with_python() {
    let Some(oracle) = Oracle::find("scaler_state.py") else { return };
    let config = GradScalerConfig { hysteresis: 2, max_scale: 1e6, ..Default::default() };
    for ours in [GradScaler::new(Device::Cpu).unwrap(), config.build(Device::Cpu).unwrap()] {
        let sent = ours.state_dict().unwrap();
        let answer = oracle.run(&["...o."], &serde_json::to_string(&sent).unwrap());
        let mut back = GradScaler::new(Device::Cpu).unwrap();
        back.load_state_dict(&parse(&answer)).unwrap();
        assert_eq!((back.get_scale().unwrap(), back.get_growth_tracker().unwrap()), (32768.0, 1));
    }
}

/// Takes a step for each letter, as `scaler_state.py` does: `o` is one that overflows.
fn take(scaler: &mut GradScaler, device: Device, letters: &str) {
    letters.chars().for_each(|letter| iterate(scaler, device, letter == 'o').unwrap());
}

#[test]
fn after_skipped_steps_the_state_is_pythons_key_by_key() {
    let Some(oracle) = Oracle::find("scaler_state.py") else { return };
    for letters in ["ooo", "oo.o"] {
        let theirs: Value = serde_json::from_str(&oracle.run(&[letters], PYTHONS)).unwrap();
        for_each_device(|device| {
            let mut scaler = GradScaler::new(device).unwrap();
            scaler.load_state_dict(&parse(PYTHONS)).unwrap();
            take(&mut scaler, device, letters);
            let ours = serde_json::to_value(scaler.state_dict().unwrap()).unwrap();
            assert_eq!(ours, theirs, "after {letters} on {device:?}");
        });
    }
}

#[test]
fn a_count_is_saved_with_the_option_that_reads_it_alone() {
    let keys = |config: GradScalerConfig| {
        let mut scaler = config.build(Device::Cpu).unwrap();
        take(&mut scaler, Device::Cpu, "ooo");
        let state = serde_json::to_value(scaler.state_dict().unwrap()).unwrap();
        let pythons: Value = serde_json::from_str(PYTHONS).unwrap();
        let new = |key: &&String| pythons.get(key.as_str()).is_none();
        state.as_object().unwrap().keys().filter(new).cloned().collect::<Vec<_>>()
    };
    let usual = GradScalerConfig::default();
    let counts = ["_hysteresis_tracker", "_iterations_since_rescale", "_overflows_since_rescale"];
    assert_eq!(keys(usual), [""; 0]);
    let limited = GradScalerConfig { max_consecutive_skips: Some(9), ..usual };
    assert_eq!(keys(limited), ["_consecutive_skips", "max_consecutive_skips"]);
    for (option, config) in [
        ("hysteresis", GradScalerConfig { hysteresis: 9, ..usual }),
        ("tolerance", GradScalerConfig { tolerance: 0.5, ..usual }),
    ] {
        assert_eq!(keys(config), [&counts[..], &[option]].concat());
    }
    for (option, config) in [
        ("min_scale", GradScalerConfig { min_scale: 1.0, ..usual }),
        ("max_scale", GradScalerConfig { max_scale: 1e6, ..usual }),
        ("consecutive_hysteresis", GradScalerConfig { consecutive_hysteresis: false, ..usual }),
        ("error_at_min_scale", GradScalerConfig { error_at_min_scale: true, ..usual }),
        ("allow_fp16_gradients", GradScalerConfig { allow_fp16_gradients: true, ..usual }),
    ] {
        assert_eq!(keys(config), [option]);
    }
}

/// Builds of this crate from before its release saved the count without the option, too.
#[test]
fn a_saved_count_of_skips_goes_on_with_a_limit_and_begins_anew_without() {
    let mut saved = parse(PYTHONS);
    saved.consecutive_skips = Some(2);
    let config = GradScalerConfig { max_consecutive_skips: Some(3), ..Default::default() };
    let mut limited = config.build(Device::Cpu).unwrap();
    limited.load_state_dict(&saved).unwrap();
    assert_eq!(limited.state_dict().unwrap().consecutive_skips, Some(2));
    let mut plain = GradScaler::new(Device::Cpu).unwrap();
    plain.load_state_dict(&saved).unwrap();
    take(&mut plain, Device::Cpu, "o");
    assert_eq!(plain.state_dict().unwrap().consecutive_skips, None);
}

#[test]
fn every_option_survives_the_round_trip() {
    let config = GradScalerConfig {
        init_scale: 64.0,
        growth_factor: 3.0,
        backoff_factor: 0.25,
        growth_interval: 9,
        enabled: true,
        min_scale: 0.5,
        max_scale: 4096.0,
        hysteresis: 4,
        consecutive_hysteresis: false,
        tolerance: 0.25,
        max_consecutive_skips: Some(50),
        error_at_min_scale: true,
        allow_fp16_gradients: true,
        warn_of_skips: false,
    };
    let mut saved = config.build(Device::Cpu).unwrap();
    take(&mut saved, Device::Cpu, "oo");
    let state = saved.state_dict().unwrap();
    let json = serde_json::to_string(&state).unwrap();
    let mut loaded = GradScaler::new(Device::Cpu).unwrap();
    loaded.load_state_dict(&parse(&json)).unwrap();
    assert_eq!(loaded.state_dict().unwrap(), state);
    // The third and fourth overflow are consecutive: one more is tolerated, as it would have been without saving and
    // loading.
    for want in [64.0, 16.0] {
        take(&mut loaded, Device::Cpu, "o");
        assert_eq!(loaded.get_scale().unwrap(), want);
    }
}

#[rstest]
#[case("scale", "null")]
#[case("scale", "0.0")]
#[case("scale", "-1.0")]
#[case("scale", "1e-40")]
#[case("scale", "1e39")]
#[case("growth_factor", "1.0")]
#[case("growth_factor", "-1.0")]
#[case("backoff_factor", "7.0")]
#[case("backoff_factor", "null")]
#[case("growth_interval", "-5")]
#[case("growth_interval", "0")]
#[case("_growth_tracker", "-1")]
#[case("_growth_tracker", "4294967296")]
fn a_malformed_state_is_refused_and_nothing_changes(#[case] key: &str, #[case] value: &str) {
    let mut json: Value = serde_json::from_str(PYTHONS).unwrap();
    json[key] = serde_json::from_str(value).unwrap();
    let state: GradScalerState = serde_json::from_value(json).unwrap();
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    let before = scaler.state_dict().unwrap();
    assert_says(scaler.load_state_dict(&state), key);
    assert_eq!(scaler.state_dict().unwrap(), before);
}

#[test]
fn a_state_with_text_for_a_number_does_not_parse() {
    assert!(serde_json::from_str::<GradScalerState>(r#"{"scale": "big"}"#).is_err());
    assert!(serde_json::from_str::<GradScalerState>(r#"{"scale": NaN}"#).is_err());
}

/// The bounds are part of a state: one that scales would otherwise keep the scale 1, and scale nothing without a word.
/// A scale below one enlarges the gradients when unscaling, which is not checked at a scale of one.
#[test]
fn the_state_of_another_precision_is_refused() {
    type Make = fn(Device) -> GradScaler;
    let make: [(bool, Make); 3] = [
        (true, |device| GradScaler::new(device).unwrap()),
        (true, |device| with_scale(2f64.powi(-100)).build(device).unwrap()),
        (false, |device| GradScaler::skip_only(device).unwrap()),
    ];
    for_each_device(|device| {
        for (saved_scales, saved) in make {
            for (own_scales, own) in make {
                let mut scaler = own(device);
                let before = (scaler.state_dict().unwrap(), on_device(&scaler, device));
                let state = saved(device).state_dict().unwrap();
                let loaded = scaler.load_state_dict(&state);
                if saved_scales == own_scales {
                    loaded.unwrap();
                    assert_eq!(scaler.state_dict().unwrap(), state);
                    continue;
                }
                assert_refused!(
                    loaded,
                    Error::Scaler(OtherPrecision { scales }) if scales == saved_scales
                );
                assert_eq!((scaler.state_dict().unwrap(), on_device(&scaler, device)), before);
            }
        }
    });
}

#[test]
fn the_empty_state_of_a_disabled_scaler_is_refused_by_an_enabled_one() {
    let empty = GradScaler::disabled().state_dict().unwrap();
    assert_eq!(serde_json::to_string(&empty).unwrap(), "{}");
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    assert_refused!(scaler.load_state_dict(&empty), Error::Scaler(EmptyState));
    GradScaler::disabled().load_state_dict(&parse(PYTHONS)).unwrap();
}

#[test]
fn a_tracker_beyond_the_interval_grows_the_scale_at_the_next_step() {
    for_each_device(|device| {
        let mut state = parse(PYTHONS);
        (state.growth_tracker, state.growth_interval) = (Some(99), Some(2));
        let mut scaler = GradScaler::new(device).unwrap();
        scaler.load_state_dict(&state).unwrap();
        take(&mut scaler, device, ".");
        assert_eq!(on_device(&scaler, device), 262144.0);
        assert_eq!(scaler.get_scale().unwrap(), 262144.0);
    });
}

/// The scale by which losses are multiplied on the device, which may differ from the host's copy.
fn on_device(scaler: &GradScaler, device: Device) -> f64 {
    let one = Tensor::ones([1], (Kind::Float, device));
    scaler.scale(&one).unwrap().double_value(&[0])
}

#[test]
fn a_limit_of_skips_survives_a_load() {
    for_each_device(|device| {
        let config = GradScalerConfig { max_consecutive_skips: Some(2), ..Default::default() };
        let mut scaler = config.build(device).unwrap();
        scaler.load_state_dict(&parse(PYTHONS)).unwrap();
        take(&mut scaler, device, "o");
        assert_refused!(iterate(&mut scaler, device, true), Error::Scaler(TooManySkips { .. }));
    });
}

#[test]
fn the_state_cannot_be_saved_or_loaded_in_the_middle_of_an_iteration() {
    let (_vs, w, mut opt) = model(Device::Cpu);
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
    scaler.state_dict().unwrap();
    scaler.unscale_(&mut opt).unwrap();
    assert_refused!(scaler.state_dict(), Error::Scaler(IterationOpen { call: "state_dict" }));
    assert!(scaler.load_state_dict(&parse(PYTHONS)).is_err());
    scaler.step(&mut opt).unwrap();
    assert!(scaler.state_dict().is_err());
    scaler.update().unwrap();
    assert_eq!(scaler.state_dict().unwrap().growth_tracker, Some(1));
}

#[test]
fn a_state_loaded_before_the_first_scale_is_resumed() {
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    scaler.load_state_dict(&parse(PYTHONS)).unwrap();
    let (_vs, w, mut opt) = model(Device::Cpu);
    (loss(&w, &[1.0; 3]) * 131072.0).backward();
    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
    scaler.update().unwrap();
    assert_eq!(scaler.get_growth_tracker().unwrap(), 4);
}

/// The scale is clamped to the bound rounded to f32, which may lie outside of the bound.
#[rstest]
#[case(GradScalerConfig { min_scale: 1e-4, ..with_scale(2e-4) }, true)]
#[case(GradScalerConfig { min_scale: 0.7, ..with_scale(0.7) }, true)]
#[case(GradScalerConfig { max_scale: 1e14, growth_interval: 1, ..with_scale(9e13) }, false)]
#[case(GradScalerConfig { hysteresis: u32::MAX, ..Default::default() }, true)]
fn a_scaler_at_its_bounds_can_be_saved_and_loaded(
    #[case] config: GradScalerConfig,
    #[case] overflow: bool,
) {
    let mut saved = config.build(Device::Cpu).unwrap();
    (0..3).for_each(|_| iterate(&mut saved, Device::Cpu, overflow).unwrap());
    let state = saved.state_dict().unwrap();
    let mut loaded = GradScaler::new(Device::Cpu).unwrap();
    loaded.load_state_dict(&state).unwrap();
    assert_eq!(loaded.state_dict().unwrap(), state);
    loaded.update_with(loaded.get_scale().unwrap()).unwrap();
}

/// A count greater than a smaller hysteresis is limited to it.
#[test]
fn a_loaded_count_is_at_most_the_hysteresis() {
    for_each_device(|device| {
        let config = GradScalerConfig { hysteresis: 2, ..with_scale(8.0) };
        let mut state = config.build(device).unwrap().state_dict().unwrap();
        state.hysteresis_tracker = Some(5);
        let mut scaler = config.build(device).unwrap();
        scaler.load_state_dict(&state).unwrap();
        for want in [8.0, 4.0] {
            take(&mut scaler, device, "o");
            assert_eq!(on_device(&scaler, device), want);
        }
    });
}

/// Loading replaces the count on the device, not only the host's copy.
#[test]
fn a_loaded_count_replaces_an_exhausted_one() {
    for_each_device(|device| {
        let config = GradScalerConfig { hysteresis: 2, ..with_scale(8.0) };
        let mut scaler = config.build(device).unwrap();
        let fresh = scaler.state_dict().unwrap();
        for want in [8.0, 8.0] {
            scaler.load_state_dict(&fresh).unwrap();
            take(&mut scaler, device, "o");
            assert_eq!(on_device(&scaler, device), want);
        }
    });
}
