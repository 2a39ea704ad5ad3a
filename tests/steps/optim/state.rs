//! Saving and loading the state of an optimizer.

use rstest::rstest;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::checkpoint::Stateful;
use tch_amp::optim::{
    Adam, AdamW, Algorithm, AmpOptimizer, MasterWeights, Muon, Optimizer, OptimizerError,
    OptimizerState, ParamGroup, ParamGroupState, RmsProp, Sgd,
};
use tch_amp::{Error, GradScaler};

use crate::optim::{INF, algorithms, build, one, replace, set_grad, step_with, to_f64};
use testkit::bits::bits;
use testkit::checkpoints::{checkpoint_of, reloaded};
use testkit::optimizers::{MASTERS, all_bits, state_bits};
use testkit::tensors::{TIES, leaf, tied};
use testkit::{assert_refused, assert_says, for_each_device};

fn named(device: Device) -> Vec<(&'static str, Tensor)> {
    let leaf = |values: &[f64]| leaf(values, Kind::Float, device);
    vec![("a", leaf(&[1.0, 2.0])), ("b", leaf(&[3.0])), ("never", leaf(&[4.0]))]
}

/// The parameters of an optimizer as they are now, as others.
fn copied(opt: &Optimizer) -> Vec<(&'static str, Tensor)> {
    let all = opt.trainable_variables();
    let copies = all.iter().map(|w| w.detach().copy().set_requires_grad(true));
    ["a", "b", "never"].into_iter().zip(copies).collect()
}

fn train(opt: &mut Optimizer, from: u8, to: u8) {
    for step in from..to {
        for (index, w) in opt.trainable_variables().iter().take(2).enumerate() {
            let gradient = f64::from(step) / 4.0 - index as f64;
            set_grad(w, &vec![gradient; w.numel()]);
        }
        opt.step().unwrap();
    }
}

#[test]
fn state_tensors_are_those_of_the_state_in_the_order_of_the_parameters() {
    for_each_device(|device| {
        for algorithm in algorithms() {
            let mut optimizer = build(algorithm, named(device), 0.1);
            train(&mut optimizer, 0, 2);
            let mut state = optimizer.state_dict().unwrap().state;
            let tensors = optimizer.state_tensors().unwrap();
            for (name, of_parameter) in ["a", "b", "never"].into_iter().zip(&tensors) {
                assert_eq!(*of_parameter, state.remove(name).unwrap_or_default(), "{name}");
            }
            assert_eq!(tensors.len(), 3);
            assert!(state.is_empty());
        }
    });
}

#[test]
fn training_resumes_from_a_state_bit_by_bit() {
    for_each_device(|device| {
        for algorithm in algorithms() {
            let mut whole = build(algorithm, named(device), 0.1);
            train(&mut whole, 0, 3);
            whole.assign_group(1, &["b"]).unwrap();
            whole.set_lr_group(1, 0.05).unwrap();
            let saved = whole.state_dict().unwrap();
            let mut resumed = build(algorithm, copied(&whole), 0.7);
            resumed.load_state_dict(&saved).unwrap();
            train(&mut whole, 3, 6);
            train(&mut resumed, 3, 6);
            assert_eq!(all_bits(&mut whole), all_bits(&mut resumed), "{algorithm:?}");
            assert_eq!(resumed.lr(1).unwrap(), 0.05);
        }
    });
}

/// A state from elsewhere, such as another format.
#[test]
fn a_state_that_a_program_makes_is_loaded() {
    let mut opt =
        build(Sgd { momentum: 0.9, ..Default::default() }.into(), named(Device::Cpu), 0.1);
    let buffer = Tensor::from_slice(&[1.0f32, -1.0]);
    let state = [("a".to_owned(), [("momentum_buffer".to_owned(), buffer)].into())].into();
    let options = ParamGroup::new(0.5, Sgd { momentum: 0.5, ..Default::default() });
    let params = ["a", "b", "never"].map(str::to_owned).into();
    let state = OptimizerState::new(state, vec![ParamGroupState::new(options, params)]);
    opt.load_state_dict(&state).unwrap();
    set_grad(&opt.trainable_variables()[0], &[2.0, 2.0]);
    opt.step().unwrap();
    // The buffers are half of 1 and -1, and 2; the learning rate is 0.5.
    assert_eq!(to_f64(&opt.trainable_variables()[0]), [1.0 - 1.25, 2.0 - 0.75]);
}

