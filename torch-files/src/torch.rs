//! Files of `torch.save` and TorchScript: a zip archive with a pickle of all values, in which the elements of each
//! storage are a record.

use std::collections::BTreeMap;
use std::io::{Read, Seek};

use crate::error::Malformed;
use crate::limits::Limits;
use crate::pickle::{self, Bytes, First};
use crate::text::shown;
use crate::value::{Text, Value};
use crate::zip::{self, ZipRecord};

/// The names of records. Only TorchScript has constants.
pub(crate) const PICKLE: &str = "data.pkl";
pub(crate) const CONSTANTS: &str = "constants.pkl";
const BYTE_ORDER: &str = "byteorder";

/// The content of a file.
#[derive(Debug)]
pub(crate) struct Opened {
    /// The saved object.
    pub(crate) root: Value,
    /// The content of the numpy arrays in it.
    pub(crate) arrays: BTreeMap<Text, Bytes>,
    /// The records of the storages, by key.
    pub(crate) storages: BTreeMap<Text, ZipRecord>,
    /// The other records by name, except compressed ones such as the code in a TorchScript archive.
    pub(crate) others: BTreeMap<String, ZipRecord>,
}

/// Reads everything except the storages, whose checksums the caller must verify.
pub(crate) fn open<R: Read + Seek>(mut file: R, limits: &Limits) -> Result<Opened, Malformed> {
    let mut records = zip::records(&mut file, limits.max_records)?;
    if let Some(record) = records.get(BYTE_ORDER) {
        let order = zip::read(&mut file, BYTE_ORDER, record, 16)?;
        if order != b"little" {
            let order = shown(&String::from_utf8_lossy(&order));
            let problem = format!("says {order}, but only little is supported");
            return Err(Malformed::Record { name: BYTE_ORDER.to_owned(), problem });
        }
    }
    let Some(pickle) = records.get(PICKLE) else {
        return Err(Malformed::Archive(format!("it has no {PICKLE}")));
    };
    let bytes = zip::read(&mut file, PICKLE, pickle, limits.max_pickle_bytes)?;
    let mut storages = BTreeMap::new();
    let mut others = BTreeMap::new();
    // A storage is found by its key, in the folder `data`.
    while let Some((name, record)) = records.pop_first() {
        match name.strip_prefix("data/") {
            Some(key) => drop(storages.insert(Text::from(key), record)),
            None => drop(others.insert(name, record)),
        }
    }
    let read = pickle::read(&bytes, &|key| storages.get(key).map(|record| record.len), limits)?;
    let First { root, arrays, .. } = read;
    Ok(Opened { root, arrays, storages, others })
}
