//! What the operators that a program calls cost in a recorded iteration, forward and backward.

use std::collections::BTreeMap;

use tch::Device;

use crate::insight::operators::AutocastList;
use crate::insight::recording::{Pass, Recording};

/// The operator of which there are fused and composed kernels.
pub(super) const ATTENTION: &str = "aten::scaled_dot_product_attention";

/// The nanoseconds of the calls of one size.
pub(super) type BySize = BTreeMap<u64, i64>;

/// The operators of autocast's lower-precision list, by name.
pub(super) type Costs = BTreeMap<String, BySize>;

/// Adds up the time of each operator that the program calls: with everything in it, such as casts of its inputs, and
/// with the backward pass of all that.
pub(super) fn costs(recording: &Recording, device: Device) -> Costs {
    let mut costs = Costs::new();
    for (index, nanoseconds) in recording.times().0.into_iter().enumerate() {
        let forward = match recording.pass(index) {
            (Pass::Forward, _) => Some(index),
            (Pass::Backward, forward) => forward,
        };
        let Some(called) = forward.and_then(|index| recording.outermost(index)) else { continue };
        let event = &recording.events[called];
        if AutocastList::of(device, &event.name) == AutocastList::LowerPrecision {
            *costs.entry(event.name.clone()).or_default().entry(event.size).or_default() +=
                nanoseconds;
        }
    }
    costs
}
