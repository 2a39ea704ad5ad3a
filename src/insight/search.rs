//! Following non-finite numbers back to where they began.

use std::collections::{HashMap, HashSet};

use super::recording::{ended, is_bad};
use crate::ffi::insight::{EventKind, RecordedEvent, RecordedTensor, Usage};

/// Where non-finite numbers began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Origin {
    /// The event that read memory which was non-finite before the recording, and the place among its inputs.
    Given(usize, usize),
    /// The event that made them from finite numbers, or from the infinities of a mask.
    Made(usize),
}

/// Operators that write a number which the program chose, such as the -inf of an attention mask.
const CHOSEN: &[&str] = &[
    "aten::masked_fill",
    "aten::masked_fill_",
    "aten::fill_",
    "aten::full",
    "aten::full_like",
    "aten::where",
    "aten::scalar_tensor",
    "aten::index_fill",
    "aten::index_fill_",
];

/// Parts of the names of operators that masks with -inf are given to. Elsewhere, -inf that the program was given is no
/// mask but data.
const READ_MASKS: &[&str] = &["softmax", "logsumexp", "attention", "aten::sub", "aten::rsub"];

/// How many operators may lie between the -inf of a mask and the operator that reads it.
const MASK_STEPS: usize = 8;

/// The search from non-finite results backwards.
pub(super) struct Search<'a> {
    events: &'a [RecordedEvent],
    /// The events that wrote non-finite numbers to a memory, the innermost ones only, in the order of their ends.
    writers: HashMap<u64, Vec<usize>>,
    seen: HashSet<usize>,
    origins: Vec<Origin>,
}

fn writes(event: &RecordedEvent) -> impl Iterator<Item = &RecordedTensor> {
    event.outputs.iter().filter(|t| t.usage != Usage::View && is_bad(t))
}

impl<'a> Search<'a> {
    pub(super) fn new(events: &'a [RecordedEvent]) -> Self {
        let mut writers: HashMap<u64, Vec<usize>> = HashMap::new();
        let is_operator = |&index: &usize| events[index].kind == EventKind::Operator;
        for index in ended(events).into_iter().filter(is_operator) {
            for memory in writes(&events[index]).filter_map(|tensor| tensor.memory) {
                let writers = writers.entry(memory).or_default();
                // What an inner operator wrote is the outer one's result, too.
                let inner = writers.last().is_some_and(|&last| is_inside(events, last, index));
                if !inner && writers.last() != Some(&index) {
                    writers.push(index);
                }
            }
        }
        Self { events, writers, seen: HashSet::new(), origins: Vec::new() }
    }

    /// Follows the numbers that were in a memory at the end.
    pub(super) fn follow(&mut self, memory: u64) {
        if let Some(writer) = self.writer(memory, None)
            && self.seen.insert(writer)
        {
            self.visit(writer);
        }
    }

    fn writer(&self, memory: u64, before: Option<usize>) -> Option<usize> {
        let writers = self.writers.get(&memory)?;
        // Events are numbered in the order in which they began: a writer that began before cannot read what it writes.
        writers.iter().rev().copied().find(|&writer| before.is_none_or(|before| writer < before))
    }

    /// The innermost operator around an event that was not given the memory that the event reads. Its own kernel filled
    /// that memory, as oneDNN's do on the CPU, without calling an operator.
    fn maker(&self, memory: u64, event: usize) -> Option<usize> {
        let events = self.events;
        let given = |index: usize| events[index].inputs.iter().any(|t| t.memory == Some(memory));
        std::iter::successors(events[event].parent, |&index| events[index].parent)
            .take_while(|&index| events[index].kind == EventKind::Operator)
            .find(|&index| !given(index))
    }

    /// Uses a list of what is left to visit, because a chain can be longer than the stack.
    fn visit(&mut self, event: usize) {
        let mut left = vec![event];
        while let Some(index) = left.pop() {
            let event = &self.events[index];
            let bad: Vec<(usize, &RecordedTensor)> =
                event.inputs.iter().enumerate().filter(|(_, tensor)| is_bad(tensor)).collect();
            let reads_masks = READ_MASKS.iter().any(|part| event.name.contains(part));
            let is_mask = |t| self.is_mask(t, index, MASK_STEPS, reads_masks);
            if bad.is_empty() || (breaks_mask(event) && bad.iter().all(|&(_, t)| is_mask(t))) {
                self.origins.push(Origin::Made(index));
                continue;
            }
            for (place, tensor) in bad {
                let writer = tensor.memory.and_then(|memory| {
                    self.writer(memory, Some(index)).or_else(|| self.maker(memory, index))
                });
                match writer {
                    Some(writer) if self.seen.insert(writer) => left.push(writer),
                    Some(_) => {}
                    None => self.origins.push(Origin::Given(index, place)),
                }
            }
        }
    }

