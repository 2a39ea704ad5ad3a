//! The parts of a checkpoint as PyTorch lays them out: a dict of state dicts.

#![forbid(unsafe_code)]

mod from;
mod groups;
mod load;
mod optimizer;
mod plain;
mod store;

pub(crate) use load::read;
pub(crate) use store::{Plan, write};

/// Beside the parts, under this name, stands what PyTorch's layout cannot tell: which kind each of them is.
pub(crate) const KEY: &str = "tch_amp";
