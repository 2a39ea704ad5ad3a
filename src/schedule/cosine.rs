//! Cosine annealing, once or with restarts.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use crate::checkpoint::SavedState;
use crate::error::{Result, ensure};
use crate::schedule::progress::{Cycle, Part, Progress, Rule, at_least_one};
use crate::schedule::rates::Rates;

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
