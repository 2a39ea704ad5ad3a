//! The scale of losses, and how it adapts to overflows. The course of an iteration is the subject of `scaler`.
//!
//! `number` holds the tensors of a scale and its trackers. The end of an iteration updates them on the device with
//! `config`'s rule; `rule` computes the same on the host, so that reading a scale synchronizes only if the host lacks a
//! flag. `state` saves all of it under PyTorch's keys.

mod config;
mod scale_tensor;
mod state;

use tch::{Device, Kind, Tensor};

use crate::capture;
use crate::device::check_usable;
use crate::error::{Error, Result, ScalerError, ensure_defined};
use crate::ffi::{self, FoundInf, OutsideRegions, ScaleUpdate};
use crate::gradients::overflow;
use crate::tree::Tree;

pub use config::GradScalerConfig;
pub(crate) use config::HostScale;
pub(crate) use config::{LARGEST, SMALLEST, check_interval};
pub(crate) use scale_tensor::{Prepared, ScaleTensor};
pub use state::GradScalerState;
pub(crate) use state::{Trackers, required};

/// A scale, its options, and the number of consecutive overflowing iterations.
#[derive(Debug)]
pub(crate) struct AdaptiveScale {
    config: GradScalerConfig,
    /// `None` if it is disabled.
    number: Option<ScaleTensor>,
    /// Consecutive iterations with overflow; counted if the host has the answer.
    skips: u32,
}

/// A checked state with all memory allocated, so that loading it cannot run out of memory.
#[derive(Debug)]
pub(crate) struct LoadedState {
    number: Prepared,
    config: GradScalerConfig,
    skips: u32,
}

impl Drop for AdaptiveScale {
    fn drop(&mut self) {
        if let Some(number) = self.number() {
            number.note_change("the scaler, which was dropped");
        }
    }
}

impl AdaptiveScale {
    pub(crate) fn new(device: Device, config: GradScalerConfig) -> Result<Self> {
        config.check()?;
        let number = if config.enabled {
            check_usable(device)?;
            let (value, counted) = (HostScale::new(&config), config.tolerates_overflows());
            Some(ScaleTensor::new(device, value, counted, config.is_one())?)
        } else {
            None
        };
        Ok(Self { config, number, skips: 0 })
    }

    /// A scale that does nothing.
    pub(crate) fn disabled() -> Self {
        let config = GradScalerConfig { enabled: false, ..GradScalerConfig::default() };
        Self { config, number: None, skips: 0 }
    }

    pub(crate) fn config(&self) -> &GradScalerConfig {
        &self.config
    }

    /// The scale itself; `None` if it is disabled.
    pub(crate) fn number(&self) -> Option<&ScaleTensor> {
        self.number.as_ref()
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.number.is_some()
    }

    /// The value on the host; a scale of 1 if it is disabled. Synchronizes if only the device has it.
    pub(crate) fn value(&self) -> Result<HostScale> {
        capture::refuse("reading the scale or its state", "read it after `replay`")?;
        let disabled = HostScale { scale: 1.0, ..HostScale::new(&self.config) };
        self.number.as_ref().map_or(Ok(disabled), ScaleTensor::value)
    }

