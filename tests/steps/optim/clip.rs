//! Clipping gradients by norm and by value.

use rstest::rstest;
use tch::nn::{self, OptimizerConfig as _};
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::gradients::{ClipNorm, GradientError, clip_grad_norm, clip_grad_value};
use tch_amp::optim::{AmpOptimizer, Sgd};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Error, GradScaler};

use crate::optim::norms::{PATHS, norm_of, step};
use crate::optim::{INF, NAN, set_grad, to_f64};
use testkit::optimizers::scaler;
use testkit::tensors::leaf;
use testkit::{assert_refused, for_each_device, gpus};

/// Clips to a 2-norm, and refuses one that is not finite.
fn finite(max_norm: f64) -> ClipNorm {
    ClipNorm { error_if_nonfinite: true, ..max_norm.into() }
}

#[test]
fn the_norm_equals_that_of_an_f64_loop() {
    for_each_device(|device| {
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
            for count in [1, 5, 16, 47, 200_000] {
                let w = leaf(&vec![0.0; count], kind, device);
                let other = leaf(&[0.0; 3], Kind::Float, device);
                let values: Vec<f64> = (0..count).map(|i| ((i * 37) % 101) as f64 / 16.0).collect();
                set_grad(&w, &values);
                set_grad(&other, &[0.25; 3]);
                let squares: f64 = to_f64(&w.grad()).iter().map(|g| g * g).sum();
                let want = (squares + 3.0 * 0.0625).sqrt();
                let all = [w.shallow_clone(), other.shallow_clone()];
                let norm = clip_grad_norm(&all, want / 4.0).unwrap();
                let off = norm.double_value(&[]) / want - 1.0;
                assert!(off.abs() < 1e-6, "{kind:?} {count}: {off}");
                // PyTorch adds 1e-6 to the norm before it divides.
                let want = want * want / (want + 1e-6);
                let after = clip_grad_norm(&all, INF).unwrap().double_value(&[]);
                let rounding = if kind.elt_size_in_bytes() == 2 { 4e-3 } else { 1e-6 };
                assert!((after * 4.0 / want - 1.0).abs() < rounding, "{kind:?} {count}: {after}");
            }
        }
    });
}

#[test]
fn gradients_within_the_limit_are_unchanged() {
    let w = leaf(&[0.0; 3], Kind::Float, Device::Cpu);
    set_grad(&w, &[0.1, 0.2, 0.3]);
    let before = to_f64(&w.grad());
    let _norm = clip_grad_norm(&[w.shallow_clone()], 1.0).unwrap();
    clip_grad_value(&[w.shallow_clone()], 0.3f32.into()).unwrap();
    assert_eq!(to_f64(&w.grad()), before);
}

#[test]
fn a_transaction_can_refuse_an_infinite_norm() {
    let w = leaf(&[1.0; 2], Kind::Float, Device::Cpu);
    let mut opt = Sgd::default().build(vec![w.shallow_clone()], 1.0).unwrap();
    let scaler = GradScaler::new(Device::Cpu).unwrap();
    set_grad(&w, &[INF, 65536.0]);
    let mut unscaled = scaler.unscale(&mut opt).unwrap();
    let refused = unscaled.clip_grad_norm(finite(1.0));
    assert_refused!(refused, Error::Gradient(GradientError::NonFiniteNorm { .. }));
    assert!(unscaled.step().unwrap().is_skipped().unwrap());
}

#[test]
fn limits_that_make_no_sense_are_refused() {
    let w = leaf(&[0.0; 2], Kind::Float, Device::Cpu);
    let all = [w.shallow_clone()];
    set_grad(&w, &[1.0, 2.0]);
    for limit in [-1.0, NAN] {
        assert_refused!(clip_grad_norm(&all, limit), Error::InvalidArgument { .. });
        assert_refused!(clip_grad_value(&all, limit), Error::InvalidArgument { .. });
    }
    assert_eq!(to_f64(&w.grad()), [1.0, 2.0]);
}

#[test]
fn a_parameter_that_is_listed_twice_counts_once() {
    let w = leaf(&[0.0; 2], Kind::Float, Device::Cpu);
    set_grad(&w, &[3.0, 4.0]);
    let norm = clip_grad_norm(&[w.shallow_clone(), w.shallow_clone()], 2.5).unwrap();
    assert_eq!(norm.double_value(&[]), 5.0);
    let got = to_f64(&w.grad());
    assert!((got[0] - 1.5).abs() < 1e-5 && (got[1] - 2.0).abs() < 1e-5, "{got:?}");
}

