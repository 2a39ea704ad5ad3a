//! Long training on four ranks, with flat memory and descriptors.
//!
//! `TCH_AMP_RANK_STEPS` sets the number of steps, such as 20,000 for a run of minutes.

use std::sync::Barrier;

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::distributed::{DistributedDataParallel, ProcessGroup};
use tch_amp::optim::AdamW;
use tch_amp::scaler::GradScalerConfig;

use super::ranks;
use testkit::programs::this_test;
use testkit::resident_bytes;
use testkit::rng::Rng;

const RANKS: usize = 4;
const STEPS: usize = 400;

/// What the heap may grow by between a quarter of the steps and the last one.
const GROWTH: u64 = 4 << 20;

#[test]
fn ranks_train_with_flat_memory_and_descriptors() {
    // In a process of its own, because the memory and the descriptors are those of the whole process.
    let output = this_test("distributed::soak::process").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    print!("{text}");
}

#[derive(Clone, Copy, Debug)]
struct Held {
    bytes: u64,
    descriptors: usize,
    threads: usize,
}

fn held() -> Held {
    let count = |folder| std::fs::read_dir(folder).unwrap().count();
    let bytes = resident_bytes().expect("Linux tells it");
    Held { bytes, descriptors: count("/proc/self/fd"), threads: count("/proc/self/task") }
}

#[test]
#[ignore = "the process of the test above"]
fn process() {
    tch::set_num_threads(1);
    let steps = std::env::var("TCH_AMP_RANK_STEPS").map_or(STEPS, |steps| steps.parse().unwrap());
    let barrier = Barrier::new(RANKS);
    let results = ranks(RANKS, |group| train(&group, steps, &barrier));
    let (before, after) = (results[0].1[0], results[0].1[1]);
    let skipped = results[0].0;
    println!("{steps} steps of {RANKS} ranks, {skipped} skipped: {before:?}, then {after:?}");
    assert!(results.iter().all(|result| result.0 == skipped));
    assert!(skipped > steps / 20 && skipped < steps / 2, "{skipped} of {steps}");
    assert!(after.bytes < before.bytes + GROWTH, "{before:?} {after:?}");
    assert_eq!((before.descriptors, before.threads), (after.descriptors, after.threads));
}

/// Returns the number of skipped steps, and what the process holds after a quarter of the steps and after the last.
fn train(group: &ProcessGroup, steps: usize, barrier: &Barrier) -> (usize, Vec<Held>) {
    let vs = VarStore::new(Device::Cpu);
    let net = nn::linear(vs.root(), 16, 8, Default::default());
    let mut ddp = DistributedDataParallel::new(group, &vs).unwrap();
    let mut opt = AdamW::default().build(&vs, 1e-3).unwrap();
    opt.shard_over(group).unwrap();
    let config = GradScalerConfig { growth_interval: 8, ..Default::default() };
    let mut scaler = config.build(Device::Cpu).unwrap();
    let xs = Tensor::ones([4, 16], (Kind::Float, Device::Cpu)) * (group.rank() as f64 / 8.0);
    let mut rng = Rng::new(group.rank() as u64);
    let (mut skipped, mut samples) = (0, Vec::new());
    for step in 1..=steps {
        opt.zero_grad().unwrap();
        let loss = ddp.forward(|| net.forward(&xs).square().mean(Kind::Float)).unwrap();
        let loss = if rng.one_in(32) { loss * f64::INFINITY } else { loss };
        ddp.backward_scaled(&mut scaler, &loss).unwrap();
        skipped += usize::from(scaler.step(&mut opt).unwrap().is_skipped().unwrap());
        scaler.update().unwrap();
        if step == steps / 4 || step == steps {
            barrier.wait();
            if group.rank() == 0 {
                samples.push(held());
            }
            barrier.wait();
        }
    }
    (skipped, samples)
}
