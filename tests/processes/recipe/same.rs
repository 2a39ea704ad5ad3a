//! Ways to compute the same training.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::Device;

use recipes::gpt::options::Options;
use recipes::gpt::{self, Run};
use recipes::measure::LOSS;
use recipes::{Ended, Interrupt};
use tch_amp::Amp;

/// To be held while random numbers are drawn, because the generator belongs to the whole process.
pub fn alone() -> MutexGuard<'static, ()> {
    static RANDOM: Mutex<()> = Mutex::new(());
    RANDOM.lock().unwrap_or_else(PoisonError::into_inner)
}

fn options(amp: Amp) -> Options {
    let (options, _) = gpt::small(amp, 6).unwrap();
    Options { layers: 2, length: 32, rows: 4, recompute: false, ..options }
}

fn run(options: &Options) -> Run {
    let _random = alone();
    let (_, text) = gpt::small(Amp::Off, 6).unwrap();
    let run = gpt::run_alone(options, &text, Device::Cpu, &Interrupt::never()).unwrap();
    assert_eq!((run.ended, run.log.rows().len()), (Ended::Finished, 6));
    run
}

fn losses(options: &Options) -> Vec<f64> {
    run(options).log.series(LOSS).into_iter().map(|point| point.1).collect()
}

#[test]
fn recomputing_changes_no_bit_with_dropout_either() {
    for amp in [Amp::Off, Amp::Bf16] {
        let kept = options(amp);
        let recomputed = Options { recompute: true, ..kept.clone() };
        assert_eq!(losses(&recomputed), losses(&kept), "{amp:?}");
        let without = Options { dropout: 0.0, ..kept.clone() };
        assert_ne!(losses(&without), losses(&kept), "dropout should change the losses");
    }
}

/// One batch of 8 excerpts, two of 4, and four of 2: the same excerpts and, but for rounding, the same gradients.
#[test]
fn micro_batches_add_up_to_the_batch() {
    let kept = Options { dropout: 0.0, ..options(Amp::Off) };
    let whole = losses(&Options { rows: 8, micro_batches: 1, ..kept.clone() });
    for (rows, micro_batches) in [(4, 2), (2, 4)] {
        let parts = losses(&Options { rows, micro_batches, ..kept.clone() });
        for (part, whole) in parts.iter().zip(&whole) {
            assert!((part / whole - 1.0).abs() < 1e-4, "{parts:?} and {whole:?}");
        }
    }
    assert!(whole[5] < whole[0] - 0.5, "the model should learn: {whole:?}");
}
