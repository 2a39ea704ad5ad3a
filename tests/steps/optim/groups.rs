//! Parameter groups and their options.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::Error;
use tch_amp::optim::{
    Adagrad, Adam, AdamW, AdjustLr, Algorithm, Lion, Muon, Optimizer, OptimizerError, ParamGroup,
    RmsProp, Sgd,
};

use crate::optim::{set_grad, step_with, to_f64};
use testkit::assert_refused;
use testkit::tensors::leaf;

fn weights(names: &[&str]) -> Vec<(String, Tensor)> {
    let weight = || leaf(&[1.0], Kind::Float, Device::Cpu);
    names.iter().map(|&name| (name.to_owned(), weight())).collect()
}

/// Changes the algorithm of a group.
fn set_algorithm(opt: &mut Optimizer, group: usize, algorithm: impl Into<Algorithm>) {
    let lr = opt.lr(group).unwrap();
    opt.set_param_group(group, ParamGroup::new(lr, algorithm)).unwrap();
}

fn step_all(opt: &mut Optimizer, gradient: f64) {
    opt.trainable_variables().iter().for_each(|w| set_grad(w, &[gradient]));
    opt.step().unwrap();
}

fn numbers(opt: &Optimizer) -> Vec<f64> {
    opt.trainable_variables().iter().flat_map(to_f64).collect()
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
    step_all(&mut opt, 1.0);
    assert_eq!([&a, &b, &c].map(to_f64), [[0.0], [0.5], [0.5]]);
    opt.set_lr(0.0).unwrap();
    assert_eq!((opt.lr(0).unwrap(), opt.lr(2).unwrap()), (0.0, 0.0));
}

#[test]
fn names_assign_groups_and_the_last_rule_applies() {
    let all = weights(&["l1.weight", "l1.bias", "norm.weight", "norm.bias"]);
    let mut opt = Sgd { weight_decay: 0.5, ..Default::default() }.build(all, 1.0).unwrap();
    assert_eq!(opt.assign_group(1, &["*.bias", "norm.*"]).unwrap(), 3);
    opt.set_weight_decay_group(1, 0.0).unwrap();
    opt.assign_group(2, &["norm.bias"]).unwrap();
    opt.set_lr_group(2, 0.25).unwrap();
    // The rule also assigns parameters that are added later.
    opt.add_param_group(weights(&["l2.bias"])).unwrap();
    step_all(&mut opt, 1.0);
    // Group 2 was created with the options of group 0, including weight decay.
    assert_eq!(numbers(&opt), [-0.5, 0.0, 0.0, 0.625, 0.0]);
}

#[test]
fn the_last_matching_rule_applies_to_parameters_that_are_added_later() {
    let mut opt = AdamW::default().build(weights(&["norm.bias"]), 0.1).unwrap();
    opt.assign_group(1, &["*.bias"]).unwrap();
    opt.assign_group(2, &["norm.*"]).unwrap();
    opt.add_param_group(weights(&["norm2.x.bias"])).unwrap();
    opt.add_param_group(weights(&["norm.later.bias"])).unwrap();
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
    let adagrad = Adagrad { initial_accumulator_value: 0.5, ..Default::default() };
    let mut opt = adagrad.build(weights(&["a", "b"]), 1.0).unwrap();
    opt.assign_group(1, &["b"]).unwrap();
    set_algorithm(&mut opt, 1, Adagrad { initial_accumulator_value: 2.0, ..adagrad });
    step_all(&mut opt, 1.0);
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
        assert_refused!(result, Error::Optimizer(OptimizerError::NoSuchGroup { groups: 1, .. }));
    }
}

#[test]
fn loading_a_state_removes_the_rules_of_groups_that_it_lacks() {
    let saved = AdamW::default().build(weights(&["bias"]), 0.1).unwrap().state_dict().unwrap();
    let mut opt = AdamW::default().build(weights(&["bias"]), 0.1).unwrap();
    assert_eq!(opt.assign_group(1, &["nothing"]).unwrap(), 0);
    assert_eq!(opt.assign_group(2, &["*bias"]).unwrap(), 1);
    opt.load_state_dict(&saved).unwrap();
    assert_eq!(opt.param_group_count(), 1);
    // The rule of the second group, which was removed, would have assigned it to that group.
    opt.add_param_group(weights(&["later.bias"])).unwrap();
    let groups = opt.state_dict().unwrap().param_groups;
    let params: Vec<_> = groups.iter().map(|group| &group.params[..]).collect();
    assert_eq!(params, [["bias"], ["later.bias"]]);
}

#[test]
fn a_refused_value_leaves_the_old_one() {
    let mut opt = AdamW::default().build(weights(&["w"]), 0.1).unwrap();
    let before = *opt.param_group(0).unwrap();
    assert_refused!(opt.set_lr(-1.0), Error::InvalidArgument { name: "lr", .. });
    assert_refused!(opt.set_momentum(1.0), Error::InvalidArgument { name: "betas", .. });
    let other = ParamGroup { algorithm: Sgd::default().into(), ..before };
    assert_refused!(
        opt.set_param_group(0, other),
        Error::Optimizer(OptimizerError::OtherAlgorithm { .. })
    );
    assert_eq!(*opt.param_group(0).unwrap(), before);
    let mut adagrad = Adagrad::default().build(weights(&["w"]), 0.1).unwrap();
    assert_refused!(
        adagrad.set_momentum(0.5),
        Error::Optimizer(OptimizerError::NoSuchOption { .. })
    );
}

#[test]
fn momentum_is_the_first_beta_of_adam() {
    let mut opt = Adam::default().build(weights(&["w"]), 0.1).unwrap();
    opt.set_momentum(0.5).unwrap();
    let adam = Adam { betas: (0.5, 0.999), ..Default::default() };
    assert_eq!(opt.param_group(0).unwrap().algorithm, adam.into());
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
    set_algorithm(&mut opt, 1, Sgd { nesterov: true, ..sgd });
    assert_refused!(opt.set_momentum(0.0), Error::InvalidArgument { name: "momentum", .. });
    assert_eq!(opt.param_group(0).unwrap().algorithm, sgd.into());
}

/// Each group has its own betas, and so its own bias corrections.
#[test]
fn each_group_has_the_bias_corrections_of_its_betas() {
    let mut opt = Adam::default().build(weights(&["a", "b"]), 0.5).unwrap();
    opt.assign_group(1, &["b"]).unwrap();
    set_algorithm(&mut opt, 1, Adam { betas: (0.25, 0.5), ..Default::default() });
    step_all(&mut opt, 2.0);
    // With the correction, the averages of the first step are the gradient and its square.
    for number in numbers(&opt) {
        assert!((number - 0.5).abs() < 1e-6, "{number}");
    }
}
