//! Dtypes and layouts of gradients.

use half::{bf16, f16};
use rstest::rstest;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::gradients::GradientError::{Shared, Unsupported};
use tch_amp::gradients::{ClipNorm, clip_grad_norm, clip_grad_value};
use tch_amp::optim::{AmpOptimizer, MasterWeights, Optimizer, Sgd};
use tch_amp::scaler::{GradScalerConfig, PerLossScalers, StepOutcome, Unscaled};
use tch_amp::{Error, GradScaler, Result};

use crate::scaler::{Descent, INF, NAN, loss, model, ones, rows, scaler, sgd, with_scale};
use testkit::tensors::leaf;
use testkit::{assert_refused, assert_says, devices, for_each_device, to_f64};

#[rstest]
fn one_non_finite_element_anywhere_is_found(
    #[values(Kind::Float, Kind::Double, Kind::BFloat16)] kind: Kind,
    #[values(1, 70_000)] n: i64,
) {
    for_each_device(|device| {
        for (place, bad) in [(0, INF), (n / 2, NAN), (n - 1, -INF)] {
            let w = Tensor::ones([n], (kind, device)).set_requires_grad(true);
            let mut opt = Descent::of([&w]);
            let mut scaler = scaler(device);
            scaler.backward(&w.sum(None)).unwrap();
            let _filled = w.grad().get(place).fill_(bad);
            assert!(scaler.step(&mut opt).unwrap().is_skipped().unwrap(), "{kind:?} at {place}");
            assert_eq!(w.min().double_value(&[]), 1.0);
        }
    });
}

/// With scales that are not powers of two, every product is rounded. The reference is a plain loop with `half`'s
/// rounding.
#[test]
fn unscaling_rounds_like_a_plain_loop() {
    for_each_device(|device| {
        let values: Vec<f32> = (1..=1000).map(|i| 0.37 * i as f32).collect();
        let inverse = (1.0 / 3.0) as f32;
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
            let w = Tensor::zeros([1000], (kind, device)).set_requires_grad(true);
            let factors = Tensor::from_slice(&values).to_kind(kind).to_device(device);
            let mut scaler = with_scale(3.0).build(device).unwrap();
            (&w * &factors).sum(kind).backward();
            let scaled = to_f64(&w.grad());
            scaler.unscale_(&mut Descent::of([&w])).unwrap();
            let want = scaled.iter().map(|&g| match kind {
                Kind::Double => g * f64::from(inverse),
                Kind::BFloat16 => bf16::from_f32(g as f32 * inverse).to_f64(),
                _ => f64::from(g as f32 * inverse),
            });
            assert_eq!(to_f64(&w.grad()), want.collect::<Vec<_>>(), "{kind:?}");
        }
    });
}

#[test]
fn fp16_gradients_are_refused_by_name_before_any_gradient_is_touched() {
    for_each_device(|device| {
        let (w, low) = (ones(Kind::Float, device), ones(Kind::Half, device));
        let mut opt = Descent::of([&w, &low]);
        let mut scaler = scaler(device);
        let total = loss(&w, &[1.0; 3]) + loss(&low, &[1.0; 3]).to_kind(Kind::Float);
        scaler.backward(&total).unwrap();
        let refused = scaler.unscale_(&mut opt).map_err(|error| error.to_string());
        assert_says(refused.clone(), "parameter 1 [3]");
        assert_says(refused, "allow_fp16_gradients");
        assert_eq!((to_f64(&w.grad()), to_f64(&low.grad())), (vec![8.0; 3], vec![8.0; 3]));
    });
}

#[test]
fn fp16_gradients_are_unscaled_on_request() {
    for_each_device(|device| {
        let config = GradScalerConfig { allow_fp16_gradients: true, ..with_scale(8.0) };
        let mut scaler = config.build(device).unwrap();
        let w = ones(Kind::Half, device);
        let mut opt = Descent::of([&w]);
        scaler.backward(&loss(&w, &[1.0, 0.1, 3.0])).unwrap();
        scaler.step(&mut opt).unwrap();
        let want = [1.0, 0.1, 3.0].map(|v| f16::from_f64(1.0 - f16::from_f64(v).to_f64()).to_f64());
        assert_eq!(to_f64(&w), want);
    });
}

