//! The guard that puts averages in the place of weights.

use std::collections::BTreeMap;
use std::mem;

use tch::Tensor;

use crate::autocast::clear_autocast_cache;
use crate::average::AveragedWeights;
use crate::error::{Error, Result};
use crate::ffi;

/// Has the averages in the place of a model's weights until it is dropped. Made by [`AveragedWeights::swap_in`].
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
}

impl<'a> SwappedIn<'a> {
    /// Swaps in the averages, with these statistics of batch normalization instead of their own if there are any.
    pub(super) fn new(
        averages: &'a mut AveragedWeights,
        running: Option<&BTreeMap<String, Tensor>>,
    ) -> Result<Self> {
        let AveragedWeights { parameters, averages: means, statistics, .. } = &*averages;
        let weights = parameters.iter().zip(means);
        let running = statistics.pairs(running.unwrap_or(&statistics.averaged));
        let mut pairs = Vec::new();
        for (variable, average) in weights.chain(running) {
            pairs.push((variable.shallow_clone(), rounded(variable, average)?));
        }
        // From here on, dropping this puts back what was replaced.
        let mut swapped = Self { _averages: averages, replaced: Vec::with_capacity(pairs.len()) };
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
            // It was accepted the other way round.
            drop(variable.f_set_data(&own));
        }
        clear_autocast_cache();
    }
}

/// The average in the dtype of its variable.
fn rounded(variable: &Tensor, average: &Tensor) -> Result<Tensor> {
    let (here, there) = (ffi::sizes(variable)?, ffi::sizes(average)?);
    let devices = (variable.device(), average.device());
    if here != there || devices.0 != devices.1 {
        let problem = format!(
            "a weight is {here:?} on {:?} by now, and its average {there:?} on {:?}; make the averages after the model \
             has its shape and device",
            devices.0, devices.1
        );
        return Err(Error::Torch(problem));
    }
    Ok(average.f_to_kind(variable.f_kind()?)?)
}
