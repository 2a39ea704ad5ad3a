//! The trait of everything that a checkpoint saves and restores, and its implementations.
//!
//! A restore has two phases. In the first, every target checks its [`SavedState`] and allocates; in the second, which
//! runs only if all of them succeeded, each [`Prepared`] is carried out. A state of a kind with a layout of its own,
//! such as a model or an optimizer, becomes one part as a whole; any other is a dict of tensors and values.

mod optimizer;
mod saved;

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use serde::Serialize;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use torch_files::{TensorRef, Value};

use crate::checkpoint::entry::{SavedBy, TensorEntry};
use crate::checkpoint::part::{MODULE, NamedPart, Part, StatePart, UPDATES};
use crate::checkpoint::restore::names::batch_counts;
use crate::checkpoint::{CheckpointError, other_part};
use crate::device::check_usable;
use crate::error::{Result, shown, unsaveable};
use crate::ffi;
use crate::optim::Saved as _;
use crate::scale::GradScalerState;
use crate::variables::Swapped;

pub use saved::SavedState;

/// A type whose state can be saved in a checkpoint and restored from it. The counterpart of `state_dict` and
/// `load_state_dict`, except that a restore has two phases: first every state is checked, and then all are replaced.
///
/// [`Checkpoint::add`](crate::checkpoint::Checkpoint::add) saves the state and
/// [`Restore::add`](crate::checkpoint::Restore::add) restores it. The trait is implemented for
/// [`VarStore`](tch::nn::VarStore), [`Optimizer`](crate::optim::Optimizer), [`GradScaler`](crate::GradScaler),
/// [`PerLossScalers`](crate::scaler::PerLossScalers), [`MixedPrecision`](crate::MixedPrecision), the loss scales, a
/// `Box<dyn LossScale>`, [`Scheduler`](crate::schedule::Scheduler),
/// [`PlateauScheduler`](crate::schedule::PlateauScheduler), [`AveragedWeights`](crate::average::AveragedWeights), a
/// window of micro-batches [with its gradients](crate::accumulation::Accumulation::with_gradients),
/// [`SpikeDetector`](crate::scaler::SpikeDetector), [`ScaleHistory`](crate::insight::ScaleHistory), [`Rng`], mutable
/// references to any of these, and shared references to a `VarStore` and, to save it, to a `MixedPrecision`.
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

/// The second phase of a restore. [`Stateful::prepare_restore`](crate::checkpoint::Stateful::prepare_restore) has
/// checked and prepared it, and it runs once all parts of the restore are prepared.
#[derive(Default)]
#[must_use = "nothing is restored unless it is returned"]
pub struct Prepared<'a> {
    copies: Vec<Copy<'a>>,
    steps: Vec<Box<dyn FnOnce() -> Result<()> + 'a>>,
    commits: Vec<Box<dyn FnOnce() + 'a>>,
}

impl<'a> Prepared<'a> {
    /// Creates a second phase that runs a closure. The closure stores what was loaded; everything that can fail or that
    /// allocates much belongs before it, in the first phase.
    pub fn new(commit: impl FnOnce() + 'a) -> Self {
        Self::default().then(commit)
    }

    /// Adds a closure like that of [`new`](Self::new). It runs after the tensors of
    /// [`SavedState::copy_to`](crate::checkpoint::SavedState::copy_to) have been copied.
    pub fn then(mut self, commit: impl FnOnce() + 'a) -> Self {
        self.commits.push(Box::new(commit));
        self
    }

    /// Adds the work of another second phase.
    pub fn and(mut self, other: Self) -> Self {
        let Self { copies, steps, commits } = other;
        self.copies.extend(copies);
        self.steps.extend(steps);
        self.commits.extend(commits);
        self
    }

    /// Creates a second phase of a step that fails only if the device does.
    pub(crate) fn step(step: impl FnOnce() -> Result<()> + 'a) -> Self {
        Self { steps: vec![Box::new(step)], ..Self::default() }
    }