    /// Whether a tensor has no other non-finite number than -inf, and was filled so or, if masks can be `given`, given.
    fn is_mask(&self, tensor: &RecordedTensor, before: usize, steps: usize, given: bool) -> bool {
        let only = tensor.numbers.is_some_and(|n| n.nan == 0 && n.positive_infinite == 0);
        let writer = tensor.memory.and_then(|memory| self.writer(memory, Some(before)));
        only && steps > 0
            && tensor.parameter.is_none()
            && writer.map_or(given, |writer| {
                let event = &self.events[writer];
                let bad: Vec<_> = event.inputs.iter().filter(|t| is_bad(t)).collect();
                match bad.is_empty() {
                    true => CHOSEN.contains(&event.name.as_str()),
                    false => bad.iter().all(|t| self.is_mask(t, writer, steps - 1, given)),
                }
            })
    }

    /// Whether an origin is the -inf of a mask, whose rows the program may have mixed with non-finite numbers.
    fn is_chosen(&self, origin: Origin) -> bool {
        let only =
            |t: &RecordedTensor| t.numbers.is_none_or(|n| n.nan == 0 && n.positive_infinite == 0);
        match origin {
            Origin::Given(event, place) => only(&self.events[event].inputs[place]),
            Origin::Made(event) => {
                let event = &self.events[event];
                CHOSEN.contains(&event.name.as_str()) && event.outputs.iter().all(only)
            }
        }
    }

    /// The origins that were found, in the order of the recording. Masks are among them only if there is nothing else.
    pub(super) fn origins(mut self) -> Vec<Origin> {
        let others: Vec<Origin> =
            self.origins.iter().copied().filter(|&origin| !self.is_chosen(origin)).collect();
        if !others.is_empty() {
            self.origins = others;
        }
        self.origins.sort_by_key(|origin| match *origin {
            Origin::Given(event, _) | Origin::Made(event) => event,
        });
        self.origins.dedup();
        self.origins
    }
}

/// Whether the operator made another non-finite number than -inf.
fn breaks_mask(event: &RecordedEvent) -> bool {
    writes(event).any(|t| t.numbers.is_some_and(|n| n.nan + n.positive_infinite > 0))
}

fn is_inside(events: &[RecordedEvent], inner: usize, outer: usize) -> bool {
    std::iter::successors(events[inner].parent, |&index| events[index].parent)
        .any(|index| index == outer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::insight::{Numbers, Times};

    /// A tensor of which a number may be infinite.
    fn tensor(memory: u64, infinite: i64, usage: Usage) -> RecordedTensor {
        RecordedTensor {
            memory: Some(memory),
            parameter: None,
            offset: 0,
            version: 0,
            elements: 4,
            kind: Some(tch::Kind::Float),
            numbers: Some(Numbers { positive_infinite: infinite, ..Numbers::default() }),
            usage,
            sizes: Default::default(),
            dims: 1,
            dtype: 6,
            element_bytes: 4,
            device: (0, 0),
        }
    }

    fn operator(
        name: &str,
        parent: Option<usize>,
        ended: u64,
        inputs: &[RecordedTensor],
        outputs: &[RecordedTensor],
    ) -> RecordedEvent {
        RecordedEvent {
            kind: EventKind::Operator,
            name: name.to_owned(),
            inputs: inputs.to_vec(),
            outputs: outputs.to_vec(),
            parent,
            ended: Some(ended),
            sequence: -1,
            forward_thread: 0,
            repeated: None,
            is_counted: false,
            compared: None,
            autocast: None,
            composite: false,
            size: 0,
            flags: 0,
            times: Times::default(),
        }
    }

    fn origins(events: &[RecordedEvent], memory: u64) -> Vec<Origin> {
        let mut search = Search::new(events);
        search.follow(memory);
        search.origins()
    }

    const INPUT: u64 = 1;
    const OUTPUT: u64 = 2;

    /// oneDNN's convolution fills its result without an operator, and adds the bias with one.
    fn convolution(kernel_reads: u64) -> Vec<RecordedEvent> {
        let finite = tensor(INPUT, 0, Usage::Read);
        let read = tensor(kernel_reads, (kernel_reads == OUTPUT).into(), Usage::Read);
        let (bad, made) = (tensor(OUTPUT, 1, Usage::Read), tensor(OUTPUT, 1, Usage::Write));
        vec![
            operator("aten::conv2d", None, 2, &[finite], &[made]),
            operator("aten::mkldnn_convolution", Some(0), 1, &[read], &[made]),
            operator("aten::add_", Some(1), 0, &[bad], &[made]),
        ]
    }

    #[test]
    fn what_a_kernel_fills_without_an_operator_was_made_by_the_innermost_operator() {
        assert_eq!(origins(&convolution(INPUT), OUTPUT), [Origin::Made(1)]);
        // The inner one was given that memory, so that the outer one filled it.
        assert_eq!(origins(&convolution(OUTPUT), OUTPUT), [Origin::Made(0)]);
    }

    #[test]
    fn what_no_operator_around_a_reader_can_have_filled_was_given() {
        let (bad, made) = (tensor(OUTPUT, 1, Usage::Read), tensor(OUTPUT, 1, Usage::Write));
        let alone = [operator("aten::add_", None, 0, &[bad], &[made])];
        assert_eq!(origins(&alone, OUTPUT), [Origin::Given(0, 0)]);
        // A named stretch of the program fills nothing.
        let mut named = convolution(INPUT);
        for event in &mut named[..2] {
            event.kind = EventKind::Name;
        }
        assert_eq!(origins(&named, OUTPUT), [Origin::Given(2, 0)]);
    }
}
