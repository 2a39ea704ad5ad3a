//! The averages of a model's weights.

use std::collections::BTreeMap;
use std::mem;

use tch::nn::VarStore;
use tch::{Kind, Tensor};

use crate::autocast::{clear_autocast_cache, forgetting_casts};
use crate::average::progress::Count;
use crate::average::{Averaging, Ema, Swa};
use crate::capture::{self, OwnLink};
use crate::checkpoint::{Prepared, SaveState, SavedState, Stateful};
use crate::error::{Error, Result, ensure};
use crate::ffi::{self, OutsideRegions};
use crate::scaler::StepOutcome;
use crate::variables::{Names, Swapped, Variable, variables};

/// The last parts of the names of the variables of batch normalization.
const RUNNING_MEAN: &str = "running_mean";
pub(super) const RUNNING_VAR: &str = "running_var";
const BATCHES: &str = "num_batches_tracked";

/// The averages of a model's weights, which follow the steps that were taken. The counterpart of
/// `torch.optim.swa_utils.AveragedModel`.
///
/// A checkpoint saves it with [`Checkpoint::add`](crate::checkpoint::Checkpoint::add): the averages by the names of the
/// variables, and how many updates they have had, as `n_averaged`. In PyTorch's format the part is the state of an
/// `AveragedModel`, and an `AveragedModel` of a file from Python is restored likewise, as are averages with `steps`
/// instead of `n_averaged`, and with [`averages_updates`](crate::checkpoint::Restore::averages_updates) those without
/// either. Averages are in f32 or f64 whatever the dtype of the model; statistics of batch normalization have that of
/// the model's, so that saved ones of another dtype need [`cast`](crate::checkpoint::Restore::cast).
#[derive(Debug)]
pub struct AveragedWeights {
    averaging: Averaging,
    names: Vec<Names>,
    /// The variables of the model, and their averages in the same order.
    pub(super) parameters: Vec<Tensor>,
    pub(super) averages: Vec<Tensor>,
    /// Statistics that were computed for the averages, and are swapped in with them.
    pub(super) statistics: Statistics,
    /// The model's variables that have neither averages nor statistics.
    others: Vec<Variable>,
    count: Count,
    /// Shared with the graphs that update it in their replays.
    link: OwnLink,
}

/// The statistics of batch normalization, and how many batches they are of where the model counts that: the model's by
/// their first names, and those of the averages once they are computed.
#[derive(Debug, Default)]
pub(super) struct Statistics {
    pub(super) buffers: BTreeMap<String, Variable>,
    pub(super) averaged: BTreeMap<String, Tensor>,
}

impl Statistics {
    /// The model's statistics, each with that of the same name.
    pub(super) fn pairs<'a>(
        &'a self,
        others: &'a BTreeMap<String, Tensor>,
    ) -> impl Iterator<Item = (&'a Tensor, &'a Tensor)> {
        others.iter().filter_map(|(name, other)| Some((&self.buffers.get(name)?.tensor, other)))
    }
}

/// Returns whether a variable is a statistic of batch normalization, or how many batches it is of.
fn is_statistic(name: &str, kind: Kind) -> bool {
    match name.rsplit('.').next().unwrap_or(name) {
        RUNNING_MEAN | RUNNING_VAR => kind != Kind::Int64,
        BATCHES => kind == Kind::Int64,
        _ => false,
    }
}

impl AveragedWeights {
    pub(super) fn new(averaging: Averaging, vs: &VarStore) -> Result<Self> {
        let (mut names, mut parameters) = (Vec::new(), Vec::new());
        let mut statistics = Statistics::default();
        let mut others = Vec::new();
        for variable in variables(vs)? {
            let tensor = &variable.tensor;
            let is_float =
                matches!(tensor.kind(), Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16);
            let kind = tensor.kind();
            let is_statistic = |name: &String| is_statistic(name, kind);
            let can_be_one = is_float || (kind == Kind::Int64 && !averaging.uses_buffers());
            if is_float && (tensor.requires_grad() || averaging.uses_buffers()) {
                names.push(variable.names);
                parameters.push(variable.tensor);
            } else if can_be_one && variable.names.iter().any(is_statistic) {
                statistics.buffers.insert(variable.names.first.clone(), variable);
            } else {
                others.push(variable);
            }
        }
        if parameters.is_empty() {
            let problem =
                "has no trainable floating-point variables; make the model first".to_owned();
            return Err(Error::InvalidArgument { name: "vs", problem });
        }
        let averages = parameters.iter().map(start).collect::<Result<_>>()?;
        let count = Count::start();
        let link = OwnLink::default();
        Ok(Self { averaging, names, parameters, averages, statistics, others, count, link })
    }

