//! The history of the scale: what it remembers, how long, and that a checkpoint has it.

use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::{Checkpoint, Prepared, Restored, SaveState, SavedState, Stateful};
use tch_amp::insight::{HistoryReport, ScaleHistory, SkipCause};
use tch_amp::optim::{Optimizer, Sgd};
use tch_amp::scaler::{GradScalerConfig, SpikeConfig, SpikeDetector};
use tch_amp::{Error, GradScaler, Result};

use testkit::assert_refused;
use testkit::checkpoints::{checkpoint_of, reloaded};
use testkit::for_each_device;
use testkit::rows::{Step, rows, steps_of};

struct Training {
    w: Tensor,
    opt: Optimizer,
    scaler: GradScaler,
    spikes: SpikeDetector,
}

impl Training {
    fn new(device: Device) -> Self {
        let w = Tensor::zeros([1], (Kind::Float, device)).set_requires_grad(true);
        let opt = Sgd::default().build(&[w.shallow_clone()], 1.0).unwrap();
        let spikes = SpikeConfig { window: 8, warmup: 4, ..Default::default() }.build().unwrap();
        Self { w, opt, scaler: GradScaler::new(device).unwrap(), spikes }
    }

    /// An iteration whose gradient is given, and the loss that is watched, if any.
    fn iterate(
        &mut self,
        history: &mut ScaleHistory,
        gradient: f64,
        loss: Option<f64>,
    ) -> Result<()> {
        self.opt.zero_grad()?;
        self.scaler.backward(&(&self.w * gradient).sum(Kind::Float))?;
        if let Some(loss) = loss {
            let loss = Tensor::from(loss).to_kind(Kind::Float).to_device(self.w.device());
            self.spikes.watch_loss(&loss);
        }
        let outcome =
            self.scaler.step_unless_spike(&mut self.opt, f64::INFINITY, &mut self.spikes)?;
        history.record(&self.scaler, &outcome, rate(gradient))?;
        self.scaler.update()
    }
}

/// Restores a history from what has been saved in its place.
fn restore(history: &mut ScaleHistory, saved: &mut dyn Stateful) -> Result<Restored> {
    checkpoint_of([("history", saved)]).restore().add("history", history).apply()
}

/// Restores a history from a value that has been saved in its place.
fn restore_value(history: &mut ScaleHistory, saved: &Value) -> Result<Restored> {
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_value("history", saved)?;
    checkpoint.restore().add("history", history).apply()
}

/// Another learning rate for each gradient.
fn rate(gradient: f64) -> f64 {
    gradient.min(100.0) / 8.0
}

const INFINITE: f64 = f64::INFINITY;

