//! Master weights, from which half-precision parameters are updated.
//!
//! A master is made from its parameter by the first step. `renew` makes it anew where the parameter was written to
//! since, which the versions of the tensors show. In a saved state it is f32 in every mode.

mod renew;

use tch::{Kind, Tensor};

use crate::error::{Error, OptimizerError, Result};
use crate::ffi::{self, Master};
use crate::optim::Optimizer;
use crate::optim::state::State;

/// The mode in which an optimizer updates bf16 and fp16 parameters. In every mode but `None` it computes in f32, keeps
/// its state in f32, and converts gradients to f32 before they are unscaled in place, so that unscaling loses no
/// precision. f32 and f64 parameters are not affected.
///
/// Bytes per bf16 parameter under AdamW, with its gradient in bf16, measured on a CPU (a test compares the memory that
/// a process holds with the totals):
///
/// | | parameter | master | moments | gradient | total |
/// |---|---|---|---|---|---|
/// | f32 training, for comparison | 4 | – | 8 | 4 | 16 |
/// | `None` | 2 | – | 4 | 2 | 8 |
/// | `Float` | 2 | 4 | 8 | 2 | 16 |
/// | `Remainder` | 2 | 2 | 8 | 2 | 14 |
/// | `StochasticRounding` | 2 | – | 8 | 2 | 12 |
/// | `Float`, gradients in f32 | 2 | 4 | 8 | 4 | 18 |
/// | `Remainder`, gradients in f32 | 2 | 2 | 8 | 4 | 16 |
/// | `StochasticRounding`, gradients in f32 | 2 | – | 8 | 4 | 14 |
/// | `Float` with amsgrad | 2 | 4 | 12 | 2 | 20 |
/// | `Float`, SGD with momentum | 2 | 4 | 4 | 2 | 12 |
///
/// Gradients are f32 after [`accumulate_in_f32`](Optimizer::accumulate_in_f32), and from the first time that a scaler
/// unscales them before the step, which it does for `unscale_`, for a transaction, and to compute a norm. On a CPU a
/// step needs no further memory; the conversion to f32 holds two copies of one gradient at a time.
///
/// On a GPU the step works on many small parameters, or a part of a large one, at a time: at most 2^20 elements, where
/// the size of each parameter is rounded up to a multiple of 64. This needs scratch memory on each GPU while the step
/// runs, and a larger model needs no more. All of it is allocated before anything changes, so a step that runs out of
/// memory changes nothing. The number of kernel launches does not depend on the number of parameters, except where
/// libtorch itself splits a list. The counts are for one parameter group on simulated GPUs:
///
/// | | scratch memory | launches | for each further 2^20 elements |
/// |---|---|---|---|
/// | `None` | – | at most 5 | – |
/// | `Float` | 4 MiB, or none if gradients are f32 | at most 6 | 2, or none |
/// | `Remainder` | 9 MiB | at most 12 | 9 |
/// | `StochasticRounding` | 16 MiB | at most 46 | 28 |
///
/// RMSprop and Lion, for which libtorch has no fused kernels, take up to 25 launches more, up to 23 more for each
/// further 2^20 elements, and in all modes up to 24 MiB more scratch memory, or 48 MiB for f64 parameters. Muon takes as
/// many for the matrices whose learning rates are adjusted alike, and in addition 26 launches for each matrix, 2 bytes
/// for each number of all matrices, and up to 24 for each number of the largest one.
///
/// A gradient whose memory layout differs from its parameter's is copied in addition. While gradients on GPUs are
/// converted to f32, all of them exist twice.
///
/// # Examples
///
/// ```
/// use tch::{Kind, Tensor};
/// use tch_amp::optim::{MasterWeights, Sgd};
///
/// let train = |masters| -> tch_amp::Result<f64> {
///     let w = Tensor::from_slice(&[1f32]).to_kind(Kind::BFloat16).set_requires_grad(true);
///     let lr = 1.0 / 1024.0;
///     let mut opt = Sgd::default().master_weights(masters).build(&[w.shallow_clone()], lr)?;
///     for _ in 0..64 {
///         opt.backward_step(&w.sum(Kind::Float))?;
///     }
///     Ok(w.double_value(&[0]))
/// };
/// assert_eq!(train(MasterWeights::None)?, 1.0);
/// assert_eq!(train(MasterWeights::Remainder)?, 0.9375);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MasterWeights {
    /// No master weights: the part of an update that the parameter's dtype cannot hold is lost, as with PyTorch's
    /// optimizers. bf16 has 8 significant bits, so an update of less than 1/512 of a weight is always lost, and one of
    /// less than 1/256 often is. In fp16, Adam's `exp_avg_sq` stays zero for gradients below 0.005 with the default
    /// betas, which makes the updates far too large.
    #[default]
    None,
    /// An f32 copy of each parameter. Corresponds to `master_weights=True` of apex's `FusedAdam`, and to `AdamFP16` of
    /// labml_nn.
    Float,
    /// The 16 bits by which an f32 is longer than the bf16 parameter: the same master weights as `Float` in half the
    /// memory. The parameter is the master rounded to nearest, with ties away from zero (elsewhere, ties go to even).
    /// fp16 parameters have f32 copies. Corresponds to `store_param_remainders` of TransformerEngine's `FusedAdam`.
    Remainder,
    /// No copy: bf16 results are rounded up or down at random, with probabilities that make the result right on
    /// average, so that small updates add up, with noise. The variance of one rounding is at most a quarter of the
    /// squared distance of two neighbouring bf16 values, and so at most 2^-16 of the squared weight. The random numbers
    /// are reproducible: they depend on the seed, the index of the parameter and its step count. fp16 parameters have
    /// f32 copies. Corresponds to `bf16_stochastic_round=True` in torchao.
    StochasticRounding {
        /// The seed of the random numbers. Runs with the same seed are the same. From 2^24 steps on, the count that is
        /// saved as `step` skips the numbers that f32 does not have.
        seed: u64,
    },
}

