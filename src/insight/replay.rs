//! Running an iteration again.

use tch::{Kind, Tensor};

use super::culprit::culprit;
use super::explanation::{Cause, Culprit, Pass};
use super::passes::{self, Passes, SCALED_LOSS};
use super::recording::Recording;
use super::search::{Origin, Search};
use crate::error::Result;
use crate::ffi::insight::Record;
use crate::recompute::random::RandomStates;

/// How often a largest scale is tried, and halved if it is not finite.
const TRIES: usize = 3;

/// What the runs of one explanation have in common.
pub(super) struct Replay<'a> {
    parameters: &'a [(String, Tensor)],
    random: &'a RandomStates,
}

/// A recorded run.
struct Run {
    recording: Recording,
    /// The memory of the scaled loss.
    scaled: Option<u64>,
    /// The memory of the non-finite gradients, and of the loss if it is not finite.
    targets: Vec<u64>,
    /// The parameters with non-finite gradients.
    gradients: Vec<String>,
    finite: bool,
}

impl<'a> Replay<'a> {
    pub(super) fn new(parameters: &'a [(String, Tensor)], random: &'a RandomStates) -> Self {
        Self { parameters, random }
    }

    /// The cause, the culprit and the parameters whose gradients are not finite.
    pub(super) fn explain(
        &self,
        scale: f64,
        loss: &mut impl FnMut() -> Result<Tensor>,
    ) -> Result<(Cause, Option<Culprit>, Vec<String>)> {
        let run = self.record(scale, loss)?;
        if run.finite {
            return Ok((Cause::Finite, None, Vec::new()));
        }
        let mut search = Search::new(&run.recording);
        for &memory in &run.targets {
            search.follow(memory);
        }
        let origins = search.origins();
        let made = origins.iter().find(|origin| matches!(origin, Origin::Made(_)));
        match (made, origins.first()) {
            // What was given comes before what is made of it, and explains it.
            (_, Some(&Origin::Given(event, place))) => {
                Ok((self.given(&run.recording, event, place), None, run.gradients))
            }
            (Some(&Origin::Made(event)), _) => {
                let culprit = culprit(&run.recording, event, self.parameters);
                let cause = if scale != 1.0 && self.depends_on_scale(&culprit) {
                    self.of_scale(loss)?
                } else {
                    Cause::Values
                };
                Ok((cause, Some(culprit), run.gradients))
            }
            _ => Ok((Cause::Values, None, run.gradients)),
        }
    }

    fn depends_on_scale(&self, culprit: &Culprit) -> bool {
        culprit.pass == Pass::Backward || culprit.path.as_deref() == Some(SCALED_LOSS)
    }

    /// Runs forward and backward with the iteration's random numbers, and records them.
    fn record(&self, scale: f64, loss: &mut impl FnMut() -> Result<Tensor>) -> Result<Run> {
        let tensors: Vec<&Tensor> = self.parameters.iter().map(|(_, tensor)| tensor).collect();
        let (recording, Passes { scaled, gradients }) =
            passes::run(self.parameters, self.random, scale, loss, |passes| {
                Recording::of(&tensors, Record::Numbers, passes)
            })?;
        let (mut targets, mut names) = (Vec::new(), Vec::new());
        for ((name, _), gradient) in self.parameters.iter().zip(&gradients) {
            if let Some(gradient) = gradient
                && !passes::is_finite(gradient)?
            {
                names.push(name.clone());
                targets.extend(recording.memory(gradient)?);
            }
        }
        let finite = names.is_empty() && passes::is_finite(&scaled)?;
        let scaled = recording.memory(&scaled)?;
        if !finite {
            targets.extend(scaled);
        }
        Ok(Run { recording, scaled, targets, gradients: names, finite })
    }

    /// Whether the gradients are finite at a scale. Runs forward and backward, and records nothing.
    fn is_finite_at(&self, scale: f64, loss: &mut impl FnMut() -> Result<Tensor>) -> Result<bool> {
        let ((), Passes { scaled, gradients }) =
            passes::run(self.parameters, self.random, scale, loss, |passes| Ok(((), passes()?)))?;
        let mut all = gradients.iter().flatten().chain([&scaled]).map(passes::is_finite);
        all.try_fold(true, |all, finite| Ok(all && finite?))
    }

    fn given(&self, recording: &Recording, event: usize, place: usize) -> Cause {
        let event = &recording.events[event];
        let tensor = &event.inputs[place];
        match tensor.parameter.and_then(|index| self.parameters.get(index)) {
            Some((name, _)) => Cause::Parameter { name: name.clone() },
            None => Cause::Input { operator: event.name.clone(), place, elements: tensor.elements },
        }
    }

    /// Whether a scale of 1 is finite, and up to which it is: the largest for which no result exceeds its dtype, and for
    /// which the passes are finite.
    fn of_scale(&self, loss: &mut impl FnMut() -> Result<Tensor>) -> Result<Cause> {
        let run = self.record(1.0, loss)?;
        if !run.finite {
            return Ok(Cause::Values);
        }
        let limits = run.recording.grown_from(run.scaled).into_iter().filter_map(|tensor| {
            let numbers = tensor.numbers.filter(|numbers| numbers.largest > 0.0)?;
            Some(most(tensor.kind?)? / numbers.largest)
        });
        let mut largest_finite = limits.fold(f64::INFINITY, f64::min).log2().floor().exp2();
        // The sums inside of an operator can exceed its result.
        for _ in 0..TRIES {
            if self.is_finite_at(largest_finite, loss)? {
                break;
            }
            largest_finite /= 2.0;
        }
        Ok(Cause::Scale { largest_finite })
    }
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
