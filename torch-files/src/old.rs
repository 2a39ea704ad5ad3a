//! The format of `torch.save` before PyTorch 1.6, which `_use_new_zipfile_serialization=False` still writes.
//!
//! Five pickles follow each other: a number that marks the format, its version, facts about the machine, the saved
//! object, and the keys of its storages. Then come the storages in the order of the keys, each with the number of its
//! elements before it. Nothing has a checksum.

use std::collections::BTreeMap;

use crate::error::Malformed;
use crate::limits::Limits;
use crate::pickle::{self, Bytes, Declared, First};
use crate::source::Source;
use crate::text::shown;
use crate::value::{Text, Value};

/// The number that marks the format, and the end of its pickle.
const MARK: &[u8] = b"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";

/// The only version of the format.
const VERSION: i64 = 1001;

/// The most values of the pickles around that of the saved object, except for the keys.
const FEW: u64 = 100;

/// Returns whether a file that begins with these bytes can be in the old format: whether it begins with a pickle.
pub(crate) fn is_old(start: &[u8]) -> bool {
    matches!(start, [0x80, 2..=5, ..])
}

/// Returns whether a file begins as a dict or a list does in a pickle of the protocols 0 and 1, which have no number.
pub(crate) fn is_early_pickle(start: &[u8]) -> bool {
    matches!(start, [b'(', b'd' | b'l', b'p', b'0'..=b'9', ..] | [b'}' | b']', b'q', 0, ..])
}

/// Returns whether a pickle begins with the number that marks the format, after its protocol and the length of a frame.
pub(super) fn is_marked(bytes: &[u8]) -> bool {
    let start = &bytes[..bytes.len().min(32)];
    start.windows(MARK.len()).any(|part| part == MARK)
}

/// The content of a file.
pub(super) struct Opened {
    /// The saved object.
    pub(super) root: Value,
    /// The position and the size in bytes of each storage, by key.
    pub(super) storages: BTreeMap<Text, (u64, u64)>,
    /// The content of the numpy arrays in the object.
    pub(super) arrays: BTreeMap<Text, Bytes>,
    /// The position of the pickle in which they are.
    pub(super) pickle: u64,
}

/// Reads the saved object, given the beginning of the file.
pub(super) fn read(bytes: &[u8], source: &Source, limits: &Limits) -> Result<Opened, Malformed> {
    let mut at = 0;
    let mut next = |max_values: u64| {
        let limits = Limits { max_values, ..limits.clone() };
        let first = pickle::read_first(&bytes[at..], &limits)?;
        at += first.len;
        Ok::<_, Malformed>((first, at))
    };
    let (_, end) = next(FEW)?;
    if !bytes[..end].ends_with(MARK) {
        return Err(refuse("does not begin with the number that marks PyTorch's files"));
    }
    if next(FEW)?.0.root != Value::Int(VERSION) {
        return Err(refuse("is of an unknown version of PyTorch's old format"));
    }
    match next(FEW)?.0.root {
        facts if facts.get("little_endian") == Some(&Value::Bool(true)) => {}
        _ => return Err(refuse("was not written on a little-endian machine")),
    }
    let (First { root, len, storages, arrays }, end) = next(limits.max_values)?;
    let pickle = (end - len) as u64;
    if storages.len() > limits.max_records {
        let limit = limits.max_records as u64;
        return Err(Malformed::TooMuch { what: "storages", limit });
    }
    let (First { root: keys, .. }, end) = next(FEW + storages.len() as u64)?;
    match keys {
        Value::List(keys) => {
            let storages = positions(keys, &storages, end as u64, source)?;
            Ok(Opened { root, storages, arrays, pickle })
        }
        _ => Err(refuse("has no list of its storages")),
    }
}

/// Returns the position and the size in bytes of each storage, given their keys in order and where the first one
/// begins.
fn positions(
    keys: Vec<Value>,
    storages: &BTreeMap<Text, Declared>,
    mut at: u64,
    source: &Source,
) -> Result<BTreeMap<Text, (u64, u64)>, Malformed> {
    let mut offsets = BTreeMap::new();
    for key in keys {
        let Value::Text(key) = key else {
            return Err(refuse("has a storage without a key"));
        };
        let refuse =
            |problem: &str| Malformed::Tensor { storage: shown(&key), problem: problem.to_owned() };
        let Some(declared) = storages.get(&key) else {
            return Err(refuse("is in the list of storages, but in no tensor"));
        };
        let mut count = [0; 8];
        let start = at + 8;
        let end = start.checked_add(declared.bytes).filter(|&end| end <= source.len());
        let Some(end) = end else {
            return Err(refuse("reaches beyond the end of the file"));
        };
        source.read_at(at, &mut count).map_err(Malformed::Read)?;
        if u64::from_le_bytes(count).checked_mul(declared.element_bytes()) != Some(declared.bytes) {
            return Err(refuse("does not have the size that its tensors say"));
        }
        if offsets.insert(key.clone(), (start, declared.bytes)).is_some() {
            return Err(refuse("is in the list of storages twice"));
        }
        at = end;
    }
    if let Some(key) = storages.keys().find(|key| !offsets.contains_key(*key)) {
        let problem = "is not in the list of storages".to_owned();
        return Err(Malformed::Tensor { storage: shown(key), problem });
    }
    Ok(offsets)
}

fn refuse(problem: &str) -> Malformed {
    Malformed::Content(problem.to_owned())
}
