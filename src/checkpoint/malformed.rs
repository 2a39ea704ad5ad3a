//! The errors of reading a file in PyTorch's format.
//!
//! `torch` turns them into the public errors: `Io` if the operating system failed, and `Damaged` for everything else.

use std::io;

/// Why a file in PyTorch's format cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Malformed {
    /// The operating system returned an error, or the file ends too early.
    #[error("cannot read the checkpoint: {0}")]
    Io(#[from] io::Error),

    /// The archive as a whole is malformed.
    #[error("the checkpoint is not a zip archive that PyTorch writes: {0}")]
    Archive(String),

    /// A record of the archive is malformed.
    #[error("the record {name} of the checkpoint {problem}")]
    Record {
        /// Its name.
        name: String,
        /// The problem.
        problem: String,
    },

    /// The pickle uses an opcode that no checkpoint needs.
    #[error(
        "the pickle of the checkpoint has the opcode {opcode:#04x}, which is not supported, at byte {at}"
    )]
    Opcode {
        /// The opcode.
        opcode: u8,
        /// The position of the opcode.
        at: usize,
    },

    /// The pickle is damaged, or does something that no checkpoint needs.
    #[error("the pickle of the checkpoint {problem} at byte {at}")]
    Pickle {
        /// The problem.
        problem: String,
        /// The position of the opcode.
        at: usize,
    },

    /// A tensor does not fit its storage.
    #[error("a tensor of the checkpoint in the storage {storage} {problem}")]
    Tensor {
        /// The storage's key.
        storage: String,
        /// The problem.
        problem: String,
    },

    /// The values are not those of a checkpoint.
    #[error("the checkpoint {0}")]
    Content(String),

    /// The file exceeds one of the [`Limits`](crate::checkpoint::limits::Limits).
    #[error("the checkpoint has more than {limit} {what}")]
    TooMuch {
        /// The thing of which there is too much.
        what: &'static str,
        /// How much is allowed.
        limit: u64,
    },
}

/// Makes the error of a writer whose file PyTorch or this crate could not read.
pub(crate) fn invalid(problem: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, problem.into())
}
