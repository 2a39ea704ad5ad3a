//! Which examples each rank gets.

use tch::Tensor;

use crate::distributed::group::ProcessGroup;
use crate::error::{Error, Result};
use crate::ffi::{self, OutsideRegions};

/// How the examples of a data set are divided among ranks, with PyTorch's defaults. All ranks need the same options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplerConfig {
    /// Whether the examples are shuffled, in a new order in each epoch; `true` by default. Otherwise the ranks take
    /// turns in the order of the data set.
    pub shuffle: bool,
    /// The seed of the order, to which the epoch is added; 0 by default.
    pub seed: i64,
    /// Whether the last examples are left out if the examples cannot be divided evenly; `false` by default.
    pub drop_last: bool,
    /// Whether, without `drop_last`, the first examples are repeated if the examples cannot be divided evenly; `true`
    /// by default. PyTorch always repeats them. With `false`, every example is in exactly one rank's share, and the
    /// first ranks may have one more than the others. Use that for evaluation only: training needs the same number of
    /// batches on all ranks.
    pub pad: bool,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self { shuffle: true, seed: 0, drop_last: false, pad: true }
    }
}

impl SamplerConfig {
    /// Divides the examples of a data set of this length among the ranks of a group. Nothing is communicated.
    ///
    /// # Errors
    ///
    /// As for [`build_for`](Self::build_for).
    pub fn build(&self, group: &ProcessGroup, length: usize) -> Result<DistributedSampler> {
        self.build_for(length, group.rank(), group.size())
    }

    /// Divides the examples of a data set of this length among `size` ranks, of which this one is `rank`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the data set is empty, if `drop_last` leaves no example for any rank, and if
    /// `rank` is not less than `size`.
    pub fn build_for(&self, length: usize, rank: usize, size: usize) -> Result<DistributedSampler> {
        let invalid = |name, problem| Err(Error::InvalidArgument { name, problem });
        if rank >= size {
            let problem = format!("is {rank}, but must be less than the number of ranks, {size}");
            return invalid("rank", problem);
        }
        let padded = length.checked_next_multiple_of(size).map(i64::try_from);
        if length == 0 || !matches!(padded, Some(Ok(_))) {
            let problem = format!("is {length}, but must be positive, and fit into an i64");
            return invalid("length", problem);
        }
        if self.drop_last && length < size {
            let problem = format!("leaves nothing of {length} examples for {size} ranks");
            return invalid("drop_last", problem);
        }
        Ok(DistributedSampler { options: *self, length, rank, size, epoch: 0 })
    }
}

/// Gives each rank its own share of the examples of a data set, in a new order in each epoch. Corresponds to
/// `torch.utils.data.DistributedSampler`, and has the same orders for the same seed and epoch.
///
/// All ranks need the same length, options and epoch. By default all shares have the same size, and a few examples are
/// repeated if necessary. To leave examples out instead, set [`SamplerConfig::drop_last`]. For evaluation, let the
/// shares differ by one example with [`SamplerConfig::pad`].
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::distributed::{DistributedSampler, ProcessGroup, Store};
///
/// let group = ProcessGroup::new(&Store::in_process()?, 0, 1)?;
/// let xs = Tensor::rand([10, 4], (Kind::Float, Device::Cpu));
/// let mut sampler = DistributedSampler::new(&group, 10)?;
/// for epoch in 0..2 {
///     sampler.set_epoch(epoch);
///     for batch in sampler.indices()?.split(4, 0) {
///         let xs = xs.index_select(0, &batch);
///         assert!(xs.size()[0] <= 4);
///     }
/// }
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DistributedSampler {
    options: SamplerConfig,
    length: usize,
    rank: usize,
    size: usize,
    epoch: u64,
}

impl DistributedSampler {
    /// Divides the examples of a data set of this length among the ranks of a group, with the default options: see
    /// [`SamplerConfig::build`].
    ///
    /// # Errors
    ///
    /// As for [`SamplerConfig::build`].
    pub fn new(group: &ProcessGroup, length: usize) -> Result<Self> {
        SamplerConfig::default().build(group, length)
    }

    /// Sets the epoch, which determines the order. It is 0 at first. Without this call, every epoch has the same order.
    pub fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    /// Returns the epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the number of examples in the share of this rank.
    pub fn len(&self) -> usize {
        self.end().saturating_sub(self.rank).div_ceil(self.size)
    }

    /// Returns whether this rank has no examples. That happens only if [`SamplerConfig::pad`] is `false` and there are
    /// fewer examples than ranks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the indices of this rank's examples in order, as a one-dimensional int64 tensor of [`len`](Self::len)
    /// elements on the CPU. The call needs memory for the indices of the whole data set. It does not use the default
    /// random number generator.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if there is not enough memory.
    pub fn indices(&self) -> Result<Tensor> {
        let _own = OutsideRegions::enter();
        // Padding begins again with the first examples, as often as necessary.
        let places = (self.rank..self.end()).step_by(self.size);
        let places: Vec<_> = places.map(|place| (place % self.length) as i64).collect();
        let places = Tensor::f_from_slice(&places)?;
        if !self.options.shuffle {
            return Ok(places);
        }
        let seed = self.options.seed.wrapping_add_unsigned(self.epoch).cast_unsigned();
        let order = ffi::distributed::random_permutation(self.length as i64, seed)?;
        Ok(order.f_index_select(0, &places)?)
    }

    /// The number of places that are dealt out to the ranks in turn.
    fn end(&self) -> usize {
        let Self { options, length, size, .. } = self;
        match (options.drop_last, options.pad) {
            (true, _) => length / size * size,
            (false, true) => length.div_ceil(*size) * size,
            (false, false) => *length,
        }
    }
}
