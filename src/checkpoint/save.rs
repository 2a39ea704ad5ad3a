//! Saving a checkpoint to a file, and the formats of files.

use std::io;
use std::path::Path;

use torch_files::atomic::{self, Replaced, Target};

#[cfg(doc)]
use crate::checkpoint::Stateful;
use crate::checkpoint::{Checkpoint, CheckpointError, manifest, torch};
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
    /// [`CheckpointError::Save`]; [`CheckpointError::Indeterminate`] if the new file is in place, but may not survive a
    /// power loss; [`CheckpointError::Unsaveable`]; and [`Error::Torch`] if a tensor cannot be read.
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
                let mut layout = manifest::Layout::new(&self.parts)?;
                replaced(path.as_ref(), &mut |out| layout.write(out))
            }
            Format::Torch | Format::TorchByName => {
                let layout = torch::layout(&self.parts, format == Format::TorchByName)?;
                replaced(path.as_ref(), &mut |out| layout.write_to(out))
            }
        }
    }

    /// Returns the content of a safetensors file.
    #[cfg(feature = "distributed")]
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>> {
        self.check_parts()?;
        let mut layout = manifest::Layout::new(&self.parts)?;
        let mut out = io::Cursor::new(Vec::new());
        match layout.write(&mut out) {
            Ok(()) => Ok(out.into_inner()),
            Err(cause) => Err(own(cause).unwrap_or_else(|cause| {
                CheckpointError::io("write", Path::new("(memory)"))(cause).into()
            })),
        }
    }

    fn check_parts(&self) -> Result<()> {
        let unknown = self.parts.iter().find(|(_, part)| !part.is_supported());
        let Some((name, _)) = unknown else { return Ok(()) };
        let problem = "it has entries that were not recognized when it was loaded, for which this file has no place; \
                       make a new checkpoint of the parts that you need";
        Err(unsaveable(name, problem).into())
    }
}

/// Replaces the file at `path` with what `fill` writes. An [`Error`] within the I/O error that `fill` returns is the
/// error of the save.
pub(super) fn replaced(
    path: &Path,
    fill: &mut dyn FnMut(&mut dyn Target) -> io::Result<()>,
) -> Result<()> {
    match atomic::replace(path, fill) {
        Ok(Replaced::Durable) => Ok(()),
        Ok(Replaced::Uncertain { action, path, cause }) => {
            Err(CheckpointError::Indeterminate { action, path, cause }.into())
        }
        Err(error) => Err(not_saved(error)),
    }
}

/// Makes the error of a file that was not replaced.
fn not_saved(error: torch_files::Error) -> Error {
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
fn own(cause: io::Error) -> std::result::Result<Error, io::Error> {
    let of_file = |cause: io::Error| {
        let error = cause.downcast::<torch_files::Error>()?;
        Ok(CheckpointError::reading(Path::new("(memory)"))(error).into())
    };
    cause.downcast::<Error>().or_else(of_file)
}

/// The file format of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// A safetensors file with checksums, for weights and for resuming in Rust.
    ///
    /// | part | tensors | in the JSON of the metadata entry `tch_amp`, under `parts.NAME` |
    /// |---|---|---|
    /// | model | `NAME/VARIABLE` | `kind` |
    /// | optimizer | `NAME/PARAMETER/exp_avg` and so on | `param_groups`: options, `algorithm` and `params`, the names |
    /// | scaler | – | `state`, for `GradScaler.load_state_dict` |
    /// | your own [`Stateful`] | `NAME/TENSOR` | `value`: a map of its values, as below |
    /// | tensor, random numbers | `NAME` | `kind` |
    /// | value, loss scale | – | `value`; a non-finite float is the text `inf`, `-inf` or `nan`, and `non_finite` lists the places |
    Safetensors,
    /// A file that Python reads with `torch.load(path, weights_only=True)`: a dict of the parts, each as its
    /// `state_dict()` returns it. Your own [`Stateful`] becomes a dict of its values and tensors.
    ///
    /// PyTorch refers to the parameters of an optimizer by number, here in the order of the Rust optimizer. That order
    /// can differ from `module.parameters()`, because tch creates some variables in another order: `nn::linear` creates
    /// the bias before the weight. `load_state_dict` does not notice the difference where the shapes agree. The names,
    /// in order, are therefore saved as well:
    ///
    /// ```python
    /// saved = torch.load("run.pt", weights_only=True)
    /// named = dict(module.named_parameters())
    /// groups = saved["tch_amp"]["param_names"]["optimizer"]
    /// optimizer = torch.optim.AdamW([{"params": [named[n] for n in group]} for group in groups])
    /// optimizer.load_state_dict(saved["optimizer"])
    /// ```
    ///
    /// PyTorch has two optimizers for Muon, and so its part is a dict of two states. For each group there is one in
    /// both:
    ///
    /// ```python
    /// for cls, key in [(torch.optim.Muon, "muon"), (torch.optim.AdamW, "adamw")]:
    ///     groups = saved["tch_amp"]["param_names"]["optimizer"][key]
    ///     optimizer = cls([{"params": [named[n] for n in group]} for group in groups])
    ///     optimizer.load_state_dict(saved["optimizer"][key])
    /// ```
    ///
    /// Likewise, `{"muon": muon.state_dict(), "adamw": adamw.state_dict()}` from Python is restored as one optimizer,
    /// in which each group of the two becomes a group, and those of AdamW have `use_muon: false`.
    ///
    /// The groups have PyTorch's options and no others, except that those of Muon have `use_muon` and
    /// `adamw_lr_factor`, too, which PyTorch keeps; those of Lion, which PyTorch does not have, have the options of
    /// its authors' implementation, and `maximize`. Their `fused`, which RMSprop, Lion and Muon do not have, is true,
    /// except for complex parameters and for Adagrad on a GPU: PyTorch takes this option from the file, and an
    /// optimizer that was built with `fused=True` fails with a scaler if a group is not fused. Where PyTorch's fused
    /// kernels do not apply, as with sparse gradients, set `group["fused"] = None` after `load_state_dict`. Likewise,
    /// create a learning-rate scheduler that keeps values in the groups, as `OneCycleLR` keeps its `initial_lr`, after
    /// `load_state_dict`.
    Torch,
    /// A file like that of [`Torch`](Self::Torch), except that optimizers have the names of their parameters in the
    /// place of numbers, `"params": ["weight", "bias"]`, as FSDP and `torch.distributed.checkpoint` have them. Python
    /// takes such a state whatever the order of the parameters:
    ///
    /// ```python
    /// from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
    ///
    /// saved = torch.load("run.pt", weights_only=True)
    /// set_optimizer_state_dict(module, optimizer, saved["optimizer"])
    /// ```
    TorchByName,
}

impl Format {
    /// Returns the format for a path, by its extension: `Torch` for `.pt`, `.pth`, `.bin`, `.ckpt` and `.ot`, and
    /// `Safetensors` for any other.
    fn from_path(path: &Path) -> Self {
        let ending = path.extension().and_then(|ending| ending.to_str());
        match ending {
            Some("pt" | "pth" | "bin" | "ckpt" | "ot") => Self::Torch,
            _ => Self::Safetensors,
        }
    }
}
