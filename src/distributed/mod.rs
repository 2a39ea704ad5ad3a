//! Training on several devices or hosts, through c10d, libtorch's own library for distributed training.
//!
//! A *group* consists of *ranks*: processes, or threads of one process, each with a device of its own. They find each
//! other through a [`Store`], and communicate by *collectives*, which every rank calls in the same order. The
//! counterpart in PyTorch is `torch.distributed`.
//!
//! # c10d's flight recorder
//!
//! The first group of a process sets `TORCH_FR_BUFFER_SIZE` to 0, unless it is set already. c10d then does not record
//! its collectives for debugging, which is not safe for ranks that are threads.
//!
//! # Security
//!
//! A store and a group have no authentication and no encryption: whoever can connect can take part. The store of
//! [`Store::serve`] listens on all interfaces of the host; [`Store::serve_locally`] and [`ProcessGroup::spawn`] listen
//! on 127.0.0.1 only, and so does [`ProcessGroup::from_env`] if `MASTER_ADDR` is a loopback address. Keep the others
//! inside a private network.

mod amp;
mod checkpoint;
mod collectives;
mod data_parallel;
mod ddp;
mod environment;
mod group;
mod mean;
mod processes;
mod rendezvous;
mod sampler;
mod sharded;
mod store;
mod sync_batch_norm;
mod turns;

pub use crate::error::{DistributedError, VariableChange};
pub use collectives::ReduceOp;
pub use data_parallel::data_parallel;
pub(crate) use ddp::any_is_averaged;
pub use ddp::{DdpConfig, DistributedDataParallel};
pub use environment::{local_device, local_rank};
pub use group::{GroupConfig, ProcessGroup};
pub use mean::Mean;
pub use sampler::{DistributedSampler, SamplerConfig};
pub use store::Store;
pub use sync_batch_norm::SyncBatchNorm;
