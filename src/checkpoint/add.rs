//! Putting things into a checkpoint.

use serde::Serialize;
use tch::nn::VarStore;
use tch::{Device, Tensor};

use crate::GradScaler;
#[cfg(doc)]
use crate::checkpoint::CheckpointError;
use crate::checkpoint::part::{Part, problem_of_name};
use crate::checkpoint::stateful::{entry, plain, save_model, save_scaler, save_scalers};
use crate::checkpoint::{Checkpoint, Rng, SaveState, Stateful};
#[cfg(doc)]
use crate::error::ScalerError;
use crate::error::{Result, unsaveable};
use crate::optim::Optimizer;
use crate::scaler::PerLossScalers;

impl Checkpoint {
    /// Adds anything that is [`Stateful`]: models, optimizers, scalers, loss scales, random numbers, and types of your
    /// own. [`Restore::add`](crate::checkpoint::Restore::add) restores it.
    ///
    /// The other methods that add are short forms for one type each; those for models and scalers borrow them shared.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unsaveable`] for a name that is taken, empty, `__metadata__` or `tch_amp` or has a `/`; those
    /// of [`Stateful::save_state`]. Nothing is added then.
    pub fn add(&mut self, name: &str, what: &mut dyn Stateful) -> Result<()> {
        self.add_by(name, |state| what.save_state(state))
    }

    /// Adds all variables of a VarStore, those that are not trainable included. PyTorch's counterpart is
    /// `model.state_dict()`, which has a `num_batches_tracked` for each norm with running statistics: tch does not count
    /// batches, and 0 is saved.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unsaveable`] for a name that is taken, empty, `__metadata__` or `tch_amp` or has a `/`, and
    /// for a sparse or quantized tensor.
    pub fn add_model(&mut self, name: &str, model: &VarStore) -> Result<()> {
        self.add_by(name, |state| save_model(model, state))
    }

    /// Adds the state of an optimizer: PyTorch's counterpart is `optimizer.state_dict()`. May wait as
    /// [`Optimizer::state_dict`].
    ///
    /// # Errors
    ///
    /// As [`add_model`](Self::add_model) and [`Optimizer::state_dict`].
    pub fn add_optimizer(&mut self, name: &str, optimizer: &mut Optimizer) -> Result<()> {
        self.add(name, optimizer)
    }

    /// Adds the state of a scaler. Waits as [`GradScaler::state_dict`].
    ///
    /// # Errors
    ///
    /// As [`add_model`](Self::add_model), and [`ScalerError::IterationOpen`] before `update`.
    pub fn add_scaler(&mut self, name: &str, scaler: &GradScaler) -> Result<()> {
        self.add_by(name, |state| save_scaler(scaler, state))
    }

    /// Adds the states of the scalers of several losses, under `name.0`, `name.1` and so on. Waits as
    /// [`GradScaler::state_dict`].
    ///
    /// # Errors
    ///
    /// As [`add_scaler`](Self::add_scaler); none is added then.
    pub fn add_scalers(&mut self, name: &str, scalers: &PerLossScalers) -> Result<()> {
        self.add_by(name, |state| save_scalers(scalers, state))
    }

    /// Adds a tensor: dense, of any dtype but the quantized ones, on any device.
    ///
    /// # Errors
    ///
    /// As [`add_model`](Self::add_model).
    pub fn add_tensor(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        self.insert(vec![(name.to_owned(), Part::Tensor(entry(name, tensor)?))])
    }

    /// Adds a small value, such as a step, an epoch, the best loss or a configuration: whatever serde makes JSON of, and
    /// infinite numbers and NaN as well, wherever they stand.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unsaveable`] as in [`add_model`](Self::add_model), and [`CheckpointError::Value`] for what
    /// JSON cannot hold, such as a map whose keys are not strings.
    pub fn add_value(&mut self, name: &str, value: &impl Serialize) -> Result<()> {
        self.insert(vec![(name.to_owned(), Part::Value(plain(name, value)?))])
    }

    /// Adds the state of a device's default random number generator, which `torch.get_rng_state()` returns in PyTorch.
    ///
    /// When training on a GPU save both devices' under two names: dropout draws from the GPU's generator, and shuffling
    /// on the CPU from the CPU's.
    ///
    /// # Errors
    ///
    /// As [`add_model`](Self::add_model), and [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable).
    pub fn add_rng(&mut self, name: &str, device: Device) -> Result<()> {
        self.add(name, &mut Rng(device))
    }

    fn add_by(
        &mut self,
        name: &str,
        save: impl FnOnce(&mut SaveState<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut state = SaveState::new(name);
        save(&mut state)?;
        self.insert(state.finish())
    }

    /// All of them, or none.
    fn insert(&mut self, parts: Vec<(String, Part)>) -> Result<()> {
        parts.iter().try_for_each(|(name, _)| self.check_name(name))?;
        self.parts.extend(parts);
        Ok(())
    }

    fn check_name(&self, name: &str) -> Result<()> {
        let taken =
            || self.parts.contains_key(name).then_some("there is a part of that name already");
        match problem_of_name(name).or_else(taken) {
            Some(problem) => Err(unsaveable(name, problem).into()),
            None => Ok(()),
        }
    }
}
