//! Loading a checkpoint.

use std::collections::BTreeMap;
use std::path::{Component, Path};
use std::sync::Arc;
use std::{fmt, io};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use crate::checkpoint::archive::Archive;
use crate::checkpoint::limits::{MAX_HEADER_BYTES, MAX_TENSORS};
use crate::checkpoint::part::{Part, StatePart};
use crate::checkpoint::source::Source;
use crate::checkpoint::{Checkpoint, safetensors, torch, zip};
use crate::error::{CheckpointError, Error, Result, shown};

const NEITHER: &str = "it is neither safetensors, a file of torch.save nor a pickle";

impl Checkpoint {
    /// Loads a file that was written by [`save`](Self::save), by `torch.save` in Python, or by `VarStore::save` in tch,
    /// or a pickle with numpy's arrays. Its name does not matter: the format is detected from the content.
    ///
    /// Nothing in the file is executed. All checksums are verified; safetensors files from other programs have none.
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
    /// A model in several files is loaded by its index, `model.safetensors.index.json` or
    /// `pytorch_model.bin.index.json`, with the files beside it, as a model named `model`. The page on checkpoints in
    /// the guide lists the shapes of files that can be read.
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
        let path = path.as_ref();
        Self::load_file(path).map_err(|error| match distributed(path) {
            Some(what) if is_of_content(&error) => {
                CheckpointError::Damaged { path: path.to_owned(), problem: advice(path, what) }
                    .into()
            }
            _ => error,
        })
    }

    fn load_file(path: &Path) -> Result<Self> {
        let source = Source::open(path)?;
        if is_index(&beginning(&source)?) {
            return Ok(Self { parts: load(&source, &open)?, ..Self::default() });
        }
        Self::read(source)
    }

    /// Loads a checkpoint from the bytes of a file, which it keeps in memory. Otherwise the same as
    /// [`load`](Self::load), but not for the index of a model in several files.
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

/// Returns the kind of file or folder at a path if `torch.distributed.checkpoint` has written it.
fn distributed(path: &Path) -> Option<&'static str> {
    if path.join(DISTRIBUTED).is_file() {
        return Some("a folder");
    }
    let is_piece = path.extension().is_some_and(|ending| ending == "distcp");
    (is_piece || path.file_name().is_some_and(|name| name == DISTRIBUTED))
        .then_some("a piece of a folder")
}

/// The file that each folder of `torch.distributed.checkpoint` has.
const DISTRIBUTED: &str = ".metadata";

fn is_of_content(error: &Error) -> bool {
    match error {
        Error::Checkpoint(CheckpointError::Damaged { .. }) => true,
        Error::Checkpoint(CheckpointError::Io { cause, .. }) => {
            cause.kind() == io::ErrorKind::InvalidInput
        }
        _ => false,
    }
}

/// Says how to convert a folder of `torch.distributed.checkpoint`, given what the path is.
fn advice(path: &Path, what: &str) -> String {
    let folder = if path.is_dir() { Some(path) } else { path.parent() };
    let folder = folder.filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new(".")).display();
    format!(
        "it is {what} that torch.distributed.checkpoint has written, of which Python makes one file: \
         `python -m torch.distributed.checkpoint.format_utils dcp_to_torch '{folder}' run.pt`; load that"
    )
}

/// Returns the first bytes of a file, by which its format is recognized.
fn beginning(source: &Source) -> Result<Vec<u8>> {
    let mut start = vec![0; source.len().min(9) as usize];
    source.read_at(0, &mut start)?;
    Ok(start)
}

/// Opens a single file.
fn open(source: Arc<Source>) -> Result<Archive> {
    let start = beginning(&source)?;
    if safetensors::is_safetensors(&start) {
        safetensors::read(source)
    } else if zip::is_zip(&start) {
        torch::read(source)
    } else if torch::is_old(&start) {
        torch::read_old(source)
    } else {
        Err(source.damaged(NEITHER).into())
    }
}

