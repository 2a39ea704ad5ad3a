//! Saving and loading a model, the state of AdamW and a scaler, compared with Python's `torch.save` and `torch.load`.
//!
//! Both sides write to one folder, sync the file and the folder, and replace the file of the previous round. Files are
//! loaded from the page cache, into an existing model and an optimizer that has not stepped yet; on both sides, reading
//! the whole file before each load makes sure that it is cached. Loads are timed twice: in processes that repeat them,
//! and as programs resume, in a new process for each. The range of the rounds is printed beside the medians.
//!
//! Then the same is saved in the background: for how long that stops a training, beside a save, a copy of the tensors
//! into memory that is there, and Python's `dcp.async_save`; and how much slower iterations of one thread are
//! meanwhile.
//!
//! `TCH_AMP_BENCH_PARAMETERS` is the number of parameters (100 000 000). Each takes 12 bytes in each of up to four
//! files, and 44 bytes of memory. `TCH_AMP_BENCH_FOLDER` is an existing folder for the files.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

mod common;
#[path = "common/folder.rs"]
mod folder;
#[path = "common/memory.rs"]
mod memory;

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::Command;

use common::{Python, Rounds, is_quick, median, nanoseconds, print_ratio, rounds};
use folder::Folder;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::checkpoint::{Checkpoint, CheckpointFolder, Format};
use tch_amp::optim::{AdamW, Optimizer};

const TENSORS: i64 = 40;

const OURS: &str = "ours.safetensors";
const OURS_PT: &str = "ours.pt";
const PYTHON: &str = "python.pt";

/// The number of rounds unless this is a smoke run.
const ROUNDS: usize = 7;

/// The file that a new process loads.
const LOADED: &str = "TCH_AMP_BENCH_LOADED";

fn main() {
    tch::set_num_threads(1);
    tch::manual_seed(1);
    let numbers = parameters() / TENSORS;
    if let Some(path) = std::env::var_os(LOADED) {
        let [time, peak] = Training::new(numbers).load(Path::new(&path));
        println!("{time} {peak}");
        return;
    }
    let Some(mut python) = Python::start("checkpoint.py") else {
        return;
    };
    assert_eq!(python.ask(&format!("{TENSORS} {numbers}")), "ready");
    let folder = Folder::new();
    let mut training = Training::new(numbers);
    training.step();
    check(&mut training, &mut python, &folder);

    let bytes = training.bytes();
    let count = rounds(ROUNDS).max(3);
    println!("{:.2} GB of tensors in {}, {count} rounds", bytes / 1e9, folder.0.display());
    let saves = measure(count, &mut python, &folder, "save", |path| training.save(path));
    report("save", ["checkpoint_save", "checkpoint_save_pt"], &saves, bytes, 0.0);
    background(&mut training, &mut python, &folder, count, bytes);
    println!("loading with a warm page cache, into an optimizer without state:");
    let state = 2.0 * bytes / 3.0;
    let loads = measure(count, &mut python, &folder, "load", |path| training.load(path));
    report("load", ["checkpoint_load", "checkpoint_load_pt"], &loads, bytes, state);
    drop((training, python));
    println!("loading likewise, each time in a new process:");
    let resumes = measure_resumes(count, numbers, &folder);
    report("resume", ["checkpoint_resume", "checkpoint_resume_pt"], &resumes, bytes, state);
}

/// Measures saves in the background: the first, which takes the memory for the copy, and `count` later ones.
fn background(
    training: &mut Training,
    python: &mut Python,
    folder: &Folder,
    count: usize,
    bytes: f64,
) {
    let _first = training.copy();
    let mut kept = Vec::new();
    for format in [Format::Safetensors, Format::Dcp] {
        let path = folder.file("background");
        let mut saves = CheckpointFolder::new(&path).unwrap().keep_last(1).format(format);
        let mut first = 0.0;
        let extra = memory::peak(|| first = in_background(training, &mut saves, 0)[0]);
        let later = (1..=count).map(|step| in_background(training, &mut saves, step as u64));
        let later: Vec<_> = later.collect();
        let [stop, all, slower, copy] =
            [0, 1, 2, 3].map(|index| median(later.iter().map(|times| times[index]).collect()));
        println!(
            "background, tch-amp, {format:?}: {:.3} s of stop (the first {:.3} s; a copy into memory that is there takes \
             {:.3} s), saved after {:.3} s, iterations take {slower:.2} times as long beside it, extra memory {:5.1} %",
            stop / 1e9,
            first / 1e9,
            copy / 1e9,
            all / 1e9,
            100.0 * extra / bytes,
        );
        kept.push(stop);
        std::fs::remove_dir_all(path).unwrap();
    }
    let path = folder.text("python.dcp");
    let theirs: Vec<_> = (0..=count).map(|_| python.time(&format!("background {path}"))).collect();
    let stop = median(theirs[1..].iter().map(|times| times[0]).collect());
    let all = median(theirs[1..].iter().map(|times| times[1]).collect());
    println!(
        "background, Python's dcp.async_save: {:.3} s of stop (the first {:.3} s), saved after {:.3} s; {:.1} times that \
         of tch-amp as Dcp",
        stop / 1e9,
        theirs[0][0] / 1e9,
        all / 1e9,
        stop / kept[1],
    );
    println!();
}

