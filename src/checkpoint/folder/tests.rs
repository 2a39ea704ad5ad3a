//! Tests of loading from a folder while another process saves to it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::cell::Cell;
use std::fs;

use super::*;
use crate::error::CheckpointError;

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

#[test]
fn a_name_says_its_step_and_score() {
    let scores =
        [0.25, -3.0, 1e300, -5e-324, f64::MIN_POSITIVE, f64::INFINITY, -0.0, 1e22, 0.1 + 0.2];
    for format in [Format::Safetensors, Format::Torch] {
        for step in [0, 7, 99_999_999, 100_000_000, u64::MAX] {
            assert_eq!(parse(&name_of(step, None, format)), Some((step, None)));
            for score in scores {
                let name = name_of(step, Some(score), format);
                assert!(name.len() < 80, "{name}");
                let (parsed, found) = parse(&name).unwrap_or_else(|| panic!("{name}"));
                assert_eq!((parsed, found.map(f64::to_bits)), (step, Some(score.to_bits())));
            }
        }
    }
    let nan = parse(&name_of(3, Some(f64::NAN), Format::Torch));
    assert!(nan.is_some_and(|(step, score)| step == 3 && score.is_some_and(f64::is_nan)));
    assert_eq!(
        name_of(100, Some(0.25), Format::Safetensors),
        "step-00000100-score-0.25.safetensors"
    );
}

#[test]
fn other_names_are_not_ours() {
    for name in [
        "step-100.safetensors",
        "step-+0000100.pt",
        "step-00000100.ckpt",
        "step-00000100",
        "step-.pt",
        "step-00000100-score-.pt",
        "step-00000100-score-0.250.pt",
        "step-00000100-score-1-score-2.pt",
        "step-00000100.pt.bak",
        "my-step-00000100.pt",
        "step-99999999999999999999.pt",
        "",
    ] {
        assert_eq!(parse(name), None, "{name}");
    }
}
