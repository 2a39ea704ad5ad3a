//! The parts of a checkpoint.
//!
//! Parts are the common form of both file formats: `stateful` makes them of states and restores states from them,
//! `manifest` writes and reads them as safetensors, and `torch_layout` translates them to and from PyTorch's layout.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use torch_files::{Checksum, TensorRef, TorchFile, Value};

use crate::checkpoint::entry::TensorEntry;
use crate::error::{CheckpointError, Result, shown};
use crate::optim::ParamGroupState;
use crate::scale::GradScalerState;

/// The name and version of this crate, as written into its files.
pub(crate) const WRITER: &str = concat!("tch-amp ", env!("CARGO_PKG_VERSION"));

/// The most parts that a file may have, counting those within others. Each takes more memory than a value.
pub(crate) const MAX_PARTS: usize = 100_000;

/// The names in the state of PyTorch's `AveragedModel`: that of the number of updates, and the beginning of all others.
pub(crate) const UPDATES: &str = "n_averaged";
pub(crate) const MODULE: &str = "module.";

/// The name of what is left of the start of averages, which only this crate saves.
pub(crate) const REST: &str = "rest";

/// The name of the number of updates in averages of mmengine, which otherwise have the names of an `AveragedModel`.
pub(crate) const STEPS: &str = "steps";

/// One named part of a checkpoint.
#[derive(Debug)]
pub(crate) enum Part {
    Model(BTreeMap<String, TensorEntry>),
    Optimizer(OptimizerPart),
    Scaler(GradScalerState),
    State(StatePart),
    Tensor(TensorEntry),
    /// Always plain.
    Value(Value),
    /// An empty dict from a Python program, which may be a model without parameters, a value, or the state of a
    /// disabled scaler.
    Empty,
    /// A part from a Python program that this crate does not support, with the reason.
    Unknown(String),
}

/// The state of an optimizer, with the content of an [`OptimizerState`](crate::optim::OptimizerState).
#[derive(Debug)]
pub(crate) struct OptimizerPart {
    /// Boxed, because the map of each parameter has room for eleven entries.
    pub(crate) state: BTreeMap<String, BTreeMap<String, Box<TensorEntry>>>,
    pub(crate) param_groups: Vec<ParamGroupState>,
    /// Whether the names are PyTorch's numbers, which are to be matched by position.
    pub(crate) params_are_numbers: bool,
    /// Whether an `Adam` may in fact be an `AdamW`: files from PyTorch before 2.7 do not tell them apart.
    pub(crate) adam_or_adamw: bool,
    /// The parameters that Muon steps. Those of its optimizer that AdamW steps are the others.
    pub(crate) by_muon: BTreeSet<String>,
    /// The other entries that a Python program has put into the dict, such as the state of a scaler. An optimizer with
    /// any cannot be saved.
    pub(crate) others: BTreeMap<String, Part>,
}

/// The state of any other type that has tensors.
#[derive(Debug)]
pub(crate) struct StatePart {
    pub(crate) tensors: BTreeMap<String, TensorEntry>,
    /// Always a map of plain values.
    pub(crate) values: Value,
    /// The entries that are neither tensors nor values: states within a state of a Python program, and what this crate
    /// does not support. A state with any cannot be saved.
    pub(crate) others: BTreeMap<String, Part>,
    /// Tensors beside a model at the top of a file from Python, which may be variables of it. They are parts as well,
    /// and belong to the model if it has variables of these names.
    pub(crate) maybe: BTreeMap<String, TensorEntry>,
    /// The other entries of the state of PyTorch's `AveragedModel`, if the tensors are averages of a model.
    pub(crate) beside_averages: Option<BTreeMap<String, TensorEntry>>,
}

impl StatePart {
    pub(crate) fn new(tensors: BTreeMap<String, TensorEntry>, values: Value) -> Self {
        let (others, maybe) = (BTreeMap::new(), BTreeMap::new());
        Self { tensors, values, others, maybe, beside_averages: None }
    }
}

/// The target of a name: a part, or something within one.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NamedPart<'a> {
    Part(&'a Part),
    Tensor(&'a TensorEntry),
    Value(&'a Value),
}

impl NamedPart<'_> {
    /// Names the kind, as [`Part::describe`] does.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Part(part) => part.describe(),
            Self::Tensor(_) => "a tensor".to_owned(),
            Self::Value(value) => describe_value(value).to_owned(),
        }
    }
}

/// Names the kind of a value, with an article.
fn describe_value(value: &Value) -> &'static str {
    let has = |name| value.get(name).is_some();
    if has("loss_scaler0") || has("loss_scale") && has("unskipped") {
        "the state of a loss scaler of apex (its options are not in the file: make a new scaler whose `init_scale` is \
         its `loss_scale`)"
    } else {
        "a value"
    }
}

/// Finds a part by its name, or what is within a part by the names on the way to it, separated by dots.
pub(crate) fn find<'a>(parts: &'a BTreeMap<String, Part>, name: &str) -> Option<NamedPart<'a>> {
    if let Some(part) = parts.get(name) {
        return Some(NamedPart::Part(part.only()));
    }
    let places = name.match_indices('.').map(|(at, _)| at);
    let inside = |at: usize| parts.get(&name[..at])?.inside(&name[at + 1..]);
    places.into_iter().find_map(inside)
}

