//! A linear layer and its cross entropy, forward and backward, beside `torch.amp` and beside torch's own
//! `linear_cross_entropy`, which Python alone has. Both sides have the same operands. Then a GPT with 8,192 words,
//! whose linear layers behind norms and GELUs keep less as well, with these functions and with the operators.
//!
//! First the memory: what a forward and a backward pass take at their peak above operands, weights and gradients, each
//! in a process of its own. Resident memory is the system's count; for this side the allocator's is printed as well.
//! With `TCH_AMP_BENCH_LARGE=1` a GPT of 124 million parameters is measured, too, which takes 11 GB and some minutes.
//!
//! Then the time, in bf16 where products in it are faster than in f32, and in f32 everywhere.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

mod common;
#[path = "common/memory.rs"]
mod memory;
#[path = "training/models.rs"]
mod models;

use common::{Python, Rounds, is_quick, nanoseconds, print_ratio, print_table, rounds};
use memory::{GIVES_BACK, Peaks, in_new_process, mib, peaks};
use models::Batch;
use tch::nn::VarStore;
use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::lean::{LinearCrossEntropyConfig, linear_cross_entropy};
use tch_amp::{Amp, Autocast};

/// Tokens, width and words, and how often they are timed.
const SIZES: [(&str, [i64; 3], usize); 2] =
    [("8k", [512, 384, 8192], 40), ("50k", [1024, 384, 50304], 10)];

/// The most bytes of a block of logits.
const BLOCK: usize = 32 << 20;

fn main() {
    tch::set_num_threads(1);
    if let Some(request) = memory::request() {
        return measured(&request).print();
    }
    for (name, size, _) in SIZES {
        for kind in [Kind::Float, Kind::BFloat16] {
            print_memory(name, size, kind);
        }
    }
    let is_large = std::env::var("TCH_AMP_BENCH_LARGE").is_ok_and(|value| value == "1");
    for name in ["gpt_8k", "gpt_124m"].into_iter().filter(|name| is_large || *name == "gpt_8k") {
        print_memory_of_model(name, Kind::BFloat16);
    }
    let advice = Amp::advice(Device::Cpu).unwrap();
    println!("{advice}");
    let is_fast = advice.speedups.iter().any(|(_, [_, median, _])| *median > 1.0);
    let dtypes = if is_fast { vec![Kind::Float, Kind::BFloat16] } else { vec![Kind::Float] };
    if let Some(mut python) = Python::start("lean.py") {
        for (name, size, count) in SIZES {
            let operands = Operands::new(shortened(size));
            for &kind in &dtypes {
                let name = format!("{name}_{}", label(kind));
                operands.measure(&mut python, &name, kind, rounds(count));
            }
        }
    }
    for kind in dtypes {
        time_model(kind);
    }
}

/// The size, or a small one in a smoke run.
fn shortened([tokens, width, words]: [i64; 3]) -> [i64; 3] {
    if is_quick() { [tokens / 16, width / 16, words / 16] } else { [tokens, width, words] }
}

/// Measures in this process what a pass takes above what is there.
fn measured(request: &str) -> Peaks {
    let words: Vec<&str> = request.split(' ').collect();
    match words[..] {
        ["loss", kind, way, tokens, width, classes] => {
            let size = [tokens, width, classes].map(|number| number.parse().unwrap());
            // A small one first makes what the process keeps.
            let [small, operands] = [[8, 16, 16], size].map(Operands::new);
            let pass = |of: &Operands| drop(of.iterate(kind_of(kind), || of.loss(way)));
            pass(&small);
            let all = [&operands.hidden, &operands.weight];
            all.into_iter().for_each(|leaf| (leaf.sum(Kind::Float) * 0.0).backward());
            peaks(|| pass(&operands))
        }
        [model, kind] => {
            let [small, gpt] = ["gpt", model].map(|name| Gpt::new(name, kind_of(kind)));
            drop(small.iterate(&small.model.batch.batch(Device::Cpu)));
            drop(small);
            let variables = gpt.vs.trainable_variables();
            variables.iter().for_each(|w| (w.sum(Kind::Float) * 0.0).backward());
            let batch = gpt.model.batch.batch(Device::Cpu);
            peaks(|| drop(gpt.iterate(&batch)))
        }
        _ => panic!("{request}"),
    }
}

fn print_memory(name: &str, size: [i64; 3], kind: Kind) {
    let size = shortened(size).map(|number| number.to_string()).join(" ");
    let (dtype, name) = (label(kind), format!("{name}_{}", label(kind)));
    let ways = ["usual", "kept", "blocks"];
    let ours = ways.map(|way| in_new_process(&format!("loss {dtype} {way} {size}")));
    for (way, peaks) in ways.into_iter().zip(ours) {
        println!("{name} {way:6}: {peaks}");
    }
    let [usual, kept, blocks] = ours.map(|peaks| peaks.resident);
    println!("ratio lean_memory_{name} {:.3}", kept / usual);
    println!("ratio lean_memory_blocks_{name} {:.3}", blocks / usual);
    for (way, suffix) in [("usual", "amp"), ("own", "own")] {
        let Some(mut python) = Python::start_with("lean.py", &[GIVES_BACK]) else { continue };
        let theirs = python.time(&format!("memory_{way} {size} {dtype}"))[0];
        println!("{name} {way:6}: {:7.1} MiB resident in Python", mib(theirs));
        println!("ratio lean_memory_{suffix}_{name} {:.3}", kept / theirs);
    }
}

