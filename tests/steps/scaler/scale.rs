//! How the scale grows, backs off and stays within its bounds.

use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::optim::{Adagrad, AdamW, Algorithm, MasterWeights, Muon, Optimizer, RmsProp, Sgd};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::scaler::ScalerError::{ScaleAtMinimum, TooManySkips};
use tch_amp::{Error, GradScaler};

use crate::scaler::{Descent, INF, NAN, iterate, loss, model, step_and_update, with_scale};
use testkit::simulation::let_answers_come;
use testkit::tensors::leaf;
use testkit::{assert_refused, for_each_device, to_f64};

/// A scale of 8 that grows after two iterations without an overflow.
fn small() -> GradScalerConfig {
    GradScalerConfig { growth_interval: 2, ..with_scale(8.0) }
}

/// Each has a name, options, iterations of which those with an exclamation mark overflow, and the scale after each.
#[test]
fn the_scale_changes_after_each_iteration_as_in_these_examples() {
    let bounded = GradScalerConfig { min_scale: 4.0, max_scale: 16.0, ..small() };
    let top = 2f64.powi(127);
    let highest = GradScalerConfig { growth_interval: 1, ..with_scale(top) };
    let hysteresis = |hysteresis| GradScalerConfig { hysteresis, ..small() };
    let both = GradScalerConfig {
        hysteresis: 2,
        consecutive_hysteresis: false,
        tolerance: 0.5,
        ..with_scale(8.0)
    };
    let examples: [(&str, GradScalerConfig, &str, &[f64]); 7] = [
        (
            "it grows after the interval and backs off at once",
            small(),
            "....!.!!..",
            &[8.0, 16.0, 16.0, 32.0, 16.0, 16.0, 8.0, 4.0, 4.0, 8.0],
        ),
        ("it stays below its upper bound", bounded, "......", &[8.0, 16.0, 16.0, 16.0, 16.0, 16.0]),
        ("it stays above its lower bound", bounded, "!!!!", &[4.0; 4]),
        ("growth stops before infinity", highest, "...", &[top; 3]),
        (
            "the hysteresis tolerates consecutive overflows",
            hysteresis(3),
            "!!.!!!!.!!",
            &[8.0, 8.0, 8.0, 8.0, 8.0, 4.0, 2.0, 2.0, 2.0, 2.0],
        ),
        (
            "a tolerated overflow resets the growth tracker",
            hysteresis(2),
            ".!..",
            &[8.0, 8.0, 8.0, 16.0],
        ),
        // The second overflow exhausts the hysteresis, and two of three iterations have overflowed.
        ("both options must be exhausted", both, ".!!..!", &[8.0, 8.0, 4.0, 4.0, 4.0, 4.0]),
    ];
    for_each_device(|device| {
        for (name, config, iterations, expected) in examples {
            let mut scaler = config.build(device).unwrap();
            for (overflow, expected) in iterations.chars().map(|c| c == '!').zip(expected) {
                iterate(&mut scaler, device, overflow).unwrap();
                assert_eq!(scaler.get_scale().unwrap(), *expected, "{name}");
            }
        }
    });
}

/// Each has a name, options, iterations of which those with an exclamation mark overflow, the error that ends each, and
/// the scale in the end: `m` says that the scale cannot sink, `s` that too many steps were skipped.
#[test]
fn a_limit_is_an_error_that_ends_the_iteration() {
    let skips = |limit, config| GradScalerConfig { max_consecutive_skips: Some(limit), ..config };
    let lowest = |init_scale, min_scale| GradScalerConfig { min_scale, ..with_scale(init_scale) };
    let strict = |config| GradScalerConfig { error_at_min_scale: true, ..config };
    let tolerant = GradScalerConfig { hysteresis: 2, growth_interval: 2, ..lowest(2.0, 1.0) };
    let examples: [(&str, GradScalerConfig, &str, &str, f32); 5] = [
        ("too many skips", skips(3, small()), "!!!.!", "..s..", 0.5),
        // Tolerated; backs off to 1; cannot back off; restores the hysteresis; tolerated; cannot back off; grows again.
        ("the smallest scale", strict(tolerant), "!!!.!!..", "..m..m..", 2.0),
        // As an f32, 0.1 is more than the f64 of that name.
        ("a smallest scale that is not an f32", strict(lowest(0.1, 0.1)), "!", "m", 0.1),
        (
            "the limit of skips takes precedence",
            skips(2, strict(lowest(1.0, 1.0))),
            "!!",
            "ms",
            1.0,
        ),
        ("it allows overflows at the smallest", skips(3, lowest(1.0, 1.0)), "!!!", "..s", 1.0),
    ];
    for_each_device(|device| {
        for (name, config, iterations, errors, scale_in_the_end) in examples {
            let mut scaler = config.build(device).unwrap();
            let mut end = |overflow| {
                let ended = iterate(&mut scaler, device, overflow);
                let now = scaler.get_scale().unwrap() as f32;
                match ended {
                    Ok(()) => '.',
                    Err(Error::Scaler(ScaleAtMinimum { scale })) if scale as f32 == now => 'm',
                    Err(Error::Scaler(TooManySkips { skips, limit, scale }))
                        if [Some(skips), Some(limit)] == [config.max_consecutive_skips; 2]
                            && scale as f32 == now =>
                    {
                        's'
                    }
                    other => panic!("{name}: {other:?}"),
                }
            };
            let found: String = iterations.chars().map(|c| end(c == '!')).collect();
            assert_eq!(found, errors, "{name}");
            assert_eq!(scaler.get_scale().unwrap(), f64::from(scale_in_the_end), "{name}");
        }
    });
}

