//! What a step of Muon costs on a GPU for matrices. Its results equal the CPU's.

use tch::{Kind, Tensor};
use tch_amp::optim::{AdjustLr, AmpOptimizer, MasterWeights, Muon, Step};

use crate::training::{GPUS, MODES, Training, assert_computes_as_the_cpu, scaled, scaler_numbers};
use testkit::simulation::{Simulation, is_model};

/// The launches for each matrix, and for each 2^20 numbers of matrices, as the documentation of `MasterWeights` states
/// them.
pub const FOR_EACH_WIDE: i64 = 17;
const FOR_EACH_TALL: i64 = 19;
pub const FOR_EACH_GROUP: i64 = 18;

fn matrices(mode: (Kind, MasterWeights), size: [i64; 2], count: usize) -> Training {
    let mut training =
        Training::new(Muon::default().into(), mode, &GPUS[..1], &vec![size.into(); count]);
    training.step();
    training.backward();
    training
}

#[test]
fn a_step_launches_as_documented_for_each_matrix_and_does_not_synchronize() {
    let Some(simulation) = Simulation::find() else { return };
    let numbers = scaler_numbers();
    let step = scaled(&numbers);
    for (size, most) in [([5, 8], FOR_EACH_WIDE), ([8, 5], FOR_EACH_TALL)] {
        for mode in MODES {
            let launches = [1, 2, 11].map(|count| {
                let mut training = matrices(mode, size, count);
                let ((), counts) = simulation.count(|| training.opt.update(&step).unwrap());
                assert_eq!(counts.host_syncs, 0, "{mode:?}");
                counts.launches
            });
            let each = launches[1] - launches[0];
            println!("{mode:?}: {each} for each matrix, {} for all", launches[0] - each);
            assert_eq!(launches[2] - launches[0], 10 * each, "{mode:?}: {launches:?}");
            assert_eq!(each, most, "{mode:?}: {launches:?}");
        }
    }
}

#[test]
fn each_group_of_matrices_launches_as_often_as_documented() {
    let Some(simulation) = Simulation::find() else { return };
    let numbers = scaler_numbers();
    let step = scaled(&numbers);
    let launches = [1, 3].map(|count| {
        let mut training = matrices(MODES[0], [2, 1 << 19], count);
        simulation.count(|| training.opt.update(&step).unwrap()).1.launches
    });
    // Each is a chunk as well: copies of f32 and bf16 to scratch memory, unscaling, clipping, three operations, and a
    // copy back.
    let more = FOR_EACH_WIDE + FOR_EACH_GROUP + 8;
    // The blocks of threads that share the numbers of a large norm have counters, which are cleared first.
    let more = more + i64::from(!is_model());
    assert_eq!(launches[1] - launches[0], 2 * more, "{launches:?}");
}

/// Matrices that are parts of a chunk or span several, of which one is not contiguous, with vectors beside them.
#[test]
fn matrices_in_chunks_compute_the_same_as_the_cpu() {
    let Some(_simulation) = Simulation::find() else { return };
    // Each of the shapes has a learning rate of its own.
    let algorithm = Muon { adjust_lr_fn: AdjustLr::MatchRmsAdamW, ..Default::default() }.into();
    let sizes =
        [vec![2, 600_000], vec![0, 4], vec![7, 5], vec![300_000, 3], vec![300], vec![20, 30]];
    for mode in MODES {
        // The kernel for AdamW takes the last elements of a bf16 vector by other instructions than the loop.
        let sizes = if mode.1 == MasterWeights::None { &sizes[..4] } else { &sizes };
        assert_computes_as_the_cpu(algorithm, mode, sizes);
    }
}

/// The orthogonalized momentum of all matrices, and the memory of a group of them and of a composed step.
#[test]
fn a_step_needs_two_bytes_for_each_number_and_memory_for_one_chunk() {
    let Some(simulation) = Simulation::find() else { return };
    let (count, rows, columns) = (130, 64, 512);
    for mode in MODES {
        let sizes = vec![vec![rows, columns]; count];
        // Each of the usual five multiplications needs the memory of one, and time.
        let muon = Muon { ns_steps: 1, ..Default::default() };
        let mut training = Training::new(muon.into(), mode, &GPUS[..1], &sizes);
        training.step();
        training.backward();
        let ((), counts) = simulation.count(|| training.opt.step().unwrap());
        let matrix = (rows * columns) as f64;
        let scratch = match mode.1 {
            MasterWeights::None => 0.0,
            MasterWeights::Float => 4.0,
            MasterWeights::Remainder => 9.0,
            _ => 16.0,
        };
        let chunk = (20.0 + scratch) * f64::from(1 << 20);
        let most = 2.0 * matrix * count as f64 + 10.0 * f64::from(1 << 20) + chunk;
        assert!(counts.peak_bytes as f64 <= most, "{mode:?}: {} > {most}", counts.peak_bytes);
    }
}

/// A flag on the host that is set leaves nothing to compute.
#[test]
fn a_step_that_the_host_skips_multiplies_nothing() {
    let Some(simulation) = Simulation::find() else { return };
    let flag = Tensor::from(1f32);
    let launches = [1, 11].map(|count| {
        let mut training = matrices(MODES[0], [8, 5], count);
        let before = training.values();
        let step = Step::default().with_found_inf(&flag);
        let ((), counts) = simulation.count(|| training.opt.update(&step).unwrap());
        assert!(training.values() == before);
        counts.launches
    });
    assert_eq!(launches[0], launches[1]);
}
