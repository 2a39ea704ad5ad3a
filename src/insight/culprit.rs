//! The description of the operator that made the first non-finite number.

use tch::{Kind, Tensor};

use super::explanation::{Culprit, Values};
use super::recording::{Recording, is_bad};
use crate::ffi::insight::RecordedTensor;

/// Describes an operator of a recording.
pub(super) fn culprit(
    recording: &Recording,
    index: usize,
    parameters: &[(String, Tensor)],
) -> Culprit {
    let modules = modules(parameters);
    let event = &recording.events[index];
    let (pass, forward) = recording.pass(index);
    let path = recording.part(index, &modules);
    let after = match path {
        None => recording.module_before(forward.unwrap_or(index), &modules),
        Some(_) => None,
    };
    let output = event.outputs.iter().find(|tensor| is_bad(tensor));
    let name = |index: usize| recording.events[index].name.clone();
    Culprit {
        operator: event.name.clone(),
        within: recording.outermost(index).map(name).filter(|outer| *outer != event.name),
        path,
        after,
        pass,
        forward_operator: forward
            .map(|index| recording.outermost(index).map_or_else(|| name(index), name)),
        dtype: output.and_then(|tensor| tensor.kind).map_or("", dtype_name).to_owned(),
        values: output.map(Values::of).unwrap_or_default(),
        largest_inputs: event
            .inputs
            .iter()
            .filter_map(|tensor| tensor.numbers)
            .map(|numbers| numbers.largest)
            .collect(),
        largest_in_f32: event.repeated,
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

pub(super) fn dtype_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Half => "fp16",
        Kind::BFloat16 => "bf16",
        Kind::Float => "fp32",
        Kind::Double => "fp64",
        _ => "",
    }
}

/// The modules of parameters.
pub(super) fn modules(parameters: &[(String, Tensor)]) -> Vec<String> {
    parameters.iter().map(|(name, _)| module(name)).collect()
}

/// The module of a parameter: its name without the last part. A parameter at the root is its own module.
pub(super) fn module(name: &str) -> String {
    name.rsplit_once('.').map_or(name, |(module, _)| module).to_owned()
}
