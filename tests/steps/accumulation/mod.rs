//! Several backward passes for one step: the gradients of the concatenated batch.

mod resumed;

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::accumulation::Accumulation;
use tch_amp::optim::{Optimizer, Sgd};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{GradScaler, Result};

use testkit::optimizers::scaler;
use testkit::rng::Rng;
use testkit::tensors::leaf;
use testkit::{assert_says, to_f64};

fn gradients(vs: &VarStore) -> Vec<Vec<f64>> {
    vs.trainable_variables().iter().map(|w| to_f64(&w.grad())).collect()
}

/// Runs with micro-batches of these sizes, and returns the gradients of the window and of the concatenated batch, both
/// scaled.
fn both(kind: Kind, sizes: &[i64], xs: &Tensor, ys: &Tensor) -> [Vec<Vec<f64>>; 2] {
    let run = |sizes: &[i64]| {
        tch::manual_seed(1);
        let mut vs = VarStore::new(Device::Cpu);
        let net = nn::linear(vs.root(), 4, 2, Default::default());
        vs.set_kind(kind);
        let mut scaler = scaler(Device::Cpu, 8.0);
        let weights: Vec<_> = sizes.iter().map(|size| *size as f64).collect();
        let mut window = Accumulation::of_weights(&weights).unwrap();
        let parts = xs.split_with_sizes(sizes, 0).into_iter().zip(ys.split_with_sizes(sizes, 0));
        for (i, (xs, ys)) in parts.enumerate() {
            assert_eq!(window.is_last(), i + 1 == sizes.len());
            let loss = net.forward(&xs.to_kind(kind)).mse_loss(&ys.to_kind(kind), Reduction::Mean);
            window.backward(&mut scaler, &loss).unwrap();
        }
        assert!(window.is_complete());
        gradients(&vs)
    };
    [run(sizes), run(&[sizes.iter().sum()])]
}

#[test]
fn a_window_has_the_gradients_of_the_concatenated_batch() {
    let mut rng = Rng::new(6);
    for case in 0..30 {
        let kind = *rng.pick(&[Kind::Float, Kind::Double, Kind::BFloat16]);
        let sizes: Vec<_> = (0..1 + rng.below(5)).map(|_| 1 + rng.below(9) as i64).collect();
        let total: i64 = sizes.iter().sum();
        let xs = Tensor::randn([total, 4], (Kind::Double, Device::Cpu));
        let ys = Tensor::randn([total, 2], (Kind::Double, Device::Cpu));
        let [window, whole] = both(kind, &sizes, &xs, &ys);
        // Each of at most 45 rows and 5 sums is rounded a few times, from numbers of up to some tens.
        let tolerance = 64.0
            * 16.0
            * match kind {
                Kind::Double => 2f64.powi(-52),
                Kind::Float => 2f64.powi(-23),
                _ => 2f64.powi(-11),
            };
        for (one, other) in window.iter().flatten().zip(whole.iter().flatten()) {
            assert!((one - other).abs() <= tolerance, "case {case}, {kind:?}: {one}, {other}");
        }
    }
}

#[test]
fn exact_arithmetic_has_the_same_bits() {
    let xs = Tensor::arange(32, (Kind::Double, Device::Cpu)).view([8, 4]) / 8.0 - 2.0;
    let ys = Tensor::zeros([8, 2], (Kind::Double, Device::Cpu));
    for sizes in [&[4, 4][..], &[2, 2, 4], &[1, 1, 2, 4], &[4, 2, 2]] {
        let run = |sizes: &[i64]| {
            let vs = VarStore::new(Device::Cpu);
            let w = vs.root().var("w", &[4, 2], nn::Init::Const(0.5));
            let mut scaler = GradScaler::new(Device::Cpu).unwrap();
            let weights: Vec<_> = sizes.iter().map(|size| *size as f64).collect();
            let mut window = Accumulation::of_weights(weights).unwrap();
            let parts =
                xs.split_with_sizes(sizes, 0).into_iter().zip(ys.split_with_sizes(sizes, 0));
            for (xs, ys) in parts {
                let errors = xs.to_kind(Kind::Float).matmul(&w) - ys.to_kind(Kind::Float);
                window.backward(&mut scaler, &errors.square().mean(Kind::Float)).unwrap();
            }
            gradients(&vs)
        };
        assert_eq!(run(sizes), run(&[8]), "{sizes:?}");
    }
}

/// Accumulates the gradients of these factors with their weights, and returns the gradient and what was dropped.
fn dropping(kind: Kind, batches: &[(f64, f64)]) -> (f64, Vec<usize>, bool) {
    let w = leaf(&[1.0, 1.0], kind, Device::Cpu);
    let mut opt = Sgd::default().build(&[w.shallow_clone()], 1.0).unwrap();
    let config =
        GradScalerConfig { init_scale: 4.0, allow_fp16_gradients: true, ..Default::default() };
    let mut scaler = config.build(Device::Cpu).unwrap();
    let weights: Vec<_> = batches.iter().map(|(weight, _)| *weight).collect();
    let mut window = Accumulation::of_weights(weights).unwrap();
    for (_, factor) in batches {
        let loss = (&w * *factor).sum(Kind::Float);
        window.backward_or_drop(&mut scaler, &opt, &loss).unwrap();
    }
    let gradient = w.grad().double_value(&[0]) / 4.0;
    let taken = scaler.step(&mut opt).unwrap().is_stepped().unwrap();
    scaler.update().unwrap();
    (gradient, window.dropped().unwrap(), taken)
}

