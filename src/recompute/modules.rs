//! Modules whose activations are computed again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;
use tch::nn::{Module, ModuleT};

use crate::error::Result;
use crate::recompute::checkpointed;

/// A [`Module`] that keeps only its input for the backward pass and runs again there. See [`checkpointed`].
///
/// The module is behind a lock, because the backward pass may run on a thread of libtorch's. A module that calls itself
/// through this wrapper deadlocks.
#[derive(Debug)]
pub struct Recomputed<M>(Arc<Mutex<M>>);

/// A [`ModuleT`] that keeps only its input for the backward pass and runs again there. See [`Recomputed`].
#[derive(Debug)]
pub struct RecomputedT<M>(Arc<Mutex<M>>);

/// The module, even after a panic in it: it changes only its tensors.
fn lock<M>(module: &Mutex<M>) -> MutexGuard<'_, M> {
    module.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<M: Module + Send + 'static> Recomputed<M> {
    /// Wraps a module.
    pub fn new(module: M) -> Self {
        Self(Arc::new(Mutex::new(module)))
    }

    /// Runs the module. [`Module::forward`] does the same, and panics instead of returning an error.
    ///
    /// # Errors
    ///
    /// Those of [`checkpointed`].
    ///
    /// # Panics
    ///
    /// If the module itself panics, as those of tch do.
    pub fn f_forward(&self, xs: &Tensor) -> Result<Tensor> {
        let module = Arc::clone(&self.0);
        checkpointed(&[xs], move |xs| Ok(lock(&module).forward(xs[0])))
    }
}

impl<M: ModuleT + Send + 'static> RecomputedT<M> {
    /// Wraps a module.
    pub fn new(module: M) -> Self {
        Self(Arc::new(Mutex::new(module)))
    }

    /// Runs the module. [`ModuleT::forward_t`] does the same, and panics instead of returning an error.
    ///
    /// # Errors
    ///
    /// Those of [`checkpointed`].
    ///
    /// # Panics
    ///
    /// If the module itself panics, as those of tch do.
    pub fn f_forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        let module = Arc::clone(&self.0);
        checkpointed(&[xs], move |xs| Ok(lock(&module).forward_t(xs[0], train)))
    }
}

impl<M: Module + Send + 'static> Module for Recomputed<M> {
    fn forward(&self, xs: &Tensor) -> Tensor {
        self.f_forward(xs).unwrap_or_else(|error| panic!("{error}"))
    }
}

impl<M: ModuleT + Send + 'static> ModuleT for RecomputedT<M> {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        self.f_forward_t(xs, train).unwrap_or_else(|error| panic!("{error}"))
    }
}
