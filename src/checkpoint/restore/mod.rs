//! Restoring the parts of a checkpoint, all of them or none.

pub(super) mod names;

use std::fmt;

#[cfg(doc)]
use crate::GradScaler;
use crate::capture;
use crate::checkpoint::restore::names::Renames;
use crate::checkpoint::stateful::Prepared;
use crate::checkpoint::{Checkpoint, CheckpointError, SavedState, Stateful};
#[cfg(doc)]
use crate::error::OptimizerError;
use crate::error::Result;
#[cfg(doc)]
use crate::optim::Optimizer;

pub(crate) use names::Options;
pub use names::Restored;

/// Selects the parts of a checkpoint to restore and their targets; [`apply`](Self::apply) then restores them.
///
/// The devices may differ from those at the time of the save. By default the names, the shapes and a model's dtypes
/// must be the same. As in PyTorch, an optimizer's state is converted to the dtypes of its parameters; unlike there,
/// finite numbers that would become infinite in fp16 are an error, and small ones become 0.
#[must_use = "nothing is restored before `apply`"]
pub struct Restore<'a> {
    checkpoint: &'a Checkpoint,
    options: Options,
    targets: Vec<(String, Box<dyn Stateful + 'a>)>,
}

impl Checkpoint {
    /// Starts a restore of parts of the checkpoint; see [`Restore`].
    pub fn restore(&self) -> Restore<'_> {
        let names = Renames::default();
        let options = Options { strict: true, cast: false, averages_updates: None, names };
        Restore { checkpoint: self, options, targets: Vec::new() }
    }
}

impl<'a> Restore<'a> {
    /// Restores anything that is [`Stateful`]: models, optimizers, scalers, loss scales, random number generators and
    /// types of your own. A model is passed as `&vs`, a generator as [`Rng(device)`](crate::checkpoint::Rng), and
    /// anything else as a mutable reference. A precision is restored first, because the scaler is made for it.
    pub fn add(mut self, name: &str, target: impl Stateful + 'a) -> Self {
        self.targets.push((name.to_owned(), Box::new(target)));
        self
    }

