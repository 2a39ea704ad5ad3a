//! The parts of a checkpoint.
//!
//! Parts are the common form of both file formats: `stateful` makes them of states and restores states from them,
//! `safetensors` writes and reads them directly, and `convert` translates them to and from PyTorch's layout.

use std::collections::{BTreeMap, BTreeSet};

use crate::checkpoint::entry::Entry;
use crate::checkpoint::plain::Plain;
use crate::optim::ParamGroupState;
use crate::scaler::GradScalerState;

/// One named part of a checkpoint.
#[derive(Debug)]
pub(crate) enum Part {
    Model(BTreeMap<String, Entry>),
    Optimizer(OptimizerPart),
    Scaler(GradScalerState),
    State(StatePart),
    Tensor(Entry),
    Value(Plain),
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
    pub(crate) state: BTreeMap<String, BTreeMap<String, Box<Entry>>>,
    pub(crate) param_groups: Vec<ParamGroupState>,
    /// Whether the names are PyTorch's numbers, which are to be matched by position.
    pub(crate) params_are_numbers: bool,
    /// Whether an `Adam` may in fact be an `AdamW`: files from PyTorch before 2.7 do not tell them apart.
    pub(crate) adam_or_adamw: bool,
    /// The parameters that Muon steps. Those of its optimizer that AdamW steps are the others.
    pub(crate) by_muon: BTreeSet<String>,
}

/// The state of any other type that has tensors.
#[derive(Debug)]
pub(crate) struct StatePart {
    pub(crate) tensors: BTreeMap<String, Entry>,
    /// Always a map.
    pub(crate) values: Plain,
}

impl Part {
    /// Names the kind of the part, with an article, for messages.
    pub(crate) fn describe(&self) -> String {
        let kind = match self {
            Self::Model(_) => "a model",
            Self::Optimizer(_) => "an optimizer",
            Self::Scaler(_) => "a scaler",
            Self::State(_) => "a state",
            Self::Tensor(_) => "a tensor",
            Self::Value(_) => "a value",
            Self::Empty => "empty",
            Self::Unknown(why) => return format!("unsupported ({why})"),
        };
        kind.to_owned()
    }

    /// Returns every tensor with its name within the part. The name is empty for a [`Part::Tensor`].
    pub(crate) fn tensors(&self) -> Box<dyn Iterator<Item = (String, &Entry)> + '_> {
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

/// Returns why a part cannot have this name, or `None` if it can.
pub(crate) fn problem_of_name(name: &str) -> Option<&'static str> {
    let reserved = ["", "__metadata__", "tch_amp"].contains(&name);
    (reserved || name.contains('/')).then_some(
        "the name of a part must not be empty, `__metadata__` or `tch_amp`, nor contain `/`",
    )
}