/// Puts gaps between the numbers of a gradient.
fn give_gaps(w: &Tensor) {
    let gradient = w.grad();
    let wide = Tensor::zeros([2 * gradient.size()[0]], (gradient.kind(), gradient.device()));
    let gapped = wide.slice(0, 0, wide.size()[0], 2);
    no_grad(|| gapped.shallow_clone().copy_(&gradient));
    no_grad(|| w.grad().set_data(&gapped));
}

#[test]
fn a_norm_beyond_f32_is_not_infinite() {
    let values = [3e38, -3e38, 2e38, 3e38];
    let norm = (9e76f64 * 3.0 + 4e76).sqrt();
    for gapped in [false, true] {
        let made = || {
            let w = leaf(&[1.0; 4], Kind::Float, Device::Cpu);
            set_grad(&w, &values);
            gapped.then(|| give_gaps(&w));
            w
        };
        let close = |found: f64, want: f64| (found / want - 1.0).abs() < 1e-6;
        let w = made();
        let found = clip_grad_norm(&[w.shallow_clone()], finite(1.0)).unwrap();
        assert!(close(found.double_value(&[]), norm), "{found:?}");
        assert!(close(to_f64(&w.grad())[0], 3e38 / norm), "{:?}", to_f64(&w.grad()));
        // Steps that unscale and clip in the update. A scale below one enlarges the gradients, so the norm decides.
        for (scale, clip) in [(1.0, Some(1.0)), (0.9, None), (0.9, Some(1.0))] {
            let w = made();
            let list = vec![w.shallow_clone()];
            let lr = if clip.is_some() { 1.0 } else { 1e-38 };
            let mut opt = Sgd::default().build(list, lr).unwrap();
            let config =
                GradScalerConfig { init_scale: scale, min_scale: 0.5, ..Default::default() };
            let mut scaler = config.build(Device::Cpu).unwrap();
            let outcome = match clip {
                Some(max) => scaler.step_clip_norm(&mut opt, max).unwrap(),
                None => scaler.step(&mut opt).unwrap(),
            };
            assert!(outcome.is_stepped().unwrap(), "scale {scale}, clip {clip:?}");
            let change = if clip.is_some() { 3e38 / norm } else { 3e38 / scale * lr };
            let found = 1.0 - to_f64(&w)[0];
            assert!(
                (found - change).abs() < 1e-6,
                "scale {scale}, clip {clip:?}: {found} {change}"
            );
        }
        // 4e38 is infinite in f32, the dtype of unscaled gradients.
        let mut opt = Sgd::default().build(vec![made()], 1.0).unwrap();
        let config = GradScalerConfig { init_scale: 0.75, min_scale: 0.5, ..Default::default() };
        let mut scaler = config.build(Device::Cpu).unwrap();
        assert!(scaler.step(&mut opt).unwrap().is_skipped().unwrap());
    }
}

#[test]
fn step_clip_value_equals_its_three_parts() {
    for_each_device(|device| {
        for fused in [false, true] {
            let run = |short: bool, values: &[f64]| {
                let vs = tch::nn::VarStore::new(device);
                let w = vs.root().ones("w", &[3]);
                let mut scaler = GradScaler::new(device).unwrap();
                let mut host = nn::Sgd::default().build(&vs, 1.0).unwrap();
                let mut on_device = Sgd::default().build(&vs, 1.0).unwrap();
                let opt: &mut dyn AmpOptimizer = if fused { &mut on_device } else { &mut host };
                let factors = Tensor::from_slice(values).to_kind(Kind::Float).to_device(device);
                scaler.backward(&(&w * factors).sum(Kind::Float)).unwrap();
                let outcome = if short {
                    scaler.step_clip_value(opt, 0.5).unwrap()
                } else {
                    let mut unscaled = scaler.unscale(opt).unwrap();
                    unscaled.clip_grad_value(0.5).unwrap();
                    unscaled.step().unwrap()
                };
                (outcome.is_stepped().unwrap(), to_f64(&w))
            };
            assert_eq!(run(true, &[0.25, 3.0, -9.0]), (true, vec![0.75, 0.5, 1.5]));
            for values in [[0.25, 3.0, -9.0], [INF, 1.0, 1.0], [NAN, 0.0, 2.0]] {
                assert_eq!(run(true, &values), run(false, &values), "{device:?} {values:?}");
            }
            assert_eq!(run(true, &[INF, 1.0, 1.0]), (false, vec![1.0; 3]));
        }
        let mut opt = Sgd::default().build(vec![leaf(&[1.0], Kind::Float, device)], 1.0).unwrap();
        let mut scaler = GradScaler::new(device).unwrap();
        assert_refused!(scaler.step_clip_value(&mut opt, NAN), Error::InvalidArgument { .. });
    });
}

