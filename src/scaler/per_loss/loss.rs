//! One of several losses.

use tch::Tensor;

use crate::error::Result;
use crate::ffi;
use crate::gradients::{FoundInf, overflow};
use crate::optim::AmpOptimizer;
use crate::scaler::GradScaler;
use crate::scaler::update::End;

/// A loss and its scaler, whose iteration has no records: what was found is here.
#[derive(Debug)]
pub(super) struct Loss {
    pub(super) scaler: GradScaler,
    /// What was found in its gradients since the last update.
    found: Vec<Found>,
}

#[derive(Debug)]
struct Found {
    /// Whose step depends on it.
    optimizer: Identity,
    flag: FoundInf,
}

/// An optimizer, told from others by its first parameter, which is kept alive so that no other takes its place.
#[derive(Debug)]
pub(super) struct Identity {
    first: Option<Tensor>,
    identity: usize,
}

impl Identity {
    pub(super) fn of(optimizer: &dyn AmpOptimizer) -> Result<Self> {
        let parameters = optimizer.parameters();
        let identities = ffi::identities(parameters.get(..1).unwrap_or_default())?;
        let first = parameters.first().map(Tensor::shallow_clone);
        Ok(Self { first, identity: identities.first().copied().unwrap_or_default() })
    }
}

impl PartialEq for Identity {
    fn eq(&self, other: &Self) -> bool {
        self.identity == other.identity
    }
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        let first = self.first.as_ref().map(Tensor::shallow_clone);
        Self { first, identity: self.identity }
    }
}

/// The gradients from before a backward. They come back when it fails or panics.
struct Before {
    parameters: Vec<Tensor>,
    gradients: Vec<Option<Tensor>>,
    added: bool,
}

impl Before {
    fn take(parameters: Vec<Tensor>) -> Result<Self> {
        let gradients = ffi::gradients_take(&parameters)?;
        Ok(Self { parameters, gradients, added: false })
    }

    /// Adds them to those that there are now.
    fn add(&mut self) -> Result<()> {
        ffi::gradients_add(&self.parameters, &self.gradients)?;
        self.added = true;
        Ok(())
    }
}

impl Drop for Before {
    fn drop(&mut self) {
        if !self.added {
            // What a backward has left is a part, or scaled. Nobody is there to be told of another failure.
            let _part = ffi::gradients_take(&self.parameters);
            let _failed = ffi::gradients_add(&self.parameters, &self.gradients);
        }
    }
}

impl Loss {
    pub(super) fn new(scaler: GradScaler) -> Self {
        Self { scaler: GradScaler { is_part: true, ..scaler }, found: Vec::new() }
    }

    /// Whether there was no backward since the last update.
    pub(super) fn is_closed(&self) -> bool {
        self.found.is_empty()
    }

    /// What the step of an optimizer depends on.
    pub(super) fn found(&self, optimizer: &Identity) -> impl Iterator<Item = &FoundInf> {
        let its = move |found: &&Found| found.optimizer == *optimizer;
        self.found.iter().filter(its).map(|found| &found.flag)
    }

    /// Adds the unscaled gradients of the loss to those of the optimizer's parameters.
    pub(super) fn add(
        &mut self,
        loss: &Tensor,
        optimizer: &mut dyn AmpOptimizer,
        retain_graph: bool,
    ) -> Result<()> {
        if !self.scaler.is_enabled() {
            return ffi::backward(loss, retain_graph);
        }
        let mut before = Before::take(optimizer.parameters().into_owned())?;
        let found = self.backward(loss, optimizer, retain_graph)?;
        before.add()?;
        self.found.extend(found);
        self.scaler.iteration.get_mut().set_taken(!self.found.is_empty());
        Ok(())
    }

    /// Whether any of its gradients was infinite or NaN. Waits for the device where only that knows.
    pub(super) fn overflowed(&self) -> Result<bool> {
        let flags = || self.found.iter().map(|found| &found.flag);
        match overflow(flags()) {
            Some(known) => Ok(known),
            None => ffi::any_nonzero(&flags().map(|flag| &flag.tensor).collect::<Vec<_>>()),
        }
    }

    /// Forgets what was found in the gradients of an optimizer.
    pub(super) fn abandon(&mut self, optimizer: &Identity) {
        self.found.retain(|found| found.optimizer != *optimizer);
        self.scaler.iteration.get_mut().set_taken(!self.found.is_empty());
    }

    /// Leaves the unscaled gradients of the loss alone in the parameters.
    fn backward(
        &mut self,
        loss: &Tensor,
        optimizer: &mut dyn AmpOptimizer,
        retain_graph: bool,
    ) -> Result<Vec<Found>> {
        let identity = Identity::of(optimizer)?;
        ffi::backward(&self.scaler.scale(loss)?, retain_graph)?;
        let record = self.scaler.open(optimizer);
        let iteration = self.scaler.iteration.get_mut();
        let Some(record) = record.inspect_err(|_| iteration.close())? else {
            return Ok(Vec::new());
        };
        let flags = iteration.take_found(record);
        let found = |flag| Found { optimizer: identity.clone(), flag };
        Ok(flags.into_iter().map(found).collect())
    }

    /// The end of its iteration; `None` where it has had no backward.
    pub(super) fn end(&mut self) -> Option<Result<End<'_>>> {
        let GradScaler { config, scale, skips, .. } = &mut self.scaler;
        let scale = scale.as_mut().filter(|_| !self.found.is_empty())?;
        let flags = || self.found.iter().map(|found| &found.flag);
        let tensors = flags().map(|flag| &flag.tensor).collect();
        Some(End::new(scale, config, skips, tensors, overflow(flags())))
    }

    /// Forgets what the iteration has found.
    pub(super) fn close(&mut self) {
        let found = self.found.drain(..).map(|found| found.flag);
        self.scaler.iteration.get_mut().recycle(found);
    }
}
