//! Running an iteration again, as often as needed, so that nothing is left behind.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::operators::AutocastList;
use super::recording::{RecordedModel, Recording, named};
use crate::Autocast;
use crate::buffers::{self, BufferSnapshot};
use crate::error::{Result, ensure_defined};
use crate::ffi::emulation::Emulated;
use crate::ffi::insight::RecordingMode;
use crate::ffi::{self, OutsideRegions};
use crate::gradients::Taken;
use crate::recompute::random::RandomStates;
use crate::variables;

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

/// What an iteration begins with, besides the parameters and the batch.
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

    /// What an iteration that begins now begins with. Does not synchronize.
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

    fn run_within<T>(
        &mut self,
        scale: f64,
        loss: &mut impl FnMut() -> Result<Tensor>,
        around: impl FnOnce(&mut dyn FnMut() -> Result<Tensor>) -> Result<(T, Tensor)>,
    ) -> Result<(T, Passes)> {
        self.present.restore()?;
        self.beginning.statistics.restore()?;
        let parameters = self.parameters().iter().map(|(_, tensor)| tensor.shallow_clone());
        let taken = Taken::from(parameters.collect())?;
        let mut others = Vec::new();
        let mut passes = || {
            let loss = loss()?;
            let scaled = named(SCALED_LOSS, || scaled(&loss, scale))?;
            let leaves = ffi::other_leaves(&scaled, taken.parameters())?;
            let leaves = Taken::from(leaves)?;
            ffi::backward(&scaled, false)?;
            others.extend(leaves.exchange()?.into_iter().flatten());
            Ok(scaled)
        };
        let (found, scaled) = self.beginning.random.during(|| around(&mut passes))??;
        let gradients = taken.exchange()?;
        Ok((found, Passes { scaled, gradients, others }))
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

/// What an emulation of a region's half precision needs to know.
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
