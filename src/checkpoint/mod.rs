//! Model, optimizer and scaler in one file that survives a crash: a run goes on from it as if it had not stopped.
//!
//! ```
//! use tch::{Device, Kind, Tensor, nn};
//! use tch_amp::{GradScaler, checkpoint::Checkpoint, optim};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let net = nn::linear(vs.root(), 4, 1, Default::default());
//! let mut opt = optim::AdamW::default().build(&vs, 1e-3)?;
//! let mut scaler = GradScaler::new(Device::Cpu)?;
//! # let path = std::env::temp_dir().join(format!("tch-amp-doc-{}.safetensors", std::process::id()));
//!
//! let mut checkpoint = Checkpoint::new();
//! checkpoint.add_model("model", &vs)?;
//! checkpoint.add_optimizer("optimizer", &mut opt)?;
//! checkpoint.add_scaler("scaler", &scaler)?;
//! checkpoint.add_rng("rng", Device::Cpu)?;
//! checkpoint.add_value("step", &1000)?;
//! checkpoint.save(&path)?;
//!
//! let checkpoint = Checkpoint::load(&path)?;
//! let step: u64 = checkpoint.value("step")?;
//! checkpoint
//!     .restore()
//!     .model("model", &vs)
//!     .optimizer("optimizer", &mut opt)
//!     .scaler("scaler", &mut scaler)
//!     .rng("rng", Device::Cpu)
//!     .apply()?;
//! assert_eq!(step, 1000);
//! # std::fs::remove_file(path)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod archive;
mod atomic;
mod entry;
mod error;
mod folder;
mod header;
mod part;
mod restore;
mod rng;
mod safetensors;
mod source;
mod torch;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::nn::VarStore;
use tch::{Device, Tensor};

use crate::GradScaler;
use crate::checkpoint::archive::Archive;
use crate::checkpoint::entry::Entry;
use crate::checkpoint::part::{OptimizerPart, Part};
use crate::checkpoint::source::Source;
use crate::error::{Error, Result};
use crate::optim::{Optimizer, OptimizerState};

pub use atomic::SaveError;
pub use error::CheckpointError;
pub use folder::{Better, CheckpointFile, CheckpointFolder, Found, Start};
pub use restore::{Restore, Restored};
pub use rng::{rng_state, set_rng_state};

/// How a checkpoint is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// A safetensors file with checksums. Its metadata has the entry `tch_amp`: JSON with all that is no tensor.
    Safetensors,
    /// A file that Python's `torch.load(path, weights_only=True)` reads: a dict of the parts, as `state_dict()` and
    /// `load_state_dict()` have them.
    Torch,
}

impl Format {
    /// `Torch` for the endings `.pt`, `.pth` and `.bin`, else `Safetensors`.
    pub fn of(path: &Path) -> Self {
        let ending = path.extension().and_then(|ending| ending.to_str());
        match ending {
            Some("pt" | "pth" | "bin") => Self::Torch,
            _ => Self::Safetensors,
        }
    }
}

/// Named models, optimizers, scalers, tensors and values, to be saved as one file or loaded from one.
///
/// What is added is not copied: save before the next step changes it. What is loaded stays in the file, with its checksums
/// verified, until it is restored: neither saving nor loading needs memory for more than the largest tensor.
#[derive(Debug, Default)]
pub struct Checkpoint {
    parts: BTreeMap<String, Part>,
}

impl Checkpoint {
    /// Makes an empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds all variables of a VarStore, those that are not trainable included. As `model.state_dict()` in PyTorch.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unsaveable`] for a name that is taken, empty or has a `/`, and for a sparse or quantized tensor.
    pub fn add_model(&mut self, name: &str, model: &VarStore) -> Result<()> {
        let variables = model.variables();
        let entries = variables.into_iter().map(|(name, tensor)| {
            let entry = entry(&name, &tensor)?;
            Ok((name, entry))
        });
        let entries = entries.collect::<Result<_>>()?;
        self.add(name, Part::Model(entries))
    }

