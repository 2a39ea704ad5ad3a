//! Parameter groups and their options.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::Error;
use tch_amp::optim::{
    Adagrad, Adam, AdamW, AdjustLr, Algorithm, Lion, Muon, OptimizerError, ParamGroup, RmsProp, Sgd,
};

use crate::optim::{set_grad, step_with, to_f64};
use testkit::tensors::leaf;

fn weights(names: &[&str]) -> Vec<(String, Tensor)> {
    let weight = || leaf(&[1.0], Kind::Float, Device::Cpu);
    names.iter().map(|&name| (name.to_owned(), weight())).collect()
}

#[test]
fn the_groups_of_tchs_paths_are_used() {
    let vs = VarStore::new(Device::Cpu);
    let a = vs.root().ones("a", &[1]);
    let b = vs.root().set_group(2).ones("b", &[1]);
    let mut opt = Sgd::default().build(&vs, 1.0).unwrap();
    assert_eq!(opt.param_group_count(), 3);
    opt.set_lr_group(2, 0.5).unwrap();
    assert_eq!((opt.lr(0).unwrap(), opt.lr(2).unwrap()), (1.0, 0.5));
    let c = vs.root().set_group(2).ones("c", &[1]);
    for w in [&a, &b, &c] {
        set_grad(w, &[1.0]);
    }
    opt.step().unwrap();
    assert_eq!([to_f64(&a)[0], to_f64(&b)[0], to_f64(&c)[0]], [0.0, 0.5, 0.5]);
    opt.set_lr(0.0).unwrap();
    assert_eq!((opt.lr(0).unwrap(), opt.lr(2).unwrap()), (0.0, 0.0));
}

#[test]
fn names_assign_groups_and_the_last_rule_applies() {
    let all = weights(&["l1.weight", "l1.bias", "norm.weight", "norm.bias"]);
    let tensors: Vec<_> = all.iter().map(|(_, w)| w.shallow_clone()).collect();
    let mut opt = Sgd { weight_decay: 0.5, ..Default::default() }.build(all, 1.0).unwrap();
    assert_eq!(opt.assign_group(1, &["*.bias", "norm.*"]).unwrap(), 3);
    opt.set_weight_decay_group(1, 0.0).unwrap();
    opt.assign_group(2, &["norm.bias"]).unwrap();
    opt.set_lr_group(2, 0.25).unwrap();
    // The rule also assigns parameters that are added later.
    let later = leaf(&[1.0], Kind::Float, Device::Cpu);
    opt.add_param_group(vec![("l2.bias", later.shallow_clone())]).unwrap();
    for w in tensors.iter().chain([&later]) {
        set_grad(w, &[1.0]);
    }
    opt.step().unwrap();
    let got: Vec<_> = tensors.iter().chain([&later]).map(|w| to_f64(w)[0]).collect();
    // Group 2 was created with the options of group 0, including weight decay.
    assert_eq!(got, [-0.5, 0.0, 0.0, 0.625, 0.0]);
}

#[test]
fn the_last_matching_rule_applies_to_parameters_that_are_added_later() {
    let mut opt = AdamW::default().build(weights(&["norm.bias"]), 0.1).unwrap();
    opt.assign_group(1, &["*.bias"]).unwrap();
    opt.assign_group(2, &["norm.*"]).unwrap();
    let later = leaf(&[1.0], Kind::Float, Device::Cpu);
    opt.add_param_group(vec![("norm2.x.bias", later.shallow_clone())]).unwrap();
    opt.add_param_group(vec![("norm.later.bias", leaf(&[1.0], Kind::Float, Device::Cpu))]).unwrap();
    let groups = opt.state_dict().unwrap().param_groups;
    assert_eq!(groups[1].params, ["norm2.x.bias"]);
    assert_eq!(groups[2].params, ["norm.bias", "norm.later.bias"]);
}

#[test]
fn a_rule_that_matches_nothing_yet_applies_to_parameters_that_are_added_later() {
    let vs = VarStore::new(Device::Cpu);
    let _w = vs.root().ones("w", &[1]);
    let mut opt = Sgd::default().build(&vs, 1.0).unwrap();
    assert_eq!(opt.assign_group(1, &["*.bias"]).unwrap(), 0);
    let _bias = (vs.root() / "layer").ones("bias", &[1]);
    opt.step().unwrap();
    let groups = opt.state_dict().unwrap().param_groups;
    assert_eq!([&groups[0].params[..], &groups[1].params[..]], [["w"], ["layer.bias"]]);
}

