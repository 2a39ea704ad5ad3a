//! The state of a parameter.
//!
//! The tensors are saved under PyTorch's keys. They are made together by the first step that needs them, in a few large
//! buffers instead of one allocation for each parameter.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Device, Kind, Tensor};

use crate::error::{Error, ParameterProblem, Result};
use crate::ffi::{self, Arrival, Master, MomentFormat, OutsideRegions, StateShape};
use crate::optim::algorithms::{KEPT, LowBit, Spec, StateTensor};
use crate::optim::{Algorithm, MasterWeights};

/// The state of one parameter; empty until its first gradient.
#[derive(Debug, Default)]
pub(crate) struct ParameterState {
    pub(crate) step: Option<Tensor>,
    /// At least as many as `step` says, which only a device may know.
    pub(crate) most_steps: u64,
    /// In the order of [`Spec::tensors`].
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

/// Returns whether the steps of a parameter are counted: for the arithmetic, the dither or the random rounding.
pub(crate) fn counts_steps(algorithm: &dyn Spec, kept_as: MomentFormat, master: Master) -> bool {
    algorithm.counts_steps()
        || kept_as != MomentFormat::Plain
        || matches!(master, Master::Stochastic { .. })
}

/// Returns whether the state has everything that a step of the parameter needs.
pub(crate) fn is_complete(
    state: &ParameterState,
    algorithm: &dyn Spec,
    dims: usize,
    kept_as: MomentFormat,
    master: Master,
) -> bool {
    let mut tensors = state.tensors.iter().zip(algorithm.used(kept_as, dims));
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
    pub(crate) kept_as: MomentFormat,
    /// The dtype of the tensors that are kept plain; `None` for the parameter's.
    pub(crate) kind: Option<Kind>,
    pub(crate) step: bool,
    pub(crate) tensors: [bool; KEPT],
    /// The descriptions of the tensors.
    pub(crate) described: &'static [StateTensor],
    /// Their initial values.
    pub(crate) values: [f64; KEPT],
    pub(crate) master: Master,
}

impl<'a> Wanted<'a> {
    /// Returns the state to complete for a step, with the tensors that the algorithm uses.
    pub(crate) fn by_step(
        state: &'a mut ParameterState,
        algorithm: &dyn Spec,
        (parameter, dims): (&'a Tensor, usize),
        kept_as: MomentFormat,
        master: Master,
    ) -> Self {
        Self {
            state,
            parameter,
            kept_as,
            kind: master.state_kind(),
            step: counts_steps(algorithm, kept_as, master),
            tensors: algorithm.used(kept_as, dims),
            described: algorithm.tensors(kept_as),
            values: std::array::from_fn(|place| algorithm.initial(place)),
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
pub(crate) fn allocate_missing_state<'a>(
    wanted: impl IntoIterator<Item = Wanted<'a>>,
) -> Result<()> {
    let (mut steps, mut missing, mut copies) = (Vec::new(), Vec::new(), Vec::new());
    for Wanted { state, parameter, kept_as, kind, step, tensors, described, values, master } in
        wanted
    {
        if step && state.step.is_none() {
            steps.push((&mut state.step, (kept_as.step_kind(), parameter.device())));
        }
        let places = state.tensors.iter_mut().zip(described).enumerate();
        for (index, (place, described)) in places {
            if tensors[index] && place.is_none() {
                let (kind, shape) = kept_as.layout(index, kind, described.shape);
                let value = values[index];
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

/// The first step of a momentum buffer, which starts with the gradient: whether it is still ahead. With dampening, the
/// first gradient enters the buffer in full and later ones do not. A step that a device may skip leaves open which
/// gradient is the first: the flag of that step is kept until its value has arrived on the host.
#[derive(Debug, Default)]
pub(crate) enum FirstStep {
    #[default]
    Ahead,
    /// It was taken unless all steps since were skipped.
    Unless(SharedAnswer),
    Taken,
}

/// Shared by many parameters.
type SharedAnswer = Arc<Mutex<Skipped>>;

/// The answer to whether all of some steps were skipped. Only a device has it until it has arrived on the host.
#[derive(Debug)]
pub(crate) enum Skipped {
    Unknown { flag: Tensor, arrival: Option<Arrival> },
    Known(bool),
}

impl Skipped {
    fn new(flag: Tensor) -> Result<SharedAnswer> {
        // On the CPU the flag can be read at once.
        let arrives = flag.device() != Device::Cpu;
        let arrival = arrives.then(|| Arrival::new(&flag)).transpose()?;
        Ok(Arc::new(Mutex::new(Self::Unknown { flag, arrival })))
    }

    /// The answer. Synchronizes if only the device has it.
    fn ask(&mut self) -> Result<bool> {
        let _own = OutsideRegions::enter();
        let skipped = match self {
            Self::Known(skipped) => return Ok(*skipped),
            Self::Unknown { flag, .. } => flag.f_reshape([1i64])?.f_double_value(&[0])? != 0.0,
        };
        *self = Self::Known(skipped);
        Ok(skipped)
    }

    /// The answer, if it has arrived. Never synchronizes.
    fn poll(&mut self) -> Option<bool> {
        let skipped = match self {
            Self::Known(skipped) => return Some(*skipped),
            Self::Unknown { arrival: Some(arrival), .. } => arrival.poll().ok()?? != 0.0,
            Self::Unknown { arrival: None, .. } => return self.ask().ok(),
        };
        *self = Self::Known(skipped);
        Some(skipped)
    }
}

fn lock(skipped: &SharedAnswer) -> MutexGuard<'_, Skipped> {
    skipped.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FirstStep {
    /// Returns whether the first step is still ahead. Synchronizes if only the device has the answer.
    pub(crate) fn is_ahead(&mut self) -> Result<bool> {
        if let Self::Unless(skipped) = self {
            let skipped = lock(skipped).ask()?;
            *self = if skipped { Self::Ahead } else { Self::Taken };
        }
        Ok(matches!(self, Self::Ahead))
    }
}

/// A step that the device skips if `found_inf` is not zero.
pub(crate) struct Launch<'a> {
    found_inf: Option<&'a Tensor>,
    /// For the unknown steps before this one, a flag whether these and this one are all skipped.
    flags: Vec<(Option<SharedAnswer>, SharedAnswer)>,
}

impl<'a> Launch<'a> {
    pub(crate) fn new(found_inf: Option<&'a Tensor>) -> Self {
        Self { found_inf, flags: Vec::new() }
    }

    /// Allocates what `note` needs, before the step changes anything.
    pub(crate) fn prepare(&mut self, first_step: &FirstStep) -> Result<()> {
        let _own = OutsideRegions::enter();
        let (Some(found_inf), Some(before)) = (self.found_inf, unknown(first_step)) else {
            return Ok(());
        };
        if self.flag(before.as_ref()).is_some() {
            return Ok(());
        }
        let flag = match before.as_ref().map(lock).as_deref() {
            Some(Skipped::Unknown { flag, .. }) => {
                let here = found_inf.f_to_device_(flag.device(), Kind::Float, true, false)?;
                flag.f_minimum(&here)?
            }
            _ => found_inf.shallow_clone(),
        };
        self.flags.push((before, Skipped::new(flag)?));
        Ok(())
    }

    /// Records in a parameter's state that it was stepped.
    pub(crate) fn note(&self, first_step: &mut FirstStep) {
        let prepared = match first_step {
            // The answer may have arrived since.
            FirstStep::Unless(skipped) => self.flag(Some(skipped)),
            _ => None,
        };
        let known_now = || self.flag(unknown(first_step)?.as_ref());
        let flag = prepared.or_else(known_now);
        *first_step = flag.map_or(FirstStep::Taken, FirstStep::Unless);
    }

    fn flag(&self, before: Option<&SharedAnswer>) -> Option<SharedAnswer> {
        let same = |(known, _): &&(Option<SharedAnswer>, SharedAnswer)| match (known, before) {
            (None, None) => true,
            (Some(known), Some(before)) => Arc::ptr_eq(known, before),
            _ => false,
        };
        self.flags.iter().find(same).map(|(_, flag)| Arc::clone(flag))
    }
}

/// The unknown steps before: `None` if one was taken, and `Some(None)` if all were skipped.
fn unknown(first_step: &FirstStep) -> Option<Option<SharedAnswer>> {
    match first_step {
        FirstStep::Taken => None,
        FirstStep::Ahead => Some(None),
        FirstStep::Unless(skipped) => {
            let known = lock(skipped).poll();
            match known {
                Some(false) => None,
                Some(true) => Some(None),
                None => Some(Some(Arc::clone(skipped))),
            }
        }
    }
}

/// How [`Adam`](crate::optim::Adam) and [`AdamW`](crate::optim::AdamW) store their two moments between steps, and
/// [`Muon`](crate::optim::Muon) the momentum of its matrices: in f32, or in fewer bits to save memory. With fewer bits
/// the arithmetic of a step is f32.
///
/// | AdamW | bytes per parameter | largest update ÷ exact AdamW's | rms error of an update |
/// |---|---|---|---|
/// | `F32` | 8 | 1 | – |
/// | `BFloat16` | 4 | 1.02 measured | 1 % |
/// | `EightBit` | 2.03 | 1.2 measured; at most twice AdamW's worst case, proven | 9 % |
///
/// Low-bit moments need parameters that are f32, or bf16 and fp16 with [`MasterWeights::Float`] or
/// [`MasterWeights::Remainder`], on the CPU or on CUDA devices. Tensors of fewer than 4096 elements, such as biases and
/// norms, keep f32 moments: there is nothing to save. `amsgrad` and other algorithms are refused. For Muon there is
/// `BFloat16`, with which a momentum takes 2 bytes per parameter instead of 4, and the AdamW for its other parameters
/// 4 instead of 8. PyTorch has no counterpart. The guide has a [page](crate::guide::low_bit_moments) with the encoding,
/// figures, and when not to use it.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor, nn};
/// use tch_amp::optim::{AdamW, MomentDtype};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let net = nn::linear(vs.root(), 128, 64, Default::default());
/// let mut opt = AdamW::default().moments(MomentDtype::EightBit).build(&vs, 1e-3)?;
/// let loss = Tensor::randn([8, 128], (Kind::Float, Device::Cpu)).apply(&net).square().mean(Kind::Float);
/// opt.backward_step(&loss)?;
/// let moments = &opt.state_dict()?.state["weight"];
/// assert_eq!(moments["exp_avg"].kind(), Kind::Int8);
/// assert_eq!(moments["exp_avg_sq"].kind(), Kind::Uint8);
/// assert_eq!(moments["exponents"].size(), [128 * 64 / 32]);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MomentDtype {
    /// f32, or the parameter's own dtype if it is f64, or half precision without master weights. The default.
    #[default]
    F32,
    /// bf16, rounded up or down by a dither that depends on the step and the index of an element, so that a moment that
    /// changes by less than half of bf16's spacing still follows. The cautious mode.
    BFloat16,
    /// Both moments in 8 bits. `exp_avg_sq` is a float with 5 exponent and 3 fraction bits, relative to the exponent of
    /// its block of 32 elements; `exp_avg` is a sign and a 7-bit logarithm relative to the element's own
    /// `sqrt(exp_avg_sq)`. Both are rounded by the same dither. No update is larger than twice the largest one that
    /// exact AdamW can make with these betas, whatever the gradients are. Not for Muon, which has no second moment.
    EightBit,
}

/// Tensors of fewer elements keep f32 moments.
const LEAST: usize = 4096;

/// The number of elements that share an exponent.
const BLOCK: usize = 32;

impl MomentDtype {
    /// Refuses an algorithm that has no such moments.
    pub(crate) fn check(self, algorithm: &Algorithm) -> Result<()> {
        let kept_as = match self {
            Self::F32 => return Ok(()),
            Self::BFloat16 => MomentFormat::BFloat16,
            Self::EightBit => MomentFormat::EightBit,
        };
        let problem = match algorithm.spec().low_bit(kept_as) {
            LowBit::Possible => return Ok(()),
            LowBit::Refused(problem) => problem.to_owned(),
            LowBit::Never => format!(
                "must be `MomentDtype::F32` for {}: only Adam, AdamW and Muon have low-bit moments",
                algorithm.name()
            ),
        };
        Err(Error::InvalidArgument { name: "moments", problem })
    }

    /// How the moments of a parameter are kept.
    pub(crate) fn of(self, parameter: &Tensor) -> MomentFormat {
        match self {
            Self::F32 => MomentFormat::Plain,
            _ if ffi::numel(parameter) < LEAST => MomentFormat::Plain,
            Self::BFloat16 => MomentFormat::BFloat16,
            Self::EightBit => MomentFormat::EightBit,
        }
    }

    /// Why a parameter cannot have such moments, if it cannot.
    pub(crate) fn problem(
        self,
        parameter: &Tensor,
        masters: MasterWeights,
    ) -> Option<ParameterProblem> {
        let fits = || match masters.of(parameter, 0) {
            Master::Float | Master::Remainder => true,
            Master::None => parameter.kind() == Kind::Float,
            Master::Stochastic { .. } => false,
        };
        // A frozen parameter has none; a step that finds it trained asks again.
        let is_used = self.of(parameter) != MomentFormat::Plain && parameter.requires_grad();
        let is_refused = is_used && (parameter.device() == Device::Mps || !fits());
        is_refused.then_some(ParameterProblem::NoLowBitMoments)
    }
}

impl MomentFormat {
    /// The dtype, if it is not the parameter's, and the shape of the state at a place in the order of PyTorch's keys.
    /// `kind` and `shape` are those of plain ones.
    pub(crate) fn layout(
        self,
        place: usize,
        kind: Option<Kind>,
        shape: StateShape,
    ) -> (Option<Kind>, StateShape) {
        match (self, place) {
            (Self::Plain, _) if shape == StateShape::OfOne => (Some(Kind::Float), shape),
            (Self::Plain, _) => (kind, shape),
            (Self::BFloat16, _) => (Some(Kind::BFloat16), StateShape::Contiguous),
            (Self::EightBit, 0) => (Some(Kind::Int8), StateShape::Contiguous),
            (Self::EightBit, 1) => (Some(Kind::Uint8), StateShape::Contiguous),
            (Self::EightBit, _) => (Some(Kind::Uint8), StateShape::OfBlocks),
        }
    }

    /// The dtype of the number of steps. The dither of a count that stood still would stand still, too.
    pub(crate) fn step_kind(self) -> Kind {
        if self == Self::Plain { Kind::Float } else { Kind::Int64 }
    }

    /// The bytes of the tensors of a parameter's state. An element takes `plain` bytes if it is kept plain.
    pub(crate) fn moment_bytes<'t>(
        self,
        parameter: &Tensor,
        moments: impl Iterator<Item = &'t StateTensor>,
        plain: u64,
    ) -> u64 {
        let count = ffi::numel(parameter) as u64;
        match self {
            Self::Plain => moments
                .map(|moment| ffi::elements(&moment.shape.of(parameter)) as u64)
                .fold(0, |sum, count| sum.saturating_add(count.saturating_mul(plain))),
            Self::BFloat16 => count.saturating_mul(moments.count() as u64 * 2),
            Self::EightBit => count.saturating_mul(2).saturating_add(count.div_ceil(BLOCK as u64)),
        }
    }
}

/// The shape of the exponents of a tensor of so many elements.
pub(crate) fn exponents_shape(count: usize) -> Vec<i64> {
    vec![count.div_ceil(BLOCK) as i64]
}

#[cfg(all(test, tamp_testing))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::optim::{Adam, AdamW, AdjustLr, AmpOptimizer as _, Muon, Step};

    /// Random numbers that no other test draws, from -1 to 1, most of them small.
    fn random(size: &[i64], seed: f64) -> Tensor {
        let places = Tensor::arange(size.iter().product::<i64>(), (Kind::Double, Device::Cpu));
        let wild: Tensor = (places + seed) * 12.9898;
        let wild: Tensor = (wild.sin() * 43_758.545).sin();
        wild.pow_tensor_scalar(5).reshape(size).to_kind(Kind::Float)
    }

    /// Whether a step has a scale, a clip factor and a flag, the fifth of which is set.
    const PARTS: [(bool, bool, bool); 7] = [
        (true, false, true),
        (false, true, false),
        (false, true, true),
        (true, true, true),
        (false, true, true),
        (true, true, false),
        (false, false, false),
    ];

    /// Trains three tensors, one of them transposed, and returns all of their bits and those of their states.
    fn train(
        algorithm: Algorithm,
        (kind, masters): (Kind, MasterWeights),
        moments: MomentDtype,
        other: bool,
    ) -> Vec<Tensor> {
        // More than fit into the scratch memory at once.
        let rows = if masters != MasterWeights::Float && moments == MomentDtype::EightBit {
            353
        } else {
            5
        };
        let start = [random(&[4101], 1.0), random(&[70, 65], 2.0), random(&[90, 33, rows], 3.0)];
        let [first, second, third] = start.map(|tensor| tensor.to_kind(kind));
        let leaves =
            [first, second.tr().contiguous().tr(), third].map(|t| t.set_requires_grad(true));
        let builder = algorithm.master_weights(masters).moments(moments);
        let mut opt = builder.build(&leaves, 0.01).unwrap();
        assert_eq!(opt.assign_group(1, &["1"]).unwrap(), 1);
        opt.set_lr_group(1, 0.003).unwrap();
        opt.set_momentum_group(1, 0.7).unwrap();
        ffi::testing_as_other_device(other);
        let number = |value: f64| Tensor::from(value as f32);
        for (step, (is_scaled, is_clipped, is_flagged)) in PARTS.into_iter().enumerate() {
            opt.zero_grad().unwrap();
            // A parameter without a gradient in some steps has another count of them.
            for (index, leaf) in
                leaves.iter().enumerate().filter(|(index, _)| *index != 2 || step > 1)
            {
                let gradient: Tensor = random(&leaf.size(), (10 * step + index) as f64) * 300.0;
                (leaf * gradient.to_kind(kind)).sum(kind).backward();
            }
            if step == 3 && kind != Kind::Float {
                opt.accumulate_in_f32().unwrap();
            }
            let (scale, clip, found) = (number(48.0), number(0.37), number(f64::from(step == 4)));
            let mut parts = Step::default();
            parts = if is_scaled { parts.with_grad_scale(&scale) } else { parts };
            parts = if is_clipped { parts.with_clip_factor(&clip) } else { parts };
            parts = if is_flagged { parts.with_found_inf(&found) } else { parts };
            opt.update(&parts).unwrap();
        }
        ffi::testing_as_other_device(false);
        let state = opt.state_dict().unwrap().state;
        assert_eq!(state["0"]["step"].int64_value(&[]), 6);
        let tensors = state.into_values().flat_map(|tensors| tensors.into_values());
        leaves
            .into_iter()
            .chain(tensors)
            .map(|t| t.detach().contiguous().view(-1).view_dtype(Kind::Uint8))
            .collect()
    }

    /// Runs the code for GPUs on CPU tensors: libtorch's operations instead of the loops.
    #[test]
    fn other_devices_have_the_bits_of_the_loops() {
        let adam =
            Adam { weight_decay: 0.1, maximize: true, betas: (0.8, 0.95), ..Adam::default() };
        let adamw = AdamW { weight_decay: 0.1, ..AdamW::default() };
        let muon =
            Muon { adamw, adjust_lr_fn: AdjustLr::MatchRmsAdamW, momentum: 0.4, ..Muon::default() };
        for algorithm in [adamw.into(), adam.into(), muon.into()] {
            for weights in [
                (Kind::Float, MasterWeights::None),
                (Kind::BFloat16, MasterWeights::Float),
                (Kind::BFloat16, MasterWeights::Remainder),
                (Kind::Half, MasterWeights::Float),
            ] {
                for moments in [MomentDtype::EightBit, MomentDtype::BFloat16] {
                    if moments.check(&algorithm).is_err() {
                        continue;
                    }
                    let here = train(algorithm, weights, moments, false);
                    let there = train(algorithm, weights, moments, true);
                    for (index, (here, there)) in here.iter().zip(&there).enumerate() {
                        let differ = here.ne_tensor(there).sum(Kind::Int64).int64_value(&[]);
                        assert_eq!(
                            differ, 0,
                            "tensor {index} of {algorithm:?} {weights:?} {moments:?}"
                        );
                    }
                }
            }
        }
    }
}
