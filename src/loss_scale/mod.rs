//! Functional loss scales: the parts of a [`GradScaler`](crate::GradScaler), for loops that compute their own updates.
//!
//! A loss scale multiplies losses, divides gradients, and adapts to whether the gradients were finite. [`all_finite`]
//! checks that, and [`select_tree`] chooses between the new parameters and the old. If everything is on one device,
//! nothing synchronizes. The names and the arithmetic are those of [jmp](https://github.com/google-deepmind/jmp),
//! except for the last bits of a [`DynamicLossScale`] whose factor is not exact in f32.

mod dynamic;
mod finite;
mod fixed;
mod interop;
mod state;
mod text;

use std::fmt::Debug;

use tch::Tensor;

pub use dynamic::DynamicLossScale;
pub use finite::{all_finite, select_tree};
pub use fixed::{NoOpLossScale, StaticLossScale};
pub use state::{DynamicLossScaleState, LossScaleState};

use crate::error::Result;
#[cfg(doc)]
use crate::error::ScalerError;
use crate::ffi::{self, OutsideRegions};
use crate::tree::Tree;

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
/// use tch_amp::loss_scale::{DynamicLossScale, LossScale, all_finite, select_tree};
///
/// # let cpu = tch::Device::Cpu;
/// let mut loss_scale: Box<dyn LossScale> = Box::new(DynamicLossScale::new(cpu)?);
/// let policy = Policy::BF16;
/// let w = policy.cast_to_param(&Tensor::ones([3], (Kind::Float, cpu)))?;
/// let mut w = w.set_requires_grad(true);
/// for _ in 0..10 {
///     let loss = w.square().sum(Kind::Float);
///     let gradients = Tensor::run_backward(&[loss_scale.scale(&loss)?], &[&w], false, false);
///     let gradients = loss_scale.unscale(&gradients)?;
///     // Clipping and regularisation go here: after unscaling.
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
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a tensor that does not have exactly one element;
    /// nothing is changed then.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::loss_scale::{DynamicLossScaleState, LossScale};
    ///
    /// let mut loss_scale = DynamicLossScaleState::default().loss_scale(8.0).period(2).build(Device::Cpu)?;
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
    /// [`Error::Torch`](crate::Error::Torch) if the device cannot be read.
    fn state_dict(&self) -> Result<LossScaleState>;

    /// Loads a saved state. The loss scale stays on its device.
    ///
    /// # Errors
    ///
    /// [`ScalerError::OtherLossScale`] for the state of another kind of loss scale;
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a value outside its range. Nothing is changed
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
    /// [`Error::Torch`](crate::Error::Torch) if libtorch fails, for instance for lack of memory.
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
    /// [`Error::Torch`](crate::Error::Torch) if the device cannot be read.
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
