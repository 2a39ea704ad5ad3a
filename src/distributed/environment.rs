//! The environment variables that describe a group.

use std::env::VarError;
use std::str::FromStr;

use tch::{Cuda, Device};

use crate::device::check_usable;
use crate::error::{DistributedError, Error, Result};

/// The largest number of ranks. Each has a connection to every other one.
pub(super) const MOST_RANKS: usize = 1 << 16;

const LOCAL_RANK: &str = "LOCAL_RANK";

/// Returns the number of torchrun's attempt, as a text, if its agent serves the store.
pub(super) fn attempt_of_agent() -> Result<Option<String>> {
    let serves = optional("TORCHELASTIC_USE_AGENT_STORE")?.is_some_and(|is| is == "True");
    let attempt = optional("TORCHELASTIC_RESTART_COUNT")?.unwrap_or_default();
    Ok(serves.then_some(attempt))
}

/// Returns the rank of this process, and the number of ranks.
pub(super) fn rank_and_size() -> Result<(usize, usize)> {
    let (rank, size) = (parsed("RANK")?, parsed("WORLD_SIZE")?);
    if !(1..=MOST_RANKS).contains(&size) {
        return Err(invalid(
            "WORLD_SIZE",
            format!("is {size}, but must be from 1 to {MOST_RANKS}"),
        ));
    }
    if rank >= size {
        let problem = format!("is {rank}, but must be less than WORLD_SIZE, which is {size}");
        return Err(invalid("RANK", problem));
    }
    Ok((rank, size))
}

/// Returns the number of this rank among those of its host, starting at 0: the variable `LOCAL_RANK`, which
/// [`spawn`](super::ProcessGroup::spawn) and torchrun set, or 0 if it is not set. Corresponds to
/// `int(os.environ["LOCAL_RANK"])`.
///
/// # Errors
///
/// [`DistributedError::Environment`] if the variable is not a number.
pub fn local_rank() -> Result<usize> {
    Ok(if optional(LOCAL_RANK)?.is_some() { parsed(LOCAL_RANK)? } else { 0 })
}

/// Returns the device of this rank: if CUDA can be used, the GPU with the number of [`local_rank`], so that each rank
/// of a host has one of its own; otherwise the CPU. Corresponds to
/// `torch.device("cuda", int(os.environ["LOCAL_RANK"]))`.
///
/// # Errors
///
/// The same as [`local_rank`], and [`DistributedError::Environment`] if the host has fewer GPUs than ranks.
///
/// # Examples
///
/// ```
/// use tch::nn::VarStore;
/// use tch_amp::distributed::local_device;
///
/// let vs = VarStore::new(local_device()?);
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn local_device() -> Result<Device> {
    let rank = local_rank()?;
    let is_usable = check_usable(Device::Cuda(0)).is_ok();
    device_of(rank, is_usable.then(Cuda::device_count))
}

fn device_of(rank: usize, gpus: Option<i64>) -> Result<Device> {
    match gpus {
        None => Ok(Device::Cpu),
        Some(gpus) if i64::try_from(rank).is_ok_and(|rank| rank < gpus) => Ok(Device::Cuda(rank)),
        Some(gpus) => {
            let problem = format!(
                "is {rank}, but there are {gpus} GPUs; start no more ranks on a host than it has, or unset it if each \
                 rank sees a GPU of its own"
            );
            Err(invalid(LOCAL_RANK, problem))
        }
    }
}

/// Returns the value of a variable, or `None` if it is not set.
pub(super) fn optional(name: &'static str) -> Result<Option<String>> {
    match std::env::var(name) {
        Ok(value) => Ok(Some(value)),
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(value)) => {
            Err(invalid(name, format!("is {value:?}, but must be UTF-8")))
        }
    }
}

pub(super) fn variable(name: &'static str) -> Result<String> {
    optional(name)?.ok_or_else(|| invalid(name, "is not set".to_owned()))
}

pub(super) fn parsed<T: FromStr>(name: &'static str) -> Result<T> {
    let value = variable(name)?;
    value.parse().map_err(|_| {
        let most = if name == "MASTER_PORT" { " up to 65535" } else { "" };
        invalid(name, format!("is {value:?}, but must be a number{most}"))
    })
}

pub(super) fn invalid(variable: &'static str, problem: String) -> Error {
    DistributedError::Environment { variable, problem }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_of_a_host_has_a_gpu_of_its_own() {
        let devices = [None, Some(1), Some(4)].map(|gpus| device_of(3, gpus));
        assert_eq!(*devices[0].as_ref().unwrap(), Device::Cpu);
        assert_eq!(*devices[2].as_ref().unwrap(), Device::Cuda(3));
        assert!(device_of(usize::MAX, Some(4)).is_err());
        let text = devices[1].as_ref().unwrap_err().to_string();
        assert!(text.contains("LOCAL_RANK") && text.contains("there are 1 GPUs"), "{text}");
    }
}