#[test]
fn sparse_gradients_are_unscaled_with_their_duplicates() {
    for_each_device(|device| {
        let table = Tensor::ones([4, 2], (Kind::Float, device)).set_requires_grad(true);
        let mut scaler = scaler(device);
        scaler.backward(&rows(&table, &[1, 3, 1]).sum(Kind::Float)).unwrap();
        assert!(table.grad().is_sparse());
        scaler.unscale_(&mut Descent::of([&table])).unwrap();
        let dense = table.grad().to_dense(None, false);
        assert_eq!(to_f64(&dense), [0.0, 0.0, 2.0, 2.0, 0.0, 0.0, 1.0, 1.0]);
    });
}

#[test]
fn complex_gradients_are_unscaled_and_checked() {
    for_each_device(|device| {
        let w = Tensor::ones([2], (Kind::ComplexFloat, device)).set_requires_grad(true);
        let mut opt = Descent::of([&w]);
        let mut scaler = scaler(device);
        let parts = |factors: &[f64]| {
            let factors = Tensor::from_slice(factors).to_kind(Kind::Float).to_device(device);
            (w.view_as_real() * factors.view([2, 2])).sum(None)
        };
        scaler.backward(&parts(&[1.0, 2.0, 3.0, 4.0])).unwrap();
        scaler.unscale_(&mut opt).unwrap();
        assert_eq!(to_f64(&w.grad().view_as_real()), [1.0, 2.0, 3.0, 4.0]);
        scaler.update().unwrap();
        scaler.backward(&parts(&[1.0, INF, 3.0, 4.0])).unwrap();
        assert!(scaler.step(&mut opt).unwrap().is_skipped().unwrap());
    });
}

#[test]
fn gradients_of_any_layout_are_unscaled_in_place() {
    for_each_device(|device| {
        let base = Tensor::zeros([3, 4], (Kind::Float, device));
        let transposed = base.transpose(0, 1).set_requires_grad(true);
        let columns = Tensor::zeros([4, 6], (Kind::Float, device)).slice(1, 0, 6, 2);
        let columns = columns.set_requires_grad(true);
        for w in [transposed, columns] {
            let factors = Tensor::arange(12, (Kind::Float, device)).view([4, 3]);
            let mut scaler = scaler(device);
            scaler.backward(&(&w * &factors).sum(Kind::Float)).unwrap();
            scaler.unscale_(&mut Descent::of([&w])).unwrap();
            assert_eq!(to_f64(&w.grad()), to_f64(&factors));
        }
    });
}

/// Gives `w` a gradient that backward would not produce.
fn force_gradient(w: &Tensor, gradient: &Tensor) {
    loss(w, &[1.0; 3]).backward();
    w.grad().set_data(gradient);
}

/// Each element is unscaled once, in a copy.
#[test]
fn a_gradient_whose_elements_share_memory_gets_its_own() {
    for_each_device(|device| {
        let expanded = Tensor::ones([1], (Kind::Float, device)).expand([3], false);
        let sliding = Tensor::ones([4], (Kind::Float, device)).as_strided([3, 2], [1, 1], None);
        for gradient in [expanded, sliding] {
            let w = ones(Kind::Float, device);
            force_gradient(&w, &gradient);
            scaler(device).unscale_(&mut Descent::of([&w])).unwrap();
            assert_eq!(w.grad().size(), gradient.size());
            assert_eq!(to_f64(&w.grad().flatten(0, -1)), vec![0.125; w.grad().numel()]);
            assert_eq!(gradient.max().double_value(&[]), 1.0);
        }
    });
}

type Change = fn(&mut GradScaler, [Tensor; 2]);

const CHANGES: [(&str, Change); 5] = [
    ("unscale_", |scaler, all| scaler.unscale_(&mut Descent(all.into())).unwrap()),
    ("clip_grad_norm", |_, all| drop(clip_grad_norm(&all, 1.0).unwrap())),
    ("clip_grad_value", |_, all| clip_grad_value(&all, 0.5).unwrap()),
    ("step", |scaler, all| {
        let mut opt = Sgd::default().build(&all, 0.5).unwrap();
        drop(scaler.step(&mut opt).unwrap());
    }),
    ("step_clip_norm", |scaler, all| {
        let mut opt = Sgd::default().build(&all, 0.5).unwrap();
        drop(scaler.step_clip_norm(&mut opt, 1.0).unwrap());
    }),
];

