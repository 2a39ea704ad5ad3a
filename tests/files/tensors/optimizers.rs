//! Parameters, gradients, states and scales.

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::gradients::{ClipNorm, clip_grad_norm, clip_grad_value};
use tch_amp::optim::{AdamW, Algorithm, AmpOptimizer, MasterWeights, Optimizer, Sgd};
use tch_amp::scaler::{GradScalerConfig, PerLossScalers};
use tch_amp::{GradScaler, Result};

use crate::tensors::{with_each_kind, witness};
use testkit::descent::Descent;
use testkit::optimizers::{MASTERS, algorithms};
use testkit::to_f64;

fn amsgrad(list: Vec<Tensor>) -> Result<Optimizer> {
    AdamW { amsgrad: true, ..Default::default() }.build(list, 0.1)
}

/// Sets the gradient of `w`, as backward or other code might.
fn give(w: &Tensor, gradient: &Tensor) -> Result<()> {
    let plain = w.f_sum(w.f_kind()?)?;
    plain.f_backward()?;
    let mut held = w.f_grad()?;
    no_grad(|| held.f_set_data(gradient))?;
    Ok(())
}

fn of_type(norm_type: f64) -> ClipNorm {
    ClipNorm { norm_type, ..0.5.into() }
}

type Way = fn(&mut GradScaler, &mut dyn AmpOptimizer) -> Result<()>;

/// All ways from gradients to a step, each for an optimizer of the program's own and for a fused one.
fn ways() -> impl Iterator<Item = (&'static str, Way, bool)> {
    let ways: [(&str, Way); 7] = [
        ("step", |scaler, opt| scaler.step(opt).map(drop)),
        ("step_clip_norm", |scaler, opt| scaler.step_clip_norm(opt, 0.5).map(drop)),
        ("powers", |scaler, opt| scaler.step_clip_norm(opt, of_type(2.5)).map(drop)),
        ("largest", |scaler, opt| scaler.step_clip_norm(opt, of_type(f64::INFINITY)).map(drop)),
        ("step_clip_value", |scaler, opt| scaler.step_clip_value(opt, 0.5).map(drop)),
        ("unscale_", |scaler, opt| {
            scaler.unscale_(opt)?;
            scaler.non_finite_gradients(opt)?;
            scaler.step(opt).map(drop)
        }),
        ("unscale", |scaler, opt| {
            let mut unscaled = scaler.unscale(opt)?;
            let _norm = unscaled.clip_grad_norm(0.5)?;
            unscaled.clip_grad_value(0.1)?;
            unscaled.step().map(drop)
        }),
    ];
    ways.into_iter().flat_map(|(way, step)| [false, true].map(|fused| (way, step, fused)))
}

/// Steps tensors in one of the ways.
fn step_in(step: Way, fused: bool, list: Vec<Tensor>) -> Result<()> {
    match fused {
        true => step(&mut scaler(), &mut amsgrad(list)?),
        false => step(&mut scaler(), &mut Descent(list)),
    }
}

fn scaler() -> GradScaler {
    let config =
        GradScalerConfig { init_scale: 4.0, allow_fp16_gradients: true, ..Default::default() };
    config.build(Device::Cpu).unwrap()
}

/// Runs `step` with a witness and a tensor. If a step of this crate fails, the witness must be unchanged. A step of
/// another optimizer may have stopped midway.
fn beside_a_witness(
    tensor: &Tensor,
    fused: bool,
    step: impl FnOnce(Vec<Tensor>) -> Result<()>,
) -> Result<()> {
    let witness = witness();
    (&witness * 2.0).sum(Kind::Float).backward();
    let stepped = step(vec![witness.shallow_clone(), tensor.shallow_clone()]);
    if fused && stepped.is_err() {
        assert_eq!(to_f64(&witness), [1.0, 2.0], "{stepped:?}");
    }
    stepped
}

