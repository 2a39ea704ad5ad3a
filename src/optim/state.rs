//! The state of a parameter.
//!
//! The tensors are saved under PyTorch's keys. They are made together by the first step that needs them, in a few large
//! buffers instead of one allocation for each parameter.

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::ffi::{self, KeptAs, Master, StateShape};
use crate::optim::first_step::FirstStep;
use crate::optim::{Adagrad, Adam, AdamW, Algorithm, RmsProp};

/// The state of one parameter; empty until its first gradient.
#[derive(Debug, Default)]
pub(crate) struct ParameterState {
    pub(crate) step: Option<Tensor>,
    /// At least as many as `step` says, which only a device may know.
    pub(crate) most_steps: u64,
    /// In the order of [`keys`].
    pub(crate) tensors: [Option<Tensor>; KEPT],
    /// The master weight: f32, or a remainder.
    pub(crate) master: Option<Tensor>,
    /// The master of a loaded state, until the parameter is known: one that is kept as a remainder, or one that
    /// becomes the parameter, since that is not in half precision.
    pub(crate) loaded: Option<Tensor>,
    pub(crate) first_step: FirstStep,
}

impl ParameterState {
    /// Makes the next step the first one. The master weight stays.
    pub(crate) fn restart(&mut self) {
        let Self { master, loaded, .. } = std::mem::take(self);
        *self = Self { master, loaded, ..Self::default() };
    }

    /// The master weight as f32, or as f64 beside a parameter that is f64 by now.
    pub(crate) fn master_numbers(
        &self,
        master: Master,
        parameter: &Tensor,
    ) -> Result<Option<Tensor>> {
        let Some(kept) = &self.master else { return Ok(None) };
        Ok(Some(match (master, &self.loaded) {
            (Master::Remainder, Some(loaded)) => loaded.shallow_clone(),
            (Master::Remainder, None) if kept.kind() == Kind::Int16 => {
                ffi::master_join(parameter, kept)?
            }
            (Master::Float, _) if kept.kind() == Kind::Float => kept.shallow_clone(),
            // The parameter has another dtype than when the master was made.
            _ => ffi::master_numbers(kept, parameter)?,
        }))
    }
}

/// PyTorch's key for the number of steps.
pub(crate) const STEP: &str = "step";

/// The key of a master weight in a state, as in TransformerEngine. It is f32 in every mode.
pub(crate) const MASTER: &str = "master_param";

/// From here on, f32 does not have every number of steps.
pub(crate) const MANY_STEPS: u64 = 1 << f32::MANTISSA_DIGITS;

/// The largest number of tensors that are kept for a parameter, without its step.
pub(crate) const KEPT: usize = 3;

/// The key of the exponents of 8-bit moments. It stands for the codes: others would have another key.
pub(crate) const EXPONENTS: &str = "exponents";

/// PyTorch's keys for the tensors that an algorithm may keep for each parameter, without `step`. 8-bit moments
/// have exponents in addition.
pub(crate) fn keys(algorithm: &Algorithm, kept_as: KeptAs) -> &'static [&'static str] {
    match algorithm {
        Algorithm::AdamW(_) | Algorithm::Adam(_) if kept_as == KeptAs::EightBit => {
            &["exp_avg", "exp_avg_sq", EXPONENTS]
        }
        Algorithm::AdamW(_) | Algorithm::Adam(_) => &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
        Algorithm::Sgd(_) | Algorithm::Muon(_) => &["momentum_buffer"],
        Algorithm::Adagrad(_) => &["sum"],
        Algorithm::RmsProp(_) => &["square_avg", "momentum_buffer", "grad_avg"],
        Algorithm::Lion(_) => &["exp_avg"],
    }
}

/// Which of the [`keys`] the algorithm uses with any options: a state that was begun has them.
pub(crate) fn required(algorithm: &Algorithm) -> [bool; KEPT] {
    match algorithm {
        Algorithm::AdamW(_) | Algorithm::Adam(_) => [true, true, false],
        Algorithm::Sgd(_) => [false; KEPT],
        Algorithm::RmsProp(_) | Algorithm::Adagrad(_) | Algorithm::Lion(_) | Algorithm::Muon(_) => {
            [true, false, false]
        }
    }
}

/// Which of the [`keys`] the algorithm uses with its options.
pub(crate) fn used(algorithm: &Algorithm, kept_as: KeptAs) -> [bool; KEPT] {
    match algorithm {
        Algorithm::AdamW(AdamW { amsgrad, .. }) | Algorithm::Adam(Adam { amsgrad, .. }) => {
            [true, true, *amsgrad || kept_as == KeptAs::EightBit]
        }
        Algorithm::Sgd(config) => [config.momentum != 0.0, false, false],
        Algorithm::RmsProp(RmsProp { momentum, centered, .. }) => {
            [true, *momentum != 0.0, *centered]
        }
        Algorithm::Adagrad(_) | Algorithm::Lion(_) | Algorithm::Muon(_) => [true, false, false],
    }
}

/// Whether the arithmetic of the algorithm depends on the number of steps.
pub(crate) fn uses_steps(algorithm: &Algorithm) -> bool {
    !matches!(algorithm, Algorithm::Sgd(_) | Algorithm::Lion(_) | Algorithm::Muon(_))
}

/// Whether the steps of a parameter are counted: for the arithmetic, the dither or the random rounding.
pub(crate) fn counts_steps(algorithm: &Algorithm, kept_as: KeptAs, master: Master) -> bool {
    uses_steps(algorithm) || kept_as != KeptAs::Plain || matches!(master, Master::Stochastic { .. })
}

