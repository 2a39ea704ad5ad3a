//! The findings of a tracer, and its advice.

use std::collections::{HashMap, HashSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use super::dtype::Dtype;
use super::numbers;
use super::recording::{Pass, Recording, ended, is_bad};
use crate::error::Number;
use crate::ffi::insight::{EventKind, RecordedEvent, RecordedTensor, Usage};

/// Why a step was skipped. Its text, by `Display`, is meant for a terminal; its fields for programs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Explanation {
    /// The iteration, counted from 1 by [`Tracer::begin`](super::Tracer::begin).
    pub iteration: u64,
    /// The loss scale of the iteration.
    #[serde(with = "numbers")]
    pub scale: f64,
    /// The loss scale when the explanation was asked for.
    #[serde(with = "numbers")]
    pub scale_now: f64,
    /// Why the gradients were not finite.
    pub cause: Cause,
    /// The operator that made the first non-finite number; `None` if no operator did.
    pub culprit: Option<Culprit>,
    /// The names of the parameters whose gradients were not finite.
    pub gradients: Vec<String>,
    /// How often in succession a too large scale has made the same part of the model overflow, this time included,
    /// while the scale fell; 0 for another cause.
    #[serde(default)]
    pub repeated: u32,
    /// The advice, in one sentence.
    #[serde(default)]
    pub advice: String,
}

/// Why gradients were not finite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Cause {
    /// A parameter or buffer had non-finite elements before the iteration. Precision has nothing to do with it.
    Parameter {
        /// Its name in the `VarStore`.
        name: String,
    },
    /// A tensor that is neither a parameter nor computed in the iteration, such as an input or a target, had non-finite
    /// elements. Precision has nothing to do with it.
    Input {
        /// The operator that read it.
        operator: String,
        /// The part of the model that read it, if it is known, as in [`Culprit::path`].
        path: Option<String>,
        /// Its place among the tensors that the operator read, from 0.
        place: usize,
        /// The problem.
        values: Values,
    },
    /// Only the loss scale was too large: with a scale of 1 the same iteration is finite.
    Scale {
        /// The largest power of two, at least 1, with which the iteration is finite. It is estimated from the numbers
        /// of a run with a scale of 1, and verified by a run with this scale.
        largest_finite: f64,
    },
    /// The values themselves overflowed or were undefined, whatever the scale.
    Values,
    /// The replay was finite: the step was skipped for another reason, for example because of another rank's gradients,
    /// or because the iteration uses random numbers of its own.
    Finite,
}

/// The problem with the numbers of a tensor: how many of them are not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Values {
    /// The number of elements that are +inf.
    pub positive_infinite: i64,
    /// The number of elements that are -inf.
    pub negative_infinite: i64,
    /// The number of elements that are NaN.
    pub nan: i64,
    /// The number of all elements.
    pub elements: i64,
}

/// The operator that made the first non-finite number from finite ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Culprit {
    /// libtorch's name of the operator, such as `aten::bmm`.
    pub operator: String,
    /// The operator that the program or the autograd engine called, if that is another one.
    pub within: Option<String>,
    /// The part of the model: the module of the parameter that it uses, or a name given by [`named`](super::named). For
    /// a backward operator, that of the forward operator to which it belongs.
    pub path: Option<String>,
    /// The last module before, in the order of execution, if `path` is unknown.
    pub after: Option<String>,
    /// The pass in which it ran.
    pub pass: Pass,
    /// The forward operator to which a backward operator belongs, or the name of the custom function.
    pub forward_operator: Option<String>,
    /// The dtype of its result.
    pub dtype: Dtype,
    /// The problem of its result.
    pub values: Values,
    /// For each floating-point tensor that it read, the largest of the finite absolute values.
    pub largest_inputs: Vec<f64>,
    /// The largest absolute value of the result if the operator is run in f32 instead, which has the range of bf16. It
    /// may be infinite or NaN. `None` if it was not run: its inputs or its result are not in half precision, it works
    /// in place or draws random numbers, it has no f32 kernel, or 32 operators of the iteration were already run again.
    #[serde(with = "numbers::option")]
    pub largest_in_f32: Option<f64>,
}

/// How often in succession a part overflows before the scale is no longer to blame.
const AGAIN: u32 = 3;

