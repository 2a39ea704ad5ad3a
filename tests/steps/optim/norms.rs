//! Clipping by norms of other types than two.

use serde::Deserialize;
use serde_json::json;
use tch::nn::{self, OptimizerConfig as _, VarStore};
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::gradients::{ClipNorm, GradientError, clip_grad_norm};
use tch_amp::optim::{AdamW, AmpOptimizer, MasterWeights, Sgd};
use tch_amp::scaler::{GradScalerConfig, PerLossScalers, SpikeConfig};
use tch_amp::{Error, GradScaler};

use crate::optim::{INF, NAN, set_grad, to_f64};
use testkit::python::Oracle;
use testkit::rng::Rng;
use testkit::tensors::leaf;
use testkit::{devices, for_each_device, gpus, gpus_that_round_as_the_cpu};

const TYPES: [f64; 6] = [0.5, 1.0, 2.0, 2.5, 17.0, INF];

fn of_type(norm_type: f64, max_norm: f64) -> ClipNorm {
    ClipNorm { norm_type, ..max_norm.into() }
}

/// The norm by a loop whose powers neither overflow nor underflow.
pub fn norm_of(values: &[f64], norm_type: f64) -> f64 {
    let largest = values.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
    if largest == 0.0 || norm_type.is_infinite() {
        return largest;
    }
    let powers = values.iter().map(|value| (value.abs() / largest).powf(norm_type));
    largest * powers.sum::<f64>().powf(1.0 / norm_type)
}

fn is_near(found: f64, expected: f64, limit: f64) -> bool {
    found == expected || (found / expected - 1.0).abs() < limit
}

#[derive(Deserialize)]
struct Theirs {
    norm: String,
    gradients: Vec<Vec<f64>>,
    exact: f64,
}

struct Case {
    kind: Kind,
    norm_type: f64,
    max_norm: f64,
    gradients: Vec<Vec<f64>>,
}

fn random(rng: &mut Rng, count: usize) -> Vec<f64> {
    (0..count).map(|_| (rng.below(20_001) as f64 - 1e4) / 7919.0).collect()
}

fn random_cases() -> Vec<Case> {
    let mut rng = Rng::new(11);
    let mut cases = Vec::new();
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
        for norm_type in TYPES {
            for _ in 0..6 {
                let sizes: Vec<_> = (0..1 + rng.below(4)).map(|_| 1 + rng.below(300)).collect();
                let gradients = sizes.into_iter().map(|n| random(&mut rng, n)).collect();
                let max_norm = *rng.pick(&[0.0, 0.3, 1.0, 1e9]);
                cases.push(Case { kind, norm_type, max_norm, gradients });
            }
        }
    }
    cases
}

/// Where libtorch's kernels compute, the bits are PyTorch's: those of the largest value everywhere, and on a GPU those of
/// norms without powers. Sums are f64 on the CPU, and powers are those of ratios.
fn has_pytorchs_bits(case: &Case, device: Device) -> bool {
    let has_their_dtype = matches!(case.kind, Kind::Float | Kind::Double);
    let is_theirs = match case.norm_type {
        INF => true,
        1.0 => device != Device::Cpu,
        // f64 numbers are scaled first.
        2.0 => device != Device::Cpu && case.kind == Kind::Float,
        _ => false,
    };
    has_their_dtype && is_theirs
}

