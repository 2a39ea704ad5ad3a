//! Saves model, optimizer and scaler in one file that survives a crash, so that a run can resume from it as if it had
//! never stopped.
//!
//! A [`Checkpoint`] is the content of one file, and a [`CheckpointFolder`] manages the files of a run. Everything that
//! implements [`Stateful`] can be saved: models, optimizers, scalers, loss scales, random number generators and types
//! of your own.
//!
//! ```
//! use tch::{Device, Kind, Tensor, nn};
//! use tch_amp::{GradScaler, optim};
//! use tch_amp::checkpoint::{Checkpoint, Rng};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let net = nn::linear(vs.root(), 4, 1, Default::default());
//! let mut opt = optim::AdamW::default().build(&vs, 1e-3)?;
//! let mut scaler = GradScaler::new(Device::Cpu)?;
//! # let path = std::env::temp_dir().join(format!("tch-amp-doc-{}.safetensors", std::process::id()));
//!
//! let mut checkpoint = Checkpoint::new();
//! checkpoint.add("model", &vs)?;
//! checkpoint.add("optimizer", &mut opt)?;
//! checkpoint.add("scaler", &mut scaler)?;
//! checkpoint.add("rng", Rng(Device::Cpu))?;
//! checkpoint.add_value("step", &1000)?;
//! checkpoint.save(&path)?;
//!
//! let checkpoint = Checkpoint::load(&path)?;
//! let step: u64 = checkpoint.value("step")?;
//! checkpoint
//!     .restore()
//!     .add("model", &vs)
//!     .add("optimizer", &mut opt)
//!     .add("scaler", &mut scaler)
//!     .add("rng", Rng(Device::Cpu))
//!     .apply()?;
//! assert_eq!(step, 1000);
//! # std::fs::remove_file(path)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod copy;
mod entry;
mod folder;
mod format;
mod load;
mod manifest;
mod outcome;
mod part;
mod restore;
mod save;
mod sharded;
mod staging;
mod stateful;
mod torch;
mod torch_layout;
mod weights;

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::io::{self, Write};
#[cfg(feature = "distributed")]
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::Tensor;
#[cfg(feature = "distributed")]
use torch_files::TorchFile;
use torch_files::Value;

use crate::checkpoint::manifest::{MAX_MANIFEST_BYTES, PartManifest};
use crate::checkpoint::part::{
    MAX_PARTS, NamedPart, OptimizerPart, Part, StatePart, find, problem_of_name,
};
use crate::checkpoint::stateful::plain;
use crate::error::{Error, Result, list, unsaveable};
use crate::optim::Saved as _;

pub use crate::error::CheckpointError;
pub use folder::{CheckpointFile, CheckpointFolder, Found, MetricGoal, PendingSave, Start};
pub use format::Format;
pub use restore::{Restore, Restored};
pub(crate) use sharded::{Exchange, SavingRanks};
#[cfg(feature = "distributed")]
pub(crate) use stateful::check_rng_state;
pub use stateful::{Prepared, Rng, SaveState, SavedState, Stateful};
pub use torch_files::Limits;
pub use weights::save_weights;

/// Named models, optimizers, scalers, tensors and values, to be saved to one file or loaded from one.
///
/// Added tensors are not copied: save the checkpoint before the next step changes them. Loading verifies the checksums
/// but leaves the tensors in the file until they are restored. Saving and loading need additional memory for at most
/// the largest tensor; for restoring see [`Restore::apply`].
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::checkpoint::Checkpoint;
///
/// let mut checkpoint = Checkpoint::new();
/// checkpoint.add_value("step", &1000)?;
/// checkpoint.add_tensor("mean", &Tensor::from_slice(&[0.5f32, 0.25]))?;
/// assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["mean", "step"]);
/// assert_eq!(checkpoint.value::<u64>("step")?, 1000);
/// assert_eq!(checkpoint.tensor("mean")?, Tensor::from_slice(&[0.5f32, 0.25]));
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Default)]
pub struct Checkpoint {
    parts: Parts,
    /// The room that the parts take in a file; `None` for parts that were loaded until another one is added.
    room: Option<SizeBudget>,
    /// The ranks that save it together.
    ranks: Option<Arc<dyn SavingRanks>>,
    /// The file from which the parts were loaded, unless others have been added since.
    #[cfg(feature = "distributed")]
    source: Option<Source>,
}

type Parts = BTreeMap<String, Part>;

/// The file of a checkpoint, and the limits within which it was read.
#[cfg(feature = "distributed")]
#[derive(Clone)]
pub(crate) struct Source {
    pub(crate) file: Arc<TorchFile>,
    pub(crate) limits: Limits,
}

