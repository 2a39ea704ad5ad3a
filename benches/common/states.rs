//! Times AdamW's step with low-bit moments, beside f32 moments and PyTorch's fused step, and says how near it comes to
//! the speed of a copy.
#![allow(dead_code, reason = "each benchmark uses its own part")]

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::optim::{AdamW, MasterWeights, MomentDtype, Optimizer};

use super::common::{
    Python, Rounds, Row, copy_bandwidth, is_quick, median, nanoseconds_on, print_ratio,
    print_table, rounds, values,
};

const PARAMETERS: i64 = 160;
const STEPS: usize = 5;

/// Where steps are timed.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    pub device: Device,
    pub threads: i32,
    /// What the names of the ratios end with.
    pub suffix: &'a str,
}

impl Place<'_> {
    /// The size of a parameter: on a GPU a step of small ones would be one of launches.
    fn numbers(self) -> i64 {
        match (self.device, is_quick()) {
            (Device::Cuda(_), true) => 1 << 10,
            (Device::Cuda(_), false) => 1 << 20,
            _ => 1 << 16,
        }
    }
}

struct Training {
    device: Device,
    grads: Vec<Tensor>,
    fresh: Tensor,
    optimizer: Optimizer,
}

impl Training {
    fn new(place: Place<'_>, kind: Kind, masters: MasterWeights, states: MomentDtype) -> Self {
        let (device, numbers) = (place.device, place.numbers());
        let mut vs = VarStore::new(device);
        let params: Vec<_> =
            (0..PARAMETERS).map(|i| vs.root().var_copy("w", &values(i, numbers, 3))).collect();
        vs.set_kind(kind);
        let builder = AdamW::default().moments(states).master_weights(masters);
        let optimizer = builder.build(&vs, 1e-3).unwrap();
        let fresh = values(1, numbers, 5).to_kind(kind).to_device(device);
        params.iter().for_each(|param| (param * &fresh).sum(kind).backward());
        let grads = params.iter().map(Tensor::grad).collect();
        Self { device, grads, fresh, optimizer }
    }

    /// The median time of [`STEPS`] steps. Before each, new gradients are written from the last parameter to the first,
    /// the order of a backward pass.
    fn round(&mut self) -> f64 {
        let times = (0..STEPS).map(|_| {
            no_grad(|| self.grads.iter_mut().rev().for_each(|grad| grad.copy_(&self.fresh)));
            nanoseconds_on(self.device, || self.optimizer.step().unwrap())
        });
        median(times.collect())
    }
}

/// Checks that the f32 step has the bits of PyTorch's fused one.
fn check(python: &mut Python, place: Place<'_>) {
    let mut training = Training::new(place, Kind::Float, MasterWeights::None, MomentDtype::F32);
    for _ in 0..3 {
        let _time = training.round();
    }
    let first = &training.optimizer.trainable_variables()[0];
    let bits = first.detach().view_dtype(Kind::Int).to_kind(Kind::Int64).sum(Kind::Int64);
    let theirs = python.ask(&format!("fused_sum {PARAMETERS} {} {}", place.numbers(), 3 * STEPS));
    assert_eq!(
        bits.int64_value(&[]).to_string(),
        theirs,
        "the two sides compute different results"
    );
}

/// Dtypes and moments, and the bytes that a step reads and writes for each number: parameter, gradient and moments.
const SETUPS: [(&str, f64); 6] = [
    ("f32, f32 moments", 28.0),
    ("f32, bf16 moments", 20.0),
    ("f32, 8-bit moments", 16.0),
    ("bf16 with remainders, f32 moments", 26.0),
    ("bf16 with remainders, bf16 moments", 18.0),
    ("bf16 with remainders, 8-bit moments", 14.0),
];

/// Prints the times, the ratios, and the shares of the speed of a copy.
pub fn compare(python: &mut Python, place: Place<'_>) {
    let Place { device, threads, suffix } = place;
    let numbers = place.numbers();
    tch::set_num_threads(threads);
    python.ask(&format!("threads {threads}"));
    if device.is_cuda() {
        python.ask("cuda");
    }
    check(python, place);
    let plain = |states| Training::new(place, Kind::Float, MasterWeights::None, states);
    let halves = |states| Training::new(place, Kind::BFloat16, MasterWeights::Remainder, states);
    let mut trainings = [
        plain(MomentDtype::F32),
        plain(MomentDtype::BFloat16),
        plain(MomentDtype::EightBit),
        halves(MomentDtype::F32),
        halves(MomentDtype::BFloat16),
        halves(MomentDtype::EightBit),
    ];
    let times = Rounds::run(
        rounds(40),
        || trainings.iter_mut().map(Training::round).collect(),
        || vec![python.time(&format!("fused {PARAMETERS} {numbers} {STEPS}"))[0]; 6],
    );
    let rows: Vec<_> = SETUPS.iter().enumerate().map(|(i, (name, _))| times.row(name, i)).collect();
    let title =
        format!("{PARAMETERS} x {numbers} numbers, AdamW's step, {device:?}, {threads} threads");
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
    let copied = copy_bandwidth(device, PARAMETERS * numbers);
    for (row, (name, bytes)) in rows.iter().zip(SETUPS) {
        let bandwidth = (PARAMETERS * numbers) as f64 * bytes / row.ours;
        println!(
            "share of a copy's {copied:.0} GB/s that a step reaches with {name}: {:.2}",
            bandwidth / copied
        );
    }
    println!();
}