#[test]
fn the_keys_are_pytorchs() {
    let want = [
        vec!["exp_avg", "exp_avg_sq", "step"],
        vec!["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"],
        vec!["exp_avg", "exp_avg_sq", "step"],
        vec!["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"],
        vec![],
        vec!["momentum_buffer"],
        vec!["momentum_buffer"],
        vec!["momentum_buffer"],
        vec!["step", "sum"],
        vec!["square_avg", "step"],
        vec!["momentum_buffer", "square_avg", "step"],
        vec!["grad_avg", "square_avg", "step"],
        vec!["grad_avg", "momentum_buffer", "square_avg", "step"],
        vec!["exp_avg"],
        vec!["exp_avg"],
        vec!["exp_avg", "exp_avg_sq", "mu_product", "step"],
        vec!["exp_avg", "exp_avg_sq", "mu_product", "step"],
        vec!["step", "variance"],
        vec!["step", "variance"],
        vec!["exp_avg", "exp_avg_sq", "step"],
    ];
    for (algorithm, want) in algorithms().into_iter().zip(want) {
        let mut opt = build(algorithm, named(Device::Cpu), 0.1);
        train(&mut opt, 0, 2);
        let saved = opt.state_dict().unwrap();
        let keys = |name: &str| match saved.state.get(name) {
            Some(entries) => entries.keys().map(String::as_str).collect::<Vec<_>>(),
            None => vec![],
        };
        // PyTorch's Adagrad has its state from the start.
        let never = if want.contains(&"sum") { want.clone() } else { vec![] };
        assert_eq!((keys("a"), keys("never")), (want, never), "{algorithm:?}");
        if let Some(step) = saved.state.get("a").and_then(|entries| entries.get("step")) {
            assert_eq!((step.size(), step.kind(), to_f64(step)), (vec![], Kind::Float, vec![2.0]));
        }
        assert_eq!(saved.param_groups[0].params, ["a", "b", "never"]);
    }
}

#[test]
fn loading_copies_into_the_dtype_of_the_parameters() {
    let mut opt = AdamW::default().build(named(Device::Cpu), 0.1).unwrap();
    train(&mut opt, 0, 2);
    let saved = opt.state_dict().unwrap();
    let doubles = named(Device::Cpu)
        .into_iter()
        .map(|(name, w)| (name, w.detach().to_kind(Kind::Double).set_requires_grad(true)));
    let mut other = AdamW::default().build(doubles.collect::<Vec<_>>(), 0.1).unwrap();
    other.load_state_dict(&saved).unwrap();
    train(&mut opt, 2, 3);
    let loaded = other.state_dict().unwrap();
    let entries = &loaded.state["a"];
    assert_eq!((entries["exp_avg"].kind(), entries["step"].kind()), (Kind::Double, Kind::Float));
    assert_eq!(to_f64(&entries["step"]), [2.0], "a saved state does not follow the optimizer");
}

#[test]
fn the_state_of_a_disabled_option_is_saved_and_loaded() {
    let sgd = Sgd { momentum: 0.9, ..Default::default() };
    let mut opt = sgd.build(named(Device::Cpu), 0.1).unwrap();
    train(&mut opt, 0, 2);
    opt.set_momentum(0.0).unwrap();
    let saved = opt.state_dict().unwrap();
    assert!(saved.state["a"].contains_key("momentum_buffer"));
    let mut other = Sgd::default().build(named(Device::Cpu), 0.3).unwrap();
    train(&mut other, 0, 1);
    other.load_state_dict(&saved).unwrap();
    for opt in [&mut opt, &mut other] {
        opt.set_momentum(0.9).unwrap();
        train(opt, 2, 3);
    }
    let (one, two) = (opt.state_dict().unwrap(), other.state_dict().unwrap());
    let buffer = |s: &OptimizerState| to_f64(&s.state["a"]["momentum_buffer"]);
    assert_eq!(buffer(&one), buffer(&two));
}

