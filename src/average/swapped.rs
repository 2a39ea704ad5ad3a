//! The guard that puts averages in the place of weights.

use std::collections::BTreeMap;
use std::mem;

use tch::Tensor;

use crate::autocast::clear_autocast_cache;
use crate::average::AveragedWeights;
use crate::average::averaged::fits;
use crate::capture;
use crate::error::{Error, Result};
use crate::ffi::OutsideRegions;
use crate::variables::Swapped;

/// Keeps the averaged weights in the model until it is dropped. Made by [`AveragedWeights::swap_in`].
///
/// # Examples
///
/// ```
/// use tch::{Device, nn};
/// use tch_amp::average::Swa;
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let w = vs.root().ones("w", &[1]);
/// let mut swa = Swa::default().build(&vs)?;
/// for value in [1.0, 2.0] {
///     tch::no_grad(|| w.shallow_clone().fill_(value));
///     swa.advance()?;
/// }
/// let swapped = swa.swap_in()?;
/// assert_eq!(w.double_value(&[0]), 1.5);
/// drop(swapped);
/// assert_eq!(w.double_value(&[0]), 2.0);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the weights are put back when this is dropped; bind it to a variable"]
pub struct SwappedIn<'a> {
    /// Nothing else may change or swap the averages meanwhile.
    _averages: &'a mut AveragedWeights,
    /// The variables that were replaced, and what holds their own numbers.
    replaced: Vec<(Tensor, Tensor)>,
    _swapped: Swapped,
}

impl AveragedWeights {
    /// Puts the averages in the place of the weights, and the weights back when the guard is dropped, on a panic, too.
    ///
    /// Every module of the model computes with the averages meanwhile, rounded to the dtype of the weights. No weight
    /// is copied: f32 weights become the averages themselves, so do not train while the guard lives; a fused optimizer
    /// with master weights would take them for weights that the program has loaded. A checkpoint neither saves nor
    /// restores the model and its optimizer meanwhile. Statistics from
    /// [`update_batch_norm`](Self::update_batch_norm) are swapped in as well. Casts of weights that an autocast region
    /// keeps are cleared.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if a variable has another shape or device than when the averages were made, or if there is no
    /// memory for averages in half precision; [`Error::InvalidArgument`] while other averages are in the place of the
    /// same weights. The model then has its weights.
    pub fn swap_in(&mut self) -> Result<SwappedIn<'_>> {
        SwappedIn::new(self, None)
    }
}

impl<'a> SwappedIn<'a> {
    /// Swaps in the averages, with these statistics of batch normalization instead of their own if there are any.
    pub(super) fn new(
        averages: &'a mut AveragedWeights,
        running: Option<&BTreeMap<String, Tensor>>,
    ) -> Result<Self> {
        capture::refuse("swapping averages in", "do it between replays")?;
        let _own = OutsideRegions::enter();
        let AveragedWeights { parameters, averages: means, statistics, .. } = &*averages;
        let weights = parameters.iter().zip(means);
        let running = statistics.pairs(running.unwrap_or(&statistics.averaged));
        let mut pairs = Vec::new();
        for (variable, average) in weights.chain(running) {
            fits(variable, average)?;
            pairs.push((variable.shallow_clone(), average.f_to_kind(variable.f_kind()?)?));
        }
        let variables = pairs.iter().map(|(variable, _)| variable.shallow_clone()).collect();
        let claimed = Swapped::claim(variables)?.ok_or_else(|| {
            let problem = "cannot take the place of weights that other averages have taken; drop their guard first";
            Error::InvalidArgument { name: "the averages", problem: problem.to_owned() }
        })?;
        // From here on, dropping this puts back what was replaced.
        let replaced = Vec::with_capacity(pairs.len());
        let mut swapped = Self { _averages: averages, replaced, _swapped: claimed };
        for (mut variable, rounded) in pairs {
            let own = variable.f_data()?;
            // The storage changes, and not its contents: afterwards the weights are the same, and autograd and the
            // optimizers find no trace.
            variable.f_set_data(&rounded)?;
            swapped.replaced.push((variable, own));
        }
        clear_autocast_cache();
        Ok(swapped)
    }
}

impl Drop for SwappedIn<'_> {
    fn drop(&mut self) {
        for (mut variable, own) in mem::take(&mut self.replaced) {
            // This cannot fail: the two were exchanged before, so that their types are compatible.
            drop(variable.f_set_data(&own));
        }
        clear_autocast_cache();
    }
}
