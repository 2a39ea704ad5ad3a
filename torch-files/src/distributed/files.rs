//! The files of a folder: those of a save, and what killed ones have left.

use std::collections::HashSet;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::Duration;

use super::FolderKind;
use super::read::is_index_of_rank;
use crate::atomic;
use crate::error::{Error, Result};
use crate::index;
use crate::limits::Limits;
use crate::safetensors::{self, checksums_of};
use crate::source::Source;
use crate::text::shown;

/// Creates the folder. Returns whether it did not exist. A folder that exists must be a checkpoint of the same kind,
/// the leftover of one, or empty. A model in several files has others beside those of a checkpoint, and is not replaced
/// unless this crate has written its index.
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
    if is_whole(folder) {
        if kind == FolderKind::Safetensors && read_index(folder)?.is_none() {
            return refuse(of_another() + "; choose another folder");
        }
    } else {
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

/// Returns whether a file in a folder without an index can be what a killed save has left. Python writes none for the
/// shards of several processes, which are a whole checkpoint.
fn is_leftover(folder: &Path, name: &str) -> bool {
    match FolderKind::Safetensors.numbers(name) {
        Some(_) => is_own_shard(&folder.join(name)),
        None => is_ours(name),
    }
}

/// Returns whether this crate has written a shard. It does so as a whole or not at all, so that what cannot be read is
/// somebody else's.
fn is_own_shard(path: &Path) -> bool {
    let source = Source::open(path).ok();
    let header = source.and_then(|source| safetensors::read(&source, &Limits::DEFAULT).ok());
    header.is_some_and(|header| checksums_of(&header.metadata).is_some())
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

/// Removes the files that do not belong to the index, and what killed saves have left of temporary ones, if they were
/// last written to at least `age` ago. Returns how many there were.
pub(super) fn remove_others(
    folder: &Path,
    kind: FolderKind,
    is_kept: impl Fn(&str) -> bool,
    age: Duration,
) -> Result<usize> {
    let mut removed = 0;
    for name in names(folder)? {
        let is_one = kind.is_unfinished_index(&name) || kind.numbers(&name).is_some();
        if is_one && !is_kept(&name) {
            removed += usize::from(atomic::remove_if_old(&folder.join(name), age)?);
        }
    }
    Ok(removed + atomic::remove_leftovers(folder, age, |name| is_of(kind, name))?)
}

/// Removes what killed saves have left in a folder that has an index. Returns whether there was anything.
fn remove_leftovers_within(folder: &Path, kind: FolderKind, age: Duration) -> Result<bool> {
    let names = names(folder)?;
    let is_of_rank = names.iter().any(|name| is_index_of_rank(name));
    let files: HashSet<_> = names.into_iter().filter(|name| kind.numbers(name).is_some()).collect();
    let saves: HashSet<_> =
        files.iter().filter_map(|name| kind.numbers(name)).map(|it| it.1).collect();
    let kept = match saves.len() {
        // They are of one save, that of the index, which need not be read.
        0 | 1 => files,
        // Ranks have saved alone since, and each has an index of its own.
        _ if is_of_rank => files,
        _ => {
            // Otherwise a power loss could bring back an index that names others.
            atomic::sync_folder(folder)?;
            // Nothing is known of the files of another index.
            files_of(folder, kind).unwrap_or(files)
        }
    };
    let is_kept = |name: &str| kept.contains(name) || !is_leftover(folder, name);
    Ok(remove_others(folder, kind, is_kept, age)? > 0)
}

/// Returns the names of the files that the index of a folder names, if it can be read and is of this crate.
fn files_of(folder: &Path, kind: FolderKind) -> Option<HashSet<String>> {
    if kind == FolderKind::Distcp {
        return super::read::files_of(folder).ok();
    }
    let index = index::parse(&read_index(folder).ok()??, &Limits::DEFAULT).ok()?;
    Some(index.files.into_keys().collect())
}

/// Reads the index of a model in several files; `None` if another program has saved that model. Without their index,
/// its files would be of no use, and this crate does not know which they are.
fn read_index(folder: &Path) -> Result<Option<Vec<u8>>> {
    let source = Source::open(&folder.join(index::NAME))?;
    let index = source.all(Limits::DEFAULT.max_header_bytes);
    let index = index.map_err(|malformed| malformed.at(folder))?;
    Ok(Some(index).filter(|index| !index::is_of_another(index)))
}

/// Says that `read_index` returns none.
fn of_another() -> String {
    format!("its index `{}` is that of a model which another program has saved", index::NAME)
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
/// the folder, and then the folder itself, are left alone: among them a checkpoint of the other kind, and, without an
/// index, shards that another program has written.
///
/// # Errors
///
/// [`Error::Io`], also if there is no such folder, or if its `model.safetensors.index.json` is that of another program.
pub fn remove(folder: &Path) -> Result<()> {
    let names = names(folder)?;
    let kind = FolderKind::of(folder);
    if kind == Some(FolderKind::Safetensors) && read_index(folder)?.is_none() {
        let cause = io::Error::new(ErrorKind::InvalidInput, of_another());
        return Err(Error::io("remove", folder)(cause));
    }
    if let Some(kind) = kind {
        remove_file(&folder.join(kind.index()))?;
    }
    atomic::sync_folder(folder)?;
    let is_of_it = |name: &str| match kind {
        Some(kind) => is_of(kind, name),
        None => is_leftover(folder, name),
    };
    for name in names.iter().filter(|name| is_of_it(name)) {
        remove_file(&folder.join(name))?;
    }
    match fs::remove_dir(folder) {
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
        removed => removed.map_err(Error::io("remove", folder)),
    }
}

/// Removes what a killed save has left: a folder without an index in which nothing was written for `age`, or, in one
/// with an index, the files that this does not name and that were not written to for `age`. Returns whether there was
/// anything. Safetensors shards of other programs are left alone, because they are a checkpoint without an index, and
/// so are files and symbolic links in the place of the folder. A save that still runs writes more often than every few
/// minutes.
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
    if !names.iter().all(|name| is_leftover(folder, name)) {
        return Ok(false);
    }
    remove(folder)?;
    Ok(true)
}
