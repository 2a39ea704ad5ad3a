//! Restoring what a checkpoint holds, all of it or nothing.

#![forbid(unsafe_code)]

mod model;
pub(super) mod names;
mod optimizer;

use tch::nn::VarStore;
use tch::{Device, Tensor};

use crate::checkpoint::part::Part;
use crate::checkpoint::restore::model::Variable;
use crate::checkpoint::restore::names::Names;
use crate::checkpoint::{Checkpoint, CheckpointError, other_part, rng_state, set_rng_state};
use crate::error::Result;
use crate::optim::{Loaded, Optimizer};
use crate::{GradScaler, PerLossScalers};

/// Picks the parts of a checkpoint that are to be restored, and what they go into; then [`apply`](Self::apply) does it.
///
/// The devices may be others than those at save time. By default the names and shapes must be the same, and a model's
/// dtypes too; an optimizer's state is converted to the dtypes of its parameters, as in PyTorch.
#[derive(Debug)]
#[must_use = "nothing is restored before `apply`"]
pub struct Restore<'a> {
    checkpoint: &'a Checkpoint,
    strict: bool,
    cast: bool,
    names: Names,
    models: Vec<(String, &'a VarStore)>,
    optimizers: Vec<(String, &'a mut Optimizer)>,
    scalers: Vec<(String, &'a mut GradScaler)>,
    rngs: Vec<(String, Device)>,
}

/// What a restore left out, as `part/name`. As the result of PyTorch's `load_state_dict`, with `skipped_keys` besides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Restored {
    /// Names that the checkpoint lacks; they keep their values. Empty unless [`strict`](Restore::strict) is false.
    pub missing_keys: Vec<String>,
    /// Names that only the checkpoint has, as it has them. Empty unless [`strict`](Restore::strict) is false.
    pub unexpected_keys: Vec<String>,
    /// Names that [`skip`](Restore::skip) has left as they are.
    pub skipped_keys: Vec<String>,
}

impl<'a> Restore<'a> {
    pub(crate) fn new(checkpoint: &'a Checkpoint) -> Self {
        Self {
            checkpoint,
            strict: true,
            cast: false,
            names: Names::default(),
            models: Vec::new(),
            optimizers: Vec::new(),
            scalers: Vec::new(),
            rngs: Vec::new(),
        }
    }

    /// Restores the variables of a VarStore, in place.
    pub fn model(mut self, name: &str, model: &'a VarStore) -> Self {
        self.models.push((name.to_owned(), model));
        self
    }

    /// Restores an optimizer: the state of every parameter, and the groups with their options, which replace those that
    /// `optimizer` has, the learning rate included.
    pub fn optimizer(mut self, name: &str, optimizer: &'a mut Optimizer) -> Self {
        self.optimizers.push((name.to_owned(), optimizer));
        self
    }

    /// Restores a scaler. A disabled one stays as it is.
    pub fn scaler(mut self, name: &str, scaler: &'a mut GradScaler) -> Self {
        self.scalers.push((name.to_owned(), scaler));
        self
    }

    /// Restores the scalers of several losses, which [`Checkpoint::add_scalers`] added.
    pub fn scalers(mut self, name: &str, scalers: &'a mut PerLossScalers) -> Self {
        let named = |(loss_id, scaler)| (format!("{name}.{loss_id}"), scaler);
        self.scalers.extend(scalers.scalers_mut().enumerate().map(named));
        self
    }

    /// Restores the state of a device's default random number generator.
    pub fn rng(mut self, name: &str, device: Device) -> Self {
        self.rngs.push((name.to_owned(), device));
        self
    }

    /// Sets whether names that are missing or unexpected are errors. True by default; otherwise [`Restored`] lists
    /// them.
    ///
    /// A part that is missing altogether is an error all the same, and so is a tensor of another shape, as in PyTorch:
    /// [`skip`](Self::skip) a new head. If no name fits at all, that is no error: look at [`Restored`]. A parameter that
    /// the saved optimizer lacks joins the first group and counts as not stepped.
    ///
    /// The batches that Python's norms count, as `num_batches_tracked`, are never missing or unexpected: tch's norms do
    /// not count them.
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Restores names of the checkpoint that begin with `from` as names that begin with `to` instead, in models and in
    /// optimizers that have names. Of several calls the first that fits a name counts.
    ///
    /// A model that Python had wrapped in `DistributedDataParallel` needs `rename_prefix("module.", "")`, as
    /// `consume_prefix_in_state_dict_if_present` does it in PyTorch, and one of `torch.compile`
    /// `rename_prefix("_orig_mod.", "")`.
    ///
    /// ```
    /// # use tch::{Device, Kind, Tensor, nn};
    /// # use tch_amp::checkpoint::Checkpoint;
    /// # let saved = nn::VarStore::new(Device::Cpu);
    /// # drop(saved.root().sub("module").sub("body").ones("weight", &[2]));
    /// # drop(saved.root().sub("module").sub("head").ones("weight", &[10]));
    /// # let mut checkpoint = Checkpoint::new();
    /// # checkpoint.add_model("model", &saved)?;
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let body = vs.root().sub("body").zeros("weight", &[2]);
    /// let head = vs.root().sub("head").zeros("weight", &[3]); // other classes
    /// let restored = checkpoint
    ///     .restore()
    ///     .model("model", &vs)
    ///     .rename_prefix("module.", "")
    ///     .skip(&["head.*"])
    ///     .apply()?;
    /// assert_eq!(restored.skipped_keys, ["model/head.weight"]);
    /// # assert_eq!(body.sum(Kind::Float).double_value(&[]), 2.0);
    /// # assert_eq!(head.sum(Kind::Float).double_value(&[]), 0.0);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn rename_prefix(mut self, from: &str, to: &str) -> Self {
        self.names.rename_prefix(from, to);
        self
    }

    /// Leaves variables and the state of parameters as they are whose names fit one of the patterns, in which each `*`
    /// stands for any characters, whatever the checkpoint has under those names. In an optimizer such a parameter has
    /// not been stepped, and it is in its saved group or, without one, in the first. [`Restored`] lists the names.
    ///
    /// The names are those of the VarStore, after [`rename_prefix`](Self::rename_prefix).
    pub fn skip(mut self, patterns: &[impl AsRef<str>]) -> Self {
        self.names.skip(patterns);
        self
    }

    /// Sets whether a model's tensors of another dtype are converted. False by default: it is an error.
    pub fn cast(mut self, cast: bool) -> Self {
        self.cast = cast;
        self
    }

    /// Restores all that was picked, or changes nothing. Waits for the devices.
    ///
    /// Until all is read, the optimizers keep their old state beside the new one: it needs memory for a second one.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoPart`], [`CheckpointError::OtherPart`], [`CheckpointError::Keys`] and
    /// [`CheckpointError::Tensor`]; [`Error::OptimizerState`](crate::Error::OptimizerState) and the others of
    /// [`Optimizer::load_state_dict`]; those of [`GradScaler::load_state_dict`] and [`set_rng_state`].
    /// [`CheckpointError::Interrupted`] when the file can no longer be read though it was: only then models and scalers
    /// may be half restored.
    pub fn apply(self) -> Result<Restored> {
        let mut restored = Restored::default();
        let mut models = Vec::with_capacity(self.models.len());
        for (name, model) in &self.models {
            models.push(self.check_model(name, model, &mut restored)?);
        }
        let scalers = self.scaler_states()?;
        for ((_, scaler), state) in self.scalers.iter().zip(&scalers) {
            scaler.check_state_dict(state)?;
        }
        let rngs = self.rng_states()?;
        let (checkpoint, strict, names) = (self.checkpoint, self.strict, &self.names);
        let mut optimizers: Vec<(&mut Optimizer, Loaded)> = Vec::new();
        for (name, optimizer) in self.optimizers {
            let loaded =
                optimizer::prepare(checkpoint, &name, optimizer, (names, strict), &mut restored)?;
            optimizers.push((optimizer, loaded));
        }
        let before = set_rngs(&rngs)?;
        // Also when it stops midway.
        crate::clear_autocast_cache();
        let mut variables = models.iter().flatten();
        let mut scalers = self.scalers.into_iter().zip(&scalers);
        let copied = variables.try_for_each(Variable::copy).and_then(|()| {
            scalers.try_for_each(|((_, scaler), state)| scaler.load_state_dict(state))
        });
        if let Err(cause) = copied {
            reset_rngs(&before);
            return Err(CheckpointError::Interrupted { cause: Box::new(cause) }.into());
        }
        for (optimizer, loaded) in optimizers {
            optimizer.finish_load(loaded);
        }
        Ok(restored)
    }

    fn scaler_states(&self) -> Result<Vec<crate::GradScalerState>> {
        let state = |(name, _): &(String, _)| match self.checkpoint.part(name)? {
            Part::Scaler(state) => Ok(state.clone()),
            Part::Empty => Ok(crate::GradScalerState::default()),
            other => Err(other_part(name, "a scaler", other)),
        };
        self.scalers.iter().map(state).collect()
    }

    fn rng_states(&self) -> Result<RngStates> {
        let state = |(name, device): &(String, _)| Ok((*device, self.checkpoint.tensor(name)?));
        self.rngs.iter().map(state).collect()
    }

    /// Refuses names that do not fit, or notes them.
    fn judge(
        part: &str,
        strict: bool,
        missing: Vec<String>,
        unexpected: Vec<String>,
        restored: &mut Restored,
    ) -> Result<()> {
        if strict && !(missing.is_empty() && unexpected.is_empty()) {
            let part = part.to_owned();
            return Err(CheckpointError::Keys { part, missing, unexpected }.into());
        }
        let full = |name| format!("{part}/{name}");
        restored.missing_keys.extend(missing.into_iter().map(full));
        restored.unexpected_keys.extend(unexpected.into_iter().map(full));
        Ok(())
    }
}

type RngStates = Vec<(Device, Tensor)>;

/// Sets all states, or none. Returns those before.
fn set_rngs(states: &RngStates) -> Result<RngStates> {
    let before = |(device, _): &(Device, _)| Ok((*device, rng_state(*device)?));
    let before = states.iter().map(before).collect::<Result<RngStates>>()?;
    let set = states.iter().try_for_each(|(device, state)| set_rng_state(*device, state));
    if set.is_err() {
        reset_rngs(&before);
    }
    set.map(|()| before)
}

fn reset_rngs(states: &RngStates) {
    for (device, state) in states {
        // What went wrong before is the error to be seen.
        drop(set_rng_state(*device, state));
    }
}
