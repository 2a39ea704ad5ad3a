//! Tests of loading from a folder while another process saves to it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::cell::Cell;
use std::collections::BTreeSet;
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

/// The only checkpoint is a folder that another process has begun to remove, after it had saved a newer one.
#[test]
fn a_folder_that_has_lost_its_index_is_gone_and_not_damaged() {
    let (path, folder) = folder("index");
    let folder = folder.format(Format::Dcp);
    folder.save(1, &Checkpoint::new()).unwrap();
    let loads = Cell::new(0);
    let load = |path: &Path| {
        loads.set(loads.get() + 1);
        if loads.get() == 1 {
            fs::remove_file(path.join(".metadata")).unwrap();
            folder.save(2, &Checkpoint::new()).unwrap();
        }
        Checkpoint::load(path)
    };
    let found = folder.first_valid(|files| files.reverse(), load).unwrap().unwrap();
    assert_eq!((found.file.step, found.damaged.len(), loads.get()), (2, 0, 2));
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
    for ending in ENDINGS {
        for step in [0, 7, 99_999_999, 100_000_000, u64::MAX] {
            assert_eq!(parse(&name_of(step, None, ending)), Some((step, None)));
            for score in scores {
                let name = name_of(step, Some(score), ending);
                assert!(name.len() < 80, "{name}");
                let (parsed, found) = parse(&name).unwrap_or_else(|| panic!("{name}"));
                assert_eq!((parsed, found.map(f64::to_bits)), (step, Some(score.to_bits())));
            }
        }
    }
    let nan = parse(&name_of(3, Some(f64::NAN), TORCH));
    assert!(nan.is_some_and(|(step, score)| step == 3 && score.is_some_and(f64::is_nan)));
    assert_eq!(name_of(100, Some(0.25), FILE), "step-00000100-score-0.25.safetensors");
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

fn numbers(step: f32) -> Checkpoint {
    let mut checkpoint = Checkpoint::new();
    for (name, len) in [("a", 3), ("b", 70_000)] {
        let tensor = tch::Tensor::from_slice(&vec![step; len]);
        checkpoint.add_tensor(name, &tensor).unwrap();
    }
    checkpoint
}

/// Where the memory of the last copy is.
fn places(folder: &CheckpointFolder) -> BTreeSet<usize> {
    let memory = folder.background.memory();
    let places = memory.places();
    folder.background.keep(memory);
    places
}

#[test]
fn the_memory_of_a_copy_serves_the_next_one() {
    let (path, mut folder) = folder("memory");
    folder.save_async(1, &numbers(1.0)).unwrap().wait().unwrap();
    let before = places(&folder);
    assert_eq!(before.len(), 2);
    for step in 2..5 {
        folder.save_async(step, &numbers(step as f32)).unwrap().wait().unwrap();
        assert_eq!(places(&folder), before);
        let found = folder.latest().unwrap().unwrap().checkpoint.tensor("b").unwrap();
        assert_eq!(found, tch::Tensor::from_slice(&vec![step as f32; 70_000]));
    }
    // A tensor of another shape or dtype gets memory of its own.
    let mut other = numbers(5.0);
    other.add_tensor("aa", &tch::Tensor::from(7i64)).unwrap();
    folder.save_async(5, &other).unwrap().wait().unwrap();
    let after = places(&folder);
    assert!(after.len() == 3 && after.is_superset(&before), "{after:?} {before:?}");
    let found = folder.latest().unwrap().unwrap().checkpoint;
    assert_eq!(found.tensor("aa").unwrap().int64_value(&[]), 7);
    assert_eq!(found.tensor("b").unwrap().double_value(&[69_999]), 5.0);
    fs::remove_dir_all(path).unwrap();
}

#[test]
fn a_panic_of_the_writer_is_an_error_and_the_folder_goes_on() {
    let (path, mut folder) = folder("panic");
    folder.save(1, &numbers(1.0)).unwrap();
    let copied = folder.prepare(&numbers(2.0)).unwrap();
    let pending = folder.begin(copied, |_, _| panic!("out of luck"));
    match pending.wait() {
        Err(Error::Checkpoint(CheckpointError::WriterPanicked { message })) => {
            assert_eq!(message, "out of luck");
        }
        other => panic!("{other:?}"),
    }
    folder.finish().unwrap();
    folder.save_async(3, &numbers(3.0)).unwrap().wait().unwrap();
    let copied = folder.prepare(&numbers(4.0)).unwrap();
    drop(folder.begin(copied, |_, _| panic!("again")));
    let kept = folder.save_async(5, &numbers(5.0)).unwrap_err();
    assert!(kept.to_string().contains("again"), "{kept}");
    folder.save_async(5, &numbers(5.0)).unwrap().wait().unwrap();
    let steps: Vec<_> = folder.files().unwrap().iter().map(|file| file.step).collect();
    assert_eq!(steps, [1, 3, 5]);
    fs::remove_dir_all(path).unwrap();
}
