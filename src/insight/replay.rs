//! The cause of non-finite gradients, found by running their iteration again.

use tch::{Kind, Tensor};

use super::explanation::{Cause, Culprit, Values};
use super::recording::{Pass, Recording};
use super::rerun::{Passes, Rerun, SCALED_LOSS, is_finite};
use super::search::{Origin, Search};
use crate::error::Result;
use crate::ffi::insight::RecordingMode;

/// How many scales are tried from an estimate downwards, before the interval is halved.
const TRIES: usize = 3;

/// The cause, the culprit and the parameters whose gradients are not finite.
pub(super) fn explain(
    rerun: Rerun<'_>,
    scale: f64,
    loss: &mut impl FnMut() -> Result<Tensor>,
) -> Result<(Cause, Option<Culprit>, Vec<String>)> {
    let mut replay = Replay(rerun);
    let replayed = replay.record(scale, loss)?;
    if replayed.finite {
        return Ok((Cause::Finite, None, Vec::new()));
    }
    let (mut cause, mut culprit) = replay.origin(&replayed);
    if scale != 1.0 && culprit.as_ref().is_some_and(depends_on_scale) {
        let unscaled = replay.record(1.0, loss)?;
        // Otherwise the scale had only hidden the values that overflow without it.
        if unscaled.finite {
            cause = Cause::Scale { largest_finite: replay.largest_finite(scale, &unscaled, loss)? };
        } else {
            (cause, culprit) = replay.origin(&unscaled);
        }
    }
    Ok((cause, culprit, replayed.gradients))
}

struct Replay<'a>(Rerun<'a>);

/// A recorded run of the iteration.
struct Replayed {
    recording: Recording,
    /// The memory of the scaled loss.
    scaled: Option<u64>,
    /// The memory of the non-finite gradients, and of the loss if it is not finite.
    targets: Vec<u64>,
    /// The parameters with non-finite gradients.
    gradients: Vec<String>,
    finite: bool,
}

impl Replay<'_> {
    /// Where the non-finite numbers of a run began, whatever the scale.
    fn origin(&self, replayed: &Replayed) -> (Cause, Option<Culprit>) {
        let mut search = Search::new(&replayed.recording.events);
        for &memory in &replayed.targets {
            search.follow(memory);
        }
        let origins = search.origins();
        let made = origins.iter().find(|origin| matches!(origin, Origin::Made(_)));
        match (made, origins.first()) {
            // What was given comes before what is made of it, and explains it.
            (_, Some(&Origin::Given(event, place))) => {
                (self.given(&replayed.recording, event, place), None)
            }
            (Some(&Origin::Made(event)), _) => {
                (Cause::Values, Some(Culprit::new(&replayed.recording, event)))
            }
            _ => (Cause::Values, None),
        }
    }

    /// Runs forward and backward with the iteration's random numbers, and records them.
    fn record(
        &mut self,
        scale: f64,
        loss: &mut impl FnMut() -> Result<Tensor>,
    ) -> Result<Replayed> {
        let (recording, Passes { scaled, gradients, others }) =
            self.0.record(RecordingMode::Numbers, scale, loss)?;
        let (mut targets, mut names) = (Vec::new(), Vec::new());
        for ((name, _), gradient) in self.0.parameters().iter().zip(&gradients) {
            if let Some(gradient) = gradient
                && !is_finite(gradient)?
            {
                names.push(name.clone());
                targets.extend(recording.memory(gradient)?);
            }
        }
        for gradient in &others {
            if !is_finite(gradient)? {
                targets.extend(recording.memory(gradient)?);
            }
        }
        let finite = targets.is_empty() && names.is_empty() && is_finite(&scaled)?;
        let scaled = recording.memory(&scaled)?;
        if !finite {
            targets.extend(scaled);
        }
        Ok(Replayed { recording, scaled, targets, gradients: names, finite })
    }

    /// Whether the gradients are finite at a scale. Runs forward and backward, and records nothing.
    fn is_finite_at(
        &mut self,
        scale: f64,
        loss: &mut impl FnMut() -> Result<Tensor>,
    ) -> Result<bool> {
        let Passes { scaled, gradients, others } = self.0.run(scale, loss)?;
        let mut all = gradients.iter().flatten().chain(&others).chain([&scaled]).map(is_finite);
        all.try_fold(true, |all, finite| Ok(all && finite?))
    }

    fn given(&self, recording: &Recording, index: usize, place: usize) -> Cause {
        let event = &recording.events[index];
        let tensor = &event.inputs[place];
        match tensor.parameter.and_then(|index| self.0.parameters().get(index)) {
            Some((name, _)) => Cause::Parameter { name: name.clone() },
            None => Cause::Input {
                operator: event.name.clone(),
                path: recording.part(index),
                place,
                values: Values::of(tensor),
            },
        }
    }

    /// The largest power of two that is finite as a scale, if 1 is and `scale` is not.
    fn largest_finite(
        &mut self,
        scale: f64,
        unscaled: &Replayed,
        loss: &mut impl FnMut() -> Result<Tensor>,
    ) -> Result<f64> {
        // The largest for which no number of the run exceeds its dtype.
        let limits =
            unscaled.recording.grown_from(unscaled.scaled).into_iter().filter_map(|tensor| {
                let numbers = tensor.numbers.filter(|numbers| numbers.largest > 0.0)?;
                Some(most(tensor.kind?)? / numbers.largest)
            });
        let estimate = limits.fold(f64::MAX, f64::min).log2().floor();
        let (mut finite, mut infinite) = (0.0, scale.log2().ceil());
        let mut exponent = estimate.min(infinite - 1.0);
        let mut tries = 0;
        while infinite - finite > 1.0 {
            exponent = exponent.max(finite + 1.0);
            if self.is_finite_at(exponent.exp2(), loss)? {
                finite = exponent;
                if tries < TRIES {
                    break;
                }
            } else {
                infinite = exponent;
            }
            tries += 1;
            // The sums inside of an operator can exceed its result, but not by much.
            let close = tries < TRIES;
            exponent = if close { infinite - 1.0 } else { ((finite + infinite) / 2.0).floor() };
        }
        Ok(finite.exp2())
    }
}

/// Whether a culprit's numbers grow with the scale.
fn depends_on_scale(culprit: &Culprit) -> bool {
    culprit.pass == Pass::Backward || culprit.path.as_deref() == Some(SCALED_LOSS)
}

/// The largest finite number of a dtype.
fn most(kind: Kind) -> Option<f64> {
    match kind {
        Kind::Half => Some(65504.0),
        Kind::BFloat16 => Some(f64::from(half::bf16::MAX)),
        Kind::Float => Some(f64::from(f32::MAX)),
        Kind::Double => Some(f64::MAX),
        _ => None,
    }
}
