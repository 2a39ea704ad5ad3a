//! Schedules that multiply the learning rate: at intervals, at milestones, linearly, exponentially and polynomially.

use std::collections::BTreeMap;
use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use crate::checkpoint::SavedState;
use crate::error::{Result, ensure};
use crate::schedule::Rates;
use crate::schedule::progress::{Cycle, Part, Progress, Rule, at_least_one};

/// Multiplies the learning rate by `gamma` every `step_size` steps. The counterpart of
/// `torch.optim.lr_scheduler.StepLR`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepLr {
    /// Period of learning rate decay, in steps; at least 1.
    pub step_size: u64,
    /// Multiplicative factor of learning rate decay; at least 0. In PyTorch it defaults to 0.1.
    #[serde(default = "tenth")]
    pub gamma: f64,
}

/// Multiplies the learning rate by `gamma` at each milestone. The counterpart of
/// `torch.optim.lr_scheduler.MultiStepLR`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MultiStepLr {
    /// The numbers of steps after which the learning rate is multiplied. One that is listed twice counts twice.
    pub milestones: Vec<u64>,
    /// Multiplicative factor of learning rate decay; at least 0. In PyTorch it defaults to 0.1.
    #[serde(default = "tenth")]
    pub gamma: f64,
}

/// Multiplies the learning rate by `factor` for the first `total_iters` steps. The counterpart of
/// `torch.optim.lr_scheduler.ConstantLR`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ConstantLr {
    /// The factor, from above 0 to 1. Defaults to 1/3.
    pub factor: f64,
    /// The number of steps with the factor; at least 1. Defaults to 5.
    pub total_iters: u64,
}

/// Changes the factor of the learning rate linearly, over `total_iters` steps: the usual warm-up. The counterpart of
/// `torch.optim.lr_scheduler.LinearLR`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LinearLr {
    /// The factor of the first step, from above 0 to 1. Defaults to 1/3.
    pub start_factor: f64,
    /// The factor at the end, from 0 to 1. Defaults to 1.
    pub end_factor: f64,
    /// The number of steps from the first factor to the last; at least 1. Defaults to 5.
    pub total_iters: u64,
}

/// Multiplies the learning rate by `gamma` at each step. The counterpart of
/// `torch.optim.lr_scheduler.ExponentialLR`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExponentialLr {
    /// Multiplicative factor of learning rate decay; at least 0.
    pub gamma: f64,
}

/// Lowers the learning rate to 0 over `total_iters` steps: by the factor (1 - step / total_iters) to the power of
/// `power`. The counterpart of `torch.optim.lr_scheduler.PolynomialLR`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PolynomialLr {
    /// The number of steps until 0; at least 1. Defaults to 5.
    pub total_iters: u64,
    /// The power of the polynomial; at least 0. Defaults to 1, which is linear.
    pub power: f64,
}

fn tenth() -> f64 {
    0.1
}

impl Default for ConstantLr {
    fn default() -> Self {
        Self { factor: 1.0 / 3.0, total_iters: 5 }
    }
}

impl Default for LinearLr {
    fn default() -> Self {
        Self { start_factor: 1.0 / 3.0, end_factor: 1.0, total_iters: 5 }
    }
}

impl Default for PolynomialLr {
    fn default() -> Self {
        Self { total_iters: 5, power: 1.0 }
    }
}

fn check_gamma(gamma: f64) -> Result<()> {
    ensure("gamma", gamma, gamma >= 0.0 && gamma.is_finite(), "finite and at least 0")
}

fn check_start(name: &'static str, factor: f64) -> Result<()> {
    ensure(name, factor, factor > 0.0 && factor <= 1.0, "more than 0 and at most 1")
}

/// Sets each learning rate to its base, multiplied by `factor`.
pub(super) fn from_bases(progress: &Progress, rates: &mut Rates, factor: f64) {
    rates.lrs = progress.bases.iter().map(|base| base * factor).collect();
}

impl Rule for StepLr {
    fn check(&self, _rates: &Rates) -> Result<()> {
        at_least_one("step_size", self.step_size)?;
        check_gamma(self.gamma)
    }

    fn first(&self, _progress: &mut Progress, _rates: &mut Rates) -> Result<()> {
        Ok(())
    }

    fn next(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        if progress.last.is_multiple_of(self.step_size) {
            rates.scale(self.gamma);
        }
        Ok(())
    }