#[test]
fn the_state_of_a_disabled_option_takes_no_part_in_a_step() {
    for_each_device(|device| {
        // Without its option, a step is that of an optimizer that never had it.
        let sgd = |momentum| Sgd { momentum, ..Default::default() };
        let mut opt = sgd(0.5).build(named(device), 0.1).unwrap();
        train(&mut opt, 1, 2);
        let mut plain = sgd(0.0).build(copied(&opt), 0.1).unwrap();
        opt.set_momentum(0.0).unwrap();
        for opt in [&mut opt, &mut plain] {
            train(opt, 2, 4);
        }
        let all = |opt: &Optimizer| opt.trainable_variables().iter().map(bits).collect::<Vec<_>>();
        assert_eq!(all(&opt), all(&plain), "{device:?}");

        let adam = AdamW { amsgrad: true, ..Default::default() };
        let mut opt = adam.build(named(device), 0.1).unwrap();
        train(&mut opt, 1, 2);
        opt.set_param_group(0, ParamGroup::new(0.1, AdamW { amsgrad: false, ..adam })).unwrap();
        let before = all(&opt);
        train(&mut opt, 2, 3);
        assert_ne!(all(&opt), before);
    });
}

#[test]
fn a_state_that_does_not_fit_changes_nothing() {
    let trained = |lr: f64, steps: u8| {
        let mut opt = AdamW::default().build(named(Device::Cpu), lr).unwrap();
        train(&mut opt, 0, steps);
        opt
    };
    let refused = |text: &str, change: &dyn Fn(&mut OptimizerState)| {
        let mut state = trained(0.1, 2).state_dict().unwrap();
        change(&mut state);
        let mut opt = trained(0.3, 1);
        let before = all_bits(&mut opt);
        let result = opt.load_state_dict(&state);
        assert_refused!(result, Error::Optimizer(OptimizerError::State { .. }), text);
        assert_eq!(all_bits(&mut opt), before, "{text}");
        assert_eq!(opt.lr(0).unwrap(), 0.3, "{text}");
    };
    let zeros = |count: i64| Some(Tensor::zeros([count], (Kind::Float, Device::Cpu)));
    let steps = |steps: f32| Some(Tensor::from(steps));
    for (text, name, key, new) in [
        ("must be finite", "b", "step", steps(-1.0)),
        ("must be finite", "b", "step", steps(f32::INFINITY)),
        ("must be finite", "b", "step", steps(f32::NAN)),
        ("must have one", "b", "step", zeros(2)),
        ("has no exp_avg", "a", "exp_avg", None),
        ("has no step", "a", "step", None),
        ("does not keep", "a", "momentum_buffer", zeros(2)),
        ("must have [2]", "a", "exp_avg", zeros(3)),
    ] {
        let new = || new.as_ref().map(Tensor::shallow_clone);
        refused(text, &|state| replace(state, name, key, new()));
    }
    refused("is not a parameter", &|s| {
        let tensors = s.state.remove("b").unwrap();
        drop(s.state.insert("stranger".to_owned(), tensors));
    });
    refused("is in no group", &|s| s.param_groups[0].params.retain(|name| name != "b"));
    refused("in two groups", &|s| s.param_groups[0].params.push("a".to_owned()));
    refused("is empty", &|s| s.param_groups.clear());
}

