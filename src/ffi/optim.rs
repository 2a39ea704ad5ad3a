//! The fused optimizers and their master weights.

use std::ptr;

use tch::{Kind, Tensor};

use super::{Stamps, call, dtype_code, given, pointer, pointers};
use crate::error::{Error, Result};
use crate::sys;

pub(crate) use crate::sys::{
    OPTIM_ADAFACTOR, OPTIM_ADAGRAD, OPTIM_ADAM, OPTIM_ADAMW, OPTIM_LION, OPTIM_MUON, OPTIM_NADAM,
    OPTIM_RMSPROP, OPTIM_SGD,
};

/// The options of a parameter group, by their names in PyTorch. An algorithm ignores those of others.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct OptimOptions {
    /// One of the `OPTIM_` numbers.
    pub(crate) algorithm: u8,
    pub(crate) lr: f64,
    pub(crate) betas: (f64, f64),
    pub(crate) eps: f64,
    pub(crate) weight_decay: f64,
    pub(crate) momentum: f64,
    pub(crate) dampening: f64,
    pub(crate) lr_decay: f64,
    pub(crate) alpha: f64,
    pub(crate) ns_coefficients: (f64, f64, f64),
    pub(crate) ns_steps: u8,
    pub(crate) momentum_decay: f64,
    pub(crate) beta2_decay: f64,
    pub(crate) eps2: f64,
    pub(crate) clip_threshold: f64,
    pub(crate) amsgrad: bool,
    pub(crate) nesterov: bool,
    pub(crate) maximize: bool,
    pub(crate) centered: bool,
    pub(crate) match_rms_adamw: bool,
    pub(crate) decoupled_weight_decay: bool,
}

impl OptimOptions {
    fn raw(&self, rates: Option<&Tensor>) -> sys::OptimOptions {
        let flags = u8::from(self.amsgrad) * sys::OPTIM_AMSGRAD
            + u8::from(self.nesterov) * sys::OPTIM_NESTEROV
            + u8::from(self.maximize) * sys::OPTIM_MAXIMIZE
            + u8::from(self.centered) * sys::OPTIM_CENTERED
            + u8::from(self.match_rms_adamw) * sys::OPTIM_MATCH_RMS_ADAMW
            + u8::from(self.decoupled_weight_decay) * sys::OPTIM_DECOUPLED_WEIGHT_DECAY;
        sys::OptimOptions {
            lr: self.lr,
            beta1: self.betas.0,
            beta2: self.betas.1,
            eps: self.eps,
            weight_decay: self.weight_decay,
            momentum: self.momentum,
            dampening: self.dampening,
            lr_decay: self.lr_decay,
            alpha: self.alpha,
            ns_a: self.ns_coefficients.0,
            ns_b: self.ns_coefficients.1,
            ns_c: self.ns_coefficients.2,
            momentum_decay: self.momentum_decay,
            beta2_decay: self.beta2_decay,
            eps2: self.eps2,
            clip_threshold: self.clip_threshold,
            algorithm: self.algorithm,
            flags,
            ns_steps: self.ns_steps,
            rates: rates.map_or(ptr::null_mut(), pointer),
        }
    }
}

/// The kind of master weights of a half-precision parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Master {
    None,
    Float,
    Remainder,
    Stochastic { seed: u64 },
}

impl Master {
    fn code(self) -> u8 {
        match self {
            Self::None => sys::MASTER_NONE,
            Self::Float => sys::MASTER_FLOAT,
            Self::Remainder => sys::MASTER_REMAINDER,
            Self::Stochastic { .. } => sys::MASTER_STOCHASTIC,
        }
    }

    fn seed(self) -> u64 {
        match self {
            Self::Stochastic { seed } => seed,
            _ => 0,
        }
    }
}

/// How the states of a parameter are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MomentFormat {
    /// In the dtype of the arithmetic.
    Plain,
    BFloat16,
    EightBit,
}

