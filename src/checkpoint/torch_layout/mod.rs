//! Conversion between the parts of a checkpoint and PyTorch's layout, a dict of state dicts.
//!
//! `write` makes the layout for a file that is saved, and `read` makes parts of one that was loaded, with `optimizer`
//! for what the two express differently. A file that this crate has saved records the kind of each part under the key
//! `tch_amp`. In a file from Python the kind is guessed from the keys: `state` and `param_groups` make an optimizer,
//! `growth_factor` and `backoff_factor` make a scaler, and a dict of tensors is a model.

mod optimizer;
mod read;
#[cfg(test)]
mod tests;
mod write;

use torch_files::Value;

pub(crate) use read::Reader;
pub(crate) use write::{Layout, StorageSource};

/// The key, next to those of the parts, of what PyTorch's layout does not hold: the kind of each part, and the names of
/// parameters.
const KEY: &str = "tch_amp";

/// The items of a Python dict.
type Items = [(Value, Value)];

/// Returns the value of a key in the items of a dict.
fn get<'a>(items: &'a Items, key: &str) -> Option<&'a Value> {
    items.iter().find(|(other, _)| other.text() == Some(key)).map(|(_, value)| value)
}
