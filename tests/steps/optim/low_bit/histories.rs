//! 8-bit moments follow the exact ones on hostile histories of gradients, which published codes do not.
//!
//! The reference is the optimizer itself with f32 moments, which `programs/` compares with PyTorch. The histories
//! run in a process of their own, so that its random numbers are the same in each run.

use tch::{Device, Kind, Tensor};
use tch_amp::optim::{AdamW, MomentDtype, Muon, Optimizer};

use super::{build, moments};
use testkit::programs::passes;

/// The numbers of a history: 32 blocks, of which the rules below address every lane.
const NUMBERS: i64 = 1024;

const STEPS: i64 = 10_000;

/// The spread of the sizes of gradients, as the deviation of their logarithm, and their median.
const HISTORIES: [(&str, f64, f64); 18] = [
    ("steady, spread 0.5", 0.5, 1e-4),
    ("steady, spread 1", 1.0, 1e-4),
    ("steady, spread 2", 2.0, 1e-4),
    ("steady, spread 3", 3.0, 1e-4),
    ("all fall 1000-fold", 1.0, 1e-4),
    ("half of each block falls 100-fold", 0.5, 1e-4),
    ("an outlier of 1e4 in each block", 0.5, 1e-4),
    ("sparse rows", 1.0, 1e-4),
    ("sparse numbers", 1.0, 1e-4),
    ("square waves", 1.0, 1e-4),
    ("spikes of 1000", 0.5, 1e-4),
    ("late and tiny", 0.5, 1e-12),
    ("half of each block dies and revives", 1.0, 1e-4),
    ("walks", 0.5, 1e-4),
    ("an outlier dies", 0.5, 1e-4),
    ("tiny, 1e-9", 1.0, 1e-9),
    ("giant spikes", 0.5, 1e-4),
    ("tiny, 1e-13", 1.0, 1e-13),
];

/// Beyond the window of 8 bits, by the spread of a block: their updates are too small at times.
const BEYOND: [&str; 2] = ["steady, spread 3", "giant spikes"];
/// Histories of which only the extreme elements leave the window.
const EXTREME: [&str; 2] = ["an outlier of 1e4 in each block", "walks"];

fn row(name: &str) -> i64 {
    HISTORIES.iter().position(|(other, _, _)| *other == name).unwrap() as i64
}

fn randn(size: &[i64]) -> Tensor {
    Tensor::randn(size, (Kind::Float, Device::Cpu))
}

fn rand(size: i64) -> Tensor {
    Tensor::rand([size], (Kind::Float, Device::Cpu))
}

/// Makes the gradients of each step.
struct Gradients {
    sizes: Tensor,
    /// Every second number, and one number of each block.
    half: Tensor,
    lane: Tensor,
    phase: Tensor,
    walk: Tensor,
}

impl Gradients {
    fn new() -> Self {
        let sizes =
            HISTORIES.map(|(_, spread, median)| (randn(&[NUMBERS]) * spread).exp() * median);
        let places = Tensor::arange(NUMBERS, (Kind::Int64, Device::Cpu));
        let half = places.remainder(2).eq(0);
        let lane = places.remainder(32);
        let mut all = Self {
            sizes: Tensor::stack(&sizes, 0),
            half,
            lane,
            phase: rand(NUMBERS) * 400.0,
            walk: Tensor::zeros([NUMBERS], (Kind::Float, Device::Cpu)),
        };
        all.outlier("an outlier of 1e4 in each block", 1e4);
        all.outlier("an outlier dies", 1e3);
        all
    }

    fn outlier(&mut self, name: &str, by: f64) {
        let of_lane = self.lane.eq(5).to_kind(Kind::Float) * (by - 1.0) + 1.0;
        let _sizes = self.sizes.select(0, row(name)).multiply_(&of_lane);
    }

