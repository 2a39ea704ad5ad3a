//! Functional loss scales: the parts of a [`GradScaler`](crate::GradScaler), for loops that compute their own updates.
//!
//! A loss scale multiplies losses, divides gradients, and adapts to whether the gradients were finite. [`all_finite`]
//! checks that, and [`select_tree`] chooses between the new parameters and the old. If everything is on one device,
//! nothing synchronizes. The names and the arithmetic are those of [jmp](https://github.com/google-deepmind/jmp),
//! except for the last bits of a [`DynamicLossScale`] whose factor is not exact in f32.

mod dynamic;
mod finite;

use std::fmt::{self, Debug};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize};
use tch::{Device, Kind, Tensor};

use crate::checkpoint::{Prepared, SaveState, SavedState, Stateful};
use crate::device::check_usable;
use crate::error::{Error, Number, Result, ScalerError, ensure};
use crate::ffi::{self, OutsideRegions};
use crate::loss_scale::finite::{GRADS_FINITE, flag};
use crate::scale::{LARGEST, SMALLEST};
use crate::tagged::{self, Variant};
use crate::tree::Tree;

pub use dynamic::{DynamicLossScale, DynamicLossScaleState};
pub use finite::{all_finite, select_tree};

/// A scale for losses: [`NoOpLossScale`], [`StaticLossScale`] or [`DynamicLossScale`]. The counterpart of
/// `jmp.LossScale`.
///
/// The same loop works with each of them, also behind `Box<dyn LossScale>` and `&mut dyn LossScale`, and for parameters
/// of any kind. (A `&dyn LossScale` lacks `scale` and `unscale`, which are generic: take `&impl LossScale` instead.)
///
/// # Examples
///
/// ```
/// use tch::{Kind, Tensor};
/// use tch_amp::Policy;
/// use tch_amp::function::{GradConfig, grad};
/// use tch_amp::loss_scale::{DynamicLossScale, LossScale, all_finite, select_tree};
///
/// # let cpu = tch::Device::Cpu;
/// let mut loss_scale: Box<dyn LossScale> = Box::new(DynamicLossScale::new(cpu)?);
/// let policy = Policy::BF16;
/// let w = policy.cast_to_param(&Tensor::ones([3], (Kind::Float, cpu)))?;
/// let mut w = w.set_requires_grad(true);
/// for _ in 0..10 {
///     let loss = w.square().sum(Kind::Float);
///     // A regularization term of the loss is added here: before scaling.
///     let gradients = grad(&[loss_scale.scale(&loss)?], &[&w], &GradConfig::default())?;
///     let gradients: Vec<_> = loss_scale.unscale(&gradients)?.into_iter().flatten().collect();
///     // Clipping goes here: after unscaling.
///     let finite = all_finite(&gradients)?;
///     // Unscaled gradients of half-precision parameters are f32, and so are the updates.
///     let new = policy.cast_to_param(&tch::no_grad(|| &w - 0.1 * &gradients[0]))?;
///     w = select_tree(&finite, &new, &w.detach())?.set_requires_grad(true);
///     loss_scale.adjust(&finite)?;
/// }
/// assert!(f64::try_from(w.abs().max())? < 0.2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait LossScale: Debug + Send {
    /// Returns the scale, a 0-dim f32 tensor on the loss scale's device, or `None` for a loss scale that does nothing.
    /// The tensor never changes: [`adjust`](Self::adjust) makes another one, and a program must not write to it. The
    /// counterpart of `loss_scale` in jmp.
    fn loss_scale(&self) -> Option<&Tensor>;

    /// Adapts the scale to whether the gradients were finite. `grads_finite` is a tensor with one element on any
    /// device, such as the result of [`all_finite`]; zero means false. Synchronizes only where it is on a GPU and the
    /// scale on the CPU. The counterpart of `adjust` in jmp, which returns the next loss scale instead.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a tensor that does not have exactly one element;
    /// nothing is changed then.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::loss_scale::{DynamicLossScaleState, LossScale};
    ///
    /// let mut loss_scale = DynamicLossScaleState {
    ///     loss_scale: 8.0,
    ///     period: 2,
    ///     ..Default::default()
    /// }.build(Device::Cpu)?;
    /// let mut scales = Vec::new();
    /// for finite in [true, true, false] {
    ///     loss_scale.adjust(&Tensor::from(finite))?;
    ///     scales.push(loss_scale.value()?);
    /// }
    /// assert_eq!(scales, [8.0, 16.0, 8.0]);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    fn adjust(&mut self, grads_finite: &Tensor) -> Result<()>;

    /// Returns the complete state, to be saved. Synchronizes.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the device cannot be read.
    fn state_dict(&self) -> Result<LossScaleState>;

    /// Loads a saved state. The loss scale stays on its device.
    ///
    /// # Errors
    ///
    /// [`ScalerError::OtherLossScale`] for the state of another kind of loss scale;
    /// [`Error::InvalidArgument`] for a value outside its range. Nothing is changed
    /// then.
    fn load_state_dict(&mut self, state: &LossScaleState) -> Result<()>;

    /// Multiplies the floating-point and complex tensors of a tree, the losses, by the scale; other tensors are
    /// returned unchanged.
    ///
    /// Half-precision tensors become f32, as in jmp, since the product could overflow fp16; a [`NoOpLossScale`] leaves
    /// them in half precision. A tensor on another device than the scale is multiplied on its own device. Synchronizes
    /// only where the scale is on a GPU and a tensor on the CPU.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if libtorch fails, for instance for lack of memory.
    fn scale<T: Tree + ?Sized>(&self, tree: &T) -> Result<T::Output>
    where
        Self: Sized,
    {
        multiply(tree, self.loss_scale())
    }

    /// Divides the floating-point and complex tensors of a tree, the gradients, by the scale, as multiplication by its
    /// reciprocal. Other tensors are returned unchanged, as are undefined ones, the gradients of unused parameters.
    ///
    /// Half-precision gradients become f32, as in jmp, since the small values that scaling preserves would underflow
    /// again. [`Policy::cast_to_param`](crate::Policy::cast_to_param) casts them back where that is wanted.
    /// Synchronizes like [`scale`](Self::scale).
    ///
    /// # Errors
    ///
    /// The same as [`scale`](Self::scale).
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor};
    /// use tch_amp::loss_scale::{LossScale, StaticLossScale};
    ///
    /// let loss_scale = StaticLossScale::new(Device::Cpu, 1024.0)?;
    /// let scaled = (Tensor::from(2048f32), Tensor::from(512f32).to_kind(Kind::Half));
    /// let (weight, bias) = loss_scale.unscale(&scaled)?;
    /// assert_eq!((weight, bias), (Tensor::from(2f32), Tensor::from(0.5f32)));
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    fn unscale<T: Tree + ?Sized>(&self, tree: &T) -> Result<T::Output>
    where
        Self: Sized,
    {
        divide(tree, self.loss_scale())
    }

    /// Returns the scale as a number; 1 for a [`NoOpLossScale`]. Synchronizes, unless the host already has the number.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the device cannot be read.
    fn value(&self) -> Result<f64> {
        let _own = OutsideRegions::enter();
        self.loss_scale().map_or(Ok(1.0), |scale| Ok(scale.f_double_value(&[])?))
    }
}

