//! Schedules that multiply the learning rate: at intervals, at milestones, linearly, exponentially and polynomially.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::checkpoint::SavedState;
use crate::error::{Result, ensure};
use crate::schedule::progress::{Part, Progress, Rule, at_least_one};
use crate::schedule::rates::Rates;

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
