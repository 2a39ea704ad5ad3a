//! The states in which a power loss can leave a disk.
//!
//! For data that were not synced, any sector of 512 bytes may or may not have been written. Of the changes to names
//! since the folder was synced, any may have happened. A single rename is atomic.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::log::{Op, names};

const SECTOR: usize = 512;

/// The content of the folder after a power loss.
pub(super) type Found = BTreeMap<PathBuf, Vec<u8>>;

/// How much of what was written to a file has reached the disk: the version of each sector, and the version of the
/// length.
type Reached = (Box<dyn Fn(usize) -> usize>, usize);

/// The ways in which writes after number `synced` can be lost.
fn reached(writes: &[(usize, &[u8])], synced: usize) -> Vec<Reached> {
    let last = writes.len();
    if synced == last {
        return vec![(Box::new(move |_| last), last)];
    }
    let mut all: Vec<Reached> = vec![
        (Box::new(move |_| synced), synced),
        (Box::new(move |_| last), last),
        // The length was written, but not the data.
        (Box::new(move |_| synced), last),
    ];
    let (start, data) = writes[last - 1];
    for sector in start / SECTOR..=(start + data.len()) / SECTOR {
        for length in [last - 1, last] {
            all.push((Box::new(move |s| if s < sector { last } else { last - 1 }), length));
            // In the reverse order.
            all.push((Box::new(move |s| if s < sector { last - 1 } else { last }), length));
        }
    }
    for seed in 1..=8 {
        let any = move |sector: usize| {
            let mixed = (sector + 1).wrapping_mul(0x9e37_79b9).wrapping_mul(seed * 2 + 1) >> 7;
            synced + mixed % (last - synced + 1)
        };
        all.push((Box::new(any), any(seed + 1000)));
    }
    all
}

/// The content of a file of which this much has reached the disk.
fn read(writes: &[(usize, &[u8])], (version, length): &Reached) -> Vec<u8> {
    let ends = writes[..*length].iter().map(|(at, data)| at + data.len());
    let mut content = vec![0; ends.max().unwrap_or(0)];
    for (index, byte) in content.iter_mut().enumerate() {
        let reached = writes[..version(index / SECTOR)].iter().rev();
        let found = reached.filter_map(|(at, data)| data.get(index.checked_sub(*at)?)).next();
        *byte = found.copied().unwrap_or(0);
    }
    content
}

/// The writes to a file, and how many of them were synced.
fn writes(ops: &[Op], file: usize) -> (Vec<(usize, &[u8])>, usize) {
    let (mut writes, mut synced) = (vec![], 0);
    for op in ops {
        match op {
            Op::Write { file: of, at, data } if *of == file => writes.push((*at, data.as_slice())),
            Op::Sync { file: of } if *of == file => synced = writes.len(),
            _ => {}
        }
    }
    (writes, synced)
}

/// Every state that a power loss after these operations can leave.
pub(super) fn outcomes(ops: &[Op], path: &Path) -> Vec<Found> {
    let certain = ops.iter().rposition(|op| matches!(op, Op::SyncFolder)).unwrap_or(0);
    let named = |op: &&Op| matches!(op, Op::Create { .. } | Op::Rename { .. } | Op::Remove { .. });
    let pending: Vec<_> = ops[certain..].iter().filter(named).collect();
    let mut found = vec![];
    for happened in 0..1usize << pending.len() {
        let some = pending.iter().enumerate().filter(|(bit, _)| happened >> bit & 1 == 1);
        let names = names(ops[..certain].iter().chain(some.map(|(_, op)| *op)));
        let others: Found = names.keys().map(|name| (name.clone(), vec![])).collect();
        let Some(&file) = names.get(path) else {
            found.push(others);
            continue;
        };
        let (writes, synced) = writes(ops, file);
        for reached in reached(&writes, synced) {
            let mut all = others.clone();
            all.insert(path.to_owned(), read(&writes, &reached));
            found.push(all);
        }
    }
    found
}