/// The norm of gradients with gaps is also that of the unscaled gradients.
#[test]
fn the_total_norm_is_unscaled_on_every_path() {
    for_each_device(|device| {
        for gapped in [false, true] {
            let w = leaf(&[1.0; 2], Kind::Float, device);
            set_grad(&w, &[24.0, 32.0]);
            gapped.then(|| give_gaps(&w));
            let mut opt = Sgd::default().build(vec![w.shallow_clone()], 1.0).unwrap();
            let outcome = scaler(device, 8.0).step_clip_norm(&mut opt, 1.0).unwrap();
            let norm = outcome.total_norm().unwrap().double_value(&[]);
            assert_eq!(norm, 5.0, "gapped: {gapped}, on {device:?}");
            let stepped = to_f64(&w);
            assert!((stepped[0] - 0.4).abs() < 1e-6 && (stepped[1] - 0.2).abs() < 1e-6);
        }
    });
}

#[test]
fn backward_step_clip_norm_uses_only_the_gradients_of_its_loss() {
    let w = leaf(&[0.0], Kind::Float, Device::Cpu);
    let mut opt = Sgd::default().build(vec![w.shallow_clone()], 1.0).unwrap();
    set_grad(&w, &[100.0]);
    opt.backward_step_clip_norm(&(&w * 0.5).sum(Kind::Float), 1.0).unwrap();
    assert_eq!(to_f64(&w), [-0.5]);
}

/// A graph that has saved a gradient must not continue with other numbers. On a GPU, libtorch increments the version.
#[test]
fn clipping_is_a_change_in_place_that_autograd_detects() {
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
        let w = leaf(&[1.0; 2], kind, Device::Cpu);
        set_grad(&w, &[3.0, 4.0]);
        let version = || w.grad().f_internal_version().unwrap();
        let before = version();
        drop(clip_grad_norm(&[w.shallow_clone()], 1.0).unwrap());
        assert!(version() > before, "the norm, {kind:?}");
        let before = version();
        clip_grad_value(&[w.shallow_clone()], 0.25).unwrap();
        assert!(version() > before, "the values, {kind:?}");
    }
}

/// Parameters with gradients that can be neither normed nor clipped.
fn unclippable(device: Device) -> Vec<Tensor> {
    let sparse = || {
        let table = Tensor::ones([4, 2], (Kind::Float, device)).set_requires_grad(true);
        let rows = Tensor::from_slice(&[1i64]).to_device(device);
        Tensor::embedding(&table, &rows, -1, false, true).sum(Kind::Float).backward();
        table
    };
    let eight_bits = [Kind::Float8e4m3fn, Kind::Float8e5m2].map(|kind| {
        let w = Tensor::ones([2], (Kind::Float, device)).to_kind(kind).set_requires_grad(true);
        w.to_kind(Kind::Float).sum(Kind::Float).backward();
        assert_eq!(w.grad().kind(), kind);
        w
    });
    let frozen = sparse().set_requires_grad(false);
    [sparse(), frozen].into_iter().chain(eight_bits).collect()
}

#[test]
fn a_gradient_that_cannot_be_clipped_is_named_and_the_others_are_unchanged() {
    for_each_device(|device| {
        for bad in unclippable(device) {
            let w = leaf(&[1.0; 2], Kind::Float, device);
            set_grad(&w, &[30.0, 40.0]);
            let all = [w.shallow_clone(), bad];
            let refused = [
                clip_grad_norm(&all, 1.0).map(drop),
                clip_grad_norm(&all, finite(1.0)).map(drop),
                clip_grad_value(&all, 1.0),
            ];
            for result in refused {
                let Err(Error::Gradient(GradientError::Unsupported { parameter, .. })) = &result
                else {
                    panic!("{result:?} for {:?}", all[1].grad())
                };
                assert!(parameter.starts_with("parameter 1 "), "{parameter}");
            }
            assert_eq!(to_f64(&w.grad()), [30.0, 40.0], "beside {:?}", all[1].grad());
        }
    });
}

