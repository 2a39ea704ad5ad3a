//! Explanations of the steps of a loop, for which it asks after every step.

use serde_json::Value;
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{Cause, Explanation, Tracer, named};
use tch_amp::optim::Sgd;
use tch_amp::scaler::{GradScalerConfig, SpikeConfig, SpikeDetector};
use tch_amp::{Autocast, GradScaler};

use crate::insight::Model;
use testkit::rows::rows;

/// Trains with these factors of the gradients, each step of which can be explained.
fn explained(limit: usize, factors: &[f64], mut spikes: Option<SpikeDetector>) -> Vec<Explanation> {
    let (model, x) = Model::with_batch();
    let mut optimizer = Sgd::default().build(&model.vs, 1e-6).unwrap();
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    let mut tracer = Tracer::new(&model.vs).unwrap().limit(limit).after(100);
    let mut found = Vec::new();
    for &factor in factors {
        let loss = || Ok(model.loss(&x, Tensor::shallow_clone) * factor);
        tracer.begin(&scaler).unwrap();
        optimizer.zero_grad().unwrap();
        scaler.backward(&loss().unwrap()).unwrap();
        let outcome = match &mut spikes {
            Some(spikes) => scaler.step_unless_spike(&mut optimizer, f64::INFINITY, spikes),
            None => scaler.step(&mut optimizer),
        };
        let outcome = outcome.unwrap();
        scaler.update().unwrap();
        found.extend(tracer.explain_if_skipped(&scaler, &outcome, loss).unwrap());
    }
    found
}

fn iterations(explanations: &[Explanation]) -> Vec<u64> {
    explanations.iter().map(|explanation| explanation.iteration).collect()
}

#[test]
fn skipped_steps_are_explained_up_to_the_limit() {
    let factors = [1.0, f64::INFINITY, 1.0, f64::NAN, f64::INFINITY];
    assert_eq!(iterations(&explained(2, &factors, None)), [102, 104]);
    assert_eq!(iterations(&explained(10, &factors, None)), [102, 104, 105]);
    assert_eq!(iterations(&explained(0, &factors, None)), [0; 0]);
}

#[test]
fn spikes_are_not_explained_and_overflows_are() {
    let spikes = SpikeConfig { window: 8, warmup: 4, ..Default::default() }.build().unwrap();
    let factors = [1.0, 1.01, 0.99, 1.0, 1.02, 1e4, 1.0, f64::INFINITY];
    assert_eq!(iterations(&explained(10, &factors, Some(spikes))), [108]);
}

