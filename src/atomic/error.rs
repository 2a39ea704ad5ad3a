//! The errors of replacing a file.

use std::path::{Path, PathBuf};
use std::{fmt, io};

/// Why a file could not be replaced, or why this is uncertain. An existing file is never left partly written.
///
/// # Examples
///
/// ```
/// use tch_amp::Error;
/// use tch_amp::checkpoint::{Checkpoint, CheckpointError, SaveError};
///
/// match Checkpoint::new().save("no/such/folder/run.safetensors") {
///     Err(Error::Checkpoint(CheckpointError::Save(SaveError::Indeterminate { path, .. }))) => {
///         eprintln!("{} is saved, but a power loss may undo that", path.display());
///     }
///     saved => assert!(saved.is_err()),
/// }
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The file was not replaced, and an existing file is unchanged.
    #[error("cannot {action} {path}: {cause}")]
    Io {
        /// The operation that failed: `"replace"`, `"open the folder"`, `"create"`, `"set the permissions of"`,
        /// `"write"`, `"sync"`, `"rename"` or, when leftovers are removed, `"list"`, `"inspect"` or `"remove"`.
        action: &'static str,
        /// The file or folder of the operation.
        path: PathBuf,
        /// The error of the operating system.
        cause: io::Error,
    },

    /// The new file is in place, but a power loss may bring the old one back, because the folder could not be synced.
    /// Or, on a network file system, the rename was reported as failed although the temporary file is gone.
    #[error(
        "{path} is whole, but after a power loss it may be the old file: cannot {action}: {cause}"
    )]
    Indeterminate {
        /// The operation that failed: `"sync the folder"` or `"rename"`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        cause: io::Error,
    },

    /// The file was not replaced, and the temporary file could not be removed.
    #[error("{cause}; and the temporary file {path} is left: {removal}")]
    Leftover {
        /// The temporary file.
        path: PathBuf,
        /// Why it could not be removed.
        removal: io::Error,
        /// Why the file was not replaced.
        cause: Box<SaveError>,
    },
}

/// The message, as for the other errors.
impl fmt::Debug for SaveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Returns a function that makes a [`SaveError::Io`] of an I/O error.
pub(super) fn cannot(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SaveError {
    move |cause| SaveError::Io { action, path: path.to_owned(), cause }
}