#[test]
fn another_algorithm_or_a_bad_option_is_refused() {
    let mut opt = AdamW::default().build(named(Device::Cpu), 0.1).unwrap();
    let mut sgd = Sgd::default().build(named(Device::Cpu), 0.1).unwrap();
    let mut state = sgd.state_dict().unwrap();
    assert_refused!(
        opt.load_state_dict(&state),
        Error::Optimizer(OptimizerError::OtherAlgorithm { .. })
    );
    state.param_groups[0].options.lr = -1.0;
    assert_refused!(sgd.load_state_dict(&state), Error::InvalidArgument { name: "lr", .. });
    assert_eq!(sgd.lr(0).unwrap(), 0.1);
}

#[test]
fn groups_survive_json() {
    let mut opt = AdamW::default().build(named(Device::Cpu), 0.1).unwrap();
    opt.assign_group(1, &["b"]).unwrap();
    let groups = opt.state_dict().unwrap().param_groups;
    let json = serde_json::to_value(&groups).unwrap();
    assert_eq!(json[0]["betas"], serde_json::json!([0.9, 0.999]));
    assert_eq!(json[1]["params"], serde_json::json!(["b"]));
    let back: Vec<tch_amp::optim::ParamGroupState> = serde_json::from_value(json).unwrap();
    assert_eq!(back, groups);
}

#[test]
fn a_state_contains_variables_that_were_added_after_the_last_step() {
    let vs = tch::nn::VarStore::new(Device::Cpu);
    let _w = vs.root().ones("w", &[2]);
    let mut opt = Sgd::default().build(&vs, 0.1).unwrap();
    let _late = vs.root().ones("late", &[2]);
    let saved = opt.state_dict().unwrap();
    assert_eq!(saved.param_groups[0].params, ["w", "late"]);
    opt.load_state_dict(&saved).unwrap();
    // Loading takes up a variable as well, and so does assigning it to a group.
    let mut other = Sgd::default().build(&vs, 0.2).unwrap();
    let _later = vs.root().ones("later", &[2]);
    assert_eq!(other.assign_group(1, &["later"]).unwrap(), 1);
    let _latest = vs.root().ones("latest", &[2]);
    let mut source = Sgd::default().build(&vs, 0.3).unwrap();
    other.load_state_dict(&source.state_dict().unwrap()).unwrap();
    assert_eq!(other.lr(0).unwrap(), 0.3);
    assert_eq!(other.trainable_variables().len(), 4);
}

/// A run without momentum has left master weights but no buffer, so the buffer starts as the undamped gradient.
#[test]
fn a_momentum_that_begins_after_a_load_starts_its_buffer_undamped() {
    let run = |load: bool| {
        let w = leaf(&[1.0, 2.0], Kind::BFloat16, Device::Cpu);
        let masters = MasterWeights::Float;
        let mut opt = one(&w, Sgd::default(), masters, 0.1);
        set_grad(&w, &[1.0; 2]);
        opt.step().unwrap();
        if load {
            let saved = opt.state_dict().unwrap();
            opt.load_state_dict(&saved).unwrap();
        }
        let group = *opt.param_group(0).unwrap();
        let damped = Sgd { momentum: 0.9, dampening: 0.5, ..Default::default() };
        opt.set_param_group(0, ParamGroup { algorithm: damped.into(), ..group }).unwrap();
        opt.step().unwrap();
        to_f64(&opt.state_dict().unwrap().state["0"]["momentum_buffer"])
    };
    assert_eq!((run(true), run(false)), (vec![1.0; 2], vec![1.0; 2]));
}

