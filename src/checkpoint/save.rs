//! Saving a checkpoint.

#![forbid(unsafe_code)]

use std::io;
use std::path::{Path, PathBuf};

use crate::checkpoint::error::unsaveable;
use crate::checkpoint::part::Part;
use crate::checkpoint::{Checkpoint, CheckpointError, Format, atomic, safetensors, torch};
use crate::error::{Error, Result};

impl Checkpoint {
    /// Saves to a file, in the [`Format`] that its name asks for. A crash at any point leaves the old file or the new
    /// one, whole. Waits for the devices.
    ///
    /// The content goes to a temporary file in the same folder, which must exist and have room for both; it is synced
    /// and renamed, and the folder is synced. A symbolic link stays and its target is replaced, permissions stay, and a
    /// read-only file is refused. A killed process may leave a `.NAME.PID-N.tmp` behind;
    /// [`CheckpointFolder`](crate::checkpoint::CheckpointFolder) removes its own after an hour.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Save`]; with [`SaveError::Indeterminate`](crate::checkpoint::SaveError::Indeterminate) the
    /// new file is there, but may not survive a power loss. [`CheckpointError::Unsaveable`]; [`Error::Torch`] if a
    /// tensor cannot be read.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        self.save_as(path, Format::from_path(path))
    }

    /// Saves as [`save`](Self::save) in a format of your choice.
    ///
    /// # Errors
    ///
    /// As [`save`](Self::save).
    pub fn save_as(&self, path: impl AsRef<Path>, format: Format) -> Result<()> {
        let unknown = self.parts.iter().find(|(_, part)| matches!(part, Part::Unknown(_)));
        if let Some((name, _)) = unknown {
            let problem = "it was not understood when it was loaded; make a new checkpoint of the parts that you need";
            return Err(unsaveable(name, problem).into());
        }
        let mut failure = None;
        let mut failed = |error| into_io(error, &mut failure);
        let replaced = match format {
            Format::Safetensors => {
                let mut plan = safetensors::Plan::new(&self.parts)?;
                atomic::replace(path.as_ref(), &mut |out| {
                    safetensors::write(&mut plan, out).map_err(&mut failed)
                })
            }
            Format::Torch => {
                let plan = torch::parts::Plan::new(&self.parts)?;
                atomic::replace(path.as_ref(), &mut |out| {
                    torch::parts::write(&plan, out, &mut failed)
                })
            }
        };
        match (failure, replaced) {
            (Some(error), Err(_)) => Err(error),
            (_, replaced) => Ok(replaced.map_err(CheckpointError::from)?),
        }
    }
}

/// What a write into the temporary file has met. [`atomic::replace`] has seen it itself and knows where.
pub(super) fn interrupted(cause: io::Error) -> Error {
    CheckpointError::Io { action: WRITE, path: PathBuf::new(), cause }.into()
}

const WRITE: &str = "write";

/// Hands the system's errors on, and keeps any other for the caller.
fn into_io(error: Error, failure: &mut Option<Error>) -> io::Error {
    match error {
        Error::Checkpoint(CheckpointError::Io { action: WRITE, cause, .. }) => cause,
        other => {
            *failure = Some(other);
            io::Error::other("a tensor could not be read")
        }
    }
}
