#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod atomic;
pub mod distributed;
mod dtype;
mod error;
mod file;
mod index;
mod limits;
mod old;
mod pickle;
mod place;
mod safetensors;
mod source;
#[cfg(test)]
mod tests;
#[doc(hidden)]
pub mod text;
mod threads;
mod torch;
mod value;
mod writer;
mod zip;

pub use dtype::{Dtype, Element};
pub use error::{Error, Result};
pub use file::{FileKind, TorchFile};
pub use limits::Limits;
pub use source::{Checksum, ChecksumWriter};
pub use value::{TensorRef, Value};
pub use writer::{Hashed, Storage, Writer};
