//! The weight cache: what it must not do across dtypes, `no_grad`, updates and regions.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use rstest::rstest;
use tch::nn::OptimizerConfig;
use tch::{Device, Kind, Tensor, nn, no_grad};
use tch_amp::autocast::{AutocastGuard, AutocastState, clear_autocast_cache};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::optim::{AmpOptimizer, Parameters, Step};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Autocast, GradScaler, optim};

use crate::autocast::{add_one, sum_of_product, weight};
use testkit::files::Folder;
use testkit::{for_each_device, resident_bytes, to_f64};

/// The premise of the tests below, which could not fail without it.
#[test]
fn libtorch_serves_a_stale_weight_inside_a_region() {
    let mut w = weight(Device::Cpu);
    let _guard = AutocastGuard::new(Device::Cpu).unwrap();
    assert_eq!(sum_of_product(&w), 8.0);
    add_one(&mut w);
    assert_eq!(
        sum_of_product(&w),
        8.0,
        "libtorch checks the version now: update the documentation"
    );
    clear_autocast_cache();
    assert_eq!(sum_of_product(&w), 16.0);
}

#[test]
fn a_region_with_the_cache_off_uses_the_updated_weight() {
    for_each_device(|device| {
        let mut w = weight(device);
        let _guard = Autocast::new(device).cache(false).enter().unwrap();
        assert_eq!(sum_of_product(&w), 8.0);
        add_one(&mut w);
        assert_eq!(sum_of_product(&w), 16.0);
    });
}

#[test]
fn leaving_the_outermost_region_clears_the_cache() {
    for_each_device(|device| {
        let mut w = weight(device);
        for round in 1..4 {
            let _guard = AutocastGuard::new(device).unwrap();
            assert_eq!(sum_of_product(&w), 8.0 * f64::from(round));
            add_one(&mut w);
        }
    });
}

#[rstest]
#[case::enabled(true)]
#[case::disabled(false)]
fn a_step_inside_a_region_forgets_the_casts(#[case] enabled: bool) {
    for_each_device(|device| {
        let vs = nn::VarStore::new(device);
        let w = vs.root().ones("w", &[2, 2]);
        let mut opt = nn::Sgd::default().build(&vs, 1.0).unwrap();
        let config = GradScalerConfig { enabled, ..Default::default() };
        let mut scaler = config.build(device).unwrap();
        let _guard = AutocastGuard::new(device).unwrap();
        assert_eq!(sum_of_product(&w), 8.0);
        scaler.backward(&w.sum(Kind::Float)).unwrap();
        assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
        assert_eq!(sum_of_product(&w), 0.0, "every weight went from 1 to 0");
    });
}

#[test]
fn a_step_of_a_fused_optimizer_inside_a_region_clears_the_cache() {
    for_each_device(|device| {
        let w = weight(device);
        let mut opt = optim::Sgd::default().build(vec![w.shallow_clone()], 1.0).unwrap();
        let mut scaler = GradScaler::new(device).unwrap();
        let _guard = AutocastGuard::new(device).unwrap();
        for (step, want) in [8.0, 0.0, -8.0, -16.0].into_iter().enumerate() {
            assert_eq!(sum_of_product(&w), want, "after {step} steps");
            opt.zero_grad().unwrap();
            match step {
                0 => opt.backward_step(&w.sum(Kind::Float)).unwrap(),
                1 => {
                    w.sum(Kind::Float).backward();
                    opt.step().unwrap();
                }
                _ => {
                    scaler.backward(&w.sum(Kind::Float)).unwrap();
                    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
                    scaler.update().unwrap();
                }
            }
        }
    });
}

#[test]
fn a_restore_inside_a_region_clears_the_cache() {
    for_each_device(|device| {
        let vs = nn::VarStore::new(device);
        let mut w = vs.root().ones("w", &[2, 2]);
        let mut checkpoint = Checkpoint::new();
        checkpoint.add("model", &vs).unwrap();
        let (_folder, path) = Folder::with("model.safetensors");
        checkpoint.save(&path).unwrap();
        let checkpoint = Checkpoint::load(&path).unwrap();
        add_one(&mut w);
        let _guard = AutocastGuard::new(device).unwrap();
        assert_eq!(sum_of_product(&w), 16.0);
        checkpoint.restore().add("model", &vs).apply().unwrap();
        assert_eq!(sum_of_product(&w), 8.0);
    });
}

/// An optimizer that uses its weight before it changes it, as one with a closure does.
struct Evaluates([Tensor; 1]);

impl AmpOptimizer for Evaluates {
    fn parameters(&self) -> Parameters<'_> {
        self.0.as_slice().into()
    }

    fn update(&mut self, _: &Step<'_>) -> tch_amp::Result<()> {
        assert_eq!(sum_of_product(&self.0[0]), 8.0);
        add_one(&mut self.0[0]);
        Ok(())
    }
}

#[test]
fn casts_that_a_step_makes_are_forgotten_after_it() {
    for_each_device(|device| {
        let w = weight(device);
        let mut scaler = GradScaler::new(device).unwrap();
        let _guard = AutocastGuard::new(device).unwrap();
        scaler.backward(&w.sum(Kind::Float)).unwrap();
        scaler.step(&mut Evaluates([w.shallow_clone()])).unwrap();
        assert_eq!(sum_of_product(&w), 16.0);
    });
}

/// An optimizer that changes its weight and then panics.
struct Panics {
    w: [Tensor; 1],
    scales: bool,
}

