//! One of several losses.

#![forbid(unsafe_code)]

use tch::Tensor;

use crate::error::Result;
use crate::ffi;
use crate::optim::AmpOptimizer;
use crate::scaler::GradScaler;
use crate::scaler::found::{FoundInf, overflow};
use crate::scaler::update::end;

/// A loss and its scaler, whose iteration has no records: what was found is here.
#[derive(Debug)]
pub(super) struct Loss {
    pub(super) scaler: GradScaler,
    /// What was found in its gradients since the last update.
    found: Vec<Found>,
}

#[derive(Debug)]
struct Found {
    /// Whose step depends on it: the identity of its first parameter.
    optimizer: usize,
    flag: FoundInf,
}

pub(super) fn identity(optimizer: &dyn AmpOptimizer) -> Result<usize> {
    let first = ffi::identities(optimizer.parameters().get(..1).unwrap_or_default())?;
    Ok(first.first().copied().unwrap_or_default())
}

impl Loss {
    pub(super) fn new(scaler: GradScaler) -> Self {
        Self { scaler, found: Vec::new() }
    }

    /// Whether there was no backward since the last update.
    pub(super) fn is_closed(&self) -> bool {
        self.found.is_empty()
    }

    /// What the step of an optimizer depends on.
    pub(super) fn found(&self, optimizer: usize) -> impl Iterator<Item = &FoundInf> {
        let its = move |found: &&Found| found.optimizer == optimizer;
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
        let parameters = optimizer.parameters().into_owned();
        let before = ffi::gradients_take(&parameters)?;
        let found = self.backward(loss, optimizer, retain_graph);
        let added = found.and_then(|found| {
            ffi::gradients_add(&parameters, &before)?;
            Ok(found)
        });
        match added {
            Ok(found) => self.found.extend(found),
            Err(error) => {
                // What this backward has left is a part, or scaled.
                ffi::gradients_take(&parameters)?;
                ffi::gradients_add(&parameters, &before)?;
                return Err(error);
            }
        }
        self.scaler.iteration.get_mut().set_taken(!self.found.is_empty());
        Ok(())
    }

    /// Leaves the unscaled gradients of the loss alone in the parameters.
    fn backward(
        &mut self,
        loss: &Tensor,
        optimizer: &mut dyn AmpOptimizer,
        retain_graph: bool,
    ) -> Result<Vec<Found>> {
        ffi::backward(&self.scaler.scale(loss)?, retain_graph)?;
        let record = self.scaler.open(optimizer);
        let iteration = self.scaler.iteration.get_mut();
        let Some(record) = record.inspect_err(|_| iteration.close())? else {
            return Ok(Vec::new());
        };
        let flags = iteration.take_found(record);
        let optimizer = identity(optimizer)?;
        Ok(flags.into_iter().map(|flag| Found { optimizer, flag }).collect())
    }

    pub(super) fn update(&mut self) -> Result<()> {
        let GradScaler { config, scale, skips, iteration, .. } = &mut self.scaler;
        let Some(scale) = scale.as_mut().filter(|_| !self.found.is_empty()) else {
            return Ok(());
        };
        let flags = || self.found.iter().map(|found| &found.flag);
        let tensors: Vec<_> = flags().map(|flag| &flag.tensor).collect();
        let given_up = end(scale, config, skips, &tensors, overflow(flags()))?;
        iteration.get_mut().recycle(self.found.drain(..).map(|found| found.flag));
        given_up.map_or(Ok(()), Err)
    }
}