/// The key of a master weight in a state, as in TransformerEngine. It is f32 in every mode.
pub(crate) const MASTER: &str = "master_param";

impl MasterWeights {
    /// The master weight of the parameter with this index.
    pub(crate) fn of(self, parameter: &Tensor, place: usize) -> Master {
        if self == Self::None {
            // Reading a dtype from tch is a call into C++ for each parameter.
            return Master::None;
        }
        match (self, parameter.kind()) {
            (Self::Remainder, Kind::BFloat16) => Master::Remainder,
            (Self::StochasticRounding { seed }, Kind::BFloat16) => {
                Master::Stochastic { seed: spread(seed ^ spread(place as u64)) }
            }
            (_, Kind::BFloat16 | Kind::Half) => Master::Float,
            _ => Master::None,
        }
    }
}

impl Master {
    /// The dtype of the tensor that is kept, if there is one.
    pub(crate) fn kind(self) -> Option<Kind> {
        match self {
            Self::Float => Some(Kind::Float),
            Self::Remainder => Some(Kind::Int16),
            Self::None | Self::Stochastic { .. } => None,
        }
    }

    /// The dtype of the moments; `None` for the parameter's.
    pub(crate) fn state_kind(self) -> Option<Kind> {
        (self != Self::None).then_some(Kind::Float)
    }

    /// The master weight as f32, or as f64 beside a parameter that is f64 by now.
    pub(crate) fn numbers(self, parameter: &Tensor, state: &State) -> Result<Option<Tensor>> {
        let Some(kept) = &state.master else { return Ok(None) };
        Ok(Some(match (self, &state.loaded) {
            (Self::Remainder, Some(loaded)) => loaded.shallow_clone(),
            (Self::Remainder, None) if kept.kind() == Kind::Int16 => {
                ffi::master_join(parameter, kept)?
            }
            (Self::Float, _) if kept.kind() == Kind::Float => kept.shallow_clone(),
            // The parameter has another dtype than when the master was made.
            _ => ffi::master_numbers(kept, parameter)?,
        }))
    }
}

/// Spreads neighbouring seeds over all numbers (SplitMix64; Steele, Lea and Flood 2014).
fn spread(seed: u64) -> u64 {
    let x = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Optimizer {
    /// Returns the mode in which half-precision parameters are updated.
    pub fn master_weights(&self) -> MasterWeights {
        self.masters
    }

    /// Returns the f32 master weight of the parameter at `index`; `None` if it has none, or before its first step,
    /// which makes the master from the parameter.
    ///
    /// With [`MasterWeights::Float`] it is the optimizer's own tensor: values that are written to it are used in the
    /// next step. The exception is the time between loading a state and the next step, which makes a master anew if it
    /// does not round to its parameter. [`state_dict`](Self::state_dict) has the masters by name, as `master_param`.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if libtorch fails.
    pub fn master_weight(&self, index: usize) -> Result<Option<Tensor>> {
        let Some((slot, parameter)) = self.slots.get(index).zip(self.parameters.get(index)) else {
            return Ok(None);
        };
        let master = self.masters.of(parameter, index);
        master.numbers(parameter, &slot.state)
    }

    /// Discards the master weights, so that the next step makes them anew from the parameters. This is not needed after
    /// parameters were written to from outside, for instance by loading them: the optimizer detects that and makes the
    /// masters of the elements that changed anew (with [`MasterWeights::Remainder`] those of the whole parameter).
    pub fn reset_master_weights(&mut self) {
        for slot in &mut self.slots {
            (slot.state.master, slot.state.loaded) = (None, None);
        }
    }

    /// Makes autograd accumulate the gradients of half-precision parameters in f32 from now on, also over the
    /// micro-batches of a step; existing gradients are converted. Costs 4 bytes per parameter instead of 2. f32
    /// parameters are not affected. It is not part of a saved state: call it again after a restart. An optimizer without
    /// master weights ends it for its parameters when it is built, and by its [`zero_grad`](Self::zero_grad).
    /// Corresponds to setting `grad_dtype` of the parameters in PyTorch, and to `accumulate_allreduce_grads_in_fp32` in
    /// Megatron-LM.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoMasterWeights`] if there are half-precision parameters but no master weights;
    /// [`Error::Torch`] if libtorch fails.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Kind, Tensor};
    /// use tch_amp::optim::{MasterWeights, Sgd};
    ///
    /// let w = Tensor::from_slice(&[1f32]).to_kind(Kind::BFloat16).set_requires_grad(true);
    /// let mut opt = Sgd::default().master_weights(MasterWeights::Float).build(&[w.shallow_clone()], 0.1)?;
    /// opt.accumulate_in_f32()?;
    /// for _ in 0..300 {
    ///     w.sum(Kind::Float).backward();
    /// }
    /// // In bf16 the sum would stay at 256.
    /// assert_eq!(w.grad().double_value(&[0]), 300.0);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn accumulate_in_f32(&mut self) -> Result<()> {
        self.take_added()?;
        let half = |w: &Tensor| matches!(w.f_kind(), Ok(Kind::Half | Kind::BFloat16));
        if self.masters == MasterWeights::None {
            let needed = self.parameters.iter().any(half);
            return if needed {
                Err(Error::Optimizer(OptimizerError::NoMasterWeights))
            } else {
                Ok(())
            };
        }
        ffi::gradients_widen(&self.parameters)?;
        self.f32_gradients = true;
        Ok(())
    }
}