impl Explanation {
    /// Returns the advice.
    pub(super) fn advise(&self) -> String {
        match &self.cause {
            Cause::Parameter { name } => format!(
                "restore {name} from a checkpoint; if it is a buffer, such as a running mean, restore buffers after \
                 skipped steps (buffers::BufferSnapshot)"
            ),
            Cause::Input { .. } => {
                "check the data of this batch and the targets of the loss".to_owned()
            }
            Cause::Scale { .. } => match &self.culprit {
                Some(culprit) if self.repeated >= AGAIN && culprit.dtype == Dtype::F16 => format!(
                    "keep {} in f32, or use bf16: it has overflowed {} times in succession, and the scale falls for it alone",
                    culprit.place_or_after(),
                    self.repeated
                ),
                _ => "none is needed: the scaler has found its scale by such skips, and lowers it now"
                    .to_owned(),
            },
            Cause::Finite => {
                "with several ranks, ask the others; otherwise make the closure repeat the iteration, with the same \
                 batch and loss"
                    .to_owned()
            }
            Cause::Values => match &self.culprit {
                Some(culprit) => culprit.advice(),
                None => "look at the loss and the gradients: no recorded operator made the first non-finite \
                         number"
                    .to_owned(),
            },
        }
    }
}

impl Culprit {
    /// Describes an operator of a recording.
    pub(super) fn new(recording: &Recording, index: usize) -> Self {
        let event = &recording.events[index];
        let (pass, forward) = recording.pass(index);
        let path = recording.part(index);
        let after = match path {
            None => recording.module_before(forward.unwrap_or(index)),
            Some(_) => None,
        };
        let output = event.outputs.iter().find(|tensor| is_bad(tensor));
        let name = |index: usize| recording.events[index].name.clone();
        let largest = event.inputs.iter().filter_map(|tensor| tensor.numbers);
        Self {
            operator: event.name.clone(),
            within: recording.outermost(index).map(name).filter(|outer| *outer != event.name),
            path,
            after,
            pass,
            forward_operator: forward
                .map(|index| recording.outermost(index).map_or_else(|| name(index), name)),
            dtype: output.map_or(Dtype::Other, Dtype::of),
            values: output.map(Values::of).unwrap_or_default(),
            largest_inputs: largest.map(|numbers| numbers.largest).collect(),
            largest_in_f32: event.repeated,
        }
    }

    fn place(&self) -> &str {
        self.path.as_deref().unwrap_or("this part")
    }

    fn place_or_after(&self) -> String {
        match (&self.path, &self.after) {
            (None, Some(module)) => format!("what follows {module}"),
            _ => self.place().to_owned(),
        }
    }

    /// Returns the advice for values that overflow or are undefined whatever the scale.
    fn advice(&self) -> String {
        let operator = self.operator.trim_start_matches("aten::").trim_end_matches('_');
        let f32_is_finite = self.largest_in_f32.is_some_and(f64::is_finite);
        let is_cast = ["_to_copy", "to", "copy"].contains(&operator);
        let is = |dtype| self.dtype == dtype;
        let advice = match operator {
            _ if is(Dtype::F16) && is_cast => {
                "use bf16, or keep {place} in f32: its numbers exceed 65504 before they are cast to fp16"
            }
            "bmm" | "matmul" | "baddbmm" if is(Dtype::F16) && f32_is_finite => {
                "scale one factor before the product (in attention, q by 1/sqrt(d)), keep {place} in f32, or use bf16"
            }
            _ if is(Dtype::F16) && f32_is_finite => "keep {place} in f32, or use bf16",
            "log" | "log2" | "log10" | "_log_softmax" => {
                "keep the argument of the logarithm in {place} above zero, for example by clamping it"
            }
            "div" | "reciprocal" | "rsqrt" => {
                "keep the divisor in {place} away from zero, for example by adding an epsilon"
            }
            "sqrt" | "norm" | "linalg_vector_norm" | "pow" if self.pass == Pass::Backward => {
                "the derivative in {place} is infinite at zero: add an epsilon before it"
            }
            "_softmax" | "softmax" => {
                "in {place}, a row of the softmax is masked as a whole; leave such rows out"
            }
            "exp" | "expm1" | "sinh" | "cosh" => "limit the argument of the exponential in {place}",
            _ if is(Dtype::F16) && self.largest_in_f32.is_none() => {
                "look at {place}, and try it in f32 or bf16"
            }
            _ if is(Dtype::BF16) && self.largest_in_f32.is_none() => {
                "look at {place}, and try it in f32"
            }
            _ => "look at {place}: it is not finite in f32 either, so precision is not the reason",
        };
        advice.replace("{place}", self.place())
    }
}

