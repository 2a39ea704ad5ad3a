//! The user's cache folder for everything that was downloaded, and its free space.

use std::env;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use fs4::{FileExt, TryLockError};

use crate::process;

/// The folder that contains all files of xtask.
pub fn dir() -> Result<PathBuf> {
    let set = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let user = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    let user = user.context("set HOME or XDG_CACHE_HOME: libtorch is kept in a folder there")?;
    Ok(user.join("tch-amp"))
}

/// Locks the file, and waits while another run holds the lock. The kernel releases the lock of a run that is killed.
pub fn lock(path: &Path) -> Result<File> {
    let file =
        File::create(path).with_context(|| format!("{} cannot be written", path.display()))?;
    if let Err(TryLockError::WouldBlock) = FileExt::try_lock(&file) {
        println!("waiting for another run, which has {}", path.display());
    }
    FileExt::lock(&file).with_context(|| format!("{} cannot be locked", path.display()))?;
    Ok(file)
}

/// The free space in whole GB at `path`, which need not exist yet.
pub fn free_gb(path: &Path) -> Result<u64> {
    let existing = path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let table = process::read(Command::new("df").arg("-Pk").arg(existing))?;
    available_kb(&table).map(|kb| kb * 1024 / 1_000_000_000).context("`df -Pk` prints no number")
}

/// The fourth column of the last line of `df -Pk`.
fn available_kb(table: &str) -> Option<u64> {
    table.lines().last()?.split_whitespace().nth(3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_available_column_of_df_is_read() {
        let table = "\
Filesystem     1024-blocks     Used Available Capacity Mounted on
/dev/vda         264093588 22653000  73012345      24% /";
        assert_eq!(available_kb(table), Some(73_012_345));
        assert_eq!(available_kb(""), None);
    }

    #[test]
    fn free_space_is_found_for_a_folder_that_does_not_exist_yet() {
        assert!(free_gb(Path::new("/no/such/folder")).is_ok());
    }
}
