//! A folder of checkpoints: which are kept, and from which one a run resumes.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

use tch::{Device, Kind, Tensor};
use tch_amp::Error;
use tch_amp::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, Format, MetricGoal, PendingSave,
};

use crate::checkpoint::{checkpoint_error, steps};
use testkit::files::{Folder, names_in, run_on_small_disk, small_disk};
use testkit::handmade::{metadata, safetensors, signed};

fn checkpoint(step: u64) -> Checkpoint {
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_value("at", &step).unwrap();
    checkpoint
}

fn save_all(folder: &CheckpointFolder, steps: &[u64]) {
    for &step in steps {
        folder.save(step, &checkpoint(step)).unwrap();
    }
}

fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

fn resume(folder: &CheckpointFolder) -> tch_amp::Result<(u64, usize)> {
    let mut at = None;
    let start = folder.resume_or_start(|checkpoint| {
        at = Some(checkpoint.value::<u64>("at")?);
        Ok(())
    })?;
    assert_eq!(at.unwrap_or(0), start.step);
    assert_eq!(at.is_some(), start.from.is_some());
    Ok((start.step, start.damaged.len()))
}

#[test]
fn the_last_checkpoints_are_kept() {
    let temporary = Folder::new();
    let folder = CheckpointFolder::new(&temporary.0).unwrap().keep_last(2);
    save_all(&folder, &[1, 9, 10, 100]);
    assert_eq!(steps(&folder), [10, 100]);
    let all = CheckpointFolder::new(temporary.file("all/of/them")).unwrap();
    save_all(&all, &[1, 2, 3]);
    assert_eq!(steps(&all), [1, 2, 3]);
    save_all(&all.keep_last(0), &[4]);
    assert_eq!(names_in(&temporary.file("all/of/them")), ["step-00000004.safetensors"]);
}

#[test]
fn the_best_checkpoints_are_kept_regardless_of_age() {
    for (goal, sign) in [(MetricGoal::Min, 1.0), (MetricGoal::Max, -1.0)] {
        let temporary = Folder::new();
        let folder = CheckpointFolder::new(&temporary.0).unwrap().keep_last(1).keep_best(2, goal);
        let scores = [f64::NAN, 0.5, 0.25, 1e-7, 0.25, 3.0, f64::INFINITY];
        for (step, score) in (1..).zip(scores) {
            folder.save_scored(step, sign * score, &checkpoint(step)).unwrap();
        }
        // Of the two with a score of 0.25, the later one.
        assert_eq!(steps(&folder), [4, 5, 7]);
        let best = folder.best(goal).unwrap().unwrap();
        assert_eq!((best.file.step, best.file.score), (4, Some(sign * 1e-7)));
        assert_eq!(best.checkpoint.value::<u64>("at").unwrap(), 4);
        damage(&best.file.path);
        let best = folder.best(goal).unwrap().unwrap();
        assert_eq!((best.file.step, best.damaged.len()), (5, 1));
    }
}

#[test]
fn a_score_of_nan_is_the_worst() {
    let temporary = Folder::new();
    let folder = CheckpointFolder::new(&temporary.0).unwrap();
    for (step, score) in [(1, f64::NAN), (2, f64::INFINITY), (3, f64::NAN)] {
        folder.save_scored(step, score, &checkpoint(step)).unwrap();
    }
    assert_eq!(folder.best(MetricGoal::Min).unwrap().unwrap().file.step, 2);
    assert_eq!(folder.best(MetricGoal::Max).unwrap().unwrap().file.step, 2);
    fs::remove_file(folder.files().unwrap()[1].path.as_path()).unwrap();
    assert_eq!(folder.best(MetricGoal::Min).unwrap().unwrap().file.step, 3);
}

