//! Whether files can be written, which a run should know before it trains for hours.

use anyhow::{Context, Result};
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::Path;
use std::process;

/// Fails if a file cannot be written. What is there stays as it is; a folder that is missing is made.
pub fn check_file(path: &Path) -> Result<()> {
    let check = || {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        folder.map_or(Ok(()), fs::create_dir_all)?;
        match OpenOptions::new().write(true).create_new(true).open(path) {
            Ok(_) => fs::remove_file(path),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => check_existing(path),
            Err(error) => Err(error),
        }
    };
    check().with_context(|| format!("cannot write {}", path.display()))
}

/// Fails if no files can be written to a folder, which is made if it is missing.
pub fn check_folder(path: &Path) -> Result<()> {
    check_file(&path.join(format!(".writable.{}", process::id())))
}

fn check_existing(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(ErrorKind::IsADirectory.into()),
        Ok(found) if found.is_file() => OpenOptions::new().append(true).open(path).map(drop),
        // To open a pipe would wait for who reads it, and a link may point to a file that is yet to be made.
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use std::env;

    #[test]
    fn nothing_that_is_there_changes_and_nothing_is_left() {
        let folder = env::temp_dir().join(format!("tch-amp-writable-{}", process::id()));
        let file = folder.join("new/report.html");
        check_file(&file).unwrap();
        assert!(!file.exists());
        fs::write(&file, "kept").unwrap();
        check_file(&file).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "kept");
        check_folder(&folder.join("new")).unwrap();
        assert_eq!(fs::read_dir(folder.join("new")).unwrap().count(), 1);
        // A folder, a folder that is a file, and a place where nobody can write.
        for wrong in [folder.join("new"), file.join("report.html"), "/proc/report.html".into()] {
            let error = check_file(&wrong).unwrap_err();
            assert!(error.to_string().contains(&wrong.display().to_string()), "{error:#}");
        }
        check_folder(&file).unwrap_err();
        fs::remove_dir_all(folder).unwrap();
    }
}
