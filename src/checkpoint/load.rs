//! Loading a checkpoint.

use std::path::Path;

use torch_files::{FileKind, Limits, TorchFile};

#[cfg(feature = "distributed")]
use crate::checkpoint::Source;
use crate::checkpoint::{Checkpoint, manifest, torch};
use crate::error::{CheckpointError, Error, Result};

impl Checkpoint {
    /// Loads a checkpoint from a file or a folder: what [`save`](Self::save) has written, a file of Python's
    /// `torch.save` or of tch's `VarStore::save`, safetensors of any program, or a pickle with numpy's arrays. The name
    /// of a file does not matter: its format is detected from the content.
    ///
    /// Nothing in the file is executed. All checksums are verified, by up to four threads; safetensors files from other
    /// programs and files of PyTorch before 1.6 have none.
    /// Only names, shapes and values are kept in memory, and the numpy arrays of a pickle of protocol 2; even for a
    /// hostile file loading takes at most three times the file's size plus 256 MiB.
    ///
    /// In a dict saved by PyTorch each part has its key in Python as its name, as in
    /// `checkpoint.restore().add("model_state_dict", &vs)`, and the kind of a state dict is recognized by its keys.
    /// The values in a dict or a list within a part have the names on the way to them, with dots between them, as in
    /// `checkpoint.restore().add("optimizer_states.0", &mut opt)`. A file that is a single state is a part named
    /// `model`, `optimizer`, `scaler` or `scheduler`. An entry that this crate does not support, such as a quantized
    /// tensor, does not prevent the others from being read: it is an error only to ask for it.
    ///
    /// A folder of [`Format::Dcp`](crate::checkpoint::Format::Dcp), or of `torch.distributed.checkpoint` in Python, is
    /// loaded as a whole, whatever the number of ranks that have saved it.
    ///
    /// A model in several files is loaded by its index, `model.safetensors.index.json` or
    /// `pytorch_model.bin.index.json`, with the files beside it, as a model named `model`. A folder with
    /// `model.safetensors.index.json` can also be given by its own path. A folder of safetensors files without an index
    /// is loaded in the same way if the files say in `DCP_SHARDING_INFO` where their pieces of tensors begin, as those
    /// of Python's `HuggingFaceStorageWriter` do; one of several such files alone is refused. A folder that ranks have
    /// saved together with [`Format::Safetensors`](crate::checkpoint::Format::Safetensors) has all parts of the
    /// checkpoint, and is refused without its index, because its save has not finished. The page on checkpoints in the
    /// guide lists the shapes of files that can be read.
    ///
    /// The parameters of an optimizer are matched by name if this crate saved the file, if Python built the
    /// optimizer from `model.named_parameters()` (PyTorch 2.6 or later), or if they have names in the place of numbers,
    /// as in files of FSDP. Otherwise they are matched by position, and parameters of equal shapes in another order go
    /// unnoticed: build your optimizer from a list of named tensors in Python's order, because tch's layers may create
    /// their variables in another order, such as `nn::linear`, which creates the bias first.
    ///
    /// The file must not be modified in place as long as the checkpoint exists. Another save to the same path is fine,
    /// because it replaces the file.
    ///
    /// # Errors
    ///
    /// [`Io`](crate::checkpoint::CheckpointError::Io), [`Damaged`](crate::checkpoint::CheckpointError::Damaged) and
    /// [`Newer`](crate::checkpoint::CheckpointError::Newer) of [`CheckpointError`].
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        Self::load_with(path, &Limits::DEFAULT)
    }

    /// Loads a file with other limits on what it may hold, such as higher ones for a large file that you trust.
    /// Otherwise the same as [`load`](Self::load). The number of parts is limited to 100 000 nevertheless.
    ///
    /// # Errors
    ///
    /// The same as [`load`](Self::load).
    pub fn load_with(path: impl AsRef<Path>, limits: &Limits) -> Result<Self> {
        let path = path.as_ref();
        let opened = TorchFile::open_with(path, limits).map_err(CheckpointError::reading(path));
        let loaded = opened.map_err(Error::from).and_then(|file| Self::of_file(file, limits));
        loaded.map_err(|error| match is_piece(path) {
            true if is_of_content(&error) => CheckpointError::damaged(path, advice(path)).into(),
            _ => error,
        })
    }

    /// Loads a checkpoint from the bytes of a file, which it keeps in memory. Otherwise the same as
    /// [`load`](Self::load), but not for the index of a model in several files.
    ///
    /// # Errors
    ///
    /// The same as [`load`](Self::load).
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self> {
        Self::from_bytes_with(bytes, &Limits::DEFAULT)
    }

    /// Loads a checkpoint from bytes with other limits.
    pub(crate) fn from_bytes_with(bytes: Vec<u8>, limits: &Limits) -> Result<Self> {
        let file = TorchFile::from_bytes_with(bytes, limits);
        Self::of_file(file.map_err(CheckpointError::reading(Path::new("(memory)")))?, limits)
    }

    fn of_file(file: TorchFile, limits: &Limits) -> Result<Self> {
        if file.is_one_of_shards() {
            return Err(CheckpointError::damaged(file.path(), advice(file.path())).into());
        }
        let archive = match file.kind() {
            FileKind::Safetensors => manifest::read(file, limits)?,
            FileKind::Index => manifest::read_index(file, limits)?,
            _ => torch::read(file, limits)?,
        };
        archive.verify()?;
        Ok(Self {
            ranks: None,
            parts: archive.parts,
            room: None,
            // The files that an index names are not in it.
            #[cfg(feature = "distributed")]
            source: Some(Source { file: archive.file, limits: limits.clone() }).filter(|source| {
                !matches!(source.file.kind(), FileKind::Index | FileKind::Distributed)
            }),
        })
    }
}

/// Returns whether a path is that of a file in a folder of `torch.distributed.checkpoint`, by its name.
fn is_piece(path: &Path) -> bool {
    let is_piece = path.extension().is_some_and(|ending| ending == "distcp");
    is_piece || path.file_name().is_some_and(|name| name == ".metadata")
}

fn is_of_content(error: &Error) -> bool {
    matches!(error, Error::Checkpoint(CheckpointError::Damaged { .. }))
}

/// Says that a folder of `torch.distributed.checkpoint` is loaded as a whole, given the path of a file in it.
fn advice(path: &Path) -> String {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.map_or(" that it is in".to_owned(), |it| format!(", `{}`", it.display()));
    format!(
        "it is one of several files of a checkpoint, in which tensors can be in pieces; load the folder{folder}"
    )
}
