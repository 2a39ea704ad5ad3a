//! What a step of a fused optimizer costs on a GPU: launches, memory, and no synchronization. Its results equal the
//! CPU's.

use tch::{Device, Kind, Tensor};
use tch_amp::optim::{
    Adafactor, AdamW, Algorithm, AmpOptimizer, Lion, MasterWeights, NAdam, Sgd, Step,
};

use crate::training::{
    GPUS, MODES, Training, assert_computes_as_the_cpu, has_numbers_of_each_parameter, scaled,
    scaler_numbers,
};
use testkit::optimizers::{algorithms, rmsprop};
use testkit::simulation::{Counts, Simulation};
use testkit::to_f64;

/// The most launches of a later step of one group with everything that a scaler may pass, and of each further chunk of
/// 2^20 numbers. The table in the documentation of `MasterWeights` states them.
fn documented_launches(algorithm: Algorithm, (kind, masters): (Kind, MasterWeights)) -> (i64, i64) {
    // libtorch has no fused kernels for these.
    let composed = matches!(algorithm, Algorithm::RmsProp(_) | Algorithm::Lion(_));
    match masters {
        MasterWeights::None if composed && kind == Kind::Float => (18, 15),
        MasterWeights::None if composed => (19, 16),
        MasterWeights::Float if composed => (20, 16),
        MasterWeights::Remainder if composed => (26, 23),
        MasterWeights::StochasticRounding { .. } if composed => (60, 42),
        MasterWeights::None => (5, 0),
        MasterWeights::Float => (6, 2),
        MasterWeights::Remainder => (12, 9),
        MasterWeights::StochasticRounding { .. } => (46, 28),
        other => panic!("nothing is documented of {other:?} with {kind:?}"),
    }
}

/// Sizes of 16 to 300 numbers.
fn small(count: i64) -> Vec<Vec<i64>> {
    (0..count).map(|index| vec![16 + (index * 37) % 285]).collect()
}

/// A step with everything that a scaler may pass.
fn scaled_step(training: &mut Training) {
    training.opt.update(&scaled(&scaler_numbers())).unwrap();
}

/// A kernel that takes five lists has room for 210 parameters in its arguments, and others for more: each operator on
/// 400 launches at most two.
#[test]
fn a_step_launches_as_often_for_many_small_parameters_as_for_few() {
    let Some(simulation) = Simulation::find() else { return };
    for mode in MODES {
        for algorithm in algorithms().into_iter().filter(|it| !has_numbers_of_each_parameter(it)) {
            let launches = [4, 40, 400].map(|count| {
                let mut training = Training::new(algorithm, mode, &GPUS[..1], &small(count));
                training.step();
                let ((), plain) = simulation.count(|| training.opt.step().unwrap());
                assert_eq!(plain.host_syncs, 0, "{algorithm:?} {mode:?}");
                let ((), scaled) = simulation.count(|| scaled_step(&mut training));
                // For the three numbers created here, which a scaler already has on the device.
                assert_eq!(scaled.host_syncs, 3, "{algorithm:?} {mode:?}");
                (plain.launches, scaled.launches)
            });
            let context = format!("{algorithm:?} {mode:?}: {launches:?}");
            let [few, some, many] = launches;
            assert_eq!(few, some, "{context}");
            assert!(many.0 <= 2 * few.0 && many.1 <= 2 * few.1, "{context}");
            let documented = documented_launches(algorithm, mode).0;
            assert!(few.0.max(few.1) <= documented, "{context}");
        }
    }
}

/// They are on the device, where nobody waits for them.
#[test]
fn numbers_of_each_parameter_are_not_waited_for() {
    let Some(simulation) = Simulation::find() else { return };
    for algorithm in algorithms().into_iter().filter(has_numbers_of_each_parameter) {
        for mode in MODES {
            let sizes = [vec![40, 30], vec![17], vec![2, 3, 4]];
            let mut training = Training::new(algorithm, mode, &GPUS[..1], &sizes);
            training.step();
            let ((), plain) = simulation.count(|| training.opt.step().unwrap());
            assert_eq!(plain.host_syncs, 0, "{algorithm:?} {mode:?}");
            let ((), scaled) = simulation.count(|| scaled_step(&mut training));
            // For the three numbers created here, which a scaler already has on the device.
            assert_eq!(scaled.host_syncs, 3, "{algorithm:?} {mode:?}");
        }
    }
}

#[test]
fn each_further_chunk_launches_as_often_as_documented() {
    let Some(simulation) = Simulation::find() else { return };
    for algorithm in [AdamW::default().into(), rmsprop().into()] {
        for mode in MODES {
            let launches = [1, 3].map(|chunks| {
                let sizes = vec![vec![1 << 20]; chunks];
                let mut training = Training::new(algorithm, mode, &GPUS[..1], &sizes);
                training.step();
                training.backward();
                simulation.count(|| scaled_step(&mut training)).1.launches
            });
            let each = documented_launches(algorithm, mode).1;
            assert_eq!(launches[1] - launches[0], 2 * each, "{mode:?}: {launches:?}");
        }
    }
}

/// The bytes of scratch memory for a chunk, as the documentation of `MasterWeights` states them.
const MOST_SCRATCH: f64 = 16.0 * 1024.0 * 1024.0;

fn peak(simulation: &Simulation, mode: (Kind, MasterWeights), sizes: &[Vec<i64>]) -> f64 {
    let mut training = Training::new(AdamW::default().into(), mode, &GPUS[..1], sizes);
    training.step();
    training.backward();
    let (_, Counts { peak_bytes, .. }) = simulation.count(|| training.opt.step().unwrap());
    println!("{mode:?}: {:.2} bytes a number", peak_bytes as f64 / training.numbers() as f64);
    peak_bytes as f64
}

