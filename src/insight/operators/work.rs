//! What each event of a recording did itself: its own time, whether it computes, and its matrix product.

use crate::ffi::insight::{EventKind, RecordedEvent};
use crate::insight::Pass;
use crate::insight::recording::Recording;

use super::computing::{COPY, called_again, computing, in_copies};
use super::flops::{self, Level, Product};
use super::report::ProductKind;

/// A recording with what follows from the nesting of its events.
pub(super) struct Work<'a> {
    pub(super) recording: &'a Recording,
    modules: &'a [String],
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
    pub(super) fn new(recording: &'a Recording, modules: &'a [String]) -> Self {
        let (mut own, total) = times(&recording.events);
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
        Self { recording, modules, own, total, computes, called_again, products }
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
        (self.recording.pass(index).0, self.recording.part(index, self.modules))
    }

    /// The last module before an event of the forward pass.
    pub(super) fn module_before(&self, index: usize) -> Option<String> {
        self.recording.module_before(index, self.modules)
    }
}

/// The nanoseconds of each event without those that it ran.
pub(in crate::insight) fn own_times(events: &[RecordedEvent]) -> Vec<i64> {
    times(events).0
}

/// The own and the total nanoseconds of each event. What the recording itself did counts for nobody.
fn times(events: &[RecordedEvent]) -> (Vec<i64>, Vec<i64>) {
    let is_timed = |event: &RecordedEvent| event.ended.is_some();
    let mut own: Vec<i64> = events
        .iter()
        .map(|event| if is_timed(event) { event.times.ended - event.times.started } else { 0 })
        .collect();
    for event in events.iter().filter(|event| is_timed(event)) {
        if let Some(parent) = event.parent {
            own[parent] -= event.times.left - event.times.entered;
        }
    }
    own.iter_mut().for_each(|time| *time = (*time).max(0));
    let mut total = own.clone();
    // An event comes after the one in which it ran.
    for index in (0..events.len()).rev() {
        if let Some(parent) = events[index].parent {
            total[parent] += total[index];
        }
    }
    (own, total)
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
