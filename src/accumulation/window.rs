//! The micro-batches of one step.

use tch::{Device, Kind, Tensor};

use crate::GradScaler;
use crate::accumulation::dropping::Kept;
use crate::capture;
#[cfg(feature = "distributed")]
use crate::distributed::{ProcessGroup, ReduceOp, any_is_averaged};
use crate::error::{Error, Result, ensure, ensure_defined};
use crate::ffi;
use crate::optim::AmpOptimizer;

/// The micro-batches whose gradients are accumulated for one step, with the weight of each. PyTorch has no counterpart;
/// its loops multiply the losses by hand.
///
/// Make a new one for each step: the last window of an epoch then has as many weights as there are micro-batches left.
/// Neither `update` nor `zero_grad` may be called while a window lasts. Only [`dropped`](Self::dropped) synchronizes,
/// and saving a window in the middle, [`with_gradients`](Self::with_gradients).
#[derive(Debug)]
pub struct Accumulation {
    /// What a mean loss of each micro-batch is multiplied by.
    pub(super) shares: Vec<f64>,
    pub(super) next: usize,
    pub(super) kept: Kept,
}

impl Accumulation {
    /// Makes a window of micro-batches with these weights: their numbers of tokens or samples, over which their losses
    /// are means. Padding does not count. A weight of zero is that of a micro-batch without tokens.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if a weight is negative or not finite, or if all are zero.
    pub fn of_weights(weights: impl AsRef<[f64]>) -> Result<Self> {
        let weights = weights.as_ref();
        check(weights)?;
        let total: f64 = weights.iter().sum();
        ensure("the sum of the weights", total, total > 0.0 && total.is_finite(), "more than 0")?;
        Ok(Self::with_total(weights, total))
    }

    /// Makes a window of micro-batches of the same size.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if there is no micro-batch.
    pub fn of_equal(micro_batches: usize) -> Result<Self> {
        Self::of_weights(vec![1.0; micro_batches])
    }

    /// Makes a window whose tokens count the same on all ranks of a group, however many each rank has. The gradients of
    /// `DistributedDataParallel` are means over the ranks, which this takes into account. Communicates, so all ranks
    /// must call it. They need the same number of micro-batches, because `DistributedDataParallel` compares their
    /// passes: a rank with fewer runs further ones with a weight of zero, on any batch with a finite loss.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`], on all ranks, if a weight of any of them is negative or not finite, or if all are
    /// zero; the errors of [`ProcessGroup::all_reduce`].
    #[cfg(feature = "distributed")]
    pub fn of_weights_over(group: &ProcessGroup, weights: impl AsRef<[f64]>) -> Result<Self> {
        let weights = weights.as_ref();
        // A rank whose weights are refused still takes part, so that the others do not wait for it.
        let checked = check(weights);
        let sum: f64 = if checked.is_ok() { weights.iter().sum() } else { f64::NAN };
        let mut total = ffi::number_new(sum, Kind::Double, Device::Cpu)?;
        group.all_reduce(&mut total, ReduceOp::Sum)?;
        checked?;
        let total = {
            let _own = ffi::OutsideRegions::enter();
            total.f_double_value(&[])?
        };
        let holds = total > 0.0 && total.is_finite();
        ensure("the sum of the weights of all ranks", total, holds, "more than 0 and finite")?;
        Ok(Self::with_total(weights, total / group.size() as f64))
    }

    fn with_total(weights: &[f64], total: f64) -> Self {
        let shares = weights.iter().map(|weight| weight / total).collect();
        Self { shares, next: 0, kept: Kept::default() }
    }

    /// Returns the number of micro-batches.
    pub fn micro_batches(&self) -> usize {
        self.shares.len()
    }

    /// Returns the number of micro-batches that have been taken: the index of the next one.
    pub fn taken(&self) -> usize {
        self.next
    }

    /// Returns whether the next micro-batch is the last one, whose backward pass is not in a `no_sync` of
    /// `DistributedDataParallel`.
    pub fn is_last(&self) -> bool {
        self.next + 1 == self.shares.len()
    }

    /// Returns whether all micro-batches have been taken, so that the step is due.
    pub fn is_complete(&self) -> bool {
        self.next == self.shares.len()
    }

    /// Multiplies the mean loss of the next micro-batch by its share of the window, in f32, or in f64 for a loss in
    /// f64. For loops that run the backward pass themselves, such as
    /// `ddp.backward_scaled(&mut scaler, &window.weigh(&loss)?)`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a loss that is not one floating-point number, for one more than the window has,
    /// and after [`backward_or_drop`](Self::backward_or_drop), which must then take all micro-batches of the window.
    pub fn weigh(&mut self, loss: &Tensor) -> Result<Tensor> {
        self.refuse_mixing(self.kept.batches() == 0)?;
        let weighed = self.weighed(loss)?;
        // Not only from the second on: tch zeroes gradients in place, which leaves them in one memory.
        ffi::gradients_separate_leaves(&weighed)?;
        self.advance();
        Ok(weighed)
    }

