//! The loss scale that adapts.

use tch::{Device, Kind, Tensor};

use crate::device::check_usable;
use crate::error::{Error, Result};
use crate::ffi::{self, ScaleRule, ScaleUpdate};
use crate::loss_scale::finite::{GRADS_FINITE, flag};
use crate::loss_scale::fixed::tensor;
use crate::loss_scale::{DynamicLossScaleState, LossScale, LossScaleState};
use crate::scaler::config::LARGEST;

/// Grows while gradients are finite and shrinks when they are not. The twin of `jmp.DynamicLossScale`, with its
/// defaults:
///
/// ```text
/// loss_scale = 2^15, counter = 0, period = 2000, factor = 2, min_loss_scale = 1
///
/// adjust(grads_finite):
///     if grads_finite:
///         counter += 1
///         if counter == period:
///             counter = 0
///             if loss_scale * factor is finite: loss_scale *= factor
///     else:
///         counter = 0
///         loss_scale = max(min_loss_scale, loss_scale / factor)
/// ```
///
/// Products are taken in f64 and rounded to f32 once, as PyTorch's scaler does; jmp multiplies f32s. For a factor that
/// is an f32, such as 2 or 3, that gives the same numbers; for others, such as 1.1, the last bits can differ.
///
/// This is what a [`GradScaler`](crate::GradScaler) with `growth_factor = factor`, `backoff_factor = 1 / factor` and
/// `growth_interval = period` does, and it runs the same kernel. Each can be made from the other's state:
///
/// ```
/// use tch::Device;
/// use tch_amp::loss_scale::DynamicLossScaleState;
/// use tch_amp::{GradScaler, GradScalerState};
///
/// let mut scaler = GradScaler::new(Device::Cpu)?;
/// let state = DynamicLossScaleState::try_from(&scaler.state_dict()?)?;
/// assert_eq!((state.loss_scale, state.period), (65536.0, 2000));
/// let loss_scale = state.build(Device::Cpu)?;
///
/// scaler.load_state_dict(&GradScalerState::from(&loss_scale.state()?))?;
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Debug)]
pub struct DynamicLossScale {
    scale: Tensor,
    counter: Tensor,
    period: i64,
    factor: f64,
    min_loss_scale: f64,
}

impl DynamicLossScale {
    /// Makes a loss scale with jmp's defaults on `device`: the device of the loss. [`DynamicLossScaleState`] has the
    /// options.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`] when the device cannot be used here, with the reason.
    pub fn new(device: Device) -> Result<Self> {
        DynamicLossScaleState::default().build(device)
    }

    pub(super) fn from_state(device: Device, state: DynamicLossScaleState) -> Result<Self> {
        let state = state.checked()?;
        check_usable(device)?;
        let DynamicLossScaleState { loss_scale, counter, period, factor, min_loss_scale } = state;
        Ok(Self {
            scale: tensor(loss_scale, device)?,
            counter: ffi::number_new(counter as f64, Kind::Int, device)?,
            period,
            factor,
            min_loss_scale,
        })
    }

    /// Returns the whole state. Waits for the device. [`state_dict`](LossScale::state_dict) is the same for any loss
    /// scale.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the device cannot be read.
    pub fn state(&self) -> Result<DynamicLossScaleState> {
        // Whole, so that a new field does not compile until it is saved.
        let Self { scale, counter, period, factor, min_loss_scale } = self;
        // In one transfer.
        let read = ffi::numbers_read(&[scale, counter])?;
        let [loss_scale, counter] = *read else {
            return Err(Error::Torch(format!("a loss scale was read as {} numbers", read.len())));
        };
        Ok(DynamicLossScaleState {
            loss_scale,
            counter: counter as i64,
            period: *period,
            factor: *factor,
            min_loss_scale: *min_loss_scale,
        })
    }

    fn rule(&self) -> ScaleRule {
        ScaleRule {
            growth_factor: self.factor,
            backoff_factor: 1.0 / self.factor,
            growth_interval: self.period,
            min_scale: self.min_loss_scale,
            max_scale: LARGEST,
            hysteresis: 1,
            tolerance: 0.0,
            consecutive: true,
        }
    }
}

impl Clone for DynamicLossScale {
    /// Copies the loss scale: what happens to the one does not happen to the other.
    fn clone(&self) -> Self {
        let (scale, counter) = (self.scale.shallow_clone(), self.counter.shallow_clone());
        Self { scale, counter, ..*self }
    }
}

impl LossScale for DynamicLossScale {
    fn loss_scale(&self) -> Option<&Tensor> {
        Some(&self.scale)
    }

    fn adjust(&mut self, grads_finite: &Tensor) -> Result<()> {
        let found_inf = flag(GRADS_FINITE, grads_finite)?.f_logical_not()?;
        let found_inf = found_inf.f_to_kind(Kind::Float)?;
        // The kernel writes to copies: graphs, clones and whoever asked hold the tensors from before.
        let (scale, counter) = (self.scale.f_detach_copy()?, self.counter.f_detach_copy()?);
        ffi::scales_update(&[ScaleUpdate {
            scale: &scale,
            tracker: &counter,
            tolerance_counts: None,
            found_infs: &[&found_inf],
            rule: self.rule(),
        }])?;
        (self.scale, self.counter) = (scale, counter);
        Ok(())
    }

    fn state_dict(&self) -> Result<LossScaleState> {
        self.state().map(LossScaleState::Dynamic)
    }

    fn load_state_dict(&mut self, state: &LossScaleState) -> Result<()> {
        let LossScaleState::Dynamic(state) = *state else {
            return Err(state.is_not("Dynamic"));
        };
        *self = Self::from_state(self.scale.device(), state)?;
        Ok(())
    }
}
