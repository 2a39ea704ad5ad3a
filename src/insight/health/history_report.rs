//! The last steps of a history, and their text.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::text::Scale;
#[cfg(doc)]
use crate::GradScaler;
use crate::error::{Error, Result};

/// A step in a [`HistoryReport`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StepRecord {
    /// The number of the step, counted from 1.
    pub step: u64,
    /// The loss scale; 1 for a disabled scaler.
    pub scale: f64,
    /// Why the step was skipped; `None` if it was taken, or if there were no gradients.
    pub skipped: Option<SkipCause>,
    /// The norm of the unscaled gradients before clipping, if the step computed it and it is finite.
    pub norm: Option<f64>,
    /// The loss, if a [`SpikeDetector`](crate::scaler::SpikeDetector) watched it or
    /// [`set_loss`](super::ScaleHistory::set_loss) gave it, and it is finite.
    pub loss: Option<f64>,
    /// The learning rate.
    pub learning_rate: f64,
}

/// Why a step was skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SkipCause {
    /// A gradient, the gradient norm or the watched loss was infinite or NaN.
    Overflow,
    /// The gradient norm or the watched loss was far above its history; see
    /// [`step_unless_spike`](GradScaler::step_unless_spike).
    Spike,
}

/// The names of the columns in a checkpoint: tensors, because a file holds far more of their elements than of values. A
/// taken step has the number 0 in `skipped`, one that overflowed 1 and a spike 2; an unknown norm or loss is NaN.
pub(crate) const COLUMNS: [&str; 5] = ["scale", "skipped", "norm", "loss", "learning_rate"];

/// The last steps, the oldest first. Its text, by `Display`, is one line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HistoryReport {
    /// How many steps were ever recorded.
    pub total: u64,
    /// The last of them.
    pub steps: Vec<StepRecord>,
}

impl HistoryReport {
    /// Makes a report of saved steps, which must be the last ones, in their order.
    pub(crate) fn checked(total: u64, steps: Vec<StepRecord>) -> Result<Self> {
        let first = total.checked_sub(steps.len() as u64).filter(|_| total < 1 << 53);
        let numbers = steps.iter().map(|step| step.step);
        if first.is_some_and(|first| numbers.eq((first..total).map(|step| step + 1))) {
            return Ok(Self { total, steps });
        }
        let problem = format!("is damaged: its {} steps are not the last of {total}", steps.len());
        Err(Error::InvalidArgument { name: "the saved history of the scale", problem })
    }

    /// The numbers of the steps, a list for each of [`COLUMNS`].
    pub(crate) fn columns(&self) -> [Vec<f64>; COLUMNS.len()] {
        let column = |number: fn(&StepRecord) -> f64| self.steps.iter().map(number).collect();
        [
            column(|step| step.scale),
            column(|step| match step.skipped {
                None => 0.0,
                Some(SkipCause::Overflow) => 1.0,
                Some(SkipCause::Spike) => 2.0,
            }),
            column(|step| step.norm.unwrap_or(f64::NAN)),
            column(|step| step.loss.unwrap_or(f64::NAN)),
            column(|step| step.learning_rate),
        ]
    }

    /// Makes a report of the columns of the last steps.
    pub(crate) fn of_columns(total: u64, columns: [Vec<f64>; COLUMNS.len()]) -> Result<Self> {
        let [scales, skips, norms, losses, learning_rates] = columns;
        let steps = scales.len();
        let lengths = [&skips, &norms, &losses, &learning_rates].map(Vec::len);
        let causes = skips.iter().map(|skip| match skip {
            0.0 => Some(None),
            1.0 => Some(Some(SkipCause::Overflow)),
            2.0 => Some(Some(SkipCause::Spike)),
            _ => None,
        });
        let causes: Option<Vec<_>> = causes.collect();
        let first = total.checked_sub(steps as u64);
        let (Some(first), Some(causes), true) = (first, causes, lengths == [steps; 4]) else {
            let problem = format!("is damaged: its {steps} steps are not the last of {total}");
            return Err(Error::InvalidArgument { name: "the saved history of the scale", problem });
        };
        let finite = |number: f64| Some(number).filter(|number| number.is_finite());
        let numbers = norms.into_iter().zip(losses).zip(scales).zip(learning_rates);
        let records = numbers.zip(causes).zip(first..).map(|(numbers, before)| {
            let ((((norm, loss), scale), learning_rate), skipped) = numbers;
            let (norm, loss) = (finite(norm), finite(loss));
            StepRecord { step: before + 1, scale, skipped, norm, loss, learning_rate }
        });
        Self::checked(total, records.collect())
    }

    /// Counts the steps that were skipped for a cause.
    pub fn skips(&self, cause: SkipCause) -> usize {
        self.steps.iter().filter(|step| step.skipped == Some(cause)).count()
    }

    /// Returns the smallest scale of the steps.
    pub fn lowest_scale(&self) -> Option<f64> {
        self.steps.iter().map(|step| step.scale).reduce(f64::min)
    }
}

/// Prints such as `500 steps, 3 skipped (2 overflows, 1 spike), scale 2^16 → 2^14`, and advice if
/// overflows have driven the scale below 1.
impl fmt::Display for HistoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [overflows, spikes] = [SkipCause::Overflow, SkipCause::Spike].map(|c| self.skips(c));
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        let steps = self.steps.len();
        write!(f, "{steps} step{}, {} skipped", plural(steps), overflows + spikes)?;
        let causes = [(overflows, "overflow"), (spikes, "spike")];
        let causes = causes.iter().filter(|(count, _)| *count > 0);
        let causes: Vec<_> =
            causes.map(|(count, name)| format!("{count} {name}{}", plural(*count))).collect();
        if !causes.is_empty() {
            write!(f, " ({})", causes.join(", "))?;
        }
        let (Some(first), Some(last)) = (self.steps.first(), self.steps.last()) else {
            return Ok(());
        };
        write!(f, ", scale {}", Scale(first.scale))?;
        if last.scale != first.scale {
            write!(f, " → {}", Scale(last.scale))?;
        }
        match self.lowest_scale() {
            Some(lowest) if lowest < 1.0 && overflows > 0 => {
                write!(f, ", lowest {}: {}", Scale(lowest), super::Verdict::BelowOne)
            }
            Some(lowest) if lowest < first.scale.min(last.scale) => {
                write!(f, ", lowest {}", Scale(lowest))
            }
            _ => Ok(()),
        }
    }
}