impl MomentFormat {
    fn code(self) -> u8 {
        match self {
            Self::Plain => sys::STATES_PLAIN,
            Self::BFloat16 => sys::STATES_BFLOAT16,
            Self::EightBit => sys::STATES_EIGHT_BIT,
        }
    }
}

/// A parameter and its state.
#[derive(Debug)]
pub(crate) struct OptimParameter<'a> {
    pub(crate) parameter: &'a Tensor,
    pub(crate) step: Option<&'a Tensor>,
    /// In the order of `StatePlace` in `csrc/kernels/kernels.h`.
    pub(crate) states: [Option<&'a Tensor>; sys::OPTIM_STATES],
    pub(crate) kept_as: MomentFormat,
    pub(crate) kept: Option<&'a Tensor>,
    pub(crate) master: Master,
    /// The index of the parameter's options.
    pub(crate) options: usize,
    pub(crate) first_step: bool,
    /// Whether all of the state that its options need exists.
    pub(crate) complete: bool,
    /// Whether there may be so many steps that f32 does not have every number.
    pub(crate) many_steps: bool,
    /// Whether another rank steps it, so that it is left out here.
    pub(crate) owned_by_other_rank: bool,
}

impl OptimParameter<'_> {
    fn raw(&self, stamp: *mut sys::Stamp) -> sys::OptimParameter {
        sys::OptimParameter {
            parameter: pointer(self.parameter),
            step: optional(self.step),
            states: self.states.map(optional),
            master: optional(self.kept),
            stamp,
            seed: self.master.seed(),
            options: u32::try_from(self.options).unwrap_or(u32::MAX),
            masters: self.master.code(),
            first_step: self.first_step.into(),
            complete: self.complete.into(),
            many_steps: self.many_steps.into(),
            kept_as: self.kept_as.code(),
            elsewhere: self.owned_by_other_rank.into(),
        }
    }
}

fn optional(tensor: Option<&Tensor>) -> *mut sys::Tensor {
    tensor.map_or(ptr::null_mut(), pointer)
}

/// How the gradients are unscaled and clipped for the update, and the flag that skips it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OptimScale<'a> {
    pub(crate) grad_scale: Option<&'a Tensor>,
    pub(crate) clip: Option<&'a Tensor>,
    pub(crate) found_inf: Option<&'a Tensor>,
}

/// The effect of a step on a parameter, or the reason why the whole step was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepAnswer {
    Taken,
    /// The parameter has no gradient, is frozen, or is stepped by another rank.
    LeftOut,
    /// The gradient is of a kind that cannot be stepped with.
    Refused,
    /// The parameter was written to since its stamp was taken.
    Stale,
    /// Some of the parameter's state must be allocated first.
    Incomplete,
}

impl StepAnswer {
    fn of(answer: u8) -> Result<Self> {
        Ok(match answer {
            sys::STEP_TAKEN => Self::Taken,
            sys::STEP_LEFT_OUT => Self::LeftOut,
            sys::STEP_REFUSED => Self::Refused,
            sys::STEP_STALE => Self::Stale,
            sys::STEP_INCOMPLETE => Self::Incomplete,
            other => return Err(Error::Torch(format!("a step answered {other}"))),
        })
    }
}