impl Checkpoint {
    /// Creates an empty checkpoint.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an empty checkpoint that these ranks save together.
    #[cfg(feature = "distributed")]
    pub(crate) fn of_ranks(ranks: Arc<dyn SavingRanks>) -> Self {
        Self { ranks: Some(ranks), ..Self::default() }
    }

    /// Returns the ranks that save it together, for a save on this thread.
    fn exchange(&self) -> Option<&dyn Exchange> {
        self.ranks.as_deref().map(|ranks| ranks as &dyn Exchange)
    }

    /// Returns a value, converted to `T` by serde.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoPart`] and [`CheckpointError::OtherPart`]; [`CheckpointError::Value`] if the value is not a
    /// `T`.
    pub fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        match self.find(name)? {
            NamedPart::Value(value) | NamedPart::Part(Part::Value(value)) => {
                read_value(name, value)
            }
            NamedPart::Part(Part::Empty) => read_value(name, &Value::Map(Vec::new())),
            other => Err(other_part(name, "a value", other)),
        }
    }

    /// Returns a tensor that was added by itself, as a new tensor on the CPU with the saved shape and dtype. One that
    /// Python has saved expanded, with several elements in one place of memory, is expanded here as well.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoPart`] and [`CheckpointError::OtherPart`]; [`CheckpointError::Io`],
    /// [`CheckpointError::Damaged`] and [`Error::Torch`] if the tensor can no longer be read.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        match self.find(name)? {
            NamedPart::Tensor(entry) | NamedPart::Part(Part::Tensor(entry)) => entry.to_tensor(),
            other => Err(other_part(name, "a tensor", other)),
        }
    }

    /// Returns the file that the checkpoint was loaded from, or its content if it has been made or changed since.
    #[cfg(feature = "distributed")]
    pub(crate) fn source(&self) -> Result<Source> {
        match &self.source {
            Some(source) => Ok(source.clone()),
            None => {
                let file = TorchFile::from_bytes(self.to_bytes()?);
                let file = file.map_err(CheckpointError::reading(Path::new("(memory)")))?;
                Ok(Source { file: Arc::new(file), limits: Limits::DEFAULT })
            }
        }
    }

    /// Returns the names of the parts, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parts.keys().map(String::as_str)
    }

    /// Returns whether the checkpoint has a part of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.parts.contains_key(name)
    }

    fn find(&self, name: &str) -> Result<NamedPart<'_>> {
        find(&self.parts, name).ok_or_else(|| {
            let there = self.parts.keys().cloned().collect();
            CheckpointError::NoPart { name: name.to_owned(), there }.into()
        })
    }
}

/// Shows the names of the first parts, and nothing else that a file may hold megabytes of.
impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.names().collect();
        f.debug_struct("Checkpoint").field("parts", &format_args!("{}", list(&names))).finish()
    }
}

fn read_value<T: DeserializeOwned>(name: &str, value: &Value) -> Result<T> {
    let wrong = |cause| CheckpointError::Value { name: name.to_owned(), cause };
    Ok(value.to().map_err(wrong)?)
}

fn other_part(name: &str, wanted: &'static str, found: NamedPart<'_>) -> Error {
    CheckpointError::OtherPart { name: name.to_owned(), wanted, found: found.describe() }.into()
}

