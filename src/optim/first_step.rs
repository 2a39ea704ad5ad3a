//! Whether a momentum buffer has been started, where only a device knows which steps were taken.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use crate::error::Result;
use crate::ffi::Arrival;

/// Whether a momentum buffer starts with the next gradient.
#[derive(Debug, Default)]
pub(crate) enum FirstStep {
    #[default]
    Ahead,
    /// It was taken unless all steps since were skipped.
    Unless(Shared),
    Taken,
}

/// Many parameters share one.
type Shared = Arc<Mutex<Skipped>>;

/// Whether some steps were skipped, all of them, as only a device knows until the answer has come.
#[derive(Debug)]
pub(crate) enum Skipped {
    Unknown { flag: Tensor, arrival: Option<Arrival> },
    Known(bool),
}

impl Skipped {
    fn new(flag: Tensor) -> Shared {
        // Without an arrival the answer comes when it is asked for.
        let arrival = Arrival::new(&flag).ok();
        Arc::new(Mutex::new(Self::Unknown { flag, arrival }))
    }

    /// The answer. Waits for the device where only that knows.
    fn ask(&mut self) -> Result<bool> {
        let skipped = match self {
            Self::Known(skipped) => return Ok(*skipped),
            Self::Unknown { flag, .. } => flag.f_reshape([1i64])?.f_double_value(&[0])? != 0.0,
        };
        *self = Self::Known(skipped);
        Ok(skipped)
    }

    /// The answer, if it has come. Never waits.
    fn poll(&mut self) -> Option<bool> {
        let skipped = match self {
            Self::Known(skipped) => return Some(*skipped),
            Self::Unknown { arrival, .. } => arrival.as_ref()?.poll().ok()??,
        };
        *self = Self::Known(skipped);
        Some(skipped)
    }
}

fn lock(skipped: &Shared) -> MutexGuard<'_, Skipped> {
    skipped.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FirstStep {
    /// Whether it is ahead. Waits for the device where only that knows.
    pub(crate) fn is_ahead(&mut self) -> Result<bool> {
        if let Self::Unless(skipped) = self {
            let skipped = lock(skipped).ask()?;
            *self = if skipped { Self::Ahead } else { Self::Taken };
        }
        Ok(matches!(self, Self::Ahead))
    }
}

/// A step that was launched and that the device skips if `found_inf` is not zero.
pub(crate) struct Launched<'a> {
    found_inf: Option<&'a Tensor>,
    /// What was made of what was unknown before.
    joined: Vec<(Option<Shared>, Shared)>,
}

impl<'a> Launched<'a> {
    pub(crate) fn new(found_inf: Option<&'a Tensor>) -> Self {
        Self { found_inf, joined: Vec::new() }
    }

    /// Notes in a parameter's state that it was stepped.
    pub(crate) fn note(&mut self, first_step: &mut FirstStep) {
        let before = match first_step {
            FirstStep::Ahead => None,
            FirstStep::Taken => return,
            FirstStep::Unless(skipped) => {
                let known = lock(skipped).poll();
                match known {
                    Some(false) => return *first_step = FirstStep::Taken,
                    Some(true) => None,
                    None => Some(Arc::clone(skipped)),
                }
            }
        };
        // Without memory for another flag it counts as taken: a buffer of zeros does no harm.
        *first_step = self.join(before).map_or(FirstStep::Taken, FirstStep::Unless);
    }

    /// Whether this step was skipped and those before were, too; `None` if it was taken for certain.
    fn join(&mut self, before: Option<Shared>) -> Option<Shared> {
        let found_inf = self.found_inf?;
        let same = |(known, _): &&(Option<Shared>, Shared)| match (known, &before) {
            (None, None) => true,
            (Some(known), Some(before)) => Arc::ptr_eq(known, before),
            _ => false,
        };
        if let Some((_, joined)) = self.joined.iter().find(same) {
            return Some(Arc::clone(joined));
        }
        let flag = match before.as_ref().map(lock).as_deref() {
            Some(Skipped::Unknown { flag, .. }) => flag.f_minimum(found_inf).ok()?,
            _ => found_inf.shallow_clone(),
        };
        let joined = Skipped::new(flag);
        self.joined.push((before, Arc::clone(&joined)));
        Some(joined)
    }
}