    /// Adds the state of an optimizer. As `optimizer.state_dict()` in PyTorch. May wait as
    /// [`Optimizer::state_dict`].
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
        let part =
            OptimizerPart { state: entries, param_groups, numbered: false, undecided: false };
        self.add(name, Part::Optimizer(part))
    }

    /// Adds the state of a scaler. Waits as [`GradScaler::state_dict`].
    ///
    /// # Errors
    ///
    /// As [`add_model`](Self::add_model), and [`Error::IterationOpen`] before `update`.
    pub fn add_scaler(&mut self, name: &str, scaler: &GradScaler) -> Result<()> {
        self.add(name, Part::Scaler(scaler.state_dict()?))
    }

    /// Adds a tensor: dense, of any dtype but the quantized ones, on any device.
    ///
    /// # Errors
    ///
    /// As [`add_model`](Self::add_model).
    pub fn add_tensor(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        self.add(name, Part::Tensor(entry(name, tensor)?))
    }

    /// Adds a small value, such as a step, an epoch or a configuration: whatever serde makes JSON of. JSON has no
    /// infinite numbers and no NaN; they are saved as `null`, which loads as `None` of an `Option`.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unsaveable`] as in [`add_model`](Self::add_model), and [`CheckpointError::Value`] for what is no
    /// JSON, such as a map whose keys are no strings.
    pub fn add_value(&mut self, name: &str, value: &impl Serialize) -> Result<()> {
        let value = serde_json::to_value(value);
        let wrong = |source| CheckpointError::Value { name: name.to_owned(), source };
        self.add(name, Part::Value(value.map_err(wrong)?))
    }

    /// Adds the state of a device's random numbers, which dropout and `randn` use. As `torch.get_rng_state()`.
    ///
    /// # Errors
    ///
    /// As [`add_model`](Self::add_model), and [`Error::DeviceUnavailable`].
    pub fn add_rng(&mut self, name: &str, device: Device) -> Result<()> {
        self.add_tensor(name, &rng_state(device)?)
    }

    fn add(&mut self, name: &str, part: Part) -> Result<()> {
        let reserved = ["", "__metadata__", torch::parts::KEY].contains(&name);
        let problem = if reserved || name.contains('/') {
            "a part has a name without `/` that is not `__metadata__` or `tch_amp`"
        } else if self.parts.contains_key(name) {
            "there is a part of that name already"
        } else {
            self.parts.insert(name.to_owned(), part);
            return Ok(());
        };
        Err(unsaveable(name, problem).into())
    }

    /// Saves to a file in the [`Format`] that its name says, so that a crash at any point leaves the old file or the new one, whole: writes a
    /// temporary file in the same folder, syncs it, renames it, and syncs the folder. Waits for the devices.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Save`]; with [`SaveError::Indeterminate`] the new file is there, but may not survive a power
    /// loss. [`CheckpointError::Unsaveable`]; [`Error::Torch`] if a tensor cannot be read.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        self.save_as(path, Format::of(path))
    }

    /// Saves as [`save`](Self::save) in a format of your choice.
    ///
    /// # Errors
    ///
    /// As [`save`](Self::save).
    pub fn save_as(&self, path: impl AsRef<Path>, format: Format) -> Result<()> {
        let mut failure = None;
        let mut failed = |error| into_io(error, &mut failure);
        let replaced = match format {
            Format::Safetensors => {
                let mut plan = safetensors::Plan::new(&self.parts)?;
                atomic::replace(path.as_ref(), &mut |out| {
                    safetensors::write(&mut plan, out).map_err(&mut failed)
                })
            }
            Format::Torch => {
                let plan = torch::parts::Plan::new(&self.parts)?;
                atomic::replace(path.as_ref(), &mut |out| {
                    torch::parts::write(&plan, out, &mut failed)
                })
            }
        };
        match (failure, replaced) {
            (Some(error), Err(_)) => Err(error),
            (_, replaced) => Ok(replaced.map_err(CheckpointError::from)?),
        }
    }

    /// Loads a file of [`save`](Self::save), of Python's `torch.save`, or of tch's `VarStore::save`, whatever its name.
    /// Nothing in it is executed. Every byte is read and every checksum compared; safetensors files from elsewhere have
    /// none. Only names and shapes are kept in memory.
    ///
    /// A file of nothing but tensors is the model `model`. In a dict of PyTorch's the state dicts are recognised by their
    /// keys; an optimizer whose parameters have no names there is restored by their places.
    ///
    /// The file must not be written to as long as the checkpoint lives; another save to the same path replaces it and does
    /// no harm.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`], [`CheckpointError::Damaged`] and [`CheckpointError::Newer`].
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        Self::read(Source::open(path.as_ref())?)
    }

    /// Loads as [`load`](Self::load) from the bytes of a file, which the checkpoint keeps.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self> {
        Self::read(Source::in_memory(bytes))
    }

    fn read(source: Source) -> Result<Self> {
        let archive = open(Arc::new(source))?;
        archive.verify()?;
        Ok(Self { parts: archive.parts })
    }

    /// Begins to restore parts of the checkpoint; see [`Restore`].
    pub fn restore(&self) -> Restore<'_> {
        Restore::new(self)
    }

    /// Returns a value.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoPart`], [`CheckpointError::OtherPart`], and [`CheckpointError::Value`] for one of another type.
    pub fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        match self.part(name)? {
            Part::Value(value) => T::deserialize(value)
                .map_err(|source| CheckpointError::Value { name: name.to_owned(), source }.into()),
            other => Err(other_part(name, "a value", other)),
        }
    }

    /// Returns a tensor of its own, on the CPU.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoPart`], [`CheckpointError::OtherPart`] and [`CheckpointError::Io`].
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        match self.part(name)? {
            Part::Tensor(entry) => entry.to_tensor(),
            other => Err(other_part(name, "a tensor", other)),
        }
    }

    /// Returns the names of the parts, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parts.keys().map(String::as_str)
    }

    /// Whether there is such a part.
    pub fn contains(&self, name: &str) -> bool {
        self.parts.contains_key(name)
    }

    fn part(&self, name: &str) -> Result<&Part> {
        self.parts.get(name).ok_or_else(|| {
            let there = self.parts.keys().cloned().collect();
            CheckpointError::NoPart { name: name.to_owned(), there }.into()
        })
    }
}

