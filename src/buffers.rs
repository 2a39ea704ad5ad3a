//! Saves and restores a model's buffers: its variables that are not trained, such as the running statistics of
//! BatchNorm.
//!
//! A forward pass that overflows writes non-finite numbers into the running statistics, and skipping the step does not
//! undo that.

use std::collections::HashSet;

use tch::nn::VarStore;
use tch::{Tensor, no_grad};

use crate::error::{CheckpointError, Error, Result};
use crate::ffi::{self, OutsideRegions};
use crate::variables::{named, variables};

/// A copy of a model's buffers, to be restored after a skipped step. PyTorch has no counterpart.
///
/// # Examples
///
/// ```no_run
/// # use tch::{Tensor, nn};
/// # use tch_amp::{GradScaler, Result};
/// # use tch_amp::buffers::BufferSnapshot;
/// # fn train(scaler: &mut GradScaler, opt: &mut nn::Optimizer, vs: &nn::VarStore, loss: &dyn Fn() -> Tensor) -> Result<()> {
/// let mut buffers = BufferSnapshot::new(vs)?;
/// for _ in 0..1000 {
///     buffers.save()?;
///     scaler.backward(&loss())?;
///     if scaler.step(opt)?.is_skipped()? {
///         buffers.restore()?;
///     }
///     scaler.update()?;
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct BufferSnapshot {
    /// The buffers and their copies.
    pairs: Vec<(Tensor, Tensor)>,
}

impl BufferSnapshot {
    /// Copies the buffers of `vs`, that is, its variables that are not trainable. Variables that are added to `vs`
    /// later are not included. Does not synchronize.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the copies cannot be allocated.
    pub fn new(vs: &VarStore) -> Result<Self> {
        Self::of(buffers(vs)?.iter().map(|(_, buffer)| buffer))
    }

    /// Copies these buffers.
    pub(crate) fn of<'a>(buffers: impl IntoIterator<Item = &'a Tensor>) -> Result<Self> {
        let _own = OutsideRegions::enter();
        let copy = |buffer: &Tensor| Ok((buffer.shallow_clone(), buffer.f_detach_copy()?));
        Ok(Self { pairs: buffers.into_iter().map(copy).collect::<Result<_>>()? })
    }

    /// Copies the buffers as they are now, into the memory of the previous copy. Does not synchronize.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the shape of a buffer has changed.
    pub fn save(&mut self) -> Result<()> {
        let _own = OutsideRegions::enter();
        for (buffer, copy) in &mut self.pairs {
            copy.f_copy_(buffer)?;
        }
        Ok(())
    }

    /// Restores the buffers from the last copy, in place. Does not synchronize.
    ///
    /// # Errors
    ///
    /// The same as [`save`](Self::save).
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, nn};
    /// use tch_amp::buffers::BufferSnapshot;
    ///
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let mut mean = vs.root().zeros_no_train("running_mean", &[2]);
    /// let mut buffers = BufferSnapshot::new(&vs)?;
    /// // A forward pass that overflows:
    /// let _ = mean.fill_(f64::INFINITY);
    /// buffers.restore()?;
    /// assert_eq!(Vec::<f64>::try_from(&mean)?, [0.0, 0.0]);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn restore(&mut self) -> Result<()> {
        let _own = OutsideRegions::enter();
        no_grad(|| {
            for (buffer, copy) in &mut self.pairs {
                buffer.f_copy_(copy)?;
            }
            Ok(())
        })
    }
}

/// Returns an error if a buffer of `vs` has a non-finite element. Call it before you save a model. Synchronizes, once
/// for each buffer. PyTorch has no counterpart.
///
/// # Errors
///
/// [`CheckpointError::NonFiniteBuffer`] with the name of the first such buffer in alphabetical order; [`Error::Torch`]
/// if libtorch fails.
///
/// # Examples
///
/// ```
/// use tch::{Device, nn};
/// use tch_amp::buffers::check_buffers_finite;
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let mut mean = vs.root().sub("norm").zeros_no_train("running_mean", &[2]);
/// check_buffers_finite(&vs)?;
/// let _ = mean.fill_(f64::NAN);
/// let problem = check_buffers_finite(&vs).map_err(|error| error.to_string());
/// assert!(problem.is_err_and(|problem| problem.starts_with("the buffer norm.running_mean has an infinite or NaN")));
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn check_buffers_finite(vs: &VarStore) -> Result<()> {
    let _own = OutsideRegions::enter();
    for (name, buffer) in buffers(vs)? {
        let finite = buffer.f_isfinite()?.f_all()?;
        if finite.f_int64_value(&[])? == 0 {
            return Err(Error::Checkpoint(CheckpointError::NonFiniteBuffer { name }));
        }
    }
    Ok(())
}

/// Returns the variables that are not trainable, sorted by name.
pub(crate) fn buffers(vs: &VarStore) -> Result<Vec<(String, Tensor)>> {
    let trainable: HashSet<_> = ffi::identities(&vs.trainable_variables())?.into_iter().collect();
    let (names, tensors): (Vec<_>, Vec<_>) = named(variables(vs)?).into_iter().unzip();
    let identities = ffi::identities(&tensors)?;
    let named = names.into_iter().zip(tensors).zip(identities);
    let buffers = named.filter(|(_, identity)| !trainable.contains(identity));
    Ok(buffers.map(|(named, _)| named).collect())
}
