//! Tests of loading from a folder while another process saves to it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use crate::error::CheckpointError;
use std::cell::Cell;
use std::fs;

use super::*;

fn folder(name: &str) -> (PathBuf, CheckpointFolder) {
    let path = std::env::temp_dir().join(format!("tch-amp-{}-{name}", std::process::id()));
    drop(fs::remove_dir_all(&path));
    (path.clone(), CheckpointFolder::new(path).unwrap())
}

/// The newest file is damaged, and an older one vanishes when it is about to be loaded, because another process has
/// saved a newer one. That is not a folder in which all files are damaged.
#[test]
fn a_file_that_is_gone_beside_a_damaged_one_is_looked_for_again() {
    let (path, folder) = folder("gone");
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_value("at", &3).unwrap();
    folder.save(1, &checkpoint).unwrap();
    fs::write(path.join("step-00000002.safetensors"), b"damaged").unwrap();
    let loads = Cell::new(0);
    let load = |path: &Path| {
        loads.set(loads.get() + 1);
        if loads.get() == 2 {
            fs::remove_file(path).unwrap();
            folder.save(3, &checkpoint).unwrap();
        }
        Checkpoint::load(path)
    };
    let found = folder.first_valid(|files| files.reverse(), load).unwrap().unwrap();
    assert_eq!((found.file.step, loads.get()), (3, 3));
    // At the second listing the newest file comes first.
    assert!(found.damaged.is_empty());
    fs::remove_dir_all(path).unwrap();
}

#[test]
fn a_folder_whose_files_keep_vanishing_is_an_error() {
    let (path, folder) = folder("vanishing");
    folder.save(1, &Checkpoint::new()).unwrap();
    let gone = |path: &Path| {
        let error = io::Error::from(ErrorKind::NotFound);
        Err(CheckpointError::io("open", path)(error).into())
    };
    match folder.first_valid(|_| {}, gone) {
        Err(Error::Checkpoint(CheckpointError::Io { action: "list", .. })) => {}
        other => panic!("{other:?}"),
    }
    fs::remove_dir_all(path).unwrap();
}
