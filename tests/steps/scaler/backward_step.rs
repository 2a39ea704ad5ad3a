//! A whole iteration in one call: the same as its four calls.

use tch::nn::OptimizerConfig;
use tch::{Device, Kind, Tensor, nn};
use tch_amp::optim::{AdamW, AmpOptimizer, MasterWeights, Sgd};
use tch_amp::scaler::{ScalerError, StepCounter, StepOutcome};
use tch_amp::schedule::ExponentialLr;
use tch_amp::{Error, GradScaler};

use crate::scaler::{INF, loss, model, scaler};
use testkit::for_each_device;
use testkit::rng::Rng;
use testkit::tensors::leaf;

#[derive(Clone, Copy, Debug)]
enum Clip {
    No,
    Norm,
    Value,
}

const CLIPS: [Clip; 3] = [Clip::No, Clip::Norm, Clip::Value];

/// The weights, the scale, and what the steps did, after some iterations of which a few overflow. A gradient is left
/// over before the first one.
fn trained(
    w: &Tensor,
    opt: &mut dyn AmpOptimizer,
    zero_grad: impl Fn(&mut dyn AmpOptimizer),
    clip: Clip,
    in_one: bool,
) -> (Tensor, f64, Vec<bool>) {
    let mut scaler = scaler(w.device());
    let mut rng = Rng::new(5);
    loss(w, &[1e4; 3]).backward();
    let mut step = |values: &[f64]| -> StepOutcome {
        let loss = loss(w, values);
        if in_one {
            return match clip {
                Clip::No => scaler.backward_step(opt, &loss),
                Clip::Norm => scaler.backward_step_clip_norm(opt, &loss, 1.0),
                Clip::Value => scaler.backward_step_clip_value(opt, &loss, 0.7),
            }
            .unwrap();
        }
        zero_grad(opt);
        scaler.backward(&loss).unwrap();
        let outcome = match clip {
            Clip::No => scaler.step(opt),
            Clip::Norm => scaler.step_clip_norm(opt, 1.0),
            Clip::Value => scaler.step_clip_value(opt, 0.7),
        };
        scaler.update().unwrap();
        outcome.unwrap()
    };
    let stepped = (0..12).map(|_| {
        let bad = rng.one_in(4);
        let values: Vec<f64> = (0..3).map(|_| rng.below(100) as f64 / 20.0 - 2.5).collect();
        step(&if bad { vec![INF; 3] } else { values }).is_stepped().unwrap()
    });
    let stepped = stepped.collect();
    (w.detach().copy(), scaler.get_scale().unwrap(), stepped)
}

#[test]
fn one_call_does_what_the_four_calls_do() {
    for_each_device(|device| {
        for clip in CLIPS {
            let tchs = |in_one| {
                let (_vs, w, mut opt) = model(device);
                let names = |_: &mut dyn AmpOptimizer| w.shallow_clone().zero_grad();
                trained(&w, &mut opt, names, clip, in_one)
            };
            let fused = |kind, masters, in_one| {
                let w = leaf(&[1.0, -2.0, 3.0], kind, device);
                let builder = AdamW::default().master_weights(masters);
                let mut opt = builder.build(&[w.shallow_clone()], 0.1).unwrap();
                let drop = |_: &mut dyn AmpOptimizer| w.shallow_clone().zero_grad();
                trained(&w, &mut opt, drop, clip, in_one)
            };
            let runs = [
                [tchs(true), tchs(false)],
                [true, false].map(|in_one| fused(Kind::Float, MasterWeights::None, in_one)),
                [true, false].map(|in_one| fused(Kind::BFloat16, MasterWeights::Float, in_one)),
            ];
            for (i, [one, four]) in runs.iter().enumerate() {
                assert_eq!(one.0, four.0, "{clip:?}, optimizer {i}");
                assert_eq!((one.1, &one.2), (four.1, &four.2), "{clip:?}, optimizer {i}");
                assert!(one.2.contains(&true) && one.2.contains(&false));
            }
        }
    });
}

#[test]
fn a_loss_or_a_limit_that_is_refused_leaves_the_gradients() {
    for_each_device(|device| {
        let (_vs, w, mut opt) = model(device);
        let mut scaler = scaler(device);
        loss(&w, &[1.0, 2.0, 3.0]).backward();
        let before = w.grad().copy();
        let good = loss(&w, &[1.0; 3]);
        for limit in [-1.0, f64::NAN] {
            let norm = scaler.backward_step_clip_norm(&mut opt, &good, limit);
            let value = scaler.backward_step_clip_value(&mut opt, &good, limit);
            for refused in [norm, value] {
                assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
            }
        }
        let counts = Tensor::from_slice(&[3i64]).sum(None).to_device(device);
        scaler.backward_step(&mut opt, &counts).unwrap_err();
        assert_eq!(w.grad(), before);
        scaler.backward_step(&mut opt, &good).unwrap();
        assert_eq!(w, Tensor::zeros([3], (Kind::Float, device)));
    });
}

