//! The trait of everything that a checkpoint saves and restores, and its implementations.
//!
//! A restore has two phases. In the first, every target checks its [`SavedState`] and allocates; in the second, which
//! runs only if all of them succeeded, each [`Prepared`] is carried out. A state of a kind with a layout of its own,
//! such as a model or an optimizer, becomes one part as a whole; any other is a dict of tensors and values.

mod dict;
mod model;
mod optimizer;
mod prepared;
mod rng;
mod save;
mod saved;

use crate::error::Result;

pub use prepared::Prepared;
pub use rng::Rng;
#[cfg(feature = "distributed")]
pub(crate) use rng::check_rng_state;
pub use save::SaveState;
pub(crate) use save::{entry, plain};
pub use saved::SavedState;

/// A type whose state can be saved in a checkpoint and restored from it. The counterpart of `state_dict` and
/// `load_state_dict`, except that a restore has two phases: first every state is checked, and then all are replaced.
///
/// [`Checkpoint::add`](crate::checkpoint::Checkpoint::add) saves the state and
/// [`Restore::add`](crate::checkpoint::Restore::add) restores it. The trait is implemented for
/// [`VarStore`](tch::nn::VarStore), [`Optimizer`](crate::optim::Optimizer), [`GradScaler`](crate::GradScaler),
/// [`PerLossScalers`](crate::scaler::PerLossScalers), [`MixedPrecision`](crate::MixedPrecision), the loss scales, a
/// `Box<dyn LossScale>`,
/// [`Scheduler`](crate::schedule::Scheduler), [`PlateauScheduler`](crate::schedule::PlateauScheduler),
/// [`AveragedWeights`](crate::average::AveragedWeights), a window of micro-batches
/// [with its gradients](crate::accumulation::Accumulation::with_gradients),
/// [`SpikeDetector`](crate::scaler::SpikeDetector),
/// [`ScaleHistory`](crate::insight::ScaleHistory), [`Rng`], mutable references to any of these, and shared references to
/// a `VarStore` and, to save it, to a `MixedPrecision`.
///
/// To save your own type, implement the trait. The state is saved as a dict of its tensors and values, which Python
/// reads from a `.pt` file with `weights_only=True`:
///
/// ```
/// use std::collections::BTreeMap;
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::Result;
/// use tch_amp::checkpoint::{Checkpoint, Prepared, SaveState, SavedState, Stateful};
///
/// /// A learning rate that decays.
/// struct Decay { lr: f64, epoch: u64 }
///
/// impl Stateful for Decay {
///     fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
///         state.value("lr", &self.lr)?;
///         state.value("epoch", &self.epoch)
///     }
///
///     fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
///         let loaded = Decay { lr: saved.value("lr")?, epoch: saved.value("epoch")? };
///         Ok(Prepared::new(move || *self = loaded))
///     }
/// }
///
/// /// An exponential moving average of a model's weights.
/// struct Ema { updates: u64, weights: BTreeMap<String, Tensor> }
///
/// impl Stateful for Ema {
///     fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
///         state.value("updates", &self.updates)?;
///         state.tensors(&self.weights)
///     }
///
///     fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
///         let updates = saved.value("updates")?;
///         Ok(saved.copy_to(&self.weights)?.then(move || self.updates = updates))
///     }
/// }
///
/// # let ones = |value: f64| Tensor::ones([2], (Kind::Float, Device::Cpu)) * value;
/// let mut decay = Decay { lr: 0.1, epoch: 7 };
/// let mut ema = Ema { updates: 3, weights: BTreeMap::from([("w".to_owned(), ones(0.5))]) };
/// let mut checkpoint = Checkpoint::new();
/// checkpoint.add("decay", &mut decay)?;
/// checkpoint.add("ema", &mut ema)?;
///
/// let mut new_decay = Decay { lr: 1.0, epoch: 0 };
/// let mut new_ema = Ema { updates: 0, weights: BTreeMap::from([("w".to_owned(), ones(0.0))]) };
/// checkpoint.restore().add("decay", &mut new_decay).add("ema", &mut new_ema).apply()?;
/// assert_eq!((new_decay.lr, new_decay.epoch, new_ema.updates), (0.1, 7, 3));
/// assert_eq!(new_ema.weights["w"], ones(0.5));
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub trait Stateful {
    /// Records the state as named tensors, which are not copied, and named values.
    ///
    /// # Errors
    ///
    /// Any error. [`Checkpoint::add`](crate::checkpoint::Checkpoint::add) returns it and leaves the checkpoint as it
    /// was.
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()>;

    /// Checks a saved state, allocates what is needed to load it, and returns the remaining work as a [`Prepared`].
    /// `self` must not change yet, because another part of the same restore may still be refused.
    ///
    /// In a [`strict`](crate::checkpoint::Restore::strict) restore, it is an error if the state has a name that this
    /// method did not read.
    ///
    /// # Errors
    ///
    /// Any error, such as for a state that does not fit. [`Restore::apply`](crate::checkpoint::Restore::apply) returns
    /// it, and nothing changes.
    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>>;
}

impl<S: Stateful + ?Sized> Stateful for &mut S {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        (**self).save_state(state)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        (**self).prepare_restore(saved)
    }
}
