//! Tracks whether a momentum buffer has been started, also while only a device has recorded which steps were taken.
//!
//! With dampening, the first gradient enters the buffer in full and later ones do not. A step that a device may skip
//! leaves open which gradient is the first: the flag of that step is kept until its value has arrived on the host.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::ffi::{Arrival, OutsideRegions};

/// Whether a momentum buffer starts with the next gradient.
#[derive(Debug, Default)]
pub(crate) enum FirstStep {
    #[default]
    Ahead,
    /// It was taken unless all steps since were skipped.
    Unless(SharedAnswer),
    Taken,
}

/// Shared by many parameters.
type SharedAnswer = Arc<Mutex<Skipped>>;

/// Whether all of some steps were skipped. Only a device has the answer until it has arrived on the host.
#[derive(Debug)]
pub(crate) enum Skipped {
    Unknown { flag: Tensor, arrival: Option<Arrival> },
    Known(bool),
}

impl Skipped {
    fn new(flag: Tensor) -> Result<SharedAnswer> {
        // On the CPU the flag can be read at once.
        let arrives = flag.device() != Device::Cpu;
        let arrival = arrives.then(|| Arrival::new(&flag)).transpose()?;
        Ok(Arc::new(Mutex::new(Self::Unknown { flag, arrival })))
    }

    /// The answer. Synchronizes if only the device has it.
    fn ask(&mut self) -> Result<bool> {
        let _own = OutsideRegions::enter();
        let skipped = match self {
            Self::Known(skipped) => return Ok(*skipped),
            Self::Unknown { flag, .. } => flag.f_reshape([1i64])?.f_double_value(&[0])? != 0.0,
        };
        *self = Self::Known(skipped);
        Ok(skipped)
    }

    /// The answer, if it has arrived. Never synchronizes.
    fn poll(&mut self) -> Option<bool> {
        let skipped = match self {
            Self::Known(skipped) => return Some(*skipped),
            Self::Unknown { arrival: Some(arrival), .. } => arrival.poll().ok()?? != 0.0,
            Self::Unknown { arrival: None, .. } => return self.ask().ok(),
        };
        *self = Self::Known(skipped);
        Some(skipped)
    }
}

fn lock(skipped: &SharedAnswer) -> MutexGuard<'_, Skipped> {
    skipped.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FirstStep {
    /// Whether the first step is still ahead. Synchronizes if only the device has the answer.
    pub(crate) fn is_ahead(&mut self) -> Result<bool> {
        if let Self::Unless(skipped) = self {
            let skipped = lock(skipped).ask()?;
            *self = if skipped { Self::Ahead } else { Self::Taken };
        }
        Ok(matches!(self, Self::Ahead))
    }
}

/// A step that the device skips if `found_inf` is not zero.
pub(crate) struct Launch<'a> {
    found_inf: Option<&'a Tensor>,
    /// For the unknown steps before this one, a flag whether these and this one are all skipped.
    flags: Vec<(Option<SharedAnswer>, SharedAnswer)>,
}

impl<'a> Launch<'a> {
    pub(crate) fn new(found_inf: Option<&'a Tensor>) -> Self {
        Self { found_inf, flags: Vec::new() }
    }

    /// Allocates what `note` needs, before the step changes anything.
    pub(crate) fn prepare(&mut self, first_step: &FirstStep) -> Result<()> {
        let _own = OutsideRegions::enter();
        let (Some(found_inf), Some(before)) = (self.found_inf, unknown(first_step)) else {
            return Ok(());
        };
        if self.flag(before.as_ref()).is_some() {
            return Ok(());
        }
        let flag = match before.as_ref().map(lock).as_deref() {
            Some(Skipped::Unknown { flag, .. }) => {
                let here = found_inf.f_to_device_(flag.device(), Kind::Float, true, false)?;
                flag.f_minimum(&here)?
            }
            _ => found_inf.shallow_clone(),
        };
        self.flags.push((before, Skipped::new(flag)?));
        Ok(())
    }

    /// Records in a parameter's state that it was stepped.
    pub(crate) fn note(&self, first_step: &mut FirstStep) {
        let prepared = match first_step {
            // The answer may have arrived since.
            FirstStep::Unless(skipped) => self.flag(Some(skipped)),
            _ => None,
        };
        let known_now = || self.flag(unknown(first_step)?.as_ref());
        let flag = prepared.or_else(known_now);
        *first_step = flag.map_or(FirstStep::Taken, FirstStep::Unless);
    }

    fn flag(&self, before: Option<&SharedAnswer>) -> Option<SharedAnswer> {
        let same = |(known, _): &&(Option<SharedAnswer>, SharedAnswer)| match (known, before) {
            (None, None) => true,
            (Some(known), Some(before)) => Arc::ptr_eq(known, before),
            _ => false,
        };
        self.flags.iter().find(same).map(|(_, flag)| Arc::clone(flag))
    }
}

/// The unknown steps before: `None` if one was taken, and `Some(None)` if all were skipped.
fn unknown(first_step: &FirstStep) -> Option<Option<SharedAnswer>> {
    match first_step {
        FirstStep::Taken => None,
        FirstStep::Ahead => Some(None),
        FirstStep::Unless(skipped) => {
            let known = lock(skipped).poll();
            match known {
                Some(false) => None,
                Some(true) => Some(None),
                None => Some(Some(Arc::clone(skipped))),
            }
        }
    }
}