#[test]
fn parameters() {
    for algorithm in algorithms() {
        for masters in MASTERS {
            let what = format!("{algorithm:?} with {masters:?}");
            let taken = with_each_kind(&what, |tensor| {
                let tensor = tensor.f_detach()?.f_set_requires_grad(true)?;
                tensor.f_sum(Kind::Float)?.f_backward()?;
                beside_a_witness(&tensor, true, |list| {
                    algorithm.master_weights(masters).build(list, 0.1)?.step()
                })
            });
            taken.includes(&["f32", "f64", "bf16", "f16", "empty", "transposed"]);
            taken.includes(&["with gaps", "with huge strides", "copy-on-write"]);
        }
    }
}

#[test]
fn parameters_under_a_scaler() {
    for (way, step, fused) in ways() {
        let what = format!("{way}, fused: {fused}");
        let taken = with_each_kind(&what, |tensor| {
            let tensor = tensor.f_detach()?.f_set_requires_grad(true)?;
            tensor.f_sum(Kind::Float)?.f_backward()?;
            beside_a_witness(&tensor, fused, |list| step_in(step, fused, list))
        });
        taken.includes(&["f32", "f64", "bf16", "f16", "with gaps", "transposed"]);
    }
}

#[test]
fn gradients() {
    for (way, step, fused) in ways() {
        let what = format!("the gradient of {way}, fused: {fused}");
        with_each_kind(&what, |gradient| {
            let kind = if gradient.defined() { gradient.f_kind()? } else { Kind::Float };
            let floating = matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16);
            let kind = if floating { kind } else { Kind::Float };
            for size in [vec![2, 3], vec![2], vec![]] {
                let w = Tensor::ones(size, (kind, Device::Cpu)).set_requires_grad(true);
                if give(&w, &gradient).is_err() {
                    continue;
                }
                beside_a_witness(&w, fused, |list| step_in(step, fused, list)).ok();
            }
            Ok(())
        });
    }
}

/// A zero tensor without memory and a view of other numbers are gradients like others.
#[test]
fn gradients_without_memory_of_their_own_count_by_their_values() {
    for (way, step, fused) in ways() {
        for (gradient, change) in [
            (Tensor::internal_efficientzerotensor([2], (Kind::Float, Device::Cpu)), 0.0),
            (Tensor::from_slice(&[-0.25f32, -0.25]).internal_neg_view(), 0.25),
            (Tensor::from_slice(&[0.25f32, 0.25]).internal_lazy_clone(), 0.25),
        ] {
            let w = witness();
            give(&w, &gradient).unwrap();
            let list = vec![w.shallow_clone()];
            let mut sgd = Sgd::default().build(vec![w.shallow_clone()], 1.0).unwrap();
            let mut mine = Descent(list);
            let opt: &mut dyn AmpOptimizer = if fused { &mut sgd } else { &mut mine };
            let mut scaler = scaler();
            match step(&mut scaler, opt) {
                Ok(()) => {
                    let most = if way == "unscale" { 0.1 } else { f64::INFINITY };
                    let clipped = most.min(change / 4.0);
                    let want = [1.0 - clipped, 2.0 - clipped];
                    assert_eq!(to_f64(&w), want, "{way}, fused: {fused}, {change}");
                }
                Err(error) => assert_eq!(to_f64(&w), [1.0, 2.0], "{way}: {error}"),
            }
        }
    }
}