/// libtorch's kernels for lists write to the memory of a lazy copy as if it were its own.
#[rstest]
fn gradients_that_are_lazy_copies_are_changed_and_their_original_is_not(
    #[values(Kind::Float, Kind::Double, Kind::BFloat16)] kind: Kind,
) {
    for_each_device(|device| {
        for (name, change) in CHANGES {
            let changed = |copy: fn(&Tensor) -> Tensor| {
                let original =
                    Tensor::from_slice(&[8.0, 16.0, -8.0]).to_kind(kind).to_device(device);
                let all = [(); 2].map(|()| ones(kind, device));
                all.iter().for_each(|w| force_gradient(w, &copy(&original)));
                change(&mut scaler(device), all.each_ref().map(Tensor::shallow_clone));
                let changed = all.map(|w| (to_f64(&w), to_f64(&w.grad())));
                assert_eq!(to_f64(&original), [8.0, 16.0, -8.0], "{name} on {device:?}");
                changed
            };
            let plain = changed(|original| original.copy());
            assert_eq!(changed(|original| original.internal_lazy_clone()), plain, "{name}");
            assert_eq!(plain[0], plain[1], "{name}");
        }
    });
}

#[test]
fn an_undefined_parameter_is_refused() {
    let mut opt = Descent(vec![ones(Kind::Float, Device::Cpu), Tensor::new()]);
    assert_says(scaler(Device::Cpu).unscale_(&mut opt), "parameter 1");
}

#[test]
fn missing_and_empty_gradients_are_accepted() {
    for_each_device(|device| {
        let (w, unused) = (ones(Kind::Float, device), ones(Kind::Float, device));
        let empty = Tensor::zeros([0], (Kind::Float, device)).set_requires_grad(true);
        let all = [&w, &unused, &empty].map(Tensor::shallow_clone);
        let mut scaler = scaler(device);
        scaler.backward(&(loss(&w, &[1.0; 3]) + empty.sum(None))).unwrap();
        assert!(scaler.step(&mut Descent(all.into())).unwrap().is_stepped().unwrap());
        assert_eq!((to_f64(&w), to_f64(&unused)), (vec![0.0; 3], vec![1.0; 3]));
    });
}

#[test]
fn a_gradient_of_a_frozen_parameter_neither_skips_a_step_nor_is_applied() {
    for_each_device(|device| {
        let (frozen, w) = (ones(Kind::Float, device), ones(Kind::Float, device));
        let mut opt = Descent::of([&frozen, &w]);
        let mut scaler = scaler(device);
        scaler.backward(&loss(&frozen, &[INF, 1.0, NAN])).unwrap();
        let _frozen = frozen.set_requires_grad(false);
        scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
        assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
        assert_eq!((to_f64(&frozen), to_f64(&w)), (vec![1.0; 3], vec![0.0; 3]));
    });
}

#[test]
fn mixed_dtypes_are_unscaled_together() {
    for_each_device(|device| {
        let kinds = [Kind::Float, Kind::Double, Kind::BFloat16];
        for unscales in [false, true] {
            let all = kinds.map(|kind| ones(kind, device));
            let mut scaler = scaler(device);
            let losses = all.iter().map(|w| loss(w, &[1.0, -2.0, 0.5]).to_kind(Kind::Double));
            scaler.backward(&losses.sum::<Tensor>()).unwrap();
            let mut opt = Descent::of(&all);
            if unscales {
                scaler.unscale_(&mut opt).unwrap();
                for (w, kind) in all.iter().zip(kinds) {
                    assert_eq!((w.grad().kind(), to_f64(&w.grad())), (kind, vec![1.0, -2.0, 0.5]));
                }
            }
            assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
            all.iter().for_each(|w| assert_eq!(to_f64(w), [0.0, 3.0, 0.5]));
        }
    });
}

#[test]
fn gradients_on_several_devices_decide_together() {
    let devices = devices();
    let bad = std::iter::once(None).chain((0..devices.len()).map(Some));
    let cases = bad.flat_map(|bad| devices.iter().map(move |home| (bad, *home)));
    for (bad, home) in cases {
        let all = devices.iter().map(|device| leaf(&[1.0; 3], Kind::Float, *device));
        let all: Vec<_> = all.collect();
        let mut scaler = GradScaler::new(home).unwrap();
        for (i, w) in all.iter().enumerate() {
            let value = if bad == Some(i) { INF } else { 1.0 };
            scaler.backward(&loss(w, &[value; 3])).unwrap();
        }
        let mut opt = Descent::of(&all);
        let stepped = scaler.step(&mut opt).unwrap().is_stepped().unwrap();
        assert_eq!(stepped, bad.is_none(), "{bad:?} of {devices:?} with the scaler on {home:?}");
        let want = if bad.is_none() { 0.0 } else { 1.0 };
        all.iter().for_each(|w| assert_eq!(to_f64(w), [want; 3]));
        scaler.update().unwrap();
    }
}

