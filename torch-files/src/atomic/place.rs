//! Finding the file to be replaced, and the names of temporary files.
//!
//! A temporary file is called `.NAME.PROCESS-COUNTER.tmp`, where `NAME` is the beginning of the name of the file that
//! it replaces. By this name [`remove_leftovers`] recognizes the files that killed processes have left behind.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::path::{self, Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};

/// The limit of Linux.
const MAX_SYMLINKS: usize = 40;

/// How much of a file's name its temporary file's name includes. The whole name must stay within the limit of file
/// systems with short names.
const MAX_NAME_BYTES: usize = 100;

/// The names of the temporary files that this process is writing. No two of them are the same.
static WRITING: Mutex<BTreeSet<OsString>> = Mutex::new(BTreeSet::new());

/// Notes that this process writes a temporary file, until it is dropped.
pub(super) struct Writing(OsString);

impl Writing {
    pub(super) fn new(temporary: &Path) -> Self {
        let name = temporary.file_name().unwrap_or_default().to_owned();
        let _is_new = writing(|names| names.insert(name.clone()));
        Self(name)
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        let _was_there = writing(|names| names.remove(&self.0));
    }
}

fn writing<T>(f: impl FnOnce(&mut BTreeSet<OsString>) -> T) -> T {
    f(&mut WRITING.lock().unwrap_or_else(PoisonError::into_inner))
}

/// A file that is to be replaced, or that does not exist yet.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) path: PathBuf,
    pub(crate) folder: PathBuf,
    /// The permissions of the file, if it exists.
    pub(crate) permissions: Option<Permissions>,
}

impl Place {
    /// Follows symbolic links, also to a file that does not exist yet. Returns an error if the file is read-only or not
    /// a regular file.
    pub(crate) fn find(path: &Path) -> io::Result<Self> {
        let refuse = |kind, problem| Err(io::Error::new(kind, problem));
        // The working directory may change while the file is being written.
        let mut path = path::absolute(path)?;
        for _ in 0..MAX_SYMLINKS {
            let last = path.as_os_str().as_encoded_bytes().last();
            let ends = last.is_some_and(|&last| path::is_separator(last.into()));
            let folder = path.parent().map(Path::to_owned);
            let (Some(folder), Some(name), false) = (folder, path.file_name(), ends) else {
                return refuse(ErrorKind::InvalidInput, "the path has no file name");
            };
            if is_temporary(name) {
                let problem =
                    "names such as `.x.1-2.tmp` are reserved for temporary files; choose another";
                return refuse(ErrorKind::InvalidInput, problem);
            }
            let found = match fs::symlink_metadata(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    return Ok(Self { path, folder, permissions: None });
                }
                found => found?,
            };
            if found.is_symlink() {
                path = folder.join(fs::read_link(&path)?);
                continue;
            }
            if !found.is_file() {
                return refuse(ErrorKind::InvalidInput, "it is not a regular file");
            }
            let permissions = found.permissions();
            // A rename ignores the permissions of the file that it replaces.
            if permissions.readonly() {
                return refuse(ErrorKind::PermissionDenied, "the file is read-only");
            }
            return Ok(Self { path, folder, permissions: Some(permissions) });
        }
        refuse(ErrorKind::InvalidInput, "too many symbolic links")
    }

    /// Returns a path that no other call in this process returns.
    pub(crate) fn temporary(&self) -> PathBuf {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let ends = name.char_indices().map(|(start, char)| start + char.len_utf8());
        let end = ends.take_while(|&end| end <= MAX_NAME_BYTES).last().unwrap_or_default();
        let counter = COUNTER.fetch_add(1, Ordering::Relaxed);
        self.folder.join(format!(".{}.{}-{counter}.tmp", &name[..end], process::id()))
    }
}

/// Returns whether a name is that of a temporary file.
pub(crate) fn is_temporary(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| replaced(name).is_some())
}

/// Returns the name, or its beginning, of the file that a temporary file was to replace; `None` if `name` is not that
/// of a temporary file.
pub(crate) fn replaced(name: &str) -> Option<&str> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let inner = name.strip_prefix('.')?.strip_suffix(".tmp")?;
    let (name, numbers) = inner.rsplit_once('.')?;
    let (process, counter) = numbers.split_once('-')?;
    (!name.is_empty() && is_number(process) && is_number(counter)).then_some(name)
}

/// Removes the temporary files in a folder that were last written to at least `age` ago, and returns how many there
/// were. Only those are removed for which `of` accepts the name of the file that they were to replace, and none that
/// this process is writing.
///
/// A file that another process is writing is never old, but one whose data is being synced can be: an age of minutes is
/// too short.
///
/// # Errors
///
/// [`Error::Io`] if the folder cannot be listed, or a file in it cannot be inspected or removed.
pub fn remove_leftovers(folder: &Path, age: Duration, of: impl Fn(&str) -> bool) -> Result<usize> {
    let mut removed = 0;
    for entry in fs::read_dir(folder).map_err(Error::io("list", folder))? {
        let entry = entry.map_err(Error::io("list", folder))?;
        let name = entry.file_name();
        let is_left = name.to_str().and_then(replaced).is_some_and(&of)
            && !writing(|names| names.contains(&name));
        if is_left && remove_if_old(&entry.path(), age)? {
            removed += 1;
        }
    }
    Ok(removed)
}

/// Removes a file that was last written to at least `age` ago. Returns whether it did.
pub(crate) fn remove_if_old(path: &Path, age: Duration) -> Result<bool> {
    // The process that writes it may rename or remove it at any time.
    let gone = |error: &io::Error| error.kind() == ErrorKind::NotFound;
    let modified = match fs::symlink_metadata(path) {
        Ok(found) if found.is_file() => found.modified().map_err(Error::io("inspect", path))?,
        Err(error) if !gone(&error) => return Err(Error::io("inspect", path)(error)),
        _ => return Ok(false),
    };
    // A time in the future does not count as old.
    if !modified.elapsed().is_ok_and(|elapsed| elapsed >= age) {
        return Ok(false);
    }
    match fs::remove_file(path) {
        Err(error) if gone(&error) => Ok(false),
        removed => removed.map(|()| true).map_err(Error::io("remove", path)),
    }
}