#[test]
fn a_complex_gradient_is_not_clamped_and_neither_are_those_before_it() {
    let (w, complex) = (leaf(&[1.0; 2], Kind::Float, Device::Cpu), Tensor::from(1f32));
    let complex = complex.to_kind(Kind::ComplexFloat).set_requires_grad(true);
    complex.abs().backward();
    set_grad(&w, &[30.0, 40.0]);
    let refused = clip_grad_value(&[w.shallow_clone(), complex], 1.0);
    let Err(Error::Gradient(GradientError::Unsupported { parameter, .. })) = &refused else {
        panic!("{refused:?}");
    };
    assert_eq!(parameter, "parameter 1 []");
    assert_eq!(to_f64(&w.grad()), [30.0, 40.0]);
}

/// PyTorch fails for the fp16 gradient, after it has clamped the other one.
#[test]
fn a_limit_beyond_the_range_of_a_dtype_changes_no_gradient_of_it() {
    for_each_device(|device| {
        let [wide, narrow] = [Kind::Float, Kind::Half].map(|kind| leaf(&[1.0; 3], kind, device));
        set_grad(&wide, &[3e5, -3e5, INF]);
        set_grad(&narrow, &[65504.0, -1.0, INF]);
        let all = [wide.shallow_clone(), narrow.shallow_clone()];
        clip_grad_value(&all, 1e5).unwrap();
        assert_eq!(to_f64(&wide.grad()), [1e5, -1e5, 1e5]);
        assert_eq!(to_f64(&narrow.grad()), [65504.0, -1.0, INF]);
        clip_grad_value(&all, 1e300).unwrap();
        clip_grad_value(&all, 65504.0).unwrap();
        assert_eq!(to_f64(&wide.grad()), [65504.0, -65504.0, 65504.0]);
        assert_eq!(to_f64(&narrow.grad()), [65504.0, -1.0, 65504.0]);
    });
}

/// Each element is clipped once, in a copy, with the others.
#[test]
fn an_expanded_gradient_is_clipped_like_a_copy_of_it() {
    for_each_device(|device| {
        for clip in [
            |all: &[Tensor]| clip_grad_value(all, 2.0),
            |all: &[Tensor]| clip_grad_norm(all, 2.0).map(drop),
        ] {
            let run = |expands: bool| {
                let all = [(); 2].map(|()| leaf(&[1.0; 3], Kind::Float, device));
                all.iter().for_each(|w| set_grad(w, &[30.0; 3]));
                if expands {
                    let one = Tensor::full([1], 30.0, (Kind::Float, device));
                    no_grad(|| all[1].grad().set_data(&one.expand([3], false)));
                }
                clip(&all).unwrap();
                all.map(|w| to_f64(&w.grad()))
            };
            assert_eq!(run(true), run(false), "{device:?}");
        }
    });
}

#[rstest]
#[case([Kind::Double, Kind::Double], Kind::Double)]
#[case([Kind::Double, Kind::Float], Kind::Float)]
#[case([Kind::Float, Kind::Double], Kind::Float)]
#[case([Kind::BFloat16, Kind::Double], Kind::Float)]
#[case([Kind::Half, Kind::BFloat16], Kind::Float)]
fn the_norm_is_f64_only_if_all_gradients_are(#[case] kinds: [Kind; 2], #[case] want: Kind) {
    for_each_device(|device| {
        let all = kinds.map(|kind| leaf(&[0.0], kind, device));
        set_grad(&all[0], &[3.0]);
        set_grad(&all[1], &[4.0]);
        let norm = clip_grad_norm(&all, INF).unwrap();
        assert_eq!((norm.kind(), norm.double_value(&[])), (want, 5.0));
    });
}

