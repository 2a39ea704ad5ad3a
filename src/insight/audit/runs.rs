//! The runs of an audit.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::gradients::{self, Gradients};
use super::times::Times;
use super::{Audit, parts, times};
use crate::Autocast;
use crate::buffers::BufferSnapshot;
use crate::error::{Error, Result};
use crate::ffi::OutsideRegions;
use crate::ffi::insight::{Record, Reference};
use crate::insight::culprit::modules;
use crate::insight::passes::{self, Passes, RestoredBuffers};
use crate::insight::recording::Recording;
use crate::recompute::random::RandomStates;
use crate::variables::{named, variables};

/// A recorded run.
pub(super) struct Run {
    pub(super) recording: Recording,
    pub(super) loss: f64,
    /// Divided by the scale.
    pub(super) gradients: Gradients,
}

/// What the runs have in common.
struct Runs {
    parameters: Vec<(String, Tensor)>,
    random: RandomStates,
    buffers: BufferSnapshot,
}

pub(super) fn audit(
    vs: &VarStore,
    region: Autocast,
    scale: f64,
    mut loss: impl FnMut(Autocast) -> Result<Tensor>,
) -> Result<Audit> {
    let mut runs = Runs::new(vs)?;
    let off = region.enabled(false);
    let reference = Reference::new()?;
    let f32 = runs.record(scale, Record::Reference(&reference), &mut || loss(off))?;
    let lower = runs.record(scale, Record::Compared(&reference), &mut || loss(region))?;
    let dtype = parts::lower_dtype(&lower.recording);
    let rounded = match dtype {
        None => None,
        Some(dtype) => {
            Some(runs.record(scale, Record::Rounded(&reference, dtype), &mut || loss(off))?)
        }
    };
    let unscaled = match scale == 1.0 {
        true => None,
        false => Some(runs.gradients(1.0, &mut || loss(region))?),
    };
    let gradients = gradients::compare(
        &f32.gradients,
        &lower.gradients,
        rounded.as_ref().map(|run| &run.gradients),
        unscaled.as_ref().unwrap_or(&lower.gradients),
    )?;
    let mut parts = parts::parts(&runs.parameters, &lower, rounded.as_ref(), dtype, &gradients);
    let mut measured = [Times::new(), Times::new()];
    for _ in 0..times::ROUNDS {
        for (fastest, region) in measured.iter_mut().zip([off, region]) {
            times::keep_fastest(fastest, runs.times(scale, &mut || loss(region))?);
        }
    }
    times::add(&mut parts, &measured);
    let seconds = measured.map(|times| times.values().sum());
    let dtype = dtype.map_or("fp32", crate::insight::culprit::dtype_name).to_owned();
    Ok(Audit { dtype, scale, seconds, losses: [f32.loss, lower.loss], parts })
}

impl Runs {
    fn new(vs: &VarStore) -> Result<Self> {
        let parameters = named(variables(vs)?);
        let mut devices = vec![Device::Cpu];
        for (name, parameter) in &parameters {
            let kind = parameter.f_kind()?;
            if matches!(kind, Kind::Half | Kind::BFloat16) {
                let problem = format!(
                    "has the parameter {name} in half precision: audit the model with parameters in f32"
                );
                return Err(Error::InvalidArgument { name: "vs", problem });
            }
            if !devices.contains(&parameter.device()) {
                devices.push(parameter.device());
            }
        }
        let random = RandomStates::of(&devices)?;
        let mut buffers = BufferSnapshot::new(vs)?;
        buffers.save()?;
        Ok(Self { parameters, random, buffers })
    }

    fn record(
        &mut self,
        scale: f64,
        record: Record<'_>,
        loss: &mut impl FnMut() -> Result<Tensor>,
    ) -> Result<Run> {
        let tensors: Vec<&Tensor> = self.parameters.iter().map(|(_, tensor)| tensor).collect();
        let restored = RestoredBuffers(&mut self.buffers);
        let (recording, Passes { scaled, gradients, .. }) =
            passes::run(&self.parameters, &self.random, scale, loss, |passes| {
                Recording::of(&tensors, record, passes)
            })?;
        drop(restored);
        if recording.differs() {
            let problem =
                "calls other operators in f32 than in the region, so they cannot be compared: use the region that \
                 the closure is given, and nothing that depends on the dtype"
                    .to_owned();
            return Err(Error::InvalidArgument { name: "loss", problem });
        }
        let _own = OutsideRegions::enter();
        let loss = scaled.f_double_value(&[])? / scale;
        Ok(Run { recording, loss, gradients: Gradients::new(gradients, scale) })
    }

    /// The time of each part in a run.
    fn times(&mut self, scale: f64, loss: &mut impl FnMut() -> Result<Tensor>) -> Result<Times> {
        let tensors: Vec<&Tensor> = self.parameters.iter().map(|(_, tensor)| tensor).collect();
        let restored = RestoredBuffers(&mut self.buffers);
        let (recording, _) = passes::run(&self.parameters, &self.random, scale, loss, |passes| {
            Recording::of(&tensors, Record::Times, passes)
        })?;
        drop(restored);
        Ok(times::times(&recording, &modules(&self.parameters)))
    }

    fn gradients(
        &mut self,
        scale: f64,
        loss: &mut impl FnMut() -> Result<Tensor>,
    ) -> Result<Gradients> {
        let restored = RestoredBuffers(&mut self.buffers);
        let ((), Passes { gradients, .. }) =
            passes::run(&self.parameters, &self.random, scale, loss, |passes| Ok(((), passes()?)))?;
        drop(restored);
        Ok(Gradients::new(gradients, scale))
    }
}
