//! The state that is being restored.

use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::{Kind, Tensor};
use torch_files::Value;

use crate::checkpoint::entry::TensorEntry;
use crate::checkpoint::part::{MODULE, NamedPart, Part, REST, STEPS, StatePart, UPDATES};
use crate::checkpoint::restore::names::{Renames, is_batch_count};
use crate::checkpoint::restore::{Options, Restored};
use crate::checkpoint::stateful::{Copy, Prepared, part_name, plain};
use crate::checkpoint::{Checkpoint, CheckpointError, other_part, read_value};
use crate::error::{Error, Result, shown};
use crate::optim::Saved as _;
use crate::scale::GradScalerState;
use crate::variables::{Swapped, Variable, each_once};

/// A state in a checkpoint, which [`Stateful::prepare_restore`](crate::checkpoint::Stateful::prepare_restore) reads.
///
/// It may also come from Python: any dict of tensors and plain values can be read, such as the `state_dict()` of a
/// learning-rate scheduler.
pub struct SavedState<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) name: &'a str,
    pub(super) options: &'a Options,
    dict: OnceCell<Dict<'a>>,
    notes: RefCell<Notes>,
}

/// Which names were read, missing or skipped.
#[derive(Default)]
struct Notes {
    /// Whether the part was taken as a whole instead of by names.
    whole: bool,
    /// Whether values that were not read are left out instead of being unexpected.
    values_are_left_out: bool,
    used: BTreeSet<String>,
    /// Further such values.
    of_no_use: Vec<&'static str>,
    missing: Vec<String>,
    skipped: Vec<String>,
    /// The entries that were left out of a part that was taken as a whole, or of states within this one.
    report: Restored,
}

/// Shows the names, and not the content of the file.
impl fmt::Debug for SavedState<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { checkpoint, name, options, .. } = self;
        f.debug_struct("SavedState")
            .field("checkpoint", checkpoint)
            .field("name", &shown(name))
            .field("options", options)
            .finish_non_exhaustive()
    }
}

/// Why a variable is not restored for now.
const SWAPPED: &str = "has its average in its place, which a restore would overwrite; drop the guard of \
     `swap_in` first";

/// The name of the averages of diffusers and of torch_ema, and why they are not read.
const LIST: &str = "shadow_params";
const WITHOUT_NAMES: &str = "has averages in the order of `model.parameters()`, without names; in Python, copy them \
     into the model with `copy_to(model.parameters())`, save its `state_dict()` and restore that with \
     `averages_updates`";

impl<'a> SavedState<'a> {
    pub(crate) fn new(checkpoint: &'a Checkpoint, name: &'a str, options: &'a Options) -> Self {
        let (dict, notes) = (OnceCell::new(), RefCell::default());
        Self { checkpoint, name, options, dict, notes }
    }

