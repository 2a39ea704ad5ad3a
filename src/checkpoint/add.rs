//! Adding parts to a checkpoint.

use std::collections::HashSet;

use serde::Serialize;
use tch::Tensor;

#[cfg(doc)]
use crate::checkpoint::CheckpointError;
use crate::checkpoint::part::{Part, problem_of_name};
use crate::checkpoint::room::Room;
use crate::checkpoint::stateful::{entry, plain};
use crate::checkpoint::{Checkpoint, SaveState, Stateful};
use crate::error::{Result, unsaveable};

impl Checkpoint {
    /// Adds the state of anything that is [`Stateful`]: models, optimizers, scalers, loss scales, random number
    /// generators and types of your own. [`Restore::add`](crate::checkpoint::Restore::add) restores it.
    ///
    /// A model is passed as `&vs`, a generator as [`Rng(device)`](crate::checkpoint::Rng), and anything else as a mutable
    /// reference.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unsaveable`] for a name that is taken, is empty, is `__metadata__` or `tch_amp`, or contains
    /// a `/`, if a file could not hold all that has been added, see [`add_value`](Self::add_value), and for a model or
    /// its optimizer while averages are in the place of the weights, see
    /// [`swap_in`](crate::average::AveragedWeights::swap_in); and those of [`Stateful::save_state`]. Nothing is added
    /// then.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::checkpoint::Checkpoint;
    /// use tch_amp::loss_scale::{DynamicLossScale, LossScale};
    ///
    /// let mut loss_scale = DynamicLossScale::new(Device::Cpu)?;
    /// let mut checkpoint = Checkpoint::new();
    /// checkpoint.add("loss_scale", &mut loss_scale)?;
    ///
    /// loss_scale.adjust(&Tensor::from(false))?;
    /// assert_eq!(loss_scale.value()?, 16384.0);
    /// checkpoint.restore().add("loss_scale", &mut loss_scale).apply()?;
    /// assert_eq!(loss_scale.value()?, 32768.0);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn add(&mut self, name: &str, mut what: impl Stateful) -> Result<()> {
        self.insert(saved_by(name, |state| what.save_state(state))?)
    }

    /// Adds several states by their names. A function that returns the list of a program's parts serves this method and
    /// [`Restore::add_all`](crate::checkpoint::Restore::add_all), so that loading forgets nothing that is saved.
    ///
    /// # Errors
    ///
    /// See [`add`](Self::add). Nothing is added then.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::nn::{self, VarStore};
    /// use tch::Device;
    /// use tch_amp::checkpoint::{Checkpoint, Rng, Stateful};
    /// use tch_amp::optim::{AdamW, Optimizer};
    /// use tch_amp::GradScaler;
    ///
    /// struct Training { vs: VarStore, optimizer: Optimizer, scaler: GradScaler, rng: Rng }
    ///
    /// impl Training {
    ///     fn parts(&mut self) -> [(&str, &mut dyn Stateful); 4] {
    ///         [
    ///             ("model", &mut self.vs),
    ///             ("optimizer", &mut self.optimizer),
    ///             ("scaler", &mut self.scaler),
    ///             ("rng", &mut self.rng),
    ///         ]
    ///     }
    /// }
    ///
    /// let vs = VarStore::new(Device::Cpu);
    /// nn::linear(vs.root(), 4, 2, Default::default());
    /// let optimizer = AdamW::default().build(&vs, 1e-3)?;
    /// let scaler = GradScaler::new(Device::Cpu)?;
    /// let mut training = Training { vs, optimizer, scaler, rng: Rng(Device::Cpu) };
    ///
    /// let mut checkpoint = Checkpoint::new();
    /// checkpoint.add_all(training.parts())?;
    /// checkpoint.restore().add_all(training.parts()).apply()?;
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn add_all<'p>(
        &mut self,
        parts: impl IntoIterator<Item = (&'p str, &'p mut dyn Stateful)>,
    ) -> Result<()> {
        let mut saved = Vec::new();
        for (name, what) in parts {
            saved.extend(saved_by(name, |state| what.save_state(state))?);
        }
        self.insert(saved)
    }

    /// Adds a tensor. It must be dense, and may be on any device and of any dtype except the quantized ones.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unsaveable`] for the name, as in [`add`](Self::add), and for an undefined, sparse or quantized
    /// tensor or one of more than 64 dimensions.
    pub fn add_tensor(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        self.insert(vec![(name.to_owned(), Part::Tensor(entry(name, tensor)?))])
    }

    /// Adds a small value, such as a step, an epoch, the best loss or a configuration. It can be anything that serde
    /// can write as JSON, and in addition may contain infinite and NaN floats.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unsaveable`] for the name, as in [`add`](Self::add), for a value that is nested
    /// deeper than 60 levels, and if all values together are more than 1.5 million, or more than about 32 MB as JSON:
    /// add long ones as tensors. [`CheckpointError::Value`] for a value that JSON cannot represent, such as a map whose
    /// keys are lists.
    ///
    /// # Examples
    ///
    /// ```
    /// use serde::{Deserialize, Serialize};
    /// use tch_amp::checkpoint::Checkpoint;
    ///
    /// #[derive(Debug, PartialEq, Serialize, Deserialize)]
    /// struct Progress { epoch: u32, best_loss: f64 }
    ///
    /// let start = Progress { epoch: 0, best_loss: f64::INFINITY };
    /// let mut checkpoint = Checkpoint::new();
    /// checkpoint.add_value("progress", &start)?;
    /// assert_eq!(checkpoint.value::<Progress>("progress")?, start);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn add_value(&mut self, name: &str, value: &impl Serialize) -> Result<()> {
        self.insert(vec![(name.to_owned(), Part::Value(plain(name, value)?))])
    }

    /// Inserts all of the parts, or none of them.
    fn insert(&mut self, parts: Vec<(String, Part)>) -> Result<()> {
        let mut names = HashSet::new();
        for (name, _) in &parts {
            self.check_name(name, !names.insert(name))?;
        }
        let taken = self.room()?;
        let room = parts.iter().try_fold(taken, |room, (name, part)| room.with(name, part))?;
        self.room = Some(room);
        self.parts.extend(parts);
        #[cfg(feature = "distributed")]
        {
            self.source = None;
        }
        Ok(())
    }

    /// Returns what the parts take in a file.
    fn room(&self) -> Result<Room> {
        if let Some(room) = self.room {
            return Ok(room);
        }
        let mut room = Room::default();
        for (name, part) in &self.parts {
            room.add(name, part).map_err(|error| unsaveable(name, error.to_string()))?;
        }
        Ok(room)
    }

    fn check_name(&self, name: &str, is_repeated: bool) -> Result<()> {
        let is_taken = is_repeated || self.parts.contains_key(name);
        let taken = || is_taken.then_some("there is a part of that name already");
        match problem_of_name(name).or_else(taken) {
            Some(problem) => Err(unsaveable(name, problem).into()),
            None => Ok(()),
        }
    }
}

/// The parts of what `save` records under a name.
fn saved_by(
    name: &str,
    save: impl FnOnce(&mut SaveState<'_>) -> Result<()>,
) -> Result<Vec<(String, Part)>> {
    let mut state = SaveState::new(name);
    save(&mut state)?;
    Ok(state.finish())
}
