//! Schedules for transformers, which begin with a linear warm-up.

use serde::{Deserialize, Serialize};

use crate::checkpoint::SavedState;
use crate::error::Result;
use crate::schedule::decay::from_bases;
use crate::schedule::progress::{Part, Progress, Rule, at_least_one};
use crate::schedule::rates::Rates;

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