    fn compare(&self, _progress: &Progress, saved: &SavedState<'_>) -> Result<()> {
        saved.option("step_size", &self.step_size)?;
        saved.option("gamma", &self.gamma)
    }
}

impl Part for StepLr {
    fn restart(&self, progress: &mut Progress, rates: &mut Rates) {
        from_bases(progress, rates, 1.0);
    }
}

impl MultiStepLr {
    /// gamma to the power of the milestones that are at this step.
    fn factor(&self, step: u64) -> Option<f64> {
        let count = self.milestones.iter().filter(|&&milestone| milestone == step).count();
        (count > 0).then(|| self.gamma.powf(count as f64))
    }
}

impl Rule for MultiStepLr {
    fn check(&self, _rates: &Rates) -> Result<()> {
        check_gamma(self.gamma)
    }

    fn first(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        if let Some(factor) = self.factor(progress.last) {
            rates.scale(factor);
        }
        Ok(())
    }

    fn next(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        self.first(progress, rates)
    }

    fn compare(&self, _progress: &Progress, saved: &SavedState<'_>) -> Result<()> {
        // Python counts the milestones at each step.
        let mut milestones = BTreeMap::<_, u64>::new();
        for milestone in &self.milestones {
            *milestones.entry(milestone).or_default() += 1;
        }
        saved.option("milestones", &milestones)?;
        saved.option("gamma", &self.gamma)
    }
}

impl Part for MultiStepLr {
    fn restart(&self, progress: &mut Progress, rates: &mut Rates) {
        from_bases(progress, rates, self.factor(0).unwrap_or(1.0));
    }
}

impl Rule for ConstantLr {
    fn check(&self, _rates: &Rates) -> Result<()> {
        check_start("factor", self.factor)?;
        at_least_one("total_iters", self.total_iters)
    }

    fn first(&self, _progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        rates.scale(self.factor);
        Ok(())
    }

    fn next(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        if progress.last == self.total_iters {
            rates.scale(1.0 / self.factor);
        }
        Ok(())
    }

    fn compare(&self, _progress: &Progress, saved: &SavedState<'_>) -> Result<()> {
        saved.option("factor", &self.factor)?;
        saved.option("total_iters", &self.total_iters)
    }
}

impl Part for ConstantLr {
    fn restart(&self, progress: &mut Progress, rates: &mut Rates) {
        from_bases(progress, rates, self.factor);
    }
}

impl Rule for LinearLr {
    fn check(&self, _rates: &Rates) -> Result<()> {
        check_start("start_factor", self.start_factor)?;
        let end = self.end_factor;
        ensure("end_factor", end, (0.0..=1.0).contains(&end), "from 0 to 1")?;
        at_least_one("total_iters", self.total_iters)
    }

    fn first(&self, _progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        rates.scale(self.start_factor);
        Ok(())
    }

    fn next(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        if progress.last <= self.total_iters {
            let (total, before) = (self.total_iters as f64, (progress.last - 1) as f64);
            let rise = self.end_factor - self.start_factor;
            rates.scale(1.0 + rise / (total * self.start_factor + before * rise));
        }
        Ok(())
    }

    fn compare(&self, _progress: &Progress, saved: &SavedState<'_>) -> Result<()> {
        saved.option("start_factor", &self.start_factor)?;
        saved.option("end_factor", &self.end_factor)?;
        saved.option("total_iters", &self.total_iters)
    }
}

impl Part for LinearLr {
    fn restart(&self, progress: &mut Progress, rates: &mut Rates) {
        from_bases(progress, rates, self.start_factor);
    }
}

impl Rule for ExponentialLr {
    fn check(&self, _rates: &Rates) -> Result<()> {
        check_gamma(self.gamma)
    }

    fn first(&self, _progress: &mut Progress, _rates: &mut Rates) -> Result<()> {
        Ok(())
    }

    fn next(&self, _progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        rates.scale(self.gamma);
        Ok(())
    }

    fn compare(&self, _progress: &Progress, saved: &SavedState<'_>) -> Result<()> {
        saved.option("gamma", &self.gamma)
    }
}

impl Part for ExponentialLr {
    fn restart(&self, progress: &mut Progress, rates: &mut Rates) {
        from_bases(progress, rates, 1.0);
    }
}

impl Rule for PolynomialLr {
    fn check(&self, _rates: &Rates) -> Result<()> {
        let power = self.power;
        ensure("power", power, power >= 0.0 && power.is_finite(), "finite and at least 0")?;
        at_least_one("total_iters", self.total_iters)
    }

