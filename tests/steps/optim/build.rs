//! What an optimizer can be built from, and what is refused.

use rstest::rstest;
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::optim::{
    Adafactor, Adagrad, Adam, AdamW, Algorithm, AmpOptimizer, Lion, Muon, NAdam, OptimizerError,
    RmsProp, Sgd,
};
use tch_amp::{Error, GradScaler};

use crate::optim::{NAN, algorithms, build, set_grad, step_with, to_f64};
use testkit::tensors::{TIES, leaf, tie, tied};
use testkit::{assert_refused, assert_says, for_each_device};

#[test]
fn only_the_import_differs_from_tch() {
    let vs = VarStore::new(Device::Cpu);
    let net = nn::linear(vs.root(), 3, 1, Default::default());
    let mut opt = AdamW::default().build(&vs, 1e-3).unwrap();
    let x = Tensor::ones([4, 3], (Kind::Float, Device::Cpu));
    let before = to_f64(&net.ws);
    for way in 0..3 {
        let loss = x.apply(&net).square().mean(Kind::Float);
        match way {
            0 => opt.backward_step(&loss),
            1 => opt.backward_step_clip(&loss, 0.1),
            _ => opt.backward_step_clip_norm(&loss, 0.1),
        }
        .unwrap();
    }
    assert_ne!(to_f64(&net.ws), before);
    opt.zero_grad().unwrap();
    assert!(!net.ws.grad().defined(), "gradients are dropped, not zeroed");
}

#[test]
fn variables_that_are_added_later_are_trained() {
    let vs = VarStore::new(Device::Cpu);
    let a = vs.root().ones("a", &[2]);
    let mut opt = Sgd::default().build(&vs, 1.0).unwrap();
    let b = (vs.root() / "later").ones("b", &[2]);
    assert_eq!(opt.parameters().as_slice().len(), 2);
    (&a + &b).sum(Kind::Float).backward();
    let mut scaler = GradScaler::disabled();
    drop(scaler.step(&mut opt).unwrap());
    assert_eq!((to_f64(&a), to_f64(&b)), (vec![0.0; 2], vec![0.0; 2]));
    assert_eq!(opt.parameter_name(1).as_deref(), Some("later.b"));
    // With a scaler, their gradients are checked before the optimizer has adopted them.
    let c = vs.root().ones("c", &[2]);
    set_grad(&c, &[f64::INFINITY, 1.0]);
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    assert!(scaler.step(&mut opt).unwrap().is_skipped().unwrap());
    assert_eq!(to_f64(&c), [1.0; 2]);
}

#[test]
fn frozen_variables_are_unchanged() {
    let mut vs = VarStore::new(Device::Cpu);
    let w = vs.root().ones("w", &[2]);
    let mut opt = Sgd::default().build(&vs, 1.0).unwrap();
    set_grad(&w, &[1.0; 2]);
    vs.freeze();
    opt.step().unwrap();
    assert_eq!(to_f64(&w), [1.0; 2]);
    vs.unfreeze();
    opt.step().unwrap();
    assert_eq!(to_f64(&w), [0.0; 2]);
}

#[test]
fn a_list_is_accepted_with_and_without_names() {
    let (a, b) = (leaf(&[1.0], Kind::Float, Device::Cpu), leaf(&[1.0], Kind::Double, Device::Cpu));
    let plain = AdamW::default().build(vec![a.shallow_clone(), b.shallow_clone()], 0.1).unwrap();
    assert_eq!(plain.parameter_name(1).as_deref(), Some("1"));
    let named = vec![("a", a.shallow_clone()), ("b", b.shallow_clone())];
    let mut named = AdamW::default().build(named, 0.1).unwrap();
    assert_eq!(named.parameter_name(1).as_deref(), Some("b"));
    let c = leaf(&[1.0], Kind::Float, Device::Cpu);
    assert_eq!(named.add_param_group(vec![("c", c.shallow_clone())]).unwrap(), 1);
    assert_eq!(named.parameters().as_slice().len(), 3);
    assert_refused!(
        named.add_param_group(vec![("again", c)]),
        Error::Optimizer(OptimizerError::Parameter { .. })
    );
    assert_eq!((named.parameters().as_slice().len(), named.param_group_count()), (3, 2));
}

