//! What an optimizer remembers of a parameter.

#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::ffi;
use crate::optim::{Adagrad, Adam, AdamW, Algorithm};

/// The state of one parameter. Empty until its first gradient.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) step: Option<Tensor>,
    /// In the order of [`keys`].
    pub(crate) tensors: [Option<Tensor>; KEPT],
    pub(crate) first_step: FirstStep,
}

/// Whether a momentum buffer starts with the next gradient.
#[derive(Debug, Default)]
pub(crate) enum FirstStep {
    #[default]
    Ahead,
    /// It was taken unless that step was skipped.
    Unless(Arc<Mutex<Skipped>>),
    Taken,
}

/// Whether a step was skipped, as only a device knows until it is asked. Many parameters share one.
#[derive(Debug)]
pub(crate) enum Skipped {
    Unknown(Tensor),
    Known(bool),
}

impl Skipped {
    fn ask(&mut self) -> Result<bool> {
        let skipped = match self {
            Self::Known(skipped) => return Ok(*skipped),
            Self::Unknown(found_inf) => found_inf.f_reshape([1i64])?.f_double_value(&[0])? != 0.0,
        };
        *self = Self::Known(skipped);
        Ok(skipped)
    }
}

impl FirstStep {
    /// Whether it is ahead. Waits for the device where only that knows.
    pub(crate) fn is_ahead(&mut self) -> Result<bool> {
        if let Self::Unless(skipped) = self {
            let skipped = skipped.lock().unwrap_or_else(PoisonError::into_inner).ask()?;
            *self = if skipped { Self::Ahead } else { Self::Taken };
        }
        Ok(matches!(self, Self::Ahead))
    }
}

/// PyTorch's name of the number of steps.
pub(crate) const STEP: &str = "step";

/// How many tensors are kept for a parameter at most, its step aside.
pub(crate) const KEPT: usize = 3;

/// PyTorch's names of the tensors that an algorithm may keep for each parameter, `step` aside.
pub(crate) fn keys(algorithm: &Algorithm) -> &'static [&'static str] {
    match algorithm {
        Algorithm::AdamW(_) | Algorithm::Adam(_) => &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
        Algorithm::Sgd(_) => &["momentum_buffer"],
        Algorithm::Adagrad(_) => &["sum"],
    }
}

/// Those of them that its options make it use.
pub(crate) fn used_keys(algorithm: &Algorithm) -> &'static [&'static str] {
    let keys = keys(algorithm);
    let unused = match algorithm {
        Algorithm::AdamW(AdamW { amsgrad, .. }) | Algorithm::Adam(Adam { amsgrad, .. }) => !amsgrad,
        Algorithm::Sgd(config) => config.momentum == 0.0,
        Algorithm::Adagrad(_) => false,
    };
    &keys[..keys.len() - usize::from(unused)]
}

/// Whether an algorithm counts the steps of each parameter.
pub(crate) fn counts_steps(algorithm: &Algorithm) -> bool {
    !matches!(algorithm, Algorithm::Sgd(_))
}

impl State {
    pub(crate) fn is_empty(&self) -> bool {
        self.step.is_none() && self.tensors.iter().all(Option::is_none)
    }
}

/// Makes what the algorithms need and is not there yet. All at once: the tensors of one kind lie in one buffer.
pub(crate) fn complete<'a>(
    states: impl IntoIterator<Item = (&'a mut State, &'a Algorithm, &'a Tensor)>,
) -> Result<()> {
    let mut missing: Vec<(&mut Option<Tensor>, f64, &Tensor)> = Vec::new();
    for (state, algorithm, parameter) in states {
        if counts_steps(algorithm) && state.step.is_none() {
            state.step = Some(Tensor::f_zeros([], (Kind::Float, parameter.device()))?);
        }
        for (tensor, _) in state.tensors.iter_mut().zip(used_keys(algorithm)) {
            if tensor.is_none() {
                missing.push((tensor, initial(algorithm), parameter));
            }
        }
    }
    while let Some(&(_, value, _)) = missing.first() {
        let (alike, others) = missing.into_iter().partition(|(_, other, _)| *other == value);
        let (slots, parameters): (Vec<_>, Vec<_>) =
            Vec::into_iter(alike).map(|(slot, _, parameter)| (slot, parameter)).unzip();
        for (slot, made) in slots.into_iter().zip(ffi::optim_states_new(&parameters, value)?) {
            *slot = Some(made);
        }
        missing = others;
    }
    Ok(())
}

/// What the elements of a state tensor start with.
fn initial(algorithm: &Algorithm) -> f64 {
    match algorithm {
        Algorithm::Adagrad(Adagrad { initial_accumulator_value: value, .. }) => *value,
        _ => 0.0,
    }
}
