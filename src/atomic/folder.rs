//! Creating a folder that survives a power loss.
//!
//! A folder survives only if its name in the folder above was synced, so this syncs the parent of every folder that it
//! creates.

use std::fs;
use std::path::{self, Path};

use super::disk::{Disk, Real};
use super::error::{SaveError, cannot};

/// Creates a folder and its missing parents, so that they survive a power loss. Does nothing if the folder exists.
///
/// # Errors
///
/// [`SaveError::Io`], also if a file of this name exists.
pub(crate) fn create_folder(folder: &Path) -> Result<(), SaveError> {
    create_folder_on(&Real::default(), folder)
}

/// Does the work of [`create_folder`], with the syncing of any disk.
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
