//! Gradients of half-precision parameters that are accumulated in f32.

use tch::{Device, Kind, Tensor};
use tch_amp::optim::{MasterWeights, OptimizerError, Sgd};
use tch_amp::{Error, GradScaler};

use crate::common::tensors::leaf;

/// Sums of micro-batches stop growing in bf16, but not in f32.
#[test]
fn gradients_accumulate_in_f32() {
    let w = leaf(&[0.0; 3], Kind::BFloat16, Device::Cpu);
    let list = [w.shallow_clone()];
    let mut opt = Sgd::default().master_weights(MasterWeights::Float).build(&list, 1.0).unwrap();
    let micro = || (&w * 1.0).sum(Kind::BFloat16).backward();
    micro();
    opt.accumulate_in_f32().unwrap();
    assert_eq!(w.grad().kind(), Kind::Float);
    (0..999).for_each(|_| micro());
    assert_eq!(w.grad().double_value(&[0]), 1000.0);
    opt.step().unwrap();
    assert_eq!(opt.master_weight(0).unwrap().unwrap().double_value(&[0]), -1000.0);
    opt.zero_grad().unwrap();
    micro();
    assert_eq!(w.grad().kind(), Kind::Float);
    let mut plain = Sgd::default().build(&list, 1.0).unwrap();
    assert!(matches!(
        plain.accumulate_in_f32(),
        Err(Error::Optimizer(OptimizerError::NoMasterWeights))
    ));
}

/// Small fp16 gradients that would become zero if they were unscaled in fp16.
#[test]
fn unscaling_does_not_underflow() {
    let w = leaf(&[0.0], Kind::Half, Device::Cpu);
    let list = [w.shallow_clone()];
    let mut opt = Sgd::default().master_weights(MasterWeights::Float).build(&list, 1.0).unwrap();
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    (&w * 2f64.powi(-20)).sum(Kind::Half).backward();
    drop(scaler.scale(&Tensor::from(1f32)).unwrap());
    scaler.unscale_(&mut opt).unwrap();
    let gradient = w.grad();
    assert_eq!((gradient.kind(), gradient.double_value(&[0])), (Kind::Float, 2f64.powi(-36)));
}

/// If the scaler unscales in the step, nothing is converted. If it unscales before, the gradients are f32 from then on.
#[test]
fn gradients_that_were_unscaled_before_a_step_stay_f32() {
    for way in ["step", "unscale_", "clip", "transaction"] {
        let w = leaf(&[0.0], Kind::BFloat16, Device::Cpu);
        let list = [w.shallow_clone()];
        let mut opt =
            Sgd::default().master_weights(MasterWeights::Float).build(&list, 1.0).unwrap();
        let mut scaler = GradScaler::new(Device::Cpu).unwrap();
        for iteration in 0..2 {
            opt.zero_grad().unwrap();
            scaler.backward(&(&w * 1.0).sum(Kind::Float)).unwrap();
            let wide = iteration == 1 && way != "step";
            let kind = if wide { Kind::Float } else { Kind::BFloat16 };
            assert_eq!(w.grad().kind(), kind, "{way} in iteration {iteration}");
            let outcome = match way {
                "step" => scaler.step(&mut opt),
                "unscale_" => scaler.unscale_(&mut opt).and_then(|()| scaler.step(&mut opt)),
                "clip" => scaler.step_clip_norm(&mut opt, 1.0),
                _ => scaler.unscale(&mut opt).unwrap().step(),
            };
            assert!(outcome.unwrap().is_stepped().unwrap());
            scaler.update().unwrap();
        }
    }
}

/// One bf16 variable existed before the call but was unknown to the optimizer; another is added after the call.
#[test]
fn variables_that_are_added_have_f32_gradients_too() {
    let mut vs = tch::nn::VarStore::new(Device::Cpu);
    let _first = vs.root().ones("first", &[2]);
    vs.bfloat16();
    let sgd = Sgd::default();
    let mut opt = sgd.master_weights(MasterWeights::Float).build(&vs, 1.0).unwrap();
    let init = tch::nn::Init::Const(1.0);
    let before = vs.root().f_var("before", &[2], init).unwrap();
    tch::no_grad(|| before.shallow_clone().set_data(&before.to_kind(Kind::BFloat16)));
    opt.accumulate_in_f32().unwrap();
    let after = vs.root().f_var("after", &[2], init).unwrap();
    tch::no_grad(|| after.shallow_clone().set_data(&after.to_kind(Kind::BFloat16)));
    opt.zero_grad().unwrap();
    opt.step().unwrap();
    for w in [&before, &after] {
        w.sum(Kind::BFloat16).backward();
        assert_eq!(w.grad().kind(), Kind::Float);
    }
}

#[test]
fn a_variable_that_is_added_later_is_unscaled_in_f32_before_its_first_step() {
    let mut vs = tch::nn::VarStore::new(Device::Cpu);
    let _first = vs.root().ones("first", &[2]);
    vs.bfloat16();
    let sgd = Sgd::default();
    let mut opt = sgd.master_weights(MasterWeights::Float).build(&vs, 1.0).unwrap();
    let late = vs.root().ones("late", &[2]);
    tch::no_grad(|| late.shallow_clone().set_data(&late.to_kind(Kind::BFloat16)));
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    scaler.backward(&late.sum(Kind::Float)).unwrap();
    scaler.unscale_(&mut opt).unwrap();
    assert_eq!(late.grad().kind(), Kind::Float);
}
