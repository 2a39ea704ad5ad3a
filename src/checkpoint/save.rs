//! Saving a checkpoint.

use std::io;
use std::path::Path;

use crate::atomic::{self, Target};
use crate::checkpoint::{Checkpoint, CheckpointError, Format, safetensors, torch};
use crate::error::{Error, Result, unsaveable};

impl Checkpoint {
    /// Saves to a file, in the [`Format`] that belongs to its name. A crash at any point leaves either the old file or
    /// the complete new one. Synchronizes if tensors are on a GPU.
    ///
    /// The content is written to a temporary file in the same folder, which must exist and have room for both files.
    /// The temporary file is synced to the disk and renamed, and then the folder is synced. If the path is a symbolic
    /// link, its target is replaced. The permissions of the old file are kept, and a read-only file is refused. A
    /// killed process may leave a `.NAME.PID-N.tmp` behind; later saves of a
    /// [`CheckpointFolder`](crate::checkpoint::CheckpointFolder) remove those of its files once they are an hour old.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Save`]; if it is a [`SaveError::Indeterminate`](crate::checkpoint::SaveError::Indeterminate),
    /// the new file is in place, but may not survive a power loss. [`CheckpointError::Unsaveable`]; and
    /// [`Error::Torch`] if a tensor cannot be read.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        self.save_as(path, Format::from_path(path))
    }

    /// Saves to a file in the given format, whatever its name. Otherwise the same as [`save`](Self::save).
    ///
    /// # Errors
    ///
    /// The same as [`save`](Self::save).
    ///
    /// # Examples
    ///
    /// ```
    /// use tch_amp::checkpoint::{Checkpoint, Format};
    ///
    /// # let path = std::env::temp_dir().join(format!("tch-amp-doc-save-as-{}.backup", std::process::id()));
    /// let mut checkpoint = Checkpoint::new();
    /// checkpoint.add_value("step", &7)?;
    /// // Python reads it with torch.load(path, weights_only=True).
    /// checkpoint.save_as(&path, Format::Torch)?;
    /// assert_eq!(Checkpoint::load(&path)?.value::<u64>("step")?, 7);
    /// # std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn save_as(&self, path: impl AsRef<Path>, format: Format) -> Result<()> {
        self.check_parts()?;
        match format {
            Format::Safetensors => {
                let mut plan = safetensors::Plan::new(&self.parts)?;
                replaced(path.as_ref(), &mut |out, note| {
                    safetensors::write(&mut plan, out).map_err(note)
                })
            }
            Format::Torch => {
                let layout = torch::plan(&self.parts)?;
                replaced(path.as_ref(), &mut |out, note| torch::write(&layout, out, note))
            }
        }
    }

    /// Returns the content of a safetensors file.
    #[cfg(feature = "distributed")]
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>> {
        self.check_parts()?;
        let mut plan = safetensors::Plan::new(&self.parts)?;
        let mut out = io::Cursor::new(Vec::new());
        match safetensors::write(&mut plan, &mut out) {
            Ok(()) => Ok(out.into_inner()),
            Err(Failure::Tensor(error)) => Err(error),
            Err(Failure::File(cause)) => {
                Err(CheckpointError::io("write", Path::new("(memory)"))(cause).into())
            }
        }
    }

    fn check_parts(&self) -> Result<()> {
        let unknown = self.parts.iter().find(|(_, part)| !part.is_supported());
        let Some((name, _)) = unknown else { return Ok(()) };
        let problem = "it was not recognized when it was loaded; make a new checkpoint of the parts that you need";
        Err(unsaveable(name, problem).into())
    }
}

/// Notes a failure, and returns an I/O error in its place.
type Note<'a> = dyn FnMut(Failure) -> io::Error + 'a;

/// Replaces the file at `path` with what `fill` writes, or returns the error that `fill` has noted.
pub(super) fn replaced(
    path: &Path,
    fill: &mut dyn FnMut(&mut dyn Target, &mut Note<'_>) -> io::Result<()>,
) -> Result<()> {
    let mut tensor = None;
    let mut note = |failure: Failure| failure.note(&mut tensor);
    let replaced = atomic::replace(path, &mut |out| fill(out, &mut note));
    match (tensor, replaced) {
        (Some(error), Err(_)) => Err(error),
        (_, replaced) => Ok(replaced.map_err(CheckpointError::from)?),
    }
}

/// Why the content of a checkpoint could not be written.
#[derive(Debug)]
pub(super) enum Failure {
    /// The operating system returned an error, to which [`atomic::replace`] adds the path.
    File(io::Error),
    /// A tensor could not be read.
    Tensor(Error),
}

impl Failure {
    /// Returns an I/O error as it is, and keeps any other error for the caller in `tensor`.
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
