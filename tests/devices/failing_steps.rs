//! Steps of the fused optimizers in which an allocation fails: they change everything or nothing.

use tch::{Device, Kind, Tensor};
use tch_amp::optim::{AdamW, Algorithm, AmpOptimizer, MasterWeights, Step};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{GradScaler, Result};

use crate::training::{GPUS, MODES, Training, has_numbers_of_each_parameter};
use testkit::optimizers::algorithms;
use testkit::simulation::Simulation;

const SIZES: [&[i64]; 5] = [&[70], &[3, 5], &[], &[40], &[9]];

fn training(algorithm: Algorithm, mode: (Kind, MasterWeights), devices: &[Device]) -> Training {
    // All steps up to an allocation are taken for each of them.
    let most = if has_numbers_of_each_parameter(&algorithm) { 2 } else { SIZES.len() };
    let sizes: Vec<_> = SIZES[..most].iter().map(|size| size.to_vec()).collect();
    Training::new(algorithm, mode, devices, &sizes)
}

/// How a step is taken.
#[derive(Clone, Copy, Debug)]
enum How {
    Plain,
    /// With the scale, the clipping factor and the overflow flag that a scaler may pass.
    Scaled,
}

fn step(training: &mut Training, how: How, numbers: &[Tensor; 3]) -> Result<()> {
    let [scale, clip, found_inf] = numbers;
    let step = Step::default();
    let step = step.with_grad_scale(scale).with_clip_factor(clip).with_found_inf(found_inf);
    match how {
        How::Plain => training.opt.step(),
        How::Scaled => training.opt.update(&step),
    }
}

/// The GPUs, with the CPU between them.
const ALL: [Device; 3] = [GPUS[0], Device::Cpu, GPUS[1]];

/// Checks what a step leaves behind when each of its allocations fails. `prepare` brings the training up to the step,
/// and `compare_state` is whether there is state before the step.
fn fail_each(
    simulation: &Simulation,
    new: impl Fn() -> Training,
    prepare: impl Fn(&mut Training),
    how: How,
    compare_state: bool,
    context: &str,
) {
    let numbers = [1.0f32, 0.5, 0.0].map(|value| Tensor::from(value).to_device(GPUS[0]));
    let mut want = new();
    prepare(&mut want);
    step(&mut want, how, &numbers).unwrap();
    let after = want.values();
    for n in 1.. {
        let mut training = new();
        prepare(&mut training);
        let before = (training.values(), compare_state.then(|| training.state()));
        simulation.fail_allocation(n);
        let result = step(&mut training, how, &numbers);
        if simulation.fail_allocation(0) > 0 {
            result.unwrap();
            break;
        }
        let context = format!("allocation {n} of {context}");
        match result {
            Err(error) if error.is_out_of_memory() => {}
            other => panic!("{context}: {other:?}"),
        }
        let now = (training.values(), compare_state.then(|| training.state()));
        assert!(now == before, "{context} changed something");
        step(&mut training, how, &numbers).unwrap();
        assert!(training.values() == after, "{context} changed the result of the next step");
        assert!(
            training.state() == want.state(),
            "{context} changed the state after the next step"
        );
    }
}

fn for_every_setup(test: impl Fn(Algorithm, (Kind, MasterWeights), &[Device], How, &str)) {
    for algorithm in algorithms() {
        for mode in MODES {
            for (devices, how) in [(&GPUS[..1], How::Plain), (&ALL, How::Scaled)] {
                let context = format!("{how:?} {algorithm:?} {mode:?} on {devices:?}");
                test(algorithm, mode, devices, how, &context);
            }
        }
    }
}

#[test]
fn a_step_that_runs_out_of_memory_changes_nothing() {
    let Some(simulation) = Simulation::find() else { return };
    for_every_setup(|algorithm, mode, devices, how, context| {
        let prepare = |training: &mut Training| {
            training.step();
            training.backward();
        };
        let new = || training(algorithm, mode, devices);
        fail_each(&simulation, new, prepare, how, true, context);
    });
}

