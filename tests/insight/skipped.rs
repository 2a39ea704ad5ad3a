//! Explanations of the steps of a loop, for which it asks after every step.

use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::insight::{Cause, Explanation, Tracer};
use tch_amp::optim::Sgd;
use tch_amp::scaler::{GradScalerConfig, SpikeConfig, SpikeDetector};

use crate::{Model, batch};

/// Trains with these factors of the gradients, each step of which can be explained.
fn explained(limit: usize, factors: &[f64], mut spikes: Option<SpikeDetector>) -> Vec<Explanation> {
    let model = Model::new();
    let x = batch();
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
    let losses: Vec<_> = report.steps.iter().map(|step| step.loss).collect();
    assert_eq!(losses, [None, None, Some(2.0)]);
    let error = history.set_loss(&Tensor::zeros([2], (Kind::Float, Device::Cpu))).unwrap_err();
    assert!(error.to_string().contains("has 2 elements"), "{error}");
}

/// The advice for the skipped steps of a training in fp16 with these factors of the gradients. The scale grows back after
/// each step that is taken.
fn advice(factors: &[f64]) -> Vec<String> {
    let model = Model::new();
    let x = batch();
    let mut optimizer = Sgd::default().build(&model.vs, 1e-6).unwrap();
    let config = GradScalerConfig { growth_interval: 1, ..Default::default() };
    let mut scaler = config.build(Device::Cpu).unwrap();
    let mut tracer = Tracer::new(&model.vs).unwrap();
    let region = tch_amp::Autocast::new(Device::Cpu).dtype(Kind::Half);
    let mut found = Vec::new();
    for &factor in factors {
        let loss = || region.run(|| model.loss(&x, Tensor::shallow_clone) * factor);
        tracer.begin(&scaler).unwrap();
        optimizer.zero_grad().unwrap();
        scaler.backward(&loss().unwrap()).unwrap();
        let outcome = scaler.step(&mut optimizer).unwrap();
        scaler.update().unwrap();
        let explanation = tracer.explain_if_skipped(&scaler, &outcome, loss).unwrap();
        found.extend(explanation.map(|explanation| {
            assert!(matches!(explanation.cause, Cause::Scale { .. }), "{explanation}");
            let text = explanation.to_string();
            text.split("advice: ").nth(1).unwrap().to_owned()
        }));
    }
    found
}

#[test]
fn a_part_that_overflows_again_and_again_is_to_be_kept_in_f32() {
    let advice = advice(&[2000.0; 5]);
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
    let advice = advice(&[2000.0, 1e-3, 2000.0, 1e-3, 2000.0, 1e-3, 2000.0]);
    assert_eq!(advice.len(), 4, "{advice:?}");
    assert!(advice.iter().all(|advice| advice.starts_with("none is needed")), "{advice:?}");
}
