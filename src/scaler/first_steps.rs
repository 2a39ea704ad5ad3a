//! The warning about a scaler that has skipped all of its first steps.

use crate::capture;
use crate::error::{Number as Shown, warn};
use crate::ffi::Arrival;
use crate::scale::ScaleTensor;
use crate::scaler::outcome::{Answer, StepOutcome, StepResult};

/// After how many iterations, all of them skipped, a scaler warns. 20 halvings take the default scale to 0.0625.
const ITERATIONS: u32 = 20;

/// The history of a scaler's first iterations, until it is known that a step was taken, or that none was.
///
/// Never synchronizes. Outcomes that only a device has are kept until [`ITERATIONS`] have ended. Then the latest is
/// asked for, which in a training that goes well was a step: one copy of a number in the life of a scaler.
#[derive(Debug)]
pub(crate) enum FirstSteps {
    /// No step is known to have been taken.
    Open {
        /// The iterations that have ended and had a step, taken or skipped.
        iterations: u32,
        /// Whether the present iteration had one.
        has_step: bool,
        /// Of these steps, those of which only a device knows.
        unknown: Vec<Answer>,
    },
    /// All were skipped, and the scales are on their way to the host.
    Skipped(Vec<Scale>),
    /// A step was taken, the warning is printed, or the warning is switched off.
    Over,
}

/// A scale, as far as the host knows it.
#[derive(Debug)]
pub(crate) enum Scale {
    Known(f64),
    Coming(Arrival),
}

impl FirstSteps {
    /// Begins to watch the steps of a scaler if it `warns`.
    pub(crate) fn new(warns: bool) -> Self {
        match warns {
            true => Self::Open { iterations: 0, has_step: false, unknown: Vec::new() },
            false => Self::Over,
        }
    }

    /// Notes what a step did.
    pub(crate) fn note(&mut self, outcome: &StepOutcome) {
        let Self::Open { iterations, has_step, unknown } = self else { return };
        match outcome.answer() {
            Answer::Known(StepResult::NoGradients) => {}
            Answer::Known(StepResult::Skipped) => *has_step = true,
            // Replays run nothing on the host, which therefore learns nothing of later steps.
            Answer::OnDevice(_) if capture::is_capturing() => *self = Self::Over,
            Answer::OnDevice(_) => {
                *has_step = true;
                if *iterations < ITERATIONS {
                    unknown.push(outcome.answer().clone());
                }
            }
            Answer::Known(StepResult::Stepped) => *self = Self::Over,
        }
    }

    /// Ends an iteration of these scales, and warns if it is time for that.
    pub(crate) fn end_iteration<'a>(&mut self, scales: impl IntoIterator<Item = &'a ScaleTensor>) {
        match self {
            Self::Over => return,
            // To ask whether a copy has arrived would break a capture.
            Self::Skipped(_) if capture::is_inside() => return,
            Self::Skipped(_) => {}
            Self::Open { iterations, has_step, unknown } => {
                *iterations += u32::from(std::mem::take(has_step));
                // A copy on its way to the host would break a capture.
                let may_ask = unknown.is_empty() || !capture::is_inside();
                if *iterations < ITERATIONS || !may_ask {
                    return;
                }
                match were_skipped(unknown) {
                    None => return,
                    Some(false) => {
                        *self = Self::Over;
                        return;
                    }
                    Some(true) => {
                        *self = Self::Skipped(scales.into_iter().filter_map(Scale::of).collect());
                    }
                }
            }
        }
        let Self::Skipped(scales) = self else { return };
        if let Some(scales) = scales.iter_mut().map(Scale::poll).collect::<Option<Vec<_>>>() {
            warn(&text(&scales));
            *self = Self::Over;
        }
    }
}

/// Returns whether all of these steps were skipped; `None` if it is not known yet. The latest is asked for alone, and
/// the others if that was skipped.
fn were_skipped(unknown: &mut Vec<Answer>) -> Option<bool> {
    let skipped = |answer: &Answer| match answer.poll() {
        Ok(taken) => taken.map(|taken| !taken),
        // An answer that cannot be read gives no reason to warn.
        Err(_) => Some(false),
    };
    while let Some(answer) = unknown.last() {
        if !skipped(answer)? {
            return Some(false);
        }
        unknown.pop();
        // Begins to copy all of them.
        unknown.iter().for_each(|answer| drop(answer.poll()));
    }
    Some(true)
}

impl Scale {
    /// `None` if the device cannot be read.
    fn of(number: &ScaleTensor) -> Option<Self> {
        match number.known() {
            Some(scale) => Some(Self::Known(scale)),
            None => Arrival::new(number.tensor()).ok().map(Self::Coming),
        }
    }

    fn poll(&mut self) -> Option<f64> {
        match self {
            Self::Known(scale) => Some(*scale),
            Self::Coming(arrival) => arrival.poll().unwrap_or(Some(f64::NAN)),
        }
    }
}

fn text(scales: &[f64]) -> String {
    let scales: Vec<_> = scales.iter().map(|scale| Shown(*scale).to_string()).collect();
    let now = match &scales[..] {
        [] => String::new(),
        [scale] => format!(", and the scale is {scale} now"),
        _ => format!(", and the scales are {} now", scales.join(", ")),
    };
    format!(
        "a GradScaler has skipped every step of its first {ITERATIONS} iterations, because gradients were infinite or \
         NaN{now}: the loss, an input or a weight probably is, too. `insight::Tracer` names the operator that made the \
         first one, and `Every step is skipped` in the guide's page on errors (docs/errors.md) says what to do. \
         `GradScalerConfig::warn_of_skips` switches this warning off."
    )
}
