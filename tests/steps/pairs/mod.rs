//! Two abilities at once: short random programs that make use of both, for each pair that can meet, beside a plain loop
//! in f64 and beside themselves without one of them where that must change nothing.
//!
//! `TCH_AMP_PAIRS_SECONDS` is how long further programs are tried, and `TCH_AMP_SEED` repeats those of a seed.

mod abilities;
mod plain;
mod program;
mod training;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};
use tch_amp::distributed::{GroupConfig, ProcessGroup, Store};

use testkit::programs::number;
use testkit::rng::Rng;
use testkit::simulation::is_model;

use abilities::{ALL, Ability, NEUTRAL, cannot_meet, refusal};
use plain::Outcome;
use program::Program;

/// The pairs that can meet.
fn pairs() -> impl Iterator<Item = (Ability, Ability)> {
    let all = ALL.iter().enumerate();
    let all = all.flat_map(|(i, &one)| ALL[i + 1..].iter().map(move |&other| (one, other)));
    all.filter(|(one, other)| cannot_meet(*one, *other).is_none())
}

/// The roundings of a number on its way from the input to a gradient, in a forward and a backward pass: casts, products
/// and activations.
const ROUNDINGS: f64 = 16.0;

/// How far the weights may be from those of f64, relative to the largest move of a weight: each rounding may be off by
/// the unit roundoff of its dtype.
fn bound(program: &Program, wanted: &Outcome) -> f64 {
    let unit = |kind| match kind {
        Kind::BFloat16 => 2f64.powi(-8),
        Kind::Half => 2f64.powi(-11),
        // f32, with a hundred terms in the longest sum.
        _ => 100.0 * 2f64.powi(-24),
    };
    let passes = if program.has(Ability::Penalty) { 2.0 } else { 1.0 };
    let gradient = passes * ROUNDINGS * unit(program.precision());
    // Muon computes its five iterations in bf16, and low-bit moments are rounded in each step.
    let rounded =
        [Ability::Muon, Ability::LowBit].into_iter().filter(|it| program.has(*it)).count();
    let step = rounded as f64 * ROUNDINGS * unit(Kind::BFloat16);
    // A quarter of a move is wrong by anything but rounding.
    (wanted.largest * gradient + step).min(0.25)
}

/// What is wrong with an outcome.
fn difference(program: &Program, found: &Outcome, wanted: &Outcome) -> Option<String> {
    if program.has(Ability::Counter)
        && (found.taken, found.skipped) != (wanted.taken, wanted.skipped)
    {
        let counts = [found.taken, found.skipped, wanted.taken, wanted.skipped];
        return Some(format!("steps taken and skipped: {counts:?}"));
    }
    if found.scale != wanted.scale {
        return Some(format!("a scale of {} in place of {}", found.scale, wanted.scale));
    }
    if (found.lr - wanted.lr).abs() > 1e-9 {
        return Some(format!("a learning rate of {} in place of {}", found.lr, wanted.lr));
    }
    let bound = bound(program, wanted);
    let parameters = program.parameters();
    let starts =
        parameters.iter().map(|(name, size)| program.start(name, size).to_kind(Kind::Double));
    let mut starts: Vec<_> = starts.collect();
    starts.push(Tensor::zeros([3], (Kind::Double, Device::Cpu)));
    let largest = |t: &Tensor| t.abs().max().double_value(&[]);
    let moves: Vec<_> = wanted
        .weights
        .iter()
        .zip(&starts)
        .map(|(wanted, start)| largest(&(wanted - start)))
        .collect();
    let moved = moves.iter().copied().fold(0.0, f64::max);
    // What a weight in bf16 is rounded by.
    let rounding = if program.is_in_bf16() { 2f64.powi(-8) } else { 0.0 };
    let mut names: Vec<_> = parameters.iter().map(|(name, _)| *name).collect();
    names.push("the second optimizer's weight");
    let weights = found.weights.iter().zip(&wanted.weights).zip(&names);
    let averages = found.averages.iter().zip(&wanted.averages).zip(&names);
    for (what, pairs) in [("weight", weights.collect::<Vec<_>>()), ("average", averages.collect())]
    {
        for (((found, wanted), name), own) in pairs.into_iter().zip(&moves) {
            let far = largest(&(found - wanted));
            // A weight that hardly moves has the errors of those that it is computed with.
            let allowed = bound * own.max(moved / 2.0) + rounding * largest(wanted);
            if far.is_nan() || far > allowed {
                return Some(format!(
                    "{what} `{name}` is off by {far:.2e}, more than {allowed:.2e}, of {moved:.2e}"
                ));
            }
        }
    }
    None
}

