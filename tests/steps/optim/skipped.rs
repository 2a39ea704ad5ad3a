//! A skipped step changes nothing.

use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::GradScaler;
use tch_amp::optim::{Algorithm, AmpOptimizer as _, Optimizer, ParamGroup, Sgd, Step};

use crate::optim::{INF, NAN, algorithms, build, set_grad};
use testkit::bits::bits;
use testkit::for_each_device;
use testkit::optimizers::scaler;
use testkit::tensors::leaf;

/// The bits of everything that a step can change; empty for a state that is still unused.
fn all(opt: &mut Optimizer) -> Vec<Vec<u8>> {
    let mut out: Vec<_> = opt.trainable_variables().iter().map(bits).collect();
    let saved = opt.state_dict().unwrap();
    for entries in saved.state.values() {
        // Lion counts no steps, and starts with zeros.
        let used = match entries.get("step") {
            Some(step) => step.double_value(&[]) > 0.0,
            None => entries.values().any(|tensor| bool::try_from(tensor.any()).unwrap()),
        };
        out.extend(entries.values().filter(|_| used).map(bits));
    }
    out
}

fn training(algorithm: Algorithm, device: Device) -> (Tensor, Optimizer, GradScaler) {
    let w = leaf(&[1.0, -2.0, 3.0], Kind::Float, device);
    let opt = build(algorithm, vec![w.shallow_clone()], 0.1);
    (w, opt, scaler(device, 8.0))
}

/// Trains on one batch, whose gradient is multiplied by the scaler's scale.
fn train(w: &Tensor, opt: &mut Optimizer, scaler: &mut GradScaler, gradient: [f64; 3]) -> bool {
    let scale = scaler.get_scale().unwrap();
    set_grad(w, &gradient.map(|g| g * scale));
    let outcome = scaler.step(opt).unwrap();
    scaler.update().unwrap();
    outcome.is_stepped().unwrap()
}

#[test]
fn training_with_a_skipped_batch_equals_training_without_it() {
    for_each_device(|device| {
        for algorithm in algorithms() {
            for place in 0..3 {
                let (w, mut opt, mut scaler) = training(algorithm, device);
                let (v, mut other, mut others) = training(algorithm, device);
                for step in 0..4 {
                    if step == place {
                        let before = all(&mut opt);
                        let bad = [INF, -INF, NAN][place];
                        assert!(!train(&w, &mut opt, &mut scaler, [1.0, bad, 0.0]));
                        assert_eq!(all(&mut opt), before, "{algorithm:?}, step {step}");
                    }
                    let gradient = [0.5, -0.25 * f64::from(step as u8), 1.0];
                    assert!(train(&w, &mut opt, &mut scaler, gradient));
                    assert!(train(&v, &mut other, &mut others, gradient));
                }
                assert_eq!(all(&mut opt), all(&mut other), "{algorithm:?}, skipped before {place}");
            }
        }
    });
}

#[test]
fn after_two_skipped_first_steps_the_third_acts_as_the_first() {
    for_each_device(|device| {
        for algorithm in algorithms() {
            let (w, mut opt, mut scaler) = training(algorithm, device);
            let (v, mut other, mut others) = training(algorithm, device);
            assert!(!train(&w, &mut opt, &mut scaler, [NAN; 3]));
            assert!(!train(&w, &mut opt, &mut scaler, [INF; 3]));
            assert!(train(&w, &mut opt, &mut scaler, [1.0; 3]));
            assert!(train(&v, &mut other, &mut others, [1.0; 3]));
            assert_eq!(all(&mut opt), all(&mut other), "{algorithm:?}");
        }
    });
}

#[test]
fn a_step_after_unknown_ones_knows_whether_one_of_them_was_taken() {
    for_each_device(|device| {
        // The gradients of the first steps, each multiplied by the scale, which an overflow halves.
        let cases =
            [vec![INF, 4.0], vec![8.0, INF], vec![INF, NAN], vec![INF, NAN, 2.0], vec![8.0; 2]];
        for (first, dampening) in cases.iter().flat_map(|first| [(first, 0.0), (first, 0.5)]) {
            let sgd = Sgd { momentum: 0.9, ..Default::default() };
            let (w, mut opt, mut scaler) = training(Sgd { dampening, ..sgd }.into(), device);
            set_grad(&w, &[0.0; 3]);
            let step = |opt: &mut Optimizer, scaler: &mut GradScaler, gradient: f64| {
                // A copy from the host would let the answer of the step before arrive.
                drop(no_grad(|| w.grad().fill_(gradient)));
                drop(scaler.step(opt).unwrap());
                scaler.update().unwrap();
            };
            for &gradient in first {
                step(&mut opt, &mut scaler, gradient);
            }
            // Only the first step of all enters the momentum buffer without dampening.
            opt.set_param_group(0, ParamGroup::new(0.1, Sgd { dampening: 0.5, ..sgd })).unwrap();
            let skipped = first.iter().filter(|gradient| !gradient.is_finite()).count();
            step(&mut opt, &mut scaler, 8.0 / f64::from(1 << skipped));
            let (mut weight, mut buffer) = (1.0, None);
            let later = first.len() - skipped;
            for damping in vec![dampening; later].into_iter().chain([0.5]) {
                buffer = Some(buffer.map_or(1.0, |buffer| 0.9 * buffer + 1.0 - damping));
                weight -= 0.1 * buffer.unwrap_or(0.0);
            }
            let got = w.double_value(&[0]);
            let near = (got - weight).abs() < 1e-6;
            assert!(near, "{device:?} {first:?}, dampening {dampening}: {got}, not {weight}");
        }
    });
}

#[test]
fn a_skipped_step_with_clipping_changes_nothing() {
    for_each_device(|device| {
        for algorithm in algorithms() {
            let (w, mut opt, mut scaler) = training(algorithm, device);
            assert!(train(&w, &mut opt, &mut scaler, [1.0; 3]));
            let before = all(&mut opt);
            set_grad(&w, &[1.0, NAN, 1.0]);
            let outcome = scaler.step_clip_norm(&mut opt, 1.0).unwrap();
            assert!(outcome.is_skipped().unwrap());
            assert!(!outcome.total_norm().unwrap().double_value(&[]).is_finite());
            assert_eq!(all(&mut opt), before, "{algorithm:?}");
        }
    });
}

/// An update that is given the flag itself, as a scaler does on a GPU. Saving in between reads the flag.
#[test]
fn an_update_whose_flag_is_set_changes_nothing_and_the_next_acts_as_the_first() {
    for_each_device(|device| {
        let flag = Tensor::from(1f32).to_device(device);
        for algorithm in algorithms() {
            for saves in [true, false] {
                let (w, mut opt, _) = training(algorithm, device);
                let (v, mut other, _) = training(algorithm, device);
                let before = all(&mut other);
                for w in [&w, &v] {
                    set_grad(w, &[1.0, -2.0, 0.5]);
                }
                opt.update(&Step::default().with_found_inf(&flag)).unwrap();
                if saves {
                    assert_eq!(all(&mut opt), before, "{algorithm:?}");
                }
                opt.step().unwrap();
                other.step().unwrap();
                assert_eq!(all(&mut opt), all(&mut other), "{algorithm:?}, saved: {saves}");
            }
        }
    });
}
