//! Replaces files atomically: a file is replaced as a whole or not at all.
//!
//! [`replace`] writes a temporary file in the same folder, syncs it, renames it over the old file and syncs the folder.
//! `place` finds the file behind symbolic links and names the temporary one, `writer` fills and syncs it, and `folder`
//! creates folders. What is done to a file goes through `disk`, whose operations tests make fail or lose their effect.

pub(crate) mod disk;
mod error;
pub(crate) mod folder;
pub(crate) mod place;
mod writer;

use std::io::{self, ErrorKind, Seek, Write};
use std::path::{Path, PathBuf};

use disk::{Disk, DiskFile, Real};
use error::cannot;
use place::{Place, Writing};
use writer::Writer;

pub use error::SaveError;
pub(crate) use folder::create_folder;
pub(crate) use place::remove_leftovers;

/// Where the content of a file is written to. Writes are not buffered, so large ones are fastest.
pub(crate) trait Target: Write + Seek {}

/// A file that stays in memory.
#[cfg(feature = "distributed")]
impl Target for io::Cursor<Vec<u8>> {}

/// Writes the content of a file.
type Fill<'a> = dyn FnMut(&mut dyn Target) -> io::Result<()> + 'a;

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
/// [`SaveError`]. Unless it is [`SaveError::Indeterminate`], the old file is unchanged.
pub(crate) fn replace(path: &Path, fill: &mut Fill<'_>) -> Result<(), SaveError> {
    let place = Place::find(path).map_err(cannot("replace", path))?;
    replace_on(&Real::default(), &place, fill)
}

/// Does the work of [`replace`] on any disk.
pub(crate) fn replace_on<D: Disk>(
    disk: &D,
    place: &Place,
    fill: &mut Fill<'_>,
) -> Result<(), SaveError> {
    // Opened first, so that a folder that cannot be opened for syncing is noticed before a long write.
    let folder = disk.open_folder(&place.folder);
    let folder = folder.map_err(cannot("open the folder", &place.folder))?;
    let (temporary, file) = create(disk, place)?;
    if let Err(error) = write(disk, file, place, &temporary.path, fill) {
        return Err(temporary.discard(error));
    }
    match disk.rename(&temporary.path, &place.path) {
        Ok(()) => temporary.keep(),
        Err(cause) => return Err(temporary.not_renamed(&place.path, cause)),
    }
    let action = "sync the folder";
    let path = || place.path.clone();
    let unsure = |cause| SaveError::Indeterminate { action, path: path(), cause };
    disk.sync_folder(&folder).map_err(unsure)
}

/// Creates the temporary file.
fn create<'a, D: Disk>(
    disk: &'a D,
    place: &Place,
) -> Result<(Temporary<'a, D>, D::File), SaveError> {
    let mut tries = 0;
    loop {
        tries += 1;
        let path = place.temporary();
        let writing = Writing::new(&path);
        match disk.create_new(&path) {
            Err(error)
                if error.kind() == ErrorKind::AlreadyExists && tries < MAX_TEMPORARY_TRIES => {}
            Err(error) => return Err(cannot("create", &path)(error)),
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
) -> Result<(), SaveError> {
    if let Some(permissions) = &place.permissions {
        // Before the content is written, so that it is never readable by users who could not read the old file.
        let set = file.set_permissions(permissions);
        set.map_err(cannot("set the permissions of", temporary))?;
    }
    let mut writer = Writer::new(file, disk.sync_every());
    let filled = fill(&mut writer).and_then(|()| writer.check());
    filled.map_err(cannot("write", &place.path))?;
    writer.sync().map_err(cannot("sync", &place.path))
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
    fn discard(mut self, error: SaveError) -> SaveError {
        match self.remove() {
            Ok(_) => error,
            Err(removal) => self.leftover(removal, error),
        }
    }

    /// Removes the file after its rename failed.
    fn not_renamed(mut self, to: &Path, cause: io::Error) -> SaveError {
        const ACTION: &str = "rename";
        match self.remove() {
            // On a network file system the reply to the rename may have been lost, and the retry fails because the
            // rename was already done.
            Ok(false) => SaveError::Indeterminate { action: ACTION, path: to.to_owned(), cause },
            Ok(true) => cannot(ACTION, to)(cause),
            Err(removal) => self.leftover(removal, cannot(ACTION, to)(cause)),
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

    fn leftover(&self, removal: io::Error, cause: SaveError) -> SaveError {
        SaveError::Leftover { path: self.path.clone(), removal, cause: Box::new(cause) }
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
