//! Gradients whose exponents are counted, and losses in a history.

use serde_json::Value;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::GradScaler;
use tch_amp::insight::{HealthReport, ScaleHealth, ScaleHistory};
use tch_amp::optim::Sgd;
use tch_amp::scaler::SpikeConfig;

use crate::tensors::with_each_kind;
use testkit::rows::rows;

/// The number of elements that were counted.
fn elements(report: &HealthReport) -> u64 {
    let exponents = &serde_json::to_value(report).unwrap()["model"]["exponents"];
    let counts = exponents["counts"].as_array().unwrap().iter();
    let others = ["zeros", "infinite", "nan"].map(|key| &exponents[key]);
    counts.chain(others).map(|count| count.as_u64().unwrap()).sum()
}

/// Every kind that has numbers is counted, or refused with nothing counted.
#[test]
fn counted_gradients() {
    for size in [vec![2, 3], vec![2], vec![3], vec![0], vec![]] {
        let what = format!("a gradient of {size:?} that is counted");
        let taken = with_each_kind(&what, |gradient| {
            let vs = VarStore::new(Device::Cpu);
            let other = vs.root().ones("other", &[5]);
            let w = vs.root().zeros("w", &size);
            let scaler = GradScaler::new(Device::Cpu)?;
            let mut health = ScaleHealth::new(&vs);
            other.sum(None).backward();
            health.observe(&scaler)?;
            let before = health.report()?;
            w.f_sum(Kind::Float)?.f_backward()?;
            let mut held = w.grad();
            no_grad(|| held.f_set_data(&gradient))?;
            let counted = health.observe(&scaler);
            let after = health.report()?;
            match counted {
                Ok(()) => {
                    let parts = if gradient.is_complex() { 2 } else { 1 };
                    let is_empty = !gradient.defined() || gradient.size().contains(&0);
                    let more = if is_empty { 0 } else { gradient.numel() * parts };
                    if !gradient.is_sparse() {
                        assert_eq!(elements(&after), 10 + more as u64);
                    }
                    assert_eq!(after.observed, 2);
                }
                Err(_) => assert_eq!(before, after),
            }
            counted
        });
        let wanted = &[
            "f32",
            "f64",
            "bf16",
            "f16",
            "of no dimensions",
            "empty",
            "transposed",
            "with gaps",
            "with an offset",
            "expanded",
            "overlapping",
            "negative",
            "zero without memory",
            "infinite",
            "NaN",
        ];
        taken.includes(wanted);
    }
}

#[test]
fn losses_of_a_history() {
    let taken = with_each_kind("a loss in a history", |tensor| {
        let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
        let mut opt = Sgd::default().build(&[w.shallow_clone()], 1.0)?;
        let mut scaler = GradScaler::new(Device::Cpu)?;
        let mut spikes = SpikeConfig::default().build()?;
        let mut history = ScaleHistory::new(2)?;
        spikes.watch_loss(&tensor);
        scaler.backward(&(&w * 2.0).sum(Kind::Float))?;
        let outcome = scaler.step_unless_spike(&mut opt, 1.0, &mut spikes)?;
        history.record(&scaler, &outcome, 0.1)?;
        assert!(rows::<Value>(&history.report()?, "steps")[0]["loss"].is_f64());
        Ok(())
    });
    taken.includes(&["of no dimensions"]);
}
