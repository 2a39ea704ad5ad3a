//! Which file is to be replaced, and the names of temporary files.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::path::{self, Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::error::{SaveError, cannot};

/// As many as Linux follows.
const MAX_SYMLINKS: usize = 40;

/// How much of a file's name its temporary file has: the whole must fit where names are short.
const MAX_NAME_BYTES: usize = 100;

/// A file that is to be replaced, or that does not exist yet.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) path: PathBuf,
    pub(crate) folder: PathBuf,
    /// Those of the file, where there is one.
    pub(crate) permissions: Option<Permissions>,
}

impl Place {
    /// Follows symbolic links, also to a file that does not exist yet. Refuses what is not a regular file, or
    /// read-only.
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
            // A rename would not ask.
            if permissions.readonly() {
                return refuse(ErrorKind::PermissionDenied, "the file is read-only");
            }
            return Ok(Self { path, folder, permissions: Some(permissions) });
        }
        refuse(ErrorKind::InvalidInput, "too many symbolic links")
    }

    /// A path that no other call in this process gets.
    pub(crate) fn temporary(&self) -> PathBuf {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let ends = name.char_indices().map(|(start, char)| start + char.len_utf8());
        let end = ends.take_while(|&end| end <= MAX_NAME_BYTES).last().unwrap_or_default();
        let counter = COUNTER.fetch_add(1, Ordering::Relaxed);
        self.folder.join(format!(".{}.{}-{counter}.tmp", &name[..end], process::id()))
    }
}

/// Whether a file has the name of a temporary file, that a killed process may have left behind.
pub(crate) fn is_temporary(name: &OsStr) -> bool {
    replaced(name).is_some()
}

/// The name of the file, or its beginning, that a temporary file was to replace. None of any other file.
fn replaced(name: &OsStr) -> Option<&str> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let inner = name.to_str()?.strip_prefix('.')?.strip_suffix(".tmp")?;
    let (name, numbers) = inner.rsplit_once('.')?;
    let (process, counter) = numbers.split_once('-')?;
    (!name.is_empty() && is_number(process) && is_number(counter)).then_some(name)
}

/// Removes the temporary files of a folder that have not been written to for that long, and says how many there were.
/// Only those that were to replace a file `of` such a name.
///
/// A file that is being written is never old, but one may wait for its data to be synced: minutes are too short an age.
pub(crate) fn remove_leftovers(
    folder: &Path,
    age: Duration,
    of: impl Fn(&str) -> bool,
) -> Result<usize, SaveError> {
    let mut removed = 0;
    for entry in fs::read_dir(folder).map_err(cannot("list", folder))? {
        let entry = entry.map_err(cannot("list", folder))?;
        if replaced(&entry.file_name()).is_some_and(&of) && remove_if_old(&entry.path(), age)? {
            removed += 1;
        }
    }
    Ok(removed)
}

fn remove_if_old(path: &Path, age: Duration) -> Result<bool, SaveError> {
    // Its process may rename or remove it at any time.
    let gone = |error: &io::Error| error.kind() == ErrorKind::NotFound;
    let modified = match fs::symlink_metadata(path) {
        Ok(found) if found.is_file() => found.modified().map_err(cannot("inspect", path))?,
        Err(error) if !gone(&error) => return Err(cannot("inspect", path)(error)),
        _ => return Ok(false),
    };
    // A time in the future is not old.
    if !modified.elapsed().is_ok_and(|elapsed| elapsed >= age) {
        return Ok(false);
    }
    match fs::remove_file(path) {
        Err(error) if gone(&error) => Ok(false),
        removed => removed.map(|()| true).map_err(cannot("remove", path)),
    }
}