/// Returns whether a file that begins with these bytes can be an index: whether it is JSON. A safetensors file begins
/// with a length, whose last byte is zero.
pub(super) fn is_index(start: &[u8]) -> bool {
    start.first() == Some(&b'{') && start.get(7) != Some(&0)
}

/// The name of a model that is alone in its file.
const MODEL: &str = "model";

/// Opens one of the files.
type Open = dyn Fn(Arc<Source>) -> Result<Archive>;

/// Loads the files that an index names, which are beside it, and verifies their checksums. Returns the model.
pub(super) fn load(index: &Source, open: &Open) -> Result<BTreeMap<String, Part>> {
    let names = read(index)?;
    let folder = index.path().parent().unwrap_or(Path::new(""));
    let mut files: BTreeMap<&str, Vec<&String>> = BTreeMap::new();
    for (name, file) in &names {
        files.entry(file).or_default().push(name);
    }
    let (mut tensors, mut others) = (BTreeMap::new(), BTreeMap::new());
    for (file, names) in files {
        let mut parts = Path::new(file).components();
        let is_one = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
        // Messages about the file show its path.
        if !is_one || shown(file) != *file {
            let problem = format!("`{}` in it is not the name of a file", shown(file));
            return Err(index.damaged(problem).into());
        }
        let shard = open(Arc::new(Source::open(&folder.join(file))?))?;
        shard.verify()?;
        let Archive { mut parts, .. } = shard;
        let (mut found, mut left) = match parts.remove(MODEL) {
            Some(Part::Model(tensors)) => (tensors, BTreeMap::new()),
            Some(Part::State(StatePart { tensors, others, .. })) => (tensors, others),
            other => {
                parts.extend(other.map(|other| (MODEL.to_owned(), other)));
                (BTreeMap::new(), BTreeMap::new())
            }
        };
        for name in names {
            if let Some((name, entry)) = found.remove_entry(name) {
                tensors.insert(name, entry);
                continue;
            }
            // A file with few weights may not have been recognized as a model. Then its entries are parts.
            match left.remove_entry(name).or_else(|| parts.remove_entry(name)) {
                Some((name, Part::Tensor(entry))) => drop(tensors.insert(name, entry)),
                Some((name, other)) => drop(others.insert(name, other)),
                None => {
                    let problem = format!("`{}` is not in `{}`", shown(name), shown(file));
                    return Err(index.damaged(problem).into());
                }
            }
        }
    }
    Ok(BTreeMap::from([(MODEL.to_owned(), Part::model(tensors, others))]))
}

/// Reads the index: the file of each tensor.
fn read(source: &Source) -> Result<BTreeMap<String, String>> {
    if source.len() > MAX_HEADER_BYTES {
        return Err(source.damaged("it is too long for an index").into());
    }
    let mut json = vec![0; usize::try_from(source.len()).unwrap_or(0)];
    source.read_at(0, &mut json)?;
    let index = serde_json::from_slice::<Index>(&json);
    let Index { weight_map: Files(files) } =
        index.map_err(|error| source.damaged(format!("as the index of a model: {error}")))?;
    Ok(files)
}

/// The index of a model in several files, which says which file has which tensor, as Hugging Face's libraries write it:
/// `model.safetensors.index.json` or `pytorch_model.bin.index.json`.
#[derive(Deserialize)]
struct Index {
    weight_map: Files,
}

/// The file of each tensor.
struct Files(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Files {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Files;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of the names of files")
            }
            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Files, A::Error> {
                let mut files = BTreeMap::new();
                while let Some((name, file)) = map.next_entry::<String, String>()? {
                    if files.len() == MAX_TENSORS {
                        return Err(A::Error::custom(format!("more than {MAX_TENSORS} tensors")));
                    }
                    if files.insert(name, file).is_some() {
                        return Err(A::Error::custom("a tensor occurs twice"));
                    }
                }
                Ok(Files(files))
            }
        }
        deserializer.deserialize_map(Names)
    }
}
