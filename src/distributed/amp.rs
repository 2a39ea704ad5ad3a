//! Mixed precision on several ranks: optimizers whose state is divided among them, and scalers that agree.

use std::sync::Arc;

use serde::Serialize;
use tch::{Device, Tensor, no_grad};
use torch_files::Dtype;

use crate::distributed::group::ProcessGroup;
use crate::dtype::{dtype_of, kind_of};
use crate::error::{Error, Result};
use crate::ffi::OutsideRegions;
use crate::optim::{Optimizer, OptimizerState, Ranks};
use crate::scaler::{Agreement, GradScaler};

const STATE: &str = "state_dict";

impl Optimizer {
    /// Divides the state of the optimizer among the ranks, which all call this with the same parameters and options.
    /// Each rank keeps the state and the master weights of some of the parameters, about as many bytes as every other
    /// rank. It steps these parameters and sends them to the others. The results are the same bit by bit as without
    /// this. Corresponds to `torch.distributed.optim.ZeroRedundancyOptimizer`, and is known as ZeRO stage 1.
    ///
    /// Make a [`DistributedDataParallel`](crate::distributed::DistributedDataParallel) of the model first: every rank
    /// needs the same weights, and at each step the averaged gradients of all parameters. Each step blocks until the
    /// ranks have answered. If it fails on one rank before anything is sent, no rank takes it. If communication fails
    /// midway, resume from the last checkpoint.
    ///
    /// All ranks call [`state_dict`](Self::state_dict), which returns the complete state on rank 0, the same as without
    /// ranks. [`load_state_dict`](Self::load_state_dict) takes the complete state on every rank and keeps the rank's
    /// part, so a run can resume with another number of ranks.
    ///
    /// Each step makes all of its checks first, for which it launches the kernels on a GPU twice.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the state is already divided;
    /// [`DistributedError::Mismatch`](crate::distributed::DistributedError::Mismatch) if the parameters of the ranks
    /// differ;
    /// [`DistributedError::Communication`](crate::distributed::DistributedError::Communication) if a rank does not
    /// answer.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::nn::{self, Module};
    /// use tch::{Device, Kind, Tensor};
    /// use tch_amp::distributed::{DistributedDataParallel, ProcessGroup, Store};
    /// use tch_amp::optim::AdamW;
    ///
    /// fn train(group: &ProcessGroup) -> tch_amp::Result<usize> {
    ///     let vs = nn::VarStore::new(Device::Cpu);
    ///     let net = nn::linear(vs.root(), 4, 2, Default::default());
    ///     let mut ddp = DistributedDataParallel::new(group, &vs)?;
    ///     let mut opt = AdamW::default().build(&vs, 1e-3)?;
    ///     opt.shard_over(group)?;
    ///     let xs = Tensor::rand([8, 4], (Kind::Float, Device::Cpu));
    ///     let loss = ddp.forward(|| net.forward(&xs).square().mean(Kind::Float))?;
    ///     ddp.backward(&loss)?;
    ///     opt.step()?;
    ///     Ok(opt.state_dict()?.state.len())
    /// }
    ///
    /// let store = Store::in_process()?;
    /// std::thread::scope(|scope| {
    ///     for rank in 0..2 {
    ///         let store = &store;
    ///         scope.spawn(move || {
    ///             let parameters = train(&ProcessGroup::new(store, rank, 2).unwrap()).unwrap();
    ///             assert_eq!(parameters, [2, 1][rank]);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn shard_over(&mut self, group: &ProcessGroup) -> Result<()> {
        self.shard(Arc::new(group.clone()))
    }
}

impl Ranks for ProcessGroup {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn size(&self) -> usize {
        self.size()
    }

    fn group(&self) -> u64 {
        self.number()
    }

    fn agree(
        &self,
        call: &'static str,
        hash: Result<u64>,
        lines: &dyn Fn() -> String,
    ) -> Result<()> {
        let _order = self.begin();
        self.compare_lines(call, hash, lines)
    }

    fn close(&self) {
        Self::close(self);
    }

