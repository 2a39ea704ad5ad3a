//! Fused optimizers with a scaler.

use std::collections::BTreeMap;

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::gradients::GradientError;
use tch_amp::optim::{
    AdamW, Algorithm, AmpOptimizer, MasterWeights, MomentDtype, Optimizer, OptimizerError,
    Parameters, Sgd, Step,
};
use tch_amp::scaler::{GradScalerConfig, ScalerError, StepCounter};
use tch_amp::{Error, GradScaler, Result};

use crate::optim::{INF, NAN, algorithms, set_grad, to_f64};
use testkit::optimizers::{WEIGHTS, all_bits, scaler};
use testkit::rng::Rng;
use testkit::simulation::{let_answers_come, takes_time};
use testkit::tensors::leaf;
use testkit::{assert_refused, cuda_or_skip, for_each_device, skipped};

/// A weight of ones, an SGD with a learning rate of 1, and a scaler with a scale of 8.
fn training(device: Device) -> (Tensor, Optimizer, GradScaler) {
    let w = leaf(&[1.0; 3], Kind::Float, device);
    let opt = Sgd::default().build(vec![w.shallow_clone()], 1.0).unwrap();
    (w, opt, scaler(device, 8.0))
}

#[test]
fn all_ways_to_step_take_the_same_step() {
    for_each_device(|device| {
        for way in 0..4 {
            let (w, mut opt, mut scaler) = training(device);
            set_grad(&w, &[8.0, 16.0, -8.0]);
            let outcome = match way {
                0 => scaler.step(&mut opt),
                1 => {
                    scaler.unscale_(&mut opt).unwrap();
                    assert_eq!(to_f64(&w.grad()), [1.0, 2.0, -1.0]);
                    scaler.step(&mut opt)
                }
                2 => scaler.unscale(&mut opt).unwrap().step(),
                _ => scaler.step_clip_norm(&mut opt, INF),
            };
            assert!(outcome.unwrap().is_stepped().unwrap());
            assert_eq!(to_f64(&w), [0.0, -1.0, 2.0], "way {way}");
            scaler.update().unwrap();
        }
    });
}

#[test]
fn a_second_step_in_an_iteration_is_refused() {
    let (w, mut opt, mut scaler) = training(Device::Cpu);
    set_grad(&w, &[8.0; 3]);
    drop(scaler.step(&mut opt).unwrap());
    assert_refused!(scaler.step(&mut opt), Error::Scaler(ScalerError::AlreadyStepped));
    assert_refused!(
        scaler.step_clip_norm(&mut opt, 1.0),
        Error::Scaler(ScalerError::AlreadyStepped)
    );
    assert_refused!(scaler.unscale_(&mut opt), Error::Scaler(ScalerError::UnscaleAfterStep));
    assert_eq!(to_f64(&w), [0.0; 3]);
    assert_eq!(to_f64(&w.grad()), [8.0; 3], "nothing was clipped");
    scaler.update().unwrap();
    drop(scaler.step(&mut opt).unwrap());
}

#[test]
fn an_overflow_backs_the_scale_off() {
    for_each_device(|device| {
        let (w, mut opt, mut scaler) = training(device);
        set_grad(&w, &[8.0, INF, 1.0]);
        let outcome = scaler.step(&mut opt).unwrap();
        scaler.update().unwrap();
        assert_eq!(scaler.get_scale().unwrap(), 4.0);
        assert!(outcome.is_skipped().unwrap());
        // The flag is not applied to later gradients.
        set_grad(&w, &[4.0; 3]);
        let later = scaler.step(&mut opt).unwrap();
        scaler.update().unwrap();
        assert!(later.is_stepped().unwrap() && outcome.is_skipped().unwrap());
    });
}

/// On a GPU the host does not know of the overflow before `update` reads it.
#[test]
fn an_overflow_at_the_smallest_scale_is_an_error() {
    for_each_device(|device| {
        let (w, mut opt, _) = training(device);
        let config = GradScalerConfig { init_scale: 8.0, min_scale: 8.0, ..Default::default() };
        let mut scaler =
            GradScalerConfig { error_at_min_scale: true, ..config }.build(device).unwrap();
        set_grad(&w, &[INF; 3]);
        drop(scaler.step(&mut opt).unwrap());
        assert_refused!(scaler.update(), Error::Scaler(ScalerError::ScaleAtMinimum { .. }));
    });
}