/// Runs programs on one rank or on two, and keeps the ranks.
struct Runner {
    store: Store,
}

impl Runner {
    fn train(&self, program: &Program) -> Result<Outcome, String> {
        let train = |group: Option<&ProcessGroup>| {
            let trained = catch_unwind(AssertUnwindSafe(|| training::train(program, group)));
            match trained {
                Ok(trained) => trained.map_err(|error| error.to_string()),
                Err(_) => Err("a panic, whose message is above".to_owned()),
            }
        };
        if !program.has_ranks() {
            return train(None);
        }
        let options = GroupConfig { timeout: Duration::from_secs(30), ..GroupConfig::default() };
        let rank = |number| -> Result<Outcome, String> {
            let group: ProcessGroup =
                options.join(&self.store, number, 2).map_err(|e| e.to_string())?;
            train(Some(&group))
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| rank(1));
            let first = rank(0);
            let second = other.join().map_err(|_| "rank 1 has panicked".to_owned())?;
            let (first, second) = (first?, second?);
            let same = first.weights.iter().zip(&second.weights).all(|(a, b)| a.equal(b));
            if same { Ok(first) } else { Err("the ranks have different weights".to_owned()) }
        })
    }
}

/// What is wrong with a program.
fn fault(runner: &Runner, program: &Program) -> Option<String> {
    let found = match runner.train(program) {
        Ok(found) => found,
        Err(error) => return Some(error),
    };
    let wanted = plain::train(program);
    if let Some(difference) = difference(program, &found, &wanted) {
        return Some(difference);
    }
    for neutral in NEUTRAL.into_iter().filter(|neutral| program.has(*neutral)) {
        let without = program.without(neutral);
        let other = match runner.train(&without) {
            Ok(other) => other,
            Err(error) => return Some(format!("without {neutral:?}: {error}")),
        };
        if !found.weights.iter().zip(&other.weights).all(|(a, b)| a.equal(b)) {
            return Some(format!("other bits than without {neutral:?}"));
        }
    }
    None
}

/// A program with two abilities, and often with a third.
fn program_of(seed: u64, one: Ability, other: Ability) -> Program {
    let mut rng = Rng::new(seed);
    let third = *rng.pick(ALL);
    let fits = |known: Ability| {
        third != known && cannot_meet(known, third).is_none() && refusal(known, third).is_none()
    };
    let device = *rng.pick(&devices());
    let mut abilities = vec![one, other];
    if fits(one) && fits(other) && refusal(one, other).is_none() {
        abilities.push(third);
    }
    let mut program = Program::new(seed, device, &abilities);
    // The ranks are threads, which gloo connects on the CPU, and simulated GPUs have no graphs.
    if program.has_ranks() || (program.has(Ability::Graph) && is_model()) {
        program.device = Device::Cpu;
    }
    program
}

/// The CPU, and GPUs that compute its bits.
fn devices() -> Vec<Device> {
    [Device::Cpu].into_iter().chain(testkit::gpus_that_round_as_the_cpu()).collect()
}

#[test]
fn pairs_train_like_a_plain_loop() {
    // Threads cost more than they gain where tensors are this small.
    tch::set_num_threads(1);
    let begun = Instant::now();
    let seconds = number("TCH_AMP_PAIRS_SECONDS").map(Duration::from_secs);
    let first = number("TCH_AMP_SEED").unwrap_or(1);
    let runner = Runner { store: Store::in_process().unwrap() };
    let mut faults = Vec::new();
    let mut programs = 0;
    for round in 0.. {
        let is_over = match seconds {
            Some(seconds) => begun.elapsed() >= seconds,
            None => round > 0,
        };
        if is_over {
            break;
        }
        for (one, other) in pairs() {
            let seed = first + round;
            let program = program_of(seed * 4096 + one as u64 * 64 + other as u64, one, other);
            programs += 1;
            let fault = fault(&runner, &program);
            match (fault, refusal(one, other)) {
                (Some(fault), Some(wanted)) if fault.contains(wanted) => {}
                (None, None) => {}
                (fault, _) => {
                    let fault = fault.unwrap_or_else(|| "it is not refused".to_owned());
                    faults.push(format!(
                        "{one:?} and {other:?}, TCH_AMP_SEED={seed}: {fault}\n    {program:?}"
                    ));
                }
            }
        }
    }
    println!("{programs} programs in {:.1} s", begun.elapsed().as_secs_f64());
    assert!(faults.is_empty(), "{} of {programs}:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn the_page_has_the_pairs_that_cannot_meet() {
    let page = include_str!("../../README.md");
    let rows = abilities::rows();
    assert!(page.contains(&rows), "the table of pairs in tests/README.md is to be:\n{rows}");
}
