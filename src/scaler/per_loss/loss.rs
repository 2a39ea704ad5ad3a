//! One of several losses.
//!
//! A backward takes the optimizer's gradients away, runs, unscales the new ones by the scale of this loss, and adds
//! those from before. If it fails, the gradients from before are put back.

use tch::Tensor;

use crate::error::Result;
use crate::ffi::{self, FoundInf, Gradient};
use crate::gradients::{Gradients, IdentityMap, Plan, Taken, drop_frozen, overflow};
use crate::optim::AmpOptimizer;
use crate::scale::{AdaptiveScale, End};
use crate::scaler::GradScaler;

/// A loss, its scale, and its backwards since the last update.
#[derive(Debug)]
pub(super) struct Loss {
    pub(super) scale: AdaptiveScale,
    passes: Vec<Pass>,
}

/// A backward of the loss for an optimizer.
#[derive(Debug)]
struct Pass {
    owner: Identity,
    /// Whether the loss has given each of the optimizer's parameters a gradient.
    has_gradient: Vec<bool>,
    flags: Vec<FoundInf>,
    /// Whether a step has been taken or skipped with its gradients.
    is_stepped: bool,
}

/// An optimizer, identified by its parameters, which are kept alive so that no other tensors get their identities.
#[derive(Debug)]
pub(super) struct Identity {
    parameters: Vec<Tensor>,
    identities: Vec<usize>,
    known: IdentityMap<()>,
}

impl Identity {
    pub(super) fn of(optimizer: &dyn AmpOptimizer) -> Result<Self> {
        let parameters = optimizer.parameters().into_owned();
        let identities = ffi::identities(&parameters)?;
        let known = identities.iter().map(|identity| (*identity, ())).collect();
        Ok(Self { parameters, identities, known })
    }

    /// Whether the other optimizer has these parameters first.
    fn begins(&self, other: &Self) -> bool {
        other.identities.starts_with(&self.identities)
    }
}

impl Pass {
    /// Whether a step of the optimizer uses its gradients.
    fn concerns(&self, optimizer: &Identity) -> bool {
        let given = self.owner.identities.iter().zip(&self.has_gradient);
        let mut given = given.filter_map(|(identity, has)| has.then_some(identity));
        !self.is_stepped && given.any(|identity| optimizer.known.contains_key(identity))
    }
}

impl Loss {
    pub(super) fn new(scale: AdaptiveScale) -> Self {
        Self { scale, passes: Vec::new() }
    }

    /// Whether there was no backward since the last update.
    pub(super) fn is_closed(&self) -> bool {
        self.passes.is_empty()
    }

    fn flags(&self) -> impl Iterator<Item = &FoundInf> {
        self.passes.iter().flat_map(|pass| &pass.flags)
    }

    /// The flags on which the step of an optimizer depends.
    pub(super) fn found(&self, optimizer: &Identity) -> impl Iterator<Item = &FoundInf> {
        self.passes.iter().filter(|pass| pass.concerns(optimizer)).flat_map(|pass| &pass.flags)
    }

    /// Records that the optimizer's step was taken or skipped, so that no later one depends on the same flags.
    pub(super) fn set_stepped(&mut self, optimizer: &Identity) {
        for pass in &mut self.passes {
            pass.is_stepped |= pass.concerns(optimizer);
        }
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
        let owner = Identity::of(optimizer)?;
        let mut before = Taken::from(optimizer.parameters().into_owned())?;
        ffi::backward(&self.scale.apply(loss)?, retain_graph)?;
        if optimizer.wants_f32_gradients() {
            // Checks before it changes.
            let _plan = Plan::new(&sums.gradients(optimizer)?, true)?;
            before.widen()?;
        }
        let mut gradients = sums.gradients(optimizer)?;
        gradients.separate()?;
        let flags = self.unscale(&gradients)?;
        before.add()?;
        before.settle();
        if !flags.is_empty() {
            let has_gradient = gradients.snapshot().iter().map(Gradient::is_used).collect();
            self.passes.push(Pass { owner, has_gradient, flags, is_stepped: false });
        }
        Ok(())
    }

    /// Unscales the gradients, those of this loss alone.
    fn unscale(&self, gradients: &Gradients<'_>) -> Result<Vec<FoundInf>> {
        let Some(scale) = self.scale.number() else {
            return Ok(Vec::new());
        };
        let plan = Plan::new(gradients, self.scale.config().may_unscale_fp16())?;
        drop_frozen(gradients.parameters(), gradients.snapshot())?;
        if plan.groups.is_empty() {
            return Ok(Vec::new());
        }
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

    /// The most parameters with which a backward that was not stepped with has begun the optimizer's list, which may
    /// have grown since.
    pub(super) fn most_known(&self, optimizer: &Identity) -> Option<usize> {
        let open = self.passes.iter().filter(|pass| !pass.is_stepped);
        let known = open.map(|pass| &pass.owner).filter(|owner| owner.begins(optimizer));
        known.map(|owner| owner.parameters.len()).max()
    }

    /// Removes the backwards for an optimizer, of whose parameters they knew this many.
    pub(super) fn abandon(&mut self, optimizer: &Identity, known: usize) {
        self.passes.retain(|pass| {
            let is_its = pass.owner.parameters.len() == known && pass.owner.begins(optimizer);
            pass.is_stepped || !is_its
        });
    }

    /// Prepares the end of its iteration; `None` if there was no backward.
    pub(super) fn end(&mut self) -> Result<Option<End<'_>>> {
        let Self { scale, passes } = self;
        let flags = passes.iter().flat_map(|pass| &pass.flags);
        if passes.is_empty() { Ok(None) } else { scale.end(flags) }
    }

    /// Forgets all backwards.
    pub(super) fn close(&mut self) {
        self.passes.clear();
    }
}