#[test]
fn a_micro_batch_that_is_not_finite_is_left_out() {
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
        let none = dropping(kind, &[(1.0, 2.0), (3.0, 4.0)]);
        assert_eq!(none, (3.5, vec![], true), "{kind:?}");
        for bad in [f64::INFINITY, f64::NAN] {
            // The others alone: 1 · 2 + 3 · 4 over 4, wherever the bad one is.
            for place in 0..3 {
                let mut batches = vec![(1.0, 2.0), (3.0, 4.0)];
                batches.insert(place, (4.0, bad));
                assert_eq!(dropping(kind, &batches), (3.5, vec![place], true), "{kind:?}, {bad}");
            }
            let (gradient, dropped, taken) = dropping(kind, &[(1.0, bad), (2.0, bad)]);
            assert!(!gradient.is_finite() && !taken, "{kind:?}: {gradient}");
            assert_eq!(dropped, [0, 1]);
        }
    }
}

#[test]
fn what_a_window_cannot_take_is_refused() {
    for weights in [&[][..], &[0.0, 0.0], &[1.0, -1.0], &[f64::NAN], &[f64::INFINITY]] {
        Accumulation::of_weights(weights).unwrap_err();
    }
    Accumulation::of_equal(0).unwrap_err();
    let w = leaf(&[1.0, 1.0], Kind::Float, Device::Cpu);
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    let mut window = Accumulation::of_equal(2).unwrap();
    assert_says(window.backward(&mut scaler, &w), "must be one number");
    assert_says(window.weigh(&Tensor::from(1i64)), "floating-point");
    for _ in 0..2 {
        window.backward(&mut scaler, &w.sum(Kind::Float)).unwrap();
    }
    assert_says(window.backward(&mut scaler, &w.sum(Kind::Float)), "begin a new one");
}

#[test]
fn a_failed_backward_pass_keeps_what_was_accumulated() {
    type Take = fn(&mut Accumulation, &mut GradScaler, &Optimizer, &Tensor) -> Result<()>;
    let ways: [Take; 3] = [
        |window, scaler, _, loss| window.backward(scaler, loss),
        |window, scaler, opt, loss| window.backward_or_drop(scaler, opt, loss),
        |window, scaler, _, loss| scaler.backward(&window.weigh(loss)?),
    ];
    for (way, take) in ways.into_iter().enumerate() {
        let w = leaf(&[1.0, 1.0], Kind::Float, Device::Cpu);
        let opt = Sgd::default().build(&[w.shallow_clone()], 1.0).unwrap();
        let mut scaler = GradScaler::disabled();
        // Shares of 1/4 and 3/4, so that a micro-batch in the wrong place has another weight.
        let mut window = Accumulation::of_weights([1.0, 3.0]).unwrap();
        let mut take =
            |window: &mut Accumulation, loss: &Tensor| take(window, &mut scaler, &opt, loss);
        let state = |window: &Accumulation| {
            (window.taken(), window.is_last(), window.is_complete(), window.dropped().unwrap())
        };
        assert_eq!(state(&window), (0, false, false, vec![]), "way {way}");
        take(&mut window, &(&w * 2.0).sum(Kind::Float)).unwrap();
        assert_eq!(state(&window), (1, true, false, vec![]), "way {way}");
        // One loss cannot be weighed, and one has no graph, which only a call that runs the pass itself can notice.
        take(&mut window, &w).unwrap_err();
        if way < 2 {
            take(&mut window, &Tensor::from(1f32)).unwrap_err();
        }
        assert_eq!(state(&window), (1, true, false, vec![]), "way {way}");
        assert_eq!(to_f64(&w.grad()), [0.5, 0.5], "way {way}");
        take(&mut window, &(&w * 4.0).sum(Kind::Float)).unwrap();
        assert_eq!(state(&window), (2, false, true, vec![]), "way {way}");
        assert_eq!(to_f64(&w.grad()), [3.5, 3.5], "way {way}");
    }
}

/// The weights of the others are right only if the window knows of all that may be left out.
#[test]
fn a_window_leaves_micro_batches_out_of_all_or_of_none() {
    let w = leaf(&[1.0, 1.0], Kind::Float, Device::Cpu);
    let opt = Sgd::default().build(&[w.shallow_clone()], 1.0).unwrap();
    let mut scaler = GradScaler::disabled();
    let loss = || w.sum(Kind::Float);
    let mut window = Accumulation::of_equal(3).unwrap();
    window.backward(&mut scaler, &loss()).unwrap();
    let dropping = window.backward_or_drop(&mut scaler, &opt, &loss());
    assert_says(dropping, "for all micro-batches of a window or for none");
    window.backward(&mut scaler, &loss()).unwrap();
    let mut window = Accumulation::of_equal(3).unwrap();
    window.backward_or_drop(&mut scaler, &opt, &loss()).unwrap();
    window.backward(&mut scaler, &loss()).unwrap_err();
    window.weigh(&loss()).unwrap_err();
    assert_eq!(window.taken(), 1);
    window.backward_or_drop(&mut scaler, &opt, &loss()).unwrap();
}
