//! Gradients of half-precision parameters that are accumulated in f32.

use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tch_amp::optim::{AdamW, MasterWeights, OptimizerError, Sgd};
use tch_amp::{Error, GradScaler};

use crate::optim::{one, to_f64};
use testkit::bits::bits;
use testkit::optimizers::scaler;
use testkit::tensors::leaf;
use testkit::{assert_refused, for_each_device};

/// Sums of micro-batches stop growing in bf16, but not in f32.
#[test]
fn gradients_accumulate_in_f32() {
    let w = leaf(&[0.0; 3], Kind::BFloat16, Device::Cpu);
    let mut opt = one(&w, Sgd::default(), MasterWeights::Float, 1.0);
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
    let half = leaf(&[0.0], Kind::Half, Device::Cpu);
    for w in [w, half] {
        let mut plain = Sgd::default().build(&[w], 1.0).unwrap();
        let refused = plain.accumulate_in_f32();
        assert_refused!(refused, Error::Optimizer(OptimizerError::NoMasterWeights));
    }
    // Nothing is to be done for a parameter that is f32.
    let f32s = leaf(&[0.0], Kind::Float, Device::Cpu);
    Sgd::default().build(&[f32s], 1.0).unwrap().accumulate_in_f32().unwrap();
}

/// Small fp16 gradients that would become zero if they were unscaled in fp16.
#[test]
fn unscaling_does_not_underflow() {
    let w = leaf(&[0.0], Kind::Half, Device::Cpu);
    let mut opt = one(&w, Sgd::default(), MasterWeights::Float, 1.0);
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
        let mut opt = one(&w, Sgd::default(), MasterWeights::Float, 1.0);
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

/// Parameters keep f32 gradients when the optimizer is gone that has made them so.
#[rstest]
fn an_optimizer_without_masters_goes_on_after_one_with_masters(
    #[values(Kind::BFloat16, Kind::Half)] kind: Kind,
    #[values("with its gradients", "with new ones", "built before")] how: &str,
    #[values("accumulate_in_f32", "unscale_", "transaction")] by: &str,
) {
    for_each_device(|device| {
        let w = leaf(&[1.0, 2.0], kind, device);
        let twin = leaf(&[1.0, 2.0], kind, device);
        let list = |w: &Tensor| vec![w.shallow_clone()];
        let backward = |w: &Tensor| (w * 0.25).sum(kind).backward();
        let mut early = Sgd::default().build(list(&w), 0.5).unwrap();
        let adamw = AdamW::default().master_weights(MasterWeights::Float);
        let mut opt = adamw.build(list(&w), 0.0).unwrap();
        let mut scaler = scaler(device, 1.0);
        drop(scaler.scale(&Tensor::from(1f32).to_device(device)).unwrap());
        backward(&w);
        match by {
            "accumulate_in_f32" => opt.accumulate_in_f32().unwrap(),
            "unscale_" => scaler.unscale_(&mut opt).unwrap(),
            _ => drop(scaler.unscale(&mut opt).unwrap().step().unwrap()),
        }
        assert_eq!(w.grad().kind(), Kind::Float);
        drop(opt);
        let mut late = match how {
            "built before" => {
                let error = early.step().unwrap_err().to_string();
                assert!(error.contains("drop it with the optimizer's `zero_grad`"), "{error}");
                early
            }
            _ => Sgd::default().build(list(&w), 0.5).unwrap(),
        };
        if how != "with its gradients" {
            late.zero_grad().unwrap();
            backward(&w);
        }
        assert_eq!(w.grad().kind(), kind);
        late.step().unwrap();
        let mut twins = Sgd::default().build(list(&twin), 0.5).unwrap();
        backward(&twin);
        twins.step().unwrap();
        assert_eq!(bits(&w), bits(&twin), "{how} on {device:?}");
    });
}

/// The dtype of a gradient is a setting of its parameter, which stays when that is converted.
#[rstest]
#[case(MasterWeights::None)]
#[case(MasterWeights::Float)]
fn a_model_can_be_converted_after_its_gradients_were_f32(#[case] masters: MasterWeights) {
    let convert = |w: &Tensor, kind: Kind| {
        tch::no_grad(|| w.shallow_clone().set_data(&w.to_kind(kind)));
    };
    let w = leaf(&[1.0, 2.0], Kind::BFloat16, Device::Cpu);
    let list = || vec![w.shallow_clone()];
    let mut opt = Sgd::default().master_weights(MasterWeights::Float).build(list(), 0.5).unwrap();
    opt.accumulate_in_f32().unwrap();
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half, Kind::Double] {
        opt.zero_grad().unwrap();
        convert(&w, kind);
        opt = Sgd::default().master_weights(masters).build(list(), 0.5).unwrap();
        opt.zero_grad().unwrap();
        (&w * 0.25).sum(kind).backward();
        let before = to_f64(&w)[0];
        opt.step().unwrap();
        assert_eq!(to_f64(&w)[0], before - 0.125, "{kind:?}");
    }
}