    /// Multiplies outputs by the scale, which is copied to each of their devices once.
    pub(crate) fn apply<T: Tree + ?Sized>(&self, outputs: &T) -> Result<T::Output> {
        let Some(number) = &self.number else {
            return outputs.try_map(&mut |output| Ok(output.shallow_clone()));
        };
        number.join_graph()?;
        let mut replicas = Replicas::new(number.tensor());
        outputs.try_map(&mut |output| {
            ensure_defined("loss", output)?;
            let kind = output.f_kind()?;
            if !matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16) {
                return Err(ScalerError::Dtype { dtype: kind }.into());
            }
            match self.config.is_one() {
                true => Ok(output.shallow_clone()),
                false => ffi::scaled(output, &replicas.on(output.device())?),
            }
        })
    }

    /// Sets the scale and keeps the tracker.
    pub(crate) fn set_scale(&mut self, new_scale: f64) -> Result<()> {
        capture::refuse("update_with", "set the scale before `replay`")?;
        let Some(number) = &mut self.number else {
            return Ok(());
        };
        self.config.check_scale("new_scale", new_scale)?;
        number.set_scale(new_scale as f32)
    }

    /// Sets the scale to the number in a tensor and keeps the tracker. If both are on GPUs, the device checks the
    /// number.
    pub(crate) fn set_scale_to(&mut self, new_scale: &Tensor) -> Result<()> {
        capture::refuse("update_with_tensor", "set the scale before `replay`")?;
        let _own = OutsideRegions::enter();
        let Some(number) = &mut self.number else {
            return Ok(());
        };
        if [number.tensor(), new_scale].map(Tensor::device).contains(&Device::Cpu) {
            return self.set_scale(new_scale.f_double_value(&[])?);
        }
        number.set_scale_on_device(new_scale, self.config)
    }

    /// Changes the growth factor, the backoff factor and the growth interval, and refuses to change another option.
    pub(crate) fn set_config(&mut self, config: GradScalerConfig) -> Result<()> {
        capture::refuse("a change of the scaler's options", "make it before `replay`")?;
        config.check()?;
        let GradScalerConfig { growth_factor, backoff_factor, growth_interval, .. } = config;
        let may_be =
            GradScalerConfig { growth_factor, backoff_factor, growth_interval, ..self.config };
        if config != may_be {
            let problem = "differs in more than the growth factor, the backoff factor and the growth interval, which \
                           alone can change; begin with the present options, `..*scalers.config(loss_id)?`";
            return Err(Error::InvalidArgument { name: "config", problem: problem.to_owned() });
        }
        match &mut self.number {
            Some(number) if growth_interval != self.config.growth_interval => {
                number.clamp_tracker(growth_interval)?;
            }
            _ => {}
        }
        if let Some(number) = &self.number {
            number.note_change("the options of the scaler");
        }
        self.config = config;
        Ok(())
    }

    /// The state to save; empty if it is disabled.
    pub(crate) fn state_dict(&self) -> Result<GradScalerState> {
        let trackers = Trackers { mirror: self.value()?, skips: self.skips };
        Ok(match self.is_enabled() {
            true => GradScalerState::save(&self.config, trackers),
            false => GradScalerState::default(),
        })
    }

    /// Checks a state and allocates what loading it needs; `None` if the scale is disabled and loads nothing.
    pub(crate) fn prepare_state(&self, state: &GradScalerState) -> Result<Option<LoadedState>> {
        capture::refuse("load_state_dict", "call it outside of the iteration")?;
        let Some(number) = &self.number else {
            return Ok(None);
        };
        let (config, Trackers { mirror, skips }) = state.load(&self.config)?;
        let number = number.prepare(mirror, config.tolerates_overflows(), config.is_one())?;
        Ok(Some(LoadedState { number, config, skips }))
    }

    pub(crate) fn set_state(&mut self, loaded: Option<LoadedState>) -> Result<()> {
        if let Some((number, loaded)) = self.number.as_mut().zip(loaded) {
            number.note_change("the state of the scaler");
            number.set(loaded.number)?;
            (self.config, self.skips) = (loaded.config, loaded.skips);
        }
        Ok(())
    }
}

/// A number, and its copies on other devices.
#[derive(Debug)]
struct Replicas<'a> {
    number: &'a Tensor,
    copies: Vec<Tensor>,
}

impl<'a> Replicas<'a> {
    fn new(number: &'a Tensor) -> Self {
        Self { number, copies: Vec::new() }
    }

    /// The number on a device. Every device reads a number on the CPU where it is.
    fn on(&mut self, device: Device) -> Result<Tensor> {
        if [Device::Cpu, device].contains(&self.number.device()) {
            return Ok(self.number.shallow_clone());
        }
        if let Some(copy) = self.copies.iter().find(|copy| copy.device() == device) {
            return Ok(copy.shallow_clone());
        }
        let copy = ffi::number_on(self.number, device, Kind::Float)?;
        self.copies.push(copy.shallow_clone());
        Ok(copy)
    }
}