/// Two optimizers, each of one weight of 1: a fused one and one of tch's.
fn two(device: Device) -> [(Tensor, Box<dyn AmpOptimizer>); 2] {
    let w = leaf(&[1.0], Kind::Float, device);
    let fused = Sgd::default().build(&[w.shallow_clone()], 1.0).unwrap();
    let vs = nn::VarStore::new(device);
    let v = vs.root().ones("v", &[1]);
    let host = nn::Sgd::default().build(&vs, 1.0).unwrap();
    [(w, Box::new(fused)), (v, Box::new(host))]
}

/// The step that is due would divide by the scale a second time, since nothing would remember the first.
#[test]
fn an_optimizer_that_was_unscaled_is_stepped_before_another_ends_the_iteration() {
    for_each_device(|device| {
        for swapped in [false, true] {
            for clip in CLIPS {
                let [mut one, mut other] = two(device);
                if swapped {
                    std::mem::swap(&mut one, &mut other);
                }
                let (w, first) = (&one.0, &mut *one.1);
                let (v, second) = (&other.0, &mut *other.1);
                let mut scaler = scaler(device);
                scaler.backward(&loss(w, &[0.25])).unwrap();
                scaler.unscale_(first).unwrap();
                let ended = |scaler: &mut GradScaler, opt: &mut dyn AmpOptimizer, w: &Tensor| {
                    let loss = loss(w, &[0.5]);
                    match clip {
                        Clip::No => scaler.backward_step(opt, &loss),
                        Clip::Norm => scaler.backward_step_clip_norm(opt, &loss, 1.0),
                        Clip::Value => scaler.backward_step_clip_value(opt, &loss, 1.0),
                    }
                };
                let due =
                    |result| matches!(result, Err(Error::Scaler(ScalerError::StepDue { .. })));
                // Not of itself either, and nothing changes.
                assert!(due(ended(&mut scaler, first, w)));
                assert!(due(ended(&mut scaler, second, v)));
                assert!(!v.grad().defined());
                assert_eq!(w.grad().double_value(&[0]), 0.25);
                // Both pieces of the error's advice work.
                assert!(scaler.step(first).unwrap().is_stepped().unwrap());
                assert_eq!(w.double_value(&[0]), 0.75);
                assert!(ended(&mut scaler, second, v).unwrap().is_stepped().unwrap());
                assert_eq!(v.double_value(&[0]), 0.5);
                scaler.backward(&loss(w, &[0.25])).unwrap();
                drop(scaler.unscale(first).unwrap());
                assert!(due(ended(&mut scaler, second, v)));
                scaler.abandon(first).unwrap();
                assert!(ended(&mut scaler, second, v).unwrap().is_stepped().unwrap());
                assert!(ended(&mut scaler, first, w).unwrap().is_stepped().unwrap());
                assert_eq!((w.double_value(&[0]), v.double_value(&[0])), (0.25, 0.0));
            }
        }
    });
}

#[test]
fn one_outcome_serves_a_schedule_and_a_counter() {
    for_each_device(|device| {
        let w = leaf(&[1.0; 3], Kind::Float, device);
        let mut opt = Sgd::default().build(&[w.shallow_clone()], 1.0).unwrap();
        let mut scaler = GradScaler::new(device).unwrap();
        let mut schedule = ExponentialLr { gamma: 0.5 }.build(&mut opt).unwrap();
        let mut counter = StepCounter::default();
        for factor in [1.0, INF, 1.0] {
            let outcome = scaler.backward_step(&mut opt, &(&w * factor).sum(None)).unwrap();
            let clone = outcome.clone();
            schedule.step(&mut opt, &outcome).unwrap();
            counter.record(&clone);
            drop(outcome);
            assert_eq!(clone.is_skipped().unwrap(), factor == INF);
        }
        let steps = (counter.count().unwrap(), counter.skipped().unwrap(), counter.pending());
        assert_eq!(steps, (2, 1, 0));
        // Reads the last answer, which the schedule shares.
        schedule.advance(&mut opt).unwrap();
        assert_eq!((schedule.steps(), schedule.skipped(), schedule.pending()), (3, 1, 0));
    });
}

#[test]
fn a_disabled_scaler_trains_as_well() {
    let (_vs, w, mut opt) = model(Device::Cpu);
    let outcome = GradScaler::disabled().backward_step(&mut opt, &loss(&w, &[1.0; 3])).unwrap();
    assert!(outcome.is_stepped().unwrap());
    assert_eq!(w, Tensor::zeros([3], (Kind::Float, Device::Cpu)));
    let vs = nn::VarStore::new(Device::Cpu);
    let unused = vs.root().ones("unused", &[1]);
    let mut other = nn::Sgd::default().build(&vs, 1.0).unwrap();
    // PyTorch's `update` fails, too, when no step had a gradient.
    let mut scaler = scaler(Device::Cpu);
    scaler.backward_step(&mut other, &loss(&w, &[1.0; 3])).unwrap_err();
    assert_eq!(unused, Tensor::ones([1], (Kind::Float, Device::Cpu)));
}