/// The loss of a step is that of the step that follows, and of no other.
#[test]
fn a_history_has_the_losses_that_it_is_given() {
    let mut history = tch_amp::insight::ScaleHistory::new(3).unwrap();
    let w = Tensor::zeros([1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let mut optimizer = Sgd::default().build(&[w.shallow_clone()], 1.0).unwrap();
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    for loss in [Some(0.5), None, Some(f64::NAN), Some(2.0)] {
        optimizer.zero_grad().unwrap();
        let value = (&w * 1.0).sum(Kind::Float);
        scaler.backward(&value).unwrap();
        if let Some(loss) = loss {
            let loss = Tensor::from(loss).to_kind(Kind::BFloat16);
            history.set_loss(&loss).unwrap();
        }
        let outcome = scaler.step(&mut optimizer).unwrap();
        history.record(&scaler, &outcome, 0.1).unwrap();
        scaler.update().unwrap();
    }
    let report = history.report().unwrap();
    let steps: Vec<Value> = rows(&report, "steps");
    let losses: Vec<_> = steps.iter().map(|step| step["loss"].as_f64()).collect();
    assert_eq!(losses, [None, None, Some(2.0)]);
    let error = history.set_loss(&Tensor::zeros([2], (Kind::Float, Device::Cpu))).unwrap_err();
    assert!(error.to_string().contains("has 2 elements"), "{error}");
}

/// The loss of a step.
type Loss = fn(&Model, &Tensor) -> Tensor;

/// A loss whose gradients overflow if the scale is large.
const LARGE: Loss = |model, x| model.loss(x, Tensor::shallow_clone) * 2000.0;
const SMALL: Loss = |model, x| model.loss(x, Tensor::shallow_clone) * 1e-3;
const INFINITE: Loss = |model, x| model.loss(x, Tensor::shallow_clone) * f64::INFINITY;

/// A loss for which they overflow in another part of the model.
const LARGE_INSIDE: Loss =
    |model, x| model.loss(x, |x| named("inside", || x + (x - x.detach()) * 20_000.0));

/// A training in which the scale grows back after each step that is taken.
struct Run {
    kind: Kind,
    init_scale: f64,
    /// How often each skipped step is explained.
    times: usize,
}

const IN_FP16: Run = Run { kind: Kind::Half, init_scale: 65536.0, times: 1 };

impl Run {
    fn explanations(&self, losses: &[Loss]) -> Vec<Explanation> {
        let (model, x) = Model::with_batch();
        let mut optimizer = Sgd::default().build(&model.vs, 1e-6).unwrap();
        let config = GradScalerConfig {
            growth_interval: 1,
            init_scale: self.init_scale,
            ..Default::default()
        };
        let mut scaler = config.build(Device::Cpu).unwrap();
        let mut tracer = Tracer::new(&model.vs).unwrap();
        let region = Autocast::new(Device::Cpu).dtype(self.kind).enabled(self.kind != Kind::Float);
        let mut found = Vec::new();
        for loss in losses {
            let loss = || region.run(|| loss(&model, &x));
            tracer.begin(&scaler).unwrap();
            optimizer.zero_grad().unwrap();
            scaler.backward(&loss().unwrap()).unwrap();
            let outcome = scaler.step(&mut optimizer).unwrap();
            scaler.update().unwrap();
            for _ in 0..self.times {
                found.extend(tracer.explain_if_skipped(&scaler, &outcome, loss).unwrap());
            }
        }
        found
    }

    /// The advice for the steps that were skipped because of the scale.
    fn advice(&self, losses: &[Loss]) -> Vec<String> {
        let mut found = self.explanations(losses);
        found.retain(|explanation| matches!(explanation.cause, Cause::Scale { .. }));
        let text = |explanation: &Explanation| explanation.to_string();
        found.iter().map(|it| text(it).split("advice: ").nth(1).unwrap().to_owned()).collect()
    }
}

/// Asserts that there is so much advice and that none is to change anything.
fn assert_none_is_needed(advice: &[String], count: usize) {
    assert_eq!(advice.len(), count, "{advice:?}");
    assert!(advice.iter().all(|advice| advice.starts_with("none is needed")), "{advice:?}");
}

#[test]
fn a_part_that_overflows_again_and_again_is_to_be_kept_in_f32() {
    let advice = IN_FP16.advice(&[LARGE; 5]);
    assert_eq!(advice.len(), 5, "{advice:?}");
    for (index, advice) in advice.iter().enumerate() {
        assert_eq!(advice.starts_with("none is needed"), index < 2, "{index}: {advice}");
        assert_eq!(
            advice.starts_with("keep what follows layers.1 in f32"),
            index >= 2,
            "{index}: {advice}"
        );
        assert!(index < 2 || advice.contains(&format!("{} times", index + 1)), "{advice}");
    }
}

#[test]
fn overflows_at_a_scale_that_grows_back_need_no_advice() {
    let advice = IN_FP16.advice(&[LARGE, SMALL, LARGE, SMALL, LARGE, SMALL, LARGE]);
    assert_none_is_needed(&advice, 4);
}

/// The scale falls for all of them.
#[test]
fn parts_that_overflow_in_turn_need_no_advice() {
    let losses = [LARGE, LARGE_INSIDE, LARGE, LARGE_INSIDE, LARGE];
    // At a larger scale, either loss overflows in the same layer.
    let run = Run { init_scale: 16384.0, ..IN_FP16 };
    let culprits = run.explanations(&losses).into_iter().map(|it| it.culprit.unwrap());
    let parts: Vec<_> = culprits.map(|it| it.path.or(it.after).unwrap_or(it.operator)).collect();
    assert!(parts.windows(2).all(|pair| pair[0] != pair[1]), "{parts:?}");
    assert_none_is_needed(&run.advice(&losses), 5);
}

#[test]
fn a_step_that_is_skipped_for_another_reason_ends_the_succession() {
    assert_none_is_needed(&IN_FP16.advice(&[LARGE, LARGE, INFINITE, LARGE, LARGE]), 4);
}

#[test]
fn an_overflow_that_is_explained_twice_counts_once() {
    let advice = Run { times: 2, ..IN_FP16 }.advice(&[LARGE; 3]);
    assert_none_is_needed(&advice[..4], 4);
    for advice in &advice[4..] {
        assert!(advice.contains("3 times in succession"), "{advice}");
    }
}

/// Another dtype does not help there.
#[test]
fn a_part_that_overflows_in_f32_needs_no_advice() {
    let run = Run { kind: Kind::Float, init_scale: 2f64.powi(127), times: 1 };
    assert_none_is_needed(&run.advice(&[LARGE; 5]), 5);
}
