//! The parameters whose gradients are averaged over ranks.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tch::Tensor;

use crate::error::Result;
use crate::ffi::{self, Gradient};
use crate::scaler;

/// The parameters of a distributed model, which keeps them alive for longer than this, and their identities.
#[derive(Debug)]
pub(super) struct Averaged {
    identities: Arc<HashSet<usize>>,
    /// Locked, because threads cannot share tensors.
    parameters: Mutex<Vec<Tensor>>,
    /// Whether gradients of this rank alone have been accumulated.
    is_alone: AtomicBool,
}

/// Those of all distributed models of the process.
static MODELS: Mutex<Vec<Weak<HashSet<usize>>>> = Mutex::new(Vec::new());

impl Averaged {
    pub(super) fn note(parameters: &[(String, Tensor)]) -> Result<Self> {
        let tensors: Vec<_> = parameters.iter().map(|(_, tensor)| tensor.shallow_clone()).collect();
        let identities: Arc<HashSet<_>> =
            Arc::new(ffi::identities(&tensors)?.into_iter().collect());
        let mut models = MODELS.lock().unwrap_or_else(PoisonError::into_inner);
        models.retain(|model| model.strong_count() > 0);
        models.push(Arc::downgrade(&identities));
        let parameters = Mutex::new(tensors);
        Ok(Self { identities, parameters, is_alone: AtomicBool::new(false) })
    }
}

impl Averaged {
    /// Notes whether gradients of this rank alone have been accumulated, and returns whether they had before.
    pub(super) fn set_alone(&self, is_alone: bool) -> bool {
        self.is_alone.swap(is_alone, Ordering::Relaxed)
    }

    /// Whether there are gradients. If they cannot be inspected, there may be some.
    fn has_gradients(&self) -> bool {
        let parameters = self.parameters.lock().unwrap_or_else(PoisonError::into_inner);
        let gradients = ffi::gradients_inspect(&parameters);
        gradients.map_or(true, |gradients| gradients.iter().any(Gradient::exists))
    }
}

impl scaler::Averaged for Averaged {
    fn is_alone(&self) -> bool {
        // What was accumulated and then dropped is no part of a sum.
        self.is_alone.load(Ordering::Relaxed) && self.has_gradients()
    }

    fn has_any(&self, identities: &[usize]) -> bool {
        identities.iter().any(|identity| self.identities.contains(identity))
    }
}

/// Whether a distributed model averages the gradients of any of these parameters.
pub(crate) fn any_is_averaged(parameters: &[Tensor]) -> Result<bool> {
    let models: Vec<_> = {
        let models = MODELS.lock().unwrap_or_else(PoisonError::into_inner);
        models.iter().filter_map(Weak::upgrade).collect()
    };
    if models.is_empty() {
        return Ok(false);
    }
    let identities = ffi::identities(parameters)?;
    Ok(identities.iter().any(|identity| models.iter().any(|model| model.contains(identity))))
}
