//! The pickle in a file in PyTorch's format: a small machine that reads it, and a writer.
//!
//! Reading executes nothing: the pickle can only build a [`Value`], and its size is bounded by [`Limits`].
//!
//! Protocols 2 to 5 of Python's `pickle` are read, and protocol 2 is written. `read` decodes the opcodes for the
//! machine in `arena`: `build` makes plain values, and `objects` and `tensors` make what Python would by calling the
//! functions that `globals` lists. `tree` then converts the result to a [`Value`], of which `write` makes a pickle
//! again.

mod arena;
mod build;
pub(crate) mod globals;
mod limits;
mod objects;
mod opcodes;
mod read;
mod tensors;
mod tree;
mod value;
mod write;

pub(crate) use limits::Limits;
pub(crate) use read::{First, read, read_first};
pub(crate) use value::{MAX_DIMS, TensorRef, Value, get};
pub(crate) use write::write;

/// Returns the size in bytes of the storage with a key, if there is one.
pub(crate) type Storages<'a> = dyn Fn(&str) -> Option<u64> + 'a;

/// A storage as a pickle declares it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Declared {
    /// The dtype; `None` for an untyped storage, whose tensors have dtypes of their own.
    kind: Option<tch::Kind>,
    pub(crate) bytes: u64,
}

impl Declared {
    /// The size in bytes of what the number of its elements counts.
    pub(crate) fn element_bytes(&self) -> u64 {
        self.kind.map_or(1, value::element_bytes)
    }
}
