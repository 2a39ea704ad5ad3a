//! Muon: the formula for matrices, which parameters AdamW steps, and what moves between the two.

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor};
use tch_amp::Error;
use tch_amp::optim::{AdamW, AdjustLr, MasterWeights, Muon, Optimizer, OptimizerError, ParamGroup};

use crate::optim::{one, set_grad, step_with, to_f64};
use testkit::bits::bits;
use testkit::for_each_device;
use testkit::optimizers::{WEIGHTS, all_bits, scaler};
use testkit::plain::Plain;
use testkit::tensors::leaf;

/// No singular value is near to zero: the iterations would make one of the rounding errors there.
fn gradient(rows: i64, columns: i64, step: i64) -> Tensor {
    let wild = |i: i64, j: i64| (((i * 37 + j * 101 + step * 59) as f64).powi(2) * 0.731).sin();
    let number = |i, j| wild(i, j) / 4.0 + if i == j { 1.0 } else { 0.0 };
    let numbers = (0..rows).flat_map(|i| (0..columns).map(move |j| number(i, j)));
    Tensor::from_slice(&numbers.collect::<Vec<_>>()).view([rows, columns])
}

fn matrix(values: &Tensor, kind: Kind, device: Device) -> Tensor {
    values.to_kind(kind).to_device(device).copy().set_requires_grad(true)
}

fn largest_difference(one: &Tensor, other: &Tensor) -> f64 {
    (one - other).abs().max().double_value(&[])
}

fn options() -> Vec<Muon> {
    let muon = Muon::default();
    let gentle = Muon { ns_coefficients: (2.0, -1.5, 0.5), ns_steps: 3, ..muon };
    vec![
        muon,
        Muon { nesterov: false, momentum: 0.5, weight_decay: 0.0, ..muon },
        Muon { adjust_lr_fn: AdjustLr::MatchRmsAdamW, ..muon },
        Muon { momentum: 0.5, ..gentle },
        Muon { momentum: 0.0, ..gentle },
        Muon { ns_steps: 0, momentum: 0.5, ..muon },
        Muon { ns_steps: 0, eps: 100.0, ..muon },
    ]
}

/// The products are rounded to bf16, whose numbers have 8 significant bits, and the default coefficients multiply the
/// errors. The bounds are about twice as large as what was observed.
#[test]
fn every_option_computes_what_a_plain_loop_does() {
    const LR: f64 = 0.125;
    for_each_device(|device| {
        for muon in options() {
            let tolerance = if muon.ns_steps == 5 { 0.1 } else { 0.02 };
            for (rows, columns) in [(3, 5), (5, 3), (1, 4), (4, 1), (1, 1), (24, 20)] {
                let w = matrix(&gradient(rows, columns, 100), Kind::Double, device);
                let mut opt = muon.build(&[w.shallow_clone()], LR).unwrap();
                let mut want = Plain::new(&w);
                let mut bound = 0.0;
                for step in 0..3 {
                    let gradient = gradient(rows, columns, step);
                    step_with(&mut opt, &w, &to_f64(&gradient));
                    let before = want.value.copy();
                    want.step(muon, LR, &gradient);
                    bound += tolerance * largest_difference(&want.value, &before);
                    let off = largest_difference(&w.detach().to_device(Device::Cpu), &want.value);
                    assert!(
                        off <= bound,
                        "{muon:?} {rows}x{columns}, step {step}: {off} > {bound}"
                    );
                    let buffer = &opt.state_dict().unwrap().state["0"]["momentum_buffer"];
                    let off = largest_difference(&buffer.to_device(Device::Cpu), &want.first);
                    assert!(off < 1e-14, "{muon:?}");
                }
            }
        }
    });
}

