//! Conversion between the parts of a checkpoint and PyTorch's layout, a dict of state dicts.

mod from;
mod groups;
mod optimizer;
mod plain;
mod to;

pub(crate) use from::Reader;
pub(crate) use to::Layout;

/// The key, next to those of the parts, of what PyTorch's layout does not hold: the kind of each part, and the names of
/// parameters.
const KEY: &str = "tch_amp";