    /// Restores several states by their names: the list that
    /// [`Checkpoint::add_all`](crate::checkpoint::Checkpoint::add_all) has saved.
    pub fn add_all<'p>(
        mut self,
        parts: impl IntoIterator<Item = (&'p str, &'a mut dyn Stateful)>,
    ) -> Self {
        for (name, target) in parts {
            self = self.add(name, target);
        }
        self
    }

    /// Sets whether missing and unexpected names are errors. True by default; if false, [`Restored`] lists them
    /// instead.
    ///
    /// Even if false, it is an error if a whole part is missing, or, as in PyTorch, if a tensor has another shape: use
    /// [`skip`](Self::skip) for a new head. It is not an error if no name matches at all, so check [`Restored`]. A
    /// parameter that the saved optimizer lacks joins the first group and counts as not yet stepped.
    ///
    /// The `num_batches_tracked` of PyTorch's norms is never missing or unexpected, because tch's norms do not count
    /// batches.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, nn};
    /// use tch_amp::checkpoint::Checkpoint;
    ///
    /// # let saved = nn::VarStore::new(Device::Cpu);
    /// # drop(saved.root().ones("weight", &[2]));
    /// # drop(saved.root().ones("scale", &[1]));
    /// # let mut checkpoint = Checkpoint::new();
    /// # checkpoint.add("model", &saved)?;
    /// // The checkpoint has a `weight` and a `scale`.
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let (weight, _bias) = (vs.root().zeros("weight", &[2]), vs.root().zeros("bias", &[2]));
    /// let restored = checkpoint.restore().add("model", &vs).strict(false).apply()?;
    /// assert_eq!(restored.missing_keys, ["model/bias"]);
    /// assert_eq!(restored.unexpected_keys, ["model/scale"]);
    /// assert_eq!(Vec::<f64>::try_from(&weight)?, [1.0, 1.0]);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn strict(mut self, strict: bool) -> Self {
        self.options.strict = strict;
        self
    }

    /// Renames the names in the checkpoint that begin with `from` so that they begin with `to` instead, in models, in
    /// the tensors of your own states, and in optimizers whose parameters have names. If it is called several times,
    /// each call renames what the calls before it have made of the names.
    ///
    /// A model that was wrapped in `DistributedDataParallel` in Python needs `rename_prefix("module.", "")`, the
    /// counterpart of `consume_prefix_in_state_dict_if_present`, and a model from `torch.compile` needs
    /// `rename_prefix("_orig_mod.", "")`. A compiled model that was wrapped needs both, in this order. The weights in a
    /// checkpoint of Lightning begin with the name of the attribute that holds the model, such as `net.`.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tch::{Device, Kind, Tensor, nn};
    /// # use tch_amp::checkpoint::Checkpoint;
    /// # let saved = nn::VarStore::new(Device::Cpu);
    /// # drop(saved.root().sub("module").sub("body").ones("weight", &[2]));
    /// # drop(saved.root().sub("module").sub("head").ones("weight", &[10]));
    /// # let mut checkpoint = Checkpoint::new();
    /// # checkpoint.add("model", &saved)?;
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let body = vs.root().sub("body").zeros("weight", &[2]);
    /// let head = vs.root().sub("head").zeros("weight", &[3]); // other classes
    /// let restored = checkpoint
    ///     .restore()
    ///     .add("model", &vs)
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

    /// Excludes the names that match one of the patterns, in which each `*` stands for any characters. The variables of
    /// a model with such names keep their values. In an optimizer the state of such a parameter is reset, as if it had
    /// not been stepped yet; it is in its saved group or, if the checkpoint lacks it, in the first. [`Restored`] lists
    /// the names.
    ///
    /// The patterns apply to the names in the `VarStore`, that is, after [`rename_prefix`](Self::rename_prefix).
    pub fn skip(mut self, patterns: &[impl AsRef<str>]) -> Self {
        self.options.names.skip(patterns);
        self
    }

    /// Sets whether tensors of a model that have another dtype are converted. False by default: another dtype is an
    /// error. Even if true, it is an error if more than digits would be lost: by a number beyond the range of the dtype,
    /// such as 1e5 in fp16, by a fraction where that has integers, or by an imaginary part where it is real. For this,
    /// tensors are read once more if their dtype has such numbers. A number that is too small for the dtype is rounded,
    /// as in PyTorch, and this is neither an error nor counted: in fp16 numbers below 6e-5 lose digits, and those up to
    /// 3e-8 become 0.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind, nn};
    /// use tch_amp::checkpoint::Checkpoint;
    ///
    /// # let saved = nn::VarStore::new(Device::Cpu);
    /// # drop(saved.root().ones("weight", &[2]));
    /// # let mut checkpoint = Checkpoint::new();
    /// # checkpoint.add("model", &saved)?;
    /// // The checkpoint has an f32 `weight`.
    /// let mut vs = nn::VarStore::new(Device::Cpu);
    /// let weight = vs.root().zeros("weight", &[2]);
    /// vs.bfloat16();
    /// assert!(checkpoint.restore().add("model", &vs).apply().is_err());
    /// checkpoint.restore().add("model", &vs).cast(true).apply()?;
    /// assert_eq!((weight.kind(), weight.double_value(&[0])), (Kind::BFloat16, 1.0));
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn cast(mut self, cast: bool) -> Self {
        self.options.cast = cast;
        self
    }

    /// Sets how many updates the [`AveragedWeights`](crate::average::AveragedWeights) of the restore have had, instead
    /// of the number in the file: `n_averaged`, or `steps` in averages of mmengine. Averages that were saved as a plain
    /// state of a model, as timm saves them under `state_dict_ema`, have no number, and it is an error to restore them
    /// without this call. With 0, the first update copies the weights, as in averages that are new.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, nn};
    /// use tch_amp::average::Ema;
    /// use tch_amp::checkpoint::Checkpoint;
    ///
    /// # let saved = nn::VarStore::new(Device::Cpu);
    /// # drop(saved.root().ones("weight", &[2]));
    /// # let mut checkpoint = Checkpoint::new();
    /// # checkpoint.add("state_dict_ema", &saved)?;
    /// // The part `state_dict_ema` of the checkpoint has a `weight`, and nothing else.
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let _weight = vs.root().zeros("weight", &[2]);
    /// let mut ema = Ema::default().build(&vs)?;
    /// assert!(checkpoint.restore().add("state_dict_ema", &mut ema).apply().is_err());
    /// checkpoint.restore().add("state_dict_ema", &mut ema).averages_updates(5000).apply()?;
    /// assert_eq!(ema.updates()?, 5000);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn averages_updates(mut self, updates: u64) -> Self {
        self.options.averages_updates = Some(updates);
        self
    }

    /// Restores everything that was selected, or changes nothing. Synchronizes if targets are on a GPU.
    ///
    /// First everything is checked and all memory is allocated; then the tensors of models are read into their places;
    /// then all other states are replaced. Until then the optimizers keep their old states besides the new ones, so a
    /// restore needs memory for a second state of each optimizer.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoPart`], [`CheckpointError::OtherPart`], [`CheckpointError::Keys`] and
    /// [`CheckpointError::Tensor`]; those of [`Stateful::prepare_restore`], among them [`OptimizerError::State`] and
    /// the others of [`Optimizer::load_state_dict`], and those of [`GradScaler::load_state_dict`] and
    /// [`Rng::set_state`](crate::checkpoint::Rng::set_state). [`CheckpointError::Interrupted`] if the file can no
    /// longer be read, or a device fails, after everything was checked: only then may models, scalers and states of
    /// your own be partly restored.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch_amp::GradScaler;
    /// use tch_amp::checkpoint::Checkpoint;
    ///
    /// # let path = std::env::temp_dir().join(format!("tch-amp-doc-apply-{}.safetensors", std::process::id()));
    /// # let vs = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let mut weight = vs.root().ones("weight", &[1]);
    /// # let mut checkpoint = Checkpoint::new();
    /// # checkpoint.add("model", &vs)?;
    /// # checkpoint.save(&path)?;
    /// # let _ = tch::no_grad(|| weight.fill_(5.0));
    /// # let mut scaler = GradScaler::new(tch::Device::Cpu)?;
    /// // The file has a model with the weight 1, and no scaler.
    /// let checkpoint = Checkpoint::load(&path)?;
    /// let refused = checkpoint.restore().add("model", &vs).add("scaler", &mut scaler).apply();
    /// assert!(refused.is_err());
    /// assert_eq!(weight.double_value(&[0]), 5.0);
    /// checkpoint.restore().add("model", &vs).apply()?;
    /// assert_eq!(weight.double_value(&[0]), 1.0);
    /// # std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn apply(self) -> Result<Restored> {
        capture::refuse("restoring a checkpoint", "restore it outside of the iteration")?;
        let Self { checkpoint, options, mut targets } = self;
        let names: Vec<_> = targets.iter().map(|(name, _)| name.clone()).collect();
        let mut restored = Restored::default();
        let mut all = Prepared::default();
        for (name, target) in &mut targets {
            let saved = SavedState::new(checkpoint, name, &options);
            let prepared = target.prepare_restore(&saved)?;
            saved.finish(&mut restored)?;
            prepared.check(options.cast)?;
            all = all.and(prepared);
        }
        names.iter().for_each(|name| restored.strike_out(name));
        // Cleared before the weights change, because a commit that stops midway changes some of them, too.
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
