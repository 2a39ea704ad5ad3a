//! The end of an iteration, at which the scale adapts.

use tch::Tensor;

use crate::error::{Error, Result, ScalerError};
use crate::ffi::{self, FoundInf, ScaleUpdate};
use crate::gradients::overflow;
use crate::scale::{AdaptiveScale, GradScalerConfig, Mirror, Number};

/// The end of the iteration of one scale.
#[derive(Debug)]
pub(crate) struct End<'a> {
    number: &'a Number,
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

impl End<'_> {
    fn change(&self) -> ScaleUpdate<'_> {
        self.number.change(&self.found_infs, self.config.rule())
    }

    /// Counts the iteration after the tensors have changed, and returns the error to report once the iteration is
    /// closed.
    fn finish(&mut self, before: Option<Mirror>) -> Result<Option<Error>> {
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