#[test]
fn clipping_a_copy_on_write_gradient_leaves_its_original_unchanged() {
    let w = leaf(&[1.0, 2.0], Kind::Float, Device::Cpu);
    let original = Tensor::from_slice(&[30f32, 40.0]);
    set_grad(&w, &[1.0, 1.0]);
    no_grad(|| w.grad().set_data(&original.internal_lazy_clone()));
    let _norm = clip_grad_norm(&[w.shallow_clone()], 5.0).unwrap();
    assert!(to_f64(&w.grad())[1] < 5.0);
    assert_eq!(to_f64(&original), [30.0, 40.0]);
}

#[test]
fn gradients_on_two_devices_have_one_norm() {
    let devices: Vec<_> = gpus().into_iter().chain([Device::Cpu]).collect();
    let pairs = devices.iter().flat_map(|one| devices.iter().map(move |other| [*one, *other]));
    for on in pairs.filter(|[one, other]| one != other) {
        let all = on.map(|device| leaf(&[0.0], Kind::Float, device));
        let give = || [3.0, 4.0].iter().zip(&all).for_each(|(&g, w)| set_grad(w, &[g]));
        let halved = |got: [f64; 2]| (got[0] - 1.5).abs() < 1e-5 && (got[1] - 2.0).abs() < 1e-5;
        give();
        let norm = clip_grad_norm(&all, 2.5).unwrap();
        assert_eq!((norm.device(), norm.double_value(&[])), (on[0], 5.0));
        let clipped = [0, 1].map(|i| to_f64(&all[i].grad())[0]);
        assert!(halved(clipped), "{clipped:?} on {on:?}");
        // The same in the step.
        give();
        let mut opt = Sgd::default().build(&all, 1.0).unwrap();
        let outcome = scaler(on[0], 1.0).step_clip_norm(&mut opt, 2.5).unwrap();
        assert_eq!(outcome.total_norm().unwrap().double_value(&[]), 5.0, "on {on:?}");
        let changes = [0, 1].map(|i| -to_f64(&all[i])[0]);
        assert!(halved(changes), "{changes:?} on {on:?}");
    }
}

/// The norm of a GPU's gradients is computed in f32, that of the CPU's and of all together in f64.
#[test]
fn a_norm_over_the_cpu_and_a_gpu_may_exceed_f32() {
    for gpu in gpus() {
        let (here, there) = ([2.4e38f32, 3.2e38].map(f64::from), 1e18);
        let all = [leaf(&[0.0; 2], Kind::Float, Device::Cpu), leaf(&[0.0], Kind::Float, gpu)];
        let total = here[0].hypot(here[1]).hypot(there);
        assert!(total > f64::from(f32::MAX));
        let give = || {
            set_grad(&all[0], &here);
            set_grad(&all[1], &[there]);
        };
        let is_near = |got: f64, expected: f64| (got / expected - 1.0).abs() < 1e-5;
        let all_near = |got: Vec<f64>, factor: f64| {
            got.iter().zip(here).all(|(&got, before)| is_near(got, before * factor))
        };
        give();
        let norm = clip_grad_norm(&all, 2e38).unwrap();
        assert!(is_near(norm.double_value(&[]), total), "{norm:?}");
        assert!(all_near(to_f64(&all[0].grad()), 2e38 / total), "{gpu:?}");
        assert!(is_near(to_f64(&all[1].grad())[0], there / total * 2e38), "{gpu:?}");
        // The same in the step.
        give();
        let mut opt = Sgd::default().build(&all, 1e-18).unwrap();
        let outcome = scaler(Device::Cpu, 1.0).step_clip_norm(&mut opt, 2e38).unwrap();
        assert!(is_near(outcome.total_norm().unwrap().double_value(&[]), total));
        assert!(all_near(to_f64(&all[0]), -2e20 / total), "{gpu:?}");
        assert!(is_near(-to_f64(&all[1])[0], there / total * 2e20), "{gpu:?}");
    }
}

