//! The counters of the simulation.

use tch::{Cuda, Device, Kind, Tensor};

use testkit::simulation::{Counts, Simulation};

fn ones(size: &[i64], device: usize) -> Tensor {
    Tensor::ones(size, (Kind::Float, Device::Cuda(device)))
}

#[test]
fn an_item_is_one_synchronization_and_an_addition_one_launch() {
    let Some(simulation) = Simulation::find() else { return };
    let one = ones(&[], 0);
    let (sum, counts) = simulation.count(|| &one + &one);
    assert_eq!(counts, Counts { launches: 1, host_syncs: 0, allocations: 1, peak_bytes: 512 });
    let (two, counts) = simulation.count(|| sum.double_value(&[]));
    assert_eq!(two, 2.0);
    assert_eq!(counts, Counts { host_syncs: 1, ..Default::default() });
}

#[test]
fn only_blocking_copies_are_synchronizations() {
    let Some(simulation) = Simulation::find() else { return };
    let there = ones(&[4], 1);
    let syncs = |f: &dyn Fn() -> Tensor| simulation.count(f).1.host_syncs;
    assert_eq!(syncs(&|| there.to_device(Device::Cpu)), 1);
    assert_eq!(syncs(&|| there.to_device_(Device::Cpu, Kind::Float, true, false)), 0);
    assert_eq!(syncs(&|| there.to_device(Device::Cuda(0))), 0);
    let here = Tensor::ones([4], (Kind::Float, Device::Cpu));
    assert_eq!(syncs(&|| here.to_device(Device::Cuda(0))), 1);
    assert_eq!(syncs(&|| here.to_device_(Device::Cuda(0), Kind::Float, true, false)), 0);
    assert_eq!(simulation.count(|| Cuda::synchronize(1)).1.host_syncs, 1);
    assert_eq!(syncs(&|| there.nonzero()), 1);
}

#[test]
fn the_peak_is_the_most_memory_held_at_once() {
    let Some(simulation) = Simulation::find() else { return };
    let ((), counts) = simulation.count(|| {
        drop(ones(&[1 << 18], 0));
        drop(ones(&[1 << 18], 0));
    });
    assert_eq!((counts.allocations, counts.peak_bytes), (2, 4 << 18));
}

#[test]
fn views_launch_nothing() {
    let Some(simulation) = Simulation::find() else { return };
    let there = ones(&[4, 3], 0);
    let (view, counts) = simulation.count(|| there.view([2, 6]).slice(1, 0, 4, 2).transpose(0, 1));
    assert_eq!((view.size(), counts), (vec![2, 2], Counts::default()));
}

#[test]
fn tensors_of_a_list_share_a_launch_if_they_are_alike() {
    let Some(simulation) = Simulation::find() else { return };
    let leaf = |kind: Kind, device: usize| {
        let leaf = ones(&[4], device).to_kind(kind).set_requires_grad(true);
        leaf.sum(kind).backward();
        leaf
    };
    let launches = |leaves: &[Tensor]| {
        simulation.count(|| tch_amp::gradients::clip_grad_value(leaves, 1.0).unwrap()).1.launches
    };
    let one = launches(&[leaf(Kind::Float, 0)]);
    assert_eq!(launches(&[leaf(Kind::Float, 0), leaf(Kind::Float, 0)]), one);
    assert_eq!(launches(&[leaf(Kind::Float, 0), leaf(Kind::Half, 0)]), 2 * one);
}
