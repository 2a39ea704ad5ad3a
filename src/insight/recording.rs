//! A recorded iteration: its events, and the part of the model and the forward operator that each belongs to. Parts are
//! known by the module of a parameter, or by a name that the program gave.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::error::Result;
use crate::ffi::insight::{
    EventKind, Name, RawRecording, RecordedEvent, RecordedTensor, RecordingMode, SavedTensor, Usage,
};

/// The pass in which an operator ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(clippy::exhaustive_enums, reason = "there is no third")]
pub enum Pass {
    /// The forward pass, which includes the loss.
    Forward,
    /// The backward pass.
    Backward,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        })
    }
}

/// The part of the model, or else the module before, in a line on an operator; nothing if neither is known.
pub(super) fn placed(path: Option<&str>, after: Option<&str>) -> String {
    match (path, after) {
        (Some(path), _) => format!(" in {path}"),
        (None, Some(module)) => format!(" after {module}"),
        (None, None) => String::new(),
    }
}

/// Begins the part of operators without a name that follow a module.
pub(super) const AFTER: &str = "after ";

/// How many recordings run in this process. The threads of a backward pass take part in that of another thread.
static RECORDINGS: AtomicUsize = AtomicUsize::new(0);

/// Counts a recording while it runs.
struct Running(());

