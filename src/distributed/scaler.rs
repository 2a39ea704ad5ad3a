//! The same scale on all ranks.

use std::sync::Arc;

use serde::Serialize;

use crate::distributed::group::ProcessGroup;
use crate::error::{Error, Result};
use crate::scaler::{Agreement, GradScaler};

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