/// A Hadamard matrix, whose numbers no product rounds: one iteration multiplies it by a + b/4 + c/16.
#[test]
fn an_iteration_is_exact_where_bf16_is() {
    for_each_device(|device| {
        let sign = |i: u32, j: u32| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
        let signs: Vec<f64> = (0..16).map(|place| sign(place / 4, place % 4)).collect();
        let hadamard = Tensor::from_slice(&signs).view([4, 4]);
        let muon = Muon {
            ns_coefficients: (2.0, -1.5, 0.5),
            ns_steps: 1,
            weight_decay: 0.5,
            ..Default::default()
        };
        let exact = |(_, masters): &(Kind, MasterWeights)| {
            !matches!(masters, MasterWeights::StochasticRounding { .. })
        };
        let double = (Kind::Double, MasterWeights::None);
        for (kind, masters) in WEIGHTS.into_iter().filter(exact).chain([double]) {
            let w = matrix(&(&hadamard * 2.0), kind, device);
            let mut opt = one(&w, muon, masters, 0.5);
            step_with(&mut opt, &w, &signs);
            // 2 * (1 - 0.5 * 0.5) - 0.5 * (2 - 0.375 + 0.03125) / 4
            let factor = 1.5 - 0.207_031_25;
            let got = opt.master_weight(0).unwrap().unwrap_or_else(|| w.shallow_clone());
            let want = (&hadamard * factor).to_kind(got.kind());
            assert_eq!(to_f64(&got), to_f64(&want), "{kind:?} {masters:?}");
        }
    });
}

/// One parameter of each kind: a matrix, a bias, the filters of a convolution and a number.
fn network(device: Device) -> Vec<(&'static str, Tensor)> {
    let random = |shape: &[i64]| {
        let count = shape.iter().product::<i64>();
        let values = Tensor::arange(count, (Kind::Float, Device::Cpu)).sin();
        values.reshape(shape).to_device(device).set_requires_grad(true)
    };
    vec![
        ("hidden", random(&[6, 4])),
        ("bias", random(&[6])),
        ("filters", random(&[2, 3, 4, 4])),
        ("number", random(&[])),
        ("head", random(&[5, 6])),
    ]
}

fn backward(list: &[Tensor], step: usize) {
    for (index, w) in list.iter().enumerate() {
        let values: Vec<_> =
            (0..w.numel()).map(|i| ((i * 7 + step * 3 + index) as f64).cos()).collect();
        set_grad(w, &values);
    }
}

fn train(opt: &mut Optimizer, steps: std::ops::Range<usize>) {
    for step in steps {
        backward(&opt.trainable_variables(), step);
        opt.step().unwrap();
    }
}

fn keys(opt: &mut Optimizer) -> BTreeMap<String, Vec<String>> {
    let state = opt.state_dict().unwrap().state;
    state.into_iter().map(|(name, entries)| (name, entries.into_keys().collect())).collect()
}

const BY_ADAMW: [&str; 3] = ["exp_avg", "exp_avg_sq", "step"];
const BY_MUON: [&str; 1] = ["momentum_buffer"];

#[test]
fn adamw_steps_all_parameters_but_the_matrices_of_groups_that_use_muon() {
    for_each_device(|device| {
        let muon = Muon {
            adamw: AdamW { betas: (0.5, 0.75), ..Default::default() },
            adamw_lr_factor: 0.25,
            ..Default::default()
        };
        let list = network(device);
        let mut opt = muon.build(list, 0.5).unwrap();
        opt.assign_group(1, &["head"]).unwrap();
        opt.set_param_group(1, ParamGroup::new(0.5, Muon { use_muon: false, ..muon })).unwrap();
        let rest: Vec<_> =
            network(device).into_iter().filter(|(name, _)| *name != "hidden").collect();
        let mut adamw = muon.adamw.build(rest, 0.125).unwrap();
        for step in 0..3 {
            let all = opt.trainable_variables();
            backward(&all, step);
            // The same gradients, whose values depend on the places in the list.
            for (w, other) in all[1..].iter().zip(adamw.trainable_variables()) {
                set_grad(&other, &to_f64(&w.grad()));
            }
            opt.step().unwrap();
            adamw.step().unwrap();
            for (w, other) in all[1..].iter().zip(adamw.trainable_variables()) {
                assert_eq!(bits(w), bits(&other));
            }
        }
        let found = keys(&mut opt);
        assert_eq!(found["hidden"], BY_MUON);
        for name in ["head", "filters", "bias", "number"] {
            assert_eq!(found[name], BY_ADAMW, "{name}");
        }
    });
}

