//! Buffers: the variables of a model that are not trained, such as the running statistics of BatchNorm.
//!
//! A forward that overflows writes infinities into them, and skipping the step does not take those back.

use std::collections::HashSet;

use tch::nn::VarStore;
use tch::{Tensor, no_grad};

use crate::error::{CheckpointError, Error, Result};
use crate::ffi;

/// A copy of a model's buffers, to be put back after a skipped step. PyTorch has no twin.
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
    /// Copies the buffers of `vs`: its variables that are not trainable. Variables added later are not in it.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if there is no memory for the copies.
    pub fn new(vs: &VarStore) -> Result<Self> {
        let copy = |(_, buffer): (String, Tensor)| Ok((buffer.f_detach_copy()?, buffer));
        let pairs = buffers(vs)?.into_iter().map(copy);
        let pairs = pairs.map(|pair: Result<_>| pair.map(|(copy, buffer)| (buffer, copy)));
        Ok(Self { pairs: pairs.collect::<Result<_>>()? })
    }

    /// Copies the buffers as they are now, into the memory of the last copy. Does not wait for the device.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if a buffer has changed its shape.
    pub fn save(&mut self) -> Result<()> {
        for (buffer, copy) in &mut self.pairs {
            copy.f_copy_(buffer)?;
        }
        Ok(())
    }

    /// Puts the last copy back. Does not wait for the device.
    ///
    /// # Errors
    ///
    /// As [`save`](Self::save).
    pub fn restore(&mut self) -> Result<()> {
        no_grad(|| {
            for (buffer, copy) in &mut self.pairs {
                buffer.f_copy_(copy)?;
            }
            Ok(())
        })
    }
}

/// Fails if a buffer of `vs` holds an infinity or a NaN: a check for before a model is saved. Waits for the device.
/// PyTorch has no twin.
///
/// # Errors
///
/// [`CheckpointError::NonFiniteBuffer`] with the name of the first such buffer.
pub fn check_buffers_finite(vs: &VarStore) -> Result<()> {
    for (name, buffer) in buffers(vs)? {
        let finite = buffer.f_isfinite()?.f_all()?;
        if finite.f_int64_value(&[])? == 0 {
            return Err(Error::Checkpoint(CheckpointError::NonFiniteBuffer { name }));
        }
    }
    Ok(())
}

/// The variables that are not trainable, by name.
fn buffers(vs: &VarStore) -> Result<Vec<(String, Tensor)>> {
    let trainable: HashSet<_> = ffi::identities(&vs.trainable_variables())?.into_iter().collect();
    let (names, tensors): (Vec<_>, Vec<_>) = vs.variables().into_iter().unzip();
    let identities = ffi::identities(&tensors)?;
    let named = names.into_iter().zip(tensors).zip(identities);
    let mut buffers: Vec<_> = named
        .filter(|(_, identity)| !trainable.contains(identity))
        .map(|(named, _)| named)
        .collect();
    buffers.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(buffers)
}
