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
    /// Loads a file that was written by [`save`](Self::save), by `torch.save` in Python, or by `VarStore::save` in tch.
    /// Its name does not matter: the format is detected from the content.
    ///
    /// Nothing in the file is executed. All checksums are verified; safetensors files from other programs have none.
    /// Only names, shapes and values are kept in memory, and even for a hostile file loading takes at most three times
    /// the file's size plus 256 MiB.
    ///
    /// A file that holds only tensors is loaded as a model named `model`. In a dict saved by PyTorch each part has its
    /// key in Python as its name, as in `checkpoint.restore().model("model_state_dict", &vs)`, and the kind of a state
    /// dict is recognized by its keys.
    ///
    /// The parameters of an optimizer are matched by name if this crate saved the file, or if Python built the
    /// optimizer from `model.named_parameters()` (PyTorch 2.6 or later). Otherwise they are matched by position, and
    /// parameters of equal shapes in another order go unnoticed: build your optimizer from a list of named tensors in
    /// Python's order, because tch's layers may create their variables in another order, such as `nn::linear`, which
    /// creates the bias first.
    ///
    /// The file must not be modified in place as long as the checkpoint exists. Another save to the same path is fine,
    /// because it replaces the file.
    ///
    /// # Errors
    ///
    /// [`Io`](crate::checkpoint::CheckpointError::Io), [`Damaged`](crate::checkpoint::CheckpointError::Damaged) and
    /// [`Newer`](crate::checkpoint::CheckpointError::Newer) of [`CheckpointError`].
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        Self::read(Source::open(path.as_ref())?)
    }

    /// Loads a checkpoint from the bytes of a file, which it keeps in memory. Otherwise the same as
    /// [`load`](Self::load).
    ///
    /// # Errors
    ///
    /// The same as [`load`](Self::load).
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self> {
        Self::read(Source::in_memory(bytes))
    }

    fn read(source: Source) -> Result<Self> {
        let archive = open(Arc::new(source))?;
        archive.verify()?;
        Ok(Self {
            parts: archive.parts,
            room: None,
            #[cfg(feature = "distributed")]
            source: Some(archive.source),
        })
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