    /// Updates the averages after the step with this outcome, unless it was skipped or there were no gradients. Never
    /// synchronizes, unless the model is on a GPU and on the CPU: after a step of a fused optimizer on a GPU, the
    /// device decides whether the averages move.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if a variable has another shape or device than when the averages were made, or has become f64.
    /// An average keeps its dtype if its variable is cast to a narrower one. Nothing has changed then. If the memory of
    /// a device does not suffice, some averages may have been updated.
    pub fn update(&mut self, outcome: &StepOutcome) -> Result<()> {
        let skips = outcome.flag()?;
        if skips.is_none() && !outcome.is_stepped()? {
            return Ok(());
        }
        self.follow(skips)
    }

    /// Updates the averages: without a scaler, or once an epoch. Corresponds to `update_parameters`.
    ///
    /// # Errors
    ///
    /// The same as [`update`](Self::update).
    pub fn advance(&mut self) -> Result<()> {
        self.follow(None)
    }

    fn follow(&mut self, skips: Option<&Tensor>) -> Result<()> {
        self.link.register(self.averages.iter().chain(self.count.tensor()));
        let device = self.averages[0].device();
        let count = self.count.next(self.averaging, skips, device)?;
        ffi::average_update(&self.averages, &self.parameters, count.map(|count| count.weight))?;
        self.count.replace(count, &self.link)
    }

    /// Overwrites the weights of the model with the averages, rounded to their dtype, for good: at the end of a
    /// training.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if a variable has another shape or device by now. No weight has been overwritten then.
    pub fn copy_to_model(&self) -> Result<()> {
        let _own = OutsideRegions::enter();
        let weights = self.parameters.iter().zip(&self.averages);
        let buffers = self.statistics.pairs(&self.statistics.averaged);
        let pairs: Vec<_> = weights.chain(buffers).collect();
        pairs.iter().try_for_each(|(target, source)| fits(target, source))?;
        let _no_grad = tch::no_grad_guard();
        forgetting_casts(|| {
            for (target, source) in pairs {
                target.shallow_clone().f_copy_(source)?;
            }
            Ok(())
        })
    }

    /// Returns the average of a variable, in f32 or f64, or `None` if it is not averaged. Later updates change it. A
    /// tied weight is found by each of its names.
    pub fn average(&self, name: &str) -> Option<Tensor> {
        let index = self.names.iter().position(|names| names.iter().any(|known| known == name))?;
        Some(self.averages[index].shallow_clone())
    }

    /// Returns how many updates the averages have had. Synchronizes if outcomes of steps were on a GPU. Corresponds to
    /// `n_averaged`.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the number cannot be read from the device.
    pub fn updates(&self) -> Result<u64> {
        Ok(self.count.read()?.0)
    }

    /// Returns the options.
    pub fn averaging(&self) -> Averaging {
        self.averaging
    }

    /// The averages and these statistics, under every name of their variables.
    fn tensors<'t>(
        &'t self,
        statistics: &'t BTreeMap<String, Tensor>,
    ) -> impl Iterator<Item = (&'t String, &'t Tensor)> {
        let buffers = &self.statistics.buffers;
        let statistics =
            statistics.iter().filter_map(|(name, mean)| Some((&buffers.get(name)?.names, mean)));
        under_every_name(self.names.iter().zip(&self.averages).chain(statistics))
    }

    /// The model's own variables besides those that are averaged, under every name.
    fn not_averaged(&self) -> impl Iterator<Item = (&String, &Tensor)> {
        let variables = self.statistics.buffers.values().chain(&self.others);
        under_every_name(variables.map(|Variable { names, tensor }| (names, tensor)))
    }

    /// Makes a tensor for each statistic that a saved state has, with the dtype and the device of the model's.
    fn new_statistics(&self, saved: &SavedState<'_>) -> Result<BTreeMap<String, Tensor>> {
        let _own = OutsideRegions::enter();
        let mut statistics = BTreeMap::new();
        for (first, Variable { names, tensor }) in &self.statistics.buffers {
            let found =
                names.iter().map(|name| saved.contains(name)).collect::<Result<Vec<_>>>()?;
            if found.contains(&true) {
                statistics.insert(first.clone(), tensor.f_empty_like()?);
            }
        }
        Ok(statistics)
    }

    fn resume(&mut self, count: Count, statistics: BTreeMap<String, Tensor>) {
        self.link.note_change("the state of the averages");
        self.count = count;
        self.statistics.averaged = statistics;
    }
}

