//! Which of Muon and AdamW steps a parameter. An optimizer of any other algorithm steps all parameters by that.

use crate::ffi::OptimOptions;
use crate::optim::{Algorithm, Muon, Optimizer, ParamGroup};

impl Algorithm {
    /// Whether AdamW steps a parameter in place of Muon.
    pub(crate) fn leaves_to_adamw(&self, is_matrix: bool) -> bool {
        matches!(self, Self::Muon(muon) if !(muon.use_muon && is_matrix))
    }

    /// The algorithm that steps a parameter: AdamW where Muon leaves it to that.
    pub(crate) fn of(&self, is_matrix: bool) -> Self {
        match *self {
            Self::Muon(Muon { adamw, .. }) if self.leaves_to_adamw(is_matrix) => adamw.into(),
            algorithm => algorithm,
        }
    }
}

impl ParamGroup {
    /// The options of a step, as the shim takes them: those of the algorithm, and those of AdamW for what Muon leaves
    /// to it.
    pub(crate) fn options(&self) -> [OptimOptions; 2] {
        let own = self.algorithm.options(self.lr);
        let rest = match self.algorithm {
            Algorithm::Muon(Muon { adamw, adamw_lr_factor, .. }) => {
                Algorithm::from(adamw).options(self.lr * adamw_lr_factor)
            }
            _ => own,
        };
        [own, rest]
    }
}

impl Optimizer {
    /// The algorithm that steps the parameter at `index`.
    pub(crate) fn algorithm(&self, index: usize) -> Algorithm {
        let slot = &self.slots[index];
        self.groups[slot.group].algorithm.of(slot.is_matrix)
    }

    /// Calls `change`, and drops the states of the parameters that move between Muon and AdamW by it.
    pub(crate) fn moving<T>(&mut self, change: impl FnOnce(&mut Self) -> T) -> T {
        let by_adamw = |optimizer: &Self| -> Vec<_> {
            let slots = optimizer.slots.iter();
            let groups = &optimizer.groups;
            slots.map(|slot| groups[slot.group].algorithm.leaves_to_adamw(slot.is_matrix)).collect()
        };
        let before = by_adamw(self);
        let changed = change(self);
        let moved = before.into_iter().zip(by_adamw(self));
        for (slot, (before, after)) in self.slots.iter_mut().zip(moved) {
            if before != after {
                slot.state.restart();
            }
        }
        changed
    }
}
