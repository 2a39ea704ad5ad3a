//! One batch on several devices of one process.

use std::panic::resume_unwind;
use std::thread;

use tch::{Device, Kind, Tensor, no_grad};

use crate::autocast::AutocastState;
use crate::error::{Error, Result};
use crate::ffi::{self, OutsideRegions};

/// Divides a batch among devices, applies `forward` to each part on a thread of its own, and returns the outputs
/// together, on the first device. The counterpart of `torch.nn.parallel.data_parallel`.
///
/// The batch is divided along its first dimension into parts of equal size, of which the last may be smaller or
/// missing. `forward` gets copies of the parameters on its device, and its part. The gradients of all copies are added
/// to those of the parameters. Each thread has the autocast state and the grad mode of the caller. The outputs are
/// concatenated along their first dimension; those without dimensions, such as losses, become a vector with one element
/// for each part.
///
/// It copies the parameters in every call, so it suits small jobs. A [`DistributedDataParallel`] is faster, because its
/// replicas only exchange gradients. `forward` must not change tensors that the threads share, such as the running
/// statistics of a batch normalization on the CPU.
///
/// [`DistributedDataParallel`]: crate::distributed::DistributedDataParallel
///
/// # Errors
///
/// [`Error::InvalidArgument`] if there is no device, or if the batch has no dimension or no element;
/// [`Error::Torch`] if libtorch cannot copy or concatenate tensors.
///
/// # Panics
///
/// If `forward` panics.
///
/// # Examples
///
/// ```
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::try_autocast;
/// use tch_amp::distributed::data_parallel;
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let net = nn::linear(vs.root(), 4, 2, Default::default());
/// let devices = [Device::Cpu, Device::Cpu]; // or [Device::Cuda(0), Device::Cuda(1)]
/// let parameters: Vec<_> = [&net.ws].into_iter().chain(&net.bs).map(Tensor::shallow_clone).collect();
/// let xs = Tensor::rand([6, 4], (Kind::Float, devices[0]));
/// let ys = try_autocast(devices[0], || {
///     data_parallel(&devices, &parameters, &xs, |parameters, xs| {
///         let [ws, bs] = [0, 1].map(|i| parameters[i].shallow_clone());
///         nn::Linear { ws, bs: Some(bs) }.forward(xs)
///     })
/// })?;
/// assert_eq!((ys.size(), ys.kind()), (vec![6, 2], Kind::BFloat16));
/// ys.sum(Kind::Float).backward();
/// assert_eq!(net.ws.grad().size(), [2, 4]);
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn data_parallel(
    devices: &[Device],
    parameters: &[Tensor],
    xs: &Tensor,
    forward: impl Fn(&[Tensor], &Tensor) -> Tensor + Sync,
) -> Result<Tensor> {
    let Some(&first) = devices.first() else {
        let problem = "is empty, but the batch needs a device".to_owned();
        return Err(Error::InvalidArgument { name: "devices", problem });
    };
    if xs.dim() == 0 || ffi::numel(xs) == 0 {
        let problem = format!("has the shape {:?}, and cannot be divided", xs.size());
        return Err(Error::InvalidArgument { name: "xs", problem });
    }
    gather(first, run(scatter(devices, parameters, xs)?, &forward)?)
}

/// Copies the parameters to each device, and a part of the batch.
fn scatter(
    devices: &[Device],
    parameters: &[Tensor],
    xs: &Tensor,
) -> Result<Vec<(Vec<Tensor>, Tensor)>> {
    let _own = OutsideRegions::enter();
    let parts = xs.f_chunk(devices.len() as i64, 0)?;
    let jobs = parts.into_iter().zip(devices).map(|(part, &device)| {
        let copies = parameters.iter().map(|parameter| Ok(parameter.f_to_device(device)?));
        Ok((copies.collect::<Result<Vec<_>>>()?, part.f_to_device(device)?))
    });
    jobs.collect()
}

/// Joins the outputs of all devices on the first.
fn gather(first: Device, outputs: Vec<Tensor>) -> Result<Tensor> {
    let _own = OutsideRegions::enter();
    let gathered = outputs.into_iter().map(|output| {
        let output = output.f_to_device(first)?;
        if output.dim() == 0 { output.f_unsqueeze(0) } else { Ok(output) }
    });
    Ok(Tensor::f_cat(&gathered.collect::<std::result::Result<Vec<_>, _>>()?, 0)?)
}

/// Runs each job on a thread with the state of the calling one, and returns the outputs in order.
fn run(
    jobs: Vec<(Vec<Tensor>, Tensor)>,
    forward: &(impl Fn(&[Tensor], &Tensor) -> Tensor + Sync),
) -> Result<Vec<Tensor>> {
    let (state, records) = (AutocastState::current()?, records()?);
    thread::scope(|scope| {
        let spawn = |(parameters, part): (Vec<Tensor>, Tensor)| {
            scope.spawn(move || {
                let forward = || forward(&parameters, &part);
                state.run(|| if records { forward() } else { no_grad(forward) })
            })
        };
        let threads: Vec<_> = jobs.into_iter().map(spawn).collect();
        // All of them end before a panic goes on.
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        results
            .into_iter()
            .map(|result| result.unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    })
}

/// Returns whether autograd records what this thread computes, which tch does not tell.
pub(super) fn records() -> Result<bool> {
    let _own = OutsideRegions::enter();
    let leaf = Tensor::f_zeros([1], (Kind::Float, Device::Cpu))?.f_set_requires_grad(true)?;
    Ok(leaf.f_neg()?.requires_grad())
}