#[test]
fn without_gradients_nothing_is_stepped() {
    let (_w, mut opt, mut scaler) = training(Device::Cpu);
    assert!(scaler.step(&mut opt).unwrap().has_no_gradients());
    let outcome = scaler.step_clip_norm(&mut opt, 1.0).unwrap();
    assert!(outcome.has_no_gradients() && outcome.total_norm().is_none());
    assert_refused!(scaler.update(), Error::Scaler(ScalerError::NoInfChecks));
}

#[test]
fn a_disabled_scaler_steps_by_the_gradients_as_they_are() {
    let (w, mut opt, _) = training(Device::Cpu);
    let mut scaler = GradScaler::disabled();
    set_grad(&w, &[3.0, 0.0, 4.0]);
    let outcome = scaler.step_clip_norm(&mut opt, 1.0).unwrap();
    assert_eq!(outcome.total_norm().unwrap().double_value(&[]), 5.0);
    let want = [1.0 - 0.6, 1.0, 1.0 - 0.8];
    assert!(to_f64(&w).iter().zip(want).all(|(w, want)| (w - want).abs() < 1e-6));
}

#[test]
fn fp16_gradients_need_no_permission_if_nothing_is_written_back() {
    for_each_device(|device| {
        let w = leaf(&[1.0; 3], Kind::Half, device);
        let mut opt = Sgd::default().build(vec![w.shallow_clone()], 1.0).unwrap();
        // More than fp16 can hold: libtorch's kernels must not round the scale to fp16 either.
        let mut scaler = scaler(device, 2f64.powi(17));
        set_grad(&w, &[32768.0; 3]);
        assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
        assert_eq!(to_f64(&w), [0.75; 3]);
        scaler.update().unwrap();
        assert_refused!(
            scaler.unscale_(&mut opt),
            Error::Gradient(GradientError::Unsupported { .. })
        );
    });
}

#[test]
fn a_sparse_gradient_is_refused_by_name_and_nothing_changes() {
    let vs = VarStore::new(Device::Cpu);
    let config = nn::EmbeddingConfig { sparse: true, ..Default::default() };
    let table = nn::embedding(vs.root() / "table", 4, 2, config);
    let other = vs.root().ones("other", &[1]);
    let mut opt = AdamW::default().build(&vs, 0.1).unwrap();
    let before = to_f64(&table.ws);
    let rows = Tensor::from_slice(&[1i64, 3]).apply(&table);
    (rows.sum(None) * &other).sum(None).backward();
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    for result in [opt.step(), scaler.step(&mut opt).map(drop)] {
        let name = "`table.weight`";
        assert_refused!(result, Error::Gradient(GradientError::Unsupported { .. }), name);
    }
    let clips = [
        scaler.step_clip_norm(&mut opt, 1.0).map(drop),
        opt.clip_grad_norm(1.0).map(drop),
        opt.clip_grad_value(1.0),
    ];
    for result in clips {
        assert_refused!(result, Error::Gradient(GradientError::Unsupported { .. }));
    }
    assert_eq!((to_f64(&table.ws), to_f64(&other)), (before, vec![1.0]));
}

#[test]
fn a_sparse_gradient_of_a_frozen_parameter_does_not_prevent_clipping() {
    for clips_the_norm in [true, false] {
        let (w, _, mut scaler) = training(Device::Cpu);
        let table = leaf(&[1.0; 4], Kind::Float, Device::Cpu).detach().view([2, 2]);
        let table = table.set_requires_grad(true);
        let list = vec![table.shallow_clone(), w.shallow_clone()];
        let mut opt = Sgd::default().build(list, 1.0).unwrap();
        let rows = Tensor::embedding(&table, &Tensor::from_slice(&[1i64]), -1, false, true);
        scaler.backward(&(rows.sum(Kind::Float) + w.sum(Kind::Float))).unwrap();
        assert!(table.grad().is_sparse());
        let _frozen = table.set_requires_grad(false);
        let outcome = match clips_the_norm {
            true => scaler.step_clip_norm(&mut opt, 8.0),
            false => scaler.step_clip_value(&mut opt, 8.0),
        };
        assert!(outcome.unwrap().is_stepped().unwrap(), "the norm: {clips_the_norm}");
        assert_eq!((to_f64(&table), to_f64(&w)), (vec![1.0; 4], vec![0.0; 3]));
    }
}