    fn first(&self, _progress: &mut Progress, _rates: &mut Rates) -> Result<()> {
        Ok(())
    }

    fn next(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        if progress.last <= self.total_iters {
            let left = |step: u64| 1.0 - step as f64 / self.total_iters as f64;
            rates.scale((left(progress.last) / left(progress.last - 1)).powf(self.power));
        }
        Ok(())
    }

    fn compare(&self, _progress: &Progress, saved: &SavedState<'_>) -> Result<()> {
        saved.option("total_iters", &self.total_iters)?;
        saved.option("power", &self.power)
    }
}

impl Part for PolynomialLr {
    fn restart(&self, progress: &mut Progress, rates: &mut Rates) {
        from_bases(progress, rates, 1.0);
    }
}

/// Lowers the learning rate to `eta_min` along half a cosine of `t_max` steps, and raises it again along the next half.
/// The counterpart of `torch.optim.lr_scheduler.CosineAnnealingLR`.
///
/// Source: Loshchilov and Hutter, *SGDR: Stochastic Gradient Descent with Warm Restarts*,
/// <https://arxiv.org/abs/1608.03983>, without the restarts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CosineAnnealingLr {
    /// The number of steps from the first learning rate to the minimum; at least 1.
    pub t_max: u64,
    /// The minimum; at least 0. In PyTorch it defaults to 0.
    #[serde(default)]
    pub eta_min: f64,
}

/// Lowers the learning rate to `eta_min` along half a cosine of `t_0` steps, and begins anew with a cycle that is
/// `t_mult` times as long. The counterpart of `torch.optim.lr_scheduler.CosineAnnealingWarmRestarts`.
///
/// Source: Loshchilov and Hutter, *SGDR: Stochastic Gradient Descent with Warm Restarts*,
/// <https://arxiv.org/abs/1608.03983>.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CosineAnnealingWarmRestarts {
    /// The number of steps of the first cycle; at least 1.
    pub t_0: u64,
    /// The factor from the length of a cycle to that of the next one; at least 1. In PyTorch it defaults to 1.
    #[serde(default = "one")]
    pub t_mult: u64,
    /// The minimum; at least 0. In PyTorch it defaults to 0.
    #[serde(default)]
    pub eta_min: f64,
}

fn one() -> u64 {
    1
}

fn check_eta_min(eta_min: f64) -> Result<()> {
    ensure("eta_min", eta_min, eta_min >= 0.0 && eta_min.is_finite(), "finite and at least 0")
}

/// The point of the cosine from 2 to 0.
fn height(angle: f64) -> f64 {
    1.0 + angle.cos()
}

impl Rule for CosineAnnealingLr {
    fn check(&self, _rates: &Rates) -> Result<()> {
        at_least_one("t_max", self.t_max)?;
        check_eta_min(self.eta_min)
    }

    fn first(&self, _progress: &mut Progress, _rates: &mut Rates) -> Result<()> {
        Ok(())
    }

    fn next(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        let (steps, low) = (self.t_max as f64, self.eta_min);
        let before = progress.last - 1;
        // At the bottom, after an odd number of half cosines, the ratio of two heights does not exist.
        if before.is_multiple_of(self.t_max) && (before / self.t_max) % 2 == 1 {
            for (lr, base) in rates.lrs.iter_mut().zip(&progress.bases) {
                *lr += (base - low) * (1.0 - (PI / steps).cos()) / 2.0;
            }
        } else {
            let at = |step: u64| height(PI * step as f64 / steps);
            let ratio = at(progress.last) / at(before);
            rates.lrs.iter_mut().for_each(|lr| *lr = ratio * (*lr - low) + low);
        }
        Ok(())
    }

    fn compare(&self, _progress: &Progress, saved: &SavedState<'_>) -> Result<()> {
        saved.option("T_max", &self.t_max)?;
        saved.option("eta_min", &self.eta_min)
    }
}

impl Part for CosineAnnealingLr {
    fn restart(&self, progress: &mut Progress, rates: &mut Rates) {
        let low = self.eta_min;
        let first = |base: &f64| low + (base - low) * height(0.0) / 2.0;
        rates.lrs = progress.bases.iter().map(first).collect();
    }
}

impl Rule for CosineAnnealingWarmRestarts {
    fn check(&self, _rates: &Rates) -> Result<()> {
        at_least_one("t_0", self.t_0)?;
        at_least_one("t_mult", self.t_mult)?;
        check_eta_min(self.eta_min)
    }

