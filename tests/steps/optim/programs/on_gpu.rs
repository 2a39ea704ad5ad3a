//! The programs on a GPU, beside Python on the same GPU: how far parameters and states are apart.

use std::collections::BTreeMap;

use tch::{Device, Kind};

use crate::optim::programs::generate::{self, Mode, Program};
use crate::optim::programs::run::Machine;
use crate::optim::programs::{Seeded, lines};
use testkit::bits::from_hex;
use testkit::optimizers::name;
use testkit::programs::{python_can_have_the_gpu, seeds};
use testkit::python::Oracle;
use testkit::skipped;
use testkit::ulps::Histogram;

const GPU: Device = Device::Cuda(0);
const PROGRAMS: u64 = 300;

/// Within this distance the share [`NEAR_SHARE`] of the elements must be where the sides call other kernels.
const NEAR: u64 = 8;
const NEAR_SHARE: f64 = 0.95;

/// What is compared as one: an algorithm, and what comes before its step.
fn group(program: &Program) -> String {
    let algorithm = name(&program.groups[0].algorithm);
    let before = match program.mode {
        Mode::Plain | Mode::Scaler => "step",
        Mode::Unscale => "unscale_, step",
        Mode::Clip => "step_clip_norm",
        Mode::Transaction => "unscale, clip_grad_norm, step",
    };
    format!("{algorithm}: {before}")
}

/// Whether both sides call the same kernels with the same arguments, so that their bits must be equal.
fn is_of_same_kernels(group: &str) -> bool {
    let (algorithm, before) = group.split_once(": ").unwrap();
    ["AdamW", "Adam", "Sgd", "Adagrad"].contains(&algorithm)
        && ["step", "unscale_, step"].contains(&before)
}

/// Adds a parameter and its state; an error if the sides have other tensors.
fn add(
    histogram: &mut Histogram,
    kind: Kind,
    elements: usize,
    is_clipped: bool,
    sides: [&str; 2],
) -> Result<(), String> {
    let [ours, theirs] = sides.map(|side| side.split(',').map(from_hex).collect::<Vec<_>>());
    let sizes = |side: &[Vec<u8>]| side.iter().map(Vec::len).collect::<Vec<_>>();
    if sizes(&ours) != sizes(&theirs) {
        return Err(format!("bytes of tensors {:?} for {:?}", sizes(&ours), sizes(&theirs)));
    }
    for (ours, theirs) in ours.iter().zip(&theirs) {
        // The count of steps is one f32, whatever the parameter is.
        let is_of_elements = ours.len() == elements * kind.elt_size_in_bytes();
        let kind = if is_of_elements { kind } else { Kind::Float };
        if is_clipped {
            histogram.add_in_f32(kind, ours, theirs);
        } else {
            histogram.add(kind, ours, theirs);
        }
    }
    Ok(())
}

/// Runs a program and compares each of its steps.
fn compare<'a>(
    (seed, program): &Seeded,
    answers: &mut impl Iterator<Item = &'a str>,
    histogram: &mut Histogram,
) -> Result<(), String> {
    let is_clipped = matches!(program.mode, Mode::Clip | Mode::Transaction);
    let mut machine = Machine::new(program, &[GPU]);
    let answers: Vec<_> = answers.take(program.steps.len()).collect();
    for (index, (step, theirs)) in program.steps.iter().zip(answers).enumerate() {
        let place = format!("TCH_AMP_SEED={seed}, step {index}");
        if machine.step(step) == step.overflow {
            return Err(format!("{place}: a step with an overflow is skipped, and no other"));
        }
        if let Some(reason) = theirs.strip_prefix("error ") {
            return Err(format!("{place}: not compared: {reason}"));
        }
        let ours = machine.told();
        if ours.rsplit(' ').next() != theirs.rsplit(' ').next() {
            return Err(format!("{place}: another scale"));
        }
        for (p, sides) in program.params.iter().zip(ours.split(' ').zip(theirs.split(' '))) {
            add(histogram, p.kind, p.values.numel(), is_clipped, [sides.0, sides.1])
                .map_err(|difference| format!("{place}: {difference}"))?;
        }
    }
    Ok(())
}

#[test]
fn training_on_a_gpu_is_pythons_on_the_same_gpu() {
    if !python_can_have_the_gpu() {
        return;
    }
    let Some(oracle) = Oracle::find("optim_programs.py") else { return };
    let seeds = seeds("TCH_AMP_OPTIM_PROGRAMS", PROGRAMS).take(PROGRAMS as usize);
    let programs: Vec<_> = seeds.map(|seed| (seed, generate::program(seed))).collect();
    let answers = oracle.run(&["--cuda"], &lines(&[GPU], &programs));
    if answers.is_empty() {
        skipped("Python has no GPU here");
        return;
    }
    let mut answers = answers.lines();
    let mut groups: BTreeMap<String, Histogram> = BTreeMap::new();
    let mut differences = Vec::new();
    for seeded in &programs {
        let group = group(&seeded.1);
        let histogram = groups.entry(group.clone()).or_default();
        if let Err(difference) = compare(seeded, &mut answers, histogram) {
            differences.push(format!("{group}: {difference}"));
        }
    }
    for (group, histogram) in &groups {
        histogram.print(group);
        if is_of_same_kernels(group) && histogram.within(0) < 1.0 {
            differences.push(format!("{group}: other bits from the same kernels"));
        }
        if histogram.within(NEAR) < NEAR_SHARE {
            differences.push(format!("{group}: too many elements are far apart"));
        }
    }
    let (refused, others): (Vec<_>, Vec<_>) =
        differences.iter().partition(|difference| difference.contains("not compared"));
    println!("{} programs that PyTorch refuses:\n{refused:#?}", refused.len());
    assert!(refused.len() < programs.len() / 4, "{refused:#?}");
    assert!(others.is_empty(), "{others:#?}");
}

#[test]
fn distances_count_numbers_and_nans_are_incomparable() {
    let of = |a: f32, b: f32| {
        let mut histogram = Histogram::default();
        histogram.add(Kind::Float, &a.to_le_bytes(), &b.to_le_bytes());
        histogram.to_string()
    };
    assert_eq!(of(1.0, 1.0), "0: 1");
    assert_eq!(of(f32::NAN, -f32::NAN), "0: 1");
    assert_eq!(of(1.0, 1.0 + f32::EPSILON), "1: 1");
    assert_eq!(of(1.0, 1.0 - 1.5 * f32::EPSILON), "up to 4: 1");
    assert_eq!(of(f32::from_bits(1), -f32::from_bits(1)), "2: 1");
    assert_eq!(of(f32::MAX, f32::INFINITY), "1: 1");
    assert_eq!(of(f32::NAN, 1.0), "incomparable: 1");
    let mut halves = Histogram::default();
    halves.add(Kind::BFloat16, &[0x80, 0x3f, 0, 0], &[0x82, 0x3f, 0, 0]);
    assert_eq!((halves.within(0), halves.within(2)), (0.5, 1.0));
}
