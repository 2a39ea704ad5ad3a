//! Which operators compute, as opposed to those that only call others, allocate memory or make views.

use std::collections::HashSet;

use crate::ffi::insight::{EventKind, RecordedEvent, RecordedTensor, Usage};

use super::flops::Product;

/// Operators that change the shape or the memory of a tensor in place, and compute nothing.
const PASSIVE: &[&str] = &[
    "aten::as_strided_",
    "aten::detach_",
    "aten::requires_grad_",
    "aten::resize_",
    "aten::resize_as_",
    "aten::set_",
    "aten::squeeze_",
    "aten::t_",
    "aten::transpose_",
    "aten::unsqueeze_",
];

/// A copy may copy to a temporary tensor first, or to the other device and then cast. It counts as one.
pub(super) const COPY: &str = "aten::copy_";

/// Which events are steps of a copy.
pub(super) fn in_copies(events: &[RecordedEvent]) -> Vec<bool> {
    let mut inside = vec![false; events.len()];
    for (index, event) in events.iter().enumerate() {
        if let Some(parent) = event.parent {
            inside[index] = inside[parent] || events[parent].name == COPY;
        }
    }
    inside
}

/// Which events autocast has called again, on inputs that it has cast, outside of the region.
pub(super) fn called_again(events: &[RecordedEvent]) -> Vec<bool> {
    let mut again = vec![false; events.len()];
    for inner in events {
        let Some(above) = inner.parent else { continue };
        let outer = &events[above];
        let is_again = outer.autocast.is_some() && inner.autocast.is_none();
        again[above] |= is_again && outer.name == inner.name;
    }
    again
}

/// Operators that prepare memory for the operator that runs them, which then writes to it as well.
const FILLING: &[&str] = &[COPY, "aten::fill_", "aten::zero_"];

/// Which events compute. An operator that runs others computes itself if it writes memory that they did not write, such
/// as a product whose factor is a number, which is first cast. One without a kernel does if it runs nothing that does.
pub(super) fn computing(
    events: &[RecordedEvent],
    products: &[Option<Product>],
    in_copy: &[bool],
) -> Vec<bool> {
    let mut computes = vec![false; events.len()];
    // What the operators in it did.
    let mut below = vec![Below::default(); events.len()];
    for index in (0..events.len()).rev() {
        let event = &events[index];
        let mut inside = std::mem::take(&mut below[index]);
        if event.kind != EventKind::Operator || event.ended.is_none() || in_copy[index] {
            continue;
        }
        let is_fill = FILLING.contains(&event.name.as_str());
        let is_own = match event.composite || is_fill {
            true => !inside.computes,
            false => {
                written(event).any(|memory| !inside.written.contains(&memory)) || !inside.computes
            }
        };
        computes[index] = products[index].is_some() || (is_own && !is_passive(event));
        let Some(parent) = event.parent else { continue };
        if computes[index] && !is_fill {
            inside.written.extend(written(event));
        }
        below[parent].computes |= inside.computes || computes[index];
        below[parent].written.extend(inside.written);
    }
    computes
}

/// What the operators in an event did.
#[derive(Clone, Debug, Default)]
struct Below {
    computes: bool,
    /// The memory that they wrote.
    written: HashSet<u64>,
}

/// The memory that an operator writes.
pub(super) fn written(event: &RecordedEvent) -> impl Iterator<Item = u64> {
    let all = event.outputs.iter().chain(&event.inputs);
    all.filter(|tensor| is_written(tensor)).filter_map(|tensor| tensor.memory)
}

/// Whether an operator only allocates memory or makes views.
fn is_passive(event: &RecordedEvent) -> bool {
    let name = event.name.as_str();
    let allocates = name.starts_with("aten::empty") || name.starts_with("aten::new_empty");
    let reads_a_number = name == "aten::_local_scalar_dense";
    let writes = event.inputs.iter().chain(&event.outputs).any(is_written);
    allocates || PASSIVE.contains(&name) || !(writes || reads_a_number)
}

pub(super) fn is_written(tensor: &RecordedTensor) -> bool {
    matches!(tensor.usage, Usage::Write | Usage::Overwrite)
}
