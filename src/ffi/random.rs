//! Random numbers that have to be the same on all ranks, or different on each.

use tch::{Device, Tensor};

use super::{call, given, place};
use crate::error::Result;
use crate::sys::distributed as sys;

/// Returns the order of `torch.randperm(n)` with a new generator of this seed.
pub(crate) fn permutation(n: i64, seed: u64) -> Result<Tensor> {
    // SAFETY: takes two numbers, and `err` is valid for a write.
    given(call(|err| unsafe { sys::tamp_random_permutation(n, seed, err) })?)
}

/// Seeds the default random number generator of one device.
pub(crate) fn seed(device: Device, seed: u64) -> Result<()> {
    let (device_type, index) = place(device)?;
    // SAFETY: takes three numbers, and `err` is valid for a write.
    call(|err| unsafe { sys::tamp_random_seed(device_type, index, seed, err) })
}
