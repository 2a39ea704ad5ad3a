//! Steps that are skipped because their gradient norm or their loss is a spike.

use std::sync::Arc;

use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::checkpoint::{Checkpoint, Prepared, SaveState, SavedState, Stateful};
use tch_amp::optim::{Optimizer, Sgd};
use tch_amp::scaler::{GradScalerConfig, SpikeConfig, SpikeDetector};

use testkit::rng::Rng;
use testkit::tensors::leaf;

/// The rule by plain loops.
struct Model {
    config: SpikeConfig,
    taken: Vec<f64>,
    in_a_row: u32,
}

impl Model {
    /// Whether the number is a spike.
    fn judge(&self, x: f64) -> bool {
        let start = self.taken.len().saturating_sub(self.config.window as usize);
        let window = &self.taken[start..];
        let count = window.len() as f64;
        let mean = window.iter().sum::<f64>() / count.max(1.0);
        let squares: f64 = window.iter().map(|x| (x - mean).powi(2)).sum();
        let deviation = (squares / (count - 1.0).max(1.0)).sqrt().max(0.01 * mean.abs());
        let ready = self.taken.len() >= self.config.warmup as usize;
        ready
            && self.in_a_row < self.config.max_in_a_row
            && x > mean + self.config.deviations * deviation
    }

    fn note(&mut self, x: f64, spike: bool) {
        if spike {
            self.in_a_row += 1;
        } else {
            self.in_a_row = 0;
            self.taken.push(x);
        }
    }
}

struct Training {
    w: Tensor,
    opt: Optimizer,
    scaler: GradScaler,
    spikes: SpikeDetector,
}

impl Training {
    fn new(enabled: bool, spikes: SpikeDetector) -> Self {
        let w = leaf(&[0.0], Kind::Float, Device::Cpu);
        let opt = Sgd::default().build(&[w.shallow_clone()], 1.0).unwrap();
        let scaler =
            GradScalerConfig { init_scale: 4.0, enabled, ..Default::default() }.build(Device::Cpu);
        Self { w, opt, scaler: scaler.unwrap(), spikes }
    }

    /// A step with this gradient. Returns whether it was taken, and whether the weight changed.
    fn step(&mut self, gradient: f64, max_norm: f64) -> (bool, f64) {
        let before = self.w.double_value(&[0]);
        self.opt.zero_grad().unwrap();
        self.scaler.backward(&(&self.w * gradient).sum(Kind::Float)).unwrap();
        let outcome = self.scaler.step_unless_spike(&mut self.opt, max_norm, &mut self.spikes);
        let taken = outcome.unwrap().is_stepped().unwrap();
        self.scaler.update().unwrap();
        (taken, before - self.w.double_value(&[0]))
    }
}

#[test]
fn random_histories_are_judged_as_by_plain_loops() {
    let mut rng = Rng::new(12);
    for case in 0..40 {
        let config = SpikeConfig {
            window: 2 + rng.below(12) as u32,
            warmup: 2 + rng.below(8) as u32,
            max_in_a_row: rng.below(4) as u32,
            deviations: *rng.pick(&[1.0, 2.5, 6.0]),
        };
        let mut model = Model { config, taken: Vec::new(), in_a_row: 0 };
        let mut training = Training::new(rng.one_in(2), config.build().unwrap());
        let (mut spikes, mut non_finite) = (0, 0);
        for _ in 0..60 {
            let gradient = match rng.below(12) {
                0 => *rng.pick(&[f64::INFINITY, f64::NAN]),
                1 | 2 => 40.0 + rng.below(50) as f64,
                _ => 1.0 + rng.below(64) as f64 / 64.0,
            };
            let expected = if gradient.is_finite() {
                let spike = model.judge(gradient);
                model.note(gradient, spike);
                spikes += u64::from(spike);
                !spike
            } else {
                non_finite += 1;
                false
            };
            let (taken, _) = training.step(gradient, f64::INFINITY);
            assert_eq!(taken, expected, "case {case}: {config:?}, {gradient}");
        }
        let counts = training.spikes.counts().unwrap();
        assert_eq!((counts.norm_spikes, counts.non_finite), (spikes, non_finite));
        assert_eq!(counts.loss_spikes, 0);
    }
}

