//! Loading a checkpoint.

use std::path::Path;
use std::sync::Arc;

use crate::checkpoint::archive::Archive;
use crate::checkpoint::source::Source;
use crate::checkpoint::{Checkpoint, safetensors, torch, zip};
#[cfg(doc)]
use crate::error::CheckpointError;
use crate::error::Result;

const NEITHER: &str = "it is neither safetensors nor a zip file of torch.save; if PyTorch before 1.6 wrote it, \
                       load it in Python and save it again";

impl Checkpoint {
    /// Loads a file of [`save`](Self::save), of Python's `torch.save`, or of tch's `VarStore::save`, whatever its name.
    /// Nothing in it is executed. Every byte is read and every checksum compared; safetensors files from elsewhere have
    /// no checksums. Only names, shapes and values are kept in memory. Loading a hostile file takes at most three times
    /// its size plus 256 MiB.
    ///
    /// A file of nothing but tensors is the model `model`. In a dict of PyTorch's each part has the key that Python
    /// gave it, as in `checkpoint.restore().model("model_state_dict", &vs)`, and the state dicts are recognized by
    /// their keys.
    ///
    /// An optimizer that Python built from `model.named_parameters()` (PyTorch 2.6) is restored by names. Any other is
    /// restored by places, and equal shapes in another order are not noticed: build yours from a list of named tensors
    /// in Python's order, because tch's layers may make their variables in another one, `nn::linear` the bias first.
    ///
    /// The file must not be written to as long as the checkpoint lives; another save to the same path replaces it and
    /// does no harm.
    ///
    /// # Errors
    ///
    /// [`Io`](crate::checkpoint::CheckpointError::Io), [`Damaged`](crate::checkpoint::CheckpointError::Damaged) and
    /// [`Newer`](crate::checkpoint::CheckpointError::Newer) of [`CheckpointError`].
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        Self::read(Source::open(path.as_ref())?)
    }

    /// Loads as [`load`](Self::load) from the bytes of a file, which the checkpoint keeps in memory.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self> {
        Self::read(Source::in_memory(bytes))
    }

    fn read(source: Source) -> Result<Self> {
        let archive = open(Arc::new(source))?;
        archive.verify()?;
        Ok(Self { parts: archive.parts })
    }
}

fn open(source: Arc<Source>) -> Result<Archive> {
    let mut start = [0; 9];
    let len = source.len().min(start.len() as u64) as usize;
    source.read_at(0, &mut start[..len])?;
    if safetensors::is_safetensors(&start[..len]) {
        safetensors::read(source)
    } else if zip::is_zip(&start[..len]) {
        torch::read(source)
    } else {
        Err(source.damaged(NEITHER).into())
    }
}
