//! The examples with options take a few steps on each of the two GPUs, of which the second is never the current one.

#[path = "../../examples/matmul.rs"]
#[allow(dead_code, reason = "the tests choose the device")]
mod matmul;

use crate::training::GPUS;
use recipes::PRECISIONS;
use recipes::{Ended, Interrupt, Options, Ranks, Training};
use recipes::{gan, gpt, images, inference, text_classifier};
use tch_amp::Amp;
use testkit::files::Folder;
use testkit::simulation::Simulation;

#[test]
fn custom_functions_run_in_the_dtype_of_the_region() {
    let Some(_simulation) = Simulation::find() else { return };
    for gpu in GPUS {
        matmul::run(gpu).unwrap();
    }
}

#[test]
fn two_networks_train_with_a_scale_for_each_loss_and_plain_bce_is_refused() {
    let Some(_simulation) = Simulation::find() else { return };
    for gpu in GPUS {
        for amp in PRECISIONS {
            let run = gan::short_run(gpu, amp, 4).unwrap();
            assert!(run.skipped == 0 || amp == Amp::Fp16, "{run:?}");
        }
        let refusal = gan::bce::plain_bce(gpu).unwrap();
        assert!(refusal.contains("unsafe to autocast"), "{refusal}");
    }
}

#[test]
fn a_step_of_two_networks_does_not_synchronize() {
    let Some(simulation) = Simulation::find() else { return };
    for amp in PRECISIONS {
        let common = Options { amp, ..Options::silent("gan", 9) };
        let mut trainer =
            gan::train::Trainer::new(&gan::options::Options::new(common), GPUS[0]).unwrap();
        // The first step makes the scales and the states of the optimizers.
        trainer.step().unwrap();
        let (_, counts) = simulation.count(|| trainer.step().unwrap());
        assert_eq!(counts.host_syncs, 0, "{amp:?}");
    }
}

#[test]
fn a_file_that_was_traced_in_a_region_runs_on_the_device_of_the_trace() {
    let Some(_simulation) = Simulation::find() else { return };
    for gpu in GPUS {
        let folder = Folder::new();
        let compared = inference::run(gpu, &folder.file("inference.pt"), 4, 2).unwrap();
        assert_eq!((compared.inputs.device(), compared.outputs.device()), (gpu, gpu));
    }
}

#[test]
fn the_gpt_trains_recomputes_evaluates_its_averages_and_writes() {
    let Some(_simulation) = Simulation::find() else { return };
    for gpu in GPUS {
        for amp in PRECISIONS {
            let run = gpt::short_run(gpu, amp, 4).unwrap();
            assert_eq!(run.log.rows().len(), 4, "{run:?}");
            let peak = run.log.last(recipes::measure::PEAK_MEMORY);
            assert!(peak.is_some_and(|bytes| bytes > 1e6), "of the tensors of {gpu:?}: {peak:?}");
        }
    }
}

#[test]
fn a_step_of_the_gpt_does_not_synchronize() {
    let Some(simulation) = Simulation::find() else { return };
    for gpu in GPUS {
        for amp in PRECISIONS {
            let (options, text) = gpt::small(amp, 10).unwrap();
            let ranks = Ranks::alone();
            let mut trainer = gpt::train::Trainer::new(&options, &text, gpu, &ranks).unwrap();
            drop(trainer.step().unwrap());
            let ((), counts) = simulation.count(|| {
                for _ in 0..3 {
                    drop(trainer.step().unwrap());
                }
            });
            assert!(counts.launches > 100, "{counts:?}");
            assert_eq!(counts.host_syncs, 0, "{amp:?} on {gpu:?}: {counts:?}");
        }
    }
}

