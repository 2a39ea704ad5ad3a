//! The files of a folder: those of a save, and what killed ones have left.

use std::collections::HashSet;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::Duration;

use super::FolderKind;
use crate::atomic;
use crate::error::{Error, Result};
use crate::index;
use crate::limits::Limits;
use crate::source::Source;
use crate::text::shown;

/// Creates the folder. Returns whether it did not exist. A folder that exists must be a checkpoint of the same kind, the
/// leftover of one, or empty.
pub(super) fn make(folder: &Path, kind: FolderKind) -> Result<bool> {
    match fs::metadata(folder) {
        Ok(found) if !found.is_dir() => {
            let cause = io::Error::new(ErrorKind::NotADirectory, "it is a file");
            return Err(Error::io("replace", folder)(cause));
        }
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let above = folder.parent().unwrap_or(folder);
            // As for a file, the folder that it is in must exist.
            fs::metadata(above).map_err(Error::io("open the folder", above))?;
            atomic::create_folder(folder)?;
            return Ok(true);
        }
        Err(error) => return Err(Error::io("open", folder)(error)),
    }
    let refuse = |problem| {
        Err(Error::io("replace", folder)(io::Error::new(ErrorKind::InvalidInput, problem)))
    };
    // A reader would take that one.
    if let Some(other) = FolderKind::of(folder).filter(|found| *found != kind) {
        let index = other.index();
        return refuse(format!(
            "it has the index `{index}` of another format; choose another folder"
        ));
    }
    if !is_whole(folder) {
        if let Some(name) = names(folder)?.iter().find(|name| !is_of(kind, name)) {
            let name = shown(name);
            return refuse(format!(
                "it is no checkpoint, and has other files, such as `{name}`; choose another folder"
            ));
        }
        // The process that has created it may have ended before its name was on the disk.
        let found = fs::canonicalize(folder).map_err(Error::io("open", folder))?;
        atomic::sync_folder(found.parent().unwrap_or(&found))?;
    }
    Ok(false)
}

/// Returns the names in a folder. Those that are not UTF-8 are shown with replacement characters.
fn names(folder: &Path) -> Result<Vec<String>> {
    let name =
        |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
    let names = fs::read_dir(folder).and_then(|entries| entries.map(name).collect());
    names.map_err(Error::io("list", folder))
}

/// Returns whether a name is that of an index, of a file with entries, or of a temporary file of one of them.
fn is_of(kind: FolderKind, name: &str) -> bool {
    let is_one = |name: &str| name == kind.index() || kind.numbers(name).is_some();
    let is_temporary = || atomic::replaced(name).is_some_and(is_one);
    is_one(name) || kind.is_unfinished_index(name) || is_temporary()
}

/// Returns whether a name is one of these in a folder of any kind.
fn is_ours(name: &str) -> bool {
    FolderKind::ALL.into_iter().any(|kind| is_of(kind, name))
}

/// Returns a number that no file in the folder has, nor one that another process still writes.
pub(super) fn next_number(folder: &Path, kind: FolderKind) -> Result<u64> {
    let names = names(folder)?;
    let numbers = |name: &String| kind.numbers(atomic::replaced(name).unwrap_or(name));
    let taken = names.iter().filter_map(numbers);
    let Some((rank, last)) = taken.max_by_key(|(_, number)| *number) else {
        return Ok(kind.first_number());
    };
    last.checked_add(1).ok_or_else(|| {
        let problem = format!("there is no number after that of `{}`", kind.name_of(rank, last));
        Error::io("name a file in", folder)(io::Error::other(problem))
    })
}

/// Removes the files that the index does not name, and what killed saves have left of temporary ones, if they were last
/// written to at least `age` ago. Returns how many there were.
pub(super) fn remove_others(
    folder: &Path,
    kind: FolderKind,
    kept: &HashSet<String>,
    age: Duration,
) -> Result<usize> {
    let mut removed = 0;
    for name in names(folder)? {
        let is_one = kind.is_unfinished_index(&name) || kind.numbers(&name).is_some();
        if is_one && !kept.contains(&name) {
            removed += usize::from(atomic::remove_if_old(&folder.join(name), age)?);
        }
    }
    Ok(removed + atomic::remove_leftovers(folder, age, |name| is_of(kind, name))?)
}

