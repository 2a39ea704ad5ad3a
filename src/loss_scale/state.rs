//! The states of loss scales, which are also their options.

use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use crate::builder::builder;
use crate::checkpoint::{Prepared, SaveState, SavedState, Stateful};
use crate::error::{Error, Result, ScalerError, ensure};
use crate::loss_scale::{DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale};
use crate::scale::{LARGEST, SMALLEST, check_interval};

/// The state of any loss scale. [`build`](Self::build) makes a loss scale from it, and it can be parsed from text.
///
/// Its serialized form has the kind under the key `kind`, beside the fields. Enable serde_json's feature
/// `float_roundtrip` if a scale that is not a power of two has to survive JSON to the last bit.
///
/// # Examples
///
/// ```
/// use tch::{Device, Tensor};
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
/// A loss scale is parsed from `none` (or `noop`), a number or `static:1024`, `dynamic`, or `dynamic:65536` for a
/// dynamic one that starts at that scale. Case and surrounding spaces do not matter. `Display` prints the same form,
/// without the other options of a dynamic loss scale.
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
    /// The state of a [`NoOpLossScale`].
    NoOp,
    /// The state of a [`StaticLossScale`].
    Static {
        /// The scale.
        loss_scale: f64,
    },
    /// The state of a [`DynamicLossScale`].
    Dynamic(DynamicLossScaleState),
}

impl LossScaleState {
    /// Makes the loss scale on `device`, which should be the device of the loss.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a value outside its range; [`Error::DeviceUnavailable`], with the reason, if the
    /// device cannot be used here.
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

/// The options and the complete state of a [`DynamicLossScale`]. The defaults are jmp's, with the initial scale of
/// jmp's documentation.
///
/// Unlike this state, jmp's pytree of a loss scale does not include `min_loss_scale`, which is reset to its default
/// when the pytree is flattened and unflattened.
///
/// # Examples
///
/// ```
/// use tch::{Device, Tensor};
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
    /// Number of consecutive finite adjustments since the scale last changed or could grow. Defaults to 0.
    pub counter: i64,
    /// Number of consecutive finite adjustments after which the scale grows; at least 1. Defaults to 2000.
    pub period: i64,
    /// Factor by which the scale is multiplied when it grows, and divided when gradients are not finite; more than 1.
    /// Defaults to 2.
    pub factor: f64,
    /// Lower bound of the scale, rounded to f32; at least 2^-126. Defaults to 1.
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
    /// Makes the loss scale on `device`, which should be the device of the loss.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a field outside its range; [`Error::DeviceUnavailable`], with the reason, if the
    /// device cannot be used here.
    pub fn build(self, device: Device) -> Result<DynamicLossScale> {
        DynamicLossScale::from_state(device, self)
    }

    /// Returns the state, with its counter clamped to less than the period, or an error for an invalid state.
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
        // Compared as f32: a scale that sank to the bound equals the rounded bound, which may be below the f64 one.
        let holds = loss_scale as f32 >= min as f32 && loss_scale <= LARGEST;
        ensure("loss_scale", loss_scale, holds, rule)?;
        Ok(Self { counter: counter.min(period - 1), ..self })
    }
}

macro_rules! stateful {
    ($($kind:ty),*) => {$(
        impl Stateful for $kind {
            fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
                state.whole_value(&self.state_dict()?)
            }

            fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
                // Loading replaces the tensors of the clone, which it shared, and leaves those of `self` alone.
                let mut loaded = self.clone();
                loaded.load_state_dict(&saved.whole_value()?)?;
                Ok(Prepared::new(move || *self = loaded))
            }
        }
    )*};
}

stateful!(NoOpLossScale, StaticLossScale, DynamicLossScale);

impl Stateful for Box<dyn LossScale> {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        state.whole_value(&self.state_dict()?)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let state: LossScaleState = saved.whole_value()?;
        // The boxed loss scale can be neither cloned nor replaced, so a new one of the same kind checks the state.
        let device = LossScale::loss_scale(self).map_or(Device::Cpu, Tensor::device);
        self.state_dict()?.build(device)?.load_state_dict(&state)?;
        Ok(Prepared::step(move || self.load_state_dict(&state)))
    }
}
