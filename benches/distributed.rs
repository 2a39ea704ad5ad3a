//! Data-parallel iterations on two ranks, compared with Python's `DistributedDataParallel` with the same libtorch.
//!
//! The ranks are processes with one thread each, on both sides. `small` has 400 parameters of 16 numbers, and `large` 6
//! of 1024 x 1024; `half` is `large` whose gradients are communicated in bf16, and `views` is `large` whose gradients
//! are views of the buckets. Both sides train from the same weights on the same data, and the bits of their weights are
//! compared first.
//!
//! The share of the communication that is hidden behind the backward pass is that of its time by which an iteration is
//! shorter than one without communication and the communication of the same gradients together.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use common::{Python, Row, is_quick, median, nanoseconds, print_ratio};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::distributed::{DdpConfig, DistributedDataParallel, ProcessGroup, ReduceOp, Store};
use tch_amp::optim::AdamW;

const RANKS: usize = 2;

/// Set for a rank: the port of the store that the first one serves.
const PORT: &str = "TCH_AMP_BENCH_PORT";

fn values(index: i64, shape: &[i64]) -> Tensor {
    let count: i64 = shape.iter().product();
    let values: Vec<f32> =
        (0..count).map(|i| ((i * 11 + index * 3).rem_euclid(64) - 32) as f32 / 1024.0).collect();
    Tensor::from_slice(&values).view(shape)
}

/// Trains a model, and returns the median of the times of an iteration, and the sum of the bits of all weights. `alone`
/// trains without communication, and `exchange` communicates with hardly any computation.
fn train(request: &str, group: &ProcessGroup, iterations: usize) -> (f64, i64) {
    let (name, mode) = request.split_once('/').unwrap_or((request, ""));
    let is_small = name == "small";
    let vs = VarStore::new(Device::Cpu);
    let (count, shape): (i64, &[i64]) = if is_small { (400, &[16]) } else { (6, &[1024, 1024]) };
    let weights: Vec<_> =
        (0..count).map(|i| vs.root().var_copy(&format!("w{i}"), &values(i, shape))).collect();
    let compression = (name == "half").then_some(Kind::BFloat16);
    let options = DdpConfig { gradient_as_bucket_view: name == "views", ..Default::default() };
    let mut ddp = DdpConfig { compression, ..options }.build(group, &vs).unwrap();
    let mut optimizer = AdamW::default().build(&vs, 1e-4).unwrap();
    let xs = values(7 + group.rank() as i64, if is_small { &[16] } else { &[8, 1024] });
    let forward = || {
        if mode == "exchange" {
            return weights.iter().map(|weight| weight.sum(Kind::Float)).sum();
        }
        let layer = |xs: Tensor, weight: &Tensor| {
            if is_small { xs * (weight + 1.0) } else { xs.linear(weight, None::<&Tensor>).tanh() }
        };
        weights.iter().fold(xs.shallow_clone(), layer).square().mean(Kind::Float)
    };
    let times = (0..iterations).map(|_| {
        nanoseconds(|| {
            optimizer.zero_grad().unwrap();
            let backward = |ddp: &mut DistributedDataParallel| {
                let loss = ddp.forward(forward).unwrap();
                ddp.backward(&loss).unwrap();
            };
            if mode == "alone" {
                ddp.no_sync(backward)
            } else {
                backward(&mut ddp)
            }
            if mode != "exchange" {
                optimizer.step().unwrap();
            }
        })
    });
    let time = median(times.collect());
    let bits = |w: &Tensor| w.detach().view_dtype(Kind::Int).sum(Kind::Int64).int64_value(&[]);
    let sums = weights.iter().map(bits);
    (time, sums.sum())
}

