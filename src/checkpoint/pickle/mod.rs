//! The pickle in a file in PyTorch's format: a small machine that reads it, and a writer.
//!
//! Reading executes nothing: the pickle can only build a [`Value`], and its size is bounded by [`Limits`].

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
pub(crate) use read::read;
pub(crate) use value::{MAX_DIMS, TensorRef, Value, get};
pub(crate) use write::write;

/// Returns the size in bytes of the storage with a key, if there is one.
pub(crate) type Storages<'a> = dyn Fn(&str) -> Option<u64> + 'a;
