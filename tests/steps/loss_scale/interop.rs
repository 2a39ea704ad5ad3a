//! Dynamic loss scales and gradient scalers that are created from each other's states.

use rstest::rstest;
use tch::{Device, Tensor};
use tch_amp::loss_scale::{DynamicLossScaleState, LossScale};
use tch_amp::scaler::ScalerError::{EmptyState, MissingKey};
use tch_amp::scaler::{GradScalerConfig, GradScalerState};
use tch_amp::{Error, GradScaler};

use crate::scaler::iterate;
use testkit::rng::Rng;
use testkit::{assert_refused, for_each_device};

fn parse(json: &str) -> GradScalerState {
    serde_json::from_str(json).unwrap()
}

#[test]
fn a_loss_scale_built_from_a_scaler_behaves_like_it() {
    for_each_device(|device| {
        for seed in 0..10 {
            let mut rng = Rng::new(seed);
            let factor = *rng.pick(&[2.0, 3.0, 10.0]);
            let config = GradScalerConfig {
                init_scale: 1.0 + rng.below(1000) as f64,
                growth_factor: factor,
                backoff_factor: 1.0 / factor,
                growth_interval: 1 + rng.below(4) as i64,
                min_scale: 0.5,
                ..Default::default()
            };
            let mut scaler = config.build(device).unwrap();
            let state = DynamicLossScaleState::try_from(&scaler.state_dict().unwrap()).unwrap();
            let mut loss_scale = state.build(device).unwrap();
            for _ in 0..60 {
                let finite = !rng.one_in(3);
                iterate(&mut scaler, device, !finite).unwrap();
                loss_scale.adjust(&Tensor::from(finite).to_device(device)).unwrap();
                let state = loss_scale.state().unwrap();
                let want = (scaler.get_scale().unwrap(), scaler.get_growth_tracker().unwrap());
                assert_eq!((state.loss_scale, state.counter), want);
                let want = scaler.state_dict().unwrap();
                let mut other = GradScaler::new(device).unwrap();
                other.load_state_dict(&GradScalerState::from(&state)).unwrap();
                assert_eq!(other.state_dict().unwrap(), want);
            }
        }
    });
}

#[test]
fn a_loss_scale_can_be_continued_as_a_scaler() {
    let state = DynamicLossScaleState { counter: 3, period: 4, ..Default::default() };
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    scaler.load_state_dict(&GradScalerState::from(&state)).unwrap();
    iterate(&mut scaler, Device::Cpu, false).unwrap();
    assert_eq!(scaler.get_scale().unwrap(), 65536.0);
    // The lower bound is loaded as well, although PyTorch has none.
    for _ in 0..20 {
        iterate(&mut scaler, Device::Cpu, true).unwrap();
    }
    assert_eq!(scaler.get_scale().unwrap(), 1.0);
    let back = DynamicLossScaleState::try_from(&scaler.state_dict().unwrap()).unwrap();
    assert_eq!(back, DynamicLossScaleState { loss_scale: 1.0, counter: 0, ..state });
}

/// Loading disables the options that only scalers have.
#[test]
fn a_scaler_with_any_options_continues_like_the_loss_scale() {
    let config = GradScalerConfig {
        max_scale: 65536.0,
        hysteresis: 3,
        tolerance: 0.5,
        error_at_min_scale: true,
        ..Default::default()
    };
    let mut scaler = config.build(Device::Cpu).unwrap();
    let state = DynamicLossScaleState { period: 1, loss_scale: 65536.0, ..Default::default() };
    let mut loss_scale = state.build(Device::Cpu).unwrap();
    scaler.load_state_dict(&GradScalerState::from(&state)).unwrap();
    let saved = scaler.state_dict().unwrap();
    assert_eq!((saved.max_scale, saved.hysteresis), (None, None));
    assert_eq!((saved.tolerance, saved.error_at_min_scale), (None, None));
    for finite in [[true; 20], [false; 20]].concat() {
        iterate(&mut scaler, Device::Cpu, !finite).unwrap();
        loss_scale.adjust(&Tensor::from(finite)).unwrap();
        assert_eq!(scaler.get_scale().unwrap(), loss_scale.value().unwrap());
    }
}

#[test]
fn a_state_from_python_becomes_a_loss_scale() {
    let python = parse(
        r#"{"scale": 131072.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 3}"#,
    );
    let state = DynamicLossScaleState::try_from(&python).unwrap();
    let want = DynamicLossScaleState {
        loss_scale: 131072.0,
        counter: 3,
        min_loss_scale: f32::MIN_POSITIVE.into(),
        ..Default::default()
    };
    assert_eq!(state, want);
}

#[rstest]
#[case("backoff_factor", r#""backoff_factor": 0.25"#)]
#[case("max_scale", r#""max_scale": 1024.0"#)]
#[case("hysteresis", r#""hysteresis": 2"#)]
#[case("tolerance", r#""tolerance": 0.5"#)]
#[case("error_at_min_scale", r#""error_at_min_scale": true"#)]
#[case("max_consecutive_skips", r#""max_consecutive_skips": 9"#)]
#[case("loss_scale", r#""scale": -2.0"#)]
#[case("factor", r#""growth_factor": 1.0, "backoff_factor": 1.0"#)]
#[case("period", r#""growth_interval": 0"#)]
#[case("counter", r#""_growth_tracker": -1"#)]
fn what_a_loss_scale_cannot_keep_is_refused(#[case] name: &str, #[case] change: &str) {
    let whole = r#"{"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5, "_growth_tracker": 0}"#;
    let mut state: serde_json::Value = serde_json::from_str(whole).unwrap();
    let change: serde_json::Value = serde_json::from_str(&format!("{{{change}}}")).unwrap();
    for (key, value) in change.as_object().unwrap() {
        state[key] = value.clone();
    }
    let converted = DynamicLossScaleState::try_from(&parse(&state.to_string()));
    assert_refused!(converted, Error::InvalidArgument { name: field, .. } if field == name);
}

#[test]
fn a_state_without_a_key_is_refused() {
    let empty = DynamicLossScaleState::try_from(&GradScalerState::default());
    assert_refused!(empty, Error::Scaler(EmptyState));
    let part = DynamicLossScaleState::try_from(&parse(r#"{"scale": 2.0, "growth_factor": 2.0}"#));
    assert_refused!(part, Error::Scaler(MissingKey { key: "backoff_factor" }));
}