impl Checkpoint {
    /// Adds the state of anything that is [`Stateful`]: models, optimizers, scalers, loss scales, random number
    /// generators and types of your own. [`Restore::add`](crate::checkpoint::Restore::add) restores it.
    ///
    /// A model is passed as `&vs`, a generator as [`Rng(device)`](crate::checkpoint::Rng), and anything else as a
    /// mutable reference.
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
        self.insert(self.saved_by(name, |state| what.save_state(state))?)
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
            saved.extend(self.saved_by(name, |state| what.save_state(state))?);
        }
        self.insert(saved)
    }

    /// Adds a tensor. It must be dense, and may be on any device and of any dtype except the quantized ones.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unsaveable`] for the name, as in [`add`](Self::add), and for an undefined, sparse or
    /// quantized tensor or one of more than 64 dimensions.
    pub fn add_tensor(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        self.insert(vec![(name.to_owned(), Part::Tensor(stateful::entry(name, tensor)?))])
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

    /// Returns the parts of what `save` records under a name.
    fn saved_by(
        &self,
        name: &str,
        save: impl FnOnce(&mut SaveState<'_>) -> Result<()>,
    ) -> Result<Vec<(String, Part)>> {
        let mut state = SaveState::new(name, self.ranks.as_ref().map(|ranks| ranks.group()));
        save(&mut state)?;
        Ok(state.finish())
    }

    /// Returns what the parts take in a file.
    fn room(&self) -> Result<SizeBudget> {
        if let Some(room) = self.room {
            return Ok(room);
        }
        let mut room = SizeBudget::default();
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

/// What all parts may take of the limits of a file. A quarter of the values is left for the names and shapes of tensors,
/// which PyTorch's format counts as well, a few levels for those around the values of a part, and a little of the header
/// for what surrounds the parts.
const ROOM: Limits = Limits {
    max_values: Limits::DEFAULT.max_values / 4 * 3,
    max_depth: 60,
    max_header_bytes: Limits::DEFAULT.max_header_bytes - AROUND_PARTS,
    ..Limits::DEFAULT
};
const MOST_JSON: u64 = MAX_MANIFEST_BYTES as u64 - AROUND_PARTS;
const AROUND_PARTS: u64 = 1 << 16;

/// The values of a group of an optimizer, and of each of its parameters.
const PER_GROUP: u64 = 64;
const PER_PARAMETER: u64 = 6;

/// The bytes of a tensor in the JSON, which has its checksum, and at most in the header besides its name.
const CHECKSUM: u64 = 20;
const TENSOR: u64 = 256;

/// The size of all that has been added so far. Files have limits, so that loading a hostile one takes little memory. A
/// part that would exceed those of either format is refused when it is added, and not when the checkpoint is saved,
/// which may be after hours of training.
#[derive(Clone, Copy, Debug, Default)]
struct SizeBudget {
    parts: usize,
    tensors: u64,
    values: u64,
    json: u64,
    header: u64,
}

impl SizeBudget {
    /// Adds a part. Returns an error if there is no room for it.
    fn with(mut self, name: &str, part: &Part) -> Result<Self> {
        let Limits { max_depth, max_values, max_tensors, max_header_bytes, .. } = ROOM;
        let levels = self.add(name, part).map_err(|error| unsaveable(name, error.to_string()))?;
        let Self { parts, tensors, values, json, header } = self;
        let problem = if levels > max_depth {
            format!("its values are nested deeper than {max_depth} levels")
        } else if values > max_values {
            format!(
                "the checkpoint would have about {values} values, more than {max_values}; save long values as tensors"
            )
        } else if tensors > max_tensors {
            format!("the checkpoint would have {tensors} tensors, more than {max_tensors}")
        } else if parts > MAX_PARTS {
            format!(
                "the checkpoint would have more than {MAX_PARTS} parts; add them as one value or state"
            )
        } else if json > MOST_JSON || header > max_header_bytes {
            format!(
                "the names and values of the checkpoint would take {json} bytes, too many; save long values as tensors"
            )
        } else {
            return Ok(self);
        };
        Err(unsaveable(name, problem).into())
    }

    /// Adds what a part takes. Returns how deep its values are nested.
    fn add(&mut self, name: &str, part: &Part) -> serde_json::Result<usize> {
        for (tensor, _) in part.tensors() {
            self.tensors += 1;
            self.values += 1;
            self.json += CHECKSUM;
            self.header += 2 * (CHECKSUM + (name.len() + tensor.len()) as u64) + TENSOR;
        }
        self.parts += 1;
        let mut levels = 0;
        match part {
            Part::Value(values) | Part::State(StatePart { values, .. }) => {
                levels = nested(values, &mut self.values);
            }
            Part::Optimizer(OptimizerPart { param_groups, .. }) => {
                let parameters = param_groups.iter().map(|group| group.params.len() as u64);
                self.values += parameters.map(|n| PER_GROUP + PER_PARAMETER * n).sum::<u64>();
            }
            _ => self.values += PER_GROUP,
        }
        let mut written = Written::default();
        if levels <= ROOM.max_depth {
            serde_json::to_writer(&mut written, &(name, PartManifest::of(part)))?;
        }
        self.json += written.bytes;
        self.header += written.bytes + written.escapes;
        Ok(levels)
    }
}

/// Counts the values in one, and what both formats need for a non-finite float. Returns how deep it is nested.
fn nested(value: &Value, values: &mut u64) -> usize {
    *values += 1;
    match value {
        Value::Float(number) if !number.is_finite() => {
            *values += 1;
            0
        }
        Value::List(items) => 1 + items.iter().map(|item| nested(item, values)).max().unwrap_or(0),
        Value::Map(fields) => {
            *values += fields.len() as u64;
            1 + fields.iter().map(|(_, item)| nested(item, values)).max().unwrap_or(0)
        }
        _ => 0,
    }
}

/// Counts the bytes of JSON, and those that JSON within JSON escapes.
#[derive(Default)]
struct Written {
    bytes: u64,
    escapes: u64,
}

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes += bytes.len() as u64;
        self.escapes += bytes.iter().filter(|byte| matches!(byte, b'"' | b'\\')).count() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
