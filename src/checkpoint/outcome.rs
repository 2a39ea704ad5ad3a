//! What becomes of a save.

use std::any::Any;
use std::io;
use std::path::Path;

use torch_files::atomic::{self, Replaced, Target};

use crate::checkpoint::CheckpointError;
use crate::error::{Error, Result};
use crate::panics;

/// Replaces the file at `path` with what `fill` writes.
pub(super) fn replaced(
    path: &Path,
    fill: &mut dyn FnMut(&mut dyn Target) -> io::Result<()>,
) -> Result<()> {
    saved(atomic::replace(path, fill))
}

/// Returns whether the checkpoint is there in spite of the error.
pub(super) fn is_saved(error: &Error) -> bool {
    use CheckpointError::{Indeterminate, NotRemoved};
    matches!(error, Error::Checkpoint(NotRemoved { .. } | Indeterminate { .. }))
}

/// Makes the error of a save that has panicked.
pub(super) fn panicked(payload: Box<dyn Any + Send>) -> Error {
    CheckpointError::WriterPanicked { message: panics::into_message(payload) }.into()
}

/// Makes the result of a save. An [`Error`] within the I/O error of what was written is the error of the save.
pub(super) fn saved(replaced: torch_files::Result<Replaced>) -> Result<()> {
    match replaced {
        Ok(Replaced::Durable) => Ok(()),
        Ok(Replaced::Uncertain { action, path, cause }) => {
            Err(CheckpointError::Indeterminate { action, path, cause }.into())
        }
        Err(error) => Err(not_saved(error)),
    }
}

/// Makes the error of a file that was not replaced.
pub(super) fn not_saved(error: torch_files::Error) -> Error {
    match error {
        torch_files::Error::Io { action, path, cause } => own(cause).unwrap_or_else(|cause| {
            CheckpointError::Save(torch_files::Error::Io { action, path, cause }).into()
        }),
        torch_files::Error::Leftover { path, removal, cause } => match not_saved(*cause) {
            Error::Checkpoint(CheckpointError::Save(cause)) => {
                let cause = Box::new(cause);
                CheckpointError::Save(torch_files::Error::Leftover { path, removal, cause }).into()
            }
            own => own,
        },
        other => CheckpointError::Save(other).into(),
    }
}

/// Takes the error of a tensor, or of the file that it is read from, out of an I/O error.
pub(super) fn own(cause: io::Error) -> std::result::Result<Error, io::Error> {
    let of_file = |cause: io::Error| {
        let error = cause.downcast::<torch_files::Error>()?;
        Ok(CheckpointError::reading(Path::new("(memory)"))(error).into())
    };
    cause.downcast::<Error>().or_else(of_file)
}