    fn share(&self, tensors: &[Tensor], owners: &[usize]) -> Result<()> {
        let _order = self.begin();
        for rank in 0..self.size() {
            // Frozen ones have not changed.
            let owned = tensors.iter().zip(owners);
            let owned = owned.filter(|(tensor, owner)| **owner == rank && tensor.requires_grad());
            let owned: Vec<_> = owned.map(|(tensor, _)| tensor.shallow_clone()).collect();
            if !owned.is_empty() {
                no_grad(|| self.run("a step", |group| group.broadcast_all(&owned, rank)))?;
            }
        }
        Ok(())
    }

    fn gather_state(&self, state: Result<OptimizerState>) -> Result<OptimizerState> {
        let _order = self.begin();
        let listed = state.and_then(|state| Ok((listed(&state)?, state)));
        let (list, mut state) =
            self.compare_checked(STATE, listed, |_| "state_dict of an optimizer".to_owned())?;
        self.complete(|| self.add_state(&list, &mut state))?;
        Ok(state)
    }
}

impl ProcessGroup {
    /// Adds the tensors of the other ranks to the state on rank 0.
    fn add_state(&self, list: &str, state: &mut OptimizerState) -> Result<()> {
        let _own = OutsideRegions::enter();
        let mine = tensors(state).map(|(_, _, tensor)| tensor.f_to_device(Device::Cpu));
        let mine = mine.collect::<std::result::Result<Vec<_>, _>>()?;
        let lists = self.gather_texts(STATE, list)?;
        for (rank, list) in lists.iter().enumerate() {
            let list: Vec<Description> =
                serde_json::from_str(list).map_err(|error| Error::Torch(error.to_string()))?;
            let is_mine = rank == self.rank();
            let room: Vec<_> = if is_mine {
                mine.iter().map(Tensor::shallow_clone).collect()
            } else {
                list.iter().map(allocate).collect::<Result<_>>()?
            };
            if !room.is_empty() {
                no_grad(|| self.run(STATE, |group| group.broadcast_all(&room, rank)))?;
            }
            if !is_mine && self.rank() == 0 {
                for ((parameter, key, ..), tensor) in list.into_iter().zip(room) {
                    state.state.entry(parameter).or_default().insert(key, tensor);
                }
            }
        }
        Ok(())
    }
}

/// The tensors of a state, in order.
fn tensors(state: &OptimizerState) -> impl Iterator<Item = (&str, &str, &Tensor)> {
    state.state.iter().flat_map(|(name, tensors)| {
        tensors.iter().map(move |(key, tensor)| (name.as_str(), key.as_str(), tensor))
    })
}

/// A tensor of a state: its parameter, its key, its dtype and its shape.
type Description = (String, String, String, Vec<i64>);

/// Lists the tensors of a state, as text. The tensors are sent from where they are and received where they stay; as the
/// bytes of a checkpoint, the sender and rank 0 would need memory for a second copy of each rank's part.
fn listed(state: &OptimizerState) -> Result<String> {
    let describe = |(parameter, key, tensor): (_, _, &Tensor)| {
        let kind = tensor.f_kind()?;
        let dtype = dtype_of(kind).map_or_else(|| format!("{kind:?}"), |dtype| dtype.to_string());
        Ok((parameter, key, dtype, tensor.size()))
    };
    text(&tensors(state).map(describe).collect::<Result<Vec<_>>>()?)
}

/// Allocates a tensor of another rank.
fn allocate((_, _, dtype, shape): &Description) -> Result<Tensor> {
    let kind = Dtype::named(dtype).and_then(kind_of);
    let kind = kind.ok_or_else(|| Error::Torch(format!("a state has dtype {dtype}")))?;
    Ok(Tensor::f_empty(shape, (kind, Device::Cpu))?)
}