macro_rules! forward {
    ($($pointer:ty),*) => {$(
        impl<L: LossScale + ?Sized> LossScale for $pointer {
            fn loss_scale(&self) -> Option<&Tensor> {
                (**self).loss_scale()
            }

            fn value(&self) -> Result<f64> {
                (**self).value()
            }

            fn adjust(&mut self, grads_finite: &Tensor) -> Result<()> {
                (**self).adjust(grads_finite)
            }

            fn state_dict(&self) -> Result<LossScaleState> {
                (**self).state_dict()
            }

            fn load_state_dict(&mut self, state: &LossScaleState) -> Result<()> {
                (**self).load_state_dict(state)
            }
        }
    )*};
}

forward!(Box<L>, &mut L);

fn divide<T: Tree + ?Sized>(tree: &T, scale: Option<&Tensor>) -> Result<T::Output> {
    let _own = OutsideRegions::enter();
    let inverse = scale.map(|scale| scale.f_reciprocal()).transpose()?;
    multiply(tree, inverse.as_ref())
}

fn multiply<T: Tree + ?Sized>(tree: &T, factor: Option<&Tensor>) -> Result<T::Output> {
    let Some(factor) = factor else {
        return tree.try_map(&mut |tensor| Ok(tensor.shallow_clone()));
    };
    tree.try_map(&mut |tensor| product(tensor, factor))
}

