//! The programs on a GPU, beside Python on the same GPU: the same outcomes, and how far the numbers are apart.

use std::io::Write as _;

use tch::{Device, Kind};

use crate::scaler::programs::generate;
use crate::scaler::programs::program::{ParamSpec, Program};
use crate::scaler::programs::run::Machine;
use crate::scaler::programs::{ON_GPUS, PROGRAMS};
use testkit::bits::from_hex;
use testkit::programs::{python_can_have_the_gpu, seeds};
use testkit::python::Oracle;
use testkit::skipped;
use testkit::ulps::Histogram;

const GPU: Device = Device::Cuda(0);

/// Within this distance the share [`NEAR_SHARE`] of the numbers must be: norms are summed in another order, and the
/// optimizers of the tests call other kernels than PyTorch's.
const NEAR: u64 = 8;
const NEAR_SHARE: f64 = 0.99;

impl Program {
    fn kinds(&self) -> Vec<Kind> {
        let params = self.optimizers.iter().flat_map(|optimizer| &optimizer.params);
        let kind = |param: &ParamSpec| match param {
            ParamSpec::New { dtype, .. } => Some(dtype.kind()),
            ParamSpec::Shared(_) => None,
        };
        params.filter_map(kind).collect()
    }
}

/// Compares the numbers of two lists of tensors, whose dtypes are known, and returns whether the lists are alike.
fn add(histogram: &mut Histogram, kinds: &[Kind], sides: [&str; 2]) -> bool {
    let [ours, theirs] = sides.map(|side| side.split_terminator('/').collect::<Vec<_>>());
    let is_alike = ours.len() == theirs.len()
        && ours.iter().zip(&theirs).all(|(ours, theirs)| ours.len() == theirs.len());
    if is_alike {
        for (kind, (ours, theirs)) in kinds.iter().zip(ours.iter().zip(&theirs)) {
            if *ours != "-" && *theirs != "-" {
                histogram.add_in_f32(*kind, &from_hex(ours), &from_hex(theirs));
            }
        }
    }
    is_alike
}

/// Compares two states: the scale and all counts exactly.
fn add_states(histogram: &mut Histogram, kinds: &[Kind], sides: [&str; 2]) -> bool {
    let [ours, theirs] = sides.map(|side| side.split(' ').collect::<Vec<_>>());
    ours.len() == theirs.len()
        && ours.iter().zip(&theirs).enumerate().all(|(place, (ours, theirs))| match place {
            // The values, behind the scale, the tracker, the factors and the calls.
            4 => add(histogram, kinds, [ours, theirs]),
            5 => {
                add(histogram, kinds, [ours, theirs].map(|text| text.trim_start_matches("grads:")))
            }
            _ => ours == theirs,
        })
}

/// The words of an outcome, without the norms that it has.
fn words(outcome: &str) -> Vec<&str> {
    outcome.split('+').map(|part| part.split('/').next().unwrap_or_default()).collect()
}

/// Runs the program of `seed` and compares it with the answers, one for each operation and one for the start. Returns
/// whether PyTorch has not refused one of them.
fn compare<'a>(
    seed: u64,
    answers: &mut impl Iterator<Item = &'a str>,
    histogram: &mut Histogram,
) -> Result<bool, String> {
    let program = generate::program(seed);
    let (kinds, mut machine) = (program.kinds(), Machine::new(&program, &[GPU]));
    let ops: Vec<_> = std::iter::once(None).chain(program.ops.iter().map(Some)).collect();
    // All of them, so that the next program finds its own.
    let answers: Vec<_> = answers.take(ops.len()).collect();
    let (mut here, mut there) = (String::new(), String::new());
    for (done, (op, theirs)) in ops.into_iter().zip(answers).enumerate() {
        let ours = machine.answer(op);
        let [(outcome, state), (expected, expected_state)] =
            [&ours[..], theirs].map(|line| line.split_once(' ').unwrap_or((line, "=")));
        for (last, state) in [(&mut here, state), (&mut there, expected_state)] {
            if state != "=" {
                state.clone_into(last);
            }
        }
        if expected == "error:" {
            // Its kernel that unscales has no bf16.
            return Ok(false);
        }
        let is_same = words(outcome) == words(expected);
        if !(is_same && add_states(histogram, &kinds, [&here, &there])) {
            let what = format!("TCH_AMP_SEED={seed} at operation {done}, {op:?}");
            return Err(format!("{what}\n  here:    {ours}\n  PyTorch: {theirs}"));
        }
    }
    Ok(true)
}

#[test]
fn programs_on_a_gpu_have_pythons_outcomes_on_the_same_gpu() {
    if !python_can_have_the_gpu() {
        return;
    }
    let Some(oracle) = Oracle::find("scaler_programs.py") else { return };
    let seeds = seeds("TCH_AMP_PROGRAMS", PROGRAMS);
    let seeds = seeds.start..seeds.end.min(seeds.start + ON_GPUS);
    let mut programs = Vec::new();
    for seed in seeds.clone() {
        writeln!(programs, "{}", generate::program(seed).line(true)).unwrap();
    }
    let answers = oracle.run(&["--cuda"], std::str::from_utf8(&programs).unwrap());
    if answers.is_empty() {
        skipped("Python has no GPU here");
        return;
    }
    let (mut answers, mut histogram) = (answers.lines(), Histogram::default());
    let (mut differences, mut whole) = (Vec::new(), 0);
    for seed in seeds.clone() {
        match compare(seed, &mut answers, &mut histogram) {
            Ok(is_whole) => whole += u64::from(is_whole),
            Err(difference) => differences.push(difference),
        }
    }
    println!("{whole} of {} programs are ones that PyTorch does not refuse", seeds.clone().count());
    histogram.print("values, gradients after scaler operations");
    assert!(histogram.within(NEAR) >= NEAR_SHARE, "{histogram}");
    let count = differences.len();
    differences.truncate(5);
    assert!(count == 0, "{count} programs differ:\n{}", differences.join("\n"));
    assert!(whole >= (seeds.end - seeds.start) / 2, "PyTorch refuses too many programs");
}