/// Every second column: a layout with gaps, in which no element occurs twice.
#[test]
fn a_gradient_with_gaps_is_unscaled() {
    for_each_device(|device| {
        let w = Tensor::zeros([2, 3], (Kind::Float, device)).set_requires_grad(true);
        let mut opt = Descent::of([&w]);
        let mut scaler = scaler(device);
        scaler.backward(&w.sum(Kind::Float)).unwrap();
        let wide = Tensor::full([2, 5], 8.0, (Kind::Float, device));
        // While it is held here, the gradient stays the same tensor.
        let mut gradient = w.grad();
        no_grad(|| gradient.set_data(&wide.slice(1, 0, 5, 2)));
        assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
        assert_eq!(w.sum(Kind::Double).double_value(&[]), -6.0);
        assert_eq!(
            wide.sum(Kind::Double).double_value(&[]),
            6.0 + 4.0 * 8.0,
            "the gaps are unchanged"
        );
    });
}

#[test]
fn unscaling_is_a_change_in_place_that_autograd_detects() {
    for_each_device(|device| {
        let (w, other) = (ones(Kind::Float, device), ones(Kind::Float, device));
        let mut scaler = scaler(device);
        scaler.backward(&w.square().sum(Kind::Float)).unwrap();
        // The product saves the gradient for its backward.
        let product = (&other * &w.grad()).sum(Kind::Float);
        scaler.unscale_(&mut Descent::of([&w])).unwrap();
        assert_says(product.f_backward(), "modified by an inplace operation");
    });
}

/// Two finite numbers for one row whose sum is infinite.
#[test]
fn sparse_gradients_of_several_losses_are_checked_as_their_sum() {
    for_each_device(|device| {
        let w = Tensor::zeros([3, 1], (Kind::Float, device)).set_requires_grad(true);
        let mut opt = Descent::of([&w]);
        let mut scalers = PerLossScalers::with_configs(device, &[with_scale(1.0); 2]).unwrap();
        for id in 0..2 {
            let loss = rows(&w, &[1]) * 3e38;
            scalers.backward(id, &loss.sum(Kind::Float), &mut opt).unwrap();
        }
        assert!(w.grad().is_sparse());
        assert!(scalers.step(&mut opt).unwrap().is_skipped().unwrap());
        scalers.update().unwrap();
        assert_eq!([0, 1].map(|id| scalers.get_scale(id).unwrap()), [1.0; 2]);
    });
}

/// Both parts of complex half are fp16, so small values are lost as in fp16.
#[test]
fn integer_and_complex_half_gradients_are_refused() {
    for (own, other, text) in [
        (Kind::Float, Kind::Int64, "parameter 0"),
        (Kind::ComplexFloat, Kind::ComplexHalf, "is fp16"),
    ] {
        let w = Tensor::ones([2], (own, Device::Cpu)).set_requires_grad(true);
        w.abs().sum(None).backward();
        let gradient = w.grad().real().to_kind(other);
        no_grad(|| w.grad().set_data(&gradient));
        let refused = scaler(Device::Cpu).unscale_(&mut Descent::of([&w]));
        assert_refused!(refused, Error::Gradient(Unsupported { .. }), text);
    }
}

#[test]
fn parameters_of_several_stores_are_named() {
    let mut stores = [(); 2].map(|()| VarStore::new(Device::Cpu));
    let names = ["first", "second"];
    let ws: Vec<_> =
        stores.iter().zip(names).map(|(vs, name)| (vs.root() / name).ones("w", &[3])).collect();
    stores.iter_mut().for_each(VarStore::half);
    let mut alone = scaler(Device::Cpu);
    let mut scalers = PerLossScalers::new(Device::Cpu, 2).unwrap();
    for vs in &stores {
        alone.name_parameters(vs).unwrap();
        scalers.name_parameters(vs).unwrap();
    }
    for ((name, w), vs) in names.iter().zip(&ws).zip(&stores) {
        let wanted = format!("parameter `{name}.w` [3]");
        let mut opt = sgd(vs, false);
        // For each loss, its own gradients are checked.
        assert_says(scalers.backward(1, &loss(w, &[1.0; 3]), &mut *opt), &wanted);
        alone.backward(&loss(w, &[1.0; 3])).unwrap();
        assert_says(alone.step(&mut *opt), &wanted);
    }
}