/// The end of the iteration of one scale.
#[derive(Debug)]
pub(crate) struct End<'a> {
    number: &'a ScaleTensor,
    config: &'a GradScalerConfig,
    skips: &'a mut u32,
    found_infs: Vec<&'a Tensor>,
    overflow: Option<bool>,
    /// Whether the scale should back off but is at its lower bound.
    is_stuck: bool,
}

impl AdaptiveScale {
    /// Prepares the end of an iteration with these flags, and changes nothing; `None` if the scale is disabled.
    pub(crate) fn end<'a>(
        &'a mut self,
        found: impl IntoIterator<Item = &'a FoundInf>,
    ) -> Result<Option<End<'a>>> {
        let Self { config, number: Some(number), skips } = self else {
            return Ok(None);
        };
        let found: Vec<_> = found.into_iter().collect();
        if found.is_empty() {
            return Err(ScalerError::NoInfChecks.into());
        }
        let found_infs: Vec<_> = found.iter().map(|found| &found.tensor).collect();
        let mut overflow = overflow(found);
        let gives_up = config.max_consecutive_skips.is_some() || config.error_at_min_scale;
        if gives_up {
            let remedy = "build the scaler without them, and count skips by `Replay::outcomes`";
            capture::refuse("`max_consecutive_skips` or `error_at_min_scale`", remedy)?;
        }
        number.join_graph()?;
        if overflow.is_none() && gives_up {
            overflow = Some(ffi::any_nonzero(&found_infs)?);
        }
        // The contents of an error have to be read before anything changes.
        let known = if gives_up && overflow == Some(true) { Some(number.value()?) } else { None };
        let is_stuck = known.is_some_and(|known| known.is_stuck(&config.rule()));
        let is_stuck = config.error_at_min_scale && is_stuck;
        Ok(Some(End { number, config, skips, found_infs, overflow, is_stuck }))
    }
}

impl<'a> End<'a> {
    /// The scale, and whether it changes, as far as the host knows.
    pub(crate) fn present(&self) -> (&'a ScaleTensor, bool) {
        (self.number, !self.number.stays(self.overflow, &self.config.rule()))
    }

    fn change(&self) -> ScaleUpdate<'_> {
        self.number.change(&self.found_infs, self.config.rule())
    }

    /// Counts the iteration after the tensors have changed, and returns the error to report once the iteration is
    /// closed.
    fn finish(&mut self, before: Option<HostScale>) -> Result<Option<Error>> {
        self.number.follow(before, self.overflow, &self.config.rule());
        let skips = if self.overflow == Some(true) { self.skips.saturating_add(1) } else { 0 };
        *self.skips = skips;
        let limit = self.config.max_consecutive_skips.filter(|limit| skips >= *limit);
        if limit.is_none() && !self.is_stuck {
            return Ok(None);
        }
        // Does not synchronize: with a limit or stuck, the host had read the scale and the overflow before.
        let scale = self.number.value()?.scale.into();
        Ok(Some(match limit {
            Some(limit) => Error::Scaler(ScalerError::TooManySkips { skips, limit, scale }),
            None => Error::Scaler(ScalerError::ScaleAtMinimum { scale }),
        }))
    }
}

/// Ends the iterations of some scales, all of them or, after an error, none. Returns the first error to report once
/// they are closed.
pub(crate) fn end_all(ends: &mut [End<'_>]) -> Result<Option<Error>> {
    let before: Vec<_> = ends.iter().map(|end| end.number.forget()).collect();
    let changes: Vec<_> = ends.iter().map(|end| end.change()).collect();
    ffi::scales_update(&changes)?;
    drop(changes);
    let mut first = None;
    for (end, before) in ends.iter_mut().zip(before) {
        let given_up = end.finish(before)?;
        first = first.or(given_up);
    }
    Ok(first)
}
