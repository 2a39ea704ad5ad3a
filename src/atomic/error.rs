//! What can go wrong while a file is replaced.

use std::io;
use std::path::{Path, PathBuf};

/// Why a file was not replaced, or not for certain. A file that was there before is never left half written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The file was not replaced: what was there before still is.
    #[error("cannot {action} {path}: {cause}")]
    Io {
        /// What could not be done: `"replace"`, `"open the folder"`, `"create"`, `"set the permissions of"`, `"write"`,
        /// `"sync"`, `"rename"` or, when leftovers are removed, `"list"`, `"inspect"` or `"remove"`.
        action: &'static str,
        /// The file or folder that it was to be done to.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },

    /// The new file is in place, but a power loss may bring the old one back: the folder could not be synced. Or, with
    /// a network file system, the rename was reported as failed though the temporary file is gone.
    #[error(
        "{path} is whole, but after a power loss it may be the old file: cannot {action}: {cause}"
    )]
    Indeterminate {
        /// What could not be done: `"sync the folder"` or `"rename"`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },

    /// The file was not replaced, and the temporary file could not be removed either.
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

/// Makes an [`SaveError::Io`] of an error.
pub(super) fn cannot(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SaveError {
    move |cause| SaveError::Io { action, path: path.to_owned(), cause }
}