impl ProcessGroup {
    /// Gives the scalers of all ranks the scale and the counts of rank 0. Call it after only rank 0 has loaded a
    /// checkpoint. It is not needed otherwise: scalers that start with the same options stay the same, because the
    /// averaged gradients of all ranks are non-finite in the same iterations. Synchronizes, and blocks until the ranks
    /// have answered. Corresponds to `torch.distributed.broadcast_object_list` with the scaler's `state_dict`.
    ///
    /// # Errors
    ///
    /// [`DistributedError::Mismatch`](crate::distributed::DistributedError::Mismatch) if the ranks call something else;
    /// [`DistributedError::Communication`](crate::distributed::DistributedError::Communication) if a rank does not
    /// answer; and the errors of [`GradScaler::state_dict`] and [`GradScaler::load_state_dict`].
    pub fn broadcast_scaler(&self, scaler: &mut GradScaler) -> Result<()> {
        const NAME: &str = "broadcast_scaler";
        let text = scaler.state_dict().and_then(|state| text(&state));
        let _order = self.begin();
        let call = |_: &String| format!("{NAME} of an enabled scaler: {}", scaler.is_enabled());
        let mine = self.compare_checked(NAME, text, call)?;
        let texts = self.gather_texts(NAME, &mine)?;
        if !scaler.is_enabled() {
            return Ok(());
        }
        let first = texts.first().map_or("", String::as_str);
        let state = serde_json::from_str(first).map_err(|error| Error::Torch(error.to_string()));
        let loaded = state.and_then(|state| scaler.load_state_dict(&state));
        self.compare_checked(NAME, loaded, |()| format!("{NAME} has succeeded"))
    }
}

fn text(state: &impl Serialize) -> Result<String> {
    serde_json::to_string(state).map_err(|error| Error::Torch(error.to_string()))
}

impl GradScaler {
    /// Makes the scaler skip a step on all ranks if any of them finds a non-finite gradient. All ranks call this, and
    /// first get the scale and the counts of rank 0. Corresponds to
    /// `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`.
    ///
    /// With a [`DistributedDataParallel`](crate::distributed::DistributedDataParallel) over all parameters this is not
    /// needed, because the averaged gradients are the same on all ranks. It is needed for parameters that are divided
    /// among the ranks, or that only some of them have. From then on, each call that unscales or steps synchronizes and
    /// communicates once. All ranks have to make the same calls, even those without gradients. Clipping uses the norm
    /// of this rank's gradients.
    ///
    /// If the gradients of one rank cannot be unscaled or checked, the call fails on all of them before any has
    /// stepped:
    /// [`DistributedError::Mismatch`](crate::distributed::DistributedError::Mismatch) tells the others why. Gradients
    /// that were unscaled stay unscaled: step, or [`abandon`](Self::abandon) them before the next backward pass. An
    /// error of the optimizer's own step comes after the others have stepped: resume from the last checkpoint then.
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::broadcast_scaler`].
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::Tensor;
    /// use tch_amp::distributed::{ProcessGroup, Store};
    /// use tch_amp::optim::Sgd;
    /// use tch_amp::GradScaler;
    ///
    /// let store = Store::in_process()?;
    /// std::thread::scope(|scope| {
    ///     for rank in 0..2 {
    ///         let store = &store;
    ///         let train = move || -> tch_amp::Result<()> {
    ///             let group = ProcessGroup::new(store, rank, 2)?;
    ///             // A parameter of this rank alone.
    ///             let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
    ///             let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.1)?;
    ///             let mut scaler = GradScaler::new(tch::Device::Cpu)?;
    ///             scaler.agree_over(&group)?;
    ///             let factor = if rank == 0 { f64::INFINITY } else { 1.0 };
    ///             scaler.backward(&(&w * factor).sum(None))?;
    ///             assert!(scaler.step(&mut opt)?.is_skipped()?);
    ///             scaler.update()
    ///         };
    ///         scope.spawn(move || train().unwrap());
    ///     }
    /// });
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn agree_over(&mut self, group: &ProcessGroup) -> Result<()> {
        group.broadcast_scaler(self)?;
        self.set_agreement(Arc::new(group.clone()));
        Ok(())
    }
}

impl Agreement for ProcessGroup {
    fn any(&self, found: Result<bool>) -> Result<bool> {
        const NAME: &str = "a step of GradScaler";
        let _order = self.begin();
        match found {
            Ok(found) => self.compare_with(NAME, NAME, found),
            Err(error) => Err(self.refuse(NAME, error)),
        }
    }
}
