//! Averages of weights, micro-batches and watched losses.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::GradScaler;
use tch_amp::accumulation::Accumulation;
use tch_amp::average::{Ema, Swa};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::optim::Sgd;
use tch_amp::scaler::SpikeConfig;

use super::{assert_takes, numbers, with_each_kind, witness};

#[test]
fn averaged_weights() {
    // The weight is another tensor before or after its average is made.
    for early in [true, false] {
        let what = format!("an average, early: {early}");
        let taken = with_each_kind(&what, |tensor| {
            let vs = VarStore::new(Device::Cpu);
            let other = vs.root().ones("other", &[2]);
            let mut w = vs.root().zeros("w", &[2, 3]);
            let mut average = Ema { decay: 0.5, ..Ema::default() }.build(&vs)?;
            let replaced = no_grad(|| w.f_set_data(&tensor)).is_ok();
            if early {
                average = Ema { decay: 0.5, ..Ema::default() }.build(&vs)?;
            }
            let before = numbers(&other);
            let moved = average.advance();
            if moved.is_err() && replaced {
                assert_eq!(average.updates()?, 0);
            }
            let swapped = average.swap_in().map(drop);
            assert_eq!(numbers(&other), before);
            average.copy_to_model()?;
            moved.and(swapped)
        });
        assert_takes(&what, &taken, &["f32", "bf16", "f16"]);
        // It has another shape.
        assert_eq!(taken.contains(&"transposed"), early);
    }
}

#[test]
fn losses_of_micro_batches() {
    let taken = with_each_kind("the loss of a micro-batch", |tensor| {
        let mut window = Accumulation::of_equal(1)?;
        let weighed = window.weigh(&tensor);
        assert_eq!(window.is_complete(), weighed.is_ok());
        weighed.map(drop)
    });
    assert_takes("the loss of a micro-batch", &taken, &["of no dimensions"]);
}

#[test]
fn gradients_of_micro_batches() {
    with_each_kind("a weight of micro-batches", |tensor| {
        let w = witness();
        let mut list = vec![w.shallow_clone()];
        list.push(tensor.f_set_requires_grad(true).unwrap_or(witness()));
        let opt = Sgd::default().build(list, 1.0)?;
        let mut window = Accumulation::of_equal(1)?;
        let mut scaler = GradScaler::new(Device::Cpu)?;
        window.backward_or_drop(&mut scaler, &opt, &(&w * 2.0).sum(Kind::Float))
    });
}

#[test]
fn saved_gradients_of_micro_batches() {
    let named = |w: Tensor| [("w".to_owned(), w)];
    with_each_kind("a weight of a saved window", |tensor| {
        let mut window = Accumulation::of_equal(2)?;
        // One has a gradient, and one gets it from the checkpoint of a usual parameter.
        let w = tensor.f_set_requires_grad(true).unwrap_or(tensor);
        let mut checkpoint = Checkpoint::new();
        let mut scaler = GradScaler::disabled();
        if let Ok(loss) = w.f_sum(Kind::Float) {
            let _failed = window.backward(&mut scaler, &loss);
        }
        checkpoint.add("window", &mut window.with_gradients(named(w.shallow_clone())))?;
        let restore = |window: &mut Accumulation, w: &Tensor, checkpoint: &Checkpoint| {
            let mut window = window.with_gradients(named(w.shallow_clone()));
            checkpoint.restore().add("window", &mut window).apply().map(drop)
        };
        restore(&mut window, &w, &checkpoint)?;
        let usual = witness();
        let mut other = Accumulation::of_equal(3)?;
        other.backward(&mut scaler, &(&usual * 2.0).sum(Kind::Float))?;
        let mut checkpoint = Checkpoint::new();
        checkpoint.add("window", &mut other.with_gradients(named(usual)))?;
        let restored = restore(&mut window, &w, &checkpoint);
        assert_eq!(window.micro_batches() == 3, restored.is_ok());
        restored
    });
}

#[test]
fn watched_losses() {
    let taken = with_each_kind("a watched loss", |tensor| {
        let w = witness();
        let mut opt = Sgd::default().build(&[w.shallow_clone()], 1.0)?;
        let mut scaler = GradScaler::new(Device::Cpu)?;
        let mut spikes = SpikeConfig::default().build()?;
        spikes.watch_loss(&tensor);
        scaler.backward(&(&w * 2.0).sum(Kind::Float))?;
        let stepped = scaler.step_unless_spike(&mut opt, 1.0, &mut spikes).map(drop);
        if stepped.is_err() {
            assert_eq!(numbers(&w), [1.0, 2.0]);
        }
        stepped
    });
    assert_takes("a watched loss", &taken, &["of no dimensions"]);
}

#[test]
fn averages_of_buffers() {
    let taken = with_each_kind("an average of buffers", |tensor| {
        let vs = VarStore::new(Device::Cpu);
        let _other = vs.root().ones("other", &[2]);
        let mut running = vs.root().zeros_no_train("running_mean", &[2, 3]);
        drop(no_grad(|| running.f_set_data(&tensor)));
        let mut swa = Swa { use_buffers: true }.build(&vs)?;
        swa.advance()
    });
    assert_takes("an average of buffers", &taken, &["f32", "i64"]);
}