impl Running {
    fn new() -> Self {
        RECORDINGS.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        RECORDINGS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs `f` under a name, by which an [`Explanation`](super::Explanation) calls what `f` computes, forward and
/// backward. Names nest: inside of `encoder`, the name `layers.3` is reported as `encoder.layers.3`. While nothing is
/// recorded, it only calls `f`.
///
/// Operators that use a parameter are known by its name in the `VarStore` and need no other. Use this for parts without
/// parameters, such as the products of an attention. The counterpart of `torch.profiler.record_function`.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::insight::named;
///
/// let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
/// let scores = named("attention", || x.matmul(&x));
/// assert_eq!(scores.size(), [2, 2]);
/// ```
pub fn named<T>(name: &str, f: impl FnOnce() -> T) -> T {
    let recorded = RECORDINGS.load(Ordering::Relaxed) > 0;
    // A name that cannot be made is missing in a report, which is no reason to fail here.
    let name = recorded.then(|| Name::begin(name)).and_then(Result::ok);
    let result = f();
    drop(name);
    result
}

/// A model's parameters by name, and the module of each: its name without the last part. A parameter at the root is its
/// own module.
#[derive(Debug)]
pub(super) struct RecordedModel {
    parameters: Vec<(String, Tensor)>,
    modules: Arc<[String]>,
}

impl RecordedModel {
    pub(super) fn new(parameters: Vec<(String, Tensor)>) -> Self {
        let module = |name: &String| {
            name.rsplit_once('.').map_or(name.as_str(), |(module, _)| module).to_owned()
        };
        let modules = parameters.iter().map(|(name, _)| module(name)).collect();
        Self { parameters, modules }
    }

    pub(super) fn parameters(&self) -> &[(String, Tensor)] {
        &self.parameters
    }
}

/// The events of an iteration.
#[derive(Debug)]
pub(super) struct Recording {
    raw: RawRecording,
    modules: Arc<[String]>,
    pub(super) events: Vec<RecordedEvent>,
    /// The innermost operator, or the custom function, that made the backward node of each thread and sequence number.
    forward: HashMap<(u64, i64), usize>,
    /// The backward node that each event of the engine ran.
    nodes: HashMap<usize, usize>,
    /// The parameters whose numbers are in a memory of their own, after a cast or a copy.
    copies: HashMap<u64, usize>,
}

/// Operators that return the numbers of their input.
const COPIES: &[&str] =
    &["aten::_to_copy", "aten::to", "aten::clone", "aten::contiguous", "aten::copy_"];

impl Recording {
    /// Records what `f` runs on this thread. It ends if `f` panics, too.
    pub(super) fn of<T>(
        model: &RecordedModel,
        mode: RecordingMode<'_>,
        f: impl FnOnce() -> Result<T>,
    ) -> Result<(Self, T)> {
        Self::around(model, mode, |_| f())
    }

    /// Records what `f` runs on this thread, and notes what autograd saves meanwhile.
    pub(super) fn of_saved<T>(
        model: &RecordedModel,
        f: impl FnOnce() -> Result<T>,
    ) -> Result<(Self, T)> {
        Self::around(model, RecordingMode::Times, |raw| raw.saves()?.during(f)?)
    }

    /// What was noted, once the recording has ended.
    pub(super) fn saved(&self) -> Result<Vec<SavedTensor>> {
        self.raw.saved()
    }

    fn around<T>(
        model: &RecordedModel,
        mode: RecordingMode<'_>,
        f: impl FnOnce(&RawRecording) -> Result<T>,
    ) -> Result<(Self, T)> {
        let parameters: Vec<&Tensor> = model.parameters.iter().map(|(_, tensor)| tensor).collect();
        let mut raw = RawRecording::start(&parameters, mode)?;
        let running = Running::new();
        let result = f(&raw);
        drop(running);
        let stopped = raw.stop();
        let result = result?;
        stopped?;
        let events = raw.events()?;
        let (forward, nodes, copies) = (HashMap::new(), HashMap::new(), HashMap::new());
        let modules = Arc::clone(&model.modules);
        let mut recording = Self { raw, modules, events, forward, nodes, copies };
        for (index, event) in recording.events.iter().enumerate() {
            if let (EventKind::Node, Some(engine)) = (event.kind, event.parent) {
                recording.nodes.insert(engine, index);
            }
        }
        for index in recording.ended() {
            let event = &recording.events[index];
            let makes_node = event.kind == EventKind::Operator || is_function(event);
            if makes_node && event.sequence >= 0 {
                let node = (event.forward_thread, event.sequence);
                recording.forward.entry(node).or_insert(index);
            }
        }
        recording.find_copies();
        Ok((recording, result))
    }

    fn find_copies(&mut self) {
        for index in self.ended() {
            let event = &self.events[index];
            let is_copy = COPIES.contains(&event.name.as_str());
            let parameter = is_copy.then(|| self.parameter_of(event)).flatten();
            let written = event.outputs.iter().filter(|output| output.usage != Usage::View);
            for memory in written.filter_map(|output| output.memory) {
                // A result that begins as a copy, as a product that adds a bias, does not stay one.
                match parameter {
                    Some(parameter) => self.copies.insert(memory, parameter),
                    None => self.copies.remove(&memory),
                };
            }
        }
    }

    /// The events in the order of their ends.
    pub(super) fn ended(&self) -> Vec<usize> {
        ended(&self.events)
    }

    /// The parameter of which a tensor is a view, a cast or a copy.
    fn parameter(&self, tensor: &RecordedTensor) -> Option<usize> {
        tensor.parameter.or_else(|| self.copies.get(&tensor.memory?).copied())
    }

    /// The first parameter that an event reads.
    fn parameter_of(&self, event: &RecordedEvent) -> Option<usize> {
        event.inputs.iter().find_map(|tensor| self.parameter(tensor))
    }

    /// The module of that parameter.
    fn module_of(&self, event: &RecordedEvent) -> Option<String> {
        self.modules.get(self.parameter_of(event)?).cloned()
    }

    /// The module of each parameter.
    pub(super) fn modules(&self) -> &[String] {
        &self.modules
    }

    /// Returns whether a compared run called other operators than the reference.
    pub(super) fn differs(&self) -> bool {
        self.raw.differs()
    }

    pub(super) fn memory(&self, tensor: &Tensor) -> Result<Option<u64>> {
        if tensor.defined() { self.raw.memory(tensor) } else { Ok(None) }
    }

    /// The event and those that it ran in, from the inside out.
    pub(super) fn ancestors(&self, index: usize) -> impl Iterator<Item = (usize, &RecordedEvent)> {
        let parent = |&index: &usize| self.events[index].parent;
        std::iter::successors(Some(index), parent).map(|index| (index, &self.events[index]))
    }

    /// The operator that the program or a backward node called, in which this event ran.
    pub(super) fn outermost(&self, index: usize) -> Option<usize> {
        let operators = self.ancestors(index);
        let operators = operators.take_while(|(_, event)| event.kind == EventKind::Operator);
        operators.last().map(|(index, _)| index)
    }

    /// The backward node that ran this event, or for which the engine ran it.
    pub(super) fn node(&self, index: usize) -> Option<usize> {
        self.ancestors(index).find_map(|(index, event)| match event.kind {
            EventKind::Node => Some(index),
            EventKind::Engine => self.nodes.get(&index).copied(),
            EventKind::Operator | EventKind::Name => None,
        })
    }

    /// The pass to which the event belongs, and the forward operator of an event of the backward pass.
    pub(super) fn pass(&self, index: usize) -> (Pass, Option<usize>) {
        match self.node(index) {
            None => (Pass::Forward, None),
            Some(node) => {
                let node = &self.events[node];
                let forward = self.forward.get(&(node.forward_thread, node.sequence)).copied();
                (Pass::Backward, forward)
            }
        }
    }

    /// The part of the model to which an event belongs: where it ran or, for a backward operator, where the forward
    /// operator did.
    pub(super) fn part(&self, index: usize) -> Option<String> {
        let (_, forward) = self.pass(index);
        self.path(index).or_else(|| self.path(forward?))
    }

    /// The part of the model that ran the event: the module of the parameter that the operator uses, or the names that
    /// the program gave. Those around a backward pass are not of its operators.
    pub(super) fn path(&self, index: usize) -> Option<String> {
        let ancestors = || {
            let outer = self.ancestors(index);
            outer.take_while(|(_, e)| matches!(e.kind, EventKind::Operator | EventKind::Name))
        };
        let module = ancestors().find_map(|(_, event)| self.module_of(event));
        if module.is_some() {
            return module;
        }
        let mut names: Vec<&str> = ancestors()
            .filter(|(_, event)| event.kind == EventKind::Name && !is_function(event))
            .map(|(_, event)| event.name.as_str())
            .collect();
        names.reverse();
        (!names.is_empty()).then(|| names.join("."))
    }

    /// The results that grow with a loss: those of operators that read it or what was computed from it.
    pub(super) fn grown_from(&self, loss: Option<u64>) -> Vec<RecordedTensor> {
        let mut grown: HashSet<u64> = loss.into_iter().collect();
        let mut results = Vec::new();
        for event in self.ended().into_iter().map(|index| &self.events[index]) {
            let reads = |t: &RecordedTensor| {
                t.usage != Usage::Overwrite && t.memory.is_some_and(|m| grown.contains(&m))
            };
            if event.inputs.iter().any(reads) {
                grown.extend(event.outputs.iter().filter_map(|tensor| tensor.memory));
                // A view can be of memory that nothing was written to yet.
                results.extend(event.outputs.iter().filter(|t| t.usage != Usage::View).copied());
            }
        }
        results
    }

    /// The nanoseconds of each event without those that it ran, and with them. What the recording itself did counts for
    /// nobody.
    pub(super) fn times(&self) -> (Vec<i64>, Vec<i64>) {
        let events = &self.events;
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

    /// The part of an operator of the forward pass for which neither a parameter nor a name tells one.
    pub(super) fn unnamed_part(&self, index: usize) -> String {
        let before = self.module_before(index);
        before.map_or_else(|| "start".to_owned(), |module| format!("{AFTER}{module}"))
    }

    /// The last module before an event whose own part is unknown.
    pub(super) fn module_before(&self, index: usize) -> Option<String> {
        (0..index).rev().find_map(|before| self.module_of(&self.events[before]))
    }
}

/// Returns whether the event is the call of a custom function: a name with a backward node. Nothing runs in it.
fn is_function(event: &RecordedEvent) -> bool {
    event.kind == EventKind::Name && event.sequence >= 0
}

/// The events in the order of their ends.
pub(super) fn ended(events: &[RecordedEvent]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..events.len()).collect();
    order.retain(|&index| events[index].ended.is_some());
    order.sort_by_key(|&index| events[index].ended);
    order
}

/// Returns whether a tensor has non-finite numbers. What was not counted has none.
pub(super) fn is_bad(tensor: &RecordedTensor) -> bool {
    tensor.numbers.is_some_and(|n| n.positive_infinite + n.negative_infinite + n.nan > 0)
}
