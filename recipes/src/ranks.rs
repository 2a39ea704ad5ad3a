//! Several processes that train together, by DistributedDataParallel.

use super::interrupt::INTERRUPTED;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::{fs, process};
use tch::nn::{self, BatchNormConfig, ModuleT, Path, VarStore};
use tch::{Cuda, Device, Kind, Tensor, no_grad};
use tch_amp::checkpoint::{Checkpoint, Restore, Rng};
use tch_amp::distributed::{DdpConfig, DistributedDataParallel, DistributedError, ProcessGroup};
use tch_amp::distributed::{ReduceOp, SyncBatchNorm, local_device};
use tch_amp::optim::Optimizer;
use tch_amp::{Error, GradScaler, MixedPrecision};

/// The ranks that train together, or this process alone.
#[derive(Debug)]
pub struct Ranks(Option<ProcessGroup>);

impl Ranks {
    /// This process alone.
    pub fn alone() -> Self {
        Self(None)
    }

    /// Starts this program as several ranks, if their number is given; `None` in the process that has started them,
    /// once they have ended. Under torchrun, the ranks are those that it has started. After Ctrl-C, which is passed on
    /// to the ranks, the process that has started them exits with the status of an interrupted program.
    pub fn start(ranks: Option<usize>) -> Result<Option<Self>> {
        if std::env::var_os("RANK").is_some() {
            return Ok(Some(Self(Some(ProcessGroup::from_env()?))));
        }
        let Some(ranks) = ranks else { return Ok(Some(Self::alone())) };
        match ProcessGroup::spawn(ranks) {
            Ok(group) => Ok(group.map(|group| Self(Some(group)))),
            Err(Error::Distributed(DistributedError::Interrupted { .. })) => {
                process::exit(INTERRUPTED.into())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Whether this rank shows the progress, saves the checkpoints and writes the report.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// The number of this rank, from 0 on.
    pub fn rank(&self) -> usize {
        self.0.as_ref().map_or(0, ProcessGroup::rank)
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.0.as_ref().map_or(1, ProcessGroup::size)
    }

    /// This rank's device of those that are wanted: where they are GPUs, each rank of a machine has one of its own.
    pub fn device(&self, wanted: Device) -> Result<Device> {
        if self.0.is_none() || wanted == Device::Cpu {
            return Ok(wanted);
        }
        local_device().context("each rank needs a GPU of its own: use --device cpu")
    }

    /// Returns a line about this process: its id, its rank and the number of ranks, how many of its machine's GPUs
    /// there are for each rank, and the numbers of those that it uses.
    pub fn describe(&self, device: Device) -> Result<String> {
        let on_machine = std::env::var("LOCAL_WORLD_SIZE").map_or(Ok(1), |size| size.parse())?;
        let gpus = usize::try_from(Cuda::device_count())? / usize::max(on_machine, 1);
        let used: Vec<usize> = match device {
            Device::Cuda(number) => vec![number],
            _ => Vec::new(),
        };
        Ok(format!(
            "[{}] rank = {}, world_size = {}, n = {gpus}, device_ids = {used:?}",
            process::id(),
            self.rank(),
            self.size()
        ))
    }

    /// Returns this rank's share of a batch: every second row with two ranks.
    pub fn share(&self, batch: &Tensor) -> Tensor {
        batch.slice(0, self.rank() as i64, None, self.size() as i64)
    }

    /// Returns the mean of all ranks.
    pub fn mean(&self, loss: &Tensor) -> Result<f64> {
        let mut loss = loss.detach().copy();
        if let Some(group) = &self.0 {
            group.all_reduce(&mut loss, ReduceOp::Mean)?;
        }
        Ok(loss.double_value(&[]))
    }

    /// Returns the rows of all ranks in the order that they had before [`share`](Self::share): the inverse of it. The
    /// ranks must have equally many.
    pub fn gather(&self, rows: &Tensor) -> Result<Tensor> {
        let Some(group) = &self.0 else { return Ok(rows.shallow_clone()) };
        Ok(Tensor::stack(&group.all_gather(rows)?, 1).flatten(0, 1))
    }

    /// Returns how many bytes this process has sent to other ranks and written to files so far, if there are others and
    /// the system counts them: Linux does on the CPU, where ranks communicate by Gloo.
    pub fn sent(&self, device: Device) -> Option<u64> {
        if self.size() == 1 || device != Device::Cpu {
            return None;
        }
        let counts = fs::read_to_string("/proc/self/io").ok()?;
        counts.lines().find_map(|line| line.strip_prefix("wchar:"))?.trim().parse().ok()
    }

    /// Returns whether any rank passes `true`, so that all of them do the same.
    pub fn any(&self, decision: bool) -> Result<bool> {
        Ok(self.0.as_ref().map_or(Ok(decision), |group| group.any(decision))?)
    }

    /// Runs `work` on the first rank, while the others wait. If it fails, it fails on all of them.
    pub fn on_first<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        match &self.0 {
            Some(group) => group.on_rank_0(work),
            None => work().map(Some),
        }
    }

    /// Returns what `make` returns on the first rank, on all of them. If it fails, it fails on all of them.
    pub fn from_first<T: Serialize + DeserializeOwned>(
        &self,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        match &self.0 {
            Some(group) => group.from_rank_0(make),
            None => make(),
        }
    }

    /// Makes all ranks train in one precision: what the first one has chosen by its speed holds for all, and one that
    /// was named must be the same on all.
    pub fn agree(&self, amp: &mut MixedPrecision) -> Result<()> {
        Ok(self.0.as_ref().map_or(Ok(()), |group| amp.agree_over(group))?)
    }

    /// Seeds the random numbers, which differ between the ranks.
    pub fn manual_seed(&self, seed: i64) {
        match &self.0 {
            Some(group) => group.manual_seed(seed),
            None => tch::manual_seed(seed),
        }
    }

    /// Gives all ranks the checkpoint that `load` returns on the first one.
    pub fn load_on_first(
        &self,
        load: impl FnOnce() -> tch_amp::Result<Option<Checkpoint>>,
    ) -> Result<Option<Checkpoint>> {
        Ok(match &self.0 {
            Some(group) => Checkpoint::from_rank_0(group, load)?,
            None => load()?,
        })
    }

    /// Adds the state of each rank's random numbers: those of the CPU, and those of the GPU if the model is there.
    pub fn add_rngs(&self, to: &mut Checkpoint, device: Device) -> Result<()> {
        for (name, device) in generators(device) {
            match &self.0 {
                Some(group) => to.add_rngs(name, group, device)?,
                None => to.add(name, Rng(device))?,
            }
        }
        Ok(())
    }

    /// Restores what [`add_rngs`](Self::add_rngs) has added to this checkpoint. A run that goes on on another kind of
    /// device has other random numbers there in any case.
    pub fn rngs<'a>(
        &'a self,
        restore: Restore<'a>,
        from: &Checkpoint,
        device: Device,
    ) -> Restore<'a> {
        let there = |(name, device): &(&str, Device)| *device == Device::Cpu || from.contains(name);
        generators(device).filter(there).fold(restore, |restore, (name, device)| match &self.0 {
            Some(group) => restore.rngs(name, group, device),
            None => restore.add(name, Rng(device)),
        })
    }