#[test]
fn random_norms_are_pytorchs() {
    let Some(oracle) = Oracle::find("clip_norms.py") else { return };
    let cases = random_cases();
    let input = cases.iter().map(|case| {
        let Case { kind, norm_type, max_norm, gradients } = case;
        let (dtype, norm_type) = (format!("{kind:?}"), norm_type.to_string());
        json!({"dtype": dtype, "norm_type": norm_type, "max_norm": max_norm, "gradients": gradients})
    });
    let output = oracle.run(&[], &json!(input.collect::<Vec<_>>()).to_string());
    let theirs: Vec<Theirs> =
        output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(theirs.len(), cases.len());
    let mut equal = 0;
    for device in [Device::Cpu].into_iter().chain(gpus_that_round_as_the_cpu()) {
        for (i, (case, theirs)) in cases.iter().zip(&theirs).enumerate() {
            let leaves: Vec<_> =
                case.gradients.iter().map(|g| leaf(g, case.kind, device)).collect();
            leaves.iter().zip(&case.gradients).for_each(|(w, gradient)| set_grad(w, gradient));
            let before: Vec<_> = leaves.iter().map(|w| to_f64(&w.grad())).collect();
            let clip = of_type(case.norm_type, case.max_norm);
            let norm = clip_grad_norm(&leaves, clip).unwrap().double_value(&[]);
            let what = format!("case {i} on {device:?}: {:?}, {clip:?}", case.kind);
            let after: Vec<_> = leaves.iter().map(|w| to_f64(&w.grad())).collect();
            if has_pytorchs_bits(case, device) {
                let their_norm = theirs.norm.parse().unwrap();
                assert_eq!((norm, &after), (their_norm, &theirs.gradients), "{what}");
                equal += 1;
                continue;
            }
            let limit = if case.kind == Kind::Double { 1e-13 } else { 1e-6 };
            assert!(is_near(norm, theirs.exact, limit), "{what}: {norm}, not {}", theirs.exact);
            let factor = (case.max_norm / (norm + 1e-6)).min(1.0);
            let rounding = if case.kind.elt_size_in_bytes() == 2 { 8e-3 } else { limit };
            for (found, before) in after.iter().flatten().zip(before.iter().flatten()) {
                let expected = before * factor;
                let tiny = expected.abs() < 1e-4 && rounding > limit;
                assert!(tiny || is_near(*found, expected, rounding), "{what}: {found} of {before}");
            }
        }
    }
    assert!(equal > 0);
}

