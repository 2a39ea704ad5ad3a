//! Types of a program, which implement the public trait.

use std::collections::BTreeMap;

use tch::Tensor;
use tch_amp::Result;
use tch_amp::checkpoint::{Prepared, SaveState, SavedState, Stateful};

/// A few numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Decay {
    pub lr: f64,
    pub epoch: u64,
}

impl Stateful for Decay {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        state.value("lr", &self.lr)?;
        state.value("epoch", &self.epoch)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let loaded = Self { lr: saved.value("lr")?, epoch: saved.value("epoch")? };
        Ok(Prepared::new(move || *self = loaded))
    }
}

/// A few named tensors, and a number.
#[derive(Debug, PartialEq)]
pub struct Ema {
    pub updates: u64,
    pub weights: BTreeMap<String, Tensor>,
}

impl Ema {
    pub fn new(updates: u64, weights: &[(&str, &[f32])]) -> Self {
        let weights = weights.iter().map(|(n, w)| ((*n).to_owned(), Tensor::from_slice(w)));
        Self { updates, weights: weights.collect() }
    }

    /// One that has a single tensor, `w`.
    pub fn of(tensor: Tensor) -> Self {
        Self { updates: 0, weights: [("w".to_owned(), tensor)].into() }
    }
}

impl Stateful for Ema {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        state.value("updates", &self.updates)?;
        state.tensors(&self.weights)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let updates = saved.value("updates")?;
        Ok(saved.copy_to(&self.weights)?.then(move || self.updates = updates))
    }
}

pub const DECAY: Decay = Decay { lr: f64::INFINITY, epoch: 7 };
pub const ZERO: Decay = Decay { lr: 0.0, epoch: 0 };