/// The state of a tied weight, which was saved under one of its names.
#[test]
fn the_state_of_a_tied_weight_is_loaded_by_any_of_its_names() {
    let sgd = Sgd { momentum: 0.5, ..Default::default() };
    for way in TIES {
        for saved_as in ["embedding", "head"] {
            for _ in 0..4 {
                let w = leaf(&[1.0, 2.0], Kind::Float, Device::Cpu);
                let mut saved = sgd.build(vec![(saved_as, w.shallow_clone())], 0.25).unwrap();
                step_with(&mut saved, &w, &[3.0, 4.0]);
                let state = saved.state_dict().unwrap();
                let checkpoint = checkpoint_of([("opt", &mut saved)]);
                for way_to_load in 0..3 {
                    let (vs, _w) = tied(way, &[0.0; 2], Kind::Float, Device::Cpu);
                    let mut opt = sgd.build(&vs, 0.25).unwrap();
                    if way_to_load == 0 {
                        opt.load_state_dict(&state).unwrap();
                    } else {
                        let restore = checkpoint.restore().strict(way_to_load == 1);
                        let restored = restore.add("opt", &mut opt).apply().unwrap();
                        assert_eq!(restored, Default::default());
                    }
                    let loaded = opt.state_dict().unwrap();
                    let buffer = &loaded.state["embedding"]["momentum_buffer"];
                    assert_eq!(to_f64(buffer), [3.0, 4.0], "{way:?} {saved_as}");
                }
            }
        }
    }
}

#[test]
fn a_state_with_both_names_of_a_tied_weight_is_refused() {
    let both = ["embedding", "head"].map(|name| (name, leaf(&[1.0], Kind::Float, Device::Cpu)));
    let mut saved =
        Sgd { momentum: 0.5, ..Default::default() }.build(Vec::from(both), 0.25).unwrap();
    for w in saved.trainable_variables() {
        set_grad(&w, &[1.0]);
    }
    saved.step().unwrap();
    let (vs, _w) = tied(TIES[0], &[0.0], Kind::Float, Device::Cpu);
    let mut opt = Sgd { momentum: 0.5, ..Default::default() }.build(&vs, 0.25).unwrap();
    assert_says(opt.load_state_dict(&saved.state_dict().unwrap()), "two names of a tied weight");
    assert!(opt.state_dict().unwrap().state.is_empty());
}

/// Loads the state into the optimizer itself and into `other`, and expects the same state from both.
fn is_loaded(opt: &mut Optimizer, other: &mut Optimizer, context: &str) {
    let state = opt.state_dict().unwrap();
    let saved = state_bits(&state);
    for opt in [other, opt] {
        opt.load_state_dict(&state).unwrap_or_else(|error| panic!("{context}: {error}"));
        assert_eq!(state_bits(&opt.state_dict().unwrap()), saved, "{context}");
    }
}

#[test]
fn a_state_whose_first_step_was_skipped_is_loaded() {
    for_each_device(|device| {
        for algorithm in algorithms() {
            for masters in MASTERS {
                let made = || {
                    let w = leaf(&[1.0, 2.0], Kind::BFloat16, device);
                    let opt = algorithm.master_weights(masters);
                    (w.shallow_clone(), opt.build(vec![w], 0.1).unwrap())
                };
                let ((w, mut opt), (_, mut other)) = (made(), made());
                let mut scaler = GradScaler::new(device).unwrap();
                set_grad(&w, &[INF, 1.0]);
                scaler.step(&mut opt).unwrap();
                let context = format!("{algorithm:?} {masters:?} on {device:?}");
                is_loaded(&mut opt, &mut other, &context);
            }
        }
    });
}

