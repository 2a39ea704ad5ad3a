//! The modes in which Adam, AdamW and Muon keep their moments.

use tch::{Device, Kind, Tensor};

use crate::error::{Error, ParameterProblem, Result};
use crate::ffi::{self, KeptAs, Master, StateShape};
use crate::optim::{Algorithm, MasterWeights, Muon};

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
/// 4 instead of 8. PyTorch has no counterpart. The guide has a [page](crate::guide::low_bit_states) with the encoding,
/// figures, and when not to use it.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor, nn};
/// use tch_amp::optim::{AdamW, States};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let net = nn::linear(vs.root(), 128, 64, Default::default());
/// let mut opt = AdamW::default().states(States::EightBit).build(&vs, 1e-3)?;
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
pub enum States {
    /// f32, or the parameter's own dtype if it is f64, or half precision without master weights. The default.
    #[default]
    F32,
    /// bf16, rounded up or down by a dither that depends on the step and the index of an element, so that a moment that
    /// changes by less than half of bf16's spacing still follows. The cautious mode.
    BFloat16,
    /// Both moments in 8 bits. `exp_avg_sq` is a float with 5 exponent and 3 fraction bits, relative to the exponent of
    /// its block of 32 elements; `exp_avg` is a sign and a 7-bit logarithm relative to the element's own
    /// `sqrt(exp_avg_sq)`. Both are rounded by the same dither. No update is larger than twice the largest one that exact
    /// AdamW can make with these betas, whatever the gradients are. Not for Muon, which has no second moment.
    EightBit,
}

/// Tensors of fewer elements keep f32 moments.
const LEAST: usize = 4096;

/// The number of elements that share an exponent.
const BLOCK: usize = 32;

impl States {
    /// Refuses an algorithm that has no such moments.
    pub(crate) fn check(self, algorithm: &Algorithm) -> Result<()> {
        if self == Self::F32 {
            return Ok(());
        }
        let problem = match algorithm {
            Algorithm::Muon(_) if self == Self::EightBit => {
                "must be `States::BFloat16` or `States::F32` for Muon: an 8-bit first moment is \
                 stored relative to a second one, which Muon does not have"
                    .to_owned()
            }
            Algorithm::AdamW(config) | Algorithm::Muon(Muon { adamw: config, .. })
                if !config.amsgrad =>
            {
                return Ok(());
            }
            Algorithm::Adam(config) if !config.amsgrad => return Ok(()),
            Algorithm::AdamW(_) | Algorithm::Adam(_) | Algorithm::Muon(_) => {
                "must be `States::F32` with `amsgrad`: the maximum of dithered second moments \
                 could only grow"
                    .to_owned()
            }
            other => {
                let name = other.name();
                format!(
                    "must be `States::F32` for {name}: only Adam, AdamW and Muon have low-bit \
                     moments"
                )
            }
        };
        Err(Error::InvalidArgument { name: "states", problem })
    }

    /// How the moments of a parameter are kept.
    pub(crate) fn of(self, parameter: &Tensor) -> KeptAs {
        match self {
            Self::F32 => KeptAs::Plain,
            _ if ffi::numel(parameter) < LEAST => KeptAs::Plain,
            Self::BFloat16 => KeptAs::BFloat16,
            Self::EightBit => KeptAs::EightBit,
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
        let is_used = self.of(parameter) != KeptAs::Plain && parameter.requires_grad();
        let is_refused = is_used && (parameter.device() == Device::Mps || !fits());
        is_refused.then_some(ParameterProblem::NoLowBitStates)
    }
}

impl KeptAs {
    /// The dtype, if it is not the parameter's, and the shape of the state at a place in the order of PyTorch's keys.
    /// `kind` is the dtype of plain ones.
    pub(crate) fn layout(self, place: usize, kind: Option<Kind>) -> (Option<Kind>, StateShape) {
        match (self, place) {
            (Self::Plain, _) => (kind, StateShape::Like),
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

    /// The bytes of `moments` tensors of `count` elements, each of which takes `plain` bytes if it is kept plain. Those
    /// of 8 bits include the exponents.
    pub(crate) fn moment_bytes(self, count: u64, moments: u64, plain: u64) -> u64 {
        match self {
            Self::Plain => count.saturating_mul(moments * plain),
            Self::BFloat16 => count.saturating_mul(moments * 2),
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
    use crate::optim::{Adam, AdamW, AdjustLr, AmpOptimizer as _, Step};

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
        states: States,
        other: bool,
    ) -> Vec<Tensor> {
        // More than fit into the scratch memory at once.
        let rows =
            if masters != MasterWeights::Float && states == States::EightBit { 353 } else { 5 };
        let start = [random(&[4101], 1.0), random(&[70, 65], 2.0), random(&[90, 33, rows], 3.0)];
        let [first, second, third] = start.map(|tensor| tensor.to_kind(kind));
        let leaves =
            [first, second.tr().contiguous().tr(), third].map(|t| t.set_requires_grad(true));
        let builder = algorithm.master_weights(masters).states(states);
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
                for states in [States::EightBit, States::BFloat16] {
                    if states.check(&algorithm).is_err() {
                        continue;
                    }
                    let here = train(algorithm, weights, states, false);
                    let there = train(algorithm, weights, states, true);
                    for (index, (here, there)) in here.iter().zip(&there).enumerate() {
                        let differ = here.ne_tensor(there).sum(Kind::Int64).int64_value(&[]);
                        assert_eq!(
                            differ, 0,
                            "tensor {index} of {algorithm:?} {weights:?} {states:?}"
                        );
                    }
                }
            }
        }
    }
}
