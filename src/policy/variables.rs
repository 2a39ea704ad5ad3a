//! Casting the variables of a VarStore.

use std::collections::HashSet;

use tch::nn::VarStore;
use tch::{Kind, Tensor, no_grad};

use crate::error::Result;
#[cfg(doc)]
use crate::error::{Error, PolicyError};
use crate::ffi::{self, OutsideRegions};
use crate::patterns::matches_any;
use crate::policy::Policy;
use crate::policy::dtypes::check;
use crate::tree::floating_kind;
use crate::variables::{Variable, variables};

/// Which variables of a model stay in f32 when the others are cast to half precision.
///
/// A `VarStore` of tch has names but no layers, so norms are recognized by name. A variable belongs to a norm if one of
/// these holds:
///
/// - It is a `weight`, `bias`, `running_mean` or `running_var`, and there is a `running_mean` beside it: a batch norm,
///   whatever its name is.
/// - A part of its name, the last one included, has a word that ends in `norm` or `norms`, where underscores and digits
///   separate words: `norm1.weight`, `blocks.0.layer_norm.bias`, `RMSNorm_0.scale`, `norm_weight`, `head.norm`, but not
///   `normal_head.weight` or `normalize.weight`.
/// - A part of its name other than the last is `bn`, `ln`, `gn` or `rms`, optionally followed by a number or by an
///   underscore and anything else: `layer1.bn2.weight`, `h.3.ln_1.bias`, `ln_f.weight`, `gn.weight`, but not
///   `gnn.weight`.
///
/// Case does not matter. Names are only a heuristic: print what [`cast_variables`](Policy::cast_variables) returns
/// once, and correct it with patterns, in which `*` matches any characters. As in
/// [`assign_group`](crate::optim::Optimizer::assign_group), a pattern that matches no variable is not an error.
///
/// # Examples
///
/// ```
/// use tch::{Device, nn};
/// use tch_amp::Policy;
/// use tch_amp::policy::KeepF32;
///
/// let mut vs = nn::VarStore::new(Device::Cpu);
/// let _norm = nn::layer_norm(vs.root() / "norm", vec![4], Default::default());
/// let _scale = (vs.root() / "pixel_norm_scale").ones("weight", &[1]);
/// assert_eq!(Policy::F16.cast_variables(&mut vs, KeepF32::Norms)?.len(), 3);
/// let kept = Policy::F16.cast_variables(&mut vs, KeepF32::NormsExcept(&["pixel_*"]))?;
/// assert_eq!(kept, ["norm.bias", "norm.weight"]);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeepF32<'a> {
    /// The norms.
    #[default]
    Norms,
    /// No variables.
    Nothing,
    /// The variables that match one of the patterns.
    Names(&'a [&'a str]),
    /// The norms, and the variables that match one of the patterns.
    NormsAnd(&'a [&'a str]),
    /// The norms, except for the variables that match one of the patterns.
    NormsExcept(&'a [&'a str]),
}

impl Policy {
    /// Casts the floating-point variables of a `VarStore` to the dtype of the parameters, in place, and returns the
    /// sorted names of those that stay in f32. Corresponds to `model.half()` with apex's `keep_batchnorm_fp32`.
    ///
    /// The layers of the model share these tensors, so they have the new dtypes at once. Proceed in this order:
    ///
    /// 1. Load pretrained weights: `VarStore::load` gives variables the dtypes of the file. A
    ///    [`Checkpoint`](crate::checkpoint::Checkpoint) can be restored after the cast as well, with `cast(true)`.
    /// 2. Cast.
    /// 3. Build the optimizer, whose state depends on the dtypes of the parameters.
    ///
    /// The gradients of the cast variables are dropped. Buffers, such as the running statistics of a batch norm, are
    /// variables in tch and are treated like the others of their layer. If the parameters are f32 or f64, `keep` has no
    /// effect. Variables that are created later have the dtype of the `VarStore`, which does not change. A variable
    /// with several names, such as a tied weight, stays in f32 if one of them says so, and is returned by the first of
    /// them.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Dtype`], before anything is cast; [`Error::Torch`] if there is no memory for the next variable,
    /// with those before it cast.
    ///
    /// # Examples
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
    pub fn cast_variables(&self, vs: &mut VarStore, keep: KeepF32<'_>) -> Result<Vec<String>> {
        check("param", self.param)?;
        let variables = variables(vs)?;
        let is_half = matches!(self.param, Kind::Half | Kind::BFloat16);
        let norms = batch_norms(variables.iter().flat_map(|variable| variable.names.iter()));
        let mut kept = Vec::new();
        for Variable { names, mut tensor } in variables {
            let Some(from) = floating_kind(&tensor) else { continue };
            let keeps = is_half && names.iter().any(|name| keep.keeps(name, &norms));
            cast_in_place(&mut tensor, from, if keeps { Kind::Float } else { self.param })?;
            if keeps {
                kept.push(names.first);
            }
        }
        Ok(kept)
    }
}

/// Casts a variable in place: the tensor stays the same one for its other handles, and gets new data.
fn cast_in_place(variable: &mut Tensor, from: Kind, to: Kind) -> Result<()> {
    let _own = OutsideRegions::enter();
    if from == to {
        return Ok(());
    }
    no_grad(|| variable.f_set_data(&variable.f_to_kind(to)?))?;
    // Neither a backward nor an optimizer accepts a gradient of the old dtype.
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

/// Returns the layers that have running statistics.
fn batch_norms<'a>(names: impl Iterator<Item = &'a String>) -> HashSet<String> {
    let layers = names.map(|name| split(name)).filter(|(_, name)| *name == "running_mean");
    layers.map(|(layer, _)| layer.to_owned()).collect()
}

/// Returns whether a variable belongs to a layer with running statistics. Only four names count, because other
/// variables may have the same prefix: all of the model, if the layer is at the root.
fn is_batch_norm(name: &str, layers: &HashSet<String>) -> bool {
    let (layer, name) = split(name);
    ["weight", "bias", "running_mean", "running_var"].contains(&name) && layers.contains(layer)
}

/// Splits a name into the layer, which is empty at the root, and the variable's name there.
fn split(name: &str) -> (&str, &str) {
    name.rsplit_once('.').unwrap_or(("", name))
}

fn is_norm(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let (layer, _) = split(&name);
    name.split('.').any(says_norm)
        || layer.split('.').any(|part| SHORT.iter().any(|short| is_short(part, short)))
}

/// Returns whether a word of the part ends in `norm` or, as for a list of norms, in `norms`.
fn says_norm(part: &str) -> bool {
    let mut words = part.split(|c: char| c == '_' || c.is_ascii_digit());
    words.any(|word| word.ends_with("norm") || word.ends_with("norms"))
}

/// Common abbreviations for norms.
const SHORT: [&str; 4] = ["bn", "ln", "gn", "rms"];

/// Returns whether `part` is the abbreviation, optionally followed by a number or by an underscore and anything else.
fn is_short(part: &str, short: &str) -> bool {
    let number = |rest: &str| rest.bytes().all(|byte| byte.is_ascii_digit());
    part.strip_prefix(short).is_some_and(|rest| rest.starts_with('_') || number(rest))
}