    fn first(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        progress.cycle = Some(Cycle { position: 0, length: self.t_0 });
        self.restart(progress, rates);
        Ok(())
    }

    fn next(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        if let Some(cycle) = &mut progress.cycle {
            // A loaded position may be any number below the length.
            cycle.position = cycle.position.saturating_add(1);
            if cycle.position >= cycle.length {
                cycle.position %= cycle.length;
                cycle.length = cycle.length.saturating_mul(self.t_mult);
            }
        }
        self.restart(progress, rates);
        Ok(())
    }

    fn compare(&self, _progress: &Progress, saved: &SavedState<'_>) -> Result<()> {
        saved.option("T_0", &self.t_0)?;
        saved.option("T_mult", &self.t_mult)?;
        saved.option("eta_min", &self.eta_min)
    }
}

impl Part for CosineAnnealingWarmRestarts {
    fn restart(&self, progress: &mut Progress, rates: &mut Rates) {
        let Cycle { position, length } =
            progress.cycle.unwrap_or(Cycle { position: 0, length: self.t_0 });
        let (angle, low) = (PI * position as f64 / length as f64, self.eta_min);
        let annealed = |base: &f64| low + (base - low) * height(angle) / 2.0;
        rates.lrs = progress.bases.iter().map(annealed).collect();
    }
}

/// Raises the learning rate from 0 linearly over the warm-up, and lowers it linearly to 0 at the last step. The
/// counterpart of Hugging Face's `get_linear_schedule_with_warmup`, the usual one for BERT.
///
/// The learning rate of step `t`, beginning with 0, is the base multiplied by t / warmup_steps during the warm-up, and
/// by (total_steps - t) / (total_steps - warmup_steps) afterwards.
///
/// Source: Devlin et al., *BERT: Pre-training of Deep Bidirectional Transformers*, section A.2,
/// <https://arxiv.org/abs/1810.04805>.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinearWithWarmup {
    /// The number of steps of the warm-up; may be 0.
    pub warmup_steps: u64,
    /// The number of all steps, at least 1.
    pub total_steps: u64,
}

/// Raises the learning rate from 0 linearly over the warm-up, and then lowers it like the inverse square root of the
/// step. The counterpart of Hugging Face's `get_inverse_sqrt_schedule`.
///
/// The learning rate of step `t`, beginning with 0, is the base multiplied by t / warmup_steps during the warm-up, and
/// by 1 / sqrt(t / warmup_steps) afterwards.
///
/// Source: Vaswani et al., *Attention Is All You Need*, section 5.3, <https://arxiv.org/abs/1706.03762>.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct InverseSqrtLr {
    /// The number of steps of the warm-up, at least 1.
    pub warmup_steps: u64,
}

impl LinearWithWarmup {
    fn factor(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return step as f64 / self.warmup_steps as f64;
        }
        let left = self.total_steps.saturating_sub(step);
        left as f64 / self.total_steps.saturating_sub(self.warmup_steps).max(1) as f64
    }
}

impl InverseSqrtLr {
    fn factor(&self, step: u64) -> f64 {
        let warmup = self.warmup_steps as f64;
        if step < self.warmup_steps {
            return step as f64 / warmup;
        }
        1.0 / (step as f64 / warmup).sqrt()
    }
}

macro_rules! from_factors {
    ($($config:ident: $count:ident)*) => {$(
        impl Rule for $config {
            fn check(&self, _rates: &Rates) -> Result<()> {
                at_least_one(stringify!($count), self.$count)
            }

            fn first(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
                from_bases(progress, rates, self.factor(0));
                Ok(())
            }

            fn next(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
                from_bases(progress, rates, self.factor(progress.last));
                Ok(())
            }

            /// In Python it is a `LambdaLR`, whose function is not saved, but what it gave last.
            fn compare(&self, progress: &Progress, saved: &SavedState<'_>) -> Result<()> {
                saved.leave_out_unread(&["lr_lambdas"]);
                let factor = self.factor(progress.last);
                let lrs: Vec<_> = progress.bases.iter().map(|base| base * factor).collect();
                saved.option("_last_lr", &lrs)
            }
        }

        impl Part for $config {
            fn restart(&self, progress: &mut Progress, rates: &mut Rates) {
                from_bases(progress, rates, self.factor(0));
            }
        }
    )*};
}

from_factors!(LinearWithWarmup: total_steps InverseSqrtLr: warmup_steps);
