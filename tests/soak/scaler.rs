//! Hundreds of thousands of iterations of mixed-precision training keep the memory flat.

use tch::nn::{self, Module as _, OptimizerConfig as _, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{GradScaler, autocast};

use testkit::rng::Rng;
use testkit::{is_set, resident_bytes, skipped};

const SAMPLE_EVERY: u64 = 5_000;

/// How long the soak is, and the slope that shows a leak.
#[derive(Clone, Copy)]
struct Extent {
    /// The heap grows slowly, in single pages, until it settles. Only then does the slope show a small leak.
    warm_up: u64,
    iterations: u64,
    max_bytes_per_10_000: f64,
}

/// Shows a leak of one byte per iteration.
const USUAL: Extent =
    Extent { warm_up: 100_000, iterations: 150_000, max_bytes_per_10_000: 10_000.0 };

/// Shows a leak of a tenth of a byte per iteration.
const LONG: Extent =
    Extent { warm_up: 400_000, iterations: 600_000, max_bytes_per_10_000: 1_000.0 };

/// `TCH_AMP_LONG=1` trains for a million iterations.
#[test]
fn training_keeps_memory_flat() {
    if resident_bytes().is_none() {
        return;
    }
    if is_set("TCH_AMP_SHORT") {
        return skipped("a soak of a minute runs with the locked version of tch");
    }
    let Extent { warm_up, iterations, max_bytes_per_10_000 } =
        if is_set("TCH_AMP_LONG") { LONG } else { USUAL };
    tch::set_num_threads(1);
    let mut training = Training::new();
    let mut samples = Vec::new();
    for iteration in 0..warm_up + iterations {
        training.iterate(iteration);
        if iteration >= warm_up && iteration % SAMPLE_EVERY == 0 {
            let bytes = resident_bytes().expect("memory was measured before");
            samples.push((iteration as f64, bytes as f64));
        }
    }
    let slope = slope(&samples) * 10_000.0;
    println!(
        "{} steps, {} skipped, {slope:.0} bytes per 10,000 iterations",
        training.stepped, training.skipped
    );
    assert!(
        training.skipped > iterations / 20,
        "the soak should include overflows: {}",
        training.skipped
    );
    assert!(
        training.stepped > iterations / 2,
        "the soak should include steps: {}",
        training.stepped
    );
    assert!(
        slope < max_bytes_per_10_000,
        "memory grows by {slope:.0} bytes per 10,000 iterations: {samples:?}"
    );
}

struct Training {
    rng: Rng,
    net: nn::Linear,
    optimizer: nn::Optimizer,
    scaler: GradScaler,
    stepped: u64,
    skipped: u64,
}

impl Training {
    fn new() -> Self {
        let vs = VarStore::new(Device::Cpu);
        let net = nn::linear(vs.root(), 4, 2, Default::default());
        let optimizer = nn::sgd(0.9, 0.0, 0.0, false).build(&vs, 1e-3).unwrap();
        // The scale grows as often as the overflows back it off, so it stays in the usual range.
        let config = GradScalerConfig { growth_interval: 8, ..Default::default() };
        let scaler = config.build(Device::Cpu).unwrap();
        Self { rng: Rng::new(13), net, optimizer, scaler, stepped: 0, skipped: 0 }
    }

    /// One iteration. Every tenth overflows, and the ways of unscaling take turns.
    fn iterate(&mut self, iteration: u64) {
        let factor = if self.rng.one_in(10) { f64::INFINITY } else { 1.0 };
        let input = Tensor::from_slice(&[self.rng.eighth(), 1.0, 0.5, -0.25])
            .to_kind(Kind::Float)
            .view([1, 4]);
        self.optimizer.zero_grad();
        let net = &self.net;
        let output = autocast(Device::Cpu, || net.forward(&input)).unwrap();
        let loss = output.to_kind(Kind::Float).square().mean(Kind::Float) * factor;
        self.scaler.backward(&loss).unwrap();
        let outcome = match iteration % 3 {
            0 => self.scaler.step(&mut self.optimizer).unwrap(),
            1 => {
                self.scaler.unscale_(&mut self.optimizer).unwrap();
                self.optimizer.clip_grad_norm(1.0);
                self.scaler.step(&mut self.optimizer).unwrap()
            }
            _ => {
                let mut unscaled = self.scaler.unscale(&mut self.optimizer).unwrap();
                let _norm = unscaled.clip_grad_norm(1.0).unwrap();
                unscaled.step().unwrap()
            }
        };
        if outcome.is_stepped().unwrap() {
            self.stepped += 1;
        } else {
            self.skipped += 1;
        }
        self.scaler.update().unwrap();
    }
}

/// The least-squares slope of the samples.
fn slope(samples: &[(f64, f64)]) -> f64 {
    let n = samples.len() as f64;
    let mean_x = samples.iter().map(|(x, _)| x).sum::<f64>() / n;
    let mean_y = samples.iter().map(|(_, y)| y).sum::<f64>() / n;
    let covariance = samples.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum::<f64>();
    let variance = samples.iter().map(|(x, _)| (x - mean_x).powi(2)).sum::<f64>();
    covariance / variance
}