    fn of_step(&mut self, step: i64) -> Tensor {
        let noise = randn(&[HISTORIES.len() as i64, NUMBERS]);
        let all = &noise * &self.sizes;
        let multiply = |name: &str, by: &Tensor| drop(all.select(0, row(name)).multiply_(by));
        let one = |by: f64| Tensor::from(by as f32);
        let where_half = |by: f64| self.half.to_kind(Kind::Float) * (by - 1.0) + 1.0;
        if step >= STEPS / 2 {
            multiply("all fall 1000-fold", &one(1e-3));
        }
        if step >= STEPS / 4 {
            multiply("half of each block falls 100-fold", &where_half(1e-2));
            multiply("an outlier dies", &self.lane.ne(5).to_kind(Kind::Float));
        }
        let alive = rand(NUMBERS / 32).lt(0.02).repeat_interleave_self_int(32, None, None);
        multiply("sparse rows", &alive.to_kind(Kind::Float));
        let alive = rand(NUMBERS).lt(0.02).logical_or(&self.half.logical_not());
        multiply("sparse numbers", &alive.to_kind(Kind::Float));
        let sign = ((&self.phase + step as f64) / 200.0).floor().remainder(2).eq(0);
        let sign = sign.to_kind(Kind::Float) * 2.0 - 1.0;
        let waves = row("square waves");
        let wave = self.sizes.select(0, waves) * sign * (noise.select(0, waves) * 0.1 + 1.0);
        all.select(0, waves).copy_(&wave);
        multiply("spikes of 1000", &(rand(NUMBERS).lt(1e-3).to_kind(Kind::Float) * 999.0 + 1.0));
        if step < STEPS / 5 {
            multiply("late and tiny", &one(0.0));
        } else if step > STEPS / 2 {
            multiply("late and tiny", &one(1e8));
        }
        let dies = "half of each block dies and revives";
        if step >= 3 * STEPS / 4 {
            multiply(dies, &where_half(1e-3));
        } else if step >= STEPS / 4 {
            multiply(dies, &where_half(0.0));
        }
        if step % 700 == 350 {
            let spike = self.lane.eq((step / 700) % 32).to_kind(Kind::Float) * (1e7 - 1.0) + 1.0;
            multiply("giant spikes", &spike);
        }
        self.walk = &self.walk * 0.9999 + randn(&[NUMBERS]) * 0.05;
        multiply("walks", &self.walk.exp());
        all.view(-1)
    }
}

/// Measures updates: zeroes the parameter, takes a step, and reads the parameter.
struct Updates {
    parameter: Tensor,
    optimizer: Optimizer,
}

impl Updates {
    fn new(states: MomentDtype, count: i64) -> Self {
        let parameter = Tensor::zeros([count], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        // `eps` is too small to hide an error.
        let adamw = AdamW { eps: 1e-16, weight_decay: 0.0, ..AdamW::default() };
        let optimizer = build(adamw.into(), states, &parameter, 1.0);
        parameter.sum(Kind::Float).backward();
        Self { parameter, optimizer }
    }

    fn of(&mut self, gradient: &Tensor) -> Tensor {
        tch::no_grad(|| {
            self.parameter.grad().copy_(gradient);
            let _zeros = self.parameter.shallow_clone().zero_();
        });
        self.optimizer.step().unwrap();
        self.parameter.detach().copy()
    }
}

fn quantile(values: &Tensor, at: f64) -> f64 {
    let (sorted, _) = values.sort(0, false);
    sorted.double_value(&[((values.numel() - 1) as f64 * at).round() as i64])
}

/// Sums over the steps, of each number.
struct Sums {
    largest: Tensor,
    squares: Tensor,
    products: Tensor,
}

impl Sums {
    fn new(count: i64) -> Self {
        let zeros = || Tensor::zeros([count], (Kind::Double, Device::Cpu));
        Self { largest: zeros(), squares: zeros(), products: zeros() }
    }

    fn add(&mut self, update: &Tensor, exact: &Tensor, step: i64) {
        self.largest = self.largest.maximum(&update.abs());
        if step > STEPS / 20 {
            self.squares += update.square();
            self.products += update * exact;
        }
    }