impl Stateful for AveragedWeights {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        let (updates, rest) = self.count.read()?;
        state.value("n_averaged", &updates)?;
        state.value("rest", &rest)?;
        state.tensors(self.tensors(&self.statistics.averaged))?;
        // Those of statistics can differ between ranks.
        let trained = self.parameters.iter().zip(&self.names).filter(|(it, _)| it.requires_grad());
        state.same_on_all_ranks(trained.flat_map(|(_, names)| names.iter()));
        state.averaged_model(updates, self.not_averaged())
    }

    /// Accepts the state of an `AveragedModel` and other averages from Python, too.
    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let from_python = saved.averages_of_python()?;
        let mut statistics = self.new_statistics(saved)?;
        // Those of Python begin with the first weights, so that nothing is left of the start.
        let begun = |updates| (updates, if updates == 0 { 1.0 } else { 0.0 });
        let (updates, rest) = match from_python {
            Some(updates) => begun(updates),
            None => {
                let own: (u64, f64) = (saved.value("n_averaged")?, saved.value("rest")?);
                match saved.averages_updates() {
                    None => own,
                    Some(updates) if updates == 0 || own.0 == 0 => begun(updates),
                    Some(updates) => (updates, own.1),
                }
            }
        };
        ensure("rest", rest, (0.0..=1.0).contains(&rest), "from 0 to 1")?;
        if from_python.is_some() {
            let names = self.tensors(&statistics).chain(self.not_averaged()).map(|(name, _)| name);
            saved.leave_out_counts(&names.map(String::as_str).collect())?;
            saved.leave_out(self.not_averaged().map(|(name, _)| name));
        }
        let prepared = saved.copy_to(self.tensors(&statistics))?;
        // What is skipped stays as it is.
        for (first, Variable { names, .. }) in &self.statistics.buffers {
            if names.iter().any(|name| saved.skips(name)) {
                statistics.remove(first);
                let own = self.statistics.averaged.get(first).map(Tensor::shallow_clone);
                statistics.extend(own.map(|own| (first.clone(), own)));
            }
        }
        let count = Count::resumed(updates, rest);
        Ok(prepared.then(move || self.resume(count, statistics)))
    }
}

impl Averaging {
    /// Makes an average of the trainable variables of a `VarStore`, which begins with their present values. It takes
    /// 4 bytes for each number in f32, bf16 or fp16, and 8 for one in f64.
    ///
    /// Build it after the model has its dtype and device. Variables that are added later are not averaged.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a decay outside its range, and for a `VarStore` without variables to average;
    /// [`Error::Torch`] if there is no memory.
    pub fn build(self, vs: &VarStore) -> Result<AveragedWeights> {
        if let Self::Ema(Ema { decay, .. }) = self {
            ensure("decay", decay, (0.0..1.0).contains(&decay), "from 0 to below 1")?;
        }
        AveragedWeights::new(self, vs)
    }
}

macro_rules! build {
    ($($config:ident)*) => {$(
        impl $config {
            /// Makes an average of the trainable variables of a `VarStore`, like [`Averaging::build`].
            ///
            /// # Errors
            ///
            /// The same as [`Averaging::build`].
            pub fn build(self, vs: &VarStore) -> Result<AveragedWeights> {
                Averaging::from(self).build(vs)
            }
        }

        impl From<$config> for Averaging {
            fn from(config: $config) -> Self {
                Self::$config(config)
            }
        }
    )*};
}

build!(Ema Swa);

/// Fails unless an average has the shape and the device of its variable.
pub(super) fn fits(variable: &Tensor, average: &Tensor) -> Result<()> {
    let (here, there) = (ffi::sizes(variable)?, ffi::sizes(average)?);
    let devices = (variable.device(), average.device());
    if here == there && devices.0 == devices.1 {
        return Ok(());
    }
    let problem = format!(
        "a weight is {here:?} on {:?} by now, and its average {there:?} on {:?}; make the averages after the model has \
         its shape and device",
        devices.0, devices.1
    );
    Err(Error::Torch(problem))
}

fn under_every_name<'a>(
    tensors: impl Iterator<Item = (&'a Names, &'a Tensor)>,
) -> impl Iterator<Item = (&'a String, &'a Tensor)> {
    tensors.flat_map(|(names, tensor)| names.iter().map(move |name| (name, tensor)))
}

