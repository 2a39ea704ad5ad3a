//! Writing the index of a folder of `torch.distributed.checkpoint`: a pickle of objects of its classes.

use serde::{Deserialize, Serialize};

use super::op;
use super::write::{Pickler, Problem};
use crate::dtype::Dtype;
use crate::limits::Limits;

/// A tensor, a piece of one or an object, and where it is in the folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// The names on the way to it, with dots between them.
    pub(crate) name: String,
    pub(crate) path: Vec<PathItem>,
    pub(crate) kind: Kind,
    pub(crate) file: String,
    /// The place of its archive, in bytes.
    pub(crate) start: u64,
    pub(crate) len: u64,
}

/// What an entry is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Kind {
    Tensor {
        dtype: Dtype,
        /// The sizes of the whole tensor.
        shape: Vec<i64>,
        /// Where the piece begins along each dimension, and how far it reaches.
        offsets: Vec<i64>,
        sizes: Vec<i64>,
    },
    Object,
    /// An empty dict, of which the index has the path alone: Python leaves it out, and would take another entry for
    /// that of an old version.
    Empty,
}

/// The key in a dict, or the place in a list, on the way to an entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum PathItem {
    Key(String),
    Place(i64),
}

/// The modules whose classes an index is made of. Before PyTorch 2.1 one of them was elsewhere.
const METADATA: &str = "torch.distributed.checkpoint.metadata";
const FILES: &str = "torch.distributed.checkpoint.filesystem";
const SHARDED: &str = "torch.distributed._shard.sharded_tensor.metadata";

/// The version of the layout that PyTorch 2.9 and later write.
const VERSION: &str = "1.0.0";

/// How many values an index may have for each tensor that is allowed. A piece takes some 50 of them.
const VALUES: u64 = 128;

/// Returns the limits of an index, which has values of its own.
pub(super) fn limits_of(limits: &Limits) -> Limits {
    let max_values = limits.max_values.max(limits.max_tensors.saturating_mul(VALUES));
    Limits { max_values, ..limits.clone() }
}

/// Returns whether the classes of a module have attributes, and no other meaning.
pub(super) fn is_class(module: &str) -> bool {
    [METADATA, FILES, SHARDED].contains(&module)
}

/// Writes the index of these entries, which are sorted by name. Returns an error if it could not be read again within
/// the limits.
pub(crate) fn write_index(entries: &[Entry], limits: &Limits) -> Result<Vec<u8>, Problem> {
    let mut pickler = Pickler::new(&[]);
    let by_name = entries.chunk_by(|one, other| one.name == other.name);
    let named = by_name.clone().filter_map(|entries| entries.first());
    let stored = || entries.iter().filter(|entry| !matches!(entry.kind, Kind::Empty));
    let mut described = by_name.filter(|entries| !matches!(entries[0].kind, Kind::Empty));
    pickler.object(METADATA, "Metadata", |pickler| {
        pickler.text("state_dict_metadata")?;
        pickler.dict(|pickler| described.try_for_each(|entries| pickler.described(entries)))?;
        pickler.text("planner_data")?;
        pickler.dict(|pickler| named.into_iter().try_for_each(|entry| pickler.path(entry)))?;
        pickler.text("storage_data")?;
        pickler.dict(|pickler| stored().try_for_each(|entry| pickler.stored(entry)))?;
        pickler.text("storage_meta")?;
        pickler.push(op::NONE, &[]);
        pickler.text("version")?;
        pickler.text(VERSION)
    })?;
    pickler.finish(&limits_of(limits))
}

