//! Restoring what a checkpoint holds, all of it or nothing.

pub(super) mod names;
mod restored;

use std::fmt;

use tch::Device;
use tch::nn::VarStore;

use crate::GradScaler;
use crate::checkpoint::restore::names::Names;
use crate::checkpoint::stateful::{Model, Prepared};
use crate::checkpoint::{Checkpoint, CheckpointError, Rng, SavedState, Stateful};
#[cfg(doc)]
use crate::error::OptimizerError;
use crate::error::Result;
use crate::optim::Optimizer;
use crate::scaler::PerLossScalers;

pub use restored::Restored;

/// Picks the parts of a checkpoint that are to be restored, and what they go into; then [`apply`](Self::apply) does it.
///
/// The devices may be others than those at save time. By default the names and shapes must be the same, and a model's
/// dtypes too; an optimizer's state is converted to the dtypes of its parameters, as in PyTorch.
#[must_use = "nothing is restored before `apply`"]
pub struct Restore<'a> {
    checkpoint: &'a Checkpoint,
    options: Options,
    targets: Vec<(String, Box<dyn Stateful + 'a>)>,
}

/// How to restore.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) strict: bool,
    pub(crate) cast: bool,
    pub(crate) names: Names,
}

impl<'a> Restore<'a> {
    pub(crate) fn new(checkpoint: &'a Checkpoint) -> Self {
        let options = Options { strict: true, cast: false, names: Names::default() };
        Self { checkpoint, options, targets: Vec::new() }
    }

    /// Restores anything that is [`Stateful`]: models, optimizers, scalers, loss scales, random numbers, and types of
    /// your own.
    pub fn add(self, name: &str, target: &'a mut dyn Stateful) -> Self {
        self.target(name, target)
    }

    fn target(mut self, name: &str, target: impl Stateful + 'a) -> Self {
        self.targets.push((name.to_owned(), Box::new(target)));
        self
    }

    /// Restores the variables of a VarStore, in place.
    pub fn model(self, name: &str, model: &'a VarStore) -> Self {
        self.target(name, Model(model))
    }

    /// Restores an optimizer: the state of every parameter, and the groups with their options, which replace those that
    /// `optimizer` has, the learning rate included.
    pub fn optimizer(self, name: &str, optimizer: &'a mut Optimizer) -> Self {
        self.target(name, optimizer)
    }

    /// Restores a scaler. A disabled one stays as it is.
    pub fn scaler(self, name: &str, scaler: &'a mut GradScaler) -> Self {
        self.target(name, scaler)
    }

    /// Restores the scalers of several losses, which [`Checkpoint::add_scalers`] added.
    pub fn scalers(self, name: &str, scalers: &'a mut PerLossScalers) -> Self {
        self.target(name, scalers)
    }

    /// Restores the state of a device's default random number generator.
    pub fn rng(self, name: &str, device: Device) -> Self {
        self.target(name, Rng(device))
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
        self.options.strict = strict;
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
        self.options.names.rename_prefix(from, to);
        self
    }

    /// Leaves variables and the state of parameters as they are whose names fit one of the patterns, in which each `*`
    /// stands for any characters, whatever the checkpoint has under those names. In an optimizer such a parameter has
    /// not been stepped, and it is in its saved group or, without one, in the first. [`Restored`] lists the names.
    ///
    /// The names are those of the VarStore, after [`rename_prefix`](Self::rename_prefix).
    pub fn skip(mut self, patterns: &[impl AsRef<str>]) -> Self {
        self.options.names.skip(patterns);
        self
    }

    /// Sets whether a model's tensors of another dtype are converted. False by default: it is an error.
    pub fn cast(mut self, cast: bool) -> Self {
        self.options.cast = cast;
        self
    }

    /// Restores all that was picked, or changes nothing. Waits for the devices.
    ///
    /// Everything is checked first, and what needs memory is made; then the tensors are read into their places, and then
    /// all the rest is taken over. Until then the optimizers keep their old state beside the new one: it needs memory for
    /// a second one.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoPart`], [`CheckpointError::OtherPart`], [`CheckpointError::Keys`] and
    /// [`CheckpointError::Tensor`]; those of [`Stateful::prepare_restore`], among them
    /// [`OptimizerError::State`] and the others of [`Optimizer::load_state_dict`], and
    /// those of [`GradScaler::load_state_dict`] and [`set_rng_state`](crate::checkpoint::set_rng_state).
    /// [`CheckpointError::Interrupted`] when the file can no longer be read though it was: only then models, scalers and
    /// states of your own may be half restored.
    pub fn apply(self) -> Result<Restored> {
        let Self { checkpoint, options, mut targets } = self;
        let mut restored = Restored::default();
        let mut all = Prepared::default();
        for (name, target) in &mut targets {
            let saved = SavedState::new(checkpoint, name, &options);
            let prepared = target.prepare_restore(&saved)?;
            saved.finish(&mut restored)?;
            prepared.check(options.cast)?;
            all = all.and(prepared);
        }
        // Also when it stops midway.
        crate::autocast::clear_autocast_cache();
        all.commit().map_err(|cause| CheckpointError::Interrupted { cause: Box::new(cause) })?;
        Ok(restored)
    }
}

impl fmt::Debug for Restore<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.targets.iter().map(|(name, _)| name).collect();
        let Self { checkpoint, options, .. } = self;
        f.debug_struct("Restore")
            .field("checkpoint", checkpoint)
            .field("options", options)
            .field("targets", &names)
            .finish()
    }
}