    fn weighed(&self, loss: &Tensor) -> Result<Tensor> {
        let problem = |problem: String| Error::InvalidArgument { name: "loss", problem };
        let Some(&share) = self.shares.get(self.next) else {
            let all = self.shares.len();
            return Err(problem(format!(
                "is one more than the {all} of the window; begin a new one"
            )));
        };
        ensure_defined("loss", loss)?;
        let kind = match loss.f_kind()? {
            Kind::Double => Kind::Double,
            Kind::Float | Kind::Half | Kind::BFloat16 => Kind::Float,
            other => {
                return Err(problem(format!("is {other:?}, but must be a floating-point number")));
            }
        };
        let sizes = ffi::sizes(loss)?;
        if ffi::elements(&sizes) != 1 {
            return Err(problem(format!("is {sizes:?}, but must be one number")));
        }
        let factor = ffi::number_new(share, kind, Device::Cpu)?;
        ffi::scaled(loss, &factor)
    }

    /// Returns an error unless [`backward_or_drop`](Self::backward_or_drop) took all micro-batches or none. If it left
    /// one out, those that other calls took would have the wrong weights.
    fn advance(&mut self) {
        let is_begun = self.next == 0;
        self.next += 1;
        capture::note_window(is_begun, self.is_complete());
    }

    fn refuse_mixing(&self, same: bool) -> Result<()> {
        if same {
            return Ok(());
        }
        let problem = "mixes `backward_or_drop` with other calls; use it for all micro-batches of a window or for none";
        Err(Error::InvalidArgument { name: "the window", problem: problem.to_owned() })
    }

    /// Runs the backward pass of the next micro-batch, whose loss is the mean over its tokens or samples.
    ///
    /// # Errors
    ///
    /// The same as [`weigh`](Self::weigh) and [`GradScaler::backward`]. The window then still waits for this
    /// micro-batch.
    pub fn backward(&mut self, scaler: &mut GradScaler, loss: &Tensor) -> Result<()> {
        self.refuse_mixing(self.kept.batches() == 0)?;
        let weighed = self.weighed(loss)?;
        scaler.backward(&weighed)?;
        self.advance();
        Ok(())
    }

    /// Runs the backward pass of the next micro-batch like [`backward`](Self::backward), but leaves its gradients out
    /// if any of them is infinite or NaN. After the last micro-batch the gradients are those of the others alone, with
    /// their weights in proportion. [`dropped`](Self::dropped) says which ones were left out.
    ///
    /// If none is left, the gradients are infinite or NaN, and the scaler skips the step and lowers its scale. (A
    /// disabled scaler skips it only in [`step_unless_spike`](GradScaler::step_unless_spike).) With a scaler in fp16, a
    /// micro-batch is also left out if its gradients overflow only because of the scale, which stays as it is until all
    /// micro-batches of a window overflow.
    ///
    /// The decision is made on the device. It takes one more pass over the gradients, and for each micro-batch but the
    /// first, memory for a second set of them.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for an optimizer of a `DistributedDataParallel` model, whose ranks would leave out
    /// different micro-batches; with [`weigh`](Self::weigh) instead, all ranks skip a window that is not finite.
    /// The same as [`backward`](Self::backward), and [`Error::InvalidArgument`] after micro-batches that another call
    /// took; the errors of [`unscale_`](GradScaler::unscale_) for gradients that are
    /// not supported, such as sparse ones.
    pub fn backward_or_drop(
        &mut self,
        scaler: &mut GradScaler,
        optimizer: &dyn AmpOptimizer,
        loss: &Tensor,
    ) -> Result<()> {
        self.refuse_mixing(self.kept.batches() == self.next)?;
        refuse_averaged(optimizer)?;
        let weighed = self.weighed(loss)?;
        let (share, is_last) = (self.shares[self.next], self.is_last());
        self.kept.backward(optimizer, share, is_last, || scaler.backward(&weighed))?;
        self.advance();
        Ok(())
    }

    /// Returns which micro-batches [`backward_or_drop`](Self::backward_or_drop) has left out, from 0 on. Synchronizes
    /// on a GPU.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the answers cannot be read from the device.
    pub fn dropped(&self) -> Result<Vec<usize>> {
        let answers = self.kept.answers()?.into_iter().enumerate();
        Ok(answers.filter_map(|(index, dropped)| dropped.then_some(index)).collect())
    }
}

/// Returns an error for parameters whose gradients are averaged over ranks.
#[cfg(feature = "distributed")]
fn refuse_averaged(optimizer: &dyn AmpOptimizer) -> Result<()> {
    if !any_is_averaged(optimizer.parameters().as_slice())? {
        return Ok(());
    }
    let problem = "has parameters of a DistributedDataParallel model, whose ranks would leave out different \
        micro-batches; use `ddp.backward_scaled(&mut scaler, &window.weigh(&loss)?)`, and the scalers of all ranks skip \
        the window";
    Err(Error::InvalidArgument { name: "optimizer", problem: problem.to_owned() })
}

#[cfg(not(feature = "distributed"))]
fn refuse_averaged(_: &dyn AmpOptimizer) -> Result<()> {
    Ok(())
}

pub(super) fn check(weights: &[f64]) -> Result<()> {
    for &weight in weights {
        let holds = weight >= 0.0 && weight.is_finite();
        ensure("a weight", weight, holds, "finite and at least 0")?;
    }
    Ok(())
}