impl Part {
    /// Names the kind of the part, with an article, for messages.
    pub(crate) fn describe(&self) -> String {
        let kind = match self {
            Self::Model(_) => "a model",
            Self::Optimizer(_) => "an optimizer",
            Self::Scaler(_) => "a scaler",
            Self::State(StatePart { others, maybe, .. }) => match others.iter().next() {
                Some((name, other)) => {
                    let why = match other {
                        Self::Unknown(why) => format!(", which is unsupported ({why})"),
                        _ => String::new(),
                    };
                    return format!("a dict that holds others, such as `….{}`{why}", shown(name));
                }
                None if !maybe.is_empty() => "a model",
                None => "a state",
            },
            Self::Tensor(_) => "a tensor",
            Self::Value(value) => describe_value(value),
            Self::Empty => "empty",
            Self::Unknown(why) => return format!("unsupported ({why})"),
        };
        kind.to_owned()
    }

    /// Makes a model of its tensors, of what is not supported, and of further tensors that it may have.
    pub(crate) fn model(
        tensors: BTreeMap<String, TensorEntry>,
        others: BTreeMap<String, Self>,
        maybe: BTreeMap<String, TensorEntry>,
    ) -> Self {
        if others.is_empty() && maybe.is_empty() {
            return Self::Model(tensors);
        }
        let values = Value::Map(Vec::new());
        Self::State(StatePart { others, maybe, ..StatePart::new(tensors, values) })
    }

    /// Returns what a list of one state holds, and any other part itself.
    fn only(&self) -> &Self {
        match self {
            Self::State(StatePart { tensors, values: Value::Map(values), others, .. })
                if tensors.is_empty() && values.is_empty() && others.len() == 1 =>
            {
                others.get(FIRST).unwrap_or(self)
            }
            _ => self,
        }
    }

    /// Finds what is within the part.
    fn inside(&self, name: &str) -> Option<NamedPart<'_>> {
        match self {
            Self::Model(tensors) => tensors.get(name).map(NamedPart::Tensor),
            Self::State(StatePart { tensors, values, others, .. }) => {
                let tensor = || tensors.get(name).map(NamedPart::Tensor);
                let value = || values.within(name).map(NamedPart::Value);
                tensor().or_else(value).or_else(|| find(others, name))
            }
            Self::Optimizer(OptimizerPart { others, .. }) => find(others, name),
            Self::Value(value) => value.within(name).map(NamedPart::Value),
            _ => None,
        }
    }

    /// Returns whether a file can hold the part.
    pub(crate) fn is_supported(&self) -> bool {
        match self {
            Self::State(StatePart { others, .. })
            | Self::Optimizer(OptimizerPart { others, .. }) => others.is_empty(),
            Self::Unknown(_) => false,
            _ => true,
        }
    }

    /// Returns every tensor with its name within the part. The name is empty for a [`Part::Tensor`].
    pub(crate) fn tensors(&self) -> Box<dyn Iterator<Item = (String, &TensorEntry)> + '_> {
        match self {
            Self::Model(tensors) | Self::State(StatePart { tensors, .. }) => {
                Box::new(tensors.iter().map(|(n, entry)| (n.clone(), entry)))
            }
            Self::Optimizer(part) => {
                Box::new(part.state.iter().flat_map(|(parameter, entries)| {
                    let full = move |key: &str| format!("{parameter}/{key}");
                    entries.iter().map(move |(key, entry)| (full(key), &**entry))
                }))
            }
            Self::Tensor(entry) => Box::new(std::iter::once((String::new(), entry))),
            Self::Scaler(_) | Self::Value(_) | Self::Empty | Self::Unknown(_) => {
                Box::new(std::iter::empty())
            }
        }
    }
}

/// The name of the first item of a list.
const FIRST: &str = "0";

/// Returns why a part cannot have this name, or `None` if it can.
pub(crate) fn problem_of_name(name: &str) -> Option<&'static str> {
    let reserved = ["", "__metadata__", "tch_amp"].contains(&name);
    (reserved || name.contains('/')).then_some(
        "the name of a part must not be empty, `__metadata__` or `tch_amp`, nor contain `/`",
    )
}

/// The content of a file, and the checksums that this crate has added to it.
pub(crate) struct Archive {
    pub(crate) parts: BTreeMap<String, Part>,
    /// Each tensor with its name and its checksum.
    pub(crate) checks: Vec<(String, TensorRef, Checksum)>,
    pub(crate) file: Arc<TorchFile>,
}

impl Archive {
    /// Makes the content of a file without such checksums.
    pub(crate) fn new(parts: BTreeMap<String, Part>, file: Arc<TorchFile>) -> Self {
        Self { parts, checks: Vec::new(), file }
    }

    /// Reads the file once and compares all checksums.
    pub(crate) fn verify(&self) -> Result<()> {
        let failed = CheckpointError::reading(self.file.path());
        self.file.verify().map_err(&failed)?;
        let checks = self.checks.iter().map(|(name, tensor, sum)| (name.as_str(), tensor, *sum));
        let checks: Vec<_> = checks.collect();
        Ok(self.file.verify_tensors(&checks).map_err(&failed)?)
    }
}