    /// Divides the state of an optimizer among the ranks (ZeRO-1).
    pub fn shard(&self, optimizer: &mut Optimizer) -> Result<()> {
        Ok(self.0.as_ref().map_or(Ok(()), |group| optimizer.shard_over(group))?)
    }

    /// Returns what averages the gradients of these variables over the ranks.
    pub fn gradients(&self, vs: &VarStore) -> Result<Gradients> {
        self.compressed_gradients(vs, None)
    }

    /// Returns what averages the gradients of these variables over the ranks, which send them in this dtype.
    pub fn compressed_gradients(&self, vs: &VarStore, dtype: Option<Kind>) -> Result<Gradients> {
        let options = DdpConfig { compression: dtype, ..Default::default() };
        let ddp = self.0.as_ref().map(|group| options.build(group, vs));
        Ok(Gradients(ddp.transpose()?))
    }

    /// Makes a layer of batch normalization: of each rank's own rows, or, if it is `synced`, of the rows of all ranks.
    pub fn batch_norm2d(
        &self,
        path: Path<'_>,
        channels: i64,
        config: BatchNormConfig,
        synced: bool,
    ) -> Box<dyn ModuleT> {
        match &self.0 {
            Some(group) if synced => Box::new(SyncBatchNorm::new(path, channels, config, group)),
            _ => Box::new(nn::batch_norm2d(path, channels, config)),
        }
    }

