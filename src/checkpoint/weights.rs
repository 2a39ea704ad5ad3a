//! The weights of a model alone, in the layouts that other programs read.
//!
//! Names are those of the model, without the part before them, and there is neither a manifest nor anything else that
//! only this crate reads.

use std::collections::{BTreeMap, HashSet};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use tch::{Device, Tensor};
use torch_files::atomic::Target;

use crate::capture;
#[cfg(doc)]
use crate::checkpoint::CheckpointError;
use crate::checkpoint::entry::TensorEntry;
use crate::checkpoint::outcome::replaced;
use crate::checkpoint::restore::names::batch_counts;
use crate::checkpoint::stateful::entry;
use crate::checkpoint::{manifest, torch};
use crate::error::{Error, Result, unsaveable};
use crate::ffi::{self, OutsideRegions};
use crate::optim::Saved as _;

/// Saves named tensors to a file that other programs open: weights without anything else. A crash at any point leaves
/// either the old file or the complete new one. Synchronizes if tensors are on a GPU.
///
/// The extension of the file selects its format:
///
/// | extension | who opens it |
/// |---|---|
/// | `.safetensors` | [`VarStore::load`](tch::nn::VarStore::load), Python's `safetensors`, transformers |
/// | `.pt`, `.bin` | [`VarStore::load`](tch::nn::VarStore::load), `torch.load(path, weights_only=True)` |
/// | `.pth`, `.ckpt` | the same of Python; tch expects another format under these names |
/// | `.ot` | [`VarStore::load`](tch::nn::VarStore::load), `torch.jit.load` |
///
/// [`Checkpoint::load`](crate::checkpoint::Checkpoint::load) opens all of them as a model named `model`.
///
/// The names are written as they are given: those of [`VarStore::variables`](tch::nn::VarStore::variables), or those
/// that a module in Python has. For each norm with running statistics a `num_batches_tracked` of 0 is added, which
/// Python's has and tch's has not, except in `.ot` files, which are for tch. For averages of the weights, save the
/// variables while the averages are [swapped in](crate::average::AveragedWeights::swap_in).
///
/// Saving needs additional memory for the largest tensor, and for an `.ot` file for all of them.
///
/// # Errors
///
/// [`CheckpointError::Unsaveable`] for another extension, a name that occurs twice or that the format cannot hold, and
/// a tensor that is undefined, sparse, quantized, of more than 64 dimensions or of a dtype that the format lacks;
/// [`CheckpointError::Save`]; [`Error::Torch`](crate::Error::Torch) if a tensor cannot be read.
///
/// # Examples
///
/// ```
/// use tch::{Device, nn};
/// use tch_amp::checkpoint::save_weights;
///
/// # let folder = std::env::temp_dir();
/// # let path = folder.join(format!("tch-amp-doc-weights-{}.safetensors", std::process::id()));
/// # let for_python = folder.join(format!("tch-amp-doc-weights-{}.pt", std::process::id()));
/// let mut vs = nn::VarStore::new(Device::Cpu);
/// let _net = nn::linear(vs.root() / "encoder", 4, 1, Default::default());
/// save_weights(&path, &vs.variables())?;
/// vs.load(&path)?;
///
/// // In Python the same layer is `body.encoder`.
/// let variables = vs.variables();
/// let renamed = variables.iter().map(|(name, tensor)| (format!("body.{name}"), tensor));
/// save_weights(&for_python, renamed)?;
/// # std::fs::remove_file(path)?;
/// # std::fs::remove_file(for_python)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn save_weights<'t, N: AsRef<str>>(
    path: impl AsRef<Path>,
    tensors: impl IntoIterator<Item = (N, &'t Tensor)>,
) -> Result<()> {
    capture::refuse("saving weights", "save them after `replay`")?;
    let path = path.as_ref();
    let tensors = named(tensors)?;
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("ot") => {
            check_for_torch_script(&tensors)?;
            let tensors = copies(&tensors)?;
            replaced(path, &mut |out| torch_script(&tensors, out))
        }
        Some("pt" | "pth" | "bin" | "ckpt") => {
            let entries = entries(&tensors)?;
            let layout = torch::layout_of_weights(&entries)?;
            replaced(path, &mut |out| layout.write_to(out))
        }
        Some("safetensors") => {
            let entries = entries(&tensors)?;
            let layout = manifest::layout_of_weights(&entries)?;
            replaced(path, &mut |out| layout.write_to(out))
        }
        _ => {
            let problem = "the name of a file with weights ends in `.safetensors`, `.pt`, `.pth`, `.bin`, `.ckpt` or \
                           `.ot`, which says its format";
            Err(unsaveable(&path.to_string_lossy(), problem).into())
        }
    }
}