#[test]
fn training_resumes_from_the_newest_intact_checkpoint() {
    let temporary = Folder::new();
    let folder = CheckpointFolder::new(&temporary.0).unwrap();
    assert_eq!(resume(&folder).unwrap(), (0, 0));
    save_all(&folder, &[1, 2, 3]);
    assert_eq!(resume(&folder).unwrap(), (3, 0));
    let files = folder.files().unwrap();
    damage(&files[2].path);
    File::create(&files[1].path).unwrap();
    assert_eq!(resume(&folder).unwrap(), (1, 2));
    damage(&files[0].path);
    // The run must not start anew: the damaged files may contain days of training.
    match checkpoint_error(resume(&folder)) {
        CheckpointError::AllDamaged { folder, damaged } => {
            assert_eq!((folder.as_path(), damaged.len()), (temporary.0.as_path(), 3));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_checkpoint_of_a_newer_format_is_not_skipped() {
    let temporary = Folder::new();
    let folder = CheckpointFolder::new(&temporary.0).unwrap();
    save_all(&folder, &[1, 2]);
    let newest = &folder.files().unwrap()[1].path;
    let header = format!("{{{}}}", metadata(r#"{"format":9}"#));
    fs::write(newest, safetensors(&header, 0)).unwrap();
    let newer = checkpoint_error(folder.latest());
    assert!(matches!(newer, CheckpointError::Newer { found: 9, .. }), "{newer:?}");
}

/// A single damaged bit must not make a file of a later version, which would not be skipped.
#[test]
fn a_flipped_bit_makes_no_newer_format() {
    let temporary = Folder::new();
    let folder = CheckpointFolder::new(&temporary.0).unwrap();
    save_all(&folder, &[1, 2]);
    let newest = folder.files().unwrap().pop().unwrap().path;
    let bytes = fs::read(&newest).unwrap();
    for bit in 0..8 * bytes.len() {
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        fs::write(&newest, changed).unwrap();
        let found = folder.latest().unwrap_or_else(|error| panic!("bit {bit}: {error}")).unwrap();
        assert_eq!((found.file.step, found.damaged.len()), (1, 1), "bit {bit}");
    }
}

/// A later version keeps the checksum of the header where it is.
#[test]
fn an_intact_file_of_a_newer_format_is_recognized() {
    let temporary = Folder::new();
    let folder = CheckpointFolder::new(&temporary.0).unwrap();
    save_all(&folder, &[1, 2]);
    let newest = folder.files().unwrap().pop().unwrap().path;
    let bytes = fs::read(&newest).unwrap();
    let header = String::from_utf8(bytes[8..].to_vec()).unwrap();
    let header = header.replace(r#"\"format\":1"#, r#"\"format\":3"#);
    let field = r#"\"checksum\":\""#;
    let place = header.find(field).unwrap() + field.len();
    let blank = [&header[..place], &"0".repeat(16), &header[place + 16..]].concat();
    fs::write(&newest, safetensors(&signed(&blank), 0)).unwrap();
    let newer = checkpoint_error(folder.latest());
    assert!(matches!(newer, CheckpointError::Newer { found: 3, .. }), "{newer:?}");
}

#[test]
fn a_run_that_resumed_from_an_older_checkpoint_keeps_its_new_ones() {
    let temporary = Folder::new();
    let folder = CheckpointFolder::new(&temporary.0).unwrap().keep_last(1);
    save_all(&folder, &[100]);
    damage(&folder.files().unwrap()[0].path);
    // The run repeats the steps up to 100.
    save_all(&folder, &[60, 80]);
    assert_eq!(steps(&folder), [80, 100]);
    assert_eq!(resume(&folder).unwrap(), (80, 1));
    save_all(&folder, &[100]);
    assert_eq!(steps(&folder), [100]);
    assert_eq!(resume(&folder).unwrap(), (100, 0));
}

#[test]
fn a_step_has_one_file() {
    let temporary = Folder::new();
    let folder = CheckpointFolder::new(&temporary.0).unwrap();
    folder.save(5, &checkpoint(5)).unwrap();
    folder.save_scored(5, 0.5, &checkpoint(5)).unwrap();
    let path = folder.clone().format(Format::Torch).save_scored(5, 0.25, &checkpoint(5)).unwrap();
    assert_eq!(names_in(&temporary.0), ["step-00000005-score-0.25.pt"]);
    assert_eq!(path, temporary.file("step-00000005-score-0.25.pt"));
    assert_eq!(resume(&folder).unwrap(), (5, 0));
}

#[test]
fn foreign_files_are_not_removed() {
    let temporary = Folder::new();
    let old = SystemTime::now() - Duration::from_secs(7200);
    let foreign = [
        "model.safetensors",
        "step-1.safetensors",
        "step-00000001.safetensors.bak",
        "step-00000002 (copy).safetensors",
        ".model.safetensors.12-3.tmp",
    ];
    for name in foreign {
        File::create(temporary.file(name)).unwrap().set_modified(old).unwrap();
    }
    let leftover = temporary.file(".step-00000001.safetensors.12-3.tmp");
    File::create(&leftover).unwrap().set_modified(old).unwrap();
    let folder = CheckpointFolder::new(&temporary.0).unwrap().keep_last(1);
    save_all(&folder, &[1, 2, 3]);
    let mut left = [&foreign[..], &["step-00000003.safetensors"]].concat();
    left.sort();
    assert_eq!(names_in(&temporary.0), left);
}

#[test]
#[ignore = "a program that the next test starts"]
fn saves_on_a_small_disk() {
    let Some(path) = small_disk() else { return };
    let path = path.as_path();
    // What a save has left that was killed a moment ago, and what is not this crate's to remove.
    let leftover = path.join(".step-00000007.safetensors.12-3.tmp");
    let foreign = path.join(".model.safetensors.12-3.tmp");
    fs::write(&foreign, [1_u8; 1 << 12]).unwrap();
    fs::write(&leftover, vec![1_u8; 1 << 18]).unwrap_err();
    let large = |step| {
        let mut checkpoint = checkpoint(step);
        let numbers = Tensor::zeros([1 << 13], (Kind::Float, Device::Cpu));
        checkpoint.add_tensor("numbers", &numbers).unwrap();
        checkpoint
    };
    let mut folder = CheckpointFolder::new(path).unwrap().keep_last(2);
    folder.save(8, &large(8)).unwrap();
    assert!(!leftover.exists() && foreign.exists());
    assert_eq!(resume(&folder).unwrap(), (8, 0));
    // Now the disk is full of what is needed.
    let mut last = 8;
    for format in [Format::Safetensors, Format::Dcp] {
        folder = folder.format(format);
        for in_the_background in [false, true] {
            for step in last + 1.. {
                let saved = match in_the_background {
                    false => folder.save(step, &large(step)),
                    true => folder.save_async(step, &large(step)).and_then(PendingSave::wait),
                };
                let Err(error) = saved else {
                    assert!(step < last + 20, "the disk should be full");
                    drop(fs::write(path.join(format!("other-{step}")), vec![1_u8; 1 << 15]));
                    continue;
                };
                assert!(matches!(error, Error::Checkpoint(CheckpointError::Save(_))), "{error}");
                assert_eq!(resume(&folder).unwrap(), (step - 1, 0));
                // Nothing of the save is left.
                assert!(!path.join(format!("step-{step:08}.dcp")).exists());
                let left = names_in(path).iter().filter(|name| name.ends_with(".tmp")).count();
                assert_eq!(left, 1, "{:?}", names_in(path));
                last = step - 1;
                break;
            }
            for name in names_in(path).iter().filter(|name| name.starts_with("other-")) {
                fs::remove_file(path.join(name)).unwrap();
            }
        }
    }
}

#[test]
#[cfg(target_os = "linux")]
fn what_a_killed_save_has_left_does_not_keep_a_full_disk_full() {
    let temporary = Folder::new();
    run_on_small_disk(&temporary.0, 256, "checkpoint::folder::saves_on_a_small_disk");
}

#[test]
fn a_save_that_fails_removes_nothing() {
    let temporary = Folder::new();
    let folder = CheckpointFolder::new(&temporary.0).unwrap().keep_last(1);
    save_all(&folder, &[1]);
    // A folder at a checkpoint's path is neither replaced nor taken for a checkpoint.
    fs::create_dir(temporary.file("step-00000002.safetensors")).unwrap();
    let refused = checkpoint_error(folder.save(2, &checkpoint(2)));
    assert!(matches!(refused, CheckpointError::Save(_)), "{refused:?}");
    assert_eq!(steps(&folder), [1]);
    assert_eq!(resume(&folder).unwrap(), (1, 0));
}

#[test]
fn a_reader_beside_a_writer_finds_a_checkpoint() {
    let temporary = Folder::new();
    let folder = CheckpointFolder::new(&temporary.0).unwrap().keep_last(1);
    save_all(&folder, &[0]);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| (1..200).for_each(|step| save_all(&folder, &[step])));
        let mut newest = 0;
        while !writer.is_finished() {
            let step = folder.latest().unwrap().expect("there is always a checkpoint").file.step;
            assert!(step >= newest);
            newest = step;
        }
    });
}