#[test]
fn a_step_is_counted_without_synchronizing() {
    for_each_device(|device| {
        let (w, mut opt, mut scaler) = training(device);
        let mut taken = StepCounter::default();
        for step in 0..6 {
            set_grad(&w, if step % 3 == 1 { &[INF; 3] } else { &[1.0; 3] });
            taken.record(&scaler.step(&mut opt).unwrap());
            scaler.update().unwrap();
        }
        // Only on a GPU can steps be in flight.
        assert!(device != Device::Cpu || taken.pending() == 0);
        let_answers_come(device);
        let mut count = taken.count().unwrap();
        while device != Device::Cpu && taken.pending() > 0 {
            count = taken.count().unwrap();
        }
        assert_eq!((count, taken.pending()), (4, 0));
    });
}

/// For real GPUs only. The device has seconds of work before it comes to the step, so a call that synchronized would
/// find the answer. For simulated GPUs, `tests/devices/syncs.rs` counts the synchronizations.
#[test]
fn an_iteration_does_not_synchronize_with_a_real_gpu() {
    if !cuda_or_skip() {
        return;
    }
    if !takes_time() {
        skipped("work that lasts for seconds needs a real GPU");
        return;
    }
    let (w, mut opt, mut scaler) = training(Device::Cuda(0));
    for clip in [false, true, false, true] {
        set_grad(&w, &[8.0, 16.0, 8.0]);
        let factor = Tensor::randn([8192, 8192], (Kind::Float, Device::Cuda(0)));
        let mut work = factor.shallow_clone();
        for _ in 0..100 {
            work = work.matmul(&factor) * 1e-4;
        }
        let outcome = match clip {
            false => scaler.step(&mut opt),
            true => scaler.step_clip_norm(&mut opt, 1.0),
        };
        let outcome = outcome.unwrap();
        scaler.update().unwrap();
        assert_eq!(outcome.poll().unwrap(), None, "no call has synchronized");
        assert!(outcome.is_stepped().unwrap());
    }
}

/// A user-defined optimizer that unscales on the device.
struct Own(Vec<Tensor>);

impl AmpOptimizer for Own {
    fn parameters(&self) -> Parameters<'_> {
        self.0.as_slice().into()
    }

    fn takes_scaled_gradients(&self) -> bool {
        true
    }

    fn update(&mut self, step: &Step<'_>) -> Result<()> {
        for w in &mut self.0 {
            let g = step.grad_scale().map_or_else(|| w.grad(), |scale| w.grad() / scale);
            let g = step.clip_factor().map_or_else(|| g.shallow_clone(), |clip| &g * clip);
            let keep = step.found_inf().map(|found| found.eq(0.0));
            let g = keep.map_or(g.shallow_clone(), |keep| g.where_self(&keep, &g.zeros_like()));
            tch::no_grad(|| *w -= g);
        }
        Ok(())
    }
}

#[test]
fn a_user_defined_optimizer_can_do_the_same() {
    for_each_device(|device| {
        let w = leaf(&[1.0; 2], Kind::Float, device);
        let mut opt = Own(vec![w.shallow_clone()]);
        let mut scaler = scaler(device, 8.0);
        set_grad(&w, &[24.0, 32.0]);
        let outcome = scaler.step_clip_norm(&mut opt, 2.5).unwrap();
        assert_eq!(outcome.total_norm().unwrap().double_value(&[]), 5.0);
        assert!(to_f64(&w).iter().zip([-0.5, -1.0]).all(|(w, want)| (w - want).abs() < 1e-5));
    });
}

