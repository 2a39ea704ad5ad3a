//! Running an iteration again, as often as needed, so that nothing is left behind.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::explanation::{Cause, Culprit, Origin, Search, Values};
use super::operators::AutocastList;
use super::recording::{Pass, RecordedModel, Recording, named};
use crate::buffers::{self, BufferSnapshot};
use crate::dtype::largest;
use crate::error::{Result, ensure_defined};
use crate::ffi::emulation::{Emulated, Emulation, Regions, Rounding};
use crate::ffi::insight::{RecordingMode, SavedTensor};
use crate::ffi::{self, OutsideRegions};
use crate::gradients::StashedGradients;
use crate::recompute::RandomStates;
use crate::{Autocast, variables};

/// The name of the product of the loss and the scale.
pub(super) const SCALED_LOSS: &str = "scaled loss";

/// A model whose iterations can be run again.
#[derive(Debug)]
pub(super) struct Repeatable {
    model: RecordedModel,
    devices: Vec<Device>,
    /// The variables that are not trainable.
    buffers: Vec<Tensor>,
}

/// The state with which an iteration begins, besides the parameters and the batch.
#[derive(Debug)]
pub(super) struct Beginning {
    random: RandomStates,
    /// A copy of those buffers that an iteration is likely to change, such as running statistics. Other variables that
    /// are not trainable, such as frozen weights, can be as large as a model.
    statistics: BufferSnapshot,
}

/// An iteration that is run again. The buffers become what they were before the first of its runs when this is dropped;
/// gradients and random numbers after every run.
#[derive(Debug)]
pub(super) struct Rerun<'a> {
    model: &'a RecordedModel,
    beginning: &'a mut Beginning,
    present: BufferSnapshot,
}

/// The results of a forward and a backward pass.
pub(super) struct Passes {
    pub(super) scaled: Tensor,
    /// `None` for a parameter without one.
    pub(super) gradients: Vec<Option<Tensor>>,
    /// The gradients of leaves that are not parameters of the model, such as those of another model.
    pub(super) others: Vec<Tensor>,
}

impl Repeatable {
    pub(super) fn new(vs: &VarStore) -> Result<Self> {
        let parameters = variables::named(variables::variables(vs)?);
        let mut devices = vec![Device::Cpu];
        for (_, parameter) in &parameters {
            if !devices.contains(&parameter.device()) {
                devices.push(parameter.device());
            }
        }
        let buffers = buffers::buffers(vs)?.into_iter().map(|(_, buffer)| buffer).collect();
        Ok(Self { model: RecordedModel::new(parameters), devices, buffers })
    }

    /// The CPU, and the devices of the parameters.
    pub(super) fn devices(&self) -> &[Device] {
        &self.devices
    }

    pub(super) fn model(&self) -> &RecordedModel {
        &self.model
    }

    /// The variables, also those that are not trainable.
    pub(super) fn parameters(&self) -> &[(String, Tensor)] {
        self.model.parameters()
    }

    /// Returns the state with which an iteration begins now. Does not synchronize.
    pub(super) fn begin(&self) -> Result<Beginning> {
        let statistics = self.buffers.iter().filter(|buffer| buffer.dim() <= 1);
        let statistics = BufferSnapshot::of(statistics)?;
        Ok(Beginning { random: RandomStates::of(&self.devices)?, statistics })
    }

    pub(super) fn rerun<'a>(&'a self, beginning: &'a mut Beginning) -> Result<Rerun<'a>> {
        Ok(Rerun { model: &self.model, beginning, present: BufferSnapshot::of(&self.buffers)? })
    }
}

