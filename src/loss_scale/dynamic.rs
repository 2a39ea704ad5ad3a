//! The adaptive loss scale.

use tch::{Device, Kind, Tensor};

use crate::device::check_usable;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::ffi::{OutsideRegions, OverflowCounts, ScaleRule};
use crate::loss_scale::finite::{GRADS_FINITE, flag};
use crate::loss_scale::{DynamicLossScaleState, LossScale, LossScaleState};
use crate::scale::{LARGEST, Mirror, Number};

/// Multiplies the scale by `factor` after `period` consecutive finite adjustments and divides it by `factor` when
/// gradients are not finite. The counterpart of `jmp.DynamicLossScale`, with its defaults:
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
/// Products are computed in f64 and rounded to f32 once, as in PyTorch's scaler; jmp multiplies f32s. For a factor that
/// is exact in f32, such as 2 or 3, the results are the same; for others, such as 1.1, the last bits can differ.
///
/// A [`GradScaler`](crate::GradScaler) with `growth_factor = factor`, `backoff_factor = 1 / factor` and
/// `growth_interval = period` behaves in the same way and runs the same kernel. Each can be made from the other's
/// state:
///
/// ```
/// use tch::Device;
/// use tch_amp::loss_scale::DynamicLossScaleState;
/// use tch_amp::GradScaler;
/// use tch_amp::scaler::GradScalerState;
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
    number: Number,
    period: i64,
    factor: f64,
    min_loss_scale: f64,
}

impl DynamicLossScale {
    /// Makes a loss scale with jmp's defaults on `device`, which should be the device of the loss. For other options
    /// use [`DynamicLossScaleState`].
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`], with the reason, if the device cannot be used here.
    pub fn new(device: Device) -> Result<Self> {
        DynamicLossScaleState::default().build(device)
    }

    pub(super) fn from_state(device: Device, state: DynamicLossScaleState) -> Result<Self> {
        let state = state.checked()?;
        check_usable(device)?;
        let DynamicLossScaleState { loss_scale, counter, period, factor, min_loss_scale } = state;
        let (scale, tracker) = (loss_scale as f32, counter as i32);
        let value = Mirror { scale, tracker, counts: OverflowCounts::default() };
        let number = Number::new(device, value, false, false)?;
        Ok(Self { number, period, factor, min_loss_scale })
    }

    /// Returns the complete state. Synchronizes once after each adjustment. [`state_dict`](LossScale::state_dict) is the
    /// equivalent for any loss scale.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the device cannot be read.
    pub fn state(&self) -> Result<DynamicLossScaleState> {
        // Destructured exhaustively, so that a new field does not compile until it is saved.
        let Self { number, period, factor, min_loss_scale } = self;
        let Mirror { scale, tracker, counts: _ } = number.value()?;
        Ok(DynamicLossScaleState {
            loss_scale: scale.into(),
            counter: tracker.into(),
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
    /// Copies the loss scale. Adjusting one of the two does not change the other.
    fn clone(&self) -> Self {
        Self { number: self.number.shallow_clone(), ..*self }
    }
}

impl LossScale for DynamicLossScale {
    fn loss_scale(&self) -> Option<&Tensor> {
        Some(self.number.tensor())
    }

    fn adjust(&mut self, grads_finite: &Tensor) -> Result<()> {
        let _own = OutsideRegions::enter();
        let found_inf = flag(GRADS_FINITE, grads_finite)?.f_logical_not()?;
        let found_inf = found_inf.f_to_kind(Kind::Float)?;
        // A new number, since graphs, clones and callers hold the old tensors.
        self.number = self.number.changed(&found_inf, self.rule())?;
        Ok(())
    }

    fn value(&self) -> Result<f64> {
        Ok(self.number.value()?.scale.into())
    }

    fn state_dict(&self) -> Result<LossScaleState> {
        self.state().map(LossScaleState::Dynamic)
    }

    fn load_state_dict(&mut self, state: &LossScaleState) -> Result<()> {
        let LossScaleState::Dynamic(state) = *state else {
            return Err(state.is_not("Dynamic"));
        };
        *self = Self::from_state(self.number.tensor().device(), state)?;
        Ok(())
    }
}
