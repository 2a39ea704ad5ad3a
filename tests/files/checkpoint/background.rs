//! Saves that a thread finishes while the training goes on.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::{Checkpoint, CheckpointError, CheckpointFolder, Format, MetricGoal, Rng};
use tch_amp::optim::{Adagrad, AdamW, MasterWeights};
use tch_amp::{Error, Result};

use crate::checkpoint::{Run, checkpoint_error, steps, unsaveable};
use testkit::files::{Folder, age, names_in};
use testkit::programs::this_test;

/// A checkpoint of so many numbers.
fn numbers(number: f32, count: i64) -> Checkpoint {
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_tensor("x", &Tensor::full([count], f64::from(number), KIND)).unwrap();
    checkpoint
}

const KIND: (Kind, Device) = (Kind::Float, Device::Cpu);

/// A MiB, which takes 16 seconds at the rate of `slow` unless somebody waits for it.
const MANY: i64 = 1 << 18;

fn slow(path: &Path) -> CheckpointFolder {
    CheckpointFolder::new(path).unwrap().max_write_rate(1 << 16)
}

#[test]
fn a_save_in_the_background_writes_the_bytes_of_a_save() -> Result<()> {
    let temporary = Folder::new();
    for format in [Format::Safetensors, Format::Torch, Format::TorchByName, Format::Dcp] {
        let mut run = Run::new(Device::Cpu);
        for round in 0..3 {
            match round {
                1 => run.opt = Adagrad::default().build(&run.vs, 0.1)?,
                2 => {
                    run.vs.bfloat16();
                    let adamw = AdamW::default().master_weights(MasterWeights::Float);
                    run.opt = adamw.build(&run.vs, 0.1)?;
                }
                _ => drop(run.train(3)),
            }
            let mut checkpoint = run.checkpoint();
            checkpoint.add("rng", Rng(Device::Cpu))?;
            let transposed = Tensor::randn([300, 70], KIND).tr();
            checkpoint.add_tensor("transposed", &transposed)?;
            checkpoint.add_tensor(
                "conj",
                &Tensor::randn([3], (Kind::ComplexFloat, Device::Cpu)).conj(),
            )?;
            let (one, other) = (temporary.file("one"), temporary.file("other"));
            let expected = CheckpointFolder::new(&one)?.format(format).save(9, &checkpoint)?;
            let mut folder = CheckpointFolder::new(&other)?.format(format);
            let found = folder.save_async(9, &checkpoint)?.wait()?;
            assert_eq!(found.file_name(), expected.file_name());
            for name in names(&expected) {
                let bytes = |path: &Path| fs::read(path.join(&name)).or_else(|_| fs::read(path));
                assert_eq!(bytes(&found).unwrap(), bytes(&expected).unwrap(), "{format:?} {name}");
            }
            // A file that was loaded can be saved in the background as well.
            let loaded = Checkpoint::load(&found)?;
            let again = folder.save_async(10, &loaded)?.wait()?;
            let tensor = Checkpoint::load(&again)?.tensor("transposed")?;
            assert_eq!(tensor, transposed);
            fs::remove_dir_all(one).unwrap();
            fs::remove_dir_all(other).unwrap();
        }
    }
    Ok(())
}

/// The names in a folder, or one for a file.
fn names(path: &Path) -> Vec<String> {
    if path.is_dir() { names_in(path) } else { vec!["itself".to_owned()] }
}

#[test]
fn what_changes_after_the_call_is_not_saved() -> Result<()> {
    let temporary = Folder::new();
    let mut folder = slow(&temporary.0);
    let mut tensor = Tensor::full([MANY], 1.0, KIND);
    for step in 1..4u8 {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_tensor("x", &tensor)?;
        let pending = folder.save_async(step.into(), &checkpoint)?;
        pending.wait_copied()?;
        drop(checkpoint);
        drop(tensor.fill_(f64::from(step) + 1.0));
        assert!(!pending.is_finished(), "the thread writes slowly");
        drop(pending);
        let found = folder.latest()?.unwrap();
        assert_eq!(found.file.step, u64::from(step));
        let expected = Tensor::full([MANY], f64::from(step), KIND);
        assert_eq!(found.checkpoint.tensor("x")?, expected);
    }
    Ok(())
}

