//! What loss scales save, load and start from.

use serde::{Deserialize, Serialize};
use tch::Device;

use crate::builder::builder;
use crate::error::{Error, Result, ScalerError, ensure};
use crate::loss_scale::{DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale};
use crate::scale::{LARGEST, SMALLEST, check_interval};

/// The state of any loss scale.
///
/// Serialised, the kind is under the key `kind`, beside the fields. Read JSON with serde_json's feature
/// `float_roundtrip` where a scale that is no power of two must come back to the last bit.
///
/// ```
/// use tch::Device;
/// use tch_amp::loss_scale::LossScaleState;
///
/// let state: LossScaleState = serde_json::from_str(r#"{"kind": "Static", "loss_scale": 256.0}"#)?;
/// let loss_scale = state.build(Device::Cpu)?;
/// assert_eq!(loss_scale.value()?, 256.0);
/// assert_eq!(loss_scale.state_dict()?, state);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
/// # As text
///
/// A loss scale is read from `none` (or `noop`), a number or `static:1024`, `dynamic`, or `dynamic:65536` for one that
/// starts there. Capitals and spaces do not matter. It prints in the same way, without the other options of a dynamic
/// one.
///
/// ```
/// use tch_amp::loss_scale::LossScaleState;
///
/// let state: LossScaleState = "1024".parse()?;
/// assert_eq!(state, LossScaleState::Static { loss_scale: 1024.0 });
/// assert_eq!(state.to_string(), "static:1024");
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind")]
pub enum LossScaleState {
    /// Of a [`NoOpLossScale`].
    NoOp,
    /// Of a [`StaticLossScale`].
    Static {
        /// The scale.
        loss_scale: f64,
    },
    /// Of a [`DynamicLossScale`].
    Dynamic(DynamicLossScaleState),
}

impl LossScaleState {
    /// Makes the loss scale, on `device`: the device of the loss.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a value outside its range; [`Error::DeviceUnavailable`] when the device cannot be
    /// used here, with the reason.
    pub fn build(self, device: Device) -> Result<Box<dyn LossScale>> {
        Ok(match self {
            Self::NoOp => Box::new(NoOpLossScale),
            Self::Static { loss_scale } => Box::new(StaticLossScale::new(device, loss_scale)?),
            Self::Dynamic(state) => Box::new(state.build(device)?),
        })
    }

    /// The error of a loss scale of another kind.
    pub(super) fn is_not(&self, expected: &'static str) -> Error {
        let found = match self {
            Self::NoOp => "NoOp",
            Self::Static { .. } => "Static",
            Self::Dynamic(_) => "Dynamic",
        };
        Error::Scaler(ScalerError::OtherLossScale { expected, found })
    }
}

/// How a [`DynamicLossScale`] starts, and where it stands: all of it. The defaults are jmp's, with the first scale of
/// its documentation.
///
/// jmp itself drops `min_loss_scale` when its loss scale is taken apart and put together again.
///
/// ```
/// use tch::Device;
/// use tch_amp::loss_scale::DynamicLossScaleState;
///
/// let loss_scale = DynamicLossScaleState::default().period(500).build(Device::Cpu)?;
/// assert_eq!(loss_scale.state()?.loss_scale, 32768.0);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct DynamicLossScaleState {
    /// The scale. Defaults to 2^15.
    pub loss_scale: f64,
    /// Adjustments in a row with finite gradients since the scale last changed. Defaults to 0.
    pub counter: i64,
    /// Adjustments in a row with finite gradients before the scale grows; at least 1. Defaults to 2000.
    pub period: i64,
    /// What the scale is multiplied by when it grows, and divided by when gradients are not finite; more than 1.
    /// Defaults to 2.
    pub factor: f64,
    /// The scale never sinks below this, rounded to f32; at least 2^-126. Defaults to 1.
    pub min_loss_scale: f64,
}

builder!(DynamicLossScaleState {
    loss_scale: f64,
    counter: i64,
    period: i64,
    factor: f64,
    min_loss_scale: f64
});

impl Default for DynamicLossScaleState {
    fn default() -> Self {
        Self { loss_scale: 32768.0, counter: 0, period: 2000, factor: 2.0, min_loss_scale: 1.0 }
    }
}

impl DynamicLossScaleState {
    /// Makes the loss scale, on `device`: the device of the loss.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a field outside its range; [`Error::DeviceUnavailable`] when the device cannot be
    /// used here, with the reason.
    pub fn build(self, device: Device) -> Result<DynamicLossScale> {
        DynamicLossScale::from_state(device, self)
    }

    /// The state, with a counter beyond a shortened period brought to its last place, or why there can be no such
    /// state.
    pub(super) fn checked(self) -> Result<Self> {
        let Self { loss_scale, counter, period, factor, min_loss_scale: min } = self;
        check_interval("period", period)?;
        let counts = (0..=i64::from(i32::MAX)).contains(&counter);
        ensure("counter", counter as f64, counts, "from 0 to 2^31 - 1")?;
        let grows = 1.0 < factor && factor < f64::INFINITY;
        ensure("factor", factor, grows, "finite and more than 1")?;
        let rule = "a number from 2^-126 to the largest f32";
        ensure("min_loss_scale", min, (SMALLEST..=LARGEST).contains(&min), rule)?;
        let rule = "a number from min_loss_scale to the largest f32";
        // As f32s, which scales are: one that sank to the bound is the bound, rounded, and may lie below it.
        let holds = loss_scale as f32 >= min as f32 && loss_scale <= LARGEST;
        ensure("loss_scale", loss_scale, holds, rule)?;
        Ok(Self { counter: counter.min(period - 1), ..self })
    }
}
