//! Learning-rate schedules: PyTorch's numbers, steps that are skipped, and saved states.

mod oracle;
mod python;
mod refused;
mod resumed;
mod skipped;

use tch::{Device, Kind};
use tch_amp::optim::{AdamW, Algorithm, Optimizer, Sgd};
use tch_amp::schedule::{
    Annealing, ChainedScheduler, ConstantLr, CosineAnnealingLr, CosineAnnealingWarmRestarts,
    ExponentialLr, InverseSqrtLr, LinearLr, LinearWithWarmup, MultiStepLr, OneCycleLr,
    PolynomialLr, Schedule, SequentialLr, StepLr,
};

use testkit::rng::Rng;
use testkit::tensors::leaf;

/// An optimizer with a group for each of the learning rates, which has a momentum.
fn optimizer(adam: bool, lrs: &[f64]) -> Optimizer {
    optimizer_on(Device::Cpu, adam, lrs)
}

fn optimizer_on(device: Device, adam: bool, lrs: &[f64]) -> Optimizer {
    let algorithm: Algorithm = if adam { AdamW::default().into() } else { Sgd::default().into() };
    let weight = || [leaf(&[1.0], Kind::Float, device)];
    let mut opt = algorithm.build(&weight(), lrs[0]).unwrap();
    for &lr in &lrs[1..] {
        let group = opt.add_param_group(vec![(lr.to_string(), weight()[0].shallow_clone())]);
        opt.set_lr_group(group.unwrap(), lr).unwrap();
    }
    opt
}

/// The learning rate and the momentum of each group.
fn rates(opt: &Optimizer) -> Vec<[f64; 2]> {
    let momentum = |algorithm| match algorithm {
        Algorithm::AdamW(adam) => adam.betas.0,
        Algorithm::Sgd(sgd) => sgd.momentum,
        other => panic!("{other:?}"),
    };
    let group = |i| opt.param_group(i).unwrap();
    (0..opt.param_group_count()).map(|i| [group(i).lr, momentum(group(i).algorithm)]).collect()
}

/// A random schedule of the kind with this number, for this many groups, that may be part of a sequence.
fn part(kind: usize, rng: &mut Rng, groups: usize) -> Schedule {
    let count = |rng: &mut Rng, most| 1 + rng.below(most) as u64;
    let share = |rng: &mut Rng| *rng.pick(&[0.1, 0.3, 0.5, 0.9, 0.99, 1.0]);
    let low = |rng: &mut Rng| *rng.pick(&[0.0, 1e-5, 3e-3]);
    match kind {
        0 => StepLr { step_size: count(rng, 9), gamma: share(rng) }.into(),
        1 => {
            let milestones: Vec<_> = (0..4).map(|_| rng.below(20) as u64).collect();
            MultiStepLr { milestones, gamma: share(rng) }.into()
        }
        2 => ConstantLr { factor: share(rng), total_iters: count(rng, 20) }.into(),
        3 => {
            let linear = LinearLr { start_factor: share(rng), ..Default::default() };
            LinearLr {
                end_factor: *rng.pick(&[0.0, 0.4, 1.0]),
                total_iters: count(rng, 30),
                ..linear
            }
            .into()
        }
        4 => ExponentialLr { gamma: share(rng) }.into(),
        5 => {
            let power = *rng.pick(&[0.5, 1.0, 2.0, 3.7]);
            PolynomialLr { total_iters: count(rng, 40), power }.into()
        }
        6 => CosineAnnealingLr { t_max: count(rng, 30), eta_min: low(rng) }.into(),
        7 => {
            let (eta_min, t_0, t_mult) = (low(rng), count(rng, 8), count(rng, 3));
            CosineAnnealingWarmRestarts { t_0, t_mult, eta_min }.into()
        }
        8 => one_cycle(rng, groups).into(),
        9 => InverseSqrtLr { warmup_steps: count(rng, 20) }.into(),
        _ => LinearWithWarmup { warmup_steps: rng.below(20) as u64, total_steps: count(rng, 60) }
            .into(),
    }
}

/// How many kinds `part` knows.
const PARTS: usize = 11;

fn one_cycle(rng: &mut Rng, groups: usize) -> OneCycleLr {
    let lrs = if rng.one_in(2) { 1 } else { groups };
    let shape = if rng.one_in(2) { Annealing::Linear } else { Annealing::Cos };
    OneCycleLr {
        max_lr: (0..lrs).map(|i| 0.5 / (i + 1) as f64).collect(),
        pct_start: *rng.pick(&[0.25, 0.3, 0.45]),
        anneal_strategy: shape,
        cycle_momentum: !rng.one_in(3),
        div_factor: *rng.pick(&[2.0, 25.0]),
        three_phase: rng.one_in(2),
        ..OneCycleLr::new(0.5, 61 + rng.below(60) as u64)
    }
}

/// A random schedule: a single one, a sequence, a chain, or a chain with a sequence.
fn schedule(rng: &mut Rng, groups: usize) -> Schedule {
    // Two cycles for the same groups overwrite each other's options in PyTorch.
    let other = |rng: &mut Rng| match rng.below(PARTS) {
        8 => part(3, rng, groups),
        kind => part(kind, rng, groups),
    };
    let any = |rng: &mut Rng| part(rng.below(PARTS), rng, groups);
    let sequence = |rng: &mut Rng| {
        let mut sequence = SequentialLr::new(other(rng));
        let mut milestone = 0;
        for _ in 0..1 + rng.below(2) {
            milestone += 1 + rng.below(15) as u64;
            sequence = sequence.then_at(milestone, other(rng));
        }
        sequence
    };
    match rng.below(4) {
        0 | 1 => any(rng),
        2 => sequence(rng).into(),
        _ => {
            let chain = ChainedScheduler::new(any(rng));
            if rng.one_in(3) {
                chain.and(sequence(rng)).into()
            } else {
                chain.and(other(rng)).into()
            }
        }
    }
}