#[test]
fn one_save_runs_at_a_time_and_a_second_waits_or_is_refused() -> Result<()> {
    let temporary = Folder::new();
    let mut folder = slow(&temporary.0).keep_last(1);
    let first = folder.save_async(1, &numbers(1.0, MANY))?;
    let mut impatient = folder.clone().refuse_while_saving();
    let refused = impatient.save_async(2, &numbers(2.0, MANY));
    assert!(matches!(checkpoint_error(refused), CheckpointError::Busy));
    assert!(!first.is_finished());
    let second = folder.save_async(3, &numbers(3.0, MANY))?;
    assert!(first.is_finished());
    // The older one is there until the new one is.
    assert_eq!(steps(&folder), [1]);
    assert!(!second.is_finished());
    assert!(first.wait()?.ends_with("step-00000001.safetensors"));
    second.wait()?;
    assert_eq!(steps(&folder), [3]);
    // One that does not run in the background waits as well.
    let third = folder.save_scored_async(4, 0.5, &numbers(4.0, MANY))?;
    folder.save(5, &numbers(5.0, 1))?;
    assert!(third.is_finished());
    assert!(third.wait()?.ends_with("step-00000004-score-0.5.safetensors"));
    assert_eq!(steps(&folder), [5]);
    impatient.save_async(6, &numbers(6.0, 1))?.wait()?;
    Ok(())
}