#[test]
fn a_first_step_that_runs_out_of_memory_changes_nothing() {
    let Some(simulation) = Simulation::find() else { return };
    for_every_setup(|algorithm, mode, devices, how, context| {
        let new = || training(algorithm, mode, devices);
        fail_each(&simulation, new, Training::backward, how, false, context);
    });
}

/// A scaler first checks the gradients. If an allocation fails there or in the step, the optimizer is unchanged.
#[test]
fn a_scalers_step_that_runs_out_of_memory_leaves_the_optimizer_unchanged() {
    let Some(simulation) = Simulation::find() else { return };
    let some = algorithms().into_iter().skip(1).step_by(3);
    for (algorithm, mode) in some.flat_map(|algorithm| MODES.map(|mode| (algorithm, mode))) {
        for max_norm in [None, Some(0.5)] {
            let take = |training: &mut Training, scaler: &mut GradScaler| match max_norm {
                None => scaler.step(&mut training.opt),
                Some(max) => scaler.step_clip_norm(&mut training.opt, max),
            };
            let new = || {
                let mut training = training(algorithm, mode, &GPUS);
                training.step();
                training.backward();
                let config = GradScalerConfig { init_scale: 4.0, ..Default::default() };
                let scaler = config.build(GPUS[0]).unwrap();
                drop(scaler.scale(&Tensor::from(1f32).to_device(GPUS[0])).unwrap());
                (training, scaler)
            };
            let (mut want, mut scaler) = new();
            drop(take(&mut want, &mut scaler).unwrap());
            for n in 1.. {
                let (mut training, mut scaler) = new();
                let before = (training.values(), training.state());
                simulation.fail_allocation(n);
                let result = take(&mut training, &mut scaler);
                if simulation.fail_allocation(0) > 0 {
                    drop(result.unwrap());
                    break;
                }
                let context =
                    format!("allocation {n} of {algorithm:?} {mode:?} clipped to {max_norm:?}");
                assert!(result.is_err(), "{context}");
                let now = (training.values(), training.state());
                assert!(now == before, "{context} changed something");
                scaler.abandon(&mut training.opt).unwrap();
                drop(take(&mut training, &mut scaler).unwrap());
                assert!(
                    training.values() == want.values(),
                    "{context} changed the result of the next step"
                );
                assert!(
                    training.state() == want.state(),
                    "{context} changed the state after the next step"
                );
            }
        }
    }
}

/// Values that are written to a parameter after a failed first step must count, although the step has created state.
#[test]
fn a_failed_first_step_does_not_remember_the_parameters() {
    let Some(simulation) = Simulation::find() else { return };
    for mode in MODES {
        for n in 1.. {
            let mut training = training(AdamW::default().into(), mode, &GPUS);
            training.backward();
            simulation.fail_allocation(n);
            let failed = training.opt.step();
            if simulation.fail_allocation(0) > 0 {
                failed.unwrap();
                break;
            }
            assert!(failed.is_err());
            for parameter in &training.parameters {
                let _filled = tch::no_grad(|| parameter.shallow_clone().fill_(64.0));
            }
            training.opt.step().unwrap();
            for parameter in &training.parameters {
                let off = (parameter.to_kind(Kind::Double) - 64.0).abs().max().double_value(&[]);
                assert!(off < 1.0, "{mode:?}, allocation {n}: {off}");
            }
        }
    }
}

#[test]
fn either_all_gradients_become_f32_or_none() {
    let Some(simulation) = Simulation::find() else { return };
    for n in 1.. {
        let mut training = training(AdamW::default().into(), MODES[2], &GPUS);
        training.backward();
        let before = training.values();
        simulation.fail_allocation(n);
        let result = training.opt.accumulate_in_f32();
        if simulation.fail_allocation(0) > 0 {
            result.unwrap();
            assert!(n > 5, "each gradient needs an allocation");
            break;
        }
        assert!(result.is_err() && training.values() == before, "allocation {n}");
        let kinds = training.parameters.iter().map(|parameter| parameter.grad().kind());
        assert!(kinds.into_iter().all(|kind| kind == Kind::BFloat16), "allocation {n}");
        training.opt.accumulate_in_f32().unwrap();
        assert!(training.parameters.iter().all(|p| p.grad().kind() == Kind::Float));
        training.opt.step().unwrap();
    }
}