#[test]
fn the_learning_rate_drives_both_and_weight_decay_is_that_of_both() {
    let mut opt = Muon { adamw_lr_factor: 0.0, ..Default::default() }
        .build(network(Device::Cpu), 0.5)
        .unwrap();
    let before: Vec<_> = opt.trainable_variables().iter().map(to_f64).collect();
    train(&mut opt, 0..1);
    let changed = |opt: &Optimizer, before: &[Vec<f64>]| {
        let all = opt.trainable_variables();
        all.iter().zip(before).map(|(w, before)| to_f64(w) != *before).collect::<Vec<_>>()
    };
    assert_eq!(changed(&opt, &before), [true, false, false, false, true]);
    let before: Vec<_> = opt.trainable_variables().iter().map(to_f64).collect();
    opt.set_lr(0.0).unwrap();
    train(&mut opt, 1..2);
    assert_eq!(changed(&opt, &before), [false; 5]);
    opt.set_weight_decay(0.25).unwrap();
    opt.set_momentum(0.5).unwrap();
    let want =
        Muon { adamw_lr_factor: 0.0, weight_decay: 0.25, momentum: 0.5, ..Default::default() };
    let want = Muon { adamw: AdamW { weight_decay: 0.25, ..Default::default() }, ..want };
    assert_eq!(opt.param_group(0).unwrap().algorithm, want.into());
}

#[test]
fn a_parameter_that_moves_between_muon_and_adamw_starts_anew() {
    let muon = Muon::default();
    let mut opt = muon.build(network(Device::Cpu), 0.1).unwrap();
    train(&mut opt, 0..2);
    opt.assign_group(1, &["head", "bias"]).unwrap();
    assert!(keys(&mut opt).contains_key("head"), "an equal group changes nothing");
    opt.set_param_group(1, ParamGroup::new(0.1, Muon { use_muon: false, ..muon })).unwrap();
    assert!(!keys(&mut opt).contains_key("head"));
    let steps =
        |opt: &mut Optimizer, name: &str| to_f64(&opt.state_dict().unwrap().state[name]["step"])[0];
    assert_eq!(steps(&mut opt, "bias"), 2.0);
    train(&mut opt, 2..3);
    assert_eq!((steps(&mut opt, "bias"), steps(&mut opt, "head")), (3.0, 1.0));
    opt.assign_group(0, &["head"]).unwrap();
    train(&mut opt, 3..4);
    assert_eq!(keys(&mut opt)["head"], BY_MUON);
    // The hidden matrix has never moved.
    assert_eq!(keys(&mut opt)["hidden"], BY_MUON);
}

#[test]
fn a_state_of_the_other_algorithm_is_refused() {
    let mut by_muon = Muon::default().build(network(Device::Cpu), 0.1).unwrap();
    let mut by_adamw =
        Muon { use_muon: false, ..Default::default() }.build(network(Device::Cpu), 0.1).unwrap();
    train(&mut by_muon, 0..1);
    train(&mut by_adamw, 0..1);
    let mut state = by_adamw.state_dict().unwrap();
    state.param_groups = by_muon.state_dict().unwrap().param_groups;
    let before: Vec<_> = keys(&mut by_muon).into_iter().collect();
    let error = by_muon.load_state_dict(&state).unwrap_err();
    let is_refused = matches!(&error, Error::Optimizer(OptimizerError::State { parameter, problem })
        if parameter == "hidden" && problem.contains("which Muon does not keep"));
    assert!(is_refused, "{error}");
    assert_eq!(keys(&mut by_muon).into_iter().collect::<Vec<_>>(), before);
    // With its groups, the state is that of AdamW.
    by_muon.load_state_dict(&by_adamw.state_dict().unwrap()).unwrap();
    train(&mut by_muon, 1..2);
    assert_eq!(keys(&mut by_muon)["hidden"], BY_ADAMW);
}

