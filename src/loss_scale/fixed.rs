//! Loss scales that never change.

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::device::check_usable;
#[cfg(doc)]
use crate::error::Error;
use crate::error::{Result, ensure};
use crate::ffi::{self, OutsideRegions};
use crate::loss_scale::finite::{GRADS_FINITE, flag};
use crate::loss_scale::{LossScale, LossScaleState};
use crate::scale::{LARGEST, SMALLEST};

/// Makes an f32 tensor of a scale on a device.
pub(super) fn tensor(scale: f64, device: Device) -> Result<Tensor> {
    ffi::number_new(scale, Kind::Float, device)
}

/// Leaves losses and gradients unchanged, so that a loop written for a loss scale also runs without one, for instance
/// in bf16. The counterpart of `jmp.NoOpLossScale`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NoOpLossScale;

impl LossScale for NoOpLossScale {
    fn loss_scale(&self) -> Option<&Tensor> {
        None
    }

    fn adjust(&mut self, grads_finite: &Tensor) -> Result<()> {
        flag(GRADS_FINITE, grads_finite).map(drop)
    }

    fn state_dict(&self) -> Result<LossScaleState> {
        Ok(LossScaleState::NoOp)
    }

    fn load_state_dict(&mut self, state: &LossScaleState) -> Result<()> {
        match state {
            LossScaleState::NoOp => Ok(()),
            other => Err(other.is_not("NoOp")),
        }
    }
}

/// Scales by a constant. The counterpart of `jmp.StaticLossScale`.
///
/// # Examples
///
/// ```
/// use tch::{Device, Tensor};
/// use tch_amp::loss_scale::{LossScale, StaticLossScale};
///
/// let loss_scale = StaticLossScale::new(Device::Cpu, 1024.0)?;
/// let scaled = loss_scale.scale(&Tensor::from(3f32))?;
/// assert_eq!(f64::try_from(&scaled)?, 3072.0);
/// assert_eq!(f64::try_from(loss_scale.unscale(&scaled)?)?, 3.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct StaticLossScale {
    scale: Tensor,
}

impl StaticLossScale {
    /// Makes a loss scale of `loss_scale`, rounded to f32, on `device`, which should be the device of the loss.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless `loss_scale` is from 2^-126, the smallest normal f32, to the largest f32;
    /// [`Error::DeviceUnavailable`], with the reason, if the device cannot be used here.
    pub fn new(device: Device, loss_scale: f64) -> Result<Self> {
        check_static(loss_scale)?;
        check_usable(device)?;
        Ok(Self { scale: tensor(loss_scale, device)? })
    }
}

pub(super) fn check_static(loss_scale: f64) -> Result<()> {
    let rule = "a number from 2^-126 to the largest f32";
    ensure("loss_scale", loss_scale, (SMALLEST..=LARGEST).contains(&loss_scale), rule)
}

impl Clone for StaticLossScale {
    fn clone(&self) -> Self {
        Self { scale: self.scale.shallow_clone() }
    }
}

impl LossScale for StaticLossScale {
    fn loss_scale(&self) -> Option<&Tensor> {
        Some(&self.scale)
    }

    fn adjust(&mut self, grads_finite: &Tensor) -> Result<()> {
        flag(GRADS_FINITE, grads_finite).map(drop)
    }

    fn state_dict(&self) -> Result<LossScaleState> {
        let _own = OutsideRegions::enter();
        // Destructured exhaustively, so that a new field does not compile until it is saved.
        let Self { scale } = self;
        Ok(LossScaleState::Static { loss_scale: scale.f_double_value(&[])? })
    }

    fn load_state_dict(&mut self, state: &LossScaleState) -> Result<()> {
        let LossScaleState::Static { loss_scale } = *state else {
            return Err(state.is_not("Static"));
        };
        check_static(loss_scale)?;
        self.scale = tensor(loss_scale, self.scale.device())?;
        Ok(())
    }
}