fn ready() -> SpikeConfig {
    SpikeConfig { window: 8, warmup: 4, ..Default::default() }
}

#[test]
fn a_spike_changes_neither_weights_nor_the_scale() {
    for enabled in [true, false] {
        let mut training = Training::new(enabled, ready().build().unwrap());
        for _ in 0..4 {
            // Clipped to half of it.
            let (taken, change) = training.step(2.0, 1.0);
            assert!(taken && (change - 1.0).abs() < 1e-5, "{change}");
        }
        let scale = training.scaler.get_scale().unwrap();
        assert_eq!(training.step(100.0, 1.0), (false, 0.0));
        assert_eq!(training.scaler.get_scale().unwrap(), scale);
        let (taken, _) = training.step(2.0, 1.0);
        assert!(taken);
        assert_eq!(training.step(f64::NAN, 1.0), (false, 0.0));
        let fallen = if enabled { scale / 2.0 } else { scale };
        assert_eq!(training.scaler.get_scale().unwrap(), fallen);
    }
}

#[test]
fn a_watched_loss_is_a_reason_of_its_own() {
    let mut training = Training::new(false, ready().build().unwrap());
    for loss in [1.0, 1.1, 0.9, 1.0, 1.0, 70.0, 1.0, f64::NAN] {
        training.spikes.watch_loss(&Tensor::from(loss));
        let (taken, _) = training.step(1.0, f64::INFINITY);
        assert_eq!(taken, loss < 2.0, "{loss}");
    }
    let counts = training.spikes.counts().unwrap();
    assert_eq!((counts.loss_spikes, counts.norm_spikes, counts.non_finite), (1, 0, 1));
    // A loss is that of one step.
    assert!(training.step(1.0, f64::INFINITY).0);
    assert_eq!(training.spikes.counts().unwrap(), counts);
    // The history of a step that fails is as before.
    training.spikes.watch_loss(&Tensor::from_slice(&[1.0, 2.0]));
    training.opt.zero_grad().unwrap();
    training.scaler.backward(&training.w.sum(Kind::Float)).unwrap();
    let error = training
        .scaler
        .step_unless_spike(&mut training.opt, 1.0, &mut training.spikes)
        .unwrap_err();
    assert!(error.to_string().contains("one floating-point number"), "{error}");
    assert_eq!(training.spikes.counts().unwrap(), counts);
}

#[test]
fn a_restored_detector_continues() {
    let mut whole = Training::new(true, ready().build().unwrap());
    for gradient in [1.0, 1.2, 0.8, 1.0, 90.0] {
        whole.spikes.watch_loss(&Tensor::from(1.0));
        let _step = whole.step(gradient, 1.0);
    }
    let mut checkpoint = Checkpoint::new();
    checkpoint.add("spikes", &mut whole.spikes).unwrap();
    let mut new = Training::new(true, ready().build().unwrap());
    checkpoint.restore().add("spikes", &mut new.spikes).apply().unwrap();
    assert_eq!(new.spikes.counts().unwrap(), whole.spikes.counts().unwrap());
    for gradient in [90.0, 1.0, 90.0] {
        assert_eq!(new.step(gradient, 1.0).0, whole.step(gradient, 1.0).0);
    }
    let mut other = SpikeConfig { window: 9, ..ready() }.build().unwrap();
    let error = checkpoint.restore().add("spikes", &mut other).apply().unwrap_err();
    assert!(error.to_string().contains("with the window that was saved"), "{error}");
}

#[test]
fn options_outside_their_range_are_refused() {
    let refused = [
        SpikeConfig { deviations: 0.0, ..Default::default() },
        SpikeConfig { deviations: f64::NAN, ..Default::default() },
        SpikeConfig { window: 1, ..Default::default() },
        SpikeConfig { window: 65537, ..Default::default() },
        SpikeConfig { warmup: 1, ..Default::default() },
    ];
    for config in refused {
        config.build().unwrap_err();
    }
    let mut training = Training::new(true, ready().build().unwrap());
    training.scaler.backward(&training.w.sum(Kind::Float)).unwrap();
    training.scaler.unscale_(&mut training.opt).unwrap();
    let Training { opt, scaler, spikes, .. } = &mut training;
    let error = scaler.step_unless_spike(opt, 1.0, spikes).unwrap_err();
    assert!(error.to_string().contains("unscale_ has already"), "{error}");
    scaler.step_unless_spike(opt, -1.0, spikes).unwrap_err();
}