#[test]
fn inexact_factors_round_like_libtorchs_kernel() {
    for_each_device(|device| {
        let config = GradScalerConfig { growth_factor: 1.37, backoff_factor: 0.3, ..small() };
        let mut scaler = config.build(device).unwrap();
        let (mut want, mut tracker) = (8.0f32, 0);
        for i in 0..60 {
            let overflow = i % 5 == 3;
            iterate(&mut scaler, device, overflow).unwrap();
            let factor = match (overflow, tracker) {
                (true, _) => 0.3,
                (false, 1) => 1.37,
                (false, _) => 1.0,
            };
            want = (f64::from(want) * factor) as f32;
            tracker = if overflow || tracker == 1 { 0 } else { tracker + 1 };
            assert_eq!(scaler.get_scale().unwrap(), f64::from(want), "iteration {i}");
            assert_eq!(scaler.get_growth_tracker().unwrap(), tracker);
        }
    });
}

/// The host's copy of the scale must equal the device's, and the result must not depend on which of them is read.
#[test]
fn the_scale_that_is_reported_is_the_scale_that_is_applied() {
    for_each_device(|device| {
        let mut scaler = GradScalerConfig { growth_factor: 1.7, ..small() }.build(device).unwrap();
        for i in 0..40 {
            iterate(&mut scaler, device, i % 7 == 5).unwrap();
            let applied = scaler.scale(&Tensor::from(1.0f32).to_device(device)).unwrap();
            assert_eq!(to_f64(&applied), [scaler.get_scale().unwrap()]);
        }
    });
}

#[test]
fn an_optimizer_that_was_unscaled_but_not_stepped_counts() {
    for_each_device(|device| {
        for (value, want) in [(1.0, (8.0, 1)), (NAN, (4.0, 0))] {
            let (_vs, w, mut opt) = model(device);
            let mut scaler = small().build(device).unwrap();
            loss(&w, &[value; 3]).backward();
            scaler.unscale_(&mut opt).unwrap();
            scaler.update().unwrap();
            let got = (scaler.get_scale().unwrap(), scaler.get_growth_tracker().unwrap());
            assert_eq!(got, want);
        }
    });
}

#[test]
fn two_hundred_overflows_do_not_turn_the_weights_into_nan() {
    for_each_device(|device| {
        let (_vs, w, mut opt) = model(device);
        let mut scaler = GradScaler::new(device).unwrap();
        for _ in 0..200 {
            opt.zero_grad();
            scaler.backward(&loss(&w, &[NAN; 3])).unwrap();
            assert!(scaler.step(&mut opt).unwrap().is_skipped().unwrap());
            scaler.update().unwrap();
        }
        assert_eq!(scaler.get_scale().unwrap(), f64::from(f32::MIN_POSITIVE));
        opt.zero_grad();
        // Exact at any scale: the gradient is the scale itself, which is a power of two.
        scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
        assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
        assert_eq!(to_f64(&w), [0.0; 3]);
    });
}