/// A rank answers each line with the time and the sum.
fn rank(port: &str) {
    tch::set_num_threads(1);
    let (store, rank) = match port {
        "" => (Store::serve_locally().unwrap(), 0),
        port => (Store::connect("127.0.0.1", port.parse().unwrap()).unwrap(), 1),
    };
    println!("port {}", store.port().unwrap());
    let group = ProcessGroup::new(&store, rank, RANKS).unwrap();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (name, iterations) = line.split_once(' ').unwrap();
        let (time, sum) = train(name, &group, iterations.parse().unwrap());
        println!("answer {time} {sum}");
        // The other one is still training, or waiting.
        group.all_reduce(&mut Tensor::from(1i64), ReduceOp::Sum).unwrap();
    }
}

struct Rank {
    child: Child,
    answers: BufReader<ChildStdout>,
}

impl Rank {
    fn start(port: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(PORT, port)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self { child, answers }
    }

    fn send(&mut self, request: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{request}").unwrap();
    }

    /// The next line that begins with this word, without it.
    fn receive(&mut self, word: &str) -> String {
        let mut line = String::new();
        while !line.starts_with(word) {
            line.clear();
            assert!(self.answers.read_line(&mut line).unwrap() > 0, "a rank has ended");
        }
        line[word.len()..].trim().to_owned()
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn numbers(answer: &str) -> (f64, i64) {
    let (time, sum) = answer.split_once(' ').unwrap();
    (time.parse().unwrap(), sum.parse().unwrap())
}

/// The bytes that this machine has received from itself.
fn loopback_bytes() -> Option<u64> {
    let table = std::fs::read_to_string("/proc/net/dev").ok()?;
    let line = table.lines().find_map(|line| line.trim().strip_prefix("lo:"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn main() {
    if let Ok(port) = std::env::var(PORT) {
        return rank(&port);
    }
    let Some(mut python) = Python::start("distributed.py") else { return };
    let mut first = Rank::start("");
    let port = first.receive("port");
    let mut second = Rank::start(&port);
    let mut ours = |name: &str, iterations: usize| {
        let request = format!("{name} {iterations}");
        first.send(&request);
        second.send(&request);
        let answer = numbers(&first.receive("answer"));
        drop(second.receive("answer"));
        answer
    };
    println!(
        "{:<12} {:>12} {:>12} {:>8} {:>26} {:>8}",
        "ms/iteration", "tch-amp", "Python", "ratio", "bytes for each parameter", "hidden"
    );
    let large = 6.0 * 1048576.0;
    for (name, iterations, parameters) in
        [("small", 40, 6400.0), ("large", 8, large), ("half", 8, large), ("views", 8, large)]
    {
        let (here, there) = (ours(name, 3), numbers(&python.ask(&format!("{name} 3"))));
        assert_eq!(here.1, there.1, "{name}: the two sides compute different weights");
        let (rounds, iterations) = if is_quick() { (1, 2) } else { (21, iterations) };
        let (mut mine, mut theirs) = (Vec::new(), Vec::new());
        let mut hidden = Vec::new();
        for _ in 0..rounds {
            mine.push(ours(name, iterations).0);
            theirs.push(numbers(&python.ask(&format!("{name} {iterations}"))).0);
            let [alone, exchange] =
                ["alone", "exchange"].map(|mode| ours(&format!("{name}/{mode}"), iterations).0);
            hidden.push((alone + exchange - mine[mine.len() - 1]) / exchange);
        }
        // The difference of two runs leaves out what the start of a training communicates.
        let mut bytes = |iterations| {
            let before = loopback_bytes()?;
            let _trained = ours(name, iterations);
            Some(loopback_bytes()? - before)
        };
        let bytes =
            bytes(2).zip(bytes(12)).map(|(few, many)| (many - few) as f64 / 10.0 / parameters);
        let row = Row::new(name, mine, theirs);
        let bytes = bytes.map_or_else(|| "unknown".to_owned(), |bytes| format!("{bytes:.2}"));
        println!(
            "{name:<12} {:>12.3} {:>12.3} {:>8.2} {bytes:>26} {:>6.0} %",
            row.ours / 1e6,
            row.python / 1e6,
            row.ratio(),
            100.0 * median(hidden)
        );
        print_ratio(&format!("ddp_{name}"), row);
    }
}