impl Values {
    /// Counted by a recording.
    pub(super) fn of(tensor: &RecordedTensor) -> Self {
        let numbers = tensor.numbers.unwrap_or_default();
        Self {
            positive_infinite: numbers.positive_infinite,
            negative_infinite: numbers.negative_infinite,
            nan: numbers.nan,
            elements: tensor.elements,
        }
    }
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts =
            [(self.positive_infinite, "+inf"), (self.negative_infinite, "-inf"), (self.nan, "NaN")];
        let counts = counts.iter().filter(|(count, _)| *count > 0);
        let counts: Vec<_> = counts.map(|(count, name)| format!("{name} in {count}")).collect();
        write!(f, "{} of {} elements", counts.join(", "), self.elements)
    }
}

impl fmt::Display for Culprit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.path, &self.after) {
            (Some(path), _) => write!(f, "{path}  ")?,
            (None, Some(module)) => write!(f, "after {module}  ")?,
            (None, None) => {}
        }
        write!(f, "{}", self.operator)?;
        if let Some(within) = &self.within {
            write!(f, " in {within}")?;
        }
        write!(f, "  {}, {}", self.dtype, self.pass)?;
        if let Some(forward) = &self.forward_operator {
            write!(f, " of {forward}")?;
        }
        write!(f, "\n  first non-finite: {}", self.values)?;
        match self.largest_inputs.iter().copied().map(short).collect::<Vec<_>>().as_slice() {
            [] => {}
            [one] => write!(f, "; the largest finite number of its input is {one}")?,
            all => write!(f, "; the largest finite numbers of its inputs are {}", all.join(", "))?,
        }
        match self.largest_in_f32 {
            Some(largest) if largest.is_finite() => {
                write!(
                    f,
                    "\n  the same operator in bf16 or f32 is finite (largest {})",
                    short(largest)
                )
            }
            Some(_) => write!(f, "\n  the same operator in f32 is not finite either"),
            None => Ok(()),
        }
    }
}

/// A number with four significant digits.
fn short(x: f64) -> String {
    match x.abs() {
        size if size != 0.0 && !(1e-3..1e5).contains(&size) => format!("{x:.2e}"),
        size if size.fract() == 0.0 => format!("{x}"),
        size => format!("{x:.*}", 3usize.saturating_sub(size.log10().max(0.0) as usize)),
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "iteration {} skipped, scale {}", self.iteration, Number(self.scale))?;
        if self.scale_now != self.scale {
            write!(f, " → {}", Number(self.scale_now))?;
        }
        match &self.cause {
            Cause::Parameter { name } => {
                write!(f, "\n  {name} was not finite before the iteration")?;
            }
            Cause::Input { operator, path, place, values } => {
                let path = path.as_ref().map(|path| format!(" in {path}")).unwrap_or_default();
                write!(
                    f,
                    "\n  an input of the iteration is not finite: tensor {place} of {operator}{path}, {values}"
                )?;
            }
            Cause::Finite => {
                write!(f, "\n  every gradient is finite when the iteration is run again here")?
            }
            Cause::Scale { .. } | Cause::Values => {}
        }
        if let Some(culprit) = &self.culprit {
            write!(f, ". Culprit: {culprit}")?;
        }
        if let (Some(first), Some(last)) = (self.gradients.first(), self.gradients.last()) {
            match self.gradients.len() {
                1 => write!(f, "\n  carried on into the gradient of {first}")?,
                count => write!(f, "\n  carried on into {count} gradients ({first} … {last})")?,
            }
        }
        if let Cause::Scale { largest_finite } = self.cause {
            let largest = Number(largest_finite);
            write!(
                f,
                "\n  with a scale of 1 it is finite; the largest finite scale is about {largest}"
            )?;
        }
        match self.advice.as_str() {
            // Earlier builds saved none.
            "" => write!(f, "\n  advice: {}", self.advise()),
            advice => write!(f, "\n  advice: {advice}"),
        }
    }
}

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
                // A tensor that an inner operator wrote is the outer one's result, too.
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

    /// Returns whether a tensor has no other non-finite number than -inf, and was filled so or, if masks can be
    /// `given`, given.
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

    /// Returns whether an origin is the -inf of a mask, whose rows the program may have mixed with non-finite numbers.
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

/// Returns whether the operator made another non-finite number than -inf.
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
