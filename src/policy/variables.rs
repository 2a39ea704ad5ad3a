//! Casting the variables of a VarStore.

use std::collections::HashSet;

use tch::nn::VarStore;
use tch::{Kind, Tensor, no_grad};

use crate::error::Result;
#[cfg(doc)]
use crate::error::{Error, PolicyError};
use crate::ffi;
use crate::names::matches_any;
use crate::policy::Policy;
use crate::policy::precision::check;
use crate::tree::floating_kind;

/// Which variables of a model stay in f32 when the others become half.
///
/// tch's VarStore knows names and not layers, so norms are told by these:
///
/// - `weight`, `bias`, `running_mean` and `running_var` beside a `running_mean`: a batch norm, whatever it is called;
/// - a part of the name, the last one included, has a word that ends in `norm` or `norms`, where words end at
///   underscores and digits: `norm1.weight`, `blocks.0.layer_norm.bias`, `RMSNorm_0.scale`, `norm_weight`, `head.norm`,
///   but not `normal_head.weight` or `normalize.weight`;
/// - a layer, which is a part but for the last, is `bn`, `ln`, `gn` or `rms`, perhaps with a number or with more after
///   an underscore: `layer1.bn2.weight`, `h.3.ln_1.bias`, `ln_f.weight`, `gn.weight`, but not `gnn.weight`.
///
/// Capitals do not matter. Names only hint at what a layer is: print what [`cast_variables`](Policy::cast_variables)
/// returns once, and correct it with patterns. One that fits no variable is no error, as in
/// [`assign_group`](crate::optim::Optimizer::assign_group), and shows there only.
///
/// In patterns `*` stands for any characters, as in [`assign_group`](crate::optim::Optimizer::assign_group).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeepF32<'a> {
    /// The norms.
    #[default]
    Norms,
    /// Nothing.
    Nothing,
    /// What one of the patterns fits.
    Names(&'a [&'a str]),
    /// The norms, and what one of the patterns fits.
    NormsAnd(&'a [&'a str]),
    /// The norms, but for what one of the patterns fits.
    NormsExcept(&'a [&'a str]),
}

impl Policy {
    /// Casts the floating variables of a VarStore to the kind of parameters, in place, and returns the names of those
    /// that stay in f32, sorted. The twin of `model.half()` with `keep_batchnorm_fp32` of apex.
    ///
    /// The layers hold the same tensors, so the model has the new kinds at once. The order is:
    ///
    /// 1. load pretrained weights, because [`VarStore::load`] gives variables the kinds of the file; a
    ///    [`Checkpoint`](crate::checkpoint::Checkpoint) can be restored afterwards, too, with `cast(true)`;
    /// 2. cast;
    /// 3. build the optimizer, whose state has the kinds of the parameters.
    ///
    /// Gradients that the cast variables have are dropped. Buffers, such as the running statistics of a batch norm, are
    /// variables in tch and go with their layer. With parameters of f32 or f64 nothing is kept back; variables made
    /// later have the kind that the VarStore had.
    ///
    /// ```
    /// use tch::{Device, Kind, nn};
    /// use tch_amp::Policy;
    /// use tch_amp::policy::KeepF32;
    ///
    /// let mut vs = nn::VarStore::new(Device::Cpu);
    /// let linear = nn::linear(vs.root() / "linear", 4, 4, Default::default());
    /// let head = nn::linear(vs.root() / "head", 4, 2, Default::default());
    /// let kept = Policy::BF16.cast_variables(&mut vs, KeepF32::NormsAnd(&["head.*"]))?;
    /// assert_eq!((linear.ws.kind(), head.ws.kind()), (Kind::BFloat16, Kind::Float));
    /// assert_eq!(kept, ["head.bias", "head.weight"]);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PolicyError::Dtype`], before anything is cast; [`Error::Torch`] when there is no memory for the next variable.
    pub fn cast_variables(&self, vs: &mut VarStore, keep: KeepF32<'_>) -> Result<Vec<String>> {
        check("param", self.param)?;
        let mut variables: Vec<_> = vs.variables().into_iter().collect();
        variables.sort_by(|(a, _), (b, _)| a.cmp(b));
        let is_half = matches!(self.param, Kind::Half | Kind::BFloat16);
        let norms = batch_norms(variables.iter().map(|(name, _)| name.as_str()));
        let keeps: Vec<bool> =
            variables.iter().map(|(name, _)| is_half && keep.keeps(name, &norms)).collect();
        let mut kept = Vec::new();
        for ((name, variable), keeps) in variables.iter_mut().zip(keeps) {
            let Some(from) = floating_kind(variable) else { continue };
            cast_in_place(variable, from, if keeps { Kind::Float } else { self.param })?;
            if keeps {
                kept.push(std::mem::take(name));
            }
        }
        Ok(kept)
    }
}

/// The tensor stays the same one, for all who hold it, and gets new data.
fn cast_in_place(variable: &mut Tensor, from: Kind, to: Kind) -> Result<()> {
    if from == to {
        return Ok(());
    }
    no_grad(|| variable.f_set_data(&variable.f_to_kind(to)?))?;
    // Its gradient has the old kind, which neither backward nor an optimizer could take.
    ffi::gradients_drop([&*variable])
}

impl KeepF32<'_> {
    fn keeps(self, name: &str, batch_norms: &HashSet<String>) -> bool {
        let norm = || is_norm(name) || is_batch_norm(name, batch_norms);
        match self {
            Self::Norms => norm(),
            Self::Nothing => false,
            Self::Names(patterns) => matches_any(patterns, name),
            Self::NormsAnd(patterns) => norm() || matches_any(patterns, name),
            Self::NormsExcept(patterns) => norm() && !matches_any(patterns, name),
        }
    }
}

/// The layers that have running statistics.
fn batch_norms<'a>(names: impl Iterator<Item = &'a str>) -> HashSet<String> {
    let layers = names.map(split).filter(|(_, name)| *name == "running_mean");
    layers.map(|(layer, _)| layer.to_owned()).collect()
}

/// Whether a variable is one of a layer's that has running statistics. Others may stand beside it: all of a model's,
/// where that layer is at the root.
fn is_batch_norm(name: &str, layers: &HashSet<String>) -> bool {
    let (layer, name) = split(name);
    ["weight", "bias", "running_mean", "running_var"].contains(&name) && layers.contains(layer)
}

/// The layer of a variable, which is empty at the root, and its name there.
fn split(name: &str) -> (&str, &str) {
    name.rsplit_once('.').unwrap_or(("", name))
}

fn is_norm(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let (layer, _) = split(&name);
    name.split('.').any(says_norm)
        || layer.split('.').any(|part| SHORT.iter().any(|short| is_short(part, short)))
}

/// Whether a word of the part ends in norm, or norms, as a list of them may be called.
fn says_norm(part: &str) -> bool {
    let mut words = part.split(|c: char| c == '_' || c.is_ascii_digit());
    words.any(|word| word.ends_with("norm") || word.ends_with("norms"))
}

/// What people call norms for short.
const SHORT: [&str; 4] = ["bn", "ln", "gn", "rms"];

/// Whether `part` is the short name, perhaps with a number or more after an underscore.
fn is_short(part: &str, short: &str) -> bool {
    let number = |rest: &str| rest.bytes().all(|byte| byte.is_ascii_digit());
    part.strip_prefix(short).is_some_and(|rest| rest.starts_with('_') || number(rest))
}