/// Takes each step of `algorithm` twice: with gradients that a scale or a clip factor changes, and with the changed
/// gradients. The factors are powers of two, so that all bits are equal. A step that a flag skips changes none of them,
/// whatever its gradients are. Returns whether there is such an optimizer.
fn compare_factors(
    algorithm: Algorithm,
    (kind, masters): (Kind, MasterWeights),
    states: MomentDtype,
    device: Device,
) -> bool {
    let mut rng = Rng::new(5);
    let mut eighths = |count| (0..count).map(|_| rng.eighth()).collect::<Vec<_>>();
    // A matrix and a vector of so many elements that their moments can have few bits.
    let sizes = [vec![70, 65], vec![4099]];
    let start = sizes.each_ref().map(|size| eighths(size.iter().product()));
    let build = || {
        let leaf = |(size, values): (&Vec<i64>, &Vec<f64>)| {
            let values = Tensor::from_slice(values).view(size.as_slice());
            values.to_kind(kind).to_device(device).set_requires_grad(true)
        };
        let leaves: Vec<_> = sizes.iter().zip(&start).map(leaf).collect();
        let built = algorithm.master_weights(masters).moments(states).build(&leaves, 0.01);
        built.map(|opt| (leaves, opt))
    };
    let (Ok((ours, mut opt)), Ok((theirs, mut twin))) = (build(), build()) else { return false };
    let number = |value: f64, kind| Tensor::from(value).to_kind(kind).to_device(device);
    // Each of the three alone and with the others, then with a flag that is set, and after skips again.
    for turn in (0..8).chain(12..16).chain([0, 3]) {
        let (is_scaled, is_clipped, is_skipped) = (turn & 1 != 0, turn & 2 != 0, turn > 8);
        let scale = is_scaled.then(|| number(64.0, Kind::Float));
        // The norm of f64 gradients is f64.
        let in_f64 = if turn & 4 != 0 { Kind::Double } else { Kind::Float };
        let clip = is_clipped.then(|| number(0.5f64.powi(turn), in_f64));
        let flag = (turn & 4 != 0).then(|| number(f64::from(is_skipped), Kind::Float));
        let factor = if is_scaled { 64.0 } else { 1.0 };
        let factor = if is_clipped { factor * 2f64.powi(turn) } else { factor };
        for (w, twin) in ours.iter().zip(&theirs) {
            let gradient: Vec<_> = eighths(w.numel() as i64).iter().map(|g| g / 64.0).collect();
            set_grad(twin, &gradient);
            let mut scaled: Vec<_> = gradient.iter().map(|g| g * factor).collect();
            if is_skipped {
                scaled[3] = [NAN, INF, -INF, 1.0][turn as usize % 4];
            }
            set_grad(w, &scaled);
        }
        let step = scale.iter().fold(Step::default(), |step, scale| step.with_grad_scale(scale));
        let step = clip.iter().fold(step, |step, clip| step.with_clip_factor(clip));
        opt.update(&flag.iter().fold(step, |step, flag| step.with_found_inf(flag))).unwrap();
        if !is_skipped {
            twin.update(&Step::default()).unwrap();
        }
        let (ours, theirs) = (all_bits(&mut opt), all_bits(&mut twin));
        assert_eq!(ours.len(), theirs.len());
        if let Some(((name, _), _)) = ours.iter().zip(&theirs).find(|(one, other)| one != other) {
            let parts = (is_scaled, is_clipped, flag.is_some());
            panic!("{name} after {parts:?}: {algorithm:?} {kind:?} {masters:?} {states:?}");
        }
    }
    true
}

#[test]
fn a_scale_a_clip_factor_and_a_flag_count_alone_and_together() {
    let all_states = [MomentDtype::F32, MomentDtype::BFloat16, MomentDtype::EightBit];
    for_each_device(|device| {
        for states in all_states {
            let of_weights = |weights| {
                let compare = |algorithm| compare_factors(algorithm, weights, states, device);
                algorithms().into_iter().map(compare).filter(|compared| *compared).count()
            };
            let compared = WEIGHTS.map(of_weights);
            // AdamW, Adam and, in bf16, Muon, of parameters that are f32 or have masters.
            let wanted = match states {
                MomentDtype::BFloat16 => [3, 0, 3, 3, 0, 3],
                MomentDtype::EightBit => [2, 0, 2, 2, 0, 2],
                _ => [algorithms().len(); 6],
            };
            assert_eq!(compared, wanted, "{states:?}");
        }
    });
}

#[test]
fn a_step_that_fails_can_be_retried() {
    struct Fails(Own, bool);
    impl AmpOptimizer for Fails {
        fn parameters(&self) -> Parameters<'_> {
            self.0.parameters()
        }
        fn takes_scaled_gradients(&self) -> bool {
            true
        }
        fn update(&mut self, step: &Step<'_>) -> Result<()> {
            if std::mem::take(&mut self.1) {
                return Err(Error::Optimizer(OptimizerError::Step("not now".into())));
            }
            self.0.update(step)
        }
    }
    let w = leaf(&[1.0; 2], Kind::Float, Device::Cpu);
    let mut opt = Fails(Own(vec![w.shallow_clone()]), true);
    let mut scaler = scaler(Device::Cpu, 8.0);
    set_grad(&w, &[8.0; 2]);
    assert_refused!(scaler.step(&mut opt), Error::Optimizer(OptimizerError::Step(_)));
    assert_eq!(to_f64(&w), [1.0; 2]);
    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
    assert_eq!(to_f64(&w), [0.0; 2]);
    scaler.update().unwrap();
}

