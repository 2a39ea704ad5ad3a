//! Loss scales as text.

use rstest::rstest;
use tch_amp::Error;
use tch_amp::loss_scale::{DynamicLossScaleState, LossScaleState};
use tch_amp::scaler::ScalerError;

fn dynamic(loss_scale: f64) -> LossScaleState {
    LossScaleState::Dynamic(DynamicLossScaleState { loss_scale, ..Default::default() })
}

fn fixed(loss_scale: f64) -> LossScaleState {
    LossScaleState::Static { loss_scale }
}

#[rstest]
#[case("none", LossScaleState::NoOp)]
#[case(" NoOp ", LossScaleState::NoOp)]
#[case("1024", fixed(1024.0))]
#[case("0.1", fixed(0.1))]
#[case("1e4", fixed(10000.0))]
#[case("Static : 1024.0", fixed(1024.0))]
#[case("dynamic", dynamic(32768.0))]
#[case("DYNAMIC", dynamic(32768.0))]
#[case("dynamic: 65536", dynamic(65536.0))]
fn loss_scales_are_read_from_text(#[case] text: &str, #[case] want: LossScaleState) {
    let state: LossScaleState = text.parse().unwrap();
    assert_eq!(state, want);
    assert_eq!(state.to_string().parse::<LossScaleState>().unwrap(), want);
}

#[test]
fn the_shortest_text_is_printed() {
    let printed = [LossScaleState::NoOp, fixed(1024.0), fixed(0.5), dynamic(32768.0)];
    assert_eq!(
        printed.map(|state| state.to_string()),
        ["none", "static:1024", "static:0.5", "dynamic:32768"]
    );
}

#[rstest]
#[case("", "it is empty")]
#[case("adaptive", "`adaptive` is not a number")]
#[case("static", "`static` takes a number")]
#[case("static:", "`` is not a number")]
#[case("dynamic:big", "`big` is not a number")]
#[case("none:2", "`none` takes no number")]
#[case("adaptive:2", "there is no `adaptive` loss scale")]
#[case("0", "loss_scale is 0, but must be a number from 2^-126 to the largest f32")]
#[case("nan", "loss_scale is NaN, but must be a number from 2^-126 to the largest f32")]
#[case("static:1e39", "loss_scale is 1e39, but must be a number from 2^-126 to the largest f32")]
#[case("dynamic:0.5", "a dynamic one starts at 1 or more, up to the largest f32")]
fn what_cannot_be_read_is_named_with_what_can(#[case] text: &str, #[case] problem: &str) {
    let error = text.parse::<LossScaleState>().unwrap_err();
    assert!(
        matches!(&error, Error::Scaler(ScalerError::LossScaleText { text: t, .. }) if t == text)
    );
    let message = error.to_string();
    let start = format!("cannot read the loss scale `{text}`: {problem}");
    assert!(message.starts_with(&start), "{message}");
    assert!(message.ends_with("or `dynamic:65536` for one that starts there"), "{message}");
}