fn print_memory_of_model(model: &str, kind: Kind) {
    let dtype = label(kind);
    let names = [model.to_owned(), format!("{model}_lean")];
    let both = names.map(|name| in_new_process(&format!("{name} {dtype}")));
    for (way, peaks) in ["usual", "lean"].into_iter().zip(both) {
        println!("{model}_{dtype} {way:6}: {peaks}");
    }
    let [usual, lean] = both.map(|peaks| peaks.resident);
    println!("ratio lean_memory_{model}_{dtype} {:.3}", lean / usual);
}

/// A model with its variables.
struct Gpt {
    vs: VarStore,
    model: models::Model,
    region: Autocast,
}

impl Gpt {
    fn new(name: &str, kind: Kind) -> Self {
        tch::manual_seed(1);
        let vs = VarStore::new(Device::Cpu);
        let model = models::model(name, &vs.root());
        let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16).enabled(kind != Kind::Float);
        Self { vs, model, region }
    }

    fn iterate(&self, batch: &Batch) -> Tensor {
        let loss = self.region.run(|| (self.model.loss)(batch)).unwrap();
        loss.backward();
        loss.detach()
    }
}

fn time_model(kind: Kind) {
    let [lean, operators] = ["gpt_8k_lean", "gpt_8k"].map(|name| Gpt::new(name, kind));
    let batch = lean.model.batch.batch(Device::Cpu);
    // The first iteration makes the gradients, which stay.
    let [ours, theirs] = [&lean, &operators].map(|gpt| gpt.iterate(&batch).double_value(&[]));
    assert!((ours - theirs).abs() <= 1e-5 * theirs, "{ours} with lean, {theirs} with operators");
    let time = |gpt: &Gpt| vec![nanoseconds(|| drop(gpt.iterate(&batch)))];
    let times = Rounds::run(rounds(10), || time(&lean), || time(&operators));
    let row = times.row("lean, beside operators", 0);
    print_table(&format!("GPT of 8,192 words, {}", label(kind)), &[row]);
    print_ratio(&format!("lean_time_gpt_8k_{}", label(kind)), row);
}

fn label(kind: Kind) -> &'static str {
    if kind == Kind::Float { "f32" } else { "bf16" }
}

fn kind_of(label: &str) -> Kind {
    if label == "f32" { Kind::Float } else { Kind::BFloat16 }
}

struct Operands {
    size: [i64; 3],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
}

/// Numbers from -4 to 4 that both sides can compute, in an order without a pattern.
fn values(size: [i64; 2], factor: i64) -> Tensor {
    let places = Tensor::arange(size[0] * size[1], (Kind::Int64, Device::Cpu));
    let spread = (places * factor + 7).remainder(8191).to_kind(Kind::Float);
    ((spread - 4095.0) / 1024.0).view(size)
}

impl Operands {
    fn new(size: [i64; 3]) -> Self {
        let [tokens, width, words] = size;
        Self {
            size,
            hidden: values([tokens, width], 4099).set_requires_grad(true),
            weight: (values([words, width], 5167) / 64.0).set_requires_grad(true),
            targets: (Tensor::arange(tokens, (Kind::Int64, Device::Cpu)) * 7919).remainder(words),
        }
    }

    fn usual(&self) -> Tensor {
        let logits = self.hidden.linear(&self.weight, None::<&Tensor>).to_kind(Kind::Float);
        logits.cross_entropy_loss(&self.targets, None::<&Tensor>, Reduction::Mean, -100, 0.0)
    }

    fn lean(&self, max_bytes: Option<usize>) -> Tensor {
        let config = LinearCrossEntropyConfig { max_bytes, ..Default::default() };
        linear_cross_entropy(&self.hidden, &self.weight, None, &self.targets, &config).unwrap()
    }

    fn loss(&self, way: &str) -> Tensor {
        match way {
            "kept" => self.lean(None),
            "blocks" => self.lean(Some(BLOCK)),
            _ => self.usual(),
        }
    }

    /// The loss of an iteration that begins without gradients.
    fn iterate(&self, kind: Kind, loss: impl Fn() -> Tensor) -> Tensor {
        for leaf in [&self.hidden, &self.weight] {
            leaf.shallow_clone().zero_grad();
        }
        let region = Autocast::new(Device::Cpu).enabled(kind != Kind::Float);
        let loss = region.run(loss).unwrap();
        loss.backward();
        loss.detach()
    }

    fn measure(&self, python: &mut Python, name: &str, kind: Kind, count: usize) {
        let [tokens, width, words] = self.size;
        let request = format!("{tokens} {width} {words} {}", label(kind));
        let theirs: f64 = python.ask(&format!("loss {request}")).parse().unwrap();
        let most = if kind == Kind::Float { 1e-5 } else { 1e-3 };
        for max_bytes in [None, Some(BLOCK)] {
            let ours = self.iterate(kind, || self.lean(max_bytes)).double_value(&[]);
            assert!((ours - theirs).abs() <= most * theirs, "{ours} here, {theirs} in Python");
        }
        let times = Rounds::run(
            count,
            || {
                [None, Some(BLOCK)]
                    .map(|bytes| nanoseconds(|| drop(self.iterate(kind, || self.lean(bytes)))))
                    .into_iter()
                    .flat_map(|time| [time, time])
                    .collect()
            },
            || {
                let both = python.time(&format!("time {request}"));
                vec![both[0], both[1], both[0], both[1]]
            },
        );
        let rows = vec![
            times.row("kept, beside torch.amp", 0),
            times.row("kept, beside torch's linear_cross_entropy", 1),
            times.row("blocks, beside torch.amp", 2),
            times.row("blocks, beside torch's linear_cross_entropy", 3),
        ];
        print_table(&format!("{tokens} x {width} x {words}, {}", label(kind)), &rows);
        for (suffix, row) in ["", "_own", "_blocks", "_blocks_own"].into_iter().zip(rows) {
            print_ratio(&format!("lean_time{suffix}_{name}"), row);
        }
        println!();
    }
}