/// Removes what killed saves have left in a folder that has an index. Returns whether there was anything.
fn remove_leftovers_within(folder: &Path, kind: FolderKind, age: Duration) -> Result<bool> {
    let files: HashSet<_> =
        names(folder)?.into_iter().filter(|name| kind.numbers(name).is_some()).collect();
    let saves: HashSet<_> =
        files.iter().filter_map(|name| kind.numbers(name)).map(|it| it.1).collect();
    let kept = match saves.len() {
        // They are of one save, that of the index, which need not be read.
        0 | 1 => files,
        _ => {
            // Otherwise a power loss could bring back an index that names others.
            atomic::sync_folder(folder)?;
            // Nothing is known of the files of an index that cannot be read.
            files_of(folder, kind).unwrap_or(files)
        }
    };
    Ok(remove_others(folder, kind, &kept, age)? > 0)
}

/// Returns the names of the files that the index of a folder names.
fn files_of(folder: &Path, kind: FolderKind) -> Result<HashSet<String>> {
    if kind == FolderKind::Distcp {
        return super::read::files_of(folder);
    }
    let source = Source::open(&folder.join(kind.index()))?;
    let index = source.all(Limits::DEFAULT.max_header_bytes);
    let index = index.and_then(|bytes| index::parse(&bytes, &Limits::DEFAULT));
    Ok(index.map_err(|malformed| malformed.at(folder))?.files.into_keys().collect())
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(Error::io("remove", path)),
    }
}

/// Returns whether a folder is one whose save has finished: whether it has an index.
pub fn is_whole(folder: &Path) -> bool {
    FolderKind::of(folder).is_some()
}

/// Removes a checkpoint that is a folder: its index first, so that what a crash leaves is no checkpoint. Other files in
/// the folder, and then the folder itself, are left alone.
///
/// # Errors
///
/// [`Error::Io`], if there is no such folder as well.
pub fn remove(folder: &Path) -> Result<()> {
    let names = names(folder)?;
    FolderKind::ALL.into_iter().try_for_each(|kind| remove_file(&folder.join(kind.index())))?;
    atomic::sync_folder(folder)?;
    for name in names.iter().filter(|name| is_ours(name)) {
        remove_file(&folder.join(name))?;
    }
    match fs::remove_dir(folder) {
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
        removed => removed.map_err(Error::io("remove", folder)),
    }
}

/// Removes what a killed save has left: a folder without an index in which nothing was written for `age`, or, in one
/// with an index, the files that this does not name and that were not written to for `age`. Returns whether there was
/// anything. Files and symbolic links in the place of the folder are left alone. A save that still runs writes more
/// often than every few minutes.
///
/// # Errors
///
/// [`Error::Io`] if the folder cannot be listed, or a file in it cannot be inspected or removed.
pub fn remove_leftover(folder: &Path, age: Duration) -> Result<bool> {
    match fs::symlink_metadata(folder) {
        Ok(found) if found.is_dir() => {}
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(Error::io("inspect", folder)(error));
        }
        _ => return Ok(false),
    }
    match remove_leftover_folder(folder, age) {
        // Another process has removed it meanwhile.
        Err(Error::Io { cause, .. }) if cause.kind() == ErrorKind::NotFound => Ok(false),
        removed => removed,
    }
}

fn remove_leftover_folder(folder: &Path, age: Duration) -> Result<bool> {
    if let Some(kind) = FolderKind::of(folder) {
        return remove_leftovers_within(folder, kind, age);
    }
    let names = names(folder)?;
    let files = names.iter().map(|name| folder.join(name)).chain([folder.to_owned()]);
    for path in files {
        let modified = match fs::symlink_metadata(&path).and_then(|found| found.modified()) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            modified => modified.map_err(Error::io("inspect", &path))?,
        };
        // A time in the future does not count as old.
        if !modified.elapsed().is_ok_and(|elapsed| elapsed >= age) {
            return Ok(false);
        }
    }
    if !names.iter().all(|name| is_ours(name)) {
        return Ok(false);
    }
    remove(folder)?;
    Ok(true)
}