#[rstest]
#[case::amsgrad(AdamW::default(), AdamW { amsgrad: true, ..Default::default() })]
#[case::amsgrad_of_adam(Adam::default(), Adam { amsgrad: true, ..Default::default() })]
#[case::momentum(Sgd::default(), Sgd { momentum: 0.9, ..Default::default() })]
#[case::momentum_of_rmsprop(RmsProp::default(), RmsProp { momentum: 0.9, ..Default::default() })]
#[case::centered(RmsProp::default(), RmsProp { centered: true, ..Default::default() })]
#[case::muon(Muon::default(), Muon { use_muon: false, ..Default::default() })]
#[case::adamw(Muon { use_muon: false, ..Default::default() }, Muon::default())]
fn a_state_is_loaded_after_an_option_was_switched_on_and_before_it_has_an_effect(
    #[case] from: impl Into<Algorithm> + Copy,
    #[case] to: impl Into<Algorithm> + Copy,
) {
    for_each_device(|device| {
        for masters in MASTERS {
            let made = || {
                let w = leaf(&[1.0, 2.0], Kind::BFloat16, device).detach().view([1, 2]);
                let w = w.set_requires_grad(true);
                let builder = from.into().master_weights(masters);
                (w.shallow_clone(), builder.build(vec![w], 0.1).unwrap())
            };
            let ((w, mut opt), (v, mut other)) = (made(), made());
            step_with(&mut opt, &w, &[1.0, -1.0]);
            no_grad(|| v.shallow_clone().copy_(&w));
            opt.set_param_group(0, ParamGroup::new(0.1, to.into())).unwrap();
            let context = format!("{masters:?} on {device:?}");
            is_loaded(&mut opt, &mut other, &context);
            for (w, opt) in [(&w, &mut opt), (&v, &mut other)] {
                step_with(opt, w, &[0.5, 0.25]);
            }
            assert_eq!(bits(&w), bits(&v), "{context}");
            is_loaded(&mut opt, &mut other, &context);
        }
    });
}

#[rstest]
fn a_run_with_masters_goes_on_in_f32_as_if_it_had_always_been_f32(
    #[values(Kind::BFloat16, Kind::Half)] kind: Kind,
    #[values(MasterWeights::Float, MasterWeights::Remainder)] masters: MasterWeights,
    #[values("before", "after", "together")] model: &str,
) {
    for_each_device(|device| {
        for algorithm in algorithms() {
            let values = [1.0, -2.0, 0.375];
            let (w, twin) = (leaf(&values, kind, device), leaf(&values, Kind::Float, device));
            let mut opt = algorithm
                .master_weights(masters)
                .build(vec![("w", w.shallow_clone())], 0.01)
                .unwrap();
            let mut twins = build(algorithm, vec![("w", twin.shallow_clone())], 0.01);
            let train = |w: &Tensor, opt: &mut Optimizer, steps: std::ops::Range<u8>| {
                for step in steps {
                    step_with(opt, w, &[1.0, -0.5, 0.25 * f64::from(step)]);
                }
            };
            train(&w, &mut opt, 0..4);
            train(&twin, &mut twins, 0..4);

            let vs = tch::nn::VarStore::new(device);
            let wide = vs.root().zeros("w", &[3]);
            // Built like the optimizer before, as a program would whose dtype is an option.
            let mut resumed = algorithm.master_weights(masters).build(&vs, 0.3).unwrap();
            let rounded = || no_grad(|| wide.shallow_clone().copy_(&w));
            match model {
                "before" => {
                    rounded();
                    resumed.load_state_dict(&opt.state_dict().unwrap()).unwrap();
                    assert_eq!(bits(&wide), bits(&twin), "{algorithm:?}: the master");
                }
                "after" => {
                    resumed.load_state_dict(&opt.state_dict().unwrap()).unwrap();
                    rounded();
                }
                _ => {
                    let mut halves = tch::nn::VarStore::new(device);
                    let half = halves.root().zeros("w", &[3]);
                    if kind == Kind::Half {
                        halves.half()
                    } else {
                        halves.bfloat16()
                    }
                    no_grad(|| half.shallow_clone().copy_(&w));
                    let parts: [(&str, &mut dyn Stateful); 2] =
                        [("model", &mut &halves), ("optimizer", &mut opt)];
                    let checkpoint = reloaded(&checkpoint_of(parts), "run.pt");
                    let restore = checkpoint.restore().add("optimizer", &mut resumed);
                    restore.add("model", &vs).cast(true).apply().unwrap();
                    assert_eq!(bits(&wide), bits(&twin), "{algorithm:?}: the master");
                }
            }
            let context = format!("{algorithm:?} {kind:?} {masters:?} on {device:?}, {model}");
            train(&wide, &mut resumed, 4..6);
            train(&twin, &mut twins, 4..6);
            assert_eq!(bits(&wide), bits(&twin), "{context}");
            let told = |opt: &mut Optimizer| {
                let entries = opt.state_dict().unwrap().state.remove("w").unwrap_or_default();
                entries.into_iter().map(|(key, t)| (key, t.kind(), bits(&t))).collect::<Vec<_>>()
            };
            assert_eq!(told(&mut resumed), told(&mut twins), "{context}");
        }
    });
}