#[test]
fn gradients_stay_as_they_are() {
    for enabled in [true, false] {
        for gradient in [3.0, f64::INFINITY] {
            let mut training = Training::new(enabled, ready().build().unwrap());
            let _step = training.step(gradient, 1.0);
            let scale = if enabled { 4.0 } else { 1.0 };
            assert_eq!(training.w.grad().double_value(&[0]), gradient * scale);
        }
    }
    // Without a gradient there is no step, and no number for the history.
    let mut training = Training::new(false, ready().build().unwrap());
    let Training { opt, scaler, spikes, .. } = &mut training;
    assert!(scaler.step_unless_spike(opt, 1.0, spikes).unwrap().has_no_gradients());
    assert_eq!(spikes.counts().unwrap(), Default::default());
}

/// A history with these counts, as a damaged or hostile file may have.
struct Damaged {
    counts: [f64; 5],
    window: i64,
}

impl Stateful for Damaged {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> tch_amp::Result<()> {
        let window = Tensor::zeros([self.window], (Kind::Double, Device::Cpu));
        let history = Tensor::cat(&[Tensor::from_slice(&self.counts), window], 0);
        state.tensor("norm", &history)?;
        state.tensor("loss", &history)
    }

    fn prepare_restore<'a>(&'a mut self, _: &SavedState<'a>) -> tch_amp::Result<Prepared<'a>> {
        Ok(Prepared::new(|| ()))
    }
}

#[test]
fn counts_that_no_run_can_have_are_refused() {
    let largest = 9_007_199_254_740_991.0;
    for place in 0..5 {
        for number in [1e300, f64::INFINITY, f64::NAN, -1.0, 0.5, 2f64.powi(64), largest, 3.0] {
            let mut counts = [0.0; 5];
            counts[place] = number;
            let mut spikes = SpikeConfig { window: 4, ..Default::default() }.build().unwrap();
            let mut checkpoint = Checkpoint::new();
            checkpoint.add("spikes", &mut Damaged { counts, window: 4 }).unwrap();
            let restored = checkpoint.restore().add("spikes", &mut spikes).apply();
            let holds = number == largest || number == 3.0;
            assert_eq!(restored.is_ok(), holds, "{place} {number}: {restored:?}");
            let found = spikes.counts().unwrap();
            let expected = if holds && place == 3 { 2 * number as u64 } else { 0 };
            assert_eq!(found.non_finite, expected, "{place} {number}");
        }
    }
}

/// A program may keep its outcomes, for instance to draw a curve.
#[test]
fn neither_a_detector_nor_an_outcome_keeps_the_graph_of_the_watched_loss() {
    let exists = Arc::new(());
    let w = leaf(&[1.0; 3], Kind::Float, Device::Cpu);
    let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.1).unwrap();
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    let mut spikes = SpikeConfig::default().build().unwrap();
    let held = Arc::clone(&exists);
    // The graph owns the backward.
    let function = tch_amp::function(
        |_, x| Ok(x[0] * 2.0),
        move |_, g| {
            let _held = &held;
            Ok(&g[0] * 2.0)
        },
    );
    let loss = function.apply(&[&w]).unwrap().sum(None);
    scaler.backward_retain_graph(&loss).unwrap();
    spikes.watch_loss(&loss);
    drop(loss);
    assert_eq!(Arc::strong_count(&exists), 1, "the detector");
    let outcome = scaler.step_unless_spike(&mut opt, f64::INFINITY, &mut spikes).unwrap();
    assert!(outcome.is_stepped().unwrap());
    assert_eq!(Arc::strong_count(&exists), 1, "the outcome");
    scaler.update().unwrap();
}