#[test]
fn every_group_starts_with_its_own_accumulator() {
    let all = weights(&["a", "b"]);
    let tensors: Vec<_> = all.iter().map(|(_, w)| w.shallow_clone()).collect();
    let adagrad = Adagrad { initial_accumulator_value: 0.5, ..Default::default() };
    let mut opt = adagrad.build(all, 1.0).unwrap();
    opt.assign_group(1, &["b"]).unwrap();
    let other = Adagrad { initial_accumulator_value: 2.0, ..adagrad };
    let group = *opt.param_group(1).unwrap();
    opt.set_param_group(1, ParamGroup { algorithm: other.into(), ..group }).unwrap();
    for w in &tensors {
        set_grad(w, &[1.0]);
    }
    opt.step().unwrap();
    let state = opt.state_dict().unwrap().state;
    assert_eq!((to_f64(&state["a"]["sum"]), to_f64(&state["b"]["sum"])), (vec![1.5], vec![3.0]));
}

#[test]
fn missing_groups_are_refused() {
    let mut opt = AdamW::default().build(weights(&["w"]), 0.1).unwrap();
    let refused = [
        opt.set_lr_group(1, 0.1),
        opt.set_weight_decay_group(1, 0.1),
        opt.set_momentum_group(7, 0.1),
        opt.assign_group(2, &["w"]).map(|_| ()),
        opt.param_group(1).map(|_| ()),
    ];
    for result in refused {
        assert!(matches!(
            result,
            Err(Error::Optimizer(OptimizerError::NoSuchGroup { groups: 1, .. }))
        ));
    }
}

#[test]
fn loading_a_state_removes_the_rules_of_groups_that_it_lacks() {
    let saved = AdamW::default().build(weights(&["bias"]), 0.1).unwrap().state_dict().unwrap();
    let mut opt = AdamW::default().build(weights(&["bias"]), 0.1).unwrap();
    assert_eq!(opt.assign_group(1, &["nothing"]).unwrap(), 0);
    assert_eq!(opt.assign_group(2, &["*bias"]).unwrap(), 1);
    opt.load_state_dict(&saved).unwrap();
    let later = leaf(&[1.0], Kind::Float, Device::Cpu);
    assert_eq!(opt.param_group_count(), 1);
    // The rule of the second group, which was removed, would have assigned it to that group.
    opt.add_param_group(vec![("later.bias", later)]).unwrap();
    let groups = opt.state_dict().unwrap().param_groups;
    assert_eq!(
        groups.iter().map(|group| &group.params[..]).collect::<Vec<_>>(),
        [["bias"], ["later.bias"]]
    );
}

#[test]
fn a_refused_value_leaves_the_old_one() {
    let mut opt = AdamW::default().build(weights(&["w"]), 0.1).unwrap();
    let before = *opt.param_group(0).unwrap();
    assert!(matches!(opt.set_lr(-1.0), Err(Error::InvalidArgument { name: "lr", .. })));
    assert!(matches!(opt.set_momentum(1.0), Err(Error::InvalidArgument { name: "betas", .. })));
    let other = ParamGroup { algorithm: Sgd::default().into(), ..before };
    assert!(matches!(
        opt.set_param_group(0, other),
        Err(Error::Optimizer(OptimizerError::OtherAlgorithm { .. }))
    ));
    assert_eq!(*opt.param_group(0).unwrap(), before);
    let mut adagrad = Adagrad::default().build(weights(&["w"]), 0.1).unwrap();
    assert!(matches!(
        adagrad.set_momentum(0.5),
        Err(Error::Optimizer(OptimizerError::NoSuchOption { .. }))
    ));
}

#[test]
fn momentum_is_the_first_beta_of_adam() {
    let mut opt = Adam::default().build(weights(&["w"]), 0.1).unwrap();
    opt.set_momentum(0.5).unwrap();
    let Algorithm::Adam(config) = opt.param_group(0).unwrap().algorithm else {
        panic!("the algorithm of an Adam stays Adam");
    };
    assert_eq!(config.betas, (0.5, 0.999));
    let mut opt = Lion::default().build(weights(&["w"]), 0.1).unwrap();
    opt.set_momentum(0.5).unwrap();
    let lion = Lion { betas: (0.5, 0.99), ..Default::default() };
    assert_eq!(opt.param_group(0).unwrap().algorithm, lion.into());
}

/// The buffer starts with zeros, and its place is not that of the other averages.
#[test]
fn momentum_of_rmsprop_can_be_changed() {
    for centered in [false, true] {
        let all = weights(&["w"]);
        let w = all[0].1.shallow_clone();
        let rmsprop = RmsProp { alpha: 0.0, eps: 1.0, centered, ..Default::default() };
        let mut opt = rmsprop.build(all, 1.0).unwrap();
        let start = to_f64(&w)[0];
        // Each update is 3 / (3 + 1), or 3 / (0 + 1) if it is centered; momentum adds half of the one before.
        let update = if centered { 3.0 } else { 0.75 };
        for (momentum, want) in [(0.0, 1.0), (0.5, 2.0), (0.5, 3.5), (0.0, 4.5)] {
            opt.set_momentum(momentum).unwrap();
            step_with(&mut opt, &w, &[3.0]);
            assert_eq!(to_f64(&w), [start - want * update]);
        }
    }
}

