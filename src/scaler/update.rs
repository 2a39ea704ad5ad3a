//! Ending an iteration.

use tch::Tensor;

use crate::error::{Error, Result};
use crate::ffi::{self, ScaleUpdate};
use crate::scaler::scale::{Mirror, Scale};
use crate::scaler::{GradScaler, GradScalerConfig};

impl GradScaler {
    /// Ends the iteration: backs the scale off if any optimizer's gradients overflowed, or counts towards its growth.
    ///
    /// The scale stays as it is where unscaling broke off and nothing else was checked.
    ///
    /// Waits for the device only with `error_at_min_scale` or `max_consecutive_skips` where an overflow is known on a GPU
    /// only, as that of a fused optimizer is, or where the scale is on the CPU and the overflow is not.
    ///
    /// # Errors
    ///
    /// [`Error::NoInfChecks`] when no gradient was checked since the last update, and [`Error::UnscaleFailed`] when
    /// unscaling broke off and the gradients were not zeroed since; nothing changes then.
    /// [`Error::TooManySkips`] at the configured limit, and [`Error::ScaleAtMinimum`] with `error_at_min_scale`; the
    /// iteration has been ended as usual then.
    pub fn update(&mut self) -> Result<()> {
        self.check_whole("update")?;
        let Some(scale) = &mut self.scale else {
            return Ok(());
        };
        let iteration = self.iteration.get_mut();
        let is_broken = iteration.check_broken()?;
        let (found_infs, overflow) = iteration.found_infs();
        let given_up = if found_infs.is_empty() && is_broken {
            None
        } else {
            let end = End::new(scale, &self.config, &mut self.skips, found_infs, overflow)?;
            end_all(&mut [end])?
        };
        iteration.close();
        given_up.map_or(Ok(()), Err)
    }

    /// Ends the iteration with a given scale. The growth tracker and the count of skips stay. Does not wait for the
    /// device. As `update(new_scale)` with a number.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidValue`] unless `new_scale` is from `min_scale` to `max_scale`; nothing changes then.
    pub fn update_with(&mut self, new_scale: f64) -> Result<()> {
        self.check_whole("update, and load_state_dict for another scale,")?;
        let Some(scale) = &mut self.scale else {
            return Ok(());
        };
        self.config.check_scale("new_scale", new_scale)?;
        scale.set_scale(new_scale as f32)?;
        self.iteration.get_mut().close();
        Ok(())
    }

    /// Ends the iteration with the scale in a one-element tensor. Waits for the tensor's device, because a scale that
    /// is not finite must not get through. As `update(new_scale)` with a tensor.
    ///
    /// # Errors
    ///
    /// As [`update_with`](Self::update_with), also for a tensor that has not one element; [`Error::Torch`] for an
    /// undefined one.
    pub fn update_with_tensor(&mut self, new_scale: &Tensor) -> Result<()> {
        let value = new_scale.f_view(-1)?.f_detach()?;
        if value.numel() != 1 {
            let (field, value) = ("the number of elements of new_scale", value.numel() as f64);
            return Err(Error::InvalidValue { field, value, rule: "1" });
        }
        self.update_with(value.f_double_value(&[0])?)
    }
}

/// The end of the iteration of one scale.
#[derive(Debug)]
pub(super) struct End<'a> {
    scale: &'a mut Scale,
    config: &'a GradScalerConfig,
    skips: &'a mut u32,
    found_infs: Vec<&'a Tensor>,
    overflow: Option<bool>,
    /// Whether the scale cannot back off as it should.
    is_stuck: bool,
}

impl<'a> End<'a> {
    /// Learns what it takes to end the iteration, and changes nothing.
    pub(super) fn new(
        scale: &'a mut Scale,
        config: &'a GradScalerConfig,
        skips: &'a mut u32,
        found_infs: Vec<&'a Tensor>,
        mut overflow: Option<bool>,
    ) -> Result<Self> {
        if found_infs.is_empty() {
            return Err(Error::NoInfChecks);
        }
        let gives_up = config.max_consecutive_skips.is_some() || config.error_at_min_scale;
        if overflow.is_none() && gives_up {
            overflow = Some(ffi::any_nonzero(&found_infs)?);
        }
        // What an error will tell has to be known before anything changes.
        let known = if gives_up && overflow == Some(true) { Some(scale.value()?) } else { None };
        let is_stuck = known.is_some_and(|known| known.is_stuck(&config.rule()));
        let is_stuck = config.error_at_min_scale && is_stuck;
        Ok(Self { scale, config, skips, found_infs, overflow, is_stuck })
    }

    fn change(&self) -> ScaleUpdate<'_> {
        self.scale.change(&self.found_infs, self.config.rule())
    }

    /// Counts, once the tensors have changed, and returns the error to tell when the iteration is closed.
    fn finish(&mut self, before: Option<Mirror>) -> Result<Option<Error>> {
        self.scale.follow(before, self.overflow, &self.config.rule());
        let skips = if self.overflow == Some(true) { self.skips.saturating_add(1) } else { 0 };
        *self.skips = skips;
        let limit = self.config.max_consecutive_skips.filter(|limit| skips >= *limit);
        if limit.is_none() && !self.is_stuck {
            return Ok(None);
        }
        // The host knows it: it knew the scale from before, and of the overflow.
        let scale = self.scale.value()?.scale.into();
        Ok(Some(match limit {
            Some(limit) => Error::TooManySkips { skips, limit, scale },
            None => Error::ScaleAtMinimum { scale },
        }))
    }
}

/// Ends the iteration of some scales: of all, or after an error of none. Returns the first error to tell once they are
/// closed.
pub(super) fn end_all(ends: &mut [End<'_>]) -> Result<Option<Error>> {
    let before: Vec<_> = ends.iter().map(|end| end.scale.forget()).collect();
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