/// Powers of these numbers overflow or underflow, in their own dtype or in f64, and the norms do not.
#[test]
fn norms_of_every_type_are_right_over_the_whole_range_of_a_dtype() {
    let doubles: [&[f64]; 6] = [
        &[1e160, -1e160, 3e159],
        &[1e-170, 2e-170],
        &[1e-170, 1e160],
        &[1e300, 1e300, 1e-300],
        &[0.0, -0.0],
        &[3.0, 4.0, 1e-200],
    ];
    let floats: [&[f64]; 5] =
        [&[1e30, -2e30], &[1e-30, 3e-30], &[1e37, 1e-37], &[0.0], &[3.0, 4.0, 1e-38]];
    let halves: [&[f64]; 3] = [&[6e4, -5e4, 6e4], &[1e-5, 3e-5], &[0.25, 6e4]];
    let of = |kind, lists: &[&'static [f64]]| lists.iter().map(move |l| (kind, *l)).collect();
    let cases: [Vec<(Kind, &[f64])>; 4] = [
        of(Kind::Double, &doubles),
        of(Kind::Float, &floats),
        of(Kind::Half, &halves),
        of(Kind::BFloat16, &floats),
    ];
    for_each_device(|device| {
        for (kind, values) in cases.iter().flatten() {
            for norm_type in [0.5, 1.0, 2.5, 17.0, 2000.0, 1e300, INF] {
                for repeats in [1, 999] {
                    let all = values.repeat(repeats);
                    let w = leaf(&vec![0.0; all.len()], *kind, device);
                    set_grad(&w, &all);
                    let expected = norm_of(&to_f64(&w.grad()), norm_type);
                    let in_f32 = *kind != Kind::Double;
                    if in_f32 && expected > 3e38 {
                        continue;
                    }
                    let norm = clip_grad_norm(&[w], of_type(norm_type, INF)).unwrap();
                    assert_eq!(norm.kind(), if in_f32 { Kind::Float } else { Kind::Double });
                    // A GPU adds in the dtype of the norm, and each addition rounds once.
                    let on_gpu = (all.len() + 10) as f64 * f64::from(f32::EPSILON);
                    let limit = match (in_f32, device) {
                        (true, Device::Cpu) => 1e-7,
                        (true, _) => on_gpu,
                        (false, _) => 1e-12,
                    };
                    let norm = norm.double_value(&[]);
                    assert!(
                        is_near(norm, expected, limit),
                        "{device:?} {kind:?} {values:?} x {repeats}, {norm_type}: {norm}, not {expected}"
                    );
                }
            }
        }
    });
}

#[test]
fn a_sum_beyond_f32_is_a_norm_on_the_cpu() {
    let w = leaf(&[0.0; 4], Kind::Float, Device::Cpu);
    set_grad(&w, &[3e38; 4]);
    let norm = clip_grad_norm(&[w.shallow_clone()], of_type(1.0, 1.0)).unwrap();
    assert!(is_near(norm.double_value(&[]), 1.2e39, 1e-6), "{norm:?}");
    assert!(is_near(to_f64(&w.grad())[0], 0.25, 1e-6), "{:?}", w.grad());
}

#[test]
fn gradients_of_several_dtypes_and_devices_have_one_norm() {
    let kinds = [Kind::Half, Kind::Float, Kind::Double, Kind::BFloat16];
    let all_devices = devices();
    for first in &all_devices {
        for norm_type in TYPES {
            // The first device, and then all of them in turn.
            let places = [*first].into_iter().chain(all_devices.iter().copied().cycle());
            let leaves: Vec<_> = places
                .take(9)
                .zip(kinds.iter().cycle())
                .map(|(device, kind)| leaf(&[0.0; 2], *kind, device))
                .collect();
            let values: Vec<_> =
                (0..9).map(|i| [f64::from(i) - 4.0, 0.25 * f64::from(i)]).collect();
            leaves.iter().zip(&values).for_each(|(w, values)| set_grad(w, values));
            let expected = norm_of(values.as_flattened(), norm_type);
            let norm = clip_grad_norm(&leaves, of_type(norm_type, expected / 4.0)).unwrap();
            assert_eq!((norm.device(), norm.kind()), (*first, Kind::Float));
            let found = norm.double_value(&[]);
            assert!(
                is_near(found, expected, 1e-6),
                "{first:?} {norm_type}: {found}, not {expected}"
            );
            for (w, values) in leaves.iter().zip(&values) {
                for (found, before) in to_f64(&w.grad()).iter().zip(values) {
                    assert!(is_near(*found, before / 4.0, 8e-3), "{first:?} {norm_type}: {found}");
                }
            }
        }
    }
}

/// Only the 2-norm of complex numbers is that of their real and imaginary parts.
#[test]
fn a_complex_number_counts_by_its_absolute_value() {
    for_each_device(|device| {
        for kind in [Kind::ComplexFloat, Kind::ComplexDouble, Kind::ComplexHalf] {
            for norm_type in TYPES {
                let real = Tensor::from_slice(&[3f64, 5.0, 0.0]);
                let numbers = Tensor::complex(&real, &Tensor::from_slice(&[4f64, 12.0, -2.0]));
                let gradient = numbers.to_kind(kind).to_device(device);
                let w = Tensor::zeros([3], (Kind::ComplexFloat, device)).set_requires_grad(true);
                w.abs().sum(None).backward();
                for gradient in [gradient.shallow_clone(), gradient.conj()] {
                    no_grad(|| w.grad().set_data(&gradient.copy()));
                    let norm = clip_grad_norm(&[w.shallow_clone()], of_type(norm_type, INF));
                    let (found, expected) =
                        (norm.unwrap().double_value(&[]), norm_of(&[5.0, 13.0, 2.0], norm_type));
                    assert!(
                        is_near(found, expected, 1e-6),
                        "{device:?} {kind:?} {norm_type}: {found}"
                    );
                }
            }
        }
    });
}

#[test]
fn gradients_of_any_layout_count_by_their_values() {
    for_each_device(|device| {
        for (norm_type, kind) in
            TYPES.into_iter().flat_map(|p| [(p, Kind::Float), (p, Kind::Double), (p, Kind::Half)])
        {
            let values: Vec<_> = (0..24).map(|i| f64::from(i) / 8.0 - 1.0).collect();
            let dense = Tensor::from_slice(&values).to_kind(kind).to_device(device).view([4, 6]);
            let gapped = Tensor::zeros([4, 12], (kind, device)).slice(1, 0, 12, 2);
            no_grad(|| gapped.shallow_clone().copy_(&dense));
            let column = Tensor::full([4, 1], 0.5, (kind, device)).expand([4, 6], false);
            let given = [dense.shallow_clone(), gapped, dense.neg().internal_neg_view(), column];
            let transposed = dense.transpose(0, 1).contiguous().transpose(0, 1);
            let given: Vec<_> = given.into_iter().chain([transposed]).collect();
            let leaves: Vec<_> = given
                .iter()
                .map(|gradient| {
                    let w = Tensor::zeros([4, 6], (kind, device)).set_requires_grad(true);
                    w.sum(kind).backward();
                    no_grad(|| w.grad().set_data(gradient));
                    w
                })
                .collect();
            let numbers = [values.repeat(4), vec![0.5; 24]].concat();
            let expected = norm_of(&numbers, norm_type);
            let norm = clip_grad_norm(&leaves, of_type(norm_type, INF)).unwrap();
            let norm = norm.double_value(&[]);
            assert!(is_near(norm, expected, 1e-6), "{device:?} {norm_type} {kind:?}: {norm}");
        }
    });
}

/// PyTorch refuses the infinity norm of an empty gradient.
#[test]
fn gradients_without_elements_count_as_zero() {
    for_each_device(|device| {
        for (norm_type, kind) in
            TYPES.into_iter().flat_map(|p| [(p, Kind::Float), (p, Kind::Double), (p, Kind::Half)])
        {
            let empty = Tensor::zeros([0], (kind, device)).set_requires_grad(true);
            empty.sum(None).backward();
            let clip = of_type(norm_type, 1.0);
            let norm = clip_grad_norm(&[empty.shallow_clone()], clip).unwrap();
            assert_eq!((norm.device(), norm.double_value(&[])), (device, 0.0), "{norm_type}");
            let w = leaf(&[0.0], kind, device);
            set_grad(&w, &[3.0]);
            let norm = clip_grad_norm(&[empty, w], clip).unwrap();
            assert!(is_near(norm.double_value(&[]), 3.0, 1e-6), "{device:?} {norm_type} {kind:?}");
        }
    });
    for norm_type in [2.0, INF] {
        let norm = clip_grad_norm(&[], of_type(norm_type, 1.0)).unwrap();
        assert_eq!(norm.double_value(&[]), 0.0, "{norm_type}");
    }
}

/// How a scaler clips and steps.
pub const PATHS: [&str; 4] =
    ["step_clip_norm", "unscale_, step_clip_norm", "transaction", "by hand"];

/// Takes a step and ends the iteration, and returns the norm and whether the step was taken.
pub fn step(
    path: &str,
    scaler: &mut GradScaler,
    opt: &mut dyn AmpOptimizer,
    w: &Tensor,
    clip: ClipNorm,
) -> (f64, bool) {
    if path.starts_with("unscale_") || path == "by hand" {
        scaler.unscale_(opt).unwrap();
    }
    let (norm, outcome) = match path {
        "transaction" => {
            let mut unscaled = scaler.unscale(opt).unwrap();
            let norm = unscaled.clip_grad_norm(clip).unwrap();
            (norm, unscaled.step().unwrap())
        }
        "by hand" => {
            let norm = clip_grad_norm(&[w.shallow_clone()], clip).unwrap();
            (norm, scaler.step(opt).unwrap())
        }
        _ => {
            let outcome = scaler.step_clip_norm(opt, clip).unwrap();
            (outcome.total_norm().unwrap().shallow_clone(), outcome)
        }
    };
    let taken = outcome.is_stepped().unwrap();
    scaler.update().unwrap();
    (norm.double_value(&[]), taken)
}

#[test]
fn every_path_to_a_step_clips_by_every_norm() {
    for_each_device(|device| {
        let cases = TYPES.into_iter().flat_map(|p| PATHS.map(|path| (p, path)));
        for ((norm_type, path), fused) in cases.flat_map(|case| [(case, true), (case, false)]) {
            for gradients in [[3.0, -4.0, 0.5], [3e-3, 1e-3, 0.0], [INF, 1.0, 1.0], [1.0, NAN, 1.0]]
            {
                let vs = VarStore::new(device);
                let w = vs.root().zeros("w", &[3]);
                let mut own = Sgd::default().build(&vs, 0.5).unwrap();
                let mut host = nn::Sgd::default().build(&vs, 0.5).unwrap();
                let opt: &mut dyn AmpOptimizer = if fused { &mut own } else { &mut host };
                let mut scaler = GradScaler::new(device).unwrap();
                let factors = Tensor::from_slice(&gradients).to_kind(Kind::Float).to_device(device);
                scaler.backward(&(&w * factors).sum(None)).unwrap();
                let (norm, taken) = step(path, &mut scaler, opt, &w, of_type(norm_type, 0.1));
                let case = format!("{device:?} {path} fused {fused}, {norm_type}: {gradients:?}");
                if gradients.iter().any(|g| !g.is_finite()) {
                    assert!(!taken && !norm.is_finite(), "{case}: {norm}");
                    assert_eq!(to_f64(&w), [0.0; 3], "{case}");
                    assert_eq!(scaler.get_scale().unwrap(), 32768.0, "{case}");
                    continue;
                }
                let expected = norm_of(&gradients, norm_type);
                assert!(taken && is_near(norm, expected, 1e-6), "{case}: {norm}, not {expected}");
                let factor = (0.1 / (expected + 1e-6)).min(1.0);
                for (found, gradient) in to_f64(&w).iter().zip(gradients) {
                    assert!(is_near(*found, -0.5 * gradient * factor, 3e-6), "{case}: {found}");
                }
            }
        }
    });
}

/// An element is rounded when it is unscaled, and its norm is that of the rounded ones, also in the step. With sizes that
/// are not multiples of a vector, and a scale that is not a power of two: every element is rounded alike.
#[test]
fn the_norm_in_the_step_is_that_of_the_unscaled_gradients() {
    for kind in [Kind::BFloat16, Kind::Half, Kind::Float, Kind::Double] {
        for norm_type in TYPES {
            for count in [1, 3, 15, 17, 31, 1000, 1037] {
                let run = |path: &str| {
                    let w = leaf(&vec![1.0; count], kind, Device::Cpu);
                    let mut opt = Sgd::default().build(vec![w.shallow_clone()], 0.0).unwrap();
                    let config = GradScalerConfig {
                        init_scale: 3.0,
                        allow_fp16_gradients: true,
                        ..Default::default()
                    };
                    let mut scaler = config.build(Device::Cpu).unwrap();
                    let values: Vec<_> = (0..count).map(|i| i as f64 / 7.0 + 0.1).collect();
                    set_grad(&w, &values);
                    step(path, &mut scaler, &mut opt, &w, of_type(norm_type, 0.7))
                };
                let want = run("transaction");
                assert_eq!(run("step_clip_norm"), want, "{count} of {kind:?}, {norm_type}");
            }
        }
    }
}

#[test]
fn masters_are_clipped_by_every_norm() {
    for_each_device(|device| {
        for masters in [MasterWeights::Float, MasterWeights::Remainder] {
            for norm_type in TYPES {
                let run = |path: &str| {
                    let w = leaf(&[1.0, -2.0, 0.5], Kind::BFloat16, device);
                    let opt = AdamW::default().master_weights(masters);
                    let mut opt = opt.build(vec![w.shallow_clone()], 0.1).unwrap();
                    let mut scaler = GradScaler::new(device).unwrap();
                    let factors = Tensor::from_slice(&[3f32, -4.0, 0.5]).to_device(device);
                    let norms = [0.3, 0.1].map(|max| {
                        opt.zero_grad().unwrap();
                        scaler.backward(&(&w * &factors).sum(Kind::Float)).unwrap();
                        step(path, &mut scaler, &mut opt, &w, of_type(norm_type, max))
                    });
                    (norms, to_f64(&w))
                };
                let (norms, weights) = run("step_clip_norm");
                assert_eq!(weights, run("transaction").1, "{device:?} {masters:?} {norm_type}");
                let expected = norm_of(&[3.0, -4.0, 0.5], norm_type);
                assert!(norms.iter().all(|(norm, taken)| *taken && is_near(*norm, expected, 1e-6)));
            }
        }
    });
}

#[test]
fn losses_with_scales_of_their_own_are_clipped_by_every_norm() {
    for norm_type in TYPES {
        let w = leaf(&[0.0; 2], Kind::Float, Device::Cpu);
        let mut opt = Sgd::default().build(vec![w.shallow_clone()], 1.0).unwrap();
        let mut scalers = PerLossScalers::new(Device::Cpu, 2).unwrap();
        for (id, factors) in [[1f32, 0.0], [2.0, -4.0]].iter().enumerate() {
            scalers.backward(id, &(&w * Tensor::from_slice(factors)).sum(None), &mut opt).unwrap();
        }
        let outcome = scalers.step_clip_norm(&mut opt, of_type(norm_type, 1.0)).unwrap();
        let expected = norm_of(&[3.0, -4.0], norm_type);
        assert!(is_near(outcome.total_norm().unwrap().double_value(&[]), expected, 1e-6));
        assert!(is_near(to_f64(&w)[0], -3.0 / expected, 1e-5), "{norm_type}: {w:?}");
    }
}

#[test]
fn spikes_are_those_of_the_norm_that_clips() {
    for_each_device(|device| {
        for enabled in [true, false] {
            let w = leaf(&[0.0; 2], Kind::Float, device);
            let mut opt = Sgd::default().build(vec![w.shallow_clone()], 1.0).unwrap();
            let config = GradScalerConfig { enabled, ..Default::default() };
            let mut scaler = config.build(device).unwrap();
            let mut spikes = SpikeConfig { warmup: 3, ..Default::default() }.build().unwrap();
            // The 1-norm of the last gradient is that of the others, and its largest value is a spike.
            for (step, factors) in
                [[3f32, 3.0], [3.0, 3.0], [3.0, 3.0], [6.0, 0.0]].iter().enumerate()
            {
                opt.zero_grad().unwrap();
                let factors = Tensor::from_slice(factors).to_device(device);
                scaler.backward(&(&w * factors).sum(None)).unwrap();
                let outcome = scaler.step_unless_spike(&mut opt, of_type(INF, 1.0), &mut spikes);
                let outcome = outcome.unwrap();
                assert_eq!(outcome.is_stepped().unwrap(), step < 3, "{device:?} {enabled} {step}");
                let norm = outcome.total_norm().unwrap().double_value(&[]);
                assert!(is_near(norm, if step < 3 { 3.0 } else { 6.0 }, 1e-6), "{norm}");
                scaler.update().unwrap();
            }
        }
    });
}

#[test]
fn what_is_no_norm_is_refused_and_nothing_is_changed() {
    let vs = VarStore::new(Device::Cpu);
    let w = vs.root().ones("w", &[2]);
    let mut opt = Sgd::default().build(&vs, 1.0).unwrap();
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    let mut scalers = PerLossScalers::new(Device::Cpu, 1).unwrap();
    let mut spikes = SpikeConfig::default().build().unwrap();
    set_grad(&w, &[3.0, 4.0]);
    let refused = |result: tch_amp::Result<()>, what: &str| {
        let Err(Error::InvalidArgument { name, .. }) = result else { panic!("{what}: {result:?}") };
        assert_eq!(name, what);
    };
    for norm_type in [0.0, -0.0, -1.0, -INF, NAN] {
        let clip = of_type(norm_type, 1.0);
        refused(clip_grad_norm(&[w.shallow_clone()], clip).map(drop), "norm_type");
        refused(opt.clip_grad_norm(clip).map(drop), "norm_type");
        refused(scaler.step_clip_norm(&mut opt, clip).map(drop), "norm_type");
        refused(scalers.step_clip_norm(&mut opt, clip).map(drop), "norm_type");
        refused(scaler.step_unless_spike(&mut opt, clip, &mut spikes).map(drop), "norm_type");
        let loss = w.sum(Kind::Float);
        refused(scaler.backward_step_clip_norm(&mut opt, &loss, clip).map(drop), "norm_type");
    }
    let clip = ClipNorm { error_if_nonfinite: true, ..1.0.into() };
    refused(scaler.step_clip_norm(&mut opt, clip).map(drop), "error_if_nonfinite");
    refused(scalers.step_clip_norm(&mut opt, clip).map(drop), "error_if_nonfinite");
    let step = scaler.step_unless_spike(&mut opt, clip, &mut spikes);
    refused(step.map(drop), "error_if_nonfinite");
    assert_eq!((to_f64(&w.grad()), to_f64(&w)), (vec![3.0, 4.0], vec![1.0; 2]));
    let mut unscaled = scaler.unscale(&mut opt).unwrap();
    refused(unscaled.clip_grad_norm(of_type(0.0, 1.0)).map(drop), "norm_type");
    let error = unscaled.clip_grad_norm(ClipNorm { norm_type: INF, ..clip });
    assert!(error.is_ok(), "{error:?}");
}

#[test]
fn a_norm_of_any_type_that_is_not_finite_is_an_error_on_request() {
    for_each_device(|device| {
        for (norm_type, bad) in TYPES.into_iter().flat_map(|p| [(p, INF), (p, -INF), (p, NAN)]) {
            let w = leaf(&[0.0; 3], Kind::Float, device);
            set_grad(&w, &[1.0, bad, 2.0]);
            let clip = ClipNorm { norm_type, error_if_nonfinite: true, max_norm: 0.1 };
            let error = clip_grad_norm(&[w.shallow_clone()], clip).unwrap_err();
            let Error::Gradient(GradientError::NonFiniteNorm { norm }) = error else {
                panic!("{error}");
            };
            assert_eq!((norm == INF, norm.is_nan()), (!bad.is_nan(), bad.is_nan()), "{norm_type}");
            assert_eq!(to_f64(&w.grad())[2], 2.0, "not clipped");
            let lenient = ClipNorm { error_if_nonfinite: false, ..clip };
            let norm = clip_grad_norm(&[w.shallow_clone()], lenient).unwrap().double_value(&[]);
            assert_eq!((norm == INF, norm.is_nan()), (!bad.is_nan(), bad.is_nan()), "{norm_type}");
            set_grad(&w, &[3.0, 0.0, 4.0]);
            let norm = clip_grad_norm(&[w], clip).unwrap().double_value(&[]);
            assert!(is_near(norm, norm_of(&[3.0, 4.0], norm_type), 1e-6), "{norm_type}: {norm}");
        }
    });
}

/// The sum does not depend on the number of threads, nor on gaps in memory.
#[test]
fn norms_on_the_cpu_do_not_depend_on_threads_or_strides() {
    let threads = tch::get_num_threads();
    for (kind, limit) in [(Kind::Double, 1e-12), (Kind::Float, 1e-7)] {
        let numbers = (0..400_000).map(|i| f64::from((i % 1009 * 7919) % 1009) * 1e-3 - 0.4);
        let numbers = Tensor::from_slice(&numbers.collect::<Vec<_>>()).to_kind(kind);
        let numbers = numbers.view([2000, 200]);
        let gapped = Tensor::zeros([2000, 400], (kind, Device::Cpu)).slice(1, 0, 400, 2);
        no_grad(|| gapped.shallow_clone().copy_(&numbers));
        let norm = |gradient: &Tensor, norm_type: f64| {
            let w = Tensor::zeros([2000, 200], (kind, Device::Cpu)).set_requires_grad(true);
            w.sum(kind).backward();
            no_grad(|| w.grad().set_data(gradient));
            clip_grad_norm(&[w], of_type(norm_type, INF)).unwrap().double_value(&[])
        };
        for norm_type in TYPES {
            let want = norm(&numbers, norm_type);
            let exact = norm_of(&to_f64(&numbers), norm_type);
            assert!(is_near(want, exact, limit), "{kind:?} {norm_type}: {want}");
            for count in [1, 2, 3, 7] {
                tch::set_num_threads(count);
                let case = format!("{kind:?} {norm_type}, {count} threads");
                assert_eq!(norm(&numbers, norm_type), want, "{case}");
                assert_eq!(norm(&gapped, norm_type), want, "{case}, with gaps");
            }
            tch::set_num_threads(threads);
        }
    }
}

/// A GPU's list of gradients is copied in parts of 2^24 numbers.
#[test]
fn a_norm_of_more_gradients_than_one_part_has_all_of_them() {
    for device in gpus() {
        let ones = |n: i64| Tensor::ones([n], (Kind::BFloat16, device)).set_requires_grad(true);
        let leaves = [1 << 24, 3, (1 << 24) - 4, 5].map(ones);
        leaves.iter().for_each(|w| w.sum(Kind::BFloat16).backward());
        let norm = clip_grad_norm(&leaves, of_type(4.0, INF)).unwrap().double_value(&[]);
        let expected = f64::from((1 << 25) + 4).powf(0.25);
        assert!(is_near(norm, expected, 1e-6), "{device:?}: {norm}, not {expected}");
    }
}