/// Saves in the background: for how long that has stopped the program, when it was saved, how much slower iterations
/// were meanwhile, and how long a copy alone took before.
fn in_background(training: &mut Training, saves: &mut CheckpointFolder, step: u64) -> [f64; 4] {
    let copy = training.copy();
    let alone = (0..ITERATIONS).map(|_| iteration()).collect();
    let mut pending = None;
    let stop =
        nanoseconds(|| pending = Some(saves.save_async(step, &training.checkpoint()).unwrap()));
    let pending = pending.unwrap();
    let mut beside = Vec::new();
    let rest = nanoseconds(|| {
        while !pending.is_finished() {
            beside.push(iteration());
        }
    });
    drop(pending.wait().unwrap());
    [stop, stop + rest, median(beside) / median(alone), copy]
}

/// How many iterations are measured without a save beside them.
const ITERATIONS: usize = 20;

/// Some milliseconds of one thread's work, as an iteration has them: products and a pass over memory.
fn iteration() -> f64 {
    thread_local! {
        static INPUTS: [Tensor; 2] = {
            let options = (Kind::Float, Device::Cpu);
            [Tensor::randn([512, 512], options), Tensor::randn([2_000_000], options)]
        };
    }
    INPUTS.with(|[square, long]| nanoseconds(|| drop((square.matmul(square), long * 2.0))))
}

/// Rounds of loads, each in a process of its own.
fn measure_resumes(count: usize, numbers: i64, folder: &Folder) -> Rounds {
    let own = |file: &str| {
        let mut program = Command::new(std::env::current_exe().unwrap());
        let output = program.env(LOADED, folder.file(file)).output().unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        printed.split_whitespace().map(|number| number.parse().unwrap()).collect::<Vec<f64>>()
    };
    Rounds::run(
        count,
        || [OURS, OURS_PT].into_iter().flat_map(own).collect(),
        || {
            let mut python = Python::start("checkpoint.py").unwrap();
            assert_eq!(python.ask(&format!("{TENSORS} {numbers}")), "ready");
            python.time(&format!("load {}", folder.text(PYTHON))).repeat(2)
        },
    )
}

fn parameters() -> i64 {
    let usual = if is_quick() { 1_000_000 } else { 100_000_000 };
    let given = std::env::var("TCH_AMP_BENCH_PARAMETERS");
    given.map_or(usual, |given| given.parse().expect("TCH_AMP_BENCH_PARAMETERS must be a number"))
}

/// Checks that both sides end with the same numbers after exchanging files in both directions.
fn check(training: &mut Training, python: &mut Python, folder: &Folder) {
    let saved = training.sums();
    for file in [OURS, OURS_PT] {
        training.save(&folder.file(file));
        training.clear();
        assert_ne!(training.sums(), saved, "the numbers should have changed");
        training.load(&folder.file(file));
        assert_eq!(training.sums(), saved, "{file} differs from what was saved");
    }
    drop(python.ask(&format!("load {}", folder.text(OURS_PT))));
    assert_eq!(python.ask("sums"), saved, "Python has loaded other numbers");
    drop(python.ask(&format!("save {}", folder.text(PYTHON))));
    training.clear();
    training.load(&folder.file(PYTHON));
    assert_eq!(training.sums(), saved, "this crate has loaded other numbers than Python saved");
}

/// Rounds of one action: time and peak memory of this crate's safetensors, of its `.pt`, and of Python's file twice.
fn measure(
    count: usize,
    python: &mut Python,
    folder: &Folder,
    action: &str,
    mut work: impl FnMut(&Path) -> [f64; 2],
) -> Rounds {
    let request = format!("{action} {}", folder.text(PYTHON));
    Rounds::run(
        count,
        || [OURS, OURS_PT].iter().flat_map(|file| work(&folder.file(file))).collect(),
        || python.time(&request).repeat(2),
    )
}

