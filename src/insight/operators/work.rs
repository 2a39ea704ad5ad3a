//! What each event of a recording did itself: its own time, whether it computes, and its matrix product.

use std::collections::HashSet;

use super::flops::{self, Level, Product};
use super::report::ProductKind;
use crate::ffi::insight::{EventKind, RecordedEvent, RecordedTensor, Usage};
use crate::insight::recording::{Pass, Recording};

/// A recording with what follows from the nesting of its events.
pub(super) struct Work<'a> {
    pub(super) recording: &'a Recording,
    /// The nanoseconds of each event without those that it ran.
    pub(super) own: Vec<i64>,
    /// The same with those that it ran.
    pub(super) total: Vec<i64>,
    /// Whether an event computes, as opposed to operators that only call others, allocate memory or make views.
    pub(super) computes: Vec<bool>,
    /// Whether autocast called an event again, on inputs that it has cast.
    pub(super) called_again: Vec<bool>,
    /// The matrix product of an event, if it is the innermost that computes it.
    pub(super) products: Vec<Option<Product>>,
}

impl<'a> Work<'a> {
    pub(super) fn new(recording: &'a Recording) -> Self {
        let (mut own, total) = recording.times();
        let called_again = called_again(&recording.events);
        let products = products(recording, &called_again);
        let in_copy = in_copies(&recording.events);
        for (index, event) in recording.events.iter().enumerate() {
            if in_copy[index] {
                own[index] = 0;
            } else if event.name == COPY {
                own[index] = total[index];
            }
        }
        let computes = computing(&recording.events, &products, &in_copy);
        Self { recording, own, total, computes, called_again, products }
    }

    /// The operators that ended, in the order of their ends.
    pub(super) fn operators(&self) -> impl Iterator<Item = (usize, &RecordedEvent)> {
        let ended = self.recording.ended().into_iter();
        ended
            .map(|index| (index, &self.recording.events[index]))
            .filter(|(_, event)| event.kind == EventKind::Operator)
    }

    /// The pass and the part of the model of an event.
    pub(super) fn place(&self, index: usize) -> (Pass, Option<String>) {
        (self.recording.pass(index).0, self.recording.part(index))
    }
}

/// The product of each event. Of operators that are nested, one is counted: a kernel rather than what calls it or what
/// it calls, and a convolution rather than the matrix products by which it is computed. One that autocast has called
/// again did not compute it.
fn products(recording: &Recording, called_again: &[bool]) -> Vec<Option<Product>> {
    let events = &recording.events;
    let is_operator =
        |event: &RecordedEvent| event.kind == EventKind::Operator && event.ended.is_some();
    let found: Vec<_> = events
        .iter()
        .zip(called_again)
        .map(
            |(event, again)| {
                if is_operator(event) && !again { flops::product(event) } else { None }
            },
        )
        .collect();
    let mut counted = vec![None; events.len()];
    // Whether an event ran one that is counted.
    let mut covered = vec![false; events.len()];
    for (is_matrix, level) in [
        (false, Level::Kernel),
        (false, Level::Otherwise),
        (true, Level::Kernel),
        (true, Level::Otherwise),
    ] {
        let mut order: Vec<usize> = (0..events.len()).collect();
        if level == Level::Otherwise {
            order.reverse();
        }
        for index in order {
            let Some((at, product)) = found[index] else { continue };
            let is_its_turn = at == level && (product.kind == ProductKind::Matrix) == is_matrix;
            let is_part =
                |index| recording.ancestors(index).any(|(above, _)| counted[above].is_some());
            if !is_its_turn || covered[index] || is_part(index) {
                continue;
            }
            counted[index] = Some(product);
            recording.ancestors(index).for_each(|(above, _)| covered[above] = true);
        }
    }
    counted
}

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
const COPY: &str = "aten::copy_";

/// Which events are steps of a copy.
fn in_copies(events: &[RecordedEvent]) -> Vec<bool> {
    let mut inside = vec![false; events.len()];
    for (index, event) in events.iter().enumerate() {
        if let Some(parent) = event.parent {
            inside[index] = inside[parent] || events[parent].name == COPY;
        }
    }
    inside
}

/// Which events autocast has called again, on inputs that it has cast, outside of the region.
fn called_again(events: &[RecordedEvent]) -> Vec<bool> {
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
/// as a product whose factor is a number, which is first cast. One without a kernel does if it runs nothing that does,
/// and none does that runs one of its own name, such as a sum in half precision on some CPUs.
fn computing(
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
        let is_again = inside.names.contains(&*event.name);
        computes[index] = products[index].is_some() || (is_own && !is_again && !is_passive(event));
        let Some(parent) = event.parent else { continue };
        if computes[index] {
            inside.names.insert(&event.name);
        }
        if computes[index] && !is_fill {
            inside.written.extend(written(event));
        }
        below[parent].computes |= inside.computes || computes[index];
        below[parent].written.extend(inside.written);
        below[parent].names.extend(inside.names);
    }
    computes
}

/// What the operators in an event did.
#[derive(Clone, Debug, Default)]
struct Below<'e> {
    computes: bool,
    /// The names of those that compute.
    names: HashSet<&'e str>,
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