/// A scale that is no power of two, in one optimizer with those that unscale otherwise.
#[test]
fn a_scaler_steps_matrices_and_the_rest_with_the_same_scale() {
    for_each_device(|device| {
        let [mut plain, mut scaled] =
            [(); 2].map(|()| Muon::default().build(network(device), 0.1).unwrap());
        let mut scaler = scaler(device, 3.0);
        for step in 0..3 {
            for (opt, factor) in [(&plain, 1.0), (&scaled, 3.0)] {
                for w in opt.trainable_variables() {
                    let values = (0..w.numel()).map(|i| factor * ((i + step) as f64).cos());
                    set_grad(&w, &values.collect::<Vec<_>>());
                }
            }
            plain.step().unwrap();
            assert!(scaler.step(&mut scaled).unwrap().is_stepped().unwrap());
            scaler.update().unwrap();
        }
        for (one, other) in plain.trainable_variables().iter().zip(scaled.trainable_variables()) {
            for (one, other) in to_f64(one).into_iter().zip(to_f64(&other)) {
                // A gradient that is rounded once more may change the last bit of a bf16 number.
                assert!((one - other).abs() < 0.02, "{one} {other}");
            }
        }
    });
}

/// A step inside a region multiplies in bf16, whatever the dtype of the region.
#[test]
fn a_region_does_not_change_a_step() {
    let run = |inside: bool| {
        let mut opt = Muon::default().build(network(Device::Cpu), 0.1).unwrap();
        backward(&opt.trainable_variables(), 0);
        if inside {
            let region = tch_amp::Autocast::new(Device::Cpu).dtype(Kind::Half);
            region.run(|| opt.step().unwrap()).unwrap();
        } else {
            opt.step().unwrap();
        }
        all_bits(&mut opt)
    };
    assert_eq!(run(true), run(false));
}

/// Views with gaps and other orders of memory, on the CPU. The products of a turned matrix may be rounded otherwise.
#[test]
fn matrices_of_any_layout_are_stepped() {
    let values = gradient(4, 6, 7);
    let plain = matrix(&values, Kind::Float, Device::Cpu);
    let turned = plain.detach().tr().contiguous().tr().set_requires_grad(true);
    let wide = Tensor::stack(&[plain.detach(), plain.detach()], -1);
    let gaps = wide.select(-1, 0).set_requires_grad(true);
    let all = [plain, turned, gaps];
    let mut opt = Muon::default().build(&all, 0.1).unwrap();
    for step in 0..3 {
        all.iter().for_each(|w| set_grad(w, &to_f64(&gradient(4, 6, step))));
        opt.step().unwrap();
    }
    assert_eq!(to_f64(&all[0]), to_f64(&all[2]));
    for (one, other) in to_f64(&all[0]).into_iter().zip(to_f64(&all[1])) {
        assert!((one - other).abs() < 0.005, "{one} {other}");
    }
    assert_eq!(wide.select(-1, 1), values.to_kind(Kind::Float));
    // A parameter without elements, and one whose momentum is zero.
    let none = Tensor::zeros([3, 0], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let zero = leaf(&[1.0, 2.0], Kind::Float, Device::Cpu).detach().reshape([1, 2]);
    let zero = zero.set_requires_grad(true);
    let mut opt = Muon { weight_decay: 0.0, ..Default::default() }
        .build(&[none.shallow_clone(), zero.shallow_clone()], 1.0);
    set_grad(&none, &[0.0; 0]);
    set_grad(&zero, &[0.0, 0.0]);
    opt.as_mut().unwrap().step().unwrap();
    assert_eq!(to_f64(&zero), [1.0, 2.0]);
}
