//! Why a file cannot be read or written.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::text::{sentence, shown};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a file cannot be read or written. The messages include the causes, and so `source()` does not return them. In a
/// message, names and texts from a file are shortened, and what a terminal would obey is escaped.
///
/// # Examples
///
/// ```
/// use torch_files::{Error, TorchFile};
///
/// let error = TorchFile::from_bytes(b"half a file".to_vec()).expect_err("not a file of PyTorch");
/// assert!(matches!(error, Error::Malformed { .. }));
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system could not open, read, write or replace a file.
    #[error("cannot {action} {path}: {cause}")]
    Io {
        /// The operation that failed, such as `"open"`, `"read"` or, for a file that is replaced, `"create"`,
        /// `"write"`, `"sync"` or `"rename"`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        cause: io::Error,
    },

    /// The file is of none of the formats, is damaged, or holds what these formats do not allow.
    #[error("{path} is damaged or not a file of PyTorch: {}", sentence(problem))]
    Malformed {
        /// The file; `(memory)` for bytes.
        path: PathBuf,
        /// The record of the archive or the storage that is malformed, if it is one of them.
        entry: Option<String>,
        /// The position in the pickle of the opcode that is malformed, in bytes, if it is one.
        offset: Option<u64>,
        /// The problem, as a sentence about the file.
        problem: String,
    },

    /// The file exceeds one of the [`Limits`](crate::Limits). If you trust it, open it with higher ones.
    #[error("{path} has more than {limit} {what}")]
    TooMuch {
        /// The file.
        path: PathBuf,
        /// The thing of which there is too much.
        what: &'static str,
        /// How much is allowed.
        limit: u64,
    },

    /// A value or a tensor cannot be written, because the format lacks it or because it could not be read again.
    #[error("{} cannot be written: {}", entry.as_deref().map_or("the value".to_owned(), shown), sentence(problem))]
    Unwritable {
        /// The name of the tensor, if it is one.
        entry: Option<String>,
        /// The problem.
        problem: String,
    },

    /// The elements that were asked for are not those of this file, or do not fit into the memory that was given.
    #[error("{0}")]
    Request(String),

    /// A file was not replaced, and the temporary file could not be removed.
    #[error("{cause}; and the temporary file {path} is left: {removal}")]
    Leftover {
        /// The temporary file.
        path: PathBuf,
        /// Why it could not be removed.
        removal: io::Error,
        /// Why the file was not replaced.
        cause: Box<Error>,
    },
}

/// The message, as programs show an error that `main` returns in its debug form.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Error {
    /// Returns a function that makes an [`Error::Io`] of an I/O error.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Self {
        move |cause| Self::Io { action, path: path.to_owned(), cause }
    }
}

/// Why the content of a file is refused, before the path is known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Malformed {
    /// The operating system returned an error, or the file ends too early.
    #[error("cannot read the checkpoint: {0}")]
    Io(#[from] io::Error),

    /// A part of the file could not be read.
    #[error("{0}")]
    Read(Error),

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

    /// The file as a whole is refused; the text is the whole problem.
    #[error("{0}")]
    Whole(String),

    /// The file exceeds one of the [`Limits`](crate::Limits).
    #[error("the checkpoint has more than {limit} {what}")]
    TooMuch {
        /// The thing of which there is too much.
        what: &'static str,
        /// How much is allowed.
        limit: u64,
    },
}

impl Malformed {
    /// Makes the public error, given the file.
    pub(crate) fn at(self, path: &Path) -> Error {
        let problem = self.to_string();
        let (entry, offset) = match self {
            Self::Io(cause) if cause.kind() != io::ErrorKind::UnexpectedEof => {
                // A source has said already which file it is.
                let own = cause.downcast::<Error>();
                return own.unwrap_or_else(Error::io("read", path));
            }
            Self::Read(error) => return error,
            Self::TooMuch { what, limit } => {
                return Error::TooMuch { path: path.to_owned(), what, limit };
            }
            Self::Record { name, .. } => (Some(name), None),
            Self::Tensor { storage, .. } => (Some(storage), None),
            Self::Opcode { at, .. } | Self::Pickle { at, .. } => (None, Some(at as u64)),
            Self::Io(_) | Self::Archive(_) | Self::Content(_) | Self::Whole(_) => (None, None),
        };
        Error::Malformed { path: path.to_owned(), entry, offset, problem }
    }
}

/// Makes the error of a writer whose file PyTorch or this crate could not read.
pub(crate) fn invalid(problem: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, problem.into())
}