    /// Gives all ranks the buffers of the first one, such as the statistics of batch normalization, which each of them
    /// has updated with its own rows since the last forward pass of [`Gradients`].
    pub fn same_buffers(&self, vs: &VarStore) -> Result<()> {
        let Some(group) = &self.0 else { return Ok(()) };
        // By name, in the same order on all ranks.
        let buffers: BTreeMap<_, _> =
            vs.variables().into_iter().filter(|(_, tensor)| !tensor.requires_grad()).collect();
        for (_, mut buffer) in buffers {
            no_grad(|| group.broadcast(&mut buffer, 0))?;
        }
        Ok(())
    }

    /// Fails unless all ranks have the same weights.
    pub fn check_weights(&self, vs: &VarStore) -> Result<()> {
        let Some(group) = &self.0 else { return Ok(()) };
        let weights = vs.trainable_variables();
        let weights =
            Tensor::cat(&weights.iter().map(|w| w.detach().flatten(0, -1)).collect::<Vec<_>>(), 0);
        let all = group.all_gather(&weights)?;
        ensure!(all.iter().all(|other| *other == weights), "the ranks have different weights");
        Ok(())
    }
}

/// The parts of a checkpoint with random numbers, and the devices that draw them.
fn generators(device: Device) -> impl Iterator<Item = (&'static str, Device)> {
    let gpu = device.is_cuda().then_some(("gpu_rng", device));
    [("rng", Device::Cpu)].into_iter().chain(gpu)
}

/// Averages gradients, unless one process trains alone.
#[derive(Debug)]
pub struct Gradients(Option<DistributedDataParallel>);

impl Gradients {
    /// Runs a forward pass.
    pub fn forward<T, E: Into<anyhow::Error>>(
        &mut self,
        forward: impl FnOnce() -> std::result::Result<T, E>,
    ) -> Result<T> {
        let result = match &mut self.0 {
            Some(ddp) => ddp.forward(forward)?,
            None => forward(),
        };
        result.map_err(Into::into)
    }

    /// Runs the backward pass on the scaled loss.
    pub fn backward(&mut self, scaler: &mut GradScaler, loss: &Tensor) -> Result<()> {
        match &mut self.0 {
            Some(ddp) => Ok(ddp.backward_scaled(scaler, loss)?),
            None => Ok(scaler.backward(loss)?),
        }
    }

    /// Runs the forward and the backward pass of a micro-batch, whose loss is weighted by its share of the step. The
    /// gradients of the ranks are averaged in the passes of the last one of the step.
    pub fn micro_batch(
        &mut self,
        is_last: bool,
        scaler: &mut GradScaler,
        loss: impl FnOnce() -> Result<Tensor>,
    ) -> Result<()> {
        if is_last {
            let loss = self.forward(loss)?;
            return self.backward(scaler, &loss);
        }
        match &mut self.0 {
            Some(ddp) => ddp.no_sync(|ddp| {
                let loss = ddp.forward(loss)??;
                Ok(ddp.backward_scaled(scaler, &loss)?)
            }),
            None => Ok(scaler.backward(&loss()?)?),
        }
    }
}