/// A value that is written between loading and the next step, or a model that the state does not belong to.
#[test]
fn a_loaded_master_does_not_replace_another_f32_value() {
    for_each_device(|device| {
        let w = leaf(&[1.0, 2.0], Kind::BFloat16, device);
        let sgd = Sgd::default().master_weights(MasterWeights::Float);
        let mut opt = sgd.build(vec![w.shallow_clone()], 1e-3).unwrap();
        step_with(&mut opt, &w, &[1.0, 1.0]);
        let state = opt.state_dict().unwrap();
        let master = to_f64(&state.state["0"]["master_param"]);
        let wide = leaf(&[to_f64(&w)[0], 7.0], Kind::Float, device);
        let mut resumed = sgd.build(vec![wide.shallow_clone()], 0.0).unwrap();
        resumed.load_state_dict(&state).unwrap();
        assert_eq!(to_f64(&wide), [master[0], 7.0]);
        let _filled = no_grad(|| wide.get(0).fill_(5.0));
        set_grad(&wide, &[1.0, 1.0]);
        resumed.set_lr(0.0).unwrap();
        resumed.step().unwrap();
        assert_eq!(to_f64(&wide), [5.0, 7.0]);
    });
}

#[test]
fn masters_are_refused_where_there_is_no_room_for_their_bits() {
    let w = leaf(&[1.0], Kind::BFloat16, Device::Cpu);
    let list = || vec![w.shallow_clone()];
    let mut opt = Sgd::default().master_weights(MasterWeights::Float).build(list(), 0.1).unwrap();
    step_with(&mut opt, &w, &[1.0]);
    let mut other = Sgd::default().build(list(), 0.1).unwrap();
    assert_says(
        other.load_state_dict(&opt.state_dict().unwrap()),
        "build this optimizer with `master_weights`",
    );
}

#[test]
fn a_model_that_is_converted_in_place_goes_on_with_its_optimizers_own_state() {
    for_each_device(|device| {
        for masters in [MasterWeights::Float, MasterWeights::Remainder] {
            let mut vs = tch::nn::VarStore::new(device);
            let w = vs.root().ones("w", &[3]);
            vs.bfloat16();
            let adamw = AdamW::default().master_weights(masters);
            let mut opt = adamw.build(&vs, 1e-3).unwrap();
            step_with(&mut opt, &w, &[1.0, -1.0, 0.5]);
            let master = bits(&opt.master_weight(0).unwrap().unwrap());
            opt.zero_grad().unwrap();
            vs.float();
            set_grad(&w, &[1.0, -1.0, 0.5]);
            let text = "has another dtype than when its master weight was made; build the optimizer after the \
                        model has its dtype and load the old `state_dict`";
            assert_refused!(opt.step(), Error::Optimizer(OptimizerError::Parameter { .. }), text);
            let mut next = adamw.build(&vs, 1e-3).unwrap();
            next.load_state_dict(&opt.state_dict().unwrap()).unwrap();
            assert_eq!(bits(&w), master, "{masters:?}");
            next.step().unwrap();
        }
    });
}