#[cfg(all(test, tamp_testing))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use tch::Device;

    use super::*;
    use crate::optim::{Adagrad, AdamW, AdjustLr, Algorithm, Lion, Muon, RmsProp, Sgd};

    fn bits(tensor: &Tensor) -> Vec<i64> {
        let kind = if tensor.kind() == Kind::Float { Kind::Int } else { Kind::Int16 };
        let words = tensor.detach().contiguous().view_dtype(kind).to_kind(Kind::Int64).view(-1);
        Vec::try_from(words).unwrap()
    }

    /// Trains two tensors and returns their bits and those of the whole state.
    fn train(
        algorithm: Algorithm,
        kind: Kind,
        masters: MasterWeights,
        other: bool,
    ) -> Vec<Vec<i64>> {
        // Does not use tch's generator, from which other tests draw at the same time.
        let drawn = std::cell::Cell::new(0.0);
        let random = |size: &[i64]| {
            drawn.set(drawn.get() + 1.0);
            let places = Tensor::arange(size.iter().product::<i64>(), (Kind::Double, Device::Cpu));
            let wild: Tensor = (places + drawn.get()) * 12.9898;
            (wild.sin() * 43_758.545).sin().reshape(size).to_kind(kind)
        };
        let leaves = [random(&[70]), random(&[3, 5])].map(|t| t.set_requires_grad(true));
        let mut opt = algorithm.master_weights(masters).build(&leaves, 0.01).unwrap();
        ffi::testing_as_other_device(other);
        for step in 0..3 {
            opt.zero_grad().unwrap();
            for leaf in &leaves {
                (leaf * random(&leaf.size())).sum(kind).backward();
            }
            if step == 1 {
                opt.accumulate_in_f32().unwrap();
            }
            opt.step().unwrap();
        }
        ffi::testing_as_other_device(false);
        let state = opt.state_dict().unwrap().state;
        let tensors = state.values().flat_map(|tensors| tensors.values());
        leaves.iter().chain(tensors).map(bits).collect()
    }

    /// Runs the code for GPUs on CPU tensors: libtorch's own operations instead of the loops.
    #[test]
    fn other_devices_compute_the_same() {
        let algorithms: [Algorithm; 6] = [
            AdamW { amsgrad: true, ..AdamW::default() }.into(),
            Sgd { momentum: 0.9, ..Sgd::default() }.into(),
            Adagrad::default().into(),
            RmsProp { centered: true, momentum: 0.9, ..RmsProp::default() }.into(),
            Lion { weight_decay: 0.1, ..Lion::default() }.into(),
            Muon { adjust_lr_fn: AdjustLr::MatchRmsAdamW, ..Muon::default() }.into(),
        ];
        for algorithm in algorithms {
            for (kind, masters) in [
                (Kind::Half, MasterWeights::Float),
                (Kind::BFloat16, MasterWeights::Float),
                (Kind::BFloat16, MasterWeights::Remainder),
                (Kind::BFloat16, MasterWeights::StochasticRounding { seed: 9 }),
            ] {
                let here = train(algorithm, kind, masters, false);
                let there = train(algorithm, kind, masters, true);
                assert_eq!(here, there, "{algorithm:?} {kind:?} {masters:?}");
            }
        }
    }
}