/// Steps the parameters that have gradients and that no other rank steps, and takes new stamps of those with master
/// weights. The `rates` of each of the options, two f32 on the device, stand for their learning rate; there may be
/// none. Changes nothing if any answer is neither `Taken` nor `LeftOut`, or if `found_inf` is not zero.
pub(crate) fn optim_step<'a>(
    parameters: impl ExactSizeIterator<Item = OptimParameter<'a>>,
    options: &[OptimOptions],
    rates: &[Tensor],
    scale: OptimScale<'_>,
    stamps: &mut Stamps,
) -> Result<Vec<StepAnswer>> {
    let stamps = stamps.of_each(parameters.len());
    let raw = parameters.zip(stamps).map(|(parameter, stamp)| {
        assert!(parameter.options < options.len(), "an index of options");
        parameter.raw(stamp)
    });
    let raw: Vec<_> = raw.collect();
    let rates = |index: usize| rates.get(index);
    let options = options.iter().enumerate().map(|(index, options)| options.raw(rates(index)));
    let options: Vec<_> = options.collect();
    let scale = sys::OptimScale {
        grad_scale: optional(scale.grad_scale),
        clip: optional(scale.clip),
        found_inf: optional(scale.found_inf),
    };
    let mut raw_answers = vec![sys::STEP_LEFT_OUT; raw.len()];
    let (array, count, out) = (raw.as_ptr(), raw.len(), raw_answers.as_mut_ptr());
    // SAFETY: both arrays have `count` elements, each parameter names options that exist and a stamp of its own; the
    // borrows, which are of one lifetime for all parameters, keep every tensor alive, and tensors are changed in place
    // only through libtorch's own handles, which alias freely.
    call(|err| unsafe { sys::tamp_optim_step(array, count, options.as_ptr(), &scale, out, err) })?;
    let mut answers = Vec::with_capacity(count);
    for answer in raw_answers {
        answers.push(StepAnswer::of(answer)?);
    }
    Ok(answers)
}

/// Returns the f32 numbers that consist of a bf16 parameter and its remainder.
pub(crate) fn master_join(parameter: &Tensor, remainder: &Tensor) -> Result<Tensor> {
    // SAFETY: both are live tensors, and `err` is valid for a write.
    given(call(|err| unsafe {
        sys::tamp_master_join(parameter.as_ptr(), remainder.as_ptr(), err)
    })?)
}

/// Returns the remainders of f32 numbers that round to a bf16 parameter, and zero for numbers that do not.
pub(crate) fn master_remainder_of(master: &Tensor, parameter: &Tensor) -> Result<Tensor> {
    let (master, parameter) = (master.as_ptr(), parameter.as_ptr());
    // SAFETY: both are live tensors, and `err` is valid for a write.
    given(call(|err| unsafe { sys::tamp_master_remainder_of(master, parameter, err) })?)
}

/// Returns the numbers of a master, f32 or a remainder, where they round to the numbers of a parameter in bf16 or fp16,
/// and elsewhere those of the parameter. The result is f32, or f64 if the parameter is.
pub(crate) fn master_numbers(master: &Tensor, parameter: &Tensor) -> Result<Tensor> {
    let (master, parameter) = (master.as_ptr(), parameter.as_ptr());
    // SAFETY: both are live tensors, and `err` is valid for a write.
    given(call(|err| unsafe { sys::tamp_master_numbers(master, parameter, err) })?)
}

/// Updates master weights from parameters that other code has written to: all of them or, on failure, none.
pub(crate) fn masters_renew(parameters: &[&Tensor], masters: &[&Tensor]) -> Result<()> {
    assert_eq!(parameters.len(), masters.len(), "one master for each parameter");
    let (tensors, kept) = (pointers(parameters.iter().copied()), pointers(masters.iter().copied()));
    let count = tensors.len();
    // SAFETY: both arrays have `count` elements, and the borrows keep the tensors alive; the masters are changed in
    // place through libtorch's own handles, which alias freely.
    call(|err| unsafe { sys::tamp_masters_renew(tensors.as_ptr(), kept.as_ptr(), count, err) })
}

/// The shape of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StateShape {
    /// That of its parameter, with its strides.
    Like,
    /// That of its parameter, contiguous.
    Contiguous,
    /// One element for each 32.
    OfBlocks,
    /// One element for each row of the matrices that the last two dimensions are, or for each column.
    OfRows,
    OfColumns,
    /// One f32.
    OfOne,
}

impl StateShape {
    /// Returns the shape of a plain state of a parameter.
    pub(crate) fn of(self, parameter: &Tensor) -> Vec<i64> {
        let mut shape = parameter.size();
        let last = shape.len();
        match self {
            Self::OfOne => shape.clear(),
            Self::OfRows if last >= 2 => shape[last - 1] = 1,
            Self::OfColumns if last >= 2 => shape[last - 2] = 1,
            _ => {}
        }
        shape
    }

