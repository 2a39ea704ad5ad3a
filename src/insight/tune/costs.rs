//! What the operators that a program calls cost in a recorded iteration, forward and backward.

use std::collections::BTreeMap;

use tch::{Device, Kind};

use crate::ffi::insight::{EventKind, RecordedEvent};
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
    /// The nanoseconds in which parameters become half precision and their gradients f32.
    pub(super) weight_casts: i64,
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
        let Some(forward) = forward else { continue };
        if is_weight_cast(recording, forward) {
            costs.weight_casts += nanoseconds;
        }
        let Some(called) = recording.outermost(forward) else { continue };
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

/// Whether an operator of the forward pass casts a parameter in f32 to half precision, or is a part of that.
fn is_weight_cast(recording: &Recording, index: usize) -> bool {
    let casts = |event: &RecordedEvent| {
        let (from, to) = (event.inputs.first(), event.outputs.first().and_then(|to| to.kind));
        ["aten::to", "aten::_to_copy"].contains(&event.name.as_str())
            && from.is_some_and(|from| from.parameter.is_some() && from.kind == Some(Kind::Float))
            && matches!(to, Some(Kind::Half | Kind::BFloat16))
    };
    let around = recording.ancestors(index);
    let mut operators = around.take_while(|(_, event)| event.kind == EventKind::Operator);
    operators.any(|(_, event)| casts(event))
}
