//! A bound for the difference between two Adam runs of one number that differ only in the order of their operations.

use super::{BETAS, Case, LR};

/// A number that is followed in f64, together with a bound of the error of a run that rounds.
///
/// To first order in the unit roundoff u, a constant, a product and a sum have an error of at most u times their size.
/// So the first moment of step t is off by at most 3tu times the average of the gradients' magnitudes (`reach`), the
/// root of the second moment by 2tu times itself, and the quotient by another 7u (root, correction, eps, step size,
/// product, division, and one to spare). An error of the gradients themselves, which weight decay causes, changes
/// either moment by at most the largest such error so far (`worst`): the first moment is an average of the gradients,
/// and the root of the second is a norm of them.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    case: Case,
    unit: f64,
    steps: i32,
    value: f64,
    first: f64,
    reach: f64,
    second: f64,
    worst: f64,
    off: f64,
    /// The effect of adding eps to a root that is not corrected.
    shift: f64,
}

impl Bound {
    /// `unit` is the unit roundoff of the format.
    pub fn new(case: Case, value: f64, unit: f64) -> Self {
        let [first, reach, second, worst, off, shift] = [0.0; 6];
        Self { case, unit, steps: 0, value, first, reach, second, worst, off, shift }
    }

    /// Takes a step with an unscaled gradient.
    pub fn step(&mut self, gradient: f64) {
        self.steps += 1;
        let gradient = self.decay(gradient);
        let (beta1, beta2) = BETAS;
        self.first = beta1 * self.first + (1.0 - beta1) * gradient;
        self.reach = beta1 * self.reach + (1.0 - beta1) * gradient.abs();
        self.second = beta2 * self.second + (1.0 - beta2) * gradient * gradient;
        let correction = |beta: f64| 1.0 - beta.powi(self.steps);
        let size = LR / correction(beta1);
        let root_correction = correction(beta2).sqrt();
        let root = self.second.sqrt() / root_correction;
        let step = size * self.reach / root;
        self.value -= size * self.first / (root + self.case.eps);
        let roundings = f64::from(5 * self.steps + 7) * self.unit * step;
        self.off += roundings + (LR + step) * self.worst / root + self.unit * self.value.abs();
        self.shift += step * self.case.eps * (1.0 / root_correction - 1.0) / root;
    }

    /// Weight decay: a constant and a product are rounded, and, if it is added to the gradient, the sum.
    fn decay(&mut self, gradient: f64) -> f64 {
        let Case { weight_decay, decoupled, .. } = self.case;
        let share = weight_decay * self.value;
        if decoupled {
            self.off += 2.0 * self.unit * self.value.abs();
            self.value -= LR * share;
            return gradient;
        }
        if weight_decay != 0.0 {
            let rounding = self.unit * (gradient.abs() + 3.0 * share.abs());
            self.worst = self.worst.max(weight_decay * (self.off + self.shift) + rounding);
        }
        gradient + share
    }

    /// By how much two runs may differ: the rounding errors of each, and the effect of eps. A hundredth is added for
    /// terms of higher order.
    pub fn apart(&self) -> f64 {
        1.01 * (2.0 * self.off + self.shift)
    }
}
