//! Means over the examples of all ranks.

use tch::{Device, Kind, Tensor, no_grad};

use crate::distributed::group::ProcessGroup;
use crate::error::{Error, Result};
use crate::ffi::{self, OutsideRegions};

/// The size of what a rank tells the others: a sum in f64, and a count.
const RECORD: usize = 16;

/// Accumulates a loss or a metric over batches of any sizes, and returns its mean over the examples of all ranks. Each
/// example counts as much as any other, whichever rank and batch it is in, and a rank may have no batch at all. The
/// counterpart in Python is `MeanMetric` of torchmetrics.
///
/// Sums are f64 and stay on the device of the batches. Adding a batch does not synchronize.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::distributed::{Mean, ProcessGroup, Store};
///
/// let group = ProcessGroup::new(&Store::in_process()?, 0, 1)?;
/// let (mut loss, mut accuracy) = (Mean::default(), Mean::default());
/// loss.add(&Tensor::from(0.5f32), 3)?; // the mean over a batch of 3
/// loss.add(&Tensor::from(1.5f32), 1)?;
/// accuracy.add_values(&Tensor::from_slice(&[true, false, true, true]))?;
/// assert_eq!(loss.reduce(&group)?, 0.75);
/// assert_eq!(accuracy.reduce(&group)?, 0.75);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Mean {
    /// In f64, without dimensions; `None` before the first batch.
    sum: Option<Tensor>,
    count: u64,
}

impl Mean {
    /// Adds a batch by its mean, a real tensor of one element, and its number of examples. A mean over no examples is
    /// ignored, whatever its value.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the tensor is undefined, complex, or on another device than the previous batch, or
    /// if it does not have one element.
    pub fn add(&mut self, mean: &Tensor, count: u64) -> Result<()> {
        let _own = OutsideRegions::enter();
        let elements = self.check("mean", mean)?;
        if elements != 1 {
            return unusable("mean", format!("has {elements} elements, but must have one"));
        }
        if count == 0 {
            return Ok(());
        }
        let sum = no_grad(|| {
            let mean = mean.f_detach()?.f_to_kind(Kind::Double)?.f_reshape(&[] as &[i64])?;
            let count = ffi::number_new(count as f64, Kind::Double, Device::Cpu)?;
            Ok::<_, Error>(mean.f_mul(&count)?)
        })?;
        self.accumulate(sum, count)
    }

    /// Adds a batch by the values of its examples, a real or bool tensor of any shape, such as the loss of each
    /// example, or whether the model was right.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the tensor is undefined, complex, or on another device than the previous batch.
    pub fn add_values(&mut self, values: &Tensor) -> Result<()> {
        let _own = OutsideRegions::enter();
        let count = self.check("values", values)?;
        let sum = no_grad(|| values.f_detach()?.f_sum(Kind::Double))?;
        self.accumulate(sum, count)
    }

    /// Returns the number of examples that this rank has added.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the mean over the examples of all ranks, the same number on all of them. It is NaN if a value is NaN or
    /// no rank has an example. Synchronizes, and blocks until the ranks have answered.
    ///
    /// # Errors
    ///
    /// [`DistributedError::Mismatch`](crate::distributed::DistributedError::Mismatch) if the ranks call something else;
    /// [`DistributedError::Communication`](crate::distributed::DistributedError::Communication) if a rank does not
    /// answer.
    pub fn reduce(&self, group: &ProcessGroup) -> Result<f64> {
        let _own = OutsideRegions::enter();
        const NAME: &str = "Mean::reduce";
        let sum = self.sum.as_ref().map_or(Ok(0.0), |sum| sum.f_double_value(&[]));
        let _order = group.begin();
        let sum = group.compare_checked(NAME, sum.map_err(Error::from), |_| NAME.to_owned())?;
        let mine = [sum.to_le_bytes(), self.count.to_le_bytes()].concat();
        let all = group.run(NAME, |members| members.gather(&mine, group.size())?.finish())?;
        // Added in the order of the ranks, so that all of them have the same bits.
        let (sum, count) = all
            .chunks_exact(RECORD)
            .map(read)
            .fold((0.0, 0.0), |all, rank| (all.0 + rank.0, all.1 + rank.1 as f64));
        Ok(sum / count)
    }

    /// Returns the number of elements, or an error for a tensor that cannot be added.
    fn check(&self, name: &'static str, batch: &Tensor) -> Result<u64> {
        if !batch.defined() {
            return unusable(name, "is undefined".to_owned());
        }
        let Ok(size) = ffi::sizes(batch) else {
            return unusable(name, "has no shape".to_owned());
        };
        let kind = batch.f_kind()?;
        if matches!(kind, Kind::ComplexHalf | Kind::ComplexFloat | Kind::ComplexDouble) {
            return unusable(name, format!("has dtype {kind:?}, but must be real"));
        }
        match &self.sum {
            Some(sum) if sum.device() != batch.device() => {
                let (device, before) = (batch.device(), sum.device());
                unusable(name, format!("is on {device:?}, but the previous batch is on {before:?}"))
            }
            _ => Ok(ffi::elements(&size) as u64),
        }
    }

    fn accumulate(&mut self, batch: Tensor, count: u64) -> Result<()> {
        let _own = OutsideRegions::enter();
        self.sum = Some(match &self.sum {
            Some(sum) => no_grad(|| sum.f_add(&batch))?,
            None => batch,
        });
        self.count = self.count.saturating_add(count);
        Ok(())
    }
}

fn read(record: &[u8]) -> (f64, u64) {
    let half = |range| record.get(range).and_then(|bytes: &[u8]| bytes.try_into().ok());
    let (sum, count) = (half(0..8), half(8..RECORD));
    (sum.map_or(f64::NAN, f64::from_le_bytes), count.map_or(0, u64::from_le_bytes))
}

fn unusable<T>(name: &'static str, problem: String) -> Result<T> {
    Err(Error::InvalidArgument { name, problem })
}
