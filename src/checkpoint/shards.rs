//! A model in several files, and the index that says which file has which tensor, as Hugging Face's libraries write
//! them: `model.safetensors.index.json` or `pytorch_model.bin.index.json`.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Component, Path};
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use crate::checkpoint::archive::Archive;
use crate::checkpoint::limits::{MAX_HEADER_BYTES, MAX_TENSORS};
use crate::checkpoint::part::{Part, StatePart};
use crate::checkpoint::source::Source;
use crate::error::Result;
use crate::error::shown;

/// Whether a file that begins with these bytes can be an index: whether it is JSON. A safetensors file begins with a
/// length, whose last byte is zero.
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
