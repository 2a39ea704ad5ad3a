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

mod add;
mod archive;
mod convert;
mod entry;
mod folder;
mod limits;
mod load;
mod malformed;
mod part;
mod pickle;
mod restore;
mod room;
mod safetensors;
mod save;
mod shards;
mod source;
mod stateful;
mod torch;
mod value;
mod weights;
mod zip;

use std::collections::BTreeMap;
use std::fmt;
#[cfg(feature = "distributed")]
use std::sync::Arc;

use serde::de::DeserializeOwned;
use tch::Tensor;

use crate::checkpoint::part::{Item, Part, find};
use crate::checkpoint::room::Room;
use crate::checkpoint::value::Value;
use crate::error::{Error, Result, list};

pub use crate::atomic::SaveError;
pub use crate::error::CheckpointError;
pub use folder::{CheckpointFile, CheckpointFolder, Found, MetricGoal, Start};
pub use restore::{Restore, Restored};
pub use save::Format;
#[cfg(feature = "distributed")]
pub(crate) use source::Source;
#[cfg(feature = "distributed")]
pub(crate) use stateful::check_rng_state;
pub use stateful::{Prepared, Rng, SaveState, SavedState, Stateful};
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
    parts: BTreeMap<String, Part>,
    /// The room that the parts take in a file; `None` for parts that were loaded until another one is added.
    room: Option<Room>,
    /// What the parts were loaded from, unless others have been added since.
    #[cfg(feature = "distributed")]
    source: Option<Arc<Source>>,
}

impl Checkpoint {
    /// Creates an empty checkpoint.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a value, converted to `T` by serde.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoPart`] and [`CheckpointError::OtherPart`]; [`CheckpointError::Value`] if the value is not a
    /// `T`.
    pub fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        match self.find(name)? {
            Item::Value(value) | Item::Part(Part::Value(value)) => read_value(name, value),
            Item::Part(Part::Empty) => read_value(name, &Value::Map(Vec::new())),
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
            Item::Tensor(entry) | Item::Part(Part::Tensor(entry)) => entry.to_tensor(),
            other => Err(other_part(name, "a tensor", other)),
        }
    }

    /// Returns the file that the checkpoint was loaded from, or its content if it has been made or changed since.
    #[cfg(feature = "distributed")]
    pub(crate) fn source(&self) -> Result<Arc<Source>> {
        match &self.source {
            Some(source) => Ok(source.clone()),
            None => Ok(Arc::new(Source::in_memory(self.to_bytes()?))),
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

    fn find(&self, name: &str) -> Result<Item<'_>> {
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
    Ok(value.read().map_err(wrong)?)
}

fn other_part(name: &str, wanted: &'static str, found: Item<'_>) -> Error {
    CheckpointError::OtherPart { name: name.to_owned(), wanted, found: found.describe() }.into()
}