/// An optimizer that steps every gradient it finds, as tch's own does.
#[test]
fn a_parameter_that_is_frozen_after_unscaling_is_neither_clipped_nor_stepped() {
    type Step = fn(&mut GradScaler, &mut dyn AmpOptimizer) -> Result<StepOutcome>;
    let steps: [Step; 5] = [
        |scaler, opt| scaler.step(opt),
        |scaler, opt| scaler.step_clip_norm(opt, 100.0),
        |scaler, opt| scaler.step_clip_value(opt, 100.0),
        |scaler, opt| {
            scaler.abandon(opt)?;
            scaler.step(opt)
        },
        |scaler, opt| {
            scaler.abandon(opt)?;
            scaler.step_clip_norm(opt, 100.0)
        },
    ];
    for_each_device(|device| {
        for (case, step) in steps.iter().enumerate() {
            for fused in [false, true] {
                println!("case {case}, fused: {fused}");
                let vs = VarStore::new(device);
                let [frozen, w] = ["frozen", "w"].map(|name| vs.root().ones(name, &[3]));
                let mut opt = sgd(&vs, fused);
                let mut scaler = GradScaler::skip_only(device).unwrap();
                scaler.backward(&(loss(&frozen, &[1.0; 3]) + loss(&w, &[1.0; 3]))).unwrap();
                scaler.unscale_(&mut *opt).unwrap();
                let _frozen = frozen.set_requires_grad(false);
                assert!(step(&mut scaler, &mut *opt).unwrap().is_stepped().unwrap());
                assert_eq!((to_f64(&frozen), to_f64(&w)), (vec![1.0; 3], vec![0.0; 3]));
                assert!(!frozen.grad().defined());
            }
        }
    });
}

