//! The counters themselves.

use tch::{Device, Kind, Tensor};

use crate::common::simulation::Simulation;

#[test]
fn an_item_is_one_wait_and_an_addition_one_launch() {
    let Some(simulation) = Simulation::find() else { return };
    let one = Tensor::ones([], (Kind::Float, Device::Cuda(0)));
    let (sum, counts) = simulation.count(|| &one + &one);
    assert_eq!((counts.launches, counts.host_syncs, counts.allocations), (1, 0, 1));
    let (two, counts) = simulation.count(|| sum.double_value(&[]));
    assert_eq!((two, counts.launches, counts.host_syncs), (2.0, 0, 1));
}
