//! Saving and loading the state of a loss scale.

use rstest::rstest;
use tch::{Device, Tensor};
use tch_amp::loss_scale::{DynamicLossScaleState, LossScale, LossScaleState, StaticLossScale};
use tch_amp::scaler::{GradScalerState, ScalerError};
use tch_amp::{Error, GradScaler};

use crate::loss_scale::all_three;
use testkit::{assert_refused, for_each_device};

fn saved() -> DynamicLossScaleState {
    DynamicLossScaleState {
        loss_scale: 1234.5,
        counter: 7,
        period: 11,
        factor: 3.5,
        min_loss_scale: 0.25,
    }
}

/// Here jmp itself loses `min_loss_scale`.
#[test]
fn every_field_survives_the_round_trip() {
    for_each_device(|device| {
        let loss_scale = saved().build(device).unwrap();
        let json = serde_json::to_string(&loss_scale.state_dict().unwrap()).unwrap();
        assert_eq!(
            json,
            r#"{"kind":"Dynamic","loss_scale":1234.5,"counter":7,"period":11,"factor":3.5,"min_loss_scale":0.25}"#
        );
        let state: LossScaleState = serde_json::from_str(&json).unwrap();
        assert_eq!(state, LossScaleState::Dynamic(saved()));
        let mut other = DynamicLossScaleState::default().build(device).unwrap();
        other.load_state_dict(&state).unwrap();
        assert_eq!(other.state().unwrap(), saved());
        assert_eq!(other.loss_scale().unwrap().device(), device);
    });
}

/// The scale is an f32. At a bound that is not one, it differs from the bound.
#[rstest]
#[case(1e-4, 1e-4)]
#[case(0.7, 0.7)]
#[case(0.1, 0.1)]
#[case(8.0, 1e-4)]
fn a_scale_that_sank_to_its_bound_is_saved_and_loaded(#[case] start: f64, #[case] min: f64) {
    let state =
        DynamicLossScaleState { loss_scale: start, min_loss_scale: min, ..Default::default() };
    let mut loss_scale = state.build(Device::Cpu).unwrap();
    for _ in 0..20 {
        let saved = loss_scale.state_dict().unwrap();
        loss_scale.load_state_dict(&saved).unwrap();
        assert_eq!(saved.build(Device::Cpu).unwrap().state_dict().unwrap(), saved);
        loss_scale.adjust(&Tensor::from(false)).unwrap();
    }
    assert_eq!(loss_scale.value().unwrap(), f64::from(min as f32));
    // The state can be loaded into a scaler and back.
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    scaler.load_state_dict(&GradScalerState::from(&loss_scale.state().unwrap())).unwrap();
    let back = DynamicLossScaleState::try_from(&scaler.state_dict().unwrap()).unwrap();
    assert_eq!(back.build(Device::Cpu).unwrap().value().unwrap(), f64::from(min as f32));
}

#[test]
fn each_loss_scale_is_restored_from_its_state() {
    for_each_device(|device| {
        for mut loss_scale in all_three(device) {
            for finite in [true, false, true] {
                loss_scale.adjust(&Tensor::from(finite)).unwrap();
            }
            let state = loss_scale.state_dict().unwrap();
            let json = serde_json::to_string(&state).unwrap();
            let again =
                serde_json::from_str::<LossScaleState>(&json).unwrap().build(device).unwrap();
            assert_eq!(again.state_dict().unwrap(), state);
            assert_eq!(again.value().unwrap(), loss_scale.value().unwrap());
        }
    });
}

#[test]
fn the_state_of_another_kind_is_refused() {
    let states = all_three(Device::Cpu).map(|loss_scale| loss_scale.state_dict().unwrap());
    for (i, mut loss_scale) in all_three(Device::Cpu).into_iter().enumerate() {
        for (j, state) in states.iter().enumerate() {
            match loss_scale.load_state_dict(state) {
                Ok(()) => assert_eq!(i, j),
                Err(Error::Scaler(ScalerError::OtherLossScale { expected, found })) => {
                    assert_ne!(expected, found)
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[test]
fn absent_fields_have_the_defaults() {
    let state: DynamicLossScaleState = serde_json::from_str(r#"{"period": 5}"#).unwrap();
    assert_eq!(state, DynamicLossScaleState { period: 5, ..Default::default() });
}

#[test]
fn a_counter_beyond_a_shorter_period_grows_the_scale_at_the_next_step() {
    let state = DynamicLossScaleState { period: 5, ..saved() };
    let mut loss_scale = state.build(Device::Cpu).unwrap();
    assert_eq!(loss_scale.state().unwrap().counter, 4);
    loss_scale.adjust(&Tensor::from(true)).unwrap();
    assert_eq!(loss_scale.value().unwrap(), 1234.5 * 3.5);
}

#[rstest]
#[case("loss_scale", DynamicLossScaleState { loss_scale: 0.1, ..saved() })]
#[case("loss_scale", DynamicLossScaleState { loss_scale: f64::NAN, ..saved() })]
#[case("loss_scale", DynamicLossScaleState { loss_scale: f64::INFINITY, ..saved() })]
#[case("counter", DynamicLossScaleState { counter: -1, ..saved() })]
#[case("period", DynamicLossScaleState { period: 0, ..saved() })]
#[case("period", DynamicLossScaleState { period: 1 << 31, ..saved() })]
#[case("factor", DynamicLossScaleState { factor: 1.0, ..saved() })]
#[case("factor", DynamicLossScaleState { factor: f64::INFINITY, ..saved() })]
#[case("min_loss_scale", DynamicLossScaleState { min_loss_scale: 0.0, ..saved() })]
#[case("min_loss_scale", DynamicLossScaleState { min_loss_scale: f64::NAN, ..saved() })]
fn impossible_states_are_refused(#[case] name: &str, #[case] state: DynamicLossScaleState) {
    let mut loss_scale = saved().build(Device::Cpu).unwrap();
    let loaded = loss_scale.load_state_dict(&LossScaleState::Dynamic(state));
    for result in [state.build(Device::Cpu).map(drop), loaded] {
        assert_refused!(result, Error::InvalidArgument { name: field, .. } if field == name);
    }
    assert_eq!(loss_scale.state().unwrap(), saved());
}

/// On its device; tensors and clones that were made before have the old scale.
#[test]
fn a_static_scale_is_loaded_or_refused() {
    for_each_device(|device| {
        let mut scale = StaticLossScale::new(device, 4.0).unwrap();
        let (clone, held) = (scale.clone(), scale.loss_scale().unwrap().shallow_clone());
        scale.load_state_dict(&LossScaleState::Static { loss_scale: 16.0 }).unwrap();
        let refused = scale.load_state_dict(&LossScaleState::Static { loss_scale: 0.0 });
        assert_refused!(refused, Error::InvalidArgument { name: "loss_scale", .. });
        assert_eq!(scale.value().unwrap(), 16.0);
        assert_eq!(scale.loss_scale().unwrap().device(), device);
        assert_eq!((clone.value().unwrap(), held.double_value(&[])), (4.0, 4.0));
    });
}

#[test]
fn a_missing_device_is_refused() {
    let nowhere = Device::Cuda(1000);
    let results = [
        saved().build(nowhere).map(drop),
        StaticLossScale::new(nowhere, 2.0).map(drop),
        LossScaleState::Dynamic(saved()).build(nowhere).map(drop),
    ];
    for result in results {
        assert_refused!(result, Error::DeviceUnavailable { device, .. } if device == nowhere);
    }
    assert!(LossScaleState::NoOp.build(nowhere).is_ok());
}