/// The defaults in the source of `torch.optim`.
#[test]
fn the_defaults_are_pytorchs() {
    let adam = Adam::default();
    assert_eq!((adam.betas, adam.eps, adam.weight_decay), ((0.9, 0.999), 1e-8, 0.0));
    let adamw = AdamW::default();
    assert_eq!((adamw.betas, adamw.eps, adamw.weight_decay), ((0.9, 0.999), 1e-8, 1e-2));
    let sgd = Sgd::default();
    assert_eq!(
        (sgd.momentum, sgd.dampening, sgd.weight_decay, sgd.nesterov),
        (0.0, 0.0, 0.0, false)
    );
    let adagrad = Adagrad::default();
    let (decay, start) = (adagrad.lr_decay, adagrad.initial_accumulator_value);
    assert_eq!((decay, start, adagrad.weight_decay, adagrad.eps), (0.0, 0.0, 0.0, 1e-10));
    let rmsprop = RmsProp::default();
    assert_eq!((rmsprop.alpha, rmsprop.eps, rmsprop.weight_decay), (0.99, 1e-8, 0.0));
    assert_eq!((rmsprop.momentum, rmsprop.centered, rmsprop.maximize), (0.0, false, false));
    // Those of tch are the same.
    assert_eq!(RmsProp::from(tch::nn::RmsProp::default()), rmsprop);
    let lion = Lion::default();
    assert_eq!((lion.betas, lion.weight_decay, lion.maximize), ((0.9, 0.99), 0.0, false));
    let muon = Muon::default();
    assert_eq!((muon.momentum, muon.nesterov, muon.weight_decay), (0.95, true, 0.1));
    assert_eq!((muon.ns_coefficients, muon.ns_steps), ((3.4445, -4.775, 2.0315), 5));
    assert_eq!((muon.eps, muon.adjust_lr_fn), (1e-7, AdjustLr::Original));
    assert_eq!((muon.use_muon, muon.adamw, muon.adamw_lr_factor), (true, adamw, 1.0));
}

#[test]
fn assigning_a_group_counts_the_parameters_already_in_it() {
    let mut opt = AdamW::default().build(weights(&["a.bias", "b.bias", "w"]), 0.1).unwrap();
    assert_eq!(opt.assign_group(1, &["a.*"]).unwrap(), 1);
    assert_eq!(opt.assign_group(1, &["*.bias"]).unwrap(), 2);
}

/// An option that one of the groups refuses changes none of them.
#[test]
fn a_value_that_a_later_group_refuses_changes_no_earlier_group() {
    let sgd = Sgd { momentum: 0.9, ..Default::default() };
    let mut opt = sgd.build(weights(&["a", "b"]), 0.1).unwrap();
    opt.assign_group(1, &["b"]).unwrap();
    let group = *opt.param_group(1).unwrap();
    let nesterov = Sgd { nesterov: true, ..sgd };
    opt.set_param_group(1, ParamGroup { algorithm: nesterov.into(), ..group }).unwrap();
    assert!(matches!(opt.set_momentum(0.0), Err(Error::InvalidArgument { name: "momentum", .. })));
    let Algorithm::Sgd(first) = opt.param_group(0).unwrap().algorithm else {
        panic!("the algorithm of an SGD stays SGD");
    };
    assert_eq!(first.momentum, 0.9);
}

/// Each group has its own betas, and so its own bias corrections.
#[test]
fn each_group_has_the_bias_corrections_of_its_betas() {
    let all = weights(&["a", "b"]);
    let tensors: Vec<_> = all.iter().map(|(_, w)| w.shallow_clone()).collect();
    let mut opt = Adam::default().build(all, 0.5).unwrap();
    opt.assign_group(1, &["b"]).unwrap();
    let group = *opt.param_group(1).unwrap();
    let other = Adam { betas: (0.25, 0.5), ..Default::default() };
    opt.set_param_group(1, ParamGroup { algorithm: other.into(), ..group }).unwrap();
    tensors.iter().for_each(|w| set_grad(w, &[2.0]));
    opt.step().unwrap();
    for w in &tensors {
        // With the correction, the averages of the first step are the gradient and its square.
        assert!((to_f64(w)[0] - 0.5).abs() < 1e-6, "{w:?}");
    }
}