    pub(super) fn of_copies(copies: Vec<Copy<'a>>) -> Self {
        Self { copies, ..Self::default() }
    }

    /// Returns an error if a tensor does not match its target in shape or, unless `cast`, in dtype, and if a cast would
    /// lose more than digits.
    pub(crate) fn check(&self, cast: bool) -> Result<()> {
        self.copies.iter().try_for_each(|copy| copy.check(cast))
    }

    /// Does all of the work, with everything that can fail first.
    ///
    /// # Errors
    ///
    /// Those of reading and copying. Some tensors may have been overwritten by then.
    pub(crate) fn commit(self) -> Result<()> {
        let Self { copies, steps, commits } = self;
        copies.iter().try_for_each(Copy::run)?;
        steps.into_iter().try_for_each(|step| step())?;
        commits.into_iter().for_each(|commit| commit());
        Ok(())
    }
}

impl fmt::Debug for Prepared<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { copies, steps, commits } = self;
        f.debug_struct("Prepared")
            .field("copies", &copies.len())
            .field("steps", &steps.len())
            .field("commits", &commits.len())
            .finish()
    }
}

/// A tensor that is to be overwritten, and the saved one to overwrite it with.
pub(super) struct Copy<'a> {
    pub(super) part: String,
    /// Its name in the target.
    pub(super) name: String,
    /// Its name in the checkpoint.
    pub(super) saved: String,
    pub(super) tensor: Tensor,
    pub(super) entry: &'a TensorEntry,
    /// Where the target is, for messages.
    pub(super) place: &'static str,
}

impl Copy<'_> {
    fn run(&self) -> Result<()> {
        self.entry.copy_to(&mut self.tensor.shallow_clone())
    }

    fn check(&self, cast: bool) -> Result<()> {
        let Self { part, name, saved, tensor, entry, place } = self;
        let (size, kind) = (ffi::sizes(tensor)?, tensor.f_kind()?);
        let there = if name == saved {
            "in the checkpoint".to_owned()
        } else {
            format!("in the checkpoint, as `{}`", shown(saved))
        };
        let problem = if entry.size != size {
            format!(
                "has the shape {:?} {there}, and {size:?} {place}; `skip(&[\"{}\"])` leaves it as it is",
                entry.size,
                shown(name)
            )
        } else if entry.kind != kind && !cast {
            let found = entry.kind;
            format!("is {found:?} {there}, and {kind:?} {place}; `cast(true)` converts it")
        } else {
            match entry.beyond(kind)? {
                0 => return Ok(()),
                count => format!(
                    "has {count} numbers {there} that {kind:?} cannot hold, because they are beyond its range, or have a \
                     fraction or an imaginary part; give the variable another dtype, or leave it as it is with \
                     `skip(&[\"{}\"])`",
                    shown(name)
                ),
            }
        };
        let (part, tensor) = (part.clone(), name.clone());
        Err(CheckpointError::Tensor { part, tensor, problem }.into())
    }
}

/// Collects the tensors and values of a state that is being saved.
/// [`Stateful::save_state`](crate::checkpoint::Stateful::save_state) records them here.
#[derive(Debug)]
pub struct SaveState<'a> {
    name: &'a str,
    /// The number of the group of ranks that saves the checkpoint together, if it is sharded.
    group: Option<u64>,
    tensors: BTreeMap<String, TensorEntry>,
    values: BTreeMap<String, Value>,
    /// The other entries that Python expects, if the tensors are averages of a model.
    beside_averages: Option<BTreeMap<String, TensorEntry>>,
    /// Parts of a kind with a layout of its own, which replace the tensors and values.
    parts: Vec<(String, Part)>,
}

impl<'a> SaveState<'a> {
    /// Starts a part of this name.
    pub(crate) fn new(name: &'a str, group: Option<u64>) -> Self {
        let (tensors, values) = (BTreeMap::new(), BTreeMap::new());
        Self { name, group, tensors, values, beside_averages: None, parts: Vec::new() }
    }

