//! The log of a disk in memory, and the faults to inject.

use std::collections::BTreeMap;
use std::path::PathBuf;

/// One operation on the disk. Files are numbered.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Create { path: PathBuf, file: usize },
    Write { file: usize, at: usize, data: Vec<u8> },
    Sync { file: usize },
    Rename { from: PathBuf, to: PathBuf, file: usize },
    Remove { path: PathBuf },
    SyncFolder,
}

/// The kinds of calls.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Call {
    OpenFolder,
    Create,
    Write,
    Seek,
    SyncData,
    SyncAll,
    Rename,
    SyncFolder,
    Remove,
}

/// How a call goes wrong.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// The call does nothing and fails.
    Fails(i32),
    /// The call succeeds, but reports an error.
    Late(i32),
    /// Only half is written.
    Short,
}

/// Which calls go wrong.
#[derive(Clone, Copy, Debug)]
pub(super) enum When {
    At(usize),
    From(usize),
    Every(Call),
}

/// The operations so far, and the faults to inject.
#[derive(Default)]
pub(super) struct State {
    pub(super) ops: Vec<Op>,
    /// The calls since the fault was set.
    pub(super) calls: Vec<Call>,
    pub(super) fault: Option<(When, Fault)>,
    /// A call that does nothing and reports success.
    pub(super) skipped: Option<Call>,
    pub(super) files: usize,
}

/// The names of files after all of these operations.
pub(super) fn names<'a>(ops: impl IntoIterator<Item = &'a Op>) -> BTreeMap<PathBuf, usize> {
    let mut names = BTreeMap::new();
    for op in ops {
        match op {
            Op::Create { path, file } => drop(names.insert(path.clone(), *file)),
            Op::Rename { from, to, file } => {
                names.remove(from);
                names.insert(to.clone(), *file);
            }
            Op::Remove { path } => drop(names.remove(path)),
            Op::Write { .. } | Op::Sync { .. } | Op::SyncFolder => {}
        }
    }
    names
}
