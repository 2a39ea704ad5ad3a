//! The parts of a checkpoint as PyTorch lays them out: a dict of state dicts.

mod from;
mod groups;
mod optimizer;
mod plain;
mod to;

pub(crate) use from::Reader;
pub(crate) use to::Layout;

/// Beside the parts, under this name, stands what PyTorch's layout cannot tell: which kind each of them is.
const KEY: &str = "tch_amp";
