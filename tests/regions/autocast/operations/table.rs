//! Maps the name of an op, as in PyTorch's lists or in the dispatcher, to its call in tch.

use tch::{TchError, Tensor};

use crate::autocast::operations::args::Args;
use crate::autocast::operations::{
    convolution, factorisation, loss, matrix, pointwise, pooling, recurrent, reduction, spectral,
    upsampling,
};

/// The result of an op: its tensors, or its error.
pub type Outputs = Result<Vec<Tensor>, TchError>;

/// A name and the call.
pub type Entry = (&'static str, fn(&Args) -> Outputs);

const TABLES: [&[Entry]; 12] = [
    pointwise::COMPARISONS,
    pointwise::UNARY,
    pointwise::OTHERS,
    reduction::OPS,
    matrix::OPS,
    convolution::OPS,
    loss::OPS,
    pooling::OPS,
    recurrent::OPS,
    spectral::OPS,
    factorisation::OPS,
    upsampling::OPS,
];

/// All entries.
pub fn entries() -> impl Iterator<Item = &'static Entry> {
    TABLES.into_iter().flatten()
}

/// The entry of `op`: the one for its overload if there is one, otherwise the one for its name, without the underscores
/// that Python has around the names of its operators.
pub fn find(op: &str) -> Option<&'static Entry> {
    let named = |name: &str| entries().find(|entry| entry.0 == name);
    let plain = op.strip_prefix("__").and_then(|op| op.strip_suffix("__")).unwrap_or(op);
    named(plain).or_else(|| named(plain.split('.').next().unwrap_or(plain)))
}

/// The output of an op with one.
pub fn one(output: Result<Tensor, TchError>) -> Outputs {
    Ok(vec![output?])
}

/// The outputs of an op with two.
pub fn two(outputs: Result<(Tensor, Tensor), TchError>) -> Outputs {
    outputs.map(|(a, b)| vec![a, b])
}

/// The outputs of an op with three.
pub fn three(outputs: Result<(Tensor, Tensor, Tensor), TchError>) -> Outputs {
    outputs.map(|(a, b, c)| vec![a, b, c])
}

/// The outputs of an op with four.
pub fn four(outputs: Result<(Tensor, Tensor, Tensor, Tensor), TchError>) -> Outputs {
    outputs.map(|(a, b, c, d)| vec![a, b, c, d])
}
