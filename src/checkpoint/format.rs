//! The formats of a checkpoint.

#![forbid(unsafe_code)]

use std::path::Path;

/// How a checkpoint is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// A safetensors file with checksums. Its metadata has the entry `tch_amp`: JSON with everything that is not a
    /// tensor.
    Safetensors,
    /// A file that Python's `torch.load(path, weights_only=True)` reads: a dict of the parts, each as its `state_dict()`
    /// returns it.
    ///
    /// The groups of an optimizer have PyTorch's options and no others. A learning-rate scheduler of Python's that keeps
    /// values there, as `OneCycleLR` its `initial_lr`, has to be made after `optimizer.load_state_dict`.
    Torch,
}

impl Format {
    /// Returns the format that a path asks for: `Torch` for `.pt`, `.pth`, `.bin`, `.ckpt` and `.ot`, else
    /// `Safetensors`.
    pub fn from_path(path: &Path) -> Self {
        let ending = path.extension().and_then(|ending| ending.to_str());
        match ending {
            Some("pt" | "pth" | "bin" | "ckpt" | "ot") => Self::Torch,
            _ => Self::Safetensors,
        }
    }
}
