//! The files of a run: none is lost, and what cannot be written is noticed before the first step.

use std::fs;
use std::path::PathBuf;

use tch_amp::checkpoint::CheckpointFolder;

use crate::recipe::competing::GAN;
use crate::recipe::pictures::IMAGES;
use crate::recipe::program::{Recipe, assert_equal};
use crate::recipe::resumed::GPT;
use testkit::files::{Folder, names_in};

/// The checkpoints of a run, the newest last.
fn checkpoints(folder: &Folder) -> Vec<PathBuf> {
    let files = CheckpointFolder::new(folder.file("checkpoints")).unwrap().files().unwrap();
    files.into_iter().map(|file| file.path).collect()
}

/// Starts a recipe, which must fail before it has logged anything. Returns what it said.
fn refused(recipe: &Recipe, folder: &Folder, arguments: &str) -> String {
    let output = recipe.start(folder, arguments).output();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{arguments}: {said}");
    said
}

#[test]
fn no_run_removes_the_weights_of_a_finished_one() {
    for (recipe, other) in
        [(GPT, "--lr 0.002"), (GAN, "--seed 1"), (IMAGES, "--steps 2 --blocks 2")]
    {
        let folder = Folder::new();
        recipe.start(&folder, "").finish();
        let contents = || checkpoints(&folder).iter().map(|path| fs::read(path).unwrap()).collect();
        let before: Vec<Vec<u8>> = contents();
        let report = fs::read_to_string(folder.file("out")).unwrap();
        for arguments in ["", other, &format!("{other} --resume")] {
            let said = refused(&recipe, &folder, arguments);
            assert!(said.contains("--checkpoints"), "{arguments}: {said}");
            let after: Vec<Vec<u8>> = contents();
            assert!(before == after, "{arguments} changed the checkpoints");
        }
        assert_eq!(fs::read_to_string(folder.file("out")).unwrap(), report);
        // Its results are shown again.
        recipe.start(&folder, "--resume").finish();
    }
}

#[test]
fn a_damaged_checkpoint_is_named_before_an_older_one_takes_its_place() {
    for recipe in [GPT, GAN, IMAGES] {
        let (calm, damaged) = (Folder::new(), Folder::new());
        recipe.start(&calm, "").finish();
        let output = recipe.start_and_signal(&damaged, "--save-every 3", 8, "TERM");
        assert_eq!(output.status.code(), Some(130), "{output:?}");
        let [older, newest] = checkpoints(&damaged).try_into().unwrap();
        let mut bytes = fs::read(&newest).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&newest, bytes).unwrap();
        let output = recipe.start(&damaged, "--resume").output();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        for path in [newest, older] {
            assert!(said.contains(&path.display().to_string()), "{} in {said}", path.display());
        }
        assert_equal(&damaged, &calm, recipe.test);
    }
}

#[test]
fn a_report_or_checkpoints_that_cannot_be_written_are_refused_before_the_first_step() {
    for recipe in [GPT, GAN, IMAGES] {
        let (folder, file) = Folder::with("file");
        fs::write(&file, "a file").unwrap();
        let folder_name = folder.0.display().to_string();
        let below = file.join("below").display().to_string();
        for (option, path) in [
            ("--out", folder_name.as_str()),
            ("--out", &below),
            ("--out", "/proc/report.html"),
            ("--checkpoints", &below),
            ("--checkpoints", "/proc"),
        ] {
            let said = refused(&recipe, &folder, &format!("{option} {path}"));
            assert!(said.contains(option) && said.contains(path), "{option} {path}: {said}");
            assert!(!folder.file("logs").exists(), "{option} {path} was noticed too late");
        }
        // What is there stays until the run has a report of its own.
        fs::write(folder.file("out"), "the report of another run").unwrap();
        let output = recipe.start_and_signal(&folder, "--steps 100000", 3, "TERM");
        assert_eq!(output.status.code(), Some(130), "{output:?}");
        let kept = fs::read_to_string(folder.file("out")).unwrap();
        assert_eq!(kept, "the report of another run");
        assert!(names_in(&folder.file("checkpoints")).iter().all(|name| name.starts_with("step-")));
    }
}
