//! One of several losses.
//!
//! A backward takes the optimizer's gradients away, runs, unscales the new ones by the scale of this loss, and adds
//! those from before. If it fails, the gradients from before are put back.

use tch::Tensor;

use crate::error::Result;
use crate::ffi::{self, FoundInf};
use crate::gradients::{Gradients, Plan, Taken, overflow};
use crate::optim::AmpOptimizer;
use crate::scale::{AdaptiveScale, End};
use crate::scaler::GradScaler;

/// A loss, its scale, and the flags for its gradients since the last update.
#[derive(Debug)]
pub(super) struct Loss {
    pub(super) scale: AdaptiveScale,
    found: Vec<Found>,
}

#[derive(Debug)]
struct Found {
    /// The optimizer whose step depends on it.
    optimizer: Identity,
    flag: FoundInf,
}

/// An optimizer, identified by its first parameter, which is kept alive so that no other tensor gets its identity.
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

impl Loss {
    pub(super) fn new(scale: AdaptiveScale) -> Self {
        Self { scale, found: Vec::new() }
    }

    /// Whether there was no backward since the last update.
    pub(super) fn is_closed(&self) -> bool {
        self.found.is_empty()
    }

    fn flags(&self) -> impl Iterator<Item = &FoundInf> {
        self.found.iter().map(|found| &found.flag)
    }

    /// The flags on which the step of an optimizer depends.
    pub(super) fn found(&self, optimizer: &Identity) -> impl Iterator<Item = &FoundInf> {
        let its = move |found: &&Found| found.optimizer == *optimizer;
        self.found.iter().filter(its).map(|found| &found.flag)
    }

    /// Scales the loss, runs backward on it, and adds the unscaled gradients to those of the optimizer's parameters.
    /// `sums` names the parameters in errors.
    pub(super) fn backward(
        &mut self,
        loss: &Tensor,
        optimizer: &mut dyn AmpOptimizer,
        retain_graph: bool,
        sums: &GradScaler,
    ) -> Result<()> {
        if !self.scale.is_enabled() {
            return ffi::backward(loss, retain_graph);
        }
        let before = Taken::from(optimizer.parameters().into_owned())?;
        let identity = Identity::of(optimizer)?;
        ffi::backward(&self.scale.apply(loss)?, retain_graph)?;
        if optimizer.wants_f32_gradients() {
            ffi::gradients_widen(&optimizer.parameters())?;
        }
        let flags = self.unscale(sums.gradients(optimizer)?)?;
        before.add()?;
        before.settle();
        let found = |flag| Found { optimizer: identity.clone(), flag };
        self.found.extend(flags.into_iter().map(found));
        Ok(())
    }

    /// Unscales the gradients, those of this loss alone.
    fn unscale(&self, gradients: Gradients<'_>) -> Result<Vec<FoundInf>> {
        let Some(scale) = self.scale.number() else {
            return Ok(Vec::new());
        };
        let plan = Plan::new(&gradients, self.scale.config().may_unscale_fp16())?;
        plan.drop_frozen(gradients.parameters())?;
        if plan.groups.is_empty() {
            return Ok(Vec::new());
        }
        let gradients = gradients.separated()?;
        let found = plan.unscale(gradients.parameters(), scale.tensor(), scale.unscaling());
        found.map_err(|interrupted| interrupted.error)
    }

    /// Whether any of its gradients was non-finite. Synchronizes if only the device has the answer.
    pub(super) fn overflowed(&self) -> Result<bool> {
        match overflow(self.flags()) {
            Some(known) => Ok(known),
            None => ffi::any_nonzero(&self.flags().map(|flag| &flag.tensor).collect::<Vec<_>>()),
        }
    }

    /// Removes the flags of an optimizer.
    pub(super) fn abandon(&mut self, optimizer: &Identity) {
        self.found.retain(|found| found.optimizer != *optimizer);
    }

    /// Prepares the end of its iteration; `None` if there was no backward.
    pub(super) fn end(&mut self) -> Result<Option<End<'_>>> {
        let Self { scale, found } = self;
        if found.is_empty() { Ok(None) } else { scale.end(found.iter().map(|found| &found.flag)) }
    }

    /// Removes all flags.
    pub(super) fn close(&mut self) {
        self.found.clear();
    }
}