#[test]
fn a_finite_gradient_that_unscaling_makes_infinite_skips_the_step() {
    for_each_device(|device| {
        for size in [3, 70_000] {
            let w = Tensor::ones([size], (Kind::Float, device)).set_requires_grad(true);
            let mut opt = Descent::of([&w]);
            let mut scaler = with_scale(2f64.powi(-100)).build(device).unwrap();
            (&w * 2f64.powi(30)).sum(None).backward();
            assert!(scaler.step(&mut opt).unwrap().is_skipped().unwrap());
            assert_eq!((w.min().double_value(&[]), w.max().double_value(&[])), (1.0, 1.0));
        }
    });
}

/// Gradients in other layouts and dtypes are unscaled by other code.
#[test]
fn an_overflow_in_unscaling_is_found_in_every_layout() {
    for_each_device(|device| {
        let large = |count| Tensor::full([count], 1e38, (Kind::Float, device));
        let gradients = [
            large(4).slice(0, 0, 4, 2),
            large(2).to_kind(Kind::ComplexFloat),
            large(2).to_kind(Kind::ComplexFloat).conj(),
            large(2).to_kind(Kind::BFloat16),
        ];
        for gradient in gradients {
            let w = Tensor::ones([2], (gradient.kind(), device)).set_requires_grad(true);
            w.abs().sum(None).backward();
            no_grad(|| w.grad().set_data(&gradient));
            let mut opt = Descent::of([&w]);
            let mut scaler = with_scale(2f64.powi(-4)).build(device).unwrap();
            assert!(scaler.step(&mut opt).unwrap().is_skipped().unwrap(), "{gradient:?}");
            assert_eq!(to_f64(&w.abs()), [1.0; 2], "{gradient:?}");
        }
    });
}

#[test]
fn setting_the_scale_neither_counts_a_skip_nor_resets_the_count() {
    for_each_device(|device| {
        let config = GradScalerConfig { max_consecutive_skips: Some(2), ..Default::default() };
        let mut scaler = config.build(device).unwrap();
        iterate(&mut scaler, device, true).unwrap();
        scaler.update_with(8.0).unwrap();
        assert_eq!(scaler.state_dict().unwrap().consecutive_skips, Some(1));
        // Beyond the limit, every overflow is an error.
        for count in [2, 3] {
            let ended = iterate(&mut scaler, device, true);
            assert_refused!(ended, Error::Scaler(TooManySkips { skips, .. }) if skips == count);
        }
    });
}

/// After a fused step on a GPU, only the device has the scale and can tell whether unscaling enlarges the gradients.
#[test]
fn an_overflow_in_unscaling_is_found_even_if_the_scale_is_only_on_the_device() {
    for_each_device(|device| {
        let mut scaler = with_scale(2f64.powi(-100)).build(device).unwrap();
        let leaves = [(); 2].map(|()| leaf(&[1.0; 3], Kind::Float, device));
        let [fused, other] = &leaves;
        let mut opt = Sgd::default().build(vec![fused.shallow_clone()], 1.0).unwrap();
        scaler.backward(&loss(fused, &[1.0; 3])).unwrap();
        step_and_update(&mut scaler, &mut opt);
        loss(other, &[2f64.powi(30); 3]).backward();
        let outcome = scaler.step(&mut Descent::of([other])).unwrap();
        assert!(outcome.is_skipped().unwrap());
        assert_eq!(to_f64(other), [1.0; 3]);
    });
}

/// Fused steps are skipped on the device. After the first one the host does not know the scale of a GPU.
#[test]
fn a_fused_step_is_skipped_if_unscaling_alone_overflows() {
    for_each_device(|device| {
        let algorithms: [Algorithm; 5] = [
            Sgd { momentum: 0.9, ..Default::default() }.into(),
            AdamW::default().into(),
            Adagrad::default().into(),
            RmsProp::default().into(),
            Muon::default().into(),
        ];
        for algorithm in algorithms {
            for (kind, masters) in [
                (Kind::Float, MasterWeights::None),
                (Kind::BFloat16, MasterWeights::None),
                (Kind::BFloat16, MasterWeights::Float),
            ] {
                let w = Tensor::ones([2, 2], (kind, device)).set_requires_grad(true);
                let list = [w.shallow_clone()];
                let mut opt = algorithm.master_weights(masters).build(&list, 0.1).unwrap();
                let mut scaler = with_scale(1e-3).build(device).unwrap();
                let mut step = |scaler: &mut GradScaler, gradient: f64| {
                    opt.zero_grad().unwrap();
                    // Scaled as a backward pass leaves it.
                    (&w * gradient).sum(None).backward();
                    step_and_update(scaler, &mut opt)
                };
                assert!(step(&mut scaler, 1e-3).is_stepped().unwrap());
                let before = to_f64(&w.view(-1));
                // 9e37 is finite, and 9e40 is not.
                let skipped = step(&mut scaler, 9e37);
                assert_eq!(to_f64(&w.view(-1)), before, "{algorithm:?} {masters:?} {device:?}");
                assert!(skipped.is_skipped().unwrap(), "{algorithm:?} {masters:?} {device:?}");
                assert_eq!(scaler.get_scale().unwrap() as f32, 1e-3f32 * 0.5);
                assert!(step(&mut scaler, 1e-3).is_stepped().unwrap());
            }
        }
    });
}

