//! What an optimizer remembers of a parameter.

#![forbid(unsafe_code)]

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::ffi;
use crate::optim::{Adagrad, Algorithm};

/// The state of one parameter. Empty until its first gradient.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) step: Option<Tensor>,
    /// In the order of [`keys`].
    pub(crate) tensors: [Option<Tensor>; 3],
    pub(crate) first_step: FirstStep,
}

/// Whether a momentum buffer starts with the next gradient.
#[derive(Debug, Default)]
pub(crate) enum FirstStep {
    #[default]
    Ahead,
    /// It was taken unless this flag, on a device, is not zero.
    Unless(Tensor),
    Taken,
}

impl FirstStep {
    /// Whether it is ahead. Waits for the device where only that knows.
    pub(crate) fn is_ahead(&mut self) -> Result<bool> {
        if let Self::Unless(found_inf) = self {
            let skipped = found_inf.f_double_value(&[])? != 0.0;
            *self = if skipped { Self::Ahead } else { Self::Taken };
        }
        Ok(matches!(self, Self::Ahead))
    }
}

/// PyTorch's names of the tensors that an algorithm keeps for each parameter, `step` aside.
pub(crate) fn keys(algorithm: &Algorithm) -> &'static [&'static str] {
    match algorithm {
        Algorithm::AdamW(config) if config.amsgrad => &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
        Algorithm::Adam(config) if config.amsgrad => &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
        Algorithm::AdamW(_) | Algorithm::Adam(_) => &["exp_avg", "exp_avg_sq"],
        Algorithm::Sgd(config) if config.momentum == 0.0 => &[],
        Algorithm::Sgd(_) => &["momentum_buffer"],
        Algorithm::Adagrad(_) => &["sum"],
    }
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
        for (tensor, _) in state.tensors.iter_mut().zip(keys(algorithm)) {
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
