//! Parameters that somebody else writes to, and their masters.

use rstest::rstest;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::Error;
use tch_amp::checkpoint::Checkpoint;
use tch_amp::optim::{Adagrad, AdamW, MasterWeights, Optimizer, Sgd};

use crate::common::bits::bits;
use crate::common::for_each_device;
use crate::{leaf, set_grad, to_f64};

/// A bf16 weight of three numbers, stepped so often that its masters have bits that it lacks.
fn trained(device: Device, masters: MasterWeights) -> (Tensor, Optimizer) {
    let w = leaf(&[1.0, 2.0, 3.0], Kind::BFloat16, device);
    let adamw = AdamW::default();
    let mut opt = adamw.build_with_master_weights(vec![w.shallow_clone()], 1e-3, masters).unwrap();
    for _ in 0..3 {
        set_grad(&w, &[1.0, -1.0, 0.5]);
        opt.step().unwrap();
    }
    (w, opt)
}

fn master(opt: &Optimizer) -> Tensor {
    opt.master_weight(0).unwrap().unwrap()
}

#[rstest]
fn what_was_written_is_gone_on_from_and_the_rest_of_the_masters_stays(
    #[values(MasterWeights::Float, MasterWeights::Remainder)] masters: MasterWeights,
) {
    for_each_device(|device| {
        let (w, mut opt) = trained(device, masters);
        let (_, mut twin) = trained(device, masters);
        let before = to_f64(&master(&opt));
        let _filled = no_grad(|| w.get(1).fill_(7.0));
        let saved = opt.state_dict().unwrap();
        let renewed = to_f64(&saved.state["0"]["master_param"]);
        match masters {
            MasterWeights::Float => assert_eq!(renewed, [before[0], 7.0, before[2]]),
            _ => assert_eq!(renewed, to_f64(&w)),
        }
        // Steps of an optimizer that got there by itself.
        twin.load_state_dict(&saved).unwrap();
        let twins = twin.trainable_variables().remove(0);
        no_grad(|| twins.shallow_clone().copy_(&w));
        for step in 0..5 {
            for (w, opt) in [(&w, &mut opt), (&twins, &mut twin)] {
                set_grad(w, &[1.0, -1.0, 0.5]);
                opt.step().unwrap();
            }
            assert_eq!(bits(&w), bits(&twins), "step {step}");
            assert_eq!(bits(&master(&opt)), bits(&master(&twin)), "step {step}");
        }
        assert!(to_f64(&w)[1] > 6.9);
    });
}

#[rstest]
fn a_model_that_is_restored_without_its_optimizer_is_what_training_goes_on_from(
    #[values(MasterWeights::Float, MasterWeights::Remainder)] masters: MasterWeights,
) {
    let vs = VarStore::new(Device::Cpu);
    let mut other = VarStore::new(Device::Cpu);
    for (vs, value) in [(&vs, 1.0), (&other, 7.0)] {
        let _w = vs.root().var("w", &[40], tch::nn::Init::Const(value));
    }
    let mut vs = vs;
    vs.bfloat16();
    other.bfloat16();
    let mut opt = Sgd::default().build_with_master_weights(&vs, 1e-3, masters).unwrap();
    let w = vs.trainable_variables().remove(0);
    set_grad(&w, &[1.0; 40]);
    opt.step().unwrap();
    let path =
        std::env::temp_dir().join(format!("tch-amp-stale-{masters:?}-{}.pt", std::process::id()));
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_model("model", &other).unwrap();
    checkpoint.save(&path).unwrap();
    Checkpoint::load(&path).unwrap().restore().model("model", &vs).apply().unwrap();
    std::fs::remove_file(path).unwrap();
    opt.step().unwrap();
    assert_eq!(to_f64(&master(&opt))[0], f64::from(7f32 - 1e-3));
}

#[test]
fn a_loaded_master_counts_whatever_is_written_before_the_next_step() {
    let (w, mut opt) = trained(Device::Cpu, MasterWeights::Float);
    let saved = opt.state_dict().unwrap();
    let want = to_f64(&saved.state["0"]["master_param"].copy());
    opt.load_state_dict(&saved).unwrap();
    // As a model that is restored after its optimizer.
    let copy = w.detach().copy();
    no_grad(|| w.shallow_clone().copy_(&copy));
    assert_eq!(to_f64(&opt.state_dict().unwrap().state["0"]["master_param"]), want);
}

#[test]
fn a_parameter_that_has_become_f32_is_an_error() {
    let (w, mut opt) = trained(Device::Cpu, MasterWeights::Float);
    no_grad(|| w.shallow_clone().set_data(&w.to_kind(Kind::Float)));
    set_grad_anew(&w);
    let error = opt.step().unwrap_err();
    assert!(matches!(error, Error::Parameter { .. }), "{error}");
    assert!(error.to_string().contains("another dtype than when its master weight was made"));
}

fn set_grad_anew(w: &Tensor) {
    w.shallow_clone().zero_grad();
    let mut opt = Sgd::default().build(vec![w.shallow_clone()], 0.0).unwrap();
    opt.zero_grad().unwrap();
    w.sum(Kind::Float).backward();
}

#[test]
fn masters_that_a_state_made_before_any_step_follow_the_parameter_too() {
    let w = leaf(&[1.0], Kind::BFloat16, Device::Cpu);
    let mut opt = Adagrad::default()
        .build_with_master_weights(vec![w.shallow_clone()], 1e-3, MasterWeights::Float)
        .unwrap();
    drop(opt.state_dict().unwrap());
    let _filled = no_grad(|| w.shallow_clone().fill_(5.0));
    assert_eq!(to_f64(&opt.state_dict().unwrap().state["0"]["master_param"]), [5.0]);
}

#[test]
fn f32_gradients_are_no_matter_where_no_parameter_is_half() {
    let w = leaf(&[1.0], Kind::Float, Device::Cpu);
    let mut opt = Sgd::default().build(vec![w], 1.0).unwrap();
    opt.accumulate_in_f32().unwrap();
    let w = leaf(&[1.0], Kind::Half, Device::Cpu);
    let mut opt = Sgd::default().build(vec![w], 1.0).unwrap();
    assert!(matches!(opt.accumulate_in_f32(), Err(Error::NoMasterWeights)));
}
