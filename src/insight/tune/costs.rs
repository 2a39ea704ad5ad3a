//! What the operators that a program calls cost in a recorded iteration, forward and backward.

use std::collections::BTreeMap;

use tch::Device;

use crate::insight::operators::AutocastList;
use crate::insight::recording::{Pass, Recording};

/// The operator of which there are fused and composed kernels.
pub(super) const ATTENTION: &str = "aten::scaled_dot_product_attention";

/// The nanoseconds of the calls of one size.
pub(super) type BySize = BTreeMap<u64, i64>;

/// Operators, by name.
pub(super) type Costs = BTreeMap<String, BySize>;

/// The costs of the operators that autocast runs in half precision, and of those that it runs in f32.
#[derive(Debug, Default)]
pub(super) struct ListedCosts {
    pub(super) lower: Costs,
    pub(super) f32: Costs,
}

/// Adds up the time of each operator that the program calls: with everything in it, such as casts of its inputs, and
/// with the backward pass of all that.
pub(super) fn costs(recording: &Recording, device: Device) -> ListedCosts {
    let mut costs = ListedCosts::default();
    for (index, nanoseconds) in recording.times().0.into_iter().enumerate() {
        let forward = match recording.pass(index) {
            (Pass::Forward, _) => Some(index),
            (Pass::Backward, forward) => forward,
        };
        let Some(called) = forward.and_then(|index| recording.outermost(index)) else { continue };
        let event = &recording.events[called];
        let list = match AutocastList::of(device, &event.name) {
            AutocastList::LowerPrecision => &mut costs.lower,
            AutocastList::F32 | AutocastList::F32UnlessAsked => &mut costs.f32,
            _ => continue,
        };
        *list.entry(event.name.clone()).or_default().entry(event.size).or_default() += nanoseconds;
    }
    costs
}