impl AmpOptimizer for Panics {
    fn parameters(&self) -> Parameters<'_> {
        self.w.as_slice().into()
    }

    fn update(&mut self, _: &Step<'_>) -> tch_amp::Result<()> {
        add_one(&mut self.w[0]);
        resume_unwind(Box::new("a planted panic"));
    }

    fn takes_scaled_gradients(&self) -> bool {
        self.scales
    }
}

#[rstest]
fn a_step_that_panics_inside_a_region_forgets_the_casts(
    #[values(false, true)] scales: bool,
    #[values(false, true)] enabled: bool,
) {
    for_each_device(|device| {
        let w = weight(device);
        let config = GradScalerConfig { enabled, ..Default::default() };
        let mut scaler = config.build(device).unwrap();
        let mut opt = Panics { w: [w.shallow_clone()], scales };
        let _guard = AutocastGuard::new(device).unwrap();
        assert_eq!(sum_of_product(&w), 8.0);
        scaler.backward(&w.sum(Kind::Float)).unwrap();
        assert!(catch_unwind(AssertUnwindSafe(|| scaler.step(&mut opt))).is_err());
        assert_eq!(sum_of_product(&w), 16.0);
    });
}

#[test]
fn a_nested_region_of_another_dtype_casts_again_in_both_directions() {
    for_each_device(|device| {
        let w = weight(device);
        let region = |dtype| Autocast::new(device).dtype(dtype);
        let product = || w.detach().ones_like().mm(&w).kind();
        let _outer = region(Kind::BFloat16).enter().unwrap();
        assert_eq!(product(), Kind::BFloat16);
        assert_eq!(region(Kind::Half).run(product).unwrap(), Kind::Half);
        assert_eq!(product(), Kind::BFloat16);
        // Through a disabled region, which hides the outer dtype.
        let hidden = region(Kind::Half).enabled(false);
        let inner = hidden.run(|| region(Kind::Half).run(product).unwrap()).unwrap();
        assert_eq!(inner, Kind::Half);
        assert_eq!(product(), Kind::BFloat16);
    });
}

#[test]
fn a_captured_state_of_another_dtype_casts_again() {
    for_each_device(|device| {
        let w = weight(device);
        let product = || w.detach().ones_like().mm(&w).kind();
        let half = Autocast::new(device).dtype(Kind::Half);
        let captured = half.run(|| AutocastState::current().unwrap()).unwrap();
        let _outer = Autocast::new(device).dtype(Kind::BFloat16).enter().unwrap();
        assert_eq!(product(), Kind::BFloat16);
        assert_eq!(captured.run(product).unwrap(), Kind::Half);
        assert_eq!(product(), Kind::BFloat16);
    });
}

#[test]
fn a_weight_first_used_under_no_grad_still_gets_its_gradient() {
    for_each_device(|device| {
        let w = weight(device);
        let _guard = AutocastGuard::new(device).unwrap();
        let _seen = no_grad(|| sum_of_product(&w));
        w.detach().ones_like().mm(&w).sum(Kind::Float).backward();
        assert_eq!(to_f64(&w.grad()), [2.0; 4]);
    });
}

#[test]
fn weights_used_in_regions_are_freed() {
    // One row: the weight is what is cast, and the product takes no time where bf16 is emulated.
    let row = Tensor::ones([1, 512], (Kind::Float, Device::Cpu));
    let cycle = |rounds| {
        for _ in 0..rounds {
            let w = Tensor::ones([512, 512], (Kind::Float, Device::Cpu)).set_requires_grad(true);
            let region = Autocast::new(Device::Cpu);
            drop(region.run(|| row.mm(&w).sum(Kind::Float)).unwrap());
        }
    };
    cycle(20);
    let before = resident_bytes();
    cycle(100);
    if let Some((before, after)) = before.zip(resident_bytes()) {
        // A 512 KiB cast kept for each weight would take 50 MiB.
        assert!(after.saturating_sub(before) < 8 << 20, "{before} -> {after}");
    }
}

/// The gradient of a weight that a region uses twice, while `between` runs on another thread between the two uses.
fn gradient_of_two_uses(region: Autocast, between: fn()) -> Tensor {
    tch::manual_seed(0);
    let random = |size: [i64; 2]| Tensor::randn(size, (Kind::Float, Device::Cpu));
    let w = random([16, 16]).set_requires_grad(true);
    let (first, second) = (random([32, 16]), random([32, 16]));
    let loss = region.run(|| {
        let ys = first.mm(&w);
        std::thread::spawn(between).join().unwrap();
        (ys + second.mm(&w)).to_kind(Kind::Float).square().sum(Kind::Float)
    });
    loss.unwrap().backward();
    w.grad()
}

/// As in libtorch: with one cast the two gradients of the weight are added in half precision, and with two in f32.
#[test]
fn a_region_or_a_step_that_ends_on_another_thread_empties_the_cache_of_all() {
    let cached = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
    let uncached = cached.cache(false);
    let once = gradient_of_two_uses(cached, || ());
    let twice = gradient_of_two_uses(uncached, || ());
    assert_ne!(once, twice);
    let ends: [fn(); 3] = [
        || drop(AutocastGuard::new(Device::Cpu).unwrap()),
        || drop(Autocast::new(Device::Cpu).dtype(Kind::Half).cache(false).enter().unwrap()),
        || {
            let w = weight(Device::Cpu);
            let mut opt = optim::Sgd::default().build(&[w.shallow_clone()], 0.1).unwrap();
            w.sum(Kind::Float).backward();
            opt.step().unwrap();
        },
    ];
    for end in ends {
        assert_eq!(gradient_of_two_uses(cached, end), twice);
        assert_eq!(gradient_of_two_uses(uncached, end), twice);
    }
}
