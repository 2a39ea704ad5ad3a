//! labml's options of Adam that are no fields here, set as docs/porting.md says: weight decay that is not multiplied by
//! the learning rate, and either order of the update. The reference is labml's formulas in f64.

use tch::{Kind, Tensor};
use tch_amp::optim::{AdamW, MasterWeights, Optimizer, ParamGroup};

use crate::optim::{set_grad, to_f64};
use testkit::checkpoints::{checkpoint_of, reloaded};
use testkit::for_each_device;
use testkit::tensors::leaf;

const BETAS: (f64, f64) = (0.5, 0.875);
const STEPS: i32 = 12;
/// The steps after which a new optimizer continues from a file.
const SAVED: i32 = 5;
/// Powers of two, which fp16 holds exactly, on whole vectors and a remainder.
const COUNT: usize = 35;

/// labml's options.
#[derive(Clone, Copy, Debug)]
struct Labml {
    weight_decay: f64,
    absolute: bool,
    optimized_update: bool,
    eps: f64,
}

/// A number and its averages.
struct Element {
    value: f64,
    first: f64,
    second: f64,
}

impl Element {
    fn step(&mut self, options: Labml, lr: f64, step: i32, gradient: f64) {
        let Labml { weight_decay, absolute, optimized_update, eps } = options;
        self.value *= if absolute { 1.0 - weight_decay } else { 1.0 - lr * weight_decay };
        self.first = BETAS.0 * self.first + (1.0 - BETAS.0) * gradient;
        self.second = BETAS.1 * self.second + (1.0 - BETAS.1) * gradient * gradient;
        let correction1 = 1.0 - BETAS.0.powi(step);
        let correction2 = 1.0 - BETAS.1.powi(step);
        let (size, denominator) = if optimized_update {
            (lr * correction2.sqrt() / correction1, self.second.sqrt() + eps)
        } else {
            (lr / correction1, self.second.sqrt() / correction2.sqrt() + eps)
        };
        self.value -= size * self.first / denominator;
    }
}

/// The same options here, for a learning rate and the number of a step.
fn group(options: Labml, lr: f64, step: i32) -> ParamGroup {
    let Labml { mut weight_decay, absolute, optimized_update, mut eps } = options;
    if absolute {
        weight_decay /= lr;
    }
    if optimized_update {
        eps /= (1.0 - BETAS.1.powi(step)).sqrt();
    }
    ParamGroup::new(lr, AdamW { betas: BETAS, eps, weight_decay, ..Default::default() })
}

/// A learning rate that falls, so that a weight decay that does not follow it is noticed.
fn lr(step: i32) -> f64 {
    0.1 / f64::from(step)
}

fn gradients(step: i32) -> Vec<f64> {
    let power = |i: usize| 2f64.powi((i as i32 * 3 + step * 5) % 7 - 3);
    let sign = |i: usize| if (i as i32 + step) % 3 == 0 { -1.0 } else { 1.0 };
    (0..COUNT).map(|i| sign(i) * power(i)).collect()
}

fn build(kind: Kind, w: &Tensor) -> Optimizer {
    let masters = if kind == Kind::Half { MasterWeights::Float } else { MasterWeights::None };
    AdamW::default().master_weights(masters).build(&[w.shallow_clone()], 1.0).unwrap()
}

/// The weights that are updated: the parameter, or its f32 copy.
fn updated(opt: &Optimizer, w: &Tensor) -> Vec<f64> {
    to_f64(&opt.master_weight(0).unwrap().unwrap_or_else(|| w.shallow_clone()))
}

/// Saves the optimizer, and returns another one that continues from the file.
fn resumed(mut opt: Optimizer, kind: Kind, w: &Tensor) -> Optimizer {
    let mut other = build(kind, w);
    let saved = reloaded(&checkpoint_of([("optimizer", &mut opt)]), "checkpoint");
    saved.restore().add("optimizer", &mut other).apply().unwrap();
    assert_eq!(other.param_group(0).unwrap(), opt.param_group(0).unwrap());
    other
}

/// With labml's own epsilon nothing is converted: both orders are the same but for rounding.
#[test]
fn with_labmls_epsilon_the_order_is_rounding() {
    for_each_device(|device| {
        for (kind, tolerance) in [(Kind::Double, 2e-14), (Kind::Float, 1e-5), (Kind::Half, 1e-5)] {
            let theirs =
                Labml { weight_decay: 0.0625, absolute: false, optimized_update: true, eps: 1e-16 };
            let ours = Labml { optimized_update: false, ..theirs };
            let start: Vec<f64> = (0..COUNT).map(|i| (i % 17) as f64 / 8.0 - 1.0).collect();
            let w = leaf(&start, kind, device);
            let mut opt = build(kind, &w);
            let element = |&value: &f64| Element { value, first: 0.0, second: 0.0 };
            let mut want: Vec<_> = start.iter().map(element).collect();
            for step in 1..=STEPS {
                let gradients = gradients(step);
                set_grad(&w, &gradients);
                opt.set_param_group(0, group(ours, lr(step), step)).unwrap();
                opt.step().unwrap();
                for (element, gradient) in want.iter_mut().zip(gradients) {
                    element.step(theirs, lr(step), step, gradient);
                }
            }
            for (got, want) in updated(&opt, &w).into_iter().zip(&want) {
                assert!((got - want.value).abs() <= tolerance, "{kind:?}: {got} {}", want.value);
            }
        }
    });
}

#[test]
fn absolute_decay_and_both_orders_are_labmls() {
    let options = |absolute, optimized_update| Labml {
        weight_decay: 0.0625,
        absolute,
        optimized_update,
        eps: 0.25,
    };
    for_each_device(|device| {
        // Twelve steps, each with about ten roundings of numbers up to 1. A wrong option is off by more than 1e-3.
        for (kind, tolerance) in [(Kind::Double, 2e-14), (Kind::Float, 1e-5), (Kind::Half, 1e-5)] {
            for options in [(false, false), (false, true), (true, false), (true, true)]
                .map(|(absolute, optimized)| options(absolute, optimized))
            {
                let start: Vec<f64> = (0..COUNT).map(|i| (i % 17) as f64 / 8.0 - 1.0).collect();
                let w = leaf(&start, kind, device);
                let mut opt = build(kind, &w);
                let element = |&value: &f64| Element { value, first: 0.0, second: 0.0 };
                let mut want: Vec<_> = start.iter().map(element).collect();
                for step in 1..=STEPS {
                    let gradients = gradients(step);
                    set_grad(&w, &gradients);
                    opt.set_param_group(0, group(options, lr(step), step)).unwrap();
                    opt.step().unwrap();
                    for (element, gradient) in want.iter_mut().zip(gradients) {
                        element.step(options, lr(step), step, gradient);
                    }
                    if step == SAVED {
                        opt = resumed(opt, kind, &w);
                    }
                }
                for (got, want) in updated(&opt, &w).into_iter().zip(&want) {
                    let off = (got - want.value).abs();
                    assert!(off <= tolerance, "{options:?} {kind:?}: {got} {}", want.value);
                }
            }
        }
    });
}