#[test]
fn tensors_that_cannot_be_optimized_are_refused() {
    let w = leaf(&[1.0], Kind::Float, Device::Cpu);
    let twice = AdamW::default().build(vec![w.shallow_clone(), w.shallow_clone()], 0.1);
    assert_says(twice, "twice");
    for kind in [Kind::Int64, Kind::Bool, Kind::ComplexFloat] {
        let tensor = Tensor::ones([2], (kind, Device::Cpu));
        assert_says(
            Sgd::default().build(vec![("w", tensor)], 0.1),
            "w is not a floating-point tensor",
        );
    }
    assert!(Sgd::default().build(vec![Tensor::new()], 0.1).is_err());
}

/// The result of an operation on a tensor that requires a gradient, which backward leaves without one.
fn not_a_leaf() -> Tensor {
    Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true).to_kind(Kind::BFloat16)
}

#[test]
fn a_parameter_that_is_not_a_leaf_is_refused_by_its_name() {
    let is_refused = |result: tch_amp::Result<()>| {
        let text = "the parameter head is not a leaf";
        assert_refused!(result, Error::Optimizer(OptimizerError::Parameter { .. }), text);
    };
    for algorithm in algorithms() {
        is_refused(algorithm.build(vec![("head", not_a_leaf())], 0.1).map(drop));
        let w = leaf(&[1.0], Kind::Float, Device::Cpu);
        let mut opt = build(algorithm, vec![("w", w.shallow_clone())], 0.1);
        let more = vec![("other", leaf(&[1.0], Kind::Float, Device::Cpu)), ("head", not_a_leaf())];
        is_refused(opt.add_param_group(more).map(drop));
        assert_eq!((opt.parameters().as_slice().len(), opt.param_group_count()), (1, 1));
    }
    // As the message says.
    let w = not_a_leaf().detach().set_requires_grad(true);
    let mut opt = Sgd::default().build(vec![("head", w.shallow_clone())], 1.0).unwrap();
    opt.backward_step(&w.sum(Kind::Float)).unwrap();
    assert_eq!(to_f64(&w), [0.0; 2]);
}

/// A frozen tensor that is written from one that requires a gradient becomes the result of an operation.
#[test]
fn a_parameter_that_is_no_longer_a_leaf_is_refused_and_no_other_changes() {
    for_each_device(|device| {
        for algorithm in algorithms() {
            let tensor = |kind| Tensor::ones([2], (kind, device));
            let (plain, mut head) = (leaf(&[1.0, 1.0], Kind::Float, device), tensor(Kind::Float));
            let list = vec![("plain", plain.shallow_clone()), ("head", head.shallow_clone())];
            let mut opt = build(algorithm, list, 0.1);
            let factor = tensor(Kind::Float).set_requires_grad(true);
            head *= &factor;
            for _ in 0..2 {
                (&plain * 2.0).sum(Kind::Float).backward();
                assert_says(opt.step(), "the parameter head is not a leaf");
                assert_eq!(to_f64(&plain), [1.0, 1.0], "{algorithm:?}");
            }
            let _detached = head.detach_();
            opt.step().unwrap();
            assert_ne!(to_f64(&plain), [1.0, 1.0], "{algorithm:?}");
        }
    });
}