    /// Records a tensor, without copying it. It must be dense, and may be on any device and of any dtype except the
    /// quantized ones.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unsaveable`] for a name that this state already has, for an undefined, sparse or quantized
    /// tensor, and for a variable in whose place its average is.
    pub fn tensor(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        self.check_name(name)?;
        self.tensors.insert(name.to_owned(), own(name, tensor)?);
        Ok(())
    }

    /// Records several named tensors, such as those of a map.
    ///
    /// # Errors
    ///
    /// The same as [`tensor`](Self::tensor).
    pub fn tensors<'t, N: AsRef<str>>(
        &mut self,
        tensors: impl IntoIterator<Item = (N, &'t Tensor)>,
    ) -> Result<()> {
        tensors.into_iter().try_for_each(|(name, tensor)| self.tensor(name.as_ref(), tensor))
    }

    /// Records a small value: anything that serde can write as JSON, and in addition infinite and NaN floats, as in
    /// [`Checkpoint::add_value`](crate::checkpoint::Checkpoint::add_value).
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unsaveable`] for a name that this state already has, and [`CheckpointError::Value`] for a
    /// value that JSON cannot represent, such as a map whose keys are lists.
    pub fn value(&mut self, name: &str, value: &(impl Serialize + ?Sized)) -> Result<()> {
        self.check_name(name)?;
        self.values.insert(name.to_owned(), plain(&format!("{}/{name}", self.name), value)?);
        Ok(())
    }

    /// The name of the part.
    pub(super) fn name(&self) -> &'a str {
        self.name
    }

    fn check_name(&self, name: &str) -> Result<()> {
        if self.tensors.contains_key(name) || self.values.contains_key(name) {
            let name = format!("{}/{name}", self.name);
            return Err(unsaveable(&name, "the state has that name already").into());
        }
        Ok(())
    }

    /// Notes that tensors which were recorded are the same on all ranks that train a model together.
    pub(crate) fn same_on_all_ranks<'t>(&mut self, names: impl Iterator<Item = &'t String>) {
        for name in names {
            if let Some(entry) = self.tensors.get_mut(name) {
                entry.saved_by = SavedBy::AnyRank;
            }
        }
    }

    /// The number of the group of ranks that saves the checkpoint together, if it is sharded.
    pub(super) fn group(&self) -> Option<u64> {
        self.group
    }

    /// Records that the tensors are averages of a model after this many updates, and what PyTorch's `AveragedModel` has
    /// besides: the variables that are not averaged.
    pub(crate) fn averaged_model<'t>(
        &mut self,
        updates: u64,
        not_averaged: impl Iterator<Item = (&'t String, &'t Tensor)>,
    ) -> Result<()> {
        let updates = Tensor::from(i64::try_from(updates).unwrap_or(i64::MAX));
        let mut beside = BTreeMap::from([(UPDATES.to_owned(), TensorEntry::in_memory(&updates)?)]);
        let mut known: HashSet<_> = self.tensors.keys().map(String::as_str).collect();
        for (name, tensor) in not_averaged.filter(|(name, _)| !self.tensors.contains_key(*name)) {
            beside.insert(format!("{MODULE}{name}"), own(name, tensor)?);
            known.insert(name);
        }
        for name in batch_counts(&known) {
            beside.insert(format!("{MODULE}{name}"), TensorEntry::in_memory(&Tensor::from(0i64))?);
        }
        self.beside_averages = Some(beside);
        Ok(())
    }

    /// Records the whole state as one value instead of a dict.
    pub(crate) fn whole_value(&mut self, value: &impl Serialize) -> Result<()> {
        let value = plain(self.name, value)?;
        self.whole(Part::Value(value));
        Ok(())
    }

    /// Records the whole state as one tensor instead of a dict.
    pub(crate) fn whole_tensor(&mut self, tensor: &Tensor) -> Result<()> {
        let entry = entry(self.name, tensor)?;
        self.whole(Part::Tensor(entry));
        Ok(())
    }

    /// Records the whole state as a part with a layout of its own.
    pub(super) fn whole(&mut self, part: Part) {
        self.parts.push((self.name.to_owned(), part));
    }

    /// Records the state of a scaler as the whole or, with an id, as one of several parts, under the name `name.id`.
    pub(crate) fn scaler(&mut self, id: Option<usize>, scaler: GradScalerState) {
        self.parts.push((part_name(self.name, id), Part::Scaler(scaler)));
    }

    /// Returns the parts with their names. A state without tensors becomes a value.
    pub(crate) fn finish(self) -> Vec<(String, Part)> {
        let Self { name, tensors, values, beside_averages, mut parts, .. } = self;
        let values = values.into_iter().map(|(name, value)| (name.into(), value));
        let values = Value::map(values.collect());
        if parts.is_empty() {
            let part = match tensors.is_empty() {
                true => Part::Value(values),
                false => {
                    let state = StatePart::new(tensors, values);
                    Part::State(StatePart { beside_averages, ..state })
                }
            };
            parts.push((name.to_owned(), part));
        }
        parts
    }
}

/// The name of a part, or of one of several parts.
pub(super) fn part_name(name: &str, id: Option<usize>) -> String {
    id.map_or_else(|| name.to_owned(), |id| format!("{name}.{id}"))
}

/// Converts a value. `name` is for errors.
pub(crate) fn plain(name: &str, value: &(impl Serialize + ?Sized)) -> Result<Value> {
    let wrong = |cause| CheckpointError::Value { name: name.to_owned(), cause };
    Ok(Value::of(value).map_err(wrong)?)
}

/// Makes an entry of a tensor that has its own numbers, and not its average, for which it could be taken later.
fn own(name: &str, tensor: &Tensor) -> Result<TensorEntry> {
    let entry = entry(name, tensor)?;
    if Swapped::has_any([tensor])? {
        return Err(unsaveable(name, SWAPPED).into());
    }
    Ok(entry)
}

const SWAPPED: &str = "its average is in its place; drop the guard of `swap_in` first, or save the averages \
     with `save_weights`";

/// Checks a tensor and makes an entry of it. `name` is for errors.
pub(crate) fn entry(name: &str, tensor: &Tensor) -> Result<TensorEntry> {
    let quantized = |kind| matches!(kind, Kind::QInt8 | Kind::QInt32 | Kind::QUInt8);
    if !tensor.defined() {
        return Err(unsaveable(name, "it is an undefined tensor").into());
    }
    if !ffi::is_dense(tensor)? || quantized(tensor.f_kind()?) {
        let problem =
            "only dense, unquantized tensors can be saved; use `to_dense` or `dequantize`";
        return Err(unsaveable(name, problem).into());
    }
    let entry = TensorEntry::in_memory(tensor)?;
    // Neither format is read back with more.
    if entry.size.len() > TensorRef::MAX_DIMS {
        let problem =
            format!("it has {} dimensions, more than {}", entry.size.len(), TensorRef::MAX_DIMS);
        return Err(unsaveable(name, problem).into());
    }
    Ok(entry)
}

fn prepare<'a>(model: &VarStore, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
    match saved.checkpoint.find(saved.name)? {
        NamedPart::Part(Part::Model(_) | Part::Empty) => {}
        NamedPart::Part(Part::State(state)) if !state.tensors.is_empty() => {}
        other => return Err(other_part(saved.name, "a model", other)),
    }
    saved.leave_out_values();
    let variables = model.variables();
    let mut sorted: Vec<_> = variables.iter().collect();
    sorted.sort_by_key(|(name, _)| *name);
    saved.copy(sorted, "in the model")
}

/// Saves and restores all variables, including those that are not trainable: the counterpart of `model.state_dict()`.
/// For each norm with running statistics, PyTorch's also has a `num_batches_tracked`: tch does not count batches, and
/// so 0 is saved.
impl Stateful for VarStore {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        (&*self).save_state(state)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        prepare(self, saved)
    }
}

/// A shared reference is enough, because restoring writes to the tensors and not to the `VarStore`.
impl Stateful for &VarStore {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        let variables = self.variables();
        state.tensors(&variables)?;
        // Others, such as running statistics, can differ between ranks.
        let trained = variables.iter().filter(|(_, tensor)| tensor.requires_grad());
        state.same_on_all_ranks(trained.map(|(name, _)| name));
        let known: HashSet<_> = variables.keys().map(String::as_str).collect();
        let mut tensors = std::mem::take(&mut state.tensors);
        for name in batch_counts(&known) {
            tensors.insert(name, TensorEntry::in_memory(&Tensor::from(0i64))?);
        }
        state.whole(Part::Model(tensors));
        Ok(())
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        prepare(self, saved)
    }
}

/// The default random number generator of a device, which dropout, `randn` and `randperm` use, as a part of a
/// checkpoint. The counterpart of `torch.default_generator` and `torch.cuda.default_generators`.
///
/// When you train on a GPU, save the states of both generators under two names: dropout draws from the GPU's generator,
/// and shuffling on the CPU from the CPU's. Random numbers of other libraries, such as the crate `rand`, and the place
/// in the data are not covered: save them with [`add_value`](crate::checkpoint::Checkpoint::add_value).
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::checkpoint::{Checkpoint, Rng};
///
/// let mut checkpoint = Checkpoint::new();
/// checkpoint.add("rng", Rng(Device::Cpu))?;
/// let first = Tensor::randn([3], (Kind::Float, Device::Cpu));
/// checkpoint.restore().add("rng", Rng(Device::Cpu)).apply()?;
/// assert_eq!(first, Tensor::randn([3], (Kind::Float, Device::Cpu)));
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rng(pub Device);

impl Rng {
    /// Returns the state: a one-dimensional uint8 tensor on the CPU. Does not synchronize, because libtorch keeps the
    /// states of all generators on the host. The counterpart of `torch.get_rng_state()` and
    /// `torch.cuda.get_rng_state()`.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable).
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor};
    /// use tch_amp::checkpoint::Rng;
    ///
    /// let rng = Rng(Device::Cpu);
    /// let before = rng.get_state()?;
    /// let first = Tensor::rand([4], (Kind::Float, Device::Cpu));
    /// rng.set_state(&before)?;
    /// assert_eq!(first, Tensor::rand([4], (Kind::Float, Device::Cpu)));
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    #[doc(alias = "get_rng_state")]
    pub fn get_state(self) -> Result<Tensor> {
        check_usable(self.0)?;
        ffi::rng_state(self.0)
    }

    /// Sets the state. The counterpart of `torch.set_rng_state()` and `torch.cuda.set_rng_state()`.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable), and [`Error::Torch`](crate::Error::Torch) if
    /// `state` is not a state of such a generator; the generator keeps its state then.
    #[doc(alias = "set_rng_state")]
    pub fn set_state(self, state: &Tensor) -> Result<()> {
        check_usable(self.0)?;
        ffi::rng_set_state(self.0, state)
    }
}

impl Stateful for Rng {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        state.whole_tensor(&self.get_state()?)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let (rng, state) = (*self, saved.whole_tensor()?);
        check_rng_state(rng.0, &state)?;
        Ok(Prepared::step(move || rng.set_state(&state)))
    }
}

/// Returns an error unless the generator of the device accepts the state.
pub(crate) fn check_rng_state(device: Device, state: &Tensor) -> Result<()> {
    check_usable(device)?;
    ffi::rng_check_state(device, state)
}
