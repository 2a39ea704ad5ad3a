//! The formats of a checkpoint.

use std::path::Path;

#[cfg(doc)]
use crate::checkpoint::Stateful;

/// How a checkpoint is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// A safetensors file with checksums, for weights and for going on in Rust.
    ///
    /// | part | tensors | in the JSON of the metadata entry `tch_amp`, under `parts.NAME` |
    /// |---|---|---|
    /// | model | `NAME/VARIABLE` | `kind` |
    /// | optimizer | `NAME/PARAMETER/exp_avg` and so on | `param_groups`: options, `algorithm` and `params`, the names |
    /// | scaler | – | `state`, for `GradScaler.load_state_dict` |
    /// | your own [`Stateful`] | `NAME/TENSOR` | `value`: a map of its values, as below |
    /// | tensor, random numbers | `NAME` | `kind` |
    /// | value, loss scale | – | `value`; an infinite number or NaN is the text `inf`, `-inf` or `nan`, and `non_finite` lists where |
    Safetensors,
    /// A file that Python's `torch.load(path, weights_only=True)` reads: a dict of the parts, each as its
    /// `state_dict()` returns it. Your own [`Stateful`] is a dict of its values and tensors.
    ///
    /// PyTorch numbers the parameters of an optimizer, here in the order of the Rust optimizer. That differs from
    /// `module.parameters()` where tch makes variables in another order, as `nn::linear` does its bias and weight, and
    /// `load_state_dict` does not notice where shapes agree. The names in order are beside it:
    ///
    /// ```python
    /// saved = torch.load("run.pt", weights_only=True)
    /// named = dict(module.named_parameters())
    /// groups = saved["tch_amp"]["param_names"]["optimizer"]
    /// optimizer = torch.optim.AdamW([{"params": [named[n] for n in group]} for group in groups])
    /// optimizer.load_state_dict(saved["optimizer"])
    /// ```
    ///
    /// The groups have PyTorch's options and no others. They say that they are `fused`, except for complex parameters and
    /// for Adagrad on a GPU: PyTorch takes that over from the file, and a group that is not fused would fail in an
    /// optimizer that was built with `fused=True` and meets a scaler. Where PyTorch's fused kernels do not apply, as
    /// with sparse gradients, set `group["fused"] = None` after `load_state_dict`. Make a learning-rate scheduler that
    /// keeps values in the groups, as `OneCycleLR` keeps its `initial_lr`, after `load_state_dict`.
    Torch,
}

impl Format {
    /// Returns the format that a path asks for: `Torch` for `.pt`, `.pth`, `.bin`, `.ckpt` and `.ot`, else
    /// `Safetensors`.
    pub fn from_path(path: &Path) -> Self {
        let ending = path.extension().and_then(|ending| ending.to_str());
        match ending {
            Some("pt" | "pth" | "bin" | "ckpt" | "ot") => Self::Torch,
            _ => Self::Safetensors,
        }
    }
}
