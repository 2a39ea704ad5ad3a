//! Putting things into a checkpoint.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashSet};

use serde::Serialize;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use crate::checkpoint::entry::Entry;
use crate::checkpoint::error::unsaveable;
use crate::checkpoint::part::{OptimizerPart, Part, problem_of_name};
use crate::checkpoint::plain::Plain;
use crate::checkpoint::restore::names::batch_counts;
use crate::checkpoint::{Checkpoint, CheckpointError, rng_state};
use crate::error::Result;
use crate::optim::{Optimizer, OptimizerState};
use crate::{GradScaler, PerLossScalers};

impl Checkpoint {
    /// Adds all variables of a VarStore, those that are not trainable included. As `model.state_dict()` in PyTorch, which
    /// has a `num_batches_tracked` for each norm with running statistics: tch does not count batches, and 0 is saved.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unsaveable`] for a name that is taken, empty, `__metadata__` or `tch_amp` or has a `/`, and
    /// for a sparse or quantized tensor.
    pub fn add_model(&mut self, name: &str, model: &VarStore) -> Result<()> {
        let variables = model.variables();
        let known: HashSet<_> = variables.keys().map(String::as_str).collect();
        let counts = batch_counts(&known);
        let entries = variables.into_iter().map(|(name, tensor)| {
            let entry = entry(&name, &tensor)?;
            Ok((name, entry))
        });
        let mut entries = entries.collect::<Result<BTreeMap<_, _>>>()?;
        for name in counts {
            entries.insert(name, Entry::in_memory(&Tensor::from(0i64))?);
        }
        self.add(name, Part::Model(entries))
    }

    /// Adds the state of an optimizer. As `optimizer.state_dict()` in PyTorch. May wait as [`Optimizer::state_dict`].
    ///
    /// # Errors
    ///
    /// As [`add_model`](Self::add_model) and [`Optimizer::state_dict`].
    pub fn add_optimizer(&mut self, name: &str, optimizer: &mut Optimizer) -> Result<()> {
        let OptimizerState { state, param_groups } = optimizer.state_dict()?;
        let mut entries = BTreeMap::new();
        for (parameter, tensors) in state {
            let tensors = tensors.into_iter().map(|(key, tensor)| {
                let entry = entry(&parameter, &tensor)?;
                Ok((key, entry))
            });
            let tensors = tensors.collect::<Result<_>>()?;
            entries.insert(parameter, tensors);
        }
        let part = OptimizerPart {
            state: entries,
            param_groups,
            params_are_numbers: false,
            adam_or_adamw: false,
        };
        self.add(name, Part::Optimizer(part))
    }

    /// Adds the state of a scaler. Waits as [`GradScaler::state_dict`].
    ///
    /// # Errors
    ///
    /// As [`add_model`](Self::add_model), and [`Error::IterationOpen`](crate::Error::IterationOpen) before `update`.
    pub fn add_scaler(&mut self, name: &str, scaler: &GradScaler) -> Result<()> {
        self.add(name, Part::Scaler(scaler.state_dict()?))
    }

    /// Adds the states of the scalers of several losses, under `name.0`, `name.1` and so on. Waits as
    /// [`GradScaler::state_dict`].
    ///
    /// # Errors
    ///
    /// As [`add_scaler`](Self::add_scaler); none is added then.
    pub fn add_scalers(&mut self, name: &str, scalers: &PerLossScalers) -> Result<()> {
        let states = scalers.state_dict()?;
        let named = states.into_iter().enumerate();
        let named: Vec<_> = named.map(|(id, state)| (format!("{name}.{id}"), state)).collect();
        named.iter().try_for_each(|(name, _)| self.check_name(name))?;
        let parts = named.into_iter().map(|(name, state)| (name, Part::Scaler(state)));
        self.parts.extend(parts);
        Ok(())
    }

    /// Adds a tensor: dense, of any dtype but the quantized ones, on any device.
    ///
    /// # Errors
    ///
    /// As [`add_model`](Self::add_model).
    pub fn add_tensor(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        self.add(name, Part::Tensor(entry(name, tensor)?))
    }

    /// Adds a small value, such as a step, an epoch, the best loss or a configuration: whatever serde makes JSON of, and
    /// infinite numbers and NaN as well, wherever they stand.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unsaveable`] as in [`add_model`](Self::add_model), and [`CheckpointError::Value`] for what
    /// JSON cannot hold, such as a map whose keys are not strings.
    pub fn add_value(&mut self, name: &str, value: &impl Serialize) -> Result<()> {
        let value = Plain::of(value);
        let wrong = |cause| CheckpointError::Value { name: name.to_owned(), cause };
        self.add(name, Part::Value(value.map_err(wrong)?))
    }

    /// Adds the state of a device's default random number generator. As `torch.get_rng_state()`.
    ///
    /// When training on a GPU save both devices' under two names: dropout draws from the GPU's generator, and shuffling
    /// on the CPU from the CPU's.
    ///
    /// # Errors
    ///
    /// As [`add_model`](Self::add_model), and [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable).
    pub fn add_rng(&mut self, name: &str, device: Device) -> Result<()> {
        self.add_tensor(name, &rng_state(device)?)
    }

    fn add(&mut self, name: &str, part: Part) -> Result<()> {
        self.check_name(name)?;
        self.parts.insert(name.to_owned(), part);
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

fn entry(name: &str, tensor: &Tensor) -> Result<Entry> {
    let quantized = |kind| matches!(kind, Kind::QInt8 | Kind::QInt32 | Kind::QUInt8);
    if !tensor.defined() {
        return Err(unsaveable(name, "it is an undefined tensor").into());
    }
    if tensor.is_sparse() || quantized(tensor.f_kind()?) {
        return Err(unsaveable(
            name,
            "only dense, unquantized tensors can be saved; use `to_dense` or `dequantize`",
        )
        .into());
    }
    Entry::in_memory(tensor)
}
