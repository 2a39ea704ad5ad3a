//! Parameters that other code writes to, and their master weights.

use rstest::rstest;
use tch::nn::{Init, VarStore};
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::optim::{Adagrad, AdamW, MasterWeights, Optimizer, Sgd};

use crate::optim::{load_with, one, replace, set_grad, step_with, to_f64};
use testkit::bits::bits;
use testkit::checkpoints::checkpoint_of;
use testkit::for_each_device;
use testkit::tensors::leaf;

/// A bf16 weight of three numbers after enough steps that its master weights have bits that bf16 lacks.
fn trained(device: Device, masters: MasterWeights) -> (Tensor, Optimizer) {
    let w = leaf(&[1.0, 2.0, 3.0], Kind::BFloat16, device);
    let adamw = AdamW::default();
    let mut opt = one(&w, adamw, masters, 1e-3);
    for _ in 0..3 {
        step_with(&mut opt, &w, &[1.0, -1.0, 0.5]);
    }
    (w, opt)
}

fn master(opt: &Optimizer) -> Tensor {
    opt.master_weight(0).unwrap().unwrap()
}

#[rstest]
fn training_resumes_from_written_values_and_the_other_masters_stay(
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
        // The same steps, by an optimizer that resumed from the saved state.
        twin.load_state_dict(&saved).unwrap();
        let twins = twin.trainable_variables().remove(0);
        no_grad(|| twins.shallow_clone().copy_(&w));
        for step in 0..5 {
            for (w, opt) in [(&w, &mut opt), (&twins, &mut twin)] {
                step_with(opt, w, &[1.0, -1.0, 0.5]);
            }
            assert_eq!(bits(&w), bits(&twins), "step {step}");
            assert_eq!(bits(&master(&opt)), bits(&master(&twin)), "step {step}");
        }
        assert!(to_f64(&w)[1] > 6.9);
    });
}

#[rstest]
fn training_resumes_from_a_model_that_is_restored_without_its_optimizer(
    #[values(MasterWeights::Float, MasterWeights::Remainder)] masters: MasterWeights,
) {
    let [vs, other] = [1.0, 7.0].map(|value| {
        let mut vs = VarStore::new(Device::Cpu);
        let _w = vs.root().var("w", &[40], Init::Const(value));
        vs.bfloat16();
        vs
    });
    let mut opt = Sgd::default().master_weights(masters).build(&vs, 1e-3).unwrap();
    let w = vs.trainable_variables().remove(0);
    set_grad(&w, &[1.0; 40]);
    opt.step().unwrap();
    checkpoint_of([("model", &mut &other)]).restore().add("model", &vs).apply().unwrap();
    opt.step().unwrap();
    assert_eq!(to_f64(&master(&opt))[0], f64::from(7f32 - 1e-3));
}

#[test]
fn masters_that_a_state_made_before_any_step_follow_the_parameter_too() {
    let w = leaf(&[1.0], Kind::BFloat16, Device::Cpu);
    let mut opt = one(&w, Adagrad::default(), MasterWeights::Float, 1e-3);
    drop(opt.state_dict().unwrap());
    let _filled = no_grad(|| w.shallow_clone().fill_(5.0));
    assert_eq!(to_f64(&opt.state_dict().unwrap().state["0"]["master_param"]), [5.0]);
}

/// Each combination that keeps f32 copies or an equivalent.
fn with_masters() -> Vec<(Kind, MasterWeights)> {
    let random = MasterWeights::StochasticRounding { seed: 3 };
    let halves = [MasterWeights::Float, MasterWeights::Remainder, random];
    let halves = halves.map(|masters| (Kind::Half, masters));
    let bf16 = [MasterWeights::Float, MasterWeights::Remainder];
    halves.into_iter().chain(bf16.map(|masters| (Kind::BFloat16, masters))).collect()
}

/// Three numbers that were stepped with gradients other than 1.
fn stepped(kind: Kind, masters: MasterWeights, device: Device) -> (Tensor, Optimizer) {
    let w = leaf(&[1.0, 2.0, 3.0], kind, device);
    let sgd = Sgd { momentum: 0.5, ..Default::default() };
    let mut opt = one(&w, sgd, masters, 1e-4);
    for _ in 0..3 {
        step_with(&mut opt, &w, &[1.0, -1.0, 0.5]);
    }
    (w, opt)
}

#[test]
fn training_resumes_from_values_written_after_a_state_was_loaded() {
    for_each_device(|device| {
        for (kind, masters) in with_masters() {
            let (w, mut opt) = stepped(kind, masters, device);
            let saved = opt.state_dict().unwrap();
            let numbers = to_f64(&saved.state["0"]["master_param"]);
            opt.load_state_dict(&saved).unwrap();
            let _filled = no_grad(|| w.get(1).fill_(7.0));
            opt.set_lr(0.0).unwrap();
            opt.step().unwrap();
            assert_eq!(to_f64(&w)[1], 7.0, "{kind:?} {masters:?} on {device:?}");
            let want = [numbers[0], 7.0, numbers[2]];
            assert_eq!(to_f64(&master(&opt)), want, "{kind:?} {masters:?} on {device:?}");
        }
    });
}

