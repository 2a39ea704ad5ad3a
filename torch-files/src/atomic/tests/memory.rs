//! A disk in memory that keeps a log.

use std::fs::Permissions;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use super::log::{Call, Fault, Op, State, When, names};
use crate::atomic::disk::{Disk, DiskFile};

/// The disk in memory.
#[derive(Clone)]
pub(super) struct Memory {
    state: Arc<Mutex<State>>,
    sync_every: u64,
}

pub(super) struct MemoryFile {
    disk: Memory,
    file: usize,
    at: usize,
}

impl Memory {
    /// A disk with a file that was synced and would survive a power loss.
    pub(super) fn with(path: &Path, old: Option<&[u8]>, sync_every: u64) -> Self {
        let disk = Self { state: Arc::default(), sync_every };
        if let Some(old) = old {
            let mut file = disk.create_new(path).unwrap();
            file.write_all(old).unwrap();
            file.sync_all().unwrap();
            disk.sync_folder(&()).unwrap();
        }
        disk.state().calls.clear();
        disk
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Opens the file that has this name now.
    pub(super) fn open(&self, path: &Path) -> io::Result<MemoryFile> {
        let file = names(&self.state().ops).get(path).copied();
        let file = file.ok_or(io::ErrorKind::NotFound)?;
        Ok(MemoryFile { disk: self.clone(), file, at: 0 })
    }

    /// Performs `op` unless a fault is injected. Returns the result of the call.
    fn call(&self, call: Call, op: Option<Op>) -> io::Result<()> {
        let mut state = self.state();
        let count = state.calls.len();
        state.calls.push(call);
        let fault = state.fault.filter(|(when, _)| match *when {
            When::At(at) => at == count,
            When::From(from) => from <= count,
            When::Every(kind) => kind == call,
        });
        let done = !matches!(fault, Some((_, Fault::Fails(_)))) && state.skipped != Some(call);
        state.ops.extend(op.filter(|_| done));
        match fault {
            Some((_, Fault::Fails(error) | Fault::Late(error))) => {
                Err(io::Error::from_raw_os_error(error))
            }
            _ => Ok(()),
        }
    }

    fn is_short(&self) -> bool {
        let state = self.state();
        matches!(state.fault, Some((When::At(at), Fault::Short)) if at == state.calls.len())
    }
}

impl Disk for Memory {
    type File = MemoryFile;
    type Folder = ();

    fn open_folder(&self, _: &Path) -> io::Result<()> {
        self.call(Call::OpenFolder, None)
    }

    fn create_new(&self, path: &Path) -> io::Result<MemoryFile> {
        assert!(!names(&self.state().ops).contains_key(path), "{path:?} exists");
        let file = self.state().files;
        self.state().files += 1;
        self.call(Call::Create, Some(Op::Create { path: path.to_owned(), file }))?;
        Ok(MemoryFile { disk: self.clone(), file, at: 0 })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let file = self.open(from)?.file;
        let (from, to) = (from.to_owned(), to.to_owned());
        self.call(Call::Rename, Some(Op::Rename { from, to, file }))
    }

    fn sync_folder(&self, (): &()) -> io::Result<()> {
        self.call(Call::SyncFolder, Some(Op::SyncFolder))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        drop(self.open(path)?);
        self.call(Call::Remove, Some(Op::Remove { path: path.to_owned() }))
    }

    fn sync_every(&self) -> u64 {
        self.sync_every
    }
}

impl DiskFile for MemoryFile {
    fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { disk: self.disk.clone(), file: self.file, at: 0 })
    }

    fn sync_data(&self) -> io::Result<()> {
        self.disk.call(Call::SyncData, Some(Op::Sync { file: self.file }))
    }

    fn sync_all(&self) -> io::Result<()> {
        self.disk.call(Call::SyncAll, Some(Op::Sync { file: self.file }))
    }

    fn set_permissions(&self, _: &Permissions) -> io::Result<()> {
        Ok(())
    }
}

impl Write for MemoryFile {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let written = if self.disk.is_short() { data.len().div_ceil(2) } else { data.len() };
        let data = data[..written].to_vec();
        let op = Op::Write { file: self.file, at: self.at, data };
        self.disk.call(Call::Write, Some(op))?;
        self.at += written;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for MemoryFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let SeekFrom::Start(at) = to else { return Err(io::ErrorKind::Unsupported.into()) };
        self.disk.call(Call::Seek, None)?;
        self.at = at as usize;
        Ok(at)
    }
}