impl Rerun<'_> {
    pub(super) fn parameters(&self) -> &[(String, Tensor)] {
        self.model.parameters()
    }

    /// Runs forward and backward, and records them.
    pub(super) fn record(
        &mut self,
        mode: RecordingMode<'_>,
        scale: f64,
        loss: &mut impl FnMut() -> Result<Tensor>,
    ) -> Result<(Recording, Passes)> {
        let model = self.model;
        self.run_within(scale, loss, |passes| Recording::of(model, mode, passes))
    }

    /// Runs forward and backward.
    pub(super) fn run(
        &mut self,
        scale: f64,
        loss: &mut impl FnMut() -> Result<Tensor>,
    ) -> Result<Passes> {
        let ((), passes) = self.run_within(scale, loss, |passes| Ok(((), passes()?)))?;
        Ok(passes)
    }

    /// Runs forward, and returns what autograd has saved for the backward pass once the graph is freed.
    pub(super) fn saved(
        &mut self,
        loss: &mut impl FnMut() -> Result<Tensor>,
    ) -> Result<(Recording, Vec<SavedTensor>)> {
        self.present.restore()?;
        self.beginning.statistics.restore()?;
        let forward = || Recording::of_saved(self.model, loss);
        let (recording, loss) = self.beginning.random.during(forward)??;
        drop(loss);
        let saved = recording.saved()?;
        Ok((recording, saved))
    }

    fn run_within<T>(
        &mut self,
        scale: f64,
        loss: &mut impl FnMut() -> Result<Tensor>,
        around: impl FnOnce(&mut dyn FnMut() -> Result<Tensor>) -> Result<(T, Tensor)>,
    ) -> Result<(T, Passes)> {
        self.present.restore()?;
        self.beginning.statistics.restore()?;
        let parameters = self.parameters().iter().map(|(_, tensor)| tensor.shallow_clone());
        let taken = StashedGradients::from(parameters.collect())?;
        let mut others = Vec::new();
        let mut passes = || {
            let loss = loss()?;
            let scaled = named(SCALED_LOSS, || scaled(&loss, scale))?;
            let leaves = ffi::other_leaves(&scaled, taken.parameters())?;
            let leaves = StashedGradients::from(leaves)?;
            ffi::backward(&scaled, false)?;
            others.extend(leaves.exchange()?.into_iter().flatten());
            Ok(scaled)
        };
        let (found, scaled) = self.beginning.random.during(|| around(&mut passes))??;
        let gradients = taken.exchange()?;
        Ok((found, Passes { scaled, gradients, others }))
    }
}

/// Runs of one loss in regions, at one scale. They are counted.
pub(super) struct Runs<'a, F> {
    rerun: Rerun<'a>,
    pub(super) scale: f64,
    loss: F,
    pub(super) count: u64,
}

impl<'a, F: FnMut(Autocast) -> Result<Tensor>> Runs<'a, F> {
    pub(super) fn new(rerun: Rerun<'a>, scale: f64, loss: F) -> Self {
        Self { rerun, scale, loss, count: 0 }
    }

    /// Runs forward and backward, with another scale if it is given.
    pub(super) fn run(&mut self, region: Autocast, scale: Option<f64>) -> Result<Passes> {
        self.count += 1;
        self.rerun.run(scale.unwrap_or(self.scale), &mut || (self.loss)(region))
    }

    /// Runs forward and backward, and records them.
    pub(super) fn record(
        &mut self,
        mode: RecordingMode<'_>,
        region: Autocast,
    ) -> Result<(Recording, Passes)> {
        self.count += 1;
        self.rerun.record(mode, self.scale, &mut || (self.loss)(region))
    }

    /// Runs forward, and returns what autograd has saved.
    pub(super) fn saved(&mut self, region: Autocast) -> Result<(Recording, Vec<SavedTensor>)> {
        self.count += 1;
        self.rerun.saved(&mut || (self.loss)(region))
    }

    /// Records a run in f32 that rounds at random what the region would round.
    pub(super) fn record_noise(
        &mut self,
        mode: RecordingMode<'_>,
        region: Autocast,
        seed: u64,
    ) -> Result<(Recording, Passes)> {
        self.count += 1;
        let (emulated, rounding) = (emulated(&region)?, Rounding::Random { seed });
        let mut emulation = None;
        self.rerun.record(mode, self.scale, &mut || {
            emulation = Some(Emulation::begin(&emulated, Regions::Emulated, rounding)?);
            (self.loss)(region)
        })
    }
}

impl Drop for Rerun<'_> {
    fn drop(&mut self) {
        // The same copies were possible the other way round.
        drop(self.present.restore());
    }
}

/// The loss times the scale, as the scaler computes it, and with a scale of 1, too, so that it has memory of its own.
fn scaled(loss: &Tensor, scale: f64) -> Result<Tensor> {
    ensure_defined("loss", loss)?;
    let kind = if loss.f_kind()? == Kind::Double { Kind::Double } else { Kind::Float };
    ffi::scaled(loss, &ffi::number_new(scale, kind, loss.device())?)
}

/// Returns the rounding of a region's half precision, for an emulation.
pub(super) fn emulated(region: &Autocast) -> Result<Emulated> {
    let device = region.device();
    let f32 = [AutocastList::F32, AutocastList::F32UnlessAsked];
    Ok(Emulated {
        device,
        dtype: region.kind()?,
        lower: AutocastList::LowerPrecision.names(device),
        f32: f32.into_iter().flat_map(|list| list.names(device)).collect(),
    })
}

