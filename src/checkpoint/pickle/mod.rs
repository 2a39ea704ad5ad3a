//! The pickle in a file of PyTorch's: a small machine that builds values, and the bytes that build them.
//!
//! Reading executes nothing: the pickle may only build the values of [`Value`], and everything is bounded by
//! [`Limits`].

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

/// The bytes of the storage with a key, if there is one.
pub(crate) type Storages<'a> = dyn Fn(&str) -> Option<u64> + 'a;
