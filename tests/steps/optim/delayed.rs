//! A GPU that is far behind the host: numbers on their way to it and from it must not be overwritten meanwhile.

use std::io::Write as _;

use tch::nn::VarStore;
use tch::{Cuda, Device, Kind, Tensor};
use tch_amp::autocast;
use tch_amp::average::Ema;
use tch_amp::optim::{AdamW, MasterWeights};
use tch_amp::scaler::{GradScalerConfig, StepCounter};

use crate::optim::INF;
use testkit::bits::bits;
use testkit::for_each_device;
use testkit::simulation::takes_time;

/// Fewer where the device is never behind.
fn iterations(device: Device) -> usize {
    if device.is_cuda() && takes_time() { 1000 } else { 100 }
}

/// One in so many iterations overflows, and before one in so many a slow kernel is launched.
const OVERFLOWS: usize = 37;
const DELAYS: usize = 25;

/// Whether the host waits for the device after each iteration, or the device has slow work in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Host {
    Waits,
    RunsAhead,
}

/// The bits of weights and averages, the scale, the number of steps taken, and how many answers were late.
fn train(device: Device, masters: MasterWeights, host: Host) -> (Vec<Vec<u8>>, f64, u64, usize) {
    let is_real = device.is_cuda() && takes_time();
    let slow = (is_real && host == Host::RunsAhead)
        .then(|| Tensor::ones([8192, 8192], (Kind::Float, device)));
    let mut vs = VarStore::new(device);
    let weights = |count: i64, rows, columns| {
        let values = Tensor::arange(count, (Kind::Float, device)).sin() * 0.2;
        values.view([rows, columns])
    };
    let first = vs.root().var_copy("first", &weights(16 * 32, 16, 32));
    let second = vs.root().var_copy("second", &weights(32 * 4, 32, 4));
    if masters != MasterWeights::None {
        vs.bfloat16();
    }
    let mut opt = AdamW::default().master_weights(masters).build(&vs, 1e-3).unwrap();
    let config = GradScalerConfig { init_scale: 1024.0, growth_interval: 50, ..Default::default() };
    let (mut scaler, mut counter) = (config.build(device).unwrap(), StepCounter::default());
    let mut averages = Ema { decay: 0.99, ..Ema::default() }.build(&vs).unwrap();
    let xs = (Tensor::arange(64 * 16, (Kind::Float, device)) * 0.3).cos().view([64, 16]);
    let mut late = 0;
    for iteration in 0..iterations(device) {
        if let Some(slow) = slow.as_ref().filter(|_| iteration % DELAYS == 0) {
            drop(slow.matmul(slow));
        }
        opt.zero_grad().unwrap();
        // Another number in each iteration, copied from the host.
        let factor = if iteration % OVERFLOWS == 7 { INF } else { 1.0 + iteration as f64 / 1e3 };
        let loss = autocast(device, || xs.matmul(&first).tanh().matmul(&second).square());
        let loss = loss.unwrap().mean(Kind::Float) * factor;
        scaler.backward(&loss).unwrap();
        let outcome = scaler.step_clip_norm(&mut opt, 0.5).unwrap();
        counter.record(&outcome);
        averages.update(&outcome).unwrap();
        scaler.update().unwrap();
        late += usize::from(outcome.poll().unwrap().is_none());
        if let (Host::Waits, Device::Cuda(index)) = (host, device) {
            Cuda::synchronize(index as i64);
        }
    }
    let average = |name| averages.average(name).unwrap();
    let tensors = [first, second, average("first"), average("second")];
    let bits = tensors.iter().map(bits).collect();
    (bits, scaler.get_scale().unwrap(), counter.count().unwrap(), late)
}

#[test]
fn iterations_far_ahead_of_the_device_have_the_bits_of_those_that_wait_for_it() {
    for_each_device(|device| {
        for masters in [MasterWeights::None, MasterWeights::StochasticRounding { seed: 3 }] {
            let (expected, scale, taken, _) = train(device, masters, Host::Waits);
            let all = iterations(device);
            let overflows = (0..all).filter(|i| i % OVERFLOWS == 7).count();
            assert_eq!(taken, (all - overflows) as u64);
            let (found, found_scale, found_taken, late) = train(device, masters, Host::RunsAhead);
            assert_eq!((found_scale, found_taken), (scale, taken), "{masters:?}");
            assert!(found == expected, "{masters:?}: other weights or averages");
            if device.is_cuda() && takes_time() {
                let line = format!(
                    "share of {all} iterations on {device:?} that were ahead of the device: {late}\n"
                );
                std::io::stderr().write_all(line.as_bytes()).unwrap();
                assert!(late > all / 2, "the device was not behind");
            }
        }
    });
}