pub(super) fn is_finite(tensor: &Tensor) -> Result<bool> {
    let _own = OutsideRegions::enter();
    let values = if tensor.is_sparse() {
        tensor.f_coalesce()?.f_internal_values()?
    } else {
        tensor.f_detach()?
    };
    Ok(values.f_isfinite()?.f_all()?.f_int64_value(&[])? != 0)
}

/// How many scales are tried from an estimate downwards, before the interval is halved.
const TRIES: usize = 3;

/// The cause, the culprit and the parameters whose gradients are not finite.
pub(super) fn explain(
    rerun: Rerun<'_>,
    scale: f64,
    loss: impl FnMut() -> Result<Tensor>,
) -> Result<(Cause, Option<Culprit>, Vec<String>)> {
    let mut replay = Replay { rerun, loss };
    let replayed = replay.record(scale)?;
    if replayed.finite {
        return Ok((Cause::Finite, None, Vec::new()));
    }
    let (mut cause, mut culprit) = replay.origin(&replayed);
    if scale != 1.0 && culprit.as_ref().is_some_and(depends_on_scale) {
        let unscaled = replay.record(1.0)?;
        // Otherwise the scale had only hidden the values that overflow without it.
        if unscaled.finite {
            cause = Cause::Scale { largest_finite: replay.largest_finite(scale, &unscaled)? };
        } else {
            (cause, culprit) = replay.origin(&unscaled);
        }
    }
    Ok((cause, culprit, replayed.gradients))
}

struct Replay<'a, L> {
    rerun: Rerun<'a>,
    loss: L,
}

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

impl<L: FnMut() -> Result<Tensor>> Replay<'_, L> {
    /// Where the non-finite numbers of a run began, whatever the scale.
    fn origin(&self, replayed: &Replayed) -> (Cause, Option<Culprit>) {
        let mut search = Search::new(&replayed.recording.events);
        for &memory in &replayed.targets {
            search.follow(memory);
        }
        let origins = search.origins();
        let made = origins.iter().find(|origin| matches!(origin, Origin::Made(_)));
        match (made, origins.first()) {
            // A tensor that was given comes before those that are made of it, and explains them.
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
    fn record(&mut self, scale: f64) -> Result<Replayed> {
        let (recording, Passes { scaled, gradients, others }) =
            self.rerun.record(RecordingMode::Numbers, scale, &mut self.loss)?;
        let (mut targets, mut names) = (Vec::new(), Vec::new());
        for ((name, _), gradient) in self.rerun.parameters().iter().zip(&gradients) {
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

    /// Returns whether the gradients are finite at a scale. Runs forward and backward, and records nothing.
    fn is_finite_at(&mut self, scale: f64) -> Result<bool> {
        let Passes { scaled, gradients, others } = self.rerun.run(scale, &mut self.loss)?;
        let mut all = gradients.iter().flatten().chain(&others).chain([&scaled]).map(is_finite);
        all.try_fold(true, |all, finite| Ok(all && finite?))
    }

    fn given(&self, recording: &Recording, index: usize, place: usize) -> Cause {
        let event = &recording.events[index];
        let tensor = &event.inputs[place];
        match tensor.parameter.and_then(|index| self.rerun.parameters().get(index)) {
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
    fn largest_finite(&mut self, scale: f64, unscaled: &Replayed) -> Result<f64> {
        // The largest for which no number of the run exceeds its dtype.
        let limits =
            unscaled.recording.grown_from(unscaled.scaled).into_iter().filter_map(|tensor| {
                let numbers = tensor.numbers.filter(|numbers| numbers.largest > 0.0)?;
                Some(largest(tensor.kind?) / numbers.largest)
            });
        let estimate = limits.fold(f64::MAX, f64::min).log2().floor();
        let (mut finite, mut infinite) = (0.0, scale.log2().ceil());
        let mut exponent = estimate.min(infinite - 1.0);
        let mut tries = 0;
        while infinite - finite > 1.0 {
            exponent = exponent.max(finite + 1.0);
            if self.is_finite_at(exponent.exp2())? {
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

/// Returns whether a culprit's numbers grow with the scale.
fn depends_on_scale(culprit: &Culprit) -> bool {
    culprit.pass == Pass::Backward || culprit.path.as_deref() == Some(SCALED_LOSS)
}
