//! Master weights: what parameters in half precision are updated from.

mod renew;

use tch::{Kind, Tensor};

use crate::error::{Error, OptimizerError, Result};
use crate::ffi::{self, Master};
use crate::optim::Optimizer;
use crate::optim::state::State;

/// What an optimizer updates bf16 and fp16 parameters from. In every mode but `None` it computes in f32, its state is
/// f32, and gradients become f32 before they are unscaled, so that unscaling loses nothing. f32 and f64 parameters need
/// none of it and are updated as they are.
///
/// Bytes for each bf16 parameter under AdamW, with its gradient in bf16, as measured on a CPU (a test compares the
/// memory that a process holds with the sums):
///
/// | | parameter | master | moments | gradient | in all |
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
/// Gradients are f32 after [`accumulate_in_f32`](Optimizer::accumulate_in_f32), and from the first time on that a
/// scaler unscales them before the step: for `unscale_`, a transaction, or a norm. On a CPU a step needs no memory
/// beside that; while they become f32, one tensor's gradient is there twice.
///
/// On a GPU many small parameters, or a part of a large one, are updated at a time: at most 2^20 numbers, where each
/// parameter counts as a multiple of 64. While a step runs these need scratch memory on each GPU, and a larger model
/// needs no more. All of it is allocated before anything changes, so a step that runs out of memory changes nothing. The
/// number of launches does not depend on the number of parameters, except where libtorch splits a list of its own
/// accord. The counts are those of one parameter group on simulated GPUs:
///
/// | | scratch memory | launches | for each further 2^20 numbers |
/// |---|---|---|---|
/// | `None` | – | at most 5 | – |
/// | `Float` | 4 MiB, or none if gradients are f32 | at most 6 | 2, or none |
/// | `Remainder` | 9 MiB | at most 12 | 9 |
/// | `StochasticRounding` | 18 MiB | at most 46 | 28 |
///
/// A gradient that lies in memory in another order than its parameter is copied besides. While gradients on GPUs become
/// f32, all of them are there twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MasterWeights {
    /// None: what a parameter's dtype cannot hold of an update is lost, as with PyTorch's optimizers. bf16 has 8 bits,
    /// so that updates of less than a 256th of a weight vanish. In fp16 `exp_avg_sq` of Adam stays zero for gradients
    /// below 0.005, and its updates are far too large then.
    #[default]
    None,
    /// An f32 copy of each. As `master_weights=True` of apex's `FusedAdam`, and `AdamFP16` of labml_nn.
    Float,
    /// The 16 bits that a bf16 lacks of an f32, beside it: the same numbers as `Float` in half the memory. The
    /// parameter is the master rounded to nearest, the larger one of two that are equally near (elsewhere it is the
    /// even one). fp16 parameters have f32 copies. As `store_param_remainders` of TransformerEngine's `FusedAdam`.
    Remainder,
    /// No copy: bf16 results are rounded up or down at random, with probabilities that make the rounding right on
    /// average. The variance of a rounding is at most a quarter of the squared distance of two neighbouring bf16, about
    /// 2^-18 of the squared weight, so that small updates add up, with noise. Reproducible: the random numbers follow
    /// from the seed, the parameter's place and its step. fp16 parameters have f32 copies. As
    /// `bf16_stochastic_round=True` in torchao.
    StochasticRounding {
        /// Runs with the same seed are the same.
        seed: u64,
    },
}

/// The name of a master in a state, as f32 in every mode. TransformerEngine's.
pub(crate) const MASTER: &str = "master_param";

impl MasterWeights {
    /// What the parameter in this place has.
    pub(crate) fn of(self, parameter: &Tensor, place: usize) -> Master {
        if self == Self::None {
            // Asking tch for a dtype is a call across the border for each parameter.
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
    /// The dtype of the tensor that is kept, if one is.
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

    /// What is kept, as f32.
    pub(crate) fn numbers(self, parameter: &Tensor, state: &State) -> Result<Option<Tensor>> {
        match (&state.loaded, &state.master) {
            (Some(loaded), _) => Ok(Some(loaded.shallow_clone())),
            (None, Some(kept)) if self == Self::Remainder => {
                ffi::master_join(parameter, kept).map(Some)
            }
            (None, kept) => Ok(kept.as_ref().map(Tensor::shallow_clone)),
        }
    }
}

/// Makes seeds that are near each other far apart (SplitMix64; Steele, Lea and Flood 2014).
fn spread(seed: u64) -> u64 {
    let x = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Optimizer {
    /// Returns what half parameters are updated from.
    pub fn master_weights(&self) -> MasterWeights {
        self.masters
    }

    /// Returns the f32 number behind each element of the parameter at `index`; `None` where there is none, or before
    /// its first step, which makes it from the parameter as it is then. With [`MasterWeights::Float`] it is the
    /// optimizer's own tensor: what is written there counts in the next step, but not between a load and the step after
    /// it, in which a master that differs from its parameter is made anew. By names they are in
    /// [`state_dict`](Self::state_dict), as `master_param`.
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

    /// Forgets the masters, to be made anew from the parameters in the next step. Not needed where somebody else has
    /// written to parameters, as loading them does: that is noticed, and the masters of those numbers that changed are
    /// made anew (with [`MasterWeights::Remainder`] those of the whole parameter).
    pub fn reset_master_weights(&mut self) {
        for slot in &mut self.slots {
            (slot.state.master, slot.state.loaded) = (None, None);
        }
    }

    /// Makes autograd add up the gradients of half parameters in f32 from now on, over the micro-batches of a step too;
    /// those that are there are converted. Costs 4 bytes for each parameter instead of 2, and does nothing to f32
    /// parameters. No part of a saved state: call it again after a restart. As setting `grad_dtype` of the parameters in
    /// PyTorch, or `accumulate_allreduce_grads_in_fp32` in Megatron-LM.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoMasterWeights`] for half parameters without; [`Error::Torch`] if libtorch fails.
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
    use crate::optim::{Adagrad, AdamW, Algorithm, Sgd};

    fn bits(tensor: &Tensor) -> Vec<i64> {
        let kind = if tensor.kind() == Kind::Float { Kind::Int } else { Kind::Int16 };
        let words = tensor.detach().contiguous().view_dtype(kind).to_kind(Kind::Int64).view(-1);
        Vec::try_from(words).unwrap()
    }

    /// Trains two tensors and tells their bits and those of all state.
    fn train(
        algorithm: Algorithm,
        kind: Kind,
        masters: MasterWeights,
        other: bool,
    ) -> Vec<Vec<i64>> {
        // Not of the generator, which other tests draw from meanwhile.
        let drawn = std::cell::Cell::new(0.0);
        let random = |size: &[i64]| {
            drawn.set(drawn.get() + 1.0);
            let places = Tensor::arange(size.iter().product::<i64>(), (Kind::Double, Device::Cpu));
            let wild: Tensor = (places + drawn.get()) * 12.9898;
            (wild.sin() * 43_758.545).sin().reshape(size).to_kind(kind)
        };
        let leaves = [random(&[70]), random(&[3, 5])].map(|t| t.set_requires_grad(true));
        let mut opt = Optimizer::new(algorithm, &leaves, 0.01, masters).unwrap();
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

    /// What runs on a GPU, with the tensors of a CPU: libtorch's own operations instead of the loops.
    #[test]
    fn other_devices_compute_the_same() {
        let algorithms: [Algorithm; 3] = [
            AdamW { amsgrad: true, ..AdamW::default() }.into(),
            Sgd { momentum: 0.9, ..Sgd::default() }.into(),
            Adagrad::default().into(),
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