fn open(source: Arc<Source>) -> Result<Archive> {
    let mut start = [0; 9];
    let len = source.len().min(start.len() as u64) as usize;
    source.read_at(0, &mut start[..len])?;
    if safetensors::is_safetensors(&start[..len]) {
        safetensors::read(source)
    } else if torch::is_zip(&start[..len]) {
        torch::parts::read(source)
    } else {
        Err(source.damaged("it begins neither as safetensors nor as a file of torch.save").into())
    }
}

fn entry(name: &str, tensor: &Tensor) -> Result<Entry> {
    let quantized = |kind| {
        use tch::Kind::{QInt8, QInt32, QUInt8};
        matches!(kind, QInt8 | QInt32 | QUInt8)
    };
    if !tensor.defined() {
        return Err(unsaveable(name, "it is an undefined tensor").into());
    }
    if tensor.is_sparse() || quantized(tensor.f_kind()?) {
        return Err(unsaveable(name, "only dense tensors that are not quantized can be").into());
    }
    Entry::in_memory(tensor)
}

fn unsaveable(name: &str, problem: &str) -> CheckpointError {
    CheckpointError::Unsaveable { name: name.to_owned(), problem: problem.to_owned() }
}

fn other_part(name: &str, wanted: &'static str, found: &Part) -> Error {
    CheckpointError::OtherPart { name: name.to_owned(), wanted, found: found.kind() }.into()
}

/// Hands the system's errors on, and keeps any other for the caller.
fn into_io(error: Error, failure: &mut Option<Error>) -> std::io::Error {
    match error {
        Error::Checkpoint(CheckpointError::Io { action: "write", source, .. }) => source,
        other => {
            *failure = Some(other);
            std::io::Error::other("a tensor could not be read")
        }
    }
}