#[test]
fn the_text_classifier_trains_without_synchronizing_and_goes_on() {
    let Some(simulation) = Simulation::find() else { return };
    for gpu in GPUS {
        for amp in PRECISIONS {
            let (whole, data) = text_classifier::small(amp, 6).unwrap();
            let task = text_classifier::Task::new(&whole, &data).unwrap();
            let ranks = Ranks::alone();
            let trainer = text_classifier::train::Trainer::new(&whole, &task, gpu, &ranks);
            let mut trainer = trainer.unwrap();
            drop(trainer.step().unwrap());
            let ((), counts) = simulation.count(|| drop(trainer.step().unwrap()));
            assert!(counts.launches > 50, "{counts:?}");
            assert_eq!(counts.host_syncs, 0, "{amp:?} on {gpu:?}: {counts:?}");

            let folder = Folder::new();
            let mut options = whole.clone();
            options.common.checkpoints = Some(folder.0.clone());
            let run = |options: &text_classifier::options::Options, interrupt| {
                text_classifier::run_alone(options, &data, gpu, &interrupt).unwrap()
            };
            let part = run(&options, Interrupt::at_once());
            assert_eq!(part.ended, Ended::Interrupted { step: 1 });
            options.common.resume = true;
            let resumed = run(&options, Interrupt::never());
            let whole = run(&whole, Interrupt::never());
            let losses = |run: &text_classifier::Run| run.log.series("loss");
            assert_eq!((losses(&resumed).len(), &resumed.test), (6, &whole.test));
            assert_eq!(losses(&resumed), losses(&whole));
        }
    }
}

#[test]
fn an_interrupted_run_of_the_gpt_goes_on_with_the_random_numbers_of_its_gpu() {
    let Some(_simulation) = Simulation::find() else { return };
    for gpu in GPUS {
        let (whole, text) = gpt::small(Amp::Fp16, 5).unwrap();
        let folder = Folder::new();
        let mut options = whole.clone();
        options.common.checkpoints = Some(folder.0.clone());
        let run = |options: &gpt::options::Options, interrupt| {
            gpt::run_alone(options, &text, gpu, &interrupt).unwrap()
        };
        let losses = |run: &gpt::Run| run.log.series(recipes::measure::LOSS);

        let part = run(&options, Interrupt::at_once());
        assert_eq!(part.ended, Ended::Interrupted { step: 1 });
        options.common.resume = true;
        let resumed = run(&options, Interrupt::never());
        let whole = run(&whole, Interrupt::never());
        assert_eq!((losses(&resumed).len(), resumed.sample.as_str()), (5, whole.sample.as_str()));
        assert_eq!(losses(&resumed), losses(&whole));
    }
}

#[test]
fn the_images_are_learned_without_synchronizing_and_the_run_goes_on() {
    let Some(simulation) = Simulation::find() else { return };
    for gpu in GPUS {
        for amp in PRECISIONS {
            let (whole, data) = images::small(amp, 6).unwrap();
            let set = images::batch::Set::new(&data, whole.moved, gpu);
            let ranks = Ranks::alone();
            let trainer = images::train::Trainer::new(&whole, &data, &set, gpu, &ranks);
            let mut trainer = trainer.unwrap();
            drop(trainer.step().unwrap());
            // The last ones also average the weights.
            let ((), counts) = simulation.count(|| {
                for _ in 2..=6 {
                    drop(trainer.step().unwrap());
                }
            });
            assert!(counts.launches > 100, "{counts:?}");
            assert_eq!(counts.host_syncs, 0, "{amp:?} on {gpu:?}: {counts:?}");

            let folder = Folder::new();
            let mut options = whole.clone();
            options.common.checkpoints = Some(folder.0.clone());
            let run = |options: &images::options::Options, interrupt| {
                images::run_alone(options, &data, gpu, &interrupt).unwrap()
            };
            let part = run(&options, Interrupt::at_once());
            assert_eq!(part.ended, Ended::Interrupted { step: 1 });
            options.common.resume = true;
            let resumed = run(&options, Interrupt::never());
            let whole = run(&whole, Interrupt::never());
            let losses = |run: &images::Run| run.log.series(recipes::measure::LOSS);
            assert_eq!((losses(&resumed).len(), losses(&whole)), (6, losses(&resumed)));
            let [resumed, whole] = [resumed, whole].map(|run| run.tested.unwrap().averaged);
            assert_eq!(resumed, whole);
        }
    }
}