#[test]
fn a_save_says_how_far_it_is_and_keeps_to_its_rate() -> Result<()> {
    let temporary = Folder::new();
    let mut folder = slow(&temporary.0).max_write_rate(4 << 20);
    for format in [Format::Safetensors, Format::Torch, Format::Dcp] {
        folder = folder.format(format);
        let since = Instant::now();
        let pending = folder.save_async(1, &numbers(1.0, 2 * MANY))?;
        let mut last = 0.0;
        while !pending.is_finished() {
            let progress = pending.progress();
            assert!((last..=1.0).contains(&progress), "{last} {progress}");
            last = progress;
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(pending.progress(), 1.0);
        pending.wait()?;
        assert!(since.elapsed() >= Duration::from_millis(500), "{:?}", since.elapsed());
        assert!(last > 0.2, "{last}");
    }
    Ok(())
}

#[test]
fn an_error_is_of_whoever_waits_or_of_the_next_save() -> Result<()> {
    let temporary = Folder::new();
    let mut folder = CheckpointFolder::new(temporary.file("run"))?;
    let broken = |folder: &mut CheckpointFolder| {
        fs::remove_dir_all(temporary.file("run")).unwrap();
        let pending = folder.save_async(1, &numbers(1.0, 1)).unwrap();
        while !pending.is_finished() {
            std::thread::yield_now();
        }
        fs::create_dir(temporary.file("run")).unwrap();
        pending
    };
    let is_of_disk = |error: &Error| matches!(error, Error::Checkpoint(CheckpointError::Save(_)));
    let is_of_earlier =
        |error: &Error| matches!(error, Error::Checkpoint(CheckpointError::EarlierSave { .. }));
    assert!(is_of_disk(&broken(&mut folder).wait().unwrap_err()));
    folder.finish()?;
    drop(broken(&mut folder));
    assert!(is_of_disk(&folder.finish().unwrap_err()));
    folder.finish()?;
    drop(broken(&mut folder));
    assert!(is_of_earlier(&folder.save(2, &numbers(2.0, 1)).unwrap_err()));
    assert!(steps(&folder).is_empty());
    folder.save(2, &numbers(2.0, 1))?;
    drop(broken(&mut folder));
    assert!(is_of_earlier(&folder.save_async(3, &numbers(3.0, 1)).unwrap_err()));
    // Of two errors the first is kept, and one that somebody has is not.
    let one = broken(&mut folder);
    let other = broken(&mut folder);
    drop(other);
    assert!(is_of_disk(&one.wait().unwrap_err()));
    assert!(is_of_disk(&folder.finish().unwrap_err()));
    folder.save_async(4, &numbers(4.0, 1))?.wait()?;
    assert_eq!(steps(&folder), [4]);
    // What cannot be saved is an error of the thread, and what cannot be copied one of the call.
    let mut folder = folder.format(Format::Safetensors);
    let mut odd = Checkpoint::new();
    odd.add_tensor("x", &Tensor::zeros([1], (Kind::ComplexDouble, Device::Cpu)))?;
    unsaveable(folder.save_async(5, &odd)?.wait());
    Ok(())
}

#[test]
fn a_pending_save_can_be_waited_for_elsewhere() -> Result<()> {
    let temporary = Folder::new();
    let mut folder = slow(&temporary.0).keep_best(1, MetricGoal::Min);
    let pending = folder.save_scored_async(1, 0.5, &numbers(1.0, MANY))?;
    let path = std::thread::spawn(move || pending.wait()).join().unwrap()?;
    assert_eq!(folder.best(MetricGoal::Min)?.unwrap().file.path, path);
    Ok(())
}

/// Names the folder of a program that a test starts, and the format of its checkpoints.
const FOLDER: &str = "TCH_AMP_TEST_TASK";
const FORMAT: &str = "TCH_AMP_TEST_FORMAT";

const FORMATS: [Format; 2] = [Format::Safetensors, Format::Dcp];

/// The folder of a program that a test has started.
fn given() -> Option<CheckpointFolder> {
    let path = std::env::var_os(FOLDER)?;
    let format = std::env::var_os(FORMAT).map_or(Format::Safetensors, |_| Format::Dcp);
    Some(slow(Path::new(&path)).keep_last(1).format(format))
}

/// This program, with another test of this file.
fn program(test: &str, folder: &Folder, format: Format) -> Command {
    let mut command = this_test(&format!("checkpoint::background::{test}"));
    command.env(FOLDER, &folder.0);
    if format == Format::Dcp {
        command.env(FORMAT, "dcp");
    }
    command
}

#[test]
#[ignore = "a program that the next test starts"]
fn exits_without_waiting() {
    let Some(folder) = given() else { return };
    // It takes seconds to save what follows.
    let mut folder = folder.max_write_rate(1 << 18);
    folder.save(1, &numbers(1.0, MANY)).unwrap();
    let pending = folder.save_async(2, &numbers(2.0, MANY)).unwrap();
    while pending.progress() < 0.3 {
        std::thread::yield_now();
    }
    std::process::exit(7);
}

#[test]
fn a_process_that_exits_leaves_the_last_complete_checkpoint() {
    for format in FORMATS {
        let temporary = Folder::new();
        let output = program("exits_without_waiting", &temporary, format).output().unwrap();
        assert_eq!(output.status.code(), Some(7));
        let folder = CheckpointFolder::new(&temporary.0).unwrap().keep_last(1).format(format);
        let found = folder.latest().unwrap().unwrap();
        assert_eq!((found.file.step, found.damaged.len()), (1, 0));
        assert_eq!(found.checkpoint.tensor("x").unwrap().double_value(&[0]), 1.0);
        // The same step can be saved.
        folder.save(2, &numbers(2.0, 1)).unwrap();
        assert_eq!(steps(&folder), [2]);
    }
}

#[test]
#[ignore = "a program that the next test starts"]
fn saves_again_and_again() {
    let Some(folder) = given() else { return };
    let mut folder = folder.max_write_rate(0);
    let start = folder.latest().unwrap().map_or(0, |found| found.file.step);
    for step in start + 1.. {
        let checkpoint = numbers(step as f32, MANY);
        folder.save_async(step, &checkpoint).unwrap().wait().unwrap();
        let mut out = std::io::stdout();
        writeln!(out, "\nsaved {step}").and_then(|()| out.flush()).unwrap();
    }
}

#[test]
fn a_process_that_is_killed_at_any_time_leaves_the_last_complete_checkpoint() {
    let kills: u32 = std::env::var("TCH_AMP_KILLS").map_or(10, |kills| kills.parse().unwrap());
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let mut random = since.as_nanos() as u64;
    for format in FORMATS {
        let temporary = Folder::new();
        let (mut before, mut half) = (0, 0);
        for _ in 0..kills {
            let mut command = program("saves_again_and_again", &temporary, format);
            let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let mut saved = lines.filter_map(|line| {
                line.unwrap().strip_prefix("saved ").map(|step| step.parse::<u64>().unwrap())
            });
            let first = saved.next().unwrap();
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            std::thread::sleep(Duration::from_micros((random >> 33) % 30_000));
            child.kill().unwrap();
            let last = saved.last().unwrap_or(first);
            child.wait().unwrap();
            assert!(first > before, "a program goes on from the last checkpoint");
            let found = CheckpointFolder::new(&temporary.0).unwrap().latest().unwrap().unwrap();
            assert!(found.file.step >= last, "{last} was saved, {} is there", found.file.step);
            assert!(found.damaged.is_empty(), "{:?}", found.damaged);
            let number = found.checkpoint.tensor("x").unwrap();
            let expected = Tensor::full([MANY], found.file.step as f64, KIND);
            assert_eq!(number, expected);
            before = found.file.step;
            half += names_in(&temporary.0).len() - 1;
        }
        println!("{format:?}: {kills} kills, {before} saves, {half} leftovers counted after each");
        // What the kills have left goes once it is old, and nothing without an owner stays.
        age(&temporary.0);
        let folder = CheckpointFolder::new(&temporary.0).unwrap().keep_last(1).format(format);
        let path = folder.save(before + 1, &numbers(0.0, 1)).unwrap();
        let names = names_in(&temporary.0);
        assert_eq!(names, [path.file_name().unwrap().to_str().unwrap()]);
    }
}
