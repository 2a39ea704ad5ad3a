//! Groups of ranks, as threads of this process and as processes of their own.

mod accumulation;
mod agreement;
mod causes;
mod collectives;
mod data_parallel;
mod ddp;
mod explained;
mod failures;
#[cfg(target_os = "linux")]
mod hosts;
// These read in /proc which processes there are.
#[cfg(target_os = "linux")]
mod kills;
mod mean;
mod nccl;
mod own_arithmetic;
mod passes;
mod precision;
mod processes;
mod random;
mod rank_0;
mod recomputed;
mod rendezvous;
mod resuming;
mod sampler;
mod saves;
mod sharded;
#[cfg(target_os = "linux")]
mod soak;
#[cfg(target_os = "linux")]
mod spawn;
mod stores;
mod sync_batch_norm;
#[cfg(target_os = "linux")]
mod system;
mod training;

use tch::{Device, Tensor};
use tch_amp::distributed::{DistributedError, ProcessGroup, ReduceOp};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Error, GradScaler, Result};

use testkit::ranks::{TIMEOUT, ranks, threads};

/// What the ranks have called that disagree.
#[track_caller]
fn calls(error: Error) -> Vec<String> {
    match error {
        Error::Distributed(DistributedError::Mismatch { calls }) => calls,
        other => panic!("{other}"),
    }
}

fn is_mismatch(error: &Error) -> bool {
    matches!(error, Error::Distributed(DistributedError::Mismatch { .. }))
}

/// The sum of a one of each rank.
fn sum(group: &ProcessGroup) -> Result<i64> {
    let mut one = Tensor::from(1i64);
    group.all_reduce(&mut one, ReduceOp::Sum)?;
    Ok(one.int64_value(&[]))
}

/// Asserts that a group can still be used.
#[track_caller]
fn assert_open(group: &ProcessGroup) {
    assert_eq!(sum(group).unwrap(), group.size() as i64);
}

/// A scaler that begins with this scale.
fn scaler(init_scale: f64) -> GradScaler {
    GradScalerConfig { init_scale, ..Default::default() }.build(Device::Cpu).unwrap()
}

/// Small numbers, the same in every process, and as in tests/oracle/distributed.py.
fn numbers(shape: &[i64], seed: i64) -> Tensor {
    let numbers: Vec<f32> = (0..shape.iter().product())
        .map(|i| ((i * 37 + seed * 101 + i * i * 11).rem_euclid(211) - 105) as f32 / 256.0)
        .collect();
    Tensor::from_slice(&numbers).view(shape)
}
