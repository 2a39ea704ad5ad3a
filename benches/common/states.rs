//! Times AdamW's step with low-bit moments, beside f32 moments and PyTorch's fused step.
#![allow(dead_code, reason = "each benchmark uses its own part")]

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::optim::{AdamW, MasterWeights, Optimizer, States};

use super::common::{
    Python, Rounds, Row, median, nanoseconds, print_ratio, print_table, rounds, values,
};

const PARAMETERS: i64 = 160;
const NUMBERS: i64 = 65536;
const STEPS: usize = 5;

struct Training {
    grads: Vec<Tensor>,
    fresh: Tensor,
    optimizer: Optimizer,
}

impl Training {
    fn new(kind: Kind, masters: MasterWeights, states: States) -> Self {
        let mut vs = VarStore::new(Device::Cpu);
        let params: Vec<_> =
            (0..PARAMETERS).map(|i| vs.root().add("w", values(i, NUMBERS, 3), true)).collect();
        vs.set_kind(kind);
        let builder = AdamW::default().states(states).master_weights(masters);
        let optimizer = builder.build(&vs, 1e-3).unwrap();
        let fresh = values(1, NUMBERS, 5).to_kind(kind);
        params.iter().for_each(|param| (param * &fresh).sum(kind).backward());
        let grads = params.iter().map(Tensor::grad).collect();
        Self { grads, fresh, optimizer }
    }

    /// The median time of [`STEPS`] steps. Before each, new gradients are written from the last parameter to the first,
    /// the order of a backward pass.
    fn round(&mut self) -> f64 {
        let times = (0..STEPS).map(|_| {
            no_grad(|| self.grads.iter_mut().rev().for_each(|grad| grad.copy_(&self.fresh)));
            nanoseconds(|| self.optimizer.step().unwrap())
        });
        median(times.collect())
    }
}

/// Checks that the f32 step has the bits of PyTorch's fused one.
fn check(python: &mut Python) {
    let mut training = Training::new(Kind::Float, MasterWeights::None, States::F32);
    for _ in 0..3 {
        let _time = training.round();
    }
    let first = &training.optimizer.trainable_variables()[0];
    let bits = first.detach().view_dtype(Kind::Int).to_kind(Kind::Int64).sum(Kind::Int64);
    let theirs = python.ask(&format!("fused_sum {PARAMETERS} {NUMBERS} {}", 3 * STEPS));
    assert_eq!(
        bits.int64_value(&[]).to_string(),
        theirs,
        "the two sides compute different results"
    );
}

/// Prints the times and the ratios, with `suffix` in their names.
pub fn compare(python: &mut Python, threads: i32, suffix: &str) {
    tch::set_num_threads(threads);
    python.ask(&format!("threads {threads}"));
    check(python);
    let plain = |states| Training::new(Kind::Float, MasterWeights::None, states);
    let halves = |states| Training::new(Kind::BFloat16, MasterWeights::Remainder, states);
    let mut trainings = [
        plain(States::F32),
        plain(States::BFloat16),
        plain(States::EightBit),
        halves(States::F32),
        halves(States::BFloat16),
        halves(States::EightBit),
    ];
    let names = [
        "f32, f32 moments",
        "f32, bf16 moments",
        "f32, 8-bit moments",
        "bf16 with remainders, f32 moments",
        "bf16 with remainders, bf16 moments",
        "bf16 with remainders, 8-bit moments",
    ];
    let times = Rounds::run(
        rounds(40),
        || trainings.iter_mut().map(Training::round).collect(),
        || vec![python.time(&format!("fused {PARAMETERS} {NUMBERS} {STEPS}"))[0]; 6],
    );
    let rows: Vec<_> = names.iter().enumerate().map(|(i, name)| times.row(name, i)).collect();
    let title = format!("{PARAMETERS} x {NUMBERS} numbers, AdamW's step, {threads} threads");
    print_table(&title, &rows);
    let over = |name: &'static str, reference: usize, measured: usize| {
        let of = |index: usize| times.ours.iter().map(|times| times[index]).collect();
        Row::new(name, of(measured), of(reference))
    };
    print_ratio(&format!("states_8bit{suffix}"), rows[2]);
    print_ratio(&format!("states_bf16{suffix}"), rows[1]);
    print_ratio(&format!("states_8bit_of_f32{suffix}"), over("", 0, 2));
    print_ratio(&format!("states_bf16_of_f32{suffix}"), over("", 0, 1));
    print_ratio(&format!("states_8bit_remainders{suffix}"), over("", 3, 5));
    print_ratio(&format!("states_bf16_remainders{suffix}"), over("", 3, 4));
    println!();
}
