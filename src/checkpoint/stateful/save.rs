//! The state that is being saved.

use std::collections::{BTreeMap, HashSet};

use serde::Serialize;
use tch::{Kind, Tensor};

use crate::checkpoint::CheckpointError;
use crate::checkpoint::entry::Entry;
use crate::checkpoint::part::{MODULE, Part, StatePart, UPDATES};
use crate::checkpoint::restore::names::batch_counts;
use crate::checkpoint::value::{MAX_DIMS, Value};
use crate::error::{Result, unsaveable};
use crate::ffi;
use crate::scale::GradScalerState;
use crate::variables::Swapped;

/// Collects the tensors and values of a state that is being saved.
/// [`Stateful::save_state`](crate::checkpoint::Stateful::save_state) records them here.
#[derive(Debug)]
pub struct SaveState<'a> {
    name: &'a str,
    tensors: BTreeMap<String, Entry>,
    values: BTreeMap<String, Value>,
    /// What Python expects besides, if the tensors are averages of a model.
    beside_averages: Option<BTreeMap<String, Entry>>,
    /// Parts of a kind with a layout of its own, which replace the tensors and values.
    parts: Vec<(String, Part)>,
}

impl<'a> SaveState<'a> {
    /// Starts a part of this name.
    pub(crate) fn new(name: &'a str) -> Self {
        let (tensors, values) = (BTreeMap::new(), BTreeMap::new());
        Self { name, tensors, values, beside_averages: None, parts: Vec::new() }
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

    /// Records that the tensors are averages of a model after this many updates, and what PyTorch's `AveragedModel` has
    /// besides: the variables that are not averaged.
    pub(crate) fn averaged_model<'t>(
        &mut self,
        updates: u64,
        not_averaged: impl Iterator<Item = (&'t String, &'t Tensor)>,
    ) -> Result<()> {
        let updates = Tensor::from(i64::try_from(updates).unwrap_or(i64::MAX));
        let mut beside = BTreeMap::from([(UPDATES.to_owned(), Entry::in_memory(&updates)?)]);
        let mut known: HashSet<_> = self.tensors.keys().map(String::as_str).collect();
        for (name, tensor) in not_averaged.filter(|(name, _)| !self.tensors.contains_key(*name)) {
            beside.insert(format!("{MODULE}{name}"), own(name, tensor)?);
            known.insert(name);
        }
        for name in batch_counts(&known) {
            beside.insert(format!("{MODULE}{name}"), Entry::in_memory(&Tensor::from(0i64))?);
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

    /// Takes the tensors that were recorded.
    pub(super) fn take_tensors(&mut self) -> BTreeMap<String, Entry> {
        std::mem::take(&mut self.tensors)
    }

    /// Returns the parts with their names. A state without tensors becomes a value.
    pub(crate) fn finish(self) -> Vec<(String, Part)> {
        let Self { name, tensors, values, beside_averages, mut parts } = self;
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
fn own(name: &str, tensor: &Tensor) -> Result<Entry> {
    let entry = entry(name, tensor)?;
    if Swapped::has_any([tensor])? {
        return Err(unsaveable(name, SWAPPED).into());
    }
    Ok(entry)
}

const SWAPPED: &str = "its average is in its place; drop the guard of `swap_in` first, or save the averages \
     with `save_weights`";

/// Checks a tensor and makes an entry of it. `name` is for errors.
pub(crate) fn entry(name: &str, tensor: &Tensor) -> Result<Entry> {
    let quantized = |kind| matches!(kind, Kind::QInt8 | Kind::QInt32 | Kind::QUInt8);
    if !tensor.defined() {
        return Err(unsaveable(name, "it is an undefined tensor").into());
    }
    if !ffi::is_dense(tensor)? || quantized(tensor.f_kind()?) {
        let problem =
            "only dense, unquantized tensors can be saved; use `to_dense` or `dequantize`";
        return Err(unsaveable(name, problem).into());
    }
    let entry = Entry::in_memory(tensor)?;
    // Neither format is read back with more.
    if entry.size.len() > MAX_DIMS {
        let problem = format!("it has {} dimensions, more than {MAX_DIMS}", entry.size.len());
        return Err(unsaveable(name, problem).into());
    }
    Ok(entry)
}
