//! Checkpoint files in PyTorch's format: the zip archives with a pickle that `torch.save` and `VarStore::save` write.
//!
//! The record `data.pkl` is a pickle of all values, and each record `data/KEY` holds the elements of one storage. `zip`
//! handles the records, `pickle` the values and `convert` the parts; `load` and `store` combine them. `old` reads the
//! format before PyTorch 1.6, which has no records.

mod load;
mod old;
mod store;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read, Seek, Write};

use crate::checkpoint::malformed::Malformed;
use crate::checkpoint::pickle::{self, Limits, Value};
use crate::checkpoint::zip::{self, Record};
use crate::error::shown;

pub(crate) use load::{read, read_old};
pub(crate) use old::is_old;
pub(crate) use store::{plan, plan_of_weights, write};

/// The names of two records.
const PICKLE: &str = "data.pkl";
const BYTE_ORDER: &str = "byteorder";

/// An upper bound of the number of records besides one for each storage.
const OTHER_RECORDS: usize = 8;

/// The content of a file.
#[derive(Debug)]
pub(crate) struct Opened {
    /// The saved object.
    pub root: Value,
    /// The records of the storages, by key.
    pub storages: BTreeMap<String, Record>,
    /// The other records by name, except compressed ones such as the code in a TorchScript archive.
    pub others: BTreeMap<String, Record>,
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
            Some(key) => drop(storages.insert(key.to_owned(), record)),
            None => drop(others.insert(name, record)),
        }
    }
    let root = pickle::read(&bytes, &|key| storages.get(key).map(|record| record.len), limits)?;
    Ok(Opened { root, storages, others })
}

/// Writes a file. `storage` is called once for each storage, in order, and must write exactly its bytes.
///
/// The same values always give the same bytes. After an error the output is not a valid checkpoint.
pub(crate) fn save<W: Write + Seek>(
    out: W,
    root: &Value,
    storages: &[(String, u64)],
    storage: &mut dyn FnMut(usize, &mut dyn Write) -> io::Result<()>,
) -> io::Result<W> {
    let pickle = pickle::write(root, storages)?;
    zip::write(out, &pickle, storages, storage)
}

/// Returns an error for values that [`save`] or, later, [`open`] would refuse.
pub(crate) fn check(root: &Value, storages: &[(String, u64)]) -> Result<(), String> {
    let limits = Limits::default();
    let pickle = pickle::write(root, storages).map_err(|error| error.to_string())?;
    if storages.len() + OTHER_RECORDS > limits.max_records {
        return Err(format!(
            "more than {} tensors are too many",
            limits.max_records - OTHER_RECORDS
        ));
    }
    if pickle.len() as u64 > limits.max_pickle_bytes {
        return Err(format!("more than {} bytes of names and values", limits.max_pickle_bytes));
    }
    let lengths: HashMap<_, _> = storages.iter().map(|(key, len)| (key.as_str(), *len)).collect();
    let read = pickle::read(&pickle, &|key| lengths.get(key).copied(), &limits);
    read.map(drop).map_err(|error| error.to_string())
}
