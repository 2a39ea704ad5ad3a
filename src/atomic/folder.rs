//! Creating a folder so that it stays.

use std::fs;
use std::path::{self, Path};

use super::disk::{Disk, Real};
use super::error::{SaveError, cannot};

/// Creates a folder, and those above it, where there is none. What is created survives a power loss.
///
/// # Errors
///
/// [`SaveError::Io`], also where something else has the name.
pub(crate) fn create_folder(folder: &Path) -> Result<(), SaveError> {
    create_folder_on(&Real::default(), folder)
}

/// As [`create_folder`], on a disk that syncs in its own way.
pub(crate) fn create_folder_on<D: Disk>(disk: &D, folder: &Path) -> Result<(), SaveError> {
    let whole = path::absolute(folder).map_err(cannot("create", folder))?;
    let missing = whole.ancestors().take_while(|folder| !folder.exists());
    let above: Vec<_> = missing.filter_map(Path::parent).collect();
    fs::create_dir_all(&whole).map_err(cannot("create", folder))?;
    for folder in above {
        let synced = disk.open_folder(folder).and_then(|open| disk.sync_folder(&open));
        synced.map_err(cannot("sync", folder))?;
    }
    Ok(())
}
