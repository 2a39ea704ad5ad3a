//! Activation checkpointing: the memory of the activations, launches and synchronizations.

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::Autocast;
use tch_amp::memory::DeviceMemory;
use tch_amp::recompute::{Recomputed, checkpointed};

use testkit::simulation::{Counts, Simulation};

const BLOCKS: i64 = 6;
const ROWS: i64 = 128;
const WIDTH: i64 = 64;
/// One activation of a block, in bytes.
const ACTIVATION: i64 = ROWS * 4 * WIDTH * 4;

/// Blocks that keep four activations of four times the width.
fn model(vs: &VarStore, recomputed: bool) -> nn::Sequential {
    let mut model = nn::seq();
    for i in 0..BLOCKS {
        let up = nn::linear(vs.root() / i / "up", WIDTH, 4 * WIDTH, Default::default());
        let down = nn::linear(vs.root() / i / "down", 4 * WIDTH, WIDTH, Default::default());
        let block = nn::seq().add(up).add_fn(|xs| xs.sin().tanh().sigmoid()).add(down);
        model = if recomputed { model.add(Recomputed::new(block)) } else { model.add(block) };
    }
    model
}

/// What a forward and a backward pass make the device do, after one that has made the gradients.
fn iteration(simulation: &Simulation, enabled: bool, recomputed: bool) -> Counts {
    let device = Device::Cuda(0);
    let vs = VarStore::new(device);
    let model = model(&vs, recomputed);
    let xs = Tensor::randn([ROWS, WIDTH], (Kind::Float, device));
    let iterate = || {
        let region = Autocast::new(device).enabled(enabled).dtype(Kind::BFloat16);
        let loss = region.run(|| model.forward(&xs).square().mean(Kind::Float)).unwrap();
        loss.backward();
    };
    iterate();
    simulation.count(iterate).1
}

#[test]
fn only_the_activations_of_one_block_are_in_memory() {
    let Some(simulation) = Simulation::find() else { return };
    let [without, with] = [false, true].map(|recomputed| iteration(&simulation, false, recomputed));
    assert_eq!((without.host_syncs, with.host_syncs), (0, 0));
    assert!(without.peak_bytes > 3 * BLOCKS * ACTIVATION, "{without:?}");
    // Those of one block, with the gradients that pass through it, and the inputs of all.
    let most = 8 * ACTIVATION + BLOCKS * ACTIVATION / 4;
    assert!(with.peak_bytes < most, "{with:?}, and {without:?} without");
}

/// The bytes that are left by the second of two iterations in one region, in the middle of which there are no more.
#[test]
fn a_backward_pass_inside_of_a_region_leaves_no_inputs_behind() {
    let Some(_simulation) = Simulation::find() else { return };
    let device = Device::Cuda(0);
    let vs = VarStore::new(device);
    let mut model = nn::seq();
    for i in 0..BLOCKS {
        let linear = nn::linear(vs.root() / i, WIDTH, WIDTH, Default::default());
        // An f32 input, which the region casts.
        model = model.add(Recomputed::new(nn::func(move |xs| xs + linear.forward(xs).sin())));
    }
    let xs = Tensor::randn([ROWS, WIDTH], (Kind::Float, device));
    let left = || DeviceMemory::read(device).unwrap().allocated;
    let region = Autocast::new(device).dtype(Kind::BFloat16);
    let after = region.run(|| {
        [(); 3].map(|()| {
            model.forward(&xs).to_kind(Kind::Float).square().mean(Kind::Float).backward();
            left()
        })
    });
    let [_, second, third] = after.unwrap();
    assert_eq!(second, third);
}

/// What the program has dropped is kept neither by the first run nor by the second.
#[test]
fn tensors_of_nodes_that_are_gone_are_not_kept() {
    let Some(simulation) = Simulation::find() else { return };
    let device = Device::Cuda(0);
    let w = Tensor::randn([WIDTH, WIDTH], (Kind::Float, device)).set_requires_grad(true);
    let x = Tensor::randn([ROWS, WIDTH], (Kind::Float, device));
    let peak = |steps: i64| {
        let weight = w.shallow_clone();
        let part = move |x: &[&Tensor]| {
            let mut z = x[0].shallow_clone();
            for _ in 0..steps {
                z = z.matmul(&weight).tanh().detach();
            }
            Ok(z + x[0].matmul(&weight))
        };
        let run = || checkpointed(&[&x], part).unwrap().square().sum(Kind::Float).backward();
        simulation.count(run).1.peak_bytes
    };
    let [_warm, few, many] = [4, 4, 40].map(peak);
    assert_eq!(few, many);
}

#[test]
fn recomputation_does_not_synchronize_in_a_region() {
    let Some(simulation) = Simulation::find() else { return };
    let [without, with] = [false, true].map(|recomputed| iteration(&simulation, true, recomputed));
    assert_eq!((without.host_syncs, with.host_syncs), (0, 0), "{with:?}");
    assert!(with.launches < 2 * without.launches, "{with:?}, and {without:?} without");
    assert!(with.peak_bytes < without.peak_bytes / 2, "{with:?}, and {without:?} without");
}
