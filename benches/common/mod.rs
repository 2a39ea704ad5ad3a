//! What the benchmarks share: the Python process that runs the same rounds, medians, and the printed table.
//!
//! Rounds of this crate and of Python alternate, so that noise of the machine affects both. Timings never fail a
//! benchmark; it fails only if the two sides compute different results.
#![allow(dead_code, reason = "each benchmark uses its own part")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use tch::{Cuda, Device, Kind, Tensor};

/// A Python process that runs `benches/oracle/<name>` and answers one line for each request.
#[derive(Debug)]
pub struct Python {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Python {
    /// Starts the process. If that is impossible, prints the reason and returns `None`.
    pub fn start(name: &str) -> Option<Self> {
        Self::start_with(name, &[])
    }

    /// Starts the process with these environment variables. If that is impossible, prints the reason and returns
    /// `None`.
    pub fn start_with(name: &str, variables: &[(&str, &str)]) -> Option<Self> {
        let Some(python) = std::env::var_os("TCH_AMP_PYTHON") else {
            assert!(
                !is_set("TCH_AMP_REQUIRE_PYTHON"),
                "TCH_AMP_REQUIRE_PYTHON is set, but TCH_AMP_PYTHON is not"
            );
            eprintln!(
                "SKIPPED: set TCH_AMP_PYTHON to a Python with torch, or run `cargo xtask bench`"
            );
            return None;
        };
        let root = std::env::var_os("TCH_AMP_ROOT")
            .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
        let mut child = Command::new(python)
            .arg(root.join("benches/oracle").join(name))
            .env_remove("LD_LIBRARY_PATH")
            .env("PYTHONWARNINGS", "ignore")
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("TCH_AMP_PYTHON starts");
        let requests = child.stdin.take().expect("stdin is piped");
        let answers = BufReader::new(child.stdout.take().expect("stdout is piped"));
        Some(Self { child, requests, answers })
    }

    /// Sends a request and returns the answer.
    pub fn ask(&mut self, request: &str) -> String {
        writeln!(self.requests, "{request}").expect("Python reads");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("Python prints UTF-8");
        assert!(answer.ends_with('\n'), "Python ended at {request:?}");
        answer.truncate(answer.trim_end().len());
        answer
    }