    fn code(self) -> u8 {
        match self {
            Self::Like => sys::STATE_LIKE,
            Self::Contiguous => sys::STATE_CONTIGUOUS,
            Self::OfBlocks => sys::STATE_OF_BLOCKS,
            Self::OfRows => sys::STATE_OF_ROWS,
            Self::OfColumns => sys::STATE_OF_COLUMNS,
            Self::OfOne => sys::STATE_OF_ONE,
        }
    }
}

/// The numbers of `c10::ScalarType` for states that are no floating-point numbers.
const INTEGERS: [(Kind, i8); 3] = [(Kind::Uint8, 0), (Kind::Int8, 1), (Kind::Int16, 2)];

/// Creates a state for each of the parameters, with the given dtype or else the parameter's, filled with a value.
pub(crate) fn optim_states_new(
    parameters: &[&Tensor],
    kind: Option<Kind>,
    shape: StateShape,
    value: f64,
) -> Result<Vec<Tensor>> {
    let integer = |kind| INTEGERS.iter().find(|(known, _)| *known == kind).map(|(_, code)| *code);
    let dtype = match kind {
        None => -1,
        Some(kind) => integer(kind)
            .or_else(|| dtype_code(kind))
            .ok_or_else(|| Error::Torch(format!("no state is {kind:?}")))?,
    };
    let shape = shape.code();
    let tensors = pointers(parameters.iter().copied());
    let mut states = vec![ptr::null_mut(); tensors.len()];
    let (array, count, out) = (tensors.as_ptr(), tensors.len(), states.as_mut_ptr());
    // SAFETY: both arrays have `count` elements, and `parameters` keeps the tensors alive.
    call(|err| unsafe { sys::tamp_optim_states_new(array, count, dtype, shape, value, out, err) })?;
    states.into_iter().map(given).collect()
}

/// Creates an f32 copy of each of the parameters.
pub(crate) fn masters_new(parameters: &[&Tensor]) -> Result<Vec<Tensor>> {
    let tensors = pointers(parameters.iter().copied());
    let mut masters = vec![ptr::null_mut(); tensors.len()];
    let (array, count, out) = (tensors.as_ptr(), tensors.len(), masters.as_mut_ptr());
    // SAFETY: both arrays have `count` elements, and `parameters` keeps the tensors alive.
    call(|err| unsafe { sys::tamp_masters_new(array, count, out, err) })?;
    masters.into_iter().map(given).collect()
}

/// Returns the f32 moments, exp_avg and exp_avg_sq, of codes in 8 bits: exp_avg, exp_avg_sq and exponents.
pub(crate) fn codes_decode([exp_avg, exp_avg_sq, exponents]: [&Tensor; 3]) -> Result<[Tensor; 2]> {
    let [exp_avg, exp_avg_sq, exponents] = [exp_avg, exp_avg_sq, exponents].map(pointer);
    let mut numbers = [ptr::null_mut(); 2];
    let out = numbers.as_mut_ptr();
    // SAFETY: all are live tensors, and `out` has room for the two that are returned.
    call(|err| unsafe { sys::tamp_codes_decode(exp_avg, exp_avg_sq, exponents, out, err) })?;
    let [exp_avg, exp_avg_sq] = numbers.map(given);
    Ok([exp_avg?, exp_avg_sq?])
}

/// Overwrites codes by those of f32 moments.
pub(crate) fn codes_encode(
    [exp_avg, exp_avg_sq]: [&Tensor; 2],
    (beta1, beta2): (f64, f64),
    codes: [&Tensor; 3],
) -> Result<()> {
    let (exp_avg, exp_avg_sq, codes) = (pointer(exp_avg), pointer(exp_avg_sq), codes.map(pointer));
    let out = codes.as_ptr();
    // SAFETY: all are live tensors, of which the codes are changed in place through libtorch's own handles, which alias
    // freely.
    call(|err| unsafe { sys::tamp_codes_encode(exp_avg, exp_avg_sq, beta1, beta2, out, err) })
}
