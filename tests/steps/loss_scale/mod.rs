//! Functional loss scales, `all_finite` and `select_tree`.

mod dynamic;
mod finite;
mod interop;
mod scaling;
mod select;
mod state;
mod text;
mod training;

use tch::{Device, Kind, Tensor};
use tch_amp::loss_scale::{
    DynamicLossScale, DynamicLossScaleState, LossScale, NoOpLossScale, StaticLossScale,
};

const INF: f64 = f64::INFINITY;
const NAN: f64 = f64::NAN;

fn of(values: &[f64], kind: Kind, device: Device) -> Tensor {
    Tensor::from_slice(values).to_kind(kind).to_device(device)
}

fn answer(flag: &Tensor) -> bool {
    assert_eq!((flag.kind(), flag.dim()), (Kind::Bool, 0));
    flag.int64_value(&[]) == 1
}

/// One loss scale of each kind, with a scale of 8 if it has one.
fn all_three(device: Device) -> [Box<dyn LossScale>; 3] {
    let dynamic = DynamicLossScaleState { loss_scale: 8.0, ..Default::default() };
    [
        Box::new(NoOpLossScale),
        Box::new(StaticLossScale::new(device, 8.0).unwrap()),
        Box::new(dynamic.build(device).unwrap()),
    ]
}

/// The scale and the counter.
fn stands(loss_scale: &DynamicLossScale) -> (f64, i64) {
    let state = loss_scale.state().unwrap();
    (state.loss_scale, state.counter)
}