#[test]
fn the_norm_in_a_transaction_leaves_out_a_parameter_that_is_frozen_after_unscaling() {
    let clips: [fn(&mut Unscaled<'_>) -> Result<Tensor>; 2] = [
        |unscaled| unscaled.clip_grad_norm(10.0),
        |unscaled| unscaled.clip_grad_norm(ClipNorm { error_if_nonfinite: true, ..10.0.into() }),
    ];
    for_each_device(|device| {
        for clip in clips {
            let (frozen, w) = (ones(Kind::Float, device), ones(Kind::Float, device));
            let mut opt = Descent::of([&frozen, &w]);
            let scaler = scaler(device);
            scaler.backward(&(loss(&frozen, &[100.0; 3]) + loss(&w, &[2.0, 0.0, 0.0]))).unwrap();
            let mut unscaled = scaler.unscale(&mut opt).unwrap();
            let _frozen = frozen.set_requires_grad(false);
            assert_eq!(to_f64(&clip(&mut unscaled).unwrap()), [2.0]);
            // Its gradient was not clipped, and is not stepped with.
            let _trained = frozen.set_requires_grad(true);
            assert!(unscaled.step().unwrap().is_stepped().unwrap());
            assert_eq!((to_f64(&frozen), to_f64(&w)), (vec![1.0; 3], vec![-1.0, 1.0, 1.0]));
        }
    });
}

/// A later backward would add to gradients that are still scaled.
#[rstest]
fn gradients_are_dropped_if_all_parameters_are_frozen(#[values(false, true)] fused: bool) {
    for_each_device(|device| {
        let (vs, w, _) = model(device);
        let mut opt = sgd(&vs, fused);
        let mut scaler = scaler(device);
        scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
        let _frozen = w.set_requires_grad(false);
        assert!(scaler.step(&mut *opt).unwrap().has_no_gradients());
        let _trained = w.set_requires_grad(true);
        scaler.backward(&loss(&w, &[2.0; 3])).unwrap();
        assert!(scaler.step(&mut *opt).unwrap().is_stepped().unwrap());
        assert_eq!(to_f64(&w), [-1.0; 3]);
    });
}

/// The coalesced gradient is used for the check alone, so that the gradient stays the one that was seen.
#[test]
fn a_sparse_fp16_gradient_is_checked_and_stepped() {
    for (allow, unscales) in [(false, false), (false, true), (true, false), (true, true)] {
        // Two finite numbers for one row, whose sum may be infinite.
        for (value, want) in [(1.0, Some(-2.0)), (40000.0, None)] {
            let config = GradScalerConfig { allow_fp16_gradients: true, ..with_scale(1.0) };
            let mut scaler = match allow {
                true => config.build(Device::Cpu).unwrap(),
                false => GradScaler::skip_only(Device::Cpu).unwrap(),
            };
            let table = Tensor::zeros([2, 1], (Kind::Half, Device::Cpu)).set_requires_grad(true);
            let mut opt = Descent::of([&table]);
            let value = rows(&table, &[1, 1]) * value;
            scaler.backward(&value.sum(Kind::Half).to_kind(Kind::Float)).unwrap();
            if unscales {
                scaler.unscale_(&mut opt).unwrap();
                if !allow {
                    assert!(!table.grad().is_coalesced(), "nothing was written");
                }
            }
            let outcome = scaler.step(&mut opt).unwrap();
            assert_eq!(outcome.is_stepped().unwrap(), want.is_some());
            assert_eq!(to_f64(&table), [0.0, want.unwrap_or(0.0)]);
            scaler.update().unwrap();
        }
    }
}

/// Clipping is refused before the gradients are unscaled.
#[test]
fn a_step_that_cannot_clip_leaves_the_gradients_scaled() {
    let table = Tensor::zeros([2, 1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let complex = Tensor::ones([2], (Kind::ComplexFloat, Device::Cpu)).set_requires_grad(true);
    let w = ones(Kind::Float, Device::Cpu);
    let mut scaler = scaler(Device::Cpu);
    let sparse = rows(&table, &[1]).sum(None);
    scaler.backward(&(loss(&w, &[1.0; 3]) + sparse + complex.view_as_real().sum(None))).unwrap();
    for (other, by_value) in [(&table, false), (&table, true), (&complex, true)] {
        let mut opt = Descent::of([&w, other]);
        let clipped = match by_value {
            true => scaler.step_clip_value(&mut opt, 1.0),
            false => scaler.step_clip_norm(&mut opt, 1.0),
        };
        assert_refused!(clipped, Error::Gradient(Unsupported { .. }), "parameter 1");
        assert_eq!(to_f64(&w.grad()), [8.0; 3]);
        assert!(scaler.step(&mut Descent::of([&w])).unwrap().is_stepped().unwrap());
        scaler.update().unwrap();
        w.shallow_clone().zero_grad();
        scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
    }
}

/// A refused call does not leave half-precision gradients in f32, neither those there are nor later ones.
#[rstest]
fn a_refused_unscale_does_not_widen_gradients(#[values(Kind::BFloat16, Kind::Half)] kind: Kind) {
    let calls: [fn(&mut GradScaler, &mut Optimizer) -> Result<()>; 4] = [
        |scaler, opt| scaler.unscale_(opt),
        |scaler, opt| scaler.step_clip_norm(opt, 1.0).map(drop),
        |scaler, opt| scaler.step_clip_value(opt, 1.0).map(drop),
        |scaler, opt| scaler.unscale(opt).map(drop),
    ];
    for_each_device(|device| {
        for call in calls {
            let (low, w) = (ones(kind, device), ones(Kind::Float, device));
            let list = vec![low.shallow_clone(), w.shallow_clone()];
            let sgd = Sgd::default().master_weights(MasterWeights::Float);
            let mut opt = sgd.build(list, 1.0).unwrap();
            let mut scaler = scaler(device);
            let of_low = loss(&low, &[1.0; 3]).to_kind(Kind::Float);
            scaler.backward(&(of_low + loss(&w, &[1.0; 3]))).unwrap();
            let is_scaled = || (low.grad().kind(), to_f64(&low.grad())) == (kind, vec![8.0; 3]);
            // The gradient of `w` belongs to another optimizer.
            scaler.unscale_(&mut Descent::of([&w])).unwrap();
            assert_refused!(call(&mut scaler, &mut opt), Error::Gradient(Shared { .. }));
            assert!(is_scaled(), "{:?}", low.grad());
            // Nor does one that names an integer gradient.
            scaler.abandon(&mut Descent::of([&w])).unwrap();
            no_grad(|| w.grad().set_data(&Tensor::ones([3], (Kind::Int64, device))));
            assert_refused!(call(&mut scaler, &mut opt), Error::Gradient(Unsupported { .. }));
            assert!(is_scaled(), "{:?}", low.grad());
            opt.zero_grad().unwrap();
            loss(&low, &[1.0; 3]).backward();
            assert_eq!(low.grad().kind(), kind, "the next gradient");
        }
    });
}