fn report(action: &str, names: [&'static str; 2], rounds: &Rounds, bytes: f64, content: f64) {
    let [ours, ours_pt] = [rounds.row(names[0], 0), rounds.row(names[1], 2)];
    let [peak, peak_pt] = [rounds.row("peak", 1), rounds.row("peak", 3)];
    for (who, time, peak, times) in [
        ("tch-amp, safetensors", ours.ours, peak.ours, range(&rounds.ours, 0)),
        ("tch-amp, .pt", ours_pt.ours, peak_pt.ours, range(&rounds.ours, 2)),
        ("Python", ours.python, peak.python, range(&rounds.python, 0)),
    ] {
        let (seconds, speed) = (time / 1e9, bytes / time);
        let extra = 100.0 * (peak - content) / bytes;
        println!(
            "{action}, {who:<20} {seconds:6.3} s ({times}) {speed:6.2} GB/s, extra memory {extra:5.1} %"
        );
    }
    [ours, ours_pt].iter().for_each(|row| print_ratio(row.name, *row));
    println!();
}

/// The shortest and the longest time of the rounds at this index.
fn range(rounds: &[Vec<f64>], index: usize) -> String {
    let times = rounds.iter().map(|times| times[index] / 1e9);
    let (least, most) = times.fold((f64::MAX, 0f64), |(a, b), time| (a.min(time), b.max(time)));
    format!("{least:.3} to {most:.3}")
}

struct Training {
    vs: VarStore,
    optimizer: Optimizer,
    scaler: GradScaler,
    /// What copies are compared with.
    copies: Vec<Tensor>,
}

impl Training {
    fn new(numbers: i64) -> Self {
        let vs = VarStore::new(Device::Cpu);
        for parameter in 0..TENSORS {
            let values = Tensor::randn([numbers], (Kind::Float, Device::Cpu));
            drop(vs.root().add(&format!("w{parameter:03}"), values, true));
        }
        let (optimizer, scaler) = fresh(&vs);
        Self { vs, optimizer, scaler, copies: Vec::new() }
    }

    /// Takes a step, which creates the state.
    fn step(&mut self) {
        for parameter in self.optimizer.trainable_variables() {
            (&parameter * parameter.randn_like()).sum(Kind::Float).backward();
        }
        self.optimizer.step().unwrap();
        self.optimizer.zero_grad().unwrap();
        self.scaler.update_with(1024.0).unwrap();
    }

    fn clear(&mut self) {
        (self.optimizer, self.scaler) = fresh(&self.vs);
        tch::no_grad(|| {
            for mut parameter in self.optimizer.trainable_variables() {
                drop(parameter.zero_());
            }
        });
    }

    fn checkpoint(&mut self) -> Checkpoint {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add("model", &self.vs).unwrap();
        checkpoint.add("optimizer", &mut self.optimizer).unwrap();
        checkpoint.add("scaler", &mut self.scaler).unwrap();
        checkpoint
    }

    fn save(&mut self, path: &Path) -> [f64; 2] {
        timed(|| self.checkpoint().save(path).unwrap())
    }

    /// Copies as many bytes as a checkpoint has into memory that is there from the second call on.
    fn copy(&mut self) -> f64 {
        let variables = self.optimizer.trainable_variables();
        if self.copies.is_empty() {
            self.copies = (0..3).flat_map(|_| &variables).map(Tensor::zeros_like).collect();
        }
        let Self { copies, .. } = self;
        tch::no_grad(|| {
            nanoseconds(|| {
                for (copy, variable) in copies.iter_mut().zip((0..3).flat_map(|_| &variables)) {
                    copy.copy_(variable);
                }
            })
        })
    }

    fn load(&mut self, path: &Path) -> [f64; 2] {
        (self.optimizer, self.scaler) = fresh(&self.vs);
        warm(path);
        timed(|| {
            let checkpoint = Checkpoint::load(path).unwrap();
            let restore = checkpoint.restore().add("model", &self.vs);
            let restore = restore.add("optimizer", &mut self.optimizer);
            drop(restore.add("scaler", &mut self.scaler).apply().unwrap());
        })
    }

    fn bytes(&self) -> f64 {
        let numbers: usize = self.optimizer.trainable_variables().iter().map(Tensor::numel).sum();
        12.0 * numbers as f64
    }

    /// For each parameter, the sums of the bits of its values and of its state, and finally the scale, as Python prints
    /// them.
    fn sums(&mut self) -> String {
        let state = self.optimizer.state_dict().unwrap().state;
        let variables = self.vs.variables();
        let mut sums = Vec::new();
        for parameter in 0..TENSORS {
            let name = format!("w{parameter:03}");
            sums.push(bits(&variables[&name]));
            let kept = |key| state.get(&name).map_or(0, |kept| bits(&kept[key]));
            sums.extend(["exp_avg", "exp_avg_sq", "step"].map(kept));
        }
        let sums: Vec<_> = sums.iter().map(i64::to_string).collect();
        format!("{} {:?}", sums.join(" "), self.scaler.get_scale().unwrap())
    }
}

fn fresh(vs: &VarStore) -> (Optimizer, GradScaler) {
    (AdamW::default().build(vs, 1e-3).unwrap(), GradScaler::new(Device::Cpu).unwrap())
}

fn bits(tensor: &Tensor) -> i64 {
    tensor.detach().view_dtype(Kind::Int).sum(Kind::Int64).int64_value(&[])
}

/// Reads a file into the page cache, from which later writes may have evicted it.
fn warm(path: &Path) {
    let mut file = File::open(path).unwrap();
    let mut buffer = vec![0; 1 << 20];
    while file.read(&mut buffer).unwrap() > 0 {}
}

/// The time of `work` in nanoseconds, and the increase of memory at its peak in bytes.
fn timed(work: impl FnOnce()) -> [f64; 2] {
    let mut time = 0.0;
    let peak = memory::peak(|| time = nanoseconds(work));
    [time, peak]
}
