//! Saving a checkpoint to a file.

#[cfg(feature = "distributed")]
use std::io;
use std::path::Path;

use crate::capture;
#[cfg(any(doc, feature = "distributed"))]
use crate::checkpoint::CheckpointError;
#[cfg(feature = "distributed")]
use crate::checkpoint::outcome::own;
use crate::checkpoint::outcome::{replaced, saved};
use crate::checkpoint::sharded::{self, Exchange};
use crate::checkpoint::{Checkpoint, Format, manifest, torch};
#[cfg(doc)]
use crate::error::Error;
use crate::error::{Result, unsaveable};

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
    /// [`CheckpointError::Save`]; [`CheckpointError::Indeterminate`] if the new file is in place, but may not survive a
    /// power loss; [`CheckpointError::Unsaveable`]; and [`Error::Torch`] if a tensor cannot be read. Those of a sharded
    /// checkpoint are with `Checkpoint::sharded`.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        self.save_as(path, Format::from_path(path))
    }

    /// Saves to a file, or a folder, in the given format, whatever its name. Otherwise the same as [`save`](Self::save).
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
        let share = self.check_parts().and_then(|()| self.share(format));
        let share = self.agree(&format!("{format:?}"), share)?;
        share.as_ref().unwrap_or(self).save_with(path.as_ref(), format, self.exchange())
    }

    /// Saves all of it, or a share together with the other ranks.
    pub(super) fn save_with(
        &self,
        path: &Path,
        format: Format,
        ranks: Option<&dyn Exchange>,
    ) -> Result<()> {
        match (format, ranks) {
            (Format::Safetensors | Format::Dcp, Some(ranks)) => {
                sharded::save(&self.parts, path, format, ranks)
            }
            (Format::Safetensors, None) => {
                let mut layout = manifest::Layout::new(&self.parts)?;
                replaced(path, &mut |out| layout.write(out))
            }
            (Format::Torch | Format::TorchByName, _) => {
                let layout = torch::layout(&self.parts, format == Format::TorchByName)?;
                replaced(path, &mut |out| layout.write_to(out))
            }
            (Format::Dcp, None) => saved(torch::layout_of_folder(&self.parts)?.save(path)),
        }
    }

    /// Returns the content of a safetensors file.
    #[cfg(feature = "distributed")]
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>> {
        self.check_parts()?;
        if self.ranks.is_some() {
            let problem = "each rank has a share of it; save it, and load it on every rank";
            return Err(unsaveable("the checkpoint", problem).into());
        }
        let mut layout = manifest::Layout::new(&self.parts)?;
        let mut out = io::Cursor::new(Vec::new());
        match layout.write(&mut out) {
            Ok(()) => Ok(out.into_inner()),
            Err(cause) => Err(own(cause).unwrap_or_else(|cause| {
                CheckpointError::io("write", Path::new("(memory)"))(cause).into()
            })),
        }
    }

    /// Returns an error if it cannot be saved: now, or with these parts.
    pub(super) fn check_parts(&self) -> Result<()> {
        capture::refuse("saving a checkpoint", "save it after `replay`")?;
        let unknown = self.parts.iter().find(|(_, part)| !part.is_supported());
        let Some((name, _)) = unknown else { return Ok(()) };
        let problem = "it has entries that were not recognized when it was loaded, for which this file has no place; \
                       make a new checkpoint of the parts that you need";
        Err(unsaveable(name, problem).into())
    }
}