/// An average that begins with the present numbers of a parameter.
fn start(parameter: &Tensor) -> Result<Tensor> {
    let _own = OutsideRegions::enter();
    let kind = if parameter.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let average = parameter.f_detach()?.f_to_kind(kind)?;
    // A conversion to the same dtype would be no copy.
    if kind == parameter.kind() {
        let mut copy = average.f_empty_like()?;
        copy.f_copy_(&average)?;
        return Ok(copy);
    }
    Ok(average)
}

/// Keeps the averaged weights in the model until it is dropped. Made by [`AveragedWeights::swap_in`].
///
/// # Examples
///
/// ```
/// use tch::{Device, nn};
/// use tch_amp::average::Swa;
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let w = vs.root().ones("w", &[1]);
/// let mut swa = Swa::default().build(&vs)?;
/// for value in [1.0, 2.0] {
///     tch::no_grad(|| w.shallow_clone().fill_(value));
///     swa.advance()?;
/// }
/// let swapped = swa.swap_in()?;
/// assert_eq!(w.double_value(&[0]), 1.5);
/// drop(swapped);
/// assert_eq!(w.double_value(&[0]), 2.0);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the weights are put back when this is dropped; bind it to a variable"]
pub struct SwappedIn<'a> {
    /// Nothing else may change or swap the averages meanwhile.
    _averages: &'a mut AveragedWeights,
    /// The variables that were replaced, and what holds their own numbers.
    replaced: Vec<(Tensor, Tensor)>,
    _swapped: Swapped,
}

impl AveragedWeights {
    /// Puts the averages in the place of the weights, and the weights back when the guard is dropped, on a panic, too.
    ///
    /// Every module of the model computes with the averages meanwhile, rounded to the dtype of the weights. No weight
    /// is copied: f32 weights become the averages themselves, so do not train while the guard lives; a fused optimizer
    /// with master weights would take them for weights that the program has loaded. A checkpoint neither saves nor
    /// restores the model and its optimizer meanwhile. Statistics from
    /// [`update_batch_norm`](Self::update_batch_norm) are swapped in as well. Casts of weights that an autocast region
    /// keeps are cleared.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if a variable has another shape or device than when the averages were made, or if there is no
    /// memory for averages in half precision; [`Error::InvalidArgument`] while other averages are in the place of the
    /// same weights. The model then has its weights.
    pub fn swap_in(&mut self) -> Result<SwappedIn<'_>> {
        SwappedIn::new(self, None)
    }
}

impl<'a> SwappedIn<'a> {
    /// Swaps in the averages, with these statistics of batch normalization instead of their own if there are any.
    pub(super) fn new(
        averages: &'a mut AveragedWeights,
        running: Option<&BTreeMap<String, Tensor>>,
    ) -> Result<Self> {
        capture::refuse("swapping averages in", "do it between replays")?;
        let _own = OutsideRegions::enter();
        let AveragedWeights { parameters, averages: means, statistics, .. } = &*averages;
        let weights = parameters.iter().zip(means);
        let running = statistics.pairs(running.unwrap_or(&statistics.averaged));
        let mut pairs = Vec::new();
        for (variable, average) in weights.chain(running) {
            fits(variable, average)?;
            pairs.push((variable.shallow_clone(), average.f_to_kind(variable.f_kind()?)?));
        }
        let variables = pairs.iter().map(|(variable, _)| variable.shallow_clone()).collect();
        let claimed = Swapped::claim(variables)?.ok_or_else(|| {
            let problem = "cannot take the place of weights that other averages have taken; drop their guard first";
            Error::InvalidArgument { name: "the averages", problem: problem.to_owned() }
        })?;
        // From here on, dropping this puts back what was replaced.
        let replaced = Vec::with_capacity(pairs.len());
        let mut swapped = Self { _averages: averages, replaced, _swapped: claimed };
        for (mut variable, rounded) in pairs {
            let own = variable.f_data()?;
            // The storage changes, and not its contents: afterwards the weights are the same, and autograd and the
            // optimizers find no trace.
            variable.f_set_data(&rounded)?;
            swapped.replaced.push((variable, own));
        }
        clear_autocast_cache();
        Ok(swapped)
    }
}

impl Drop for SwappedIn<'_> {
    fn drop(&mut self) {
        for (mut variable, own) in mem::take(&mut self.replaced) {
            // This cannot fail: the two were exchanged before, so that their types are compatible.
            drop(variable.f_set_data(&own));
        }
        clear_autocast_cache();
    }
}