#[test]
fn f64_gradients_are_normed_over_the_whole_range_of_f64() {
    let lists: [&[f64]; 8] = [
        &[1e160, -1e160, 3e159],
        &[1e-170, 2e-170],
        &[1e-170, 1e160],
        &[1e300, 1e300, 1e-300],
        &[5e-324, 5e-324],
        &[1e154, 1e155, 1e-200],
        &[0.0, -0.0],
        &[3.0, 4.0, 1e-200],
    ];
    for_each_device(|device| {
        for values in lists {
            for repeats in [1, 9, 30_000] {
                for kinds in [&[Kind::Double][..], &[Kind::Double, Kind::Float]] {
                    let all: Vec<f64> =
                        values.iter().copied().cycle().take(values.len() * repeats).collect();
                    let leaves: Vec<_> = kinds
                        .iter()
                        .map(|kind| leaf(&vec![0.0; all.len()], *kind, device))
                        .collect();
                    set_grad(&leaves[0], &all);
                    if let Some(other) = leaves.get(1) {
                        set_grad(other, &vec![0.25; all.len()]);
                    }
                    let others =
                        if kinds.len() == 2 { 0.25 * (all.len() as f64).sqrt() } else { 0.0 };
                    let expected = norm_of(&all, 2.0).hypot(others);
                    // A norm of several dtypes is f32 where it fits, and on a GPU.
                    let in_f32 = kinds.len() == 2 && (expected < 1e38 || device != Device::Cpu);
                    if in_f32 && expected > 1e38 {
                        continue;
                    }
                    // Each addition rounds once.
                    let limit = if in_f32 { 1e-6 } else { (all.len() + 10) as f64 * f64::EPSILON };
                    let case = format!("{device:?} {kinds:?} {values:?} {repeats}");
                    let norm = clip_grad_norm(&leaves, 1.0).unwrap().double_value(&[]);
                    let is_near = |a: f64, b: f64| a == b || (a / b - 1.0).abs() < limit;
                    assert!(
                        is_near(norm, expected) || expected < 1e-320,
                        "{case}: {norm}, not {expected}"
                    );
                    let factor = (1.0 / (norm + 1e-6)).min(1.0);
                    for (clipped, value) in to_f64(&leaves[0].grad()).iter().zip(&all) {
                        assert!(is_near(*clipped, value * factor), "{case}: {clipped} of {value}");
                    }
                }
            }
        }
    });
}

#[test]
fn a_step_with_f64_gradients_whose_squares_overflow_is_taken_on_every_path() {
    for_each_device(|device| {
        let gradients = [3e160, -4e160];
        for path in PATHS {
            let w = leaf(&[1.0, 2.0], Kind::Double, device);
            let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.5).unwrap();
            let mut scaler = scaler(device, 1024.0);
            let factors = Tensor::from_slice(&gradients).to_device(device);
            scaler.backward(&(&w * factors).sum(None)).unwrap();
            let (_, taken) = step(path, &mut scaler, &mut opt, &w, 1.0.into());
            assert!(taken, "{device:?} {path}");
            let expected = [1.0 - 0.5 * 0.6, 2.0 + 0.5 * 0.8];
            for (got, expected) in to_f64(&w).iter().zip(expected) {
                assert!((got - expected).abs() < 1e-12, "{device:?} {path}: {got}");
            }
        }
    });
}

/// On a GPU, where such a norm is infinite, clipping would make all gradients zero.
#[test]
fn a_norm_beyond_f32_has_one_answer_on_every_path() {
    for_each_device(|device| {
        let paths = PATHS.into_iter().filter(|path| *path != "by hand");
        for (path, fused) in paths.flat_map(|path| [(path, true), (path, false)]) {
            let vs = nn::VarStore::new(device);
            let w = vs.root().zeros("w", &[2]);
            let mut own = Sgd::default().build(&vs, 0.5).unwrap();
            let mut host = nn::Sgd::default().build(&vs, 0.5).unwrap();
            let opt: &mut dyn AmpOptimizer = if fused { &mut own } else { &mut host };
            let mut scaler = scaler(device, 1.0);
            let factors = Tensor::from_slice(&[3e38f32, -3e38]).to_device(device);
            scaler.backward(&(&w * factors).sum(None)).unwrap();
            let (_, taken) = step(path, &mut scaler, opt, &w, 1.0.into());
            let case = format!("{device:?} {path} {fused}");
            assert_eq!(taken, device == Device::Cpu, "{case}");
            assert_eq!(scaler.get_scale().unwrap() < 1.0, device != Device::Cpu, "{case}");
            let half = if device == Device::Cpu { 0.5f64.sqrt() / 2.0 } else { 0.0 };
            for (got, expected) in to_f64(&w).iter().zip([-half, half]) {
                assert!((got - expected).abs() < 1e-6, "{case}: {got}");
            }
        }
    });
}