    /// Returns a value, converted to `T` by serde. If it may be missing, check with [`contains`](Self::contains) first.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Keys`] if the state has nothing of this name, even if the restore is not
    /// [`strict`](crate::checkpoint::Restore::strict); [`CheckpointError::Value`] if the value is not a `T`;
    /// [`CheckpointError::NoPart`]; and [`CheckpointError::OtherPart`] for what is not a state, or not a value.
    pub fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let Some(value) = self.dict()?.value(name) else {
            return Err(self.none("a value", name));
        };
        self.use_up(name);
        read_value(&format!("{}/{name}", self.name), value)
    }

    /// Returns a tensor, as a new tensor on the CPU with the saved shape and dtype.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Keys`] if the state has nothing of this name; [`CheckpointError::Io`],
    /// [`CheckpointError::Damaged`] and [`Error::Torch`] if it can no longer be read; [`CheckpointError::NoPart`]; and
    /// [`CheckpointError::OtherPart`] for what is not a state, or not a tensor.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let Some((_, entry)) = self.dict()?.tensors.get(name) else {
            return Err(self.none("a tensor", name));
        };
        self.use_up(name);
        entry.to_tensor()
    }

    /// Returns whether the state has something of this name: a tensor, a value, or what this crate does not support.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoPart`] and [`CheckpointError::OtherPart`].
    ///
    /// # Examples
    ///
    /// ```
    /// use tch_amp::Result;
    /// use tch_amp::checkpoint::{Prepared, SaveState, SavedState, Stateful};
    ///
    /// struct Schedule { lr: f64, warmup: u64 }
    ///
    /// impl Stateful for Schedule {
    /// #   fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
    /// #       state.value("lr", &self.lr)?;
    /// #       state.value("warmup", &self.warmup)
    /// #   }
    ///     // save_state …
    ///     fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
    ///         let lr = saved.value("lr")?;
    ///         // Older checkpoints have no `warmup`.
    ///         let warmup = if saved.contains("warmup")? { saved.value("warmup")? } else { 0 };
    ///         Ok(Prepared::new(move || *self = Schedule { lr, warmup }))
    ///     }
    /// }
    /// # let mut checkpoint = tch_amp::checkpoint::Checkpoint::new();
    /// # checkpoint.add_value("old", &std::collections::BTreeMap::from([("lr", 0.5)]))?;
    /// let mut schedule = Schedule { lr: 0.1, warmup: 9 };
    /// checkpoint.restore().add("old", &mut schedule).apply()?;
    /// assert_eq!((schedule.lr, schedule.warmup), (0.5, 0));
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn contains(&self, name: &str) -> Result<bool> {
        let dict = self.dict()?;
        Ok(dict.tensors.contains_key(name) || dict.other(name).is_some())
    }

    /// Prepares to overwrite tensors, on any devices, with the saved tensors of the same names. This needs no memory
    /// for a second set of them. The tensors are restored like the variables of a model: names, shapes and dtypes must
    /// be the same, except as allowed by [`strict(false)`](crate::checkpoint::Restore::strict),
    /// [`cast`](crate::checkpoint::Restore::cast), [`rename_prefix`](crate::checkpoint::Restore::rename_prefix) and
    /// [`skip`](crate::checkpoint::Restore::skip). A tensor with several names is restored from the first of them, in
    /// sorted order, that was saved, and is skipped if one of them is.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoPart`] and [`CheckpointError::OtherPart`]; [`CheckpointError::Tensor`] for a variable in
    /// whose place its average is. Names, shapes and dtypes that do not match are errors of
    /// [`Restore::apply`](crate::checkpoint::Restore::apply), because they can be compared only when all names that the
    /// state should have are known.
    pub fn copy_to<'t, N: AsRef<str>>(
        &self,
        tensors: impl IntoIterator<Item = (N, &'t Tensor)>,
    ) -> Result<Prepared<'a>> {
        self.copy(tensors, "here")
    }

    /// Does the work of [`copy_to`](Self::copy_to). `place` says in messages where the tensors are.
    pub(crate) fn copy<'t, N: AsRef<str>>(
        &self,
        tensors: impl IntoIterator<Item = (N, &'t Tensor)>,
        place: &'static str,
    ) -> Result<Prepared<'a>> {
        let dict = self.dict()?;
        let tensors = tensors.into_iter();
        let targets = each_once(tensors.map(|(n, t)| (n.as_ref().to_owned(), t.shallow_clone())))?;
        if Swapped::has_any(targets.iter().map(|target| &target.tensor))? {
            for Variable { names, tensor } in &targets {
                if Swapped::has_any([tensor])? {
                    return Err(self.wrong(&names.first, SWAPPED.to_owned()));
                }
            }
        }
        let names = targets.iter().flat_map(|target| target.names.iter().map(String::as_str));
        let known: HashSet<_> = names.collect();
        let mut notes = self.notes.borrow_mut();
        let mut copies = Vec::with_capacity(targets.len());
        for Variable { names, tensor } in &targets {
            let found = names.iter().find_map(|name| dict.tensor(name));
            if names.iter().any(|name| self.options.names.skips(name)) {
                notes.skipped.extend(names.iter().cloned());
            } else if let Some((name, &(saved, entry))) = found {
                let (part, saved) = (self.name.to_owned(), saved.to_owned());
                let (name, tensor) = (name.clone(), tensor.shallow_clone());
                copies.push(Copy { part, name, saved, tensor, entry, place });
            } else if let Some((name, other)) =
                names.iter().find_map(|name| Some((name, dict.other(name)?)))
            {
                return Err(self.other("a tensor", name, other));
            } else if !is_batch_count(&names.first, &known) {
                notes.missing.push(names.first.clone());
            }
            notes.used.extend(names.iter().cloned());
        }
        drop(notes);
        self.leave_out_counts(&known)?;
        Ok(Prepared::of_copies(copies))
    }

    /// Leaves out the batch counts of norms, given the names of their statistics.
    pub(crate) fn leave_out_counts(&self, known: &HashSet<&str>) -> Result<()> {
        let counts = self.dict()?.tensors.keys().filter(|name| is_batch_count(name, known));
        self.notes.borrow_mut().used.extend(counts.cloned());
        Ok(())
    }

    /// Returns whether names and options have to agree.
    pub(crate) fn is_strict(&self) -> bool {
        self.options.strict
    }

    /// Compares an option that a program of Python has saved among the values with the one here. A restore that is not
    /// strict goes on with the one here, and the saved one is unexpected.
    pub(crate) fn option(&self, name: &str, here: &impl Serialize) -> Result<()> {
        if !self.options.strict {
            return Ok(());
        }
        let Some(saved) = self.dict()?.value(name) else {
            return Err(self.none("a value", name));
        };
        self.use_up(name);
        let here = plain(name, here)?;
        if saved.equals(&here) {
            return Ok(());
        }
        let json = |value| {
            let wrong = |cause| CheckpointError::Value { name: name.to_owned(), cause };
            serde_json::to_string(value).map_err(wrong)
        };
        let (part, option) = (self.name.to_owned(), name.to_owned());
        Err(CheckpointError::OtherOption { part, option, saved: json(saved)?, here: json(&here)? }
            .into())
    }

    /// Leaves out the values of these names that are not read, instead of their being unexpected.
    pub(crate) fn leave_out_unread(&self, names: &[&'static str]) {
        self.notes.borrow_mut().of_no_use.extend(names);
    }

    /// Reads a state within this one, such as the first one of a list: `name.0`.
    pub(crate) fn within(
        &self,
        name: &str,
        read: impl FnOnce(&SavedState<'_>) -> Result<()>,
    ) -> Result<()> {
        let full = format!("{}.{name}", self.name);
        let inner = SavedState::new(self.checkpoint, &full, self.options);
        read(&inner)?;
        let mut report = Restored::default();
        inner.finish(&mut report)?;
        self.use_up(name.split('.').next().unwrap_or(name));
        self.notes.borrow_mut().report.extend(report);
        Ok(())
    }

    /// Returns whether there is something at the end of names, as in [`within`](Self::within).
    pub(crate) fn contains_within(&self, name: &str) -> bool {
        self.is_in_checkpoint(&format!("{}.{name}", self.name))
    }

    /// Returns whether there is something with this name in the checkpoint, outside of the state as well.
    pub(crate) fn is_in_checkpoint(&self, name: &str) -> bool {
        self.checkpoint.find(name).is_ok()
    }

    /// Leaves out what is under these names.
    pub(crate) fn leave_out<'n>(&self, names: impl Iterator<Item = &'n String>) {
        self.notes.borrow_mut().used.extend(names.cloned());
    }

    /// Reads the state as averages that a Python program has saved, in whose names it removes the `module.` of a
    /// wrapper that counts its updates, and returns how many there were. Returns `None` for averages of this crate.
    /// Called before anything else is read.
    pub(crate) fn averages_of_python(&self) -> Result<Option<u64>> {
        let mut dict = Dict::of(self.checkpoint, self.name, &self.options.names)?;
        if dict.others.contains_key(LIST) {
            return Err(self.wrong(LIST, WITHOUT_NAMES.to_owned()));
        }
        if [UPDATES, REST].iter().all(|name| dict.value(name).is_some()) {
            return Ok(None);
        }
        let counted = [UPDATES, STEPS].into_iter().find(|name| dict.is_number(name));
        let updates = match (self.options.averages_updates, counted) {
            (Some(updates), _) => updates,
            (None, Some(name)) => self.updates_in(&dict, name)?,
            (None, None) => {
                let problem = "is missing, and so is `steps`: say with `averages_updates` of the restore how many \
                               updates the averages have had";
                return Err(self.wrong(UPDATES, problem.to_owned()));
            }
        };
        if let Some(name) = counted {
            let mut names = self.options.names.clone();
            names.rename_prefix(MODULE, "");
            dict = Dict::of(self.checkpoint, self.name, &names)?;
            self.use_up(name);
        }
        self.dict.get_or_init(|| dict);
        Ok(Some(updates))
    }

    /// Reads a number of updates.
    fn updates_in(&self, dict: &Dict<'a>, name: &str) -> Result<u64> {
        let count: f64 = match (dict.value(name), dict.tensor(name)) {
            (Some(value), _) => read_value(&format!("{}/{name}", self.name), value)?,
            (None, Some((_, (_, entry)))) => entry.item()?,
            (None, None) => return Err(self.missing(name)),
        };
        if count.fract() != 0.0 || count.is_sign_negative() {
            return Err(self.wrong(name, format!("is {count}, which is not a number of updates")));
        }
        Ok(count as u64)
    }

    /// The error for what is under a name.
    pub(crate) fn wrong(&self, name: &str, problem: String) -> Error {
        let (part, tensor) = (self.name.to_owned(), name.to_owned());
        CheckpointError::Tensor { part, tensor, problem }.into()
    }

    /// The number of updates that averages have had by the program's own word.
    pub(crate) fn averages_updates(&self) -> Option<u64> {
        self.options.averages_updates
    }

    /// Returns the part as a whole instead of as a dict.
    pub(super) fn whole(&self) -> Result<NamedPart<'a>> {
        self.take_whole();
        self.checkpoint.find(self.name)
    }

    /// Returns the part as one value instead of a dict.
    pub(crate) fn whole_value<T: DeserializeOwned>(&self) -> Result<T> {
        self.take_whole();
        self.checkpoint.value(self.name)
    }

    /// Returns the part as one tensor instead of a dict.
    pub(crate) fn whole_tensor(&self) -> Result<Tensor> {
        self.take_whole();
        self.checkpoint.tensor(self.name)
    }

    /// Returns the scaler in the part, or in one of several parts. The state of a disabled scaler is empty.
    pub(crate) fn scaler(&self, id: Option<usize>) -> Result<GradScalerState> {
        self.take_whole();
        let name = part_name(self.name, id);
        match self.checkpoint.find(&name)? {
            NamedPart::Part(Part::Scaler(state)) => Ok(state.clone()),
            NamedPart::Part(Part::Empty) => Ok(GradScalerState::default()),
            other => Err(other_part(&name, "a scaler", other)),
        }
    }

    /// Returns whether a name is skipped.
    pub(crate) fn skips(&self, name: &str) -> bool {
        self.options.names.skips(name)
    }

    /// Returns the name of the part.
    pub(crate) fn name(&self) -> &'a str {
        self.name
    }

    /// Marks the part as taken as a whole, so that its names are not checked.
    pub(super) fn take_whole(&self) {
        self.notes.borrow_mut().whole = true;
    }

    /// Records what was left out of a part that was taken as a whole.
    pub(super) fn report(&self, report: Restored) {
        self.notes.borrow_mut().report = report;
    }

    /// Checks for names that were missing or were never read.
    pub(crate) fn finish(self, restored: &mut Restored) -> Result<()> {
        let Notes { whole, values_are_left_out, used, of_no_use, missing, mut skipped, report } =
            self.notes.take();
        restored.extend(report);
        if whole {
            return Ok(());
        }
        let dict = self.dict()?;
        let (mut unexpected, mut left_out) = (Vec::new(), Vec::new());
        let tensors = dict.tensors.iter().map(|(here, (saved, _))| (&**here, *saved, true));
        let is_of_no_use = |name: &str| values_are_left_out || of_no_use.contains(&name);
        let values = dict.values.iter().map(|(name, _)| (&**name, &**name, !is_of_no_use(name)));
        let others = dict.others.iter().map(|(here, (saved, _))| (&**here, *saved, false));
        for (here, saved, is_expected) in tensors.chain(values).chain(others) {
            if used.contains(here) {
                continue;
            }
            match (self.options.names.skips(here), is_expected) {
                (true, _) => skipped.push(here.to_owned()),
                (false, true) => unexpected.push(saved.to_owned()),
                (false, false) => left_out.push(saved.to_owned()),
            }
        }
        restored.judge(self.name, self.options.strict, missing, unexpected)?;
        restored.leave_out(self.name, left_out);
        skipped.sort();
        restored.skip(self.name, skipped);
        Ok(())
    }

    /// Leaves out the values that were not read. In the state of a model they say something about the model.
    pub(super) fn leave_out_values(&self) {
        self.notes.borrow_mut().values_are_left_out = true;
    }

    /// Returns the dtype of a tensor, if the state has one of this name.
    pub(crate) fn kind(&self, name: &str) -> Result<Option<Kind>> {
        Ok(self.dict()?.tensors.get(name).map(|(_, entry)| entry.kind))
    }

    fn use_up(&self, name: &str) {
        self.notes.borrow_mut().used.insert(name.to_owned());
    }

    /// The error for a name under which there is not what was wanted.
    fn none(&self, wanted: &'static str, name: &str) -> Error {
        let found = self.dict().ok().and_then(|dict| {
            let tensor = dict.tensors.get(name).map(|(_, entry)| NamedPart::Tensor(entry));
            tensor.or_else(|| dict.other(name))
        });
        match found {
            Some(found) => self.other(wanted, name, found),
            None => self.missing(name),
        }
    }

    fn other(&self, wanted: &'static str, name: &str, found: NamedPart<'_>) -> Error {
        other_part(&format!("{}/{name}", self.name), wanted, found)
    }

    fn missing(&self, name: &str) -> Error {
        let (part, missing) = (self.name.to_owned(), vec![name.to_owned()]);
        CheckpointError::Keys { part, missing, unexpected: Vec::new() }.into()
    }

    fn dict(&self) -> Result<&Dict<'a>> {
        if let Some(dict) = self.dict.get() {
            return Ok(dict);
        }
        let dict = Dict::of(self.checkpoint, self.name, &self.options.names)?;
        Ok(self.dict.get_or_init(|| dict))
    }
}

