//! Why a file of PyTorch's is not read.

use std::io;

/// Why a file of PyTorch's is not read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Malformed {
    /// The system refused, or the file ends where it should not.
    #[error("cannot read the checkpoint: {0}")]
    Io(#[from] io::Error),

    /// The archive as a whole.
    #[error("the checkpoint is not a zip archive that PyTorch writes: {0}")]
    Archive(String),

    /// One record of the archive.
    #[error("the record {name} of the checkpoint {problem}")]
    Record {
        /// Its name.
        name: String,
        /// What is wrong with it.
        problem: String,
    },

    /// The pickle names a class or a function that no checkpoint needs.
    #[error(
        "the checkpoint needs {name} (byte {at} of its pickle): save only tensors, dicts, lists, tuples, strings and numbers"
    )]
    Global {
        /// Module and name.
        name: String,
        /// The place of the opcode.
        at: usize,
    },

    /// The pickle uses an opcode that no checkpoint needs.
    #[error(
        "the pickle of the checkpoint has the opcode {opcode:#04x}, which is not supported, at byte {at}"
    )]
    Opcode {
        /// The opcode.
        opcode: u8,
        /// Its place.
        at: usize,
    },

    /// The pickle is damaged, or does what no checkpoint needs.
    #[error("the pickle of the checkpoint {problem} at byte {at}")]
    Pickle {
        /// What is wrong.
        problem: String,
        /// The place of the opcode.
        at: usize,
    },

    /// A tensor that does not fit its storage.
    #[error("a tensor of the checkpoint in the storage {storage} {problem}")]
    Tensor {
        /// The storage's key.
        storage: String,
        /// What is wrong.
        problem: String,
    },

    /// The values are not ones that a checkpoint has.
    #[error("the checkpoint {0}")]
    Content(String),

    /// More than [`Limits`](crate::checkpoint::pickle::Limits) allows.
    #[error("the checkpoint has more than {limit} {what}")]
    TooMuch {
        /// What there is too much of.
        what: &'static str,
        /// How much is allowed.
        limit: u64,
    },
}

/// A text from the file as a message may show it: short, and without control characters.
pub(crate) fn shown(text: &str) -> String {
    const MAX_CHARS: usize = 80;
    let mut shown: String = text.chars().take(MAX_CHARS).flat_map(char::escape_debug).collect();
    if text.chars().nth(MAX_CHARS).is_some() {
        shown.push('…');
    }
    shown
}

/// The error of a writer whose file PyTorch, or this crate, would not read again.
pub(crate) fn invalid(problem: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, problem.into())
}