#[test]
fn a_state_may_be_loaded_before_its_model() {
    for_each_device(|device| {
        for (kind, masters) in with_masters() {
            let (w, mut opt) = stepped(kind, masters, device);
            let saved = opt.state_dict().unwrap();
            let other = leaf(&[9.0, 9.0, 9.0], kind, device);
            let sgd = Sgd { momentum: 0.5, ..Default::default() };
            let list = vec![other.shallow_clone()];
            let mut again = sgd.master_weights(masters).build(list, 1e-4).unwrap();
            again.load_state_dict(&saved).unwrap();
            // A state that is requested in between is the loaded one.
            let meanwhile = again.state_dict().unwrap().state["0"]["master_param"].copy();
            assert_eq!(bits(&meanwhile), bits(&saved.state["0"]["master_param"]));
            no_grad(|| other.shallow_clone().copy_(&w));
            for step in 0..3 {
                for (w, opt) in [(&w, &mut opt), (&other, &mut again)] {
                    step_with(opt, w, &[1.0, -1.0, 0.5]);
                }
                assert_eq!(bits(&w), bits(&other), "{kind:?} {masters:?} {step}");
                assert_eq!(bits(&master(&opt)), bits(&master(&again)), "{masters:?} {step}");
            }
        }
    });
}

#[test]
fn a_master_halfway_between_two_numbers_fits_both() {
    // A remainder of 0x8000 is a tie, which rounds away from zero to the larger number; rounding to even gives the
    // smaller.
    let number = f32::from_bits(0x3f80_8000);
    let larger = f64::from(f32::from_bits(0x3f81_0000));
    let w = leaf(&[larger], Kind::BFloat16, Device::Cpu);
    let list = vec![w.shallow_clone()];
    let sgd = Sgd::default();
    let mut opt = sgd.master_weights(MasterWeights::Float).build(list, 0.0).unwrap();
    step_with(&mut opt, &w, &[1.0]);
    let mut saved = opt.state_dict().unwrap();
    replace(&mut saved, "0", "master_param", Tensor::from_slice(&[number]));
    for masters in [MasterWeights::Float, MasterWeights::Remainder] {
        let mut opt = one(&w, sgd, masters, 0.0);
        opt.load_state_dict(&saved).unwrap();
        let _written = no_grad(|| w.shallow_clone().fill_(larger));
        opt.step().unwrap();
        assert_eq!(to_f64(&master(&opt)), [f64::from(number)], "{masters:?}");
    }
}

/// The old memory is free when the new memory is allocated, and is often reused for it.
#[test]
fn new_data_in_reused_memory_is_detected() {
    for run in 0..200 {
        let (w, mut opt) = stepped(Kind::BFloat16, MasterWeights::Float, Device::Cpu);
        opt.set_lr(0.0).unwrap();
        opt.step().unwrap();
        let handle = || w.shallow_clone();
        no_grad(|| handle().set_data(&w.to_kind(Kind::Float)));
        no_grad(|| {
            handle().set_data(&Tensor::from_slice(&[5f32, 6.0, 7.0]).to_kind(Kind::BFloat16))
        });
        opt.step().unwrap();
        assert_eq!(to_f64(&w), [5.0, 6.0, 7.0], "run {run}");
    }
}

/// The parameter and its gradient get another order of memory, and the master keeps its own.
#[test]
fn a_master_in_another_order_of_memory_belongs_to_the_same_elements() {
    let w = leaf(&[1.0, 2.0, 3.0, 4.0], Kind::BFloat16, Device::Cpu).detach().view([2, 2]);
    let w = w.set_requires_grad(true);
    let mut opt = one(&w, Sgd::default(), MasterWeights::Float, 1.0);
    set_grad(&w, &[0.0; 4]);
    opt.step().unwrap();
    set_grad(&w, &[0.0, 1.0, 0.0, 0.0]);
    for tensor in [&w, &w.grad()] {
        no_grad(|| tensor.shallow_clone().set_data(&tensor.detach().tr().contiguous().tr()));
    }
    opt.step().unwrap();
    assert_eq!(to_f64(&w), [1.0, 1.0, 3.0, 4.0]);
    assert_eq!(to_f64(&master(&opt)), [1.0, 1.0, 3.0, 4.0]);
}