/// The tensors and values of a part.
struct Dict<'a> {
    /// By their names in the target, each with its name in the checkpoint.
    tensors: BTreeMap<String, (&'a str, &'a TensorEntry)>,
    /// Tensors that count only if they are asked for.
    maybe: BTreeMap<String, (&'a str, &'a TensorEntry)>,
    /// Sorted by name.
    values: &'a [(Arc<str>, Value)],
    /// The others, by names like those of the tensors.
    others: BTreeMap<String, (&'a str, &'a Part)>,
}

impl<'a> Dict<'a> {
    /// Reads a part as a dict, and returns an error if it is not one.
    fn of(checkpoint: &'a Checkpoint, name: &str, renames: &Renames) -> Result<Self> {
        const NONE: &BTreeMap<String, TensorEntry> = &BTreeMap::new();
        const NO_OTHERS: &BTreeMap<String, Part> = &BTreeMap::new();
        let (entries, values, others, more): (_, &[_], _, _) = match checkpoint.find(name)? {
            NamedPart::Part(Part::Model(tensors)) => (tensors, &[], NO_OTHERS, NONE),
            NamedPart::Part(Part::State(StatePart {
                tensors,
                values: Value::Map(values),
                others,
                maybe,
                ..
            })) => (tensors, values, others, maybe),
            NamedPart::Part(Part::Value(Value::Map(values)))
            | NamedPart::Value(Value::Map(values)) => (NONE, values, NO_OTHERS, NONE),
            NamedPart::Part(Part::Empty) => (NONE, &[], NO_OTHERS, NONE),
            other => return Err(other_part(name, "a state", other)),
        };
        let names = entries.keys().chain(others.keys()).chain(more.keys());
        let renamed = renames.renamed(name, names)?;
        let (mut tensors, mut left, mut maybe) =
            (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for (here, saved) in renamed {
            if let Some(entry) = entries.get(saved) {
                tensors.insert(here, (saved, entry));
            } else if let Some(other) = others.get(saved) {
                left.insert(here, (saved, other));
            } else if let Some(entry) = more.get(saved) {
                maybe.insert(here, (saved, entry));
            }
        }
        Ok(Self { tensors, maybe, values, others: left })
    }

    /// Returns a tensor by its name in the target, with that and its name in the checkpoint.
    fn tensor(&self, name: &str) -> Option<(&String, &(&'a str, &'a TensorEntry))> {
        self.tensors.get_key_value(name).or_else(|| self.maybe.get_key_value(name))
    }

    /// Returns what is under a name that no tensor has.
    fn other(&self, name: &str) -> Option<NamedPart<'a>> {
        let other = self.others.get(name).map(|(_, part)| NamedPart::Part(part));
        other.or_else(|| self.value(name).map(NamedPart::Value))
    }

    /// Returns whether there is a single number under a name.
    fn is_number(&self, name: &str) -> bool {
        let number =
            |value: &Value| matches!(value, Value::Int(_) | Value::Uint(_) | Value::Float(_));
        self.tensors.get(name).is_some_and(|(_, entry)| entry.numel() == 1)
            || self.value(name).is_some_and(number)
    }

    fn value(&self, name: &str) -> Option<&'a Value> {
        let found = self.values.binary_search_by(|(key, _)| (**key).cmp(name));
        found.ok().map(|at| &self.values[at].1)
    }
}