#[test]
fn a_step_of_a_large_model_needs_at_most_four_bytes_for_each_number() {
    let Some(simulation) = Simulation::find() else { return };
    for sizes in [vec![vec![4 << 20]; 2], vec![vec![300, 257]; 100]] {
        let numbers: i64 = sizes.iter().map(|size: &Vec<i64>| size.iter().product::<i64>()).sum();
        for mode in MODES {
            let peak = peak(&simulation, mode, &sizes);
            assert!(peak <= 4.0 * numbers as f64, "{mode:?} needs {peak} bytes");
            assert!(peak <= MOST_SCRATCH, "{mode:?} needs {peak} bytes");
            assert!(mode.1 != MasterWeights::None || peak == 0.0, "{mode:?} needs {peak} bytes");
        }
    }
}

/// Without a fused kernel, a row of f32 scratch memory for the parameter, its gradient, each of its three states and
/// intermediate results.
#[test]
fn a_composed_step_of_a_large_model_needs_memory_for_one_chunk() {
    let Some(simulation) = Simulation::find() else { return };
    for mode in MODES {
        let mut training =
            Training::new(rmsprop().into(), mode, &GPUS[..1], &[vec![4 << 20], vec![4 << 20]]);
        training.step();
        training.backward();
        let (_, Counts { peak_bytes, .. }) = simulation.count(|| training.opt.step().unwrap());
        let rows = 24.0 * 1024.0 * 1024.0;
        assert!(peak_bytes as f64 <= rows + MOST_SCRATCH, "{mode:?} needs {peak_bytes} bytes");
        let none = mode.1 == MasterWeights::None;
        assert!(!none || peak_bytes as f64 <= rows, "{mode:?} needs {peak_bytes} bytes");
    }
}

/// Parameters that fill more than one chunk: some are parts of one, some span several, and one is not contiguous.
#[test]
fn chunks_compute_the_same_as_the_cpu() {
    let Some(_simulation) = Simulation::find() else { return };
    let sizes = [vec![700_001], vec![0], vec![7, 5], vec![1_500_000], vec![], vec![300]];
    let (sgd, lion) = (
        Sgd { momentum: 0.9, ..Default::default() },
        Lion { weight_decay: 0.1, ..Default::default() },
    );
    let fused = [AdamW::default().into(), sgd.into()];
    let composed = [rmsprop().into(), lion.into(), NAdam::default().into()];
    let composed = composed.into_iter().chain([Adafactor::default().into()]);
    let all = fused.into_iter().map(|algorithm| (algorithm, true));
    for (algorithm, rounds) in all.chain(composed.map(|algorithm| (algorithm, false))) {
        let differs = |mode| rounds && mode == (Kind::BFloat16, MasterWeights::None);
        for mode in MODES.into_iter().filter(|mode| !differs(*mode)) {
            assert_computes_as_the_cpu(algorithm, mode, &sizes);
        }
    }
}

/// Many parameters were written to: training resumes from the new values, and the other master weights are unchanged.
#[test]
fn stale_masters_are_updated_together() {
    let Some(simulation) = Simulation::find() else { return };
    for mode in MODES.into_iter().filter(|mode| mode.1 != MasterWeights::None) {
        let launches = [4, 40].map(|count| {
            let mut sizes = small(count);
            sizes.push(vec![(1 << 20) + 7]);
            let mut training = Training::new(AdamW::default().into(), mode, &GPUS[..1], &sizes);
            training.step();
            let before = masters(&training);
            for parameter in &training.parameters {
                let _part = tch::no_grad(|| parameter.narrow(0, 3, 9).fill_(0.25));
            }
            drop(training.opt.state_dict().unwrap());
            for ((mut want, now), parameter) in
                before.into_iter().zip(masters(&training)).zip(&training.parameters)
            {
                if mode.1 == MasterWeights::Remainder {
                    want = to_f64(parameter);
                }
                want[3..12].fill(0.25);
                assert!(want == now, "{mode:?}");
            }
            for parameter in &training.parameters {
                let _all = tch::no_grad(|| parameter.shallow_clone().zero_());
            }
            simulation.count(|| training.opt.step().unwrap()).1.launches
        });
        assert_eq!(launches[0], launches[1], "{mode:?}");
    }
}

/// The master weights that exist.
fn masters(training: &Training) -> Vec<Vec<f64>> {
    let places = 0..training.parameters.len();
    let masters = places.filter_map(|index| training.opt.master_weight(index).unwrap());
    masters.map(|master| to_f64(&master)).collect()
}

/// The kernels unscale in place, and gradients can share memory.
#[test]
fn gradients_in_one_memory_are_divided_once_by_a_step_without_a_scaler() {
    let Some(_simulation) = Simulation::find() else { return };
    for algorithm in algorithms() {
        let step = |shares: bool| {
            let gpu = Device::Cuda(0);
            let leaf = |()| Tensor::ones([3, 5], (Kind::Float, gpu)).set_requires_grad(true);
            let all = [(); 2].map(leaf);
            let [a, b] = &all;
            let loss = match shares {
                true => ((a.unsqueeze(0) + b.unsqueeze(0)) * 3.0).sum(None),
                false => (a * 3.0).sum(None) + (b * 3.0).sum(None),
            };
            loss.backward();
            let mut opt = algorithm.build(&all, 0.1).unwrap();
            let scale = Tensor::from(8f32).to_device(gpu);
            opt.update(&Step::default().with_grad_scale(&scale)).unwrap();
            all.map(|w| to_f64(&w))
        };
        assert_eq!(step(true), step(false), "{algorithm:?}");
    }
}