/// The masters of each mode, of a model that is f32 or f64 by now, keep the bits that half precision lacks, except
/// where something else was written since.
#[test]
fn masters_of_parameters_that_were_cast_are_saved_unless_these_were_written_to() {
    let modes = [
        (Kind::BFloat16, MasterWeights::Float),
        (Kind::BFloat16, MasterWeights::Remainder),
        (Kind::Half, MasterWeights::Float),
        (Kind::Half, MasterWeights::Remainder),
        (Kind::Half, MasterWeights::StochasticRounding { seed: 3 }),
    ];
    for_each_device(|device| {
        for ((kind, masters), wide) in
            modes.into_iter().flat_map(|mode| [(mode, Kind::Float), (mode, Kind::Double)])
        {
            let context = format!("{kind:?} {masters:?} to {wide:?} on {device:?}");
            // They round to other numbers in bf16 than in fp16.
            let w = leaf(&[1.1, 2.3, 3.7], kind, device);
            let sgd = Sgd::default().master_weights(masters);
            let mut opt = sgd.build(vec![w.shallow_clone()], 1e-4).unwrap();
            step_with(&mut opt, &w, &[1.0, -1.0, 0.5]);
            let master = to_f64(&opt.master_weight(0).unwrap().unwrap());
            let rounded = to_f64(&w);
            assert!(master.iter().zip(&rounded).all(|(m, w)| m != w), "{context}: {master:?}");
            no_grad(|| w.shallow_clone().set_data(&w.to_kind(wide)));
            assert_eq!(to_f64(&opt.master_weight(0).unwrap().unwrap()), master, "{context}");
            // A number that half precision does not have.
            let other = f64::from(7.003f32);
            let _written = no_grad(|| w.get(1).fill_(other));
            let wanted = [master[0], other, master[2]];
            assert_eq!(to_f64(&opt.master_weight(0).unwrap().unwrap()), wanted, "{context}");
            let state = opt.state_dict().unwrap();
            assert_eq!(to_f64(&state.state["0"]["master_param"]), wanted, "{context}");
            assert_eq!(to_f64(&w), [rounded[0], other, rounded[2]], "{context}");
            let mut next = sgd.build(vec![w.shallow_clone()], 0.0).unwrap();
            next.load_state_dict(&state).unwrap();
            assert_eq!(to_f64(&w), wanted, "{context}");
        }
    });
}

/// A bf16 parameter, its optimizer after one step, and the optimizer's state with another number of steps.
fn stepped(
    masters: MasterWeights,
    device: Device,
    steps: Tensor,
) -> (Tensor, Optimizer, OptimizerState) {
    let w = leaf(&[1.0], Kind::BFloat16, device);
    let builder = AdamW::default().master_weights(masters);
    let mut opt = builder.build(vec![w.shallow_clone()], 0.1).unwrap();
    step_with(&mut opt, &w, &[1.0]);
    let mut state = opt.state_dict().unwrap();
    replace(&mut state, "0", "step", steps);
    (w, opt, state)
}

#[rstest]
#[case::infinite_in_f32(1e300)]
#[case::beyond_every_integer(1e30)]
#[case::negative(-1e300)]
fn a_number_of_steps_that_cannot_be_counted_is_refused(#[case] steps: f64) {
    for_each_device(|device| {
        for masters in MASTERS {
            let (_w, mut opt, state) = stepped(masters, device, Tensor::from(steps));
            let result = opt.load_state_dict(&state);
            assert_refused!(result, Error::Optimizer(OptimizerError::State { .. }));
            let kept = to_f64(&opt.state_dict().unwrap().state["0"]["step"]);
            assert_eq!(kept, [1.0], "nothing was loaded");
        }
    });
}

#[test]
fn a_skipped_step_does_not_change_a_large_number_of_steps() {
    for_each_device(|device| {
        for masters in MASTERS {
            for steps in [16_777_215f32, 16_777_216.0, 16_777_218.0, 3e9] {
                let (w, mut opt, state) = stepped(masters, device, Tensor::from(steps));
                opt.load_state_dict(&state).unwrap();
                let mut scaler = GradScaler::new(device).unwrap();
                set_grad(&w, &[INF]);
                assert!(scaler.step(&mut opt).unwrap().is_skipped().unwrap());
                let kept = to_f64(&opt.state_dict().unwrap().state["0"]["step"]);
                assert_eq!(kept, [f64::from(steps)], "{masters:?} on {device:?}");
            }
        }
    });
}
