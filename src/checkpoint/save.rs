//! Saving a checkpoint.

use std::io;
use std::path::Path;

use crate::atomic;
use crate::checkpoint::part::Part;
use crate::checkpoint::{Checkpoint, CheckpointError, Format, safetensors, torch};
use crate::error::{Error, Result, unsaveable};

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
        let mut tensor = None;
        let mut note = |failure: Failure| failure.note(&mut tensor);
        let replaced = match format {
            Format::Safetensors => {
                let mut plan = safetensors::Plan::new(&self.parts)?;
                atomic::replace(path.as_ref(), &mut |out| {
                    safetensors::write(&mut plan, out).map_err(&mut note)
                })
            }
            Format::Torch => {
                let layout = torch::plan(&self.parts)?;
                atomic::replace(path.as_ref(), &mut |out| torch::write(&layout, out, &mut note))
            }
        };
        match (tensor, replaced) {
            (Some(error), Err(_)) => Err(error),
            (_, replaced) => Ok(replaced.map_err(CheckpointError::from)?),
        }
    }
}

/// Why the content of a checkpoint could not be written.
#[derive(Debug)]
pub(super) enum Failure {
    /// The system refused. [`atomic::replace`] adds which file it is.
    File(io::Error),
    /// A tensor could not be read.
    Tensor(Error),
}

impl Failure {
    /// Hands the system's errors on, and keeps any other for the caller.
    fn note(self, tensor: &mut Option<Error>) -> io::Error {
        match self {
            Self::File(error) => error,
            Self::Tensor(error) => {
                *tensor = Some(error);
                io::Error::other("a tensor could not be read")
            }
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::File(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Tensor(error)
    }
}
