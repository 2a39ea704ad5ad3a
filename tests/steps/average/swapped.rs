//! The guard that puts averages in the place of weights.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::autocast::AutocastGuard;
use tch_amp::average::{Ema, Swa};
use tch_amp::optim::{AdamW, MasterWeights, Optimizer};

use super::{model, random, set};
use testkit::optimizers::WEIGHTS;
use testkit::rng::Rng;
use testkit::tensors::{TIES, tied};
use testkit::{assert_says, to_f64};

#[test]
fn the_averages_are_in_the_place_of_the_weights_until_the_guard_goes() {
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
        let (vs, w) = model(kind, 2);
        let mut average = Swa::default().build(&vs).unwrap();
        for value in [1.0, 4.0] {
            set(&w, &[value, -value]);
            average.advance().unwrap();
        }
        {
            let _swapped = average.swap_in().unwrap();
            assert_eq!((to_f64(&w), w.kind()), (vec![2.5, -2.5], kind));
            assert!(w.requires_grad());
        }
        assert_eq!(to_f64(&w), [4.0, -4.0]);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _swapped = average.swap_in().unwrap();
            panic!("the evaluation fails");
        }));
        assert!(panicked.is_err());
        assert_eq!((to_f64(&w), w.kind()), (vec![4.0, -4.0], kind));
        average.copy_to_model().unwrap();
        assert_eq!(to_f64(&w), [2.5, -2.5]);
    }
}

/// Guards that go in the wrong order would leave the averages of the one in the place of the weights.
#[test]
fn the_averages_of_another_are_not_replaced() {
    let (vs, w) = model(Kind::Float, 1);
    let mut averages = [1.0, 2.0].map(|value| {
        set(&w, &[value]);
        let mut average = Swa::default().build(&vs).unwrap();
        average.advance().unwrap();
        average
    });
    set(&w, &[3.0]);
    let [first, second] = &mut averages;
    let swapped = first.swap_in().unwrap();
    assert_says(second.swap_in(), "drop their guard first");
    assert_eq!(to_f64(&w), [1.0]);
    drop(swapped);
    assert_eq!(to_f64(&w), [3.0]);
    let swapped = second.swap_in().unwrap();
    assert_eq!(to_f64(&w), [2.0]);
    drop(swapped);
    assert_eq!(to_f64(&w), [3.0]);
}

#[test]
fn a_region_does_not_serve_casts_of_the_other_weights() {
    let vs = VarStore::new(Device::Cpu);
    let w = vs.root().zeros("w", &[1, 4]);
    let mut average = Swa::default().build(&vs).unwrap();
    for value in [1.0, 3.0] {
        drop(tch::no_grad(|| w.shallow_clone().fill_(value)));
        average.advance().unwrap();
    }
    let _region = AutocastGuard::new(Device::Cpu).unwrap();
    let xs = Tensor::ones([1, 4], (Kind::Float, Device::Cpu));
    let product = || xs.linear(&w, None::<&Tensor>).double_value(&[0, 0]);
    assert_eq!(product(), 12.0);
    let swapped = average.swap_in().unwrap();
    assert_eq!(product(), 8.0);
    drop(swapped);
    assert_eq!(product(), 12.0);
    average.copy_to_model().unwrap();
    assert_eq!(product(), 8.0);
}

/// Trains for some steps, and looks at the averages in between if asked.
fn train(masters: MasterWeights, kind: Kind, looks: bool) -> (Vec<f64>, Vec<f64>) {
    tch::manual_seed(5);
    let mut vs = VarStore::new(Device::Cpu);
    let w = vs.root().randn_standard("w", &[40]);
    vs.set_kind(kind);
    let mut opt = AdamW::default().master_weights(masters).build(&vs, 1e-3).unwrap();
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    let mut average = Ema { decay: 0.9, debias: true, ..Ema::default() }.build(&vs).unwrap();
    for _ in 0..12 {
        opt.zero_grad().unwrap();
        scaler.backward(&(&w * &w * 0.3).sum(Kind::Float)).unwrap();
        let outcome = scaler.step(&mut opt).unwrap();
        scaler.update().unwrap();
        average.update(&outcome).unwrap();
        if looks {
            let _swapped = average.swap_in().unwrap();
            let _loss = tch::no_grad(|| (&w * 2.0).sum(Kind::Float));
        }
    }
    (to_f64(&w), to_f64(&average.average("w").unwrap()))
}

#[test]
fn evaluating_the_averages_changes_no_bit_of_the_training() {
    for (kind, masters) in WEIGHTS {
        assert_eq!(train(masters, kind, true), train(masters, kind, false), "{masters:?} {kind:?}");
    }
}

/// Master weights are those of the weights that were overwritten until the next step takes the new ones.
#[test]
fn an_optimizer_goes_on_from_the_averages_that_are_copied_to_the_model() {
    for (kind, masters) in WEIGHTS {
        let (vs, w) = model(kind, 40);
        set(&w, &random(&mut Rng::new(3), 40));
        let mut opt = AdamW::default().master_weights(masters).build(&vs, 1e-2).unwrap();
        let mut average = Swa::default().build(&vs).unwrap();
        let step = |opt: &mut Optimizer| {
            opt.zero_grad().unwrap();
            opt.backward_step(&(&w * &w * 0.3).sum(Kind::Float)).unwrap();
            to_f64(&w)
        };
        for _ in 0..4 {
            drop(step(&mut opt));
            average.advance().unwrap();
        }
        average.copy_to_model().unwrap();
        let copied = to_f64(&w);
        let mean = average.average("w").unwrap();
        assert_eq!(copied, to_f64(&mean.to_kind(kind)), "{masters:?} {kind:?}");
        opt.set_lr(0.0).unwrap();
        assert_eq!(step(&mut opt), copied, "{masters:?} {kind:?}");
    }
}

#[test]
fn a_tied_weight_is_swapped_once_and_comes_back() {
    for way in TIES {
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
            let (vs, w) = tied(way, &[0.0], kind, Device::Cpu);
            let mut average = Swa::default().build(&vs).unwrap();
            for value in [1.0, 4.0] {
                set(&w, &[value]);
                average.advance().unwrap();
            }
            let swapped = average.swap_in().unwrap();
            assert_eq!(to_f64(&w), [2.5], "{way:?} {kind:?}");
            drop(swapped);
            assert_eq!(to_f64(&w), [4.0], "{way:?} {kind:?}");
            for name in ["embedding", "head"] {
                assert_eq!(to_f64(&average.average(name).unwrap()), [2.5], "{way:?} {kind:?}");
            }
        }
    }
}
