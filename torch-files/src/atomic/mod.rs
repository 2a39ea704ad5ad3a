//! Replaces files atomically: a file is replaced as a whole or not at all.
//!
//! [`replace`] writes a temporary file in the same folder, syncs it, renames it over the old file and syncs the folder.
//! `place` finds the file behind symbolic links and names the temporary one, `writer` fills and syncs it, and `folder`
//! creates folders. What is done to a file goes through `disk`, whose operations tests make fail or lose their effect.

mod disk;
mod place;
#[cfg(test)]
mod tests;

use std::io::{self, ErrorKind, Seek, SeekFrom, Write};
use std::path::{self, Path, PathBuf};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};
use std::{fmt, fs};

use disk::{Disk, DiskFile, Real};
use place::{Place, Writing};

pub use place::remove_leftovers;
pub(crate) use place::{remove_if_old, replaced};

use crate::error::{Error, Result};

/// Where the content of a file is written to. Writes are not buffered, so large ones are fastest.
pub trait Target: Write + Seek {}

impl<T: Write + Seek> Target for T {}

/// Writes the content of a file.
pub type Fill<'a> = dyn FnMut(&mut dyn Target) -> io::Result<()> + 'a;

/// How many names that already exist are skipped. In a container the process ID is the same at every start, and so
/// names of leftovers recur.
const MAX_TEMPORARY_TRIES: usize = 1000;

/// Replaces the file at `path` with what `fill` writes, so that a crash at any point leaves either the old file or the
/// complete new one.
///
/// The content is written to a temporary file in the same folder, which is then renamed; meanwhile the disk holds both
/// files. If `fill` fails or panics, the temporary file is removed; a killed process leaves it behind, see
/// [`remove_leftovers`]. An error that `fill` gets from its target fails the call even if `fill` does not return it.
///
/// If `path` is a symbolic link, the file that it points to is replaced or created. The new file has the permissions of
/// the old one, but it is owned by the caller, extended attributes are lost, and other hard links keep the old content.
/// A read-only file is not replaced, and neither is anything other than a regular file.
///
/// # Errors
///
/// [`Error::Io`] and [`Error::Leftover`]; the old file is then unchanged. An error that `fill` returns is the `cause`.
///
/// # Examples
///
/// ```
/// use std::io::Write;
///
/// use torch_files::atomic::{Replaced, replace};
///
/// # let path = std::env::temp_dir().join(format!("torch-files-replace-{}", std::process::id()));
/// let replaced = replace(&path, &mut |out| out.write_all(b"new"))?;
/// assert!(matches!(replaced, Replaced::Durable | Replaced::Uncertain { .. }));
/// assert_eq!(std::fs::read(&path)?, b"new");
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn replace(path: &Path, fill: &mut Fill<'_>) -> Result<Replaced> {
    let place = Place::find(path).map_err(Error::io("replace", path))?;
    replace_on(&Real::default(), &place, fill)
}

/// Does the work of [`replace`] on any disk.
pub(crate) fn replace_on<D: Disk>(
    disk: &D,
    place: &Place,
    fill: &mut Fill<'_>,
) -> Result<Replaced> {
    // Opened first, so that a folder that cannot be opened for syncing is noticed before a long write.
    let folder = disk.open_folder(&place.folder);
    let folder = folder.map_err(Error::io("open the folder", &place.folder))?;
    let (temporary, file) = create(disk, place)?;
    if let Err(error) = write(disk, file, place, &temporary.path, fill) {
        return Err(temporary.discard(error));
    }
    match disk.rename(&temporary.path, &place.path) {
        Ok(()) => temporary.keep(),
        Err(cause) => return temporary.not_renamed(&place.path, cause),
    }
    let path = || place.path.clone();
    let unsure = |cause| Replaced::Uncertain { action: "sync the folder", path: path(), cause };
    Ok(disk.sync_folder(&folder).map_or_else(unsure, |()| Replaced::Durable))
}

/// Creates the temporary file.
fn create<'a, D: Disk>(disk: &'a D, place: &Place) -> Result<(Temporary<'a, D>, D::File)> {
    let mut tries = 0;
    loop {
        tries += 1;
        let path = place.temporary();
        let writing = Writing::new(&path);
        match disk.create_new(&path) {
            Err(error)
                if error.kind() == ErrorKind::AlreadyExists && tries < MAX_TEMPORARY_TRIES => {}
            Err(error) => return Err(Error::io("create", &path)(error)),
            Ok(file) => {
                return Ok((Temporary { disk, path, ours: true, _writing: writing }, file));
            }
        }
    }
}