    /// Sends a request and returns the answer's numbers, which are nanoseconds.
    pub fn time(&mut self, request: &str) -> Vec<f64> {
        let answer = self.ask(request);
        answer
            .split(' ')
            .map(|number| number.parse().expect("Python answers with numbers"))
            .collect()
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        // It would exit only at the end of its input, which has not been reached.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn is_set(name: &str) -> bool {
    std::env::var(name).is_ok_and(|value| value == "1")
}

/// Whether this is a smoke run of a few seconds: because it was requested, or because `cargo bench` has not started it.
pub fn is_quick() -> bool {
    let mut args = std::env::args();
    is_set("TCH_AMP_BENCH_QUICK")
        || args.any(|arg| arg == "--quick")
        || !std::env::args().any(|arg| arg == "--bench")
}

/// `usual`, or a fiftieth of it in a smoke run.
pub fn rounds(usual: usize) -> usize {
    if is_quick() { (usual / 50).max(3) } else { usual }
}

/// The time of `work` in nanoseconds.
pub fn nanoseconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    Duration::as_secs_f64(&start.elapsed()) * 1e9
}

/// The time of `work` in nanoseconds, until the device has done it.
pub fn nanoseconds_on(device: Device, work: impl FnOnce()) -> f64 {
    let synchronize = || {
        if let Device::Cuda(index) = device {
            Cuda::synchronize(index as i64);
        }
    };
    synchronize();
    nanoseconds(|| {
        work();
        synchronize();
    })
}

/// The bandwidth of copying this many f32 numbers, in GB/s read and written.
pub fn copy_bandwidth(device: Device, numbers: i64) -> f64 {
    let from = Tensor::ones([numbers], (Kind::Float, device));
    let mut to = from.zeros_like();
    let times = (0..15).map(|_| nanoseconds_on(device, || to.copy_(&from)));
    8.0 * numbers as f64 / median(times.collect())
}

/// The median of the numbers.
pub fn median(mut numbers: Vec<f64>) -> f64 {
    assert!(!numbers.is_empty(), "a median needs at least one number");
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// Rounds of this crate and of Python, each with a list of corresponding times.
#[derive(Debug, Default)]
pub struct Rounds {
    pub ours: Vec<Vec<f64>>,
    pub python: Vec<Vec<f64>>,
}

impl Rounds {
    /// Runs `count` rounds of both sides alternately, after one round of each that is not counted.
    pub fn run(
        count: usize,
        mut ours: impl FnMut() -> Vec<f64>,
        mut python: impl FnMut() -> Vec<f64>,
    ) -> Self {
        let mut out = Self::default();
        for round in 0..=count {
            let times = (ours(), python());
            if round > 0 {
                out.ours.push(times.0);
                out.python.push(times.1);
            }
        }
        out
    }

    /// The medians over all rounds of the times at this index.
    pub fn row(&self, name: &'static str, index: usize) -> Row {
        let of = |rounds: &[Vec<f64>]| rounds.iter().map(|times| times[index]).collect();
        Row::new(name, of(&self.ours), of(&self.python))
    }
}

/// One line of a table.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub name: &'static str,
    pub ours: f64,
    pub python: f64,
    /// The smallest and the largest ratio of the three thirds of the rounds.
    range: [f64; 2],
}

impl Row {
    /// The medians of times that both sides took in the same order.
    pub fn new(name: &'static str, ours: Vec<f64>, python: Vec<f64>) -> Self {
        let third = |i: usize, times: &[f64]| {
            let parts = times.len().min(3);
            let of = |i: usize| i * times.len() / parts;
            median(times[of(i)..of(i + 1)].to_vec())
        };
        let ratios = (0..ours.len().min(3)).map(|i| third(i, &python) / third(i, &ours));
        let range = ratios
            .fold([f64::INFINITY, 0.0], |[least, most], ratio| [least.min(ratio), most.max(ratio)]);
        Self { name, ours: median(ours), python: median(python), range }
    }

    /// The range of the ratio, if it varied more than 1.3-fold.
    fn varied(&self) -> Option<[f64; 2]> {
        (self.range[1] > 1.3 * self.range[0]).then_some(self.range)
    }

    pub fn ratio(&self) -> f64 {
        self.python / self.ours
    }
}

/// Prints the rows with both medians.
pub fn print_table(title: &str, rows: &[Row]) {
    println!("{title:<52} {:>12} {:>12} {:>8}", "tch-amp", "Python", "ratio");
    for row in rows {
        let times = format!("{:>12} {:>12}", microseconds(row.ours), microseconds(row.python));
        println!("{:<52} {times} {:>8.2}", row.name, row.ratio());
    }
    println!();
}

/// Prints the ratio in a line of its own, with its range if it varied much during the run.
pub fn print_ratio(name: &str, row: Row) {
    let range = row.varied().map(|[from, to]| format!(" (varied from {from:.2} to {to:.2})"));
    println!("ratio {name} {:.2}{}", row.ratio(), range.unwrap_or_default());
}

pub fn microseconds(nanoseconds: f64) -> String {
    format!("{:.3} us", nanoseconds / 1e3)
}

/// Nonzero multiples of 1/8, the same as in Python.
pub fn values(parameter: i64, numbers: i64, factor: i64) -> Tensor {
    let places = Tensor::arange(numbers, (Kind::Int64, Device::Cpu));
    let values = (places * 11 + parameter * factor).remainder(64) - 32;
    (values.to_kind(Kind::Float) + 0.5) / 8.0
}