/// Returns the tensors by name, checked and without their history.
fn named<'t, N: AsRef<str>>(
    tensors: impl IntoIterator<Item = (N, &'t Tensor)>,
) -> Result<BTreeMap<String, Tensor>> {
    let mut named = BTreeMap::new();
    for (name, tensor) in tensors {
        let name = name.as_ref();
        entry(name, tensor)?;
        if named.insert(name.to_owned(), tensor.f_detach()?).is_some() {
            return Err(unsaveable(name, "another tensor has that name").into());
        }
    }
    Ok(named)
}

/// Returns the tensors as entries of a file, with the batch counts that PyTorch's norms have.
fn entries(tensors: &BTreeMap<String, Tensor>) -> Result<BTreeMap<String, TensorEntry>> {
    let entries = tensors.iter().map(|(name, tensor)| Ok((name.clone(), entry(name, tensor)?)));
    let mut entries = entries.collect::<Result<BTreeMap<_, _>>>()?;
    let known: HashSet<_> = tensors.keys().map(String::as_str).collect();
    for name in batch_counts(&known) {
        entries.insert(name, TensorEntry::in_memory(&Tensor::from(0i64))?);
    }
    Ok(entries)
}

/// The reserved names, with which libtorch writes a file that it does not read.
const RESERVED: &str = "False None True Ellipsis NoneType and as assert break class continue def del elif else for \
                        global if import in is not or pass raise return while with __annotations__ __buffers__ \
                        __parameters__";

/// Returns an error for a name that an attribute of a TorchScript module cannot have. libtorch writes names into the
/// code of the module as they are, and tch writes `|` instead of dots, and so does not tell the two apart.
fn check_for_torch_script(tensors: &BTreeMap<String, Tensor>) -> Result<()> {
    let is_bad = |char: char| matches!(char, '|' | '"' | '\\') || char.is_control();
    let problem = |name: &str| match name {
        "" => Some("an `.ot` file has no tensor without a name"),
        name if RESERVED.split(' ').any(|reserved| reserved == name) => Some(
            "TorchScript reserves this name; rename the variable, or save the weights as `.safetensors` or `.pt`",
        ),
        name if name.contains(is_bad) => Some(
            "a name in an `.ot` file has none of the characters `|`, `\"` and `\\`, and no control characters",
        ),
        _ => None,
    };
    let refused = tensors.keys().find_map(|name| Some(unsaveable(name, problem(name)?)));
    refused.map_or(Ok(()), |error| Err(error.into()))
}

/// Copies tensors to the CPU: libtorch would write the whole memory that a view is a part of.
fn copies(tensors: &BTreeMap<String, Tensor>) -> Result<Vec<(String, Tensor)>> {
    let copy = |(name, tensor): (&String, &Tensor)| {
        let copy = TensorEntry::in_memory(tensor)?.to_tensor()?;
        Ok((name.clone(), if ffi::numel(&copy) == 0 { with_memory(&copy)? } else { copy }))
    };
    tensors.iter().map(copy).collect()
}

/// Returns a tensor without elements that has memory nevertheless: tch makes a slice of the memory that libtorch
/// writes, which must not begin at a null pointer.
fn with_memory(empty: &Tensor) -> Result<Tensor> {
    let one = Tensor::f_zeros([1i64], (empty.f_kind()?, Device::Cpu))?;
    Ok(one.f_narrow(0, 0, 0)?.f_view(&ffi::sizes(empty)?[..])?)
}

/// Writes the TorchScript archive of tch's `VarStore::save`.
fn torch_script(tensors: &[(String, Tensor)], out: &mut dyn Target) -> io::Result<()> {
    let _own = OutsideRegions::enter();
    let mut out = Patient { out: BufWriter::new(out), failed: None };
    let saved = Tensor::save_multi_to_stream(tensors, &mut out);
    let flushed = out.flush();
    match out.failed {
        Some(error) => Err(error),
        None => {
            saved.map_err(|error| io::Error::other(Error::from(error)))?;
            flushed
        }
    }
}

/// Keeps the first error of a file, and takes everything after it without writing. libtorch's writer completes its
/// archive in a destructor, whose second failure would end the process.
struct Patient<W> {
    out: W,
    failed: Option<io::Error>,
}

impl<W: Write> Patient<W> {
    fn note(&mut self, written: io::Result<()>) {
        if let Err(error) = written {
            self.failed = Some(error);
        }
    }
}

impl<W: Write> Write for Patient<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.failed.is_none() {
            let written = self.out.write_all(bytes);
            self.note(written);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.failed.is_none() {
            let flushed = self.out.flush();
            self.note(flushed);
        }
        Ok(())
    }
}