/// Fills the temporary file, and syncs and closes it.
fn write<D: Disk>(
    disk: &D,
    file: D::File,
    place: &Place,
    temporary: &Path,
    fill: &mut Fill<'_>,
) -> Result<()> {
    if let Some(permissions) = &place.permissions {
        // Before the content is written, so that it is never readable by users who could not read the old file.
        let set = file.set_permissions(permissions);
        set.map_err(Error::io("set the permissions of", temporary))?;
    }
    let mut writer = Writer::new(file, disk.sync_every());
    let filled = fill(&mut writer).and_then(|()| writer.check());
    filled.map_err(Error::io("write", &place.path))?;
    writer.sync().map_err(Error::io("sync", &place.path))
}

/// The temporary file, which is removed on drop unless it is kept.
struct Temporary<'a, D: Disk> {
    disk: &'a D,
    path: PathBuf,
    ours: bool,
    _writing: Writing,
}

impl<D: Disk> Temporary<'_, D> {
    fn keep(mut self) {
        self.ours = false;
    }

    /// Removes the file after an error, and adds to the error if that fails.
    fn discard(mut self, error: Error) -> Error {
        match self.remove() {
            Ok(_) => error,
            Err(removal) => self.leftover(removal, error),
        }
    }

    /// Removes the file after its rename failed.
    fn not_renamed(mut self, to: &Path, cause: io::Error) -> Result<Replaced> {
        const ACTION: &str = "rename";
        match self.remove() {
            // On a network file system the reply to the rename may have been lost, and the retry fails because the
            // rename was already done.
            Ok(false) => Ok(Replaced::Uncertain { action: ACTION, path: to.to_owned(), cause }),
            Ok(true) => Err(Error::io(ACTION, to)(cause)),
            Err(removal) => Err(self.leftover(removal, Error::io(ACTION, to)(cause))),
        }
    }

    /// Removes the file. Returns whether it existed.
    fn remove(&mut self) -> io::Result<bool> {
        self.ours = false;
        match self.disk.remove(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            removed => removed.map(|()| true),
        }
    }

    fn leftover(&self, removal: io::Error, cause: Error) -> Error {
        Error::Leftover { path: self.path.clone(), removal, cause: Box::new(cause) }
    }
}

impl<D: Disk> Drop for Temporary<'_, D> {
    fn drop(&mut self) {
        if self.ours {
            // `fill` panicked, and that panic matters more than an error here.
            drop(self.disk.remove(&self.path));
        }
    }
}

/// Creates a folder and its missing parents, so that they survive a power loss. Does nothing if the folder exists.
///
/// # Errors
///
/// [`Error::Io`], also if a file of this name exists.
pub fn create_folder(folder: &Path) -> Result<()> {
    create_folder_on(&Real::default(), folder)
}

/// Does the work of [`create_folder`], with the syncing of any disk. A folder survives a power loss only if its name in
/// the folder above was synced, so this syncs the parent of every folder that it creates.
pub(crate) fn create_folder_on<D: Disk>(disk: &D, folder: &Path) -> Result<()> {
    let whole = path::absolute(folder).map_err(Error::io("create", folder))?;
    let missing = whole.ancestors().take_while(|folder| !folder.exists());
    let above: Vec<_> = missing.filter_map(Path::parent).collect();
    fs::create_dir_all(&whole).map_err(Error::io("create", folder))?;
    for folder in above {
        let synced = disk.open_folder(folder).and_then(|open| disk.sync_folder(&open));
        synced.map_err(Error::io("sync", folder))?;
    }
    Ok(())
}

/// Syncs a folder, so that the names in it survive a power loss.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    let disk = Real::default();
    let synced = disk.open_folder(folder).and_then(|open| disk.sync_folder(&open));
    synced.map_err(Error::io("sync the folder", folder))
}

/// A file that is being filled. It keeps the first error. A thread syncs the data after every 64 MiB
/// (`Disk::sync_every`) while more is being written, so that the disk stays busy and the last sync, which also covers
/// the metadata, has little left to do.
pub(super) struct Writer<F> {
    background: Background,
    file: F,
    /// The first error. The caller may lose it, as a `BufWriter` does that is dropped.
    failed: Option<io::Error>,
}

impl<F: DiskFile> Writer<F> {
    pub(super) fn new(file: F, sync_every: u64) -> Self {
        let background = Background { every: sync_every, unsynced: 0, thread: Thread::Waiting };
        Self { background, file, failed: None }
    }

