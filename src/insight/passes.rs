//! A forward and a backward pass that leave nothing behind.

use tch::{Kind, Tensor};

use super::named;
use crate::buffers::BufferSnapshot;
use crate::error::Result;
use crate::ffi::{self, OutsideRegions};
use crate::recompute::random::RandomStates;

/// The name of the product of the loss and the scale.
pub(super) const SCALED_LOSS: &str = "scaled loss";

/// Restores buffers when it is dropped.
pub(super) struct RestoredBuffers<'a>(pub(super) &'a mut BufferSnapshot);

impl Drop for RestoredBuffers<'_> {
    fn drop(&mut self) {
        // The same copies were possible the other way round.
        drop(self.0.restore());
    }
}

/// Gradients that are put back when this is dropped.
struct TakenGradients {
    parameters: Vec<Tensor>,
    taken: Vec<Option<Tensor>>,
}

impl TakenGradients {
    fn new(parameters: Vec<Tensor>) -> Result<Self> {
        let taken = ffi::gradients_take(&parameters)?;
        Ok(Self { parameters, taken })
    }

    /// The gradients that have been computed since, in exchange for those of before.
    fn exchange(self) -> Result<Vec<Option<Tensor>>> {
        ffi::gradients_take(&self.parameters)
    }
}

impl Drop for TakenGradients {
    fn drop(&mut self) {
        let dropped = ffi::gradients_drop(&self.parameters);
        drop(dropped.and_then(|()| ffi::gradients_add(&self.parameters, &self.taken)));
    }
}

/// The results of a forward and a backward pass.
pub(super) struct Passes {
    pub(super) scaled: Tensor,
    /// `None` for a parameter without one.
    pub(super) gradients: Vec<Option<Tensor>>,
    /// The gradients of leaves that are not parameters of the model, such as those of another model.
    pub(super) others: Vec<Tensor>,
}

/// Runs forward and backward within `around`, with random numbers from `random`, and puts the gradients and the random
/// numbers of before back.
pub(super) fn run<T>(
    parameters: &[(String, Tensor)],
    random: &RandomStates,
    scale: f64,
    loss: &mut impl FnMut() -> Result<Tensor>,
    around: impl FnOnce(&mut dyn FnMut() -> Result<Tensor>) -> Result<(T, Tensor)>,
) -> Result<(T, Passes)> {
    let parameters: Vec<Tensor> =
        parameters.iter().map(|(_, tensor)| tensor.shallow_clone()).collect();
    let taken = TakenGradients::new(parameters)?;
    let mut others = Vec::new();
    let mut passes = || {
        let loss = loss()?;
        let scaled = named(SCALED_LOSS, || scaled(&loss, scale))?;
        let leaves = TakenGradients::new(ffi::insight::other_leaves(&scaled, &taken.parameters)?)?;
        ffi::backward(&scaled, false)?;
        others.extend(leaves.exchange()?.into_iter().flatten());
        Ok(scaled)
    };
    let (found, scaled) = random.during(|| around(&mut passes))??;
    let gradients = taken.exchange()?;
    Ok((found, Passes { scaled, gradients, others }))
}

/// The loss times the scale, as the scaler computes it, and with a scale of 1, too, so that it has memory of its own.
fn scaled(loss: &Tensor, scale: f64) -> Result<Tensor> {
    let kind = if loss.f_kind()? == Kind::Double { Kind::Double } else { Kind::Float };
    ffi::scaled(loss, &ffi::number_new(scale, kind, loss.device())?)
}

pub(super) fn is_finite(tensor: &Tensor) -> Result<bool> {
    let _own = OutsideRegions::enter();
    let values = if tensor.is_sparse() {
        tensor.f_coalesce()?.f_internal_values()?
    } else {
        tensor.f_detach()?
    };
    Ok(values.f_isfinite()?.f_all()?.f_int64_value(&[])? != 0)
}