    /// The part of a history.
    fn of(&self, history: usize) -> Self {
        let of = |all: &Tensor| all.narrow(0, history as i64 * NUMBERS, NUMBERS);
        let Self { largest, squares, products } = self;
        Self { largest: of(largest), squares: of(squares), products: of(products) }
    }
}

/// What the updates of a mode may be, on histories within its window.
struct Limits {
    largest: f64,
    median: [f64; 2],
    slope: [f64; 2],
    noise: f64,
}

const OF_EIGHT_BITS: Limits =
    Limits { largest: 1.5, median: [0.97, 1.05], slope: [0.85, 1.2], noise: 0.12 };
const OF_BFLOAT16: Limits =
    Limits { largest: 1.1, median: [0.99, 1.01], slope: [0.96, 1.04], noise: 0.03 };

fn check(
    name: &str,
    limits: &Limits,
    coded: &Sums,
    exact: &Sums,
    is_beyond: bool,
    is_extreme: bool,
) {
    let [largest, largest_exact] = [coded, exact].map(|sums| sums.largest.max().double_value(&[]));
    let square = exact.squares.clamp_min(1e-30);
    let slope = &coded.products / &square;
    let difference = &coded.squares - &coded.products * 2.0 + &exact.squares;
    let noise = quantile(&(difference.clamp_min(0.0) / &square).sqrt(), 0.5);
    let [low, median, high] = [0.01, 0.5, 0.99].map(|at| quantile(&slope, at));
    println!(
        "{name:<36} largest {largest:>8.2} of {largest_exact:>8.2}, slope {low:.3} {median:.3} \
         {high:.3}, noise {noise:.3}"
    );
    let is_within = |value: f64, [least, most]: [f64; 2]| (least..=most).contains(&value);
    assert!(largest <= limits.largest * largest_exact, "{name}: {largest} of {largest_exact}");
    if is_beyond {
        return;
    }
    assert!(is_within(median, limits.median) && noise <= limits.noise, "{name}: {median} {noise}");
    if !is_extreme {
        let fits = is_within(low, limits.slope) && is_within(high, limits.slope);
        assert!(fits, "{name}: {low} to {high}");
    }
}

#[test]
#[ignore = "a program that other tests start"]
fn program() {
    tch::manual_seed(1);
    tch::set_num_threads(1);
    let mut gradients = Gradients::new();
    let count = HISTORIES.len() as i64 * NUMBERS;
    let mut modes = [MomentDtype::F32, MomentDtype::EightBit, MomentDtype::BFloat16]
        .map(|states| (Updates::new(states, count), Sums::new(count)));
    for step in 1..=STEPS {
        let gradient = gradients.of_step(step);
        let updates =
            modes.each_mut().map(|(updates, _)| updates.of(&gradient).to_kind(Kind::Double));
        for ((_, sums), update) in modes.iter_mut().zip(&updates) {
            sums.add(update, &updates[0], step);
        }
    }
    let [exact, eight_bits, bfloat16] = modes.map(|(_, sums)| sums);
    for (index, (name, _, _)) in HISTORIES.into_iter().enumerate() {
        let exact = exact.of(index);
        let (is_beyond, is_extreme) = (BEYOND.contains(&name), EXTREME.contains(&name));
        check(name, &OF_EIGHT_BITS, &eight_bits.of(index), &exact, is_beyond, is_extreme);
        check(name, &OF_BFLOAT16, &bfloat16.of(index), &exact, false, false);
    }
}

/// Second moments beside steady neighbours follow a fall, and dead first moments become zeros.
#[test]
#[ignore = "a program that other tests start"]
fn liveness_program() {
    tch::manual_seed(3);
    tch::set_num_threads(1);
    let count = 4096;
    let mut exact = Updates::new(MomentDtype::F32, count);
    let mut coded = Updates::new(MomentDtype::EightBit, count);
    let half = Tensor::arange(count, (Kind::Int64, Device::Cpu)).remainder(2).eq(0);
    let fall = 3000;
    let [ends, dead] = [fall + 5000, fall + 5000 + 200];
    for step in 1..=dead {
        let by = if step <= fall {
            1.0
        } else if step <= ends {
            1e-2
        } else {
            0.0
        };
        let sizes = half.to_kind(Kind::Float) * (by - 1.0) + 1.0;
        let gradient = randn(&[count]) * 1e-4 * sizes;
        let _updates = (exact.of(&gradient), coded.of(&gradient));
        if step == ends {
            let [here, there] = [&mut coded, &mut exact].map(|it| moments(&mut it.optimizer));
            let ratio = (&here[1] / &there[1]).sqrt().masked_select(&half);
            let median = quantile(&ratio, 0.5);
            println!("root of the second moments over the exact one after a fall: {median:.3}");
            assert!((0.75..=1.3).contains(&median), "{median}");
        }
    }
    let left = moments(&mut coded.optimizer)[0].masked_select(&half).count_nonzero(None);
    assert_eq!(left.int64_value(&[]), 0, "first moments of numbers without gradients");
}

/// Gradients for a momentum. Unlike second moments, it freezes where gradients hardly change, and not where they are
/// noise.
const OF_MOMENTA: [&str; 12] = [
    "constant",
    "constant, noise of 1 %",
    "constant, noise of 10 %",
    "as much noise",
    "noise alone",
    "growing to twice as much",
    "falling to a tenth",
    "a slow wave",
    "square waves",
    "sparse rows",
    "spikes of 1000",
    "a fall of 100-fold at once",
];

const STEPS_OF_MOMENTA: i64 = 2000;

/// The gradients of a step, one row for each history.
fn of_momenta(step: i64, size: &Tensor, phase: &Tensor) -> Tensor {
    let (at, noise) = (step as f64 / STEPS_OF_MOMENTA as f64, randn(&[NUMBERS]));
    let share = |by: f64| &noise * by + 1.0;
    let ones = || Tensor::ones([NUMBERS], (Kind::Float, Device::Cpu));
    let sign = ((phase + step as f64) / 200.0).floor().remainder(2) * 2.0 - 1.0;
    let rows = rand(NUMBERS / 32).lt(0.02).repeat_interleave_self_int(32, None, None);
    let rows = [
        ones(),
        share(0.01),
        share(0.1),
        share(1.0),
        noise.shallow_clone(),
        ones() * (1.0 + at),
        ones() * 0.1f64.powf(at),
        (phase / 100.0 + 2.0 * std::f64::consts::TAU * at).sin(),
        sign * share(0.1),
        rows.to_kind(Kind::Float),
        share(0.1) * (rand(NUMBERS).lt(1e-3).to_kind(Kind::Float) * 999.0 + 1.0),
        share(0.1) * if at < 0.5 { 1.0 } else { 0.01 },
    ];
    Tensor::stack(&rows, 0) * size
}

/// The sums over all steps of a momentum in f32 and in bf16, which the weights follow.
struct Momenta {
    optimizers: [(Tensor, Optimizer); 2],
    sums: [Tensor; 2],
    /// The sum of the sizes in f32.
    sizes: Tensor,
}

impl Momenta {
    fn new(momentum: f64) -> Self {
        let zeros = |kind| Tensor::zeros([OF_MOMENTA.len() as i64, NUMBERS], (kind, Device::Cpu));
        let muon = Muon { momentum, ns_steps: 0, ..Muon::default() };
        let optimizers = [MomentDtype::F32, MomentDtype::BFloat16].map(|states| {
            let parameter = zeros(Kind::Float).set_requires_grad(true);
            parameter.sum(Kind::Float).backward();
            let optimizer = build(muon.into(), states, &parameter, 1e-3);
            (parameter, optimizer)
        });
        let sums = [(); 2].map(|()| zeros(Kind::Double));
        Self { optimizers, sums, sizes: zeros(Kind::Double) }
    }