    /// Returns the first error of a write.
    pub(super) fn check(&mut self) -> io::Result<()> {
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Syncs the file to the disk.
    pub(super) fn sync(mut self) -> io::Result<()> {
        // Linux reports a failed sync only once, so `sync_all` would not report one that the thread has already seen.
        self.background.finish()?;
        self.file.sync_all()
    }

    fn note<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        result.inspect_err(|error| {
            if error.kind() != ErrorKind::Interrupted && self.failed.is_none() {
                self.failed = Some(copy(error));
            }
        })
    }

    fn write_some(&mut self, data: &[u8]) -> io::Result<usize> {
        let written = self.file.write(data)?;
        if written == 0 && !data.is_empty() {
            return Err(ErrorKind::WriteZero.into());
        }
        self.background.written(written as u64, &self.file).map_err(final_error)?;
        Ok(written)
    }
}

impl<F: DiskFile> Write for Writer<F> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let result = self.write_some(data);
        self.note(result)
    }

    fn flush(&mut self) -> io::Result<()> {
        let result = self.file.flush();
        self.note(result)
    }
}

impl<F: DiskFile> Seek for Writer<F> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let result = self.file.seek(to);
        self.note(result)
    }
}

/// An error after bytes were written. If it were an interruption, the caller would write them again.
fn final_error(error: io::Error) -> io::Error {
    match error.kind() {
        ErrorKind::Interrupted => io::Error::other(error.to_string()),
        _ => error,
    }
}

fn copy(error: &io::Error) -> io::Error {
    let kept = || io::Error::new(error.kind(), error.to_string());
    error.raw_os_error().map_or_else(kept, io::Error::from_raw_os_error)
}

/// Syncs in a thread of its own what has been written, while more is being written.
struct Background {
    every: u64,
    /// The bytes written since the thread was last notified.
    unsynced: u64,
    thread: Thread,
}

enum Thread {
    /// Not enough has been written yet to start the thread.
    Waiting,
    Running {
        orders: SyncSender<()>,
        thread: JoinHandle<io::Result<()>>,
    },
    Ended,
}

impl Background {
    fn written<F: DiskFile>(&mut self, bytes: u64, file: &F) -> io::Result<()> {
        self.unsynced += bytes;
        if self.unsynced < self.every {
            return Ok(());
        }
        self.unsynced = 0;
        if matches!(self.thread, Thread::Waiting) {
            // If the thread cannot be started, a save only takes longer.
            self.thread = start(file).unwrap_or(Thread::Ended);
        }
        let Thread::Running { orders, .. } = &self.thread else {
            return Ok(());
        };
        match orders.try_send(()) {
            // If the channel is full, the order in it has not started, and so covers these bytes as well.
            Ok(()) | Err(TrySendError::Full(())) => Ok(()),
            Err(TrySendError::Disconnected(())) => self.finish(),
        }
    }

    /// Ends the thread and returns its error.
    fn finish(&mut self) -> io::Result<()> {
        let Thread::Running { orders, thread } = std::mem::replace(&mut self.thread, Thread::Ended)
        else {
            return Ok(());
        };
        drop(orders);
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the syncing thread panicked")))
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // The caller failed or panicked, so the result of the thread no longer matters.
        drop(self.finish());
    }
}

fn start<F: DiskFile>(file: &F) -> io::Result<Thread> {
    let file = file.try_clone()?;
    let (orders, received) = sync_channel(1);
    let work = move || received.iter().try_for_each(|()| file.sync_data());
    let thread = thread::Builder::new().name("torch-files sync".to_owned()).spawn(work)?;
    Ok(Thread::Running { orders, thread })
}

/// The outcome of a replacement: the new file is in place and complete. An existing file is never left partly written.
#[derive(Debug)]
#[must_use = "the new file may not survive a power loss"]
pub enum Replaced {
    /// The new file survives a power loss.
    Durable,
    /// A power loss may bring the old file back, because the folder could not be synced. Or, on a network file system,
    /// the rename was reported as failed although the temporary file is gone.
    Uncertain {
        /// The operation that failed: `"sync the folder"` or `"rename"`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        cause: io::Error,
    },
}

/// The outcome as a sentence.
impl fmt::Display for Replaced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Durable => f.write_str("the file is replaced"),
            Self::Uncertain { action, path, cause } => write!(
                f,
                "{} is whole, but after a power loss it may be the old file: cannot {action}: {cause}",
                path.display()
            ),
        }
    }
}