#[test]
fn an_infinite_rate_survives_json() {
    let Training { w, mut opt, mut scaler, .. } = Training::new(Device::Cpu);
    let mut history = ScaleHistory::new(1).unwrap();
    scaler.backward(&w.sum(Kind::Float)).unwrap();
    let outcome = scaler.step(&mut opt).unwrap();
    history.record(&scaler, &outcome, INFINITE).unwrap();
    let report = history.report().unwrap();
    let json = serde_json::to_string(&report).unwrap();
    assert!(json.contains(r#""learning_rate":"inf""#), "{json}");
    assert_eq!(serde_json::from_str::<HistoryReport>(&json).unwrap(), report);
}

#[test]
fn scales_causes_norms_and_rates_are_those_of_the_steps() {
    let iterations: [(f64, Option<f64>, Option<SkipCause>); 10] = [
        (1.0, Some(1.0), None),
        (1.5, Some(1.0), None),
        (1.0, Some(1.0), None),
        (1.25, Some(1.0), None),
        (70.0, Some(1.0), Some(SkipCause::Spike)),
        (INFINITE, Some(1.0), Some(SkipCause::Overflow)),
        (1.0, Some(50.0), Some(SkipCause::Spike)),
        (1.0, Some(f64::NAN), Some(SkipCause::Overflow)),
        (1.0, None, None),
        (1.0, Some(1.0), None),
    ];
    for_each_device(|device| {
        for capacity in [3, 10, 100] {
            let mut training = Training::new(device);
            let mut history = ScaleHistory::new(capacity).unwrap();
            let mut wanted = Vec::new();
            for (i, (gradient, loss, skipped)) in iterations.into_iter().enumerate() {
                let scale = training.scaler.get_scale().unwrap();
                training.iterate(&mut history, gradient, loss).unwrap();
                wanted.push((i as u64 + 1, scale, skipped, gradient, loss));
                // Reading in between changes nothing.
                if i == 4 {
                    assert_eq!(steps_of(&history.report().unwrap()).len(), capacity.min(5));
                }
            }
            let report = history.report().unwrap();
            assert_eq!(report.total, 10);
            let wanted = wanted.split_off(10 - capacity.min(10));
            let found = steps_of(&report);
            assert_eq!(found.len(), wanted.len());
            let finite = |x: f64| Some(x).filter(|x| x.is_finite());
            for (found, (step, scale, skipped, gradient, loss)) in found.iter().zip(wanted) {
                let Step { learning_rate, norm, .. } = *found;
                assert_eq!((found.step, found.scale, found.skipped), (step, scale, skipped));
                assert_eq!((norm, learning_rate), (finite(gradient), rate(gradient)));
                assert_eq!(found.loss, loss.and_then(finite));
            }
            assert_eq!(report, history.report().unwrap());
        }
    });
}

#[test]
fn steps_without_a_norm_a_scale_or_gradients_are_recorded() {
    let mut training = Training::new(Device::Cpu);
    let mut history = ScaleHistory::new(4).unwrap();
    let outcome = training.scaler.step(&mut training.opt).unwrap();
    assert!(outcome.has_no_gradients());
    history.record(&training.scaler, &outcome, 0.0).unwrap();
    let mut disabled = GradScaler::disabled();
    disabled.backward(&training.w.sum(None)).unwrap();
    let outcome = disabled.step(&mut training.opt).unwrap();
    history.record(&disabled, &outcome, 0.5).unwrap();
    let steps = steps_of(&history.report().unwrap());
    let of = |step: &Step| (step.scale, step.skipped, step.norm, step.loss, step.learning_rate);
    assert_eq!(of(&steps[0]), (65536.0, None, None, None, 0.0));
    assert_eq!(of(&steps[1]), (1.0, None, None, None, 0.5));
}

#[test]
fn a_step_that_is_recorded_too_late_is_refused() {
    let mut training = Training::new(Device::Cpu);
    let mut history = ScaleHistory::new(4).unwrap();
    training.scaler.backward(&training.w.sum(None)).unwrap();
    let outcome = training.scaler.step(&mut training.opt).unwrap();
    training.scaler.update().unwrap();
    assert_refused!(
        history.record(&training.scaler, &outcome, 0.1),
        Error::InvalidArgument { name: "history", .. }
    );
    assert_eq!(history.report().unwrap().total, 0);
    for capacity in [0, (1 << 20) + 1] {
        assert_refused!(
            ScaleHistory::new(capacity),
            Error::InvalidArgument { name: "capacity", .. }
        );
    }
}

#[test]
fn a_resumed_history_continues() {
    let gradients = [1.0, INFINITE, 2.0, 1.0, INFINITE, 1.0];
    for_each_device(|device| {
        for capacity in [2, 4, 50] {
            let mut training = Training::new(device);
            let mut history = ScaleHistory::new(4).unwrap();
            for gradient in &gradients[..3] {
                training.iterate(&mut history, *gradient, None).unwrap();
            }
            let mut resumed = ScaleHistory::new(capacity).unwrap();
            // It is replaced.
            training.iterate(&mut resumed, 5.0, None).unwrap();
            restore(&mut resumed, &mut history).unwrap();
            for gradient in &gradients[3..] {
                training.iterate(&mut resumed, *gradient, None).unwrap();
            }
            let report = resumed.report().unwrap();
            assert_eq!(report.total, 6);
            let skipped: Vec<_> =
                steps_of(&report).iter().map(|step| step.skipped.is_some()).collect();
            let all: Vec<_> = gradients.iter().map(|gradient| *gradient == INFINITE).collect();
            assert_eq!(skipped, all[6 - capacity.min(6)..]);
            let json = serde_json::to_string(&report).unwrap();
            assert_eq!(serde_json::from_str::<HistoryReport>(&json).unwrap(), report);
        }
    });
}

/// A file holds 2 million single values, and a history may be far longer.
#[test]
fn a_history_of_any_length_is_saved_and_resumed() {
    let mut training = Training::new(Device::Cpu);
    let mut history = ScaleHistory::new(1 << 20).unwrap();
    for gradient in [1.0, INFINITE, 2.0, 1.0, 1.0, 1.0, 90.0] {
        training.iterate(&mut history, gradient, Some(0.25)).unwrap();
    }
    training.scaler.backward(&(&training.w * 3.0).sum(None)).unwrap();
    let outcome = training.scaler.step(&mut training.opt).unwrap();
    for step in 0..200_000 {
        history.record(&training.scaler, &outcome, f64::from(step) / 3.0).unwrap();
    }
    training.scaler.update().unwrap();
    let wanted = history.report().unwrap();
    for cause in [SkipCause::Overflow, SkipCause::Spike] {
        assert_eq!(wanted.skips(cause), 1);
    }
    for name in ["x.safetensors", "x.pt"] {
        let checkpoint = reloaded(&checkpoint_of([("history", &mut history)]), name);
        let mut resumed = ScaleHistory::new(1 << 20).unwrap();
        let restored = checkpoint.restore().add("history", &mut resumed).apply().unwrap();
        assert_eq!(restored, Default::default());
        assert!(resumed.report().unwrap() == wanted, "{name}");
    }
    let mut empty = ScaleHistory::new(10).unwrap();
    restore(&mut history, &mut empty).unwrap();
    assert_eq!(history.report().unwrap(), empty.report().unwrap());
}

/// Earlier versions saved a record for each step.
#[test]
fn a_history_of_records_is_still_resumed() {
    let mut training = Training::new(Device::Cpu);
    let mut history = ScaleHistory::new(4).unwrap();
    for gradient in [1.0, INFINITE, 2.0, 1.0, 1.0] {
        training.iterate(&mut history, gradient, None).unwrap();
    }
    let report = history.report().unwrap();
    let mut resumed = ScaleHistory::new(4).unwrap();
    restore_value(&mut resumed, &serde_json::to_value(&report).unwrap()).unwrap();
    assert_eq!(resumed.report().unwrap(), report);
}

/// A history in columns, of which some are given.
struct Columns(u64, Vec<(&'static str, Tensor)>);

impl Stateful for Columns {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        state.value("total", &self.0)?;
        let names = ["scale", "skipped", "norm", "loss", "learning_rate"];
        for name in names {
            let given = self.1.iter().find(|(given, _)| *given == name);
            let default = Tensor::zeros([2], (Kind::Double, Device::Cpu));
            state.tensor(name, given.map_or(&default, |(_, tensor)| tensor))?;
        }
        Ok(())
    }

    fn prepare_restore<'a>(&'a mut self, _: &SavedState<'a>) -> Result<Prepared<'a>> {
        Ok(Prepared::new(|| ()))
    }
}

#[test]
fn damaged_columns_are_refused_and_change_nothing() {
    let mut training = Training::new(Device::Cpu);
    let mut history = ScaleHistory::new(4).unwrap();
    training.iterate(&mut history, 1.0, None).unwrap();
    let before = history.report().unwrap();
    let doubles = |numbers: &[f64]| Tensor::from_slice(numbers);
    let wrong = [
        Columns(1, vec![]),
        Columns(u64::MAX, vec![]),
        Columns(2, vec![("norm", doubles(&[1.0]))]),
        Columns(2, vec![("scale", doubles(&[1.0, 2.0, 3.0]))]),
        Columns(2, vec![("skipped", doubles(&[0.0, 3.0]))]),
        Columns(2, vec![("skipped", doubles(&[0.5, f64::NAN]))]),
        Columns(2, vec![("loss", doubles(&[0.0, 0.0]).view([2, 1]))]),
        Columns(2, vec![("loss", doubles(&[0.0, 0.0]).to_kind(Kind::Float))]),
    ];
    for (case, mut columns) in wrong.into_iter().enumerate() {
        let refused = restore(&mut history, &mut columns);
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{case}: {refused:?}");
        assert_eq!(history.report().unwrap(), before);
    }
    restore(&mut history, &mut Columns(7, vec![])).unwrap();
    let steps = steps_of(&history.report().unwrap());
    assert_eq!(steps.iter().map(|step| step.step).collect::<Vec<_>>(), [6, 7]);
}

#[test]
fn a_damaged_history_is_refused_and_changes_nothing() {
    let mut training = Training::new(Device::Cpu);
    let mut history = ScaleHistory::new(4).unwrap();
    training.iterate(&mut history, 1.0, None).unwrap();
    let before = history.report().unwrap();
    let one = rows::<Value>(&before, "steps");
    let two = [one.clone(), one.clone()].concat();
    for (total, steps) in [(0, one.clone()), (2, one), (u64::MAX, vec![]), (2, two)] {
        let saved = json!({ "total": total, "steps": steps });
        let refused = restore_value(&mut history, &saved);
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{total}: {refused:?}");
        assert_eq!(history.report().unwrap(), before);
    }
}

#[test]
fn a_scale_that_keeps_falling_below_one_is_named() {
    let mut training = Training::new(Device::Cpu);
    let config = GradScalerConfig { init_scale: 2.0, ..Default::default() };
    training.scaler = config.build(Device::Cpu).unwrap();
    let mut history = ScaleHistory::new(10).unwrap();
    for gradient in [1.0, INFINITE, INFINITE, INFINITE] {
        training.iterate(&mut history, gradient, None).unwrap();
    }
    let advice = "the scale keeps falling below 1: the model itself overflows fp16, use bf16";
    let text = format!("4 steps, 3 skipped (3 overflows), scale 2^1 → 2^-1, lowest 2^-1: {advice}");
    assert_eq!(history.report().unwrap().to_string(), text);
}

#[test]
fn the_lowest_scale_is_named_if_it_is_neither_the_first_nor_the_last() {
    for (scales, text) in [
        (&[][..], "0 steps, 0 skipped"),
        (&[4.0], "1 step, 0 skipped, scale 2^2"),
        (&[4.0, 4.0], "2 steps, 0 skipped, scale 2^2"),
        (&[65536.0, 32768.0], "2 steps, 0 skipped, scale 2^16 → 2^15"),
        (&[32768.0, 65536.0], "2 steps, 0 skipped, scale 2^15 → 2^16"),
        (&[65536.0, 32768.0, 65536.0], "3 steps, 0 skipped, scale 2^16, lowest 2^15"),
        (&[4.0, 1.0, 2.0], "3 steps, 0 skipped, scale 2^2 → 2^1, lowest 1"),
        (&[2.0, 1.0, 4.0], "3 steps, 0 skipped, scale 2^1 → 2^2, lowest 1"),
    ] {
        let step = |(index, scale): (usize, &f64)| {
            json!({
                "step": index + 1, "scale": scale, "skipped": null,
                "norm": null, "loss": null, "learning_rate": 0.1,
            })
        };
        let steps: Vec<_> = scales.iter().enumerate().map(step).collect();
        let report = json!({ "total": scales.len(), "steps": steps });
        let report: HistoryReport = serde_json::from_value(report).unwrap();
        assert_eq!(report.to_string(), text);
        assert_eq!(report.lowest_scale(), scales.iter().copied().reduce(f64::min));
    }
}