impl Pickler<'_> {
    /// Writes an object, given its attributes as the items of a dict.
    fn object(
        &mut self,
        module: &'static str,
        class: &'static str,
        attributes: impl FnOnce(&mut Self) -> Result<(), Problem>,
    ) -> Result<(), Problem> {
        self.new_object(module, class);
        self.dict(attributes)?;
        self.opcode(op::BUILD, &[]);
        Ok(())
    }

    fn new_object(&mut self, module: &'static str, class: &'static str) {
        self.global(module, class);
        self.push(op::EMPTY_TUPLE, &[]);
        self.push(op::NEWOBJ, &[]);
    }

    /// Writes what a name stands for: a tensor in pieces, or an object.
    fn described(&mut self, entries: &[Entry]) -> Result<(), Problem> {
        let Some(Entry { name, kind, .. }) = entries.first() else { return Ok(()) };
        self.text(name)?;
        let Kind::Tensor { dtype, shape, .. } = kind else {
            self.new_object(METADATA, "BytesStorageMetadata");
            return Ok(());
        };
        self.object(METADATA, "TensorStorageMetadata", |pickler| {
            pickler.text("properties")?;
            pickler.properties(dtype.name());
            pickler.text("size")?;
            pickler.size(shape);
            pickler.text("chunks")?;
            pickler.push(op::EMPTY_LIST, &[]);
            pickler.push(op::MARK, &[]);
            for entry in entries {
                let Kind::Tensor { offsets, sizes, .. } = &entry.kind else { continue };
                pickler.object(METADATA, "ChunkStorageMetadata", |pickler| {
                    pickler.text("offsets")?;
                    pickler.size(offsets);
                    pickler.text("sizes")?;
                    pickler.size(sizes);
                    Ok(())
                })?;
            }
            pickler.opcode(op::APPENDS, &[]);
            Ok(())
        })
    }

    /// Writes the properties of a tensor, which are a tuple.
    fn properties(&mut self, dtype: &'static str) {
        self.new_object(METADATA, "TensorProperties");
        self.push(op::MARK, &[]);
        self.global("torch", dtype);
        self.global("torch", "strided");
        self.bool(false);
        // A member of an enum is a call of its class with its value: the contiguous format.
        self.global(METADATA, "_MEM_FORMAT_ENCODING");
        self.int(0);
        self.push(op::TUPLE1, &[]);
        self.push(op::REDUCE, &[]);
        self.bool(false);
        self.push(op::TUPLE, &[]);
        self.opcode(op::BUILD, &[]);
    }

    /// Writes a `torch.Size`, whose numbers count once more as those of a size.
    fn size(&mut self, sizes: &[i64]) {
        self.global("torch", "Size");
        self.ints(sizes);
        self.push(op::TUPLE1, &[]);
        self.push(op::REDUCE, &[]);
    }

    /// Writes the way to an entry in the nested dicts and lists.
    fn path(&mut self, entry: &Entry) -> Result<(), Problem> {
        self.text(&entry.name)?;
        self.push(op::MARK, &[]);
        for item in &entry.path {
            match item {
                PathItem::Key(key) => self.text(key)?,
                PathItem::Place(place) => self.int(*place),
            }
        }
        self.push(op::TUPLE, &[]);
        Ok(())
    }

    /// Writes where a piece or an object is.
    fn stored(&mut self, entry: &Entry) -> Result<(), Problem> {
        let count = |number: u64| i64::try_from(number).map_err(|_| "a file is too long");
        let (start, len) = (count(entry.start)?, count(entry.len)?);
        self.object(METADATA, "MetadataIndex", |pickler| {
            pickler.text("fqn")?;
            pickler.text(&entry.name)?;
            if let Kind::Tensor { offsets, .. } = &entry.kind {
                pickler.text("offset")?;
                pickler.size(offsets);
            }
            pickler.text("index")?;
            pickler.push(op::NONE, &[]);
            Ok(())
        })?;
        self.object(FILES, "_StorageInfo", |pickler| {
            pickler.text("relative_path")?;
            pickler.text(&entry.file)?;
            pickler.text("offset")?;
            pickler.int(start);
            pickler.text("length")?;
            pickler.int(len);
            Ok(())
        })
    }
}