    fn add(&mut self, gradient: &Tensor) {
        for ((parameter, optimizer), sum) in self.optimizers.iter_mut().zip(&mut self.sums) {
            tch::no_grad(|| parameter.grad().copy_(gradient));
            optimizer.step().unwrap();
            let momentum = &optimizer.state_dict().unwrap().state["0"]["momentum_buffer"];
            *sum += momentum;
            if momentum.kind() == Kind::Float {
                self.sizes += momentum.abs();
            }
        }
    }

    /// How far the sums of each history are off, in its sum of sizes.
    fn off(&self) -> Vec<f64> {
        let [exact, coded] = &self.sums;
        let norm = |all: &Tensor| all.norm_scalaropt_dim(2, [1i64], false);
        Vec::try_from(norm(&(coded - exact)) / norm(&self.sizes)).unwrap()
    }
}

/// The momentum of Muon, and how far the sum of its values may be off.
const MOMENTA: [(f64, f64); 2] = [(0.95, 0.003), (0.99, 0.01)];

#[test]
#[ignore = "a program that other tests start"]
fn momentum_program() {
    tch::manual_seed(4);
    tch::set_num_threads(1);
    let (size, phase) = (randn(&[NUMBERS]).exp() * 1e-4, rand(NUMBERS) * 400.0);
    let mut all = MOMENTA.map(|(momentum, _)| Momenta::new(momentum));
    for step in 1..=STEPS_OF_MOMENTA {
        let gradient = of_momenta(step, &size, &phase);
        all.iter_mut().for_each(|momenta| momenta.add(&gradient));
    }
    for (momenta, (momentum, most)) in all.iter().zip(MOMENTA) {
        for (name, off) in OF_MOMENTA.into_iter().zip(momenta.off()) {
            println!("{name:<28} momentum {momentum}: off by {off:.5}");
            assert!(off <= most, "{name}: {off}");
        }
    }
}

const PROGRAMS: [&str; 3] = ["program", "liveness_program", "momentum_program"];

#[test]
fn updates_follow_those_of_exact_moments() {
    for program in PROGRAMS {
        let test = format!("optim::low_bit::histories::{program}");
        assert!(passes(&test, &[("TCH_AMP_PLANTED_FAULT", "none")]), "{program}");
    }
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "faults are planted in debug builds")]
fn rounding_to_nearest_fails_the_histories() {
    for program in PROGRAMS {
        let test = format!("optim::low_bit::histories::{program}");
        assert!(!passes(&test, &[("TCH_AMP_PLANTED_FAULT", "nearest")]), "{program}");
    }
}
