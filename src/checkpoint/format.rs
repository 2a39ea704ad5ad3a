//! The formats of checkpoints.

use std::path::Path;

#[cfg(doc)]
use crate::checkpoint::Stateful;

/// The file format of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// A safetensors file with checksums, for weights and for resuming in Rust.
    ///
    /// | part | tensors | in the JSON of the metadata entry `tch_amp`, under `parts.NAME` |
    /// |---|---|---|
    /// | model | `NAME/VARIABLE` | `kind` |
    /// | optimizer | `NAME/PARAMETER/exp_avg` and so on | `param_groups`: options, `algorithm` and `params`, the names |
    /// | scaler | – | `state`, for `GradScaler.load_state_dict` |
    /// | your own [`Stateful`] | `NAME/TENSOR` | `value`: a map of its values, as below |
    /// | tensor, random numbers | `NAME` | `kind` |
    /// | value, loss scale | – | `value`; a non-finite float is the text `inf`, `-inf` or `nan`, and `non_finite` lists the places |
    ///
    /// What several ranks save together (`Checkpoint::sharded`) is a folder: a file of each rank, in which each tensor is
    /// whole, and `model.safetensors.index.json`, which names the file of each tensor, and has the entry `tch_amp` in its
    /// `metadata`. The index is written last, as that of [`Dcp`](Self::Dcp), and a folder without it is never loaded.
    /// Python's `HuggingFaceStorageReader` reads the folder, and so do libraries that load a model in several files:
    ///
    /// ```python
    /// import torch.distributed.checkpoint as dcp
    ///
    /// state = {"model/weight": torch.empty(4, 2)}
    /// dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader("run.shards"))
    /// ```
    ///
    /// That reader looks at the files alone and not at the index. Save to a new folder each time, as a
    /// [`CheckpointFolder`](crate::checkpoint::CheckpointFolder) does: in one that is replaced, it can find old files
    /// beside new ones until the save has finished.
    Safetensors,
    /// A file that Python reads with `torch.load(path, weights_only=True)`: a dict of the parts, each as its
    /// `state_dict()` returns it. Your own [`Stateful`] becomes a dict of its values and tensors.
    ///
    /// PyTorch refers to the parameters of an optimizer by number, here in the order of the Rust optimizer. That order
    /// can differ from `module.parameters()`, because tch creates some variables in another order: `nn::linear` creates
    /// the bias before the weight. `load_state_dict` does not notice the difference where the shapes agree. The names,
    /// in order, are therefore saved as well:
    ///
    /// ```python
    /// saved = torch.load("run.pt", weights_only=True)
    /// named = dict(module.named_parameters())
    /// groups = saved["tch_amp"]["param_names"]["optimizer"]
    /// optimizer = torch.optim.AdamW([{"params": [named[n] for n in group]} for group in groups])
    /// optimizer.load_state_dict(saved["optimizer"])
    /// ```
    ///
    /// PyTorch has two optimizers for Muon, and so its part is a dict of two states. For each group there is one in
    /// both:
    ///
    /// ```python
    /// for cls, key in [(torch.optim.Muon, "muon"), (torch.optim.AdamW, "adamw")]:
    ///     groups = saved["tch_amp"]["param_names"]["optimizer"][key]
    ///     optimizer = cls([{"params": [named[n] for n in group]} for group in groups])
    ///     optimizer.load_state_dict(saved["optimizer"][key])
    /// ```
    ///
    /// Likewise, `{"muon": muon.state_dict(), "adamw": adamw.state_dict()}` from Python is restored as one optimizer,
    /// in which each group of the two becomes a group, and those of AdamW have `use_muon: false`.
    ///
    /// The groups have PyTorch's options and no others, except that those of Muon have `use_muon` and
    /// `adamw_lr_factor`, too, which PyTorch keeps; those of Lion, which PyTorch does not have, have the options of
    /// its authors' implementation, and `maximize`. Their `fused`, which RMSprop, Lion and Muon do not have, is true,
    /// except for complex parameters and for Adagrad on a GPU: PyTorch takes this option from the file, and an
    /// optimizer that was built with `fused=True` fails with a scaler if a group is not fused. Where PyTorch's fused
    /// kernels do not apply, as with sparse gradients, set `group["fused"] = None` after `load_state_dict`. Likewise,
    /// create a learning-rate scheduler that keeps values in the groups, as `OneCycleLR` keeps its `initial_lr`, after
    /// `load_state_dict`.
    Torch,
    /// A file like that of [`Torch`](Self::Torch), except that optimizers have the names of their parameters in the
    /// place of numbers, `"params": ["weight", "bias"]`, as FSDP and `torch.distributed.checkpoint` have them. Python
    /// takes such a state whatever the order of the parameters:
    ///
    /// ```python
    /// from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
    ///
    /// saved = torch.load("run.pt", weights_only=True)
    /// set_optimizer_state_dict(module, optimizer, saved["optimizer"])
    /// ```
    TorchByName,
    /// A folder as `torch.distributed.checkpoint` writes it, with the same dict as [`TorchByName`](Self::TorchByName):
    /// an index `.metadata`, and the tensors and values in `__0_0.distcp`, or in one
    /// file of each rank that has saved a share. The tools of Python read it, and so does a
    /// program that loads into states on several ranks:
    ///
    /// ```python
    /// import torch.distributed.checkpoint as dcp
    /// from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    ///
    /// model, optim = get_state_dict(module, optimizer)
    /// state = {"model": model, "optimizer": optim}
    /// dcp.load(state, checkpoint_id="run.dcp")
    /// set_state_dict(module, optimizer, model_state_dict=model, optim_state_dict=optim)
    /// ```
    ///
    /// The index is written last, and replaces an old one as a whole: a folder without it is one whose save has not
    /// finished, which is never loaded. A save to a folder that exists removes the files that only the old index names.
    /// Optimizers whose parameters have no names are saved by numbers.
    Dcp,
}

impl Format {
    /// Returns the format for a path, by its extension: `Torch` for `.pt`, `.pth`, `.bin`, `.ckpt` and `.ot`, `Dcp` for
    /// `.dcp`, and `Safetensors` for any other.
    pub(super) fn from_path(path: &Path) -> Self {
        let ending = path.extension().and_then(|ending| ending.to_str());
        match ending {
            Some("pt" | "pth" | "bin" | "ckpt" | "ot") => Self::Torch,
            Some("dcp") => Self::Dcp,
            _ => Self::Safetensors,
        }
    }
}