#[test]
fn clipping() {
    with_each_kind("clip_grad_norm", |gradient| {
        let w = Tensor::ones([2, 3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        if give(&w, &gradient).is_err() {
            return Ok(());
        }
        let all = [witness(), w];
        clip_grad_value(&all, 2.0)?;
        for norm_type in [1.0, 2.5, f64::INFINITY] {
            let _norm = clip_grad_norm(&all, of_type(norm_type))?;
        }
        clip_grad_norm(&all, 0.5).map(drop)
    });
}

#[test]
fn saved_states() {
    for algorithm in algorithms() {
        let made = || {
            let w = Tensor::ones([2, 3], (Kind::BFloat16, Device::Cpu)).set_requires_grad(true);
            w.sum(Kind::BFloat16).backward();
            let builder = algorithm.master_weights(MasterWeights::Float);
            let mut opt = builder.build(vec![w.shallow_clone()], 0.1).unwrap();
            opt.step().unwrap();
            (w, opt)
        };
        let (_, mut first) = made();
        let saved = first.state_dict().unwrap();
        for key in saved.state["0"].keys() {
            let what = format!("{key} of {algorithm:?}, loaded");
            let taken = with_each_kind(&what, |tensor| {
                let (w, mut opt) = made();
                let before = copies(&mut opt);
                let mut given = opt.state_dict()?;
                given.state.get_mut("0").unwrap().insert(key.clone(), tensor);
                let loaded = opt.load_state_dict(&given);
                if loaded.is_err() {
                    assert_eq!(copies(&mut opt), before, "{what}");
                    let weights = to_f64(&w);
                    opt.step()?;
                    assert_ne!(to_f64(&w), weights, "{what}");
                    return loaded;
                }
                opt.step()
            });
            let fitting: &[&str] = match key.as_str() {
                "step" | "mu_product" => &["of no dimensions"],
                "row_var" | "col_var" => &[],
                _ => &[
                    "f32",
                    "f64",
                    "bf16",
                    "with gaps",
                    "expanded",
                    "negative",
                    "zero without memory",
                ],
            };
            taken.includes(fitting);
            let what = format!("{key} of {algorithm:?}, replaced in its place");
            with_each_kind(&what, |tensor| {
                let (w, mut opt) = made();
                let mut kept = opt.state_dict()?.state["0"][key].shallow_clone();
                let before = to_f64(&w);
                if no_grad(|| kept.f_set_data(&tensor)).is_err() {
                    return Ok(());
                }
                let stepped = opt.step();
                if stepped.is_err() {
                    assert_eq!(to_f64(&w), before, "{what}");
                }
                stepped
            });
        }
    }
}

fn copies(opt: &mut Optimizer) -> BTreeMap<String, Vec<f64>> {
    let state = opt.state_dict().unwrap().state;
    let tensors = state.values().flat_map(|tensors| tensors.iter());
    tensors.map(|(key, tensor)| (key.clone(), to_f64(tensor))).collect()
}

#[test]
fn scales() {
    let taken = with_each_kind("update_with_tensor", |tensor| {
        let mut scaler = scaler();
        let updated = scaler.update_with_tensor(&tensor);
        if updated.is_err() {
            assert_eq!(scaler.get_scale()?, 4.0);
        }
        updated
    });
    taken.includes(&["of no dimensions"]);
    let taken = with_each_kind("scale", |tensor| scaler().scale(&tensor).map(drop));
    taken.includes(&["f32", "bf16", "with gaps", "negative", "sparse COO"]);
    with_each_kind("backward", |tensor| scaler().backward(&tensor));
    with_each_kind("backward_retain_graph", |tensor| scaler().backward_retain_graph(&tensor));
}

#[test]
fn lists_of_parameters() {
    for algorithm in [Algorithm::from(AdamW::default()), Algorithm::from(Sgd::default())] {
        let what = format!("{algorithm:?}");
        let taken = with_each_kind(&what, |tensor| {
            algorithm.build(vec![witness()], 0.1)?.add_param_group(vec![tensor]).map(drop)
        });
        taken.includes(&["f32", "f64", "bf16", "f16", "empty"]);
        assert!(!taken.kinds.iter().any(|kind| ["undefined", "i64"].contains(kind)));
    }
}

#[test]
fn losses() {
    with_each_kind("a loss of several scalers", |tensor| {
        let w = witness();
        let mut opt = amsgrad(vec![w.shallow_clone()])?;
        let mut scalers = PerLossScalers::new(Device::Cpu, 2)?;
        scalers.backward(0, &(&w * 2.0).sum(Kind::Float), &mut opt)?;
        let before = to_f64(&w.grad());
        let added = scalers.backward_retain_graph(1, &tensor, &mut opt);
        if added.is_err() {
            assert_eq!(to_f64(&w.grad()), before);
        }
        scalers.step_clip_value(&mut opt, 1.0)?;
        scalers.update()?;
        added
    });
    with_each_kind("backward_step", |tensor| {
        let mut opt = amsgrad(vec![witness()])?;
        opt.backward_step(&tensor)
    });
}