/// Whether the state has everything that a step of the parameter needs.
pub(crate) fn is_complete(
    state: &ParameterState,
    algorithm: &Algorithm,
    kept_as: KeptAs,
    master: Master,
) -> bool {
    let mut tensors = state.tensors.iter().zip(used(algorithm, kept_as));
    tensors.all(|(tensor, used)| tensor.is_some() || !used)
        && (state.step.is_some() || !counts_steps(algorithm, kept_as, master))
        && match master.kind() {
            Some(_) => state.master.is_some(),
            None => state.loaded.is_none(),
        }
}

/// A state to complete, and the tensors that it has to have.
pub(crate) struct Wanted<'a> {
    pub(crate) state: &'a mut ParameterState,
    pub(crate) parameter: &'a Tensor,
    pub(crate) kept_as: KeptAs,
    /// The dtype of the tensors that are kept plain; `None` for the parameter's.
    pub(crate) kind: Option<Kind>,
    pub(crate) step: bool,
    pub(crate) tensors: [bool; KEPT],
    /// The initial value of the tensors.
    pub(crate) value: f64,
    pub(crate) master: Master,
}

impl<'a> Wanted<'a> {
    /// What a step needs.
    pub(crate) fn by_step(
        state: &'a mut ParameterState,
        algorithm: &Algorithm,
        parameter: &'a Tensor,
        kept_as: KeptAs,
        master: Master,
    ) -> Self {
        Self {
            state,
            parameter,
            kept_as,
            kind: master.state_kind(),
            step: counts_steps(algorithm, kept_as, master),
            tensors: used(algorithm, kept_as),
            value: initial(algorithm),
            master,
        }
    }
}

/// A tensor to be made for a parameter.
struct MissingTensor<'a> {
    place: &'a mut Option<Tensor>,
    /// `None` for the parameter's dtype.
    kind: Option<Kind>,
    shape: StateShape,
    value: f64,
    parameter: &'a Tensor,
}

/// A tensor and the place where it belongs.
type Made<'a> = (&'a mut Option<Tensor>, Tensor);

/// Makes the tensors that are wanted and that do not exist yet: all of them or, on failure, none. Tensors of one kind
/// are made together, so that they share one buffer.
pub(crate) fn complete<'a>(wanted: impl IntoIterator<Item = Wanted<'a>>) -> Result<()> {
    let (mut steps, mut missing, mut copies) = (Vec::new(), Vec::new(), Vec::new());
    for Wanted { state, parameter, kept_as, kind, step, tensors, value, master } in wanted {
        if step && state.step.is_none() {
            steps.push((&mut state.step, (kept_as.step_kind(), parameter.device())));
        }
        for (index, (place, wanted)) in state.tensors.iter_mut().zip(tensors).enumerate() {
            if wanted && place.is_none() {
                let (kind, shape) = kept_as.layout(index, kind);
                missing.push(MissingTensor { place, kind, shape, value, parameter });
            }
        }
        if let (None, Some(kind)) = (&state.master, master.kind()) {
            let place = &mut state.master;
            if master == Master::Float {
                copies.push((place, parameter));
            } else {
                // With a remainder of zeros, the master equals the parameter.
                let shape = StateShape::Like;
                missing.push(MissingTensor {
                    place,
                    kind: Some(kind),
                    shape,
                    value: 0.0,
                    parameter,
                });
            }
        }
    }
    let mut made = zeros(steps)?;
    made.extend(filled(missing)?);
    let parameters: Vec<_> = copies.iter().map(|(_, parameter)| *parameter).collect();
    let places = copies.into_iter().map(|(place, _)| place);
    made.extend(places.zip(ffi::masters_new(&parameters)?));
    for (place, tensor) in made {
        *place = Some(tensor);
    }
    Ok(())
}

/// Makes step counts of zero, in one buffer for each dtype and device.
fn zeros(mut places: Vec<(&mut Option<Tensor>, (Kind, Device))>) -> Result<Vec<Made<'_>>> {
    let mut made = Vec::with_capacity(places.len());
    while let Some(&(_, options)) = places.first() {
        let (here, others): (Vec<_>, Vec<_>) =
            places.into_iter().partition(|(_, other)| *other == options);
        let buffer = Tensor::f_zeros([here.len() as i64], options)?;
        for (index, (place, _)) in here.into_iter().enumerate() {
            made.push((place, buffer.f_get(index as i64)?));
        }
        places = others;
    }
    Ok(made)
}

/// Makes tensors that are filled with a value, with one call for each kind.
fn filled(mut missing: Vec<MissingTensor<'_>>) -> Result<Vec<Made<'_>>> {
    let mut made = Vec::with_capacity(missing.len());
    while let Some(&MissingTensor { kind, shape, value, .. }) = missing.first() {
        let is_alike = |other: &MissingTensor<'_>| {
            other.kind == kind && other.shape == shape && other.value == value
        };
        let (alike, others): (Vec<_>, Vec<_>) = missing.into_iter().partition(is_alike);
        let parameters: Vec<_> = alike.iter().map(|missing| missing.parameter).collect();
        let tensors = ffi::optim_states_new(&parameters, kind, shape, value)?;
        made.extend(alike.into_iter().map(|missing| missing.place).zip(tensors));
        missing = others;
    }
    Ok(made)
}

/// The initial value of a state tensor's elements.
fn initial(algorithm: &Algorithm) -> f64 {
    match algorithm {
        Algorithm::Adagrad(Adagrad { initial_accumulator_value: value, .. }) => *value,
        _ => 0.0,
    }
}