/// A weight of ones, an SGD with fused steps, and a scaler. No step asks the host for an answer.
struct Unread {
    w: Tensor,
    opt: Optimizer,
    scaler: GradScaler,
}

impl Unread {
    fn new(scale: f64, device: Device) -> Self {
        let w = leaf(&[1.0; 3], Kind::Float, device);
        let opt = Sgd::default().build(&[w.shallow_clone()], 1e-3).unwrap();
        Self { w, opt, scaler: with_scale(scale).build(device).unwrap() }
    }

    /// Steps with a gradient that is scaled already.
    fn step(&mut self, gradient: f64) {
        self.opt.zero_grad().unwrap();
        // No number is copied from the host, which would let all answers come.
        (&self.w * gradient).sum(None).backward();
        self.scaler.step(&mut self.opt).unwrap();
        self.scaler.update().unwrap();
    }

    /// Reads the weights, which lets all answers come.
    fn weights(&self) -> Vec<f64> {
        to_f64(&self.w)
    }
}

/// Whether an earlier scale has arrived on the host or not, it may have backed off since.
#[test]
fn a_scale_that_backs_off_unread_is_known_to_enlarge() {
    for_each_device(|device| {
        for overflows in 2..6 {
            for arrives_after in 0..=overflows {
                let mut run = Unread::new(2.0, device);
                run.step(0.0);
                for overflow in 0..=overflows {
                    if overflow == arrives_after {
                        let_answers_come(device);
                    }
                    if overflow < overflows {
                        run.step(INF);
                    }
                }
                let scale = 2f64.powi(1 - overflows);
                run.step(1.25 * f64::from(f32::MAX) * scale);
                assert_eq!(run.weights(), [1.0; 3], "{overflows} {arrives_after} on {device:?}");
                assert_eq!(run.scaler.get_scale().unwrap(), scale / 2.0);
            }
        }
    });
}

#[test]
fn a_scale_that_is_set_while_the_last_one_is_unread_is_known_to_enlarge() {
    let changes: [fn(&mut Unread, Device); 3] = [
        |run, _| run.scaler.update_with(1e-3).unwrap(),
        |run, on| run.scaler.update_with_tensor(&Tensor::from(1e-3f32).to_device(on)).unwrap(),
        |run, _| {
            let mut state = run.scaler.state_dict().unwrap();
            run.step(0.0);
            state.scale = Some(1e-3);
            run.scaler.load_state_dict(&state).unwrap();
        },
    ];
    for_each_device(|device| {
        for (way, change) in changes.iter().enumerate() {
            let mut run = Unread::new(65536.0, device);
            run.step(0.0);
            change(&mut run, device);
            run.step(9e37);
            assert_eq!(run.weights(), [1.0; 3], "way {way}");
        }
    });
}

/// Kernels divide by the scale or multiply by its reciprocal, and only one of the two results may be infinite.
#[test]
fn a_gradient_that_only_dividing_makes_infinite_is_skipped() {
    let finite_product = |scale: f32, gradient: f32| gradient * (1.0 / scale);
    let near = |scale: f32| {
        let most = f32::MAX * scale;
        (0..8).map(move |ulps| (scale, f32::from_bits(most.to_bits() + ulps)))
    };
    let mut differing =
        (1..500).map(|i| 1.0 / (i as f32 + 0.37)).flat_map(near).filter(|&(scale, gradient)| {
            (gradient / scale).is_infinite() && finite_product(scale, gradient).is_finite()
        });
    let (scale, gradient) = differing.next().unwrap();
    for_each_device(|device| {
        let mut run = Unread::new(scale.into(), device);
        run.step(0.0);
        run.step(gradient.into());
        let after = run.weights();
        assert!(after.iter().all(|w| w.is_finite()), "{after:?} {scale} {gradient} {device:?}");
    });
}