/// From another place in the same memory, or in another order, it has other values.
#[rstest]
#[case::another_offset(|memory: &Tensor| memory.get(1), [5.0, 6.0, 7.0, 8.0])]
#[case::other_strides(|memory: &Tensor| memory.get(0).tr(), [1.0, 3.0, 2.0, 4.0])]
#[case::both(|memory: &Tensor| memory.get(1).tr(), [5.0, 7.0, 6.0, 8.0])]
fn a_parameter_that_moves_within_its_memory_is_detected(
    #[case] place: fn(&Tensor) -> Tensor,
    #[case] want: [f64; 4],
) {
    for_each_device(|device| {
        for (kind, masters) in with_masters() {
            let memory = leaf(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], kind, device);
            let memory = memory.detach().view([2, 2, 2]);
            let w = memory.get(0).set_requires_grad(true);
            if device != Device::Cpu && place(&memory).stride() != w.stride() {
                continue; // is refused
            }
            let mut opt = one(&w, Sgd::default(), masters, 0.0);
            set_grad(&w, &[1.0; 4]);
            opt.step().unwrap();
            no_grad(|| w.shallow_clone().set_data(&place(&memory)));
            opt.step().unwrap();
            assert_eq!(to_f64(&w), want, "{kind:?} {masters:?}");
            assert_eq!(to_f64(&master(&opt)), want, "{kind:?} {masters:?}");
        }
    });
}

/// The bits of a bf16 number are another number in fp16.
#[test]
fn a_parameter_whose_memory_is_read_as_another_dtype_is_detected() {
    for_each_device(|device| {
        let memory = leaf(&[1.0, 2.0], Kind::BFloat16, device).detach();
        let w = memory.view_dtype(Kind::BFloat16).set_requires_grad(true);
        let mut opt = one(&w, Sgd::default(), MasterWeights::Float, 0.0);
        set_grad(&w, &[1.0; 2]);
        opt.step().unwrap();
        let other = memory.view_dtype(Kind::Half);
        let (want, gradient) = (to_f64(&other), w.grad().to_kind(Kind::Half));
        no_grad(|| w.shallow_clone().set_data(&other));
        no_grad(|| w.grad().set_data(&gradient));
        opt.step().unwrap();
        assert_eq!((to_f64(&w), to_f64(&master(&opt))), (want.clone(), want));
    });
}

#[test]
fn masters_that_were_discarded_are_recreated() {
    for ((kind, masters), are_loaded) in
        with_masters().into_iter().flat_map(|mode| [(mode, false), (mode, true)])
    {
        let context = format!("{kind:?} {masters:?}, loaded: {are_loaded}");
        let (w, mut opt) = stepped(kind, masters, Device::Cpu);
        assert_ne!(to_f64(&master(&opt)), to_f64(&w), "{context}: nothing would be forgotten");
        if are_loaded {
            let saved = opt.state_dict().unwrap();
            opt.load_state_dict(&saved).unwrap();
        }
        opt.reset_master_weights();
        assert!(opt.master_weight(0).unwrap().is_none(), "{context}");
        let rounded = to_f64(&w);
        opt.set_lr(0.0).unwrap();
        opt.step().unwrap();
        assert_eq!(to_f64(&master(&opt)), rounded, "{context}");
    }
}

/// A state is loaded into a running optimizer while no other code writes to its parameters.
#[test]
fn a_state_that_is_loaded_back_is_used_if_it_fits_the_parameters() {
    for_each_device(|device| {
        for (kind, masters) in with_masters() {
            let context = format!("{kind:?} {masters:?} on {device:?}");
            let [(w, mut opt), (twin, mut other)] =
                [(); 2].map(|()| stepped(kind, masters, device));
            let saved = opt.state_dict().unwrap();
            opt.load_state_dict(&saved).unwrap();
            for (w, opt) in [(&w, &mut opt), (&twin, &mut other)] {
                step_with(opt, w, &[1.0, -1.0, 0.5]);
            }
            assert_eq!(bits(&w), bits(&twin), "{context}");
            assert_eq!(bits(&master(&opt)), bits(&master(&other)), "{context}");
            let strange = Tensor::from_slice(&[9f32; 3]);
            load_with(&mut opt, "master_param", strange).unwrap();
            opt.set_lr(0.0).unwrap();
            opt.step().unwrap();
            assert_eq!(bits(&w), bits(&twin), "{context}");
            assert_eq!(to_f64(&master(&opt)), to_f64(&w), "{context}");
        }
    });
}

/// Numbers that are equal in bf16 may differ in fp16.
#[test]
fn training_resumes_from_a_written_fp16_parameter_beside_a_bf16_one() {
    for_each_device(|device| {
        let all = [Kind::BFloat16, Kind::Half].map(|kind| leaf(&[1.0, 2.0], kind, device));
        let sgd = Sgd::default();
        let mut opt = sgd.master_weights(MasterWeights::Float).build(&all, 0.0).unwrap();
        all.iter().for_each(|w| set_grad(w, &[1.0; 2]));
        opt.step().unwrap();
        let near = 1.0 + 2f64.powi(-10);
        no_grad(|| all.iter().for_each(|w| drop(w.get(0).fill_(near))));
        opt.step().unwrap();
        assert_eq!(to_f64(&all[1]), [near, 2.0]);
        assert_eq!(to_f64(&opt.master_weight(1).unwrap().unwrap()), [near, 2.0]);
    });
}