#[test]
fn options_outside_their_range_are_refused_by_their_names() {
    let (sgd, muon) = (Sgd::default(), Muon::default());
    let refused: [(Algorithm, f64, &str); 31] = [
        (AdamW { betas: (1.0, 0.9), ..Default::default() }.into(), 0.1, "betas"),
        (AdamW { betas: (0.9, -0.1), ..Default::default() }.into(), 0.1, "betas"),
        (Adam { eps: -1.0, ..Default::default() }.into(), 0.1, "eps"),
        (Adam { weight_decay: NAN, ..Default::default() }.into(), 0.1, "weight_decay"),
        (Adam::default().into(), -0.1, "lr"),
        (Adam::default().into(), f64::INFINITY, "lr"),
        (Sgd { momentum: -0.5, ..sgd }.into(), 0.1, "momentum"),
        (Sgd { nesterov: true, ..sgd }.into(), 0.1, "momentum"),
        (Sgd { nesterov: true, momentum: 0.9, dampening: 0.1, ..sgd }.into(), 0.1, "dampening"),
        (Adagrad { lr_decay: -1.0, ..Default::default() }.into(), 0.1, "lr_decay"),
        (RmsProp { alpha: 1.0, ..Default::default() }.into(), 0.1, "alpha"),
        (RmsProp { eps: -1.0, ..Default::default() }.into(), 0.1, "eps"),
        (RmsProp { momentum: -0.5, ..Default::default() }.into(), 0.1, "momentum"),
        (RmsProp { weight_decay: NAN, ..Default::default() }.into(), 0.1, "weight_decay"),
        (Lion { betas: (0.9, 1.0), ..Default::default() }.into(), 0.1, "betas"),
        (Lion { weight_decay: -1.0, ..Default::default() }.into(), 0.1, "weight_decay"),
        (NAdam { betas: (1.0, 0.9), ..Default::default() }.into(), 0.1, "betas"),
        (NAdam { momentum_decay: -1.0, ..Default::default() }.into(), 0.1, "momentum_decay"),
        (Adafactor { beta2_decay: 0.5, ..Default::default() }.into(), 0.1, "beta2_decay"),
        (Adafactor { eps: (Some(-1.0), 0.1), ..Default::default() }.into(), 0.1, "eps"),
        (Adafactor { eps: (None, NAN), ..Default::default() }.into(), 0.1, "eps"),
        (Adafactor { d: 0.5, ..Default::default() }.into(), 0.1, "d"),
        (Muon { momentum: 1.0, ..muon }.into(), 0.1, "momentum"),
        (Muon { weight_decay: -1.0, ..muon }.into(), 0.1, "weight_decay"),
        (Muon { ns_coefficients: (1.0, NAN, 1.0), ..muon }.into(), 0.1, "ns_coefficients"),
        (Muon { ns_steps: 100, ..muon }.into(), 0.1, "ns_steps"),
        (Muon { eps: 0.0, ..muon }.into(), 0.1, "eps"),
        (Muon { adamw_lr_factor: -1.0, ..muon }.into(), 0.1, "adamw_lr_factor"),
        (Muon { adamw_lr_factor: 1e308, ..muon }.into(), 10.0, "lr"),
        (Muon { adamw: AdamW { eps: -1.0, ..muon.adamw }, ..muon }.into(), 0.1, "eps"),
        (
            Muon { adamw: AdamW { maximize: true, ..muon.adamw }, ..muon }.into(),
            0.1,
            "adamw.maximize",
        ),
    ];
    for (algorithm, lr, field) in refused {
        let result = algorithm.build(Vec::<Tensor>::new(), lr);
        assert_refused!(result, Error::InvalidArgument { name, .. } if name == field);
    }
}

#[test]
fn a_model_whose_dtype_changes_later_is_refused_and_unchanged() {
    for algorithm in algorithms() {
        let mut vs = VarStore::new(Device::Cpu);
        let w = vs.root().ones("w", &[3]);
        let mut opt = build(algorithm, &vs, 0.1);
        set_grad(&w, &[1.0; 3]);
        opt.step().unwrap();
        let stateless = opt.state_dict().unwrap().state.is_empty();
        opt.zero_grad().unwrap();
        vs.double();
        set_grad(&w, &[1.0; 3]);
        let before = to_f64(&w);
        match opt.step() {
            Ok(()) => assert!(stateless, "{algorithm:?}"),
            Err(error) => {
                assert!(error.to_string().contains("build the optimizer after"), "{error}");
                assert_eq!(to_f64(&w), before);
            }
        }
    }
}

