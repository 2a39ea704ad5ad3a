//! The options of [`DistributedDataParallel`].

use tch::Kind;
use tch::nn::VarStore;

use crate::distributed::ddp::DistributedDataParallel;
use crate::distributed::group::ProcessGroup;
use crate::error::{Error, Result};
use crate::ffi::distributed as ffi;

/// The options of [`DistributedDataParallel`], with PyTorch's defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DdpConfig {
    /// Whether buffers, such as the statistics of BatchNorm, are overwritten by those of rank 0 before a forward pass;
    /// `true` by default.
    pub broadcast_buffers: bool,
    /// The size in MiB of the buckets in which gradients are communicated; 25 by default, with a first one of 1 MiB.
    pub bucket_cap_mb: Option<f64>,
    /// Whether the loss may depend on different parameters in each iteration. Finding those that it does not depend on
    /// takes time in every iteration; `false` by default.
    pub find_unused_parameters: bool,
    /// Whether the gradients are views of the buckets, which saves the memory of the gradients, and a copy; `false` by
    /// default.
    pub gradient_as_bucket_view: bool,
    /// The half-precision dtype in which gradients are communicated, which halves the traffic of f32 parameters; `None`
    /// by default.
    /// Corresponds to the communication hooks `fp16_compress_hook` and `bf16_compress_hook`.
    pub compression: Option<Kind>,
    /// Whether gradients are divided by the number of ranks before they are converted. PyTorch's hooks convert first,
    /// so that fp16 overflows if the scaled gradient of a rank exceeds 65504; `false` by default, which gives PyTorch's
    /// bits.
    pub divide_first: bool,
    /// Whether the ranks compare which model's pass they are about to run, before it communicates; `true` by default.
    /// If they disagree, each gets an error. Without the comparison they would wait for each other, or gloo would abort
    /// the process. It costs a message of 256 bytes in each backward pass, and in each forward pass that communicates.
    /// A backward pass computes while the ranks compare, on a GPU until the first bucket is full, if it can be undone:
    /// no parameter has a gradient before it, it is not the first one, and neither another model nor a function of this
    /// one, such as that of [`SyncBatchNorm`](crate::distributed::SyncBatchNorm), uses the group. Any other pass waits
    /// until they have compared. A function of your own that uses the group in its backward pass has to use it in its
    /// forward pass as well, or to turn the comparison off. PyTorch compares only with
    /// `TORCH_DISTRIBUTED_DEBUG=DETAIL`.
    pub compare_passes: bool,
}

impl Default for DdpConfig {
    fn default() -> Self {
        Self {
            broadcast_buffers: true,
            bucket_cap_mb: None,
            find_unused_parameters: false,
            gradient_as_bucket_view: false,
            compression: None,
            divide_first: false,
            compare_passes: true,
        }
    }
}

impl DdpConfig {
    /// Distributes a model: from now on, the gradients of all variables of `vs` that require gradients are averaged
    /// over the ranks, which all call this. The parameters and buffers of rank 0 are copied to the other ranks. The
    /// model communicates through connections of its own, so other uses of the group do not disturb its passes.
    ///
    /// # Errors
    ///
    /// [`DistributedError::Mismatch`](crate::distributed::DistributedError::Mismatch) if the options of the ranks
    /// differ, or the names, shapes or dtypes of their variables, or how these are divided among devices, with the
    /// first difference;
    /// [`DistributedError::Communication`](crate::distributed::DistributedError::Communication) if a rank does not
    /// answer;
    /// [`Error::InvalidArgument`] for an option that cannot be used, for a `VarStore` without trainable variables, and
    /// for a variable that cannot be sent, such as an expanded or a complex one.
    pub fn build(&self, group: &ProcessGroup, vs: &VarStore) -> Result<DistributedDataParallel> {
        DistributedDataParallel::with_options(group, vs, self)
    }

    pub(super) fn to_ffi(self) -> Result<ffi::ReducerOptions> {
        let bucket_bytes = match self.bucket_cap_mb {
            None => 0,
            Some(size) if size > 0.0 && size <= 1e6 => ((size * 1048576.0) as i64).max(1),
            Some(size) => {
                let rule = "more than 0 and at most 1000000";
                return Err(Error::out_of_range("bucket_cap_mb", size, rule));
            }
        };
        let compression = match self.compression {
            None => ffi::Compression::None,
            Some(Kind::Half) => ffi::Compression::Fp16,
            Some(Kind::BFloat16) => ffi::Compression::Bf16,
            Some(kind) => {
                let problem = format!("is {kind:?}, but must be Half or BFloat16");
                return Err(Error::InvalidArgument { name: "compression", problem });
            }
        };
        Ok(ffi::ReducerOptions {
            bucket_bytes,
            compression,
            divide_first: self.divide_first,
            find_unused_parameters: self.find_unused_parameters,
            gradient_as_bucket_view: self.gradient_as_bucket_view,
        })
    }
}
