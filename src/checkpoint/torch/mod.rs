//! PyTorch's checkpoint files: the zip archives with a pickle that `torch.save` writes, and tch's own.
//!
//! Reading executes nothing: the pickle may only build the values of [`Value`], and everything is bounded by
//! [`Limits`].

#![forbid(unsafe_code)]

mod build;
mod globals;
mod machine;
mod objects;
mod opcodes;
pub(crate) mod parts;
mod read;
mod save;
mod tree;
mod value;
mod write;
mod zip;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io::{self, BufReader, Read, Seek};

use crate::checkpoint::MAX_VALUES;

pub(crate) use save::save;
pub(crate) use value::{MAX_DIMS, TensorRef, Value, get};
pub(crate) use zip::{Record, is_zip};

/// Besides one for each storage.
const OTHER_RECORDS: usize = 8;

/// How much a file may ask for before it is refused.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// Bytes of the pickle.
    pub max_pickle_bytes: u64,
    /// Bytes of all strings together for each byte of the pickle, which may repeat them, and a megabyte besides.
    pub max_text_factor: u64,
    /// Values in the result, and those that the pickle makes on the way. A tensor counts its dimensions, too.
    pub max_values: u64,
    /// Containers inside of each other.
    pub max_depth: usize,
    /// Records of the archive.
    pub max_records: usize,
    /// Bytes of all tensors together that have more elements than their storages, as expanded ones have.
    pub max_expanded_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_pickle_bytes: 100_000_000,
            max_text_factor: 16,
            max_values: MAX_VALUES,
            max_depth: 64,
            max_records: 1 << 18,
            max_expanded_bytes: 1 << 30,
        }
    }
}

/// Why a file is not read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Malformed {
    /// The system refused, or the file ends where it should not.
    #[error("cannot read the checkpoint: {0}")]
    Io(#[from] io::Error),

    /// The archive as a whole.
    #[error("the checkpoint is not a zip archive that PyTorch writes: {0}")]
    Archive(String),

    /// One record of the archive.
    #[error("the record {name} of the checkpoint {problem}")]
    Record {
        /// Its name.
        name: String,
        /// What is wrong with it.
        problem: String,
    },

    /// The pickle names a class or a function that no checkpoint needs.
    #[error(
        "the checkpoint needs {name} (byte {at} of its pickle): save only tensors, dicts, lists, tuples, strings and numbers"
    )]
    Global {
        /// Module and name.
        name: String,
        /// The place of the opcode.
        at: usize,
    },

    /// The pickle uses an opcode that no checkpoint needs.
    #[error(
        "the pickle of the checkpoint has the opcode {opcode:#04x}, which is not supported, at byte {at}"
    )]
    Opcode {
        /// The opcode.
        opcode: u8,
        /// Its place.
        at: usize,
    },

    /// The pickle is damaged, or does what no checkpoint needs.
    #[error("the pickle of the checkpoint {problem} at byte {at}")]
    Pickle {
        /// What is wrong.
        problem: String,
        /// The place of the opcode.
        at: usize,
    },

    /// A tensor that does not fit its storage.
    #[error("a tensor of the checkpoint in the storage {storage} {problem}")]
    Tensor {
        /// The storage's key.
        storage: String,
        /// What is wrong.
        problem: String,
    },

    /// The values are not ones that a checkpoint has.
    #[error("the checkpoint {0}")]
    Content(String),

    /// More than [`Limits`] allows.
    #[error("the checkpoint has more than {limit} {what}")]
    TooMuch {
        /// What there is too much of.
        what: &'static str,
        /// How much is allowed.
        limit: u64,
    },
}

/// What a file holds.
#[derive(Debug)]
pub(crate) struct Opened {
    /// The saved object.
    pub root: Value,
    /// Where the storages lie, by their keys.
    pub storages: BTreeMap<String, Record>,
    /// The other records. Compressed ones, as the code of a TorchScript archive, are left out.
    pub others: Vec<Record>,
}

/// Reads everything but the storages, whose checksums the caller has to verify.
pub(crate) fn open<R: Read + Seek>(file: R, limits: &Limits) -> Result<Opened, Malformed> {
    let (mut file, mut records) = zip::records(BufReader::new(file), limits)?;
    if let Some(record) = records.get("byteorder") {
        let order = zip::read(&mut file, record, 16)?;
        if order != b"little" {
            let order = shown(&String::from_utf8_lossy(&order));
            return Err(record.refuse(format!("says {order}, but only little is supported")));
        }
    }
    let Some(pickle) = records.get("data.pkl") else {
        return Err(Malformed::Archive("it has no data.pkl".to_owned()));
    };
    let bytes = zip::read(&mut file, pickle, limits.max_pickle_bytes)?;
    let mut storages = BTreeMap::new();
    let mut others = Vec::new();
    // Where a storage lies follows from its key alone.
    while let Some((name, record)) = records.pop_first() {
        match name.strip_prefix("data/") {
            Some(key) => drop(storages.insert(key.to_owned(), record)),
            None => others.push(record),
        }
    }
    let root = read::read(&bytes, &storages, limits)?;
    Ok(Opened { root, storages, others })
}

/// Refuses values that [`save`] or, later, [`open`] would refuse.
pub(crate) fn check(root: &Value, storages: &[(String, u64)]) -> Result<(), String> {
    let limits = Limits::default();
    let pickle = write::pickle(root, storages).map_err(|error| error.to_string())?;
    let record = |(key, len): &(String, u64)| {
        (key.clone(), Record { name: key.clone(), offset: 0, len: *len, crc32: 0 })
    };
    let records = storages.iter().map(record).collect();
    if storages.len() + OTHER_RECORDS > limits.max_records {
        return Err(format!(
            "more than {} tensors are too many",
            limits.max_records - OTHER_RECORDS
        ));
    }
    if pickle.len() as u64 > limits.max_pickle_bytes {
        return Err(format!("more than {} bytes of names and values", limits.max_pickle_bytes));
    }
    read::read(&pickle, &records, &limits).map(drop).map_err(|error| error.to_string())
}

/// A text from the file as a message may show it: short, and without control characters.
fn shown(text: &str) -> String {
    const MAX_CHARS: usize = 80;
    let mut shown: String = text.chars().take(MAX_CHARS).flat_map(char::escape_debug).collect();
    if text.chars().nth(MAX_CHARS).is_some() {
        shown.push('…');
    }
    shown
}