#[test]
fn names_are_unique_and_unnamed_parameters_are_named_by_their_index() {
    let w = || leaf(&[1.0], Kind::Float, Device::Cpu);
    let mut opt = Sgd::default().build(vec![w(), w()], 0.1).unwrap();
    assert_eq!(opt.add_param_group(vec![w()]).unwrap(), 1);
    assert_eq!(opt.parameter_name(2).as_deref(), Some("2"));
    assert_says(opt.add_param_group(vec![("x", w()), ("1", w())]), "the name of another one");
    assert_eq!(opt.parameters().as_slice().len(), 3, "none is added");
}

#[rstest]
#[case::an_integer_tensor("other", Tensor::from(1i64))]
#[case::an_undefined_tensor("other", Tensor::new())]
#[case::a_taken_name("w", leaf(&[1.0], Kind::Float, Device::Cpu))]
fn a_parameter_can_be_added_after_it_was_refused_with_another(
    #[case] name: &str,
    #[case] bad: Tensor,
) {
    let [w, a] = [(); 2].map(|()| leaf(&[1.0], Kind::Float, Device::Cpu));
    let mut opt = Sgd::default().build(vec![("w", w.shallow_clone())], 1.0).unwrap();
    let a = || ("a", a.shallow_clone());
    let lists = [
        vec![a(), (name, bad)],
        vec![a(), ("again", a().1)],
        vec![a(), ("known", w.shallow_clone())],
    ];
    for list in lists {
        let refused = opt.add_param_group(list);
        assert_refused!(refused, Error::Optimizer(OptimizerError::Parameter { .. }));
        assert_eq!((opt.parameters().as_slice().len(), opt.param_group_count()), (1, 1));
    }
    assert_eq!(opt.add_param_group(vec![a()]).unwrap(), 1);
    step_with(&mut opt, &a().1, &[1.0]);
    assert_eq!(to_f64(&a().1), [0.0]);
}

#[test]
fn an_empty_list_is_refused_and_an_empty_store_is_not() {
    let refused = AdamW::default().build(Vec::<Tensor>::new(), 0.1);
    assert_refused!(refused, Error::Optimizer(OptimizerError::NoParameters));
    AdamW::default().build(&VarStore::new(Device::Cpu), 0.1).unwrap();
}

#[test]
fn every_form_of_a_list_is_accepted() {
    let vs = VarStore::new(Device::Cpu);
    for name in ["b", "a"] {
        drop(vs.root().ones(name, &[1]));
    }
    let mut opt = Sgd::default().build(vs.variables(), 0.1).unwrap();
    assert_eq!(opt.state_dict().unwrap().param_groups[0].params, ["a", "b"]);
    let list = vs.trainable_variables();
    let [one, two] = &list[..] else { panic!("two variables") };
    let array = [one.shallow_clone(), two.shallow_clone()];
    for opt in [
        Sgd::default().build(&list, 0.1),
        Sgd::default().build(&list[..], 0.1),
        Sgd::default().build(&array, 0.1),
    ] {
        assert_eq!(opt.unwrap().parameters().as_slice().len(), 2);
    }
}