fn product(tensor: &Tensor, factor: &Tensor) -> Result<Tensor> {
    match finite::number_kind(tensor) {
        Some(_) => ffi::scaled(tensor, factor),
        None => Ok(tensor.shallow_clone()),
    }
}

/// The state of any loss scale. [`build`](Self::build) makes a loss scale from it, and it can be parsed from text.
///
/// Its serialized form has the kind under the key `kind`, beside the fields. Enable serde_json's feature
/// `float_roundtrip` if a scale that is not a power of two has to survive JSON to the last bit.
///
/// # Examples
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
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
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

impl<'de> Deserialize<'de> for LossScaleState {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct NoOp {}
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Static {
            loss_scale: f64,
        }
        let variants: [Variant<Self>; 3] = [
            ("NoOp", |fields| serde_json::from_value(fields).map(|NoOp {}| Self::NoOp)),
            ("Static", |fields| {
                let Static { loss_scale } = serde_json::from_value(fields)?;
                Ok(Self::Static { loss_scale })
            }),
            ("Dynamic", |fields| serde_json::from_value(fields).map(Self::Dynamic)),
        ];
        tagged::read(from, "kind", &variants)
    }
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

/// The result of parsing, or the problem.
type Read<T> = std::result::Result<T, String>;

impl FromStr for LossScaleState {
    type Err = Error;

    /// Parses a loss scale; see the [type](LossScaleState#as-text) for the grammar.
    fn from_str(text: &str) -> Result<Self> {
        let small = text.to_ascii_lowercase();
        read(small.trim()).map_err(|problem| {
            Error::Scaler(ScalerError::LossScaleText { text: text.to_owned(), problem })
        })
    }
}

fn read(text: &str) -> Read<LossScaleState> {
    let (kind, start) = match text.split_once(':') {
        Some((kind, start)) => (kind.trim(), Some(start.trim())),
        None => (text, None),
    };
    match (kind, start) {
        ("", None) => Err("it is empty".to_owned()),
        ("none" | "noop", None) => Ok(LossScaleState::NoOp),
        ("none" | "noop", Some(_)) => Err(format!("`{kind}` takes no number")),
        ("static", None) => Err("`static` takes a number".to_owned()),
        ("static", Some(scale)) => fixed_state(scale),
        ("dynamic", start) => dynamic_state(start),
        (scale, None) => fixed_state(scale),
        _ => Err(format!("there is no `{kind}` loss scale")),
    }
}

fn fixed_state(text: &str) -> Read<LossScaleState> {
    let loss_scale = number(text)?;
    check_static(loss_scale).map_err(|error| error.to_string())?;
    Ok(LossScaleState::Static { loss_scale })
}

fn dynamic_state(start: Option<&str>) -> Read<LossScaleState> {
    let mut state = DynamicLossScaleState::default();
    if let Some(start) = start {
        state.loss_scale = number(start)?;
    }
    let lowest = Number(state.min_loss_scale);
    let outside = |_| format!("a dynamic one starts at {lowest} or more, up to the largest f32");
    state.checked().map(LossScaleState::Dynamic).map_err(outside)
}

fn number(text: &str) -> Read<f64> {
    text.parse().map_err(|_| format!("`{text}` is not a number"))
}

impl fmt::Display for LossScaleState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoOp => f.write_str("none"),
            Self::Static { loss_scale } => write!(f, "static:{loss_scale}"),
            Self::Dynamic(state) => write!(f, "dynamic:{}", state.loss_scale),
        }
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
