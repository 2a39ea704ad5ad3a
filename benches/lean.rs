//! A linear layer and its cross entropy, forward and backward, beside `torch.amp` and beside torch's own
//! `linear_cross_entropy`, which Python alone has. Both sides have the same operands. The memory is this side's, with
//! autocast and with `lean`: what tensors take at their peak above the operands.
//!
//! bf16 is tried where products in it are faster than in f32; f32 everywhere.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

mod common;

use common::{Python, Rounds, nanoseconds, print_ratio, print_table, rounds};
use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::lean::{LinearCrossEntropyConfig, linear_cross_entropy};
use tch_amp::memory::peak_during;
use tch_amp::{Amp, Autocast};

/// Tokens, width and words.
const SIZES: [(&str, [i64; 3]); 2] = [("8k", [512, 384, 8192]), ("50k", [128, 384, 50304])];

fn main() {
    tch::set_num_threads(1);
    let advice = Amp::advice(Device::Cpu).unwrap();
    println!("{advice}");
    let is_fast = advice.speedups.iter().any(|(_, [_, median, _])| *median > 1.0);
    let dtypes = if is_fast { vec![Kind::Float, Kind::BFloat16] } else { vec![Kind::Float] };
    let mut python = Python::start("lean.py");
    for (name, size) in SIZES {
        let operands = Operands::new(size);
        for &kind in &dtypes {
            operands.print_memory(&format!("{name}_{}", label(kind)), kind);
            if let Some(python) = &mut python {
                operands.measure(python, &format!("{name}_{}", label(kind)), kind);
            }
        }
    }
}

fn label(kind: Kind) -> &'static str {
    if kind == Kind::Float { "f32" } else { "bf16" }
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

    fn print_memory(&self, name: &str, kind: Kind) {
        let peak = |loss: &dyn Fn() -> Tensor| peak_during(|| self.iterate(kind, loss)).unwrap().1;
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        // The first one allocates the gradients, which stay.
        let _loss = self.iterate(kind, || self.usual());
        let usual = peak(&|| self.usual());
        let kept = peak(&|| self.lean(None));
        let blocks = peak(&|| self.lean(Some(32 << 20)));
        println!(
            "{name}: {:.0} MiB above the operands with autocast, {:.0} kept, {:.0} in blocks of 32 MiB",
            mib(usual),
            mib(kept),
            mib(blocks)
        );
        println!("ratio lean_memory_{name} {:.3}", kept as f64 / usual as f64);
        println!("ratio lean_memory_blocks_{name} {:.3}", blocks as f64 / usual as f64);
    }

    fn measure(&self, python: &mut Python, name: &str, kind: Kind) {
        let [tokens, width, words] = self.size;
        let request = format!("{tokens} {width} {words} {}", label(kind));
        let theirs: f64 = python.ask(&format!("loss {request}")).parse().unwrap();
        let most = if kind == Kind::Float { 1e-5 } else { 1e-3 };
        for max_bytes in [None, Some(32 << 20)] {
            let ours = self.iterate(kind, || self.lean(max_bytes)).double_value(&[]);
            assert!((ours - theirs).abs() <= most * theirs, "{ours} here, {theirs} in Python");
        }
        let times = Rounds::run(
            rounds(40),
            || {
                [None, Some(32 << 20)]
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