#[test]
fn tchs_configurations_are_accepted() {
    // Each field has a value of its own, so that none is lost or taken for another.
    for amsgrad in [true, false] {
        let adam = nn::Adam { beta1: 0.8, beta2: 0.7, wd: 0.1, eps: 1e-6, amsgrad };
        let want =
            Adam { betas: (0.8, 0.7), weight_decay: 0.1, eps: 1e-6, amsgrad, maximize: false };
        assert_eq!(Adam::from(adam), want);
        let adamw = nn::AdamW { beta1: 0.8, beta2: 0.7, wd: 0.1, eps: 1e-6, amsgrad };
        let want =
            AdamW { betas: (0.8, 0.7), weight_decay: 0.1, eps: 1e-6, amsgrad, maximize: false };
        assert_eq!(AdamW::from(adamw), want);
    }
    for nesterov in [true, false] {
        let sgd = nn::Sgd { momentum: 0.9, dampening: 0.2, wd: 0.5, nesterov };
        let want =
            Sgd { momentum: 0.9, dampening: 0.2, weight_decay: 0.5, nesterov, maximize: false };
        assert_eq!(Sgd::from(sgd), want);
    }
    assert_eq!(Adam::from(nn::Adam::default()), Adam::default());
}

/// A variable that has not been in any step yet belongs to the optimizer as well.
#[test]
fn variables_that_are_added_later_are_zeroed_and_clipped_before_the_first_step() {
    let vs = VarStore::new(Device::Cpu);
    let w = vs.root().ones("w", &[2]);
    let mut opt = Sgd::default().build(&vs, 1.0).unwrap();
    let late = vs.root().ones("late", &[2]);
    set_grad(&w, &[0.0; 2]);
    set_grad(&late, &[3.0, 4.0]);
    assert_eq!(opt.clip_grad_norm(1.0).unwrap().double_value(&[]), 5.0);
    opt.zero_grad().unwrap();
    assert!(!w.grad().defined() && !late.grad().defined());
}

/// The map of names has another order in every process and every `VarStore`.
#[test]
fn a_tied_weight_is_one_parameter_that_has_its_first_name() {
    for way in TIES {
        for _ in 0..8 {
            let (vs, w) = tied(way, &[1.0, 2.0], Kind::Float, Device::Cpu);
            let sgd = Sgd::default();
            let mut optimizers =
                [sgd.build(&vs, 1.0).unwrap(), sgd.build(vs.variables(), 1.0).unwrap()];
            for opt in &mut optimizers {
                assert_eq!(opt.trainable_variables().len(), 1, "{way:?}");
                assert_eq!(opt.parameter_name(0).as_deref(), Some("embedding"), "{way:?}");
                assert_eq!(opt.state_dict().unwrap().param_groups[0].params, ["embedding"]);
                tch::no_grad(|| w.shallow_clone().copy_(&Tensor::from_slice(&[1.0, 2.0])));
                step_with(opt, &w, &[0.5, -1.0]);
                assert_eq!(to_f64(&w), [0.5, 3.0], "{way:?}");
                // A pattern for one of the names is a pattern for the weight.
                assert_eq!(opt.assign_group(1, &["head"]).unwrap(), 1);
                // A list says what each parameter is called, and may not name one twice.
                let named: Vec<_> = vs.variables().into_iter().collect();
                assert_says(sgd.build(named, 1.0), "twice");
            }
        }
    }
}

#[test]
fn a_second_name_that_is_added_later_makes_no_other_parameter() {
    let vs = VarStore::new(Device::Cpu);
    let w = vs.root().ones("w", &[2]);
    let mut opt = Sgd::default().build(&vs, 1.0).unwrap();
    for (way, name) in TIES.into_iter().zip(["again", "and_again"]) {
        tie(&vs, way, name, &w);
        set_grad(&w, &[1.0; 2]);
        let mut scaler = GradScaler::disabled();
        assert_eq!(opt.parameters().as_slice().len(), 1, "{way:?}");
        drop(scaler.step(&mut opt).unwrap());
        assert_eq!(opt.parameters().as_slice().len(), 1, "{way:?}");
        assert_eq!(opt.assign_group(1, &[name]).unwrap(), 1);
    }
    assert_eq!(to_f64(&w), [-1.0; 2]);
    // A variable that really is new is still taken up.
    let _new = vs.root().ones("new", &[1]);
    assert_eq!(opt.assign_group(2, &["new", "w"]).unwrap(), 2);
}