#[test]
fn a_finite_gradient_that_unscaling_makes_infinite_skips_the_step() {
    for_each_device(|device| {
        let w = leaf(&[1.0; 3], Kind::Float, device);
        let mut opt = AdamW::default().build(vec![w.shallow_clone()], 0.1).unwrap();
        let mut scaler = scaler(device, 2f64.powi(-100));
        set_grad(&w, &[2f64.powi(30); 3]);
        let outcome = scaler.step(&mut opt).unwrap();
        assert!(outcome.is_skipped().unwrap() && outcome.total_norm().is_none());
        assert_eq!(to_f64(&w), [1.0; 3]);
    });
}

/// Such a count can be loaded from a damaged file, for instance.
#[test]
fn a_step_count_at_its_maximum_stays_there() {
    let vs = VarStore::new(Device::Cpu);
    let w = vs.root().ones("w", &[2]);
    let mut opt = Sgd::default().build(&vs, 0.1).unwrap();
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    let mut taken = StepCounter::starting_at(u64::MAX);
    for _ in 0..2 {
        scaler.backward(&w.sum(Kind::Float)).unwrap();
        taken.record(&scaler.step(&mut opt).unwrap());
        scaler.update().unwrap();
    }
    assert_eq!(taken.count().unwrap(), u64::MAX);
}

#[test]
fn momentum_starts_with_the_first_step_that_was_taken() {
    for_each_device(|device| {
        for skipped in 0..4 {
            let w = leaf(&[1.0; 2], Kind::Float, device);
            let sgd = Sgd { momentum: 0.9, ..Default::default() };
            let mut opt = sgd.build(vec![("w", w.shallow_clone())], 0.1).unwrap();
            let mut scaler = GradScaler::new(device).unwrap();
            let mut step = |gradient| {
                set_grad(&w, &[gradient, 1.0]);
                scaler.step(&mut opt).unwrap();
                scaler.update().unwrap();
                let has_buffer = |state: &BTreeMap<_, _>| state.contains_key("momentum_buffer");
                opt.state_dict().unwrap().state.get("w").is_some_and(has_buffer)
            };
            for _ in 0..skipped {
                assert!(!step(INF), "a skipped step has started a buffer");
            }
            assert!(step(1.0), "after {skipped} skipped steps");
        }
    });
}

/// libtorch's backward pass can leave two gradients in one memory, where the kernels of a GPU unscale them.
#[test]
fn gradients_in_one_memory_are_unscaled_once_without_a_scaler() {
    for_each_device(|device| {
        let leaves = [(); 2].map(|()| leaf(&[1.0; 3], Kind::Float, device));
        let mut opt = Sgd::default().build(&leaves, 1.0).unwrap();
        ((leaves[0].unsqueeze(0) + leaves[1].unsqueeze(0)) * 24.0).sum(None).backward();
        let scale = Tensor::from(8f32).to_device(device);
        opt.update(&Step::default().with_grad_scale(&scale)).unwrap();
        assert_eq!(leaves.each_ref().map(to_f64), [(); 2].map(|()| vec![-2.0; 3]));
    });
}

/// The norm of half-precision gradients is taken in f32 if there are master weights.
#[test]
fn a_step_that_fails_after_the_norm_was_taken_gives_gradients_their_dtype_back() {
    for_each_device(|device| {
        let leaves = [(); 2].map(|()| leaf(&[1.0; 3], Kind::BFloat16, device));
        let [a, b] = &leaves;
        let masters = Sgd::default().master_weights(MasterWeights::Float);
        let mut opt = masters.build(&leaves, 1.0).unwrap();
        let mut scaler = scaler(device, 8.0);
        scaler.backward(&(a * 3.0 + b * 4.0).sum(Kind::Float)).unwrap();
        let own = b.detach().copy();
        no_grad(|| b.shallow_clone().set_data(&a.detach()));
        let refused = scaler.step_clip_norm(&mut opt, 1.0);
        assert_refused!(refused, Error::Optimizer(OptimizerError::SharedMemory { .. }));
        for (leaf, scaled) in leaves.iter().zip([24.0, 32.0]) {
            assert_eq!(leaf.grad().kind(), Kind::BFloat16);
            assert_eq!(to_f64(&leaf.grad()), [scaled; 3]);
        }
        no_grad(|| b.shallow_clone().set_data(&own));
        assert!(scaler.step_clip_norm(&mut opt, INF).unwrap().is_stepped().unwrap());
        assert_eq!(leaves.each_ref().map(to_f64), [vec![-2.0; 3], vec![-3.0; 3]]);
    });
}
