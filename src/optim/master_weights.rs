//! The modes in which half-precision parameters are updated, and the master weight that a mode keeps of a parameter.

use tch::{Kind, Tensor};

use crate::ffi::Master;
#[cfg(doc)]
use crate::optim::Optimizer;

/// The mode in which an optimizer updates bf16 and fp16 parameters. In every mode but `None` it computes in f32, keeps
/// its state in f32 (unless [`MomentDtype`](crate::optim::MomentDtype) says otherwise), and converts gradients to f32
/// before they are unscaled in place, so that unscaling loses no precision. f32 and f64 parameters are not affected.
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
/// | `Remainder`, [`MomentDtype::BFloat16`](crate::optim::MomentDtype) | 2 | 2 | 4 | 2 | 10 |
/// | `Remainder`, [`MomentDtype::EightBit`](crate::optim::MomentDtype) | 2 | 2 | 2.03 | 2 | 8.03 |
///
/// Gradients are f32 after [`accumulate_in_f32`](Optimizer::accumulate_in_f32), and from the first time that a scaler
/// unscales them before the step, which it does for `unscale_`, for a transaction, and to compute a norm. On a CPU a
/// step needs no further memory; the conversion to f32 holds two copies of one gradient at a time.
///
/// On a GPU the step works on many small parameters, or a part of a large one, at a time: at most 2^20 elements, where
/// the size of each parameter is rounded up to a multiple of 256. This needs scratch memory on each GPU while the step
/// runs, and a larger model needs no more. All of it is allocated before anything changes, so a step that runs out of
/// memory changes nothing. The number of kernel launches depends on the number of parameters only because one of
/// libtorch's kernels takes no more than 30 to 110 tensors with CUDA 12: on an H100 a step of Adam in f32 takes 2
/// launches for 4 parameters, 3 for 40 and 16 for 400. The counts are for one parameter group of few parameters on
/// simulated GPUs:
///
/// | | scratch memory | launches | for each further 2^20 elements |
/// |---|---|---|---|
/// | `None` | – | at most 5 | – |
/// | `Float` | 4 MiB, or none if gradients are f32 | at most 6 | 2, or none |
/// | `Remainder` | 9 MiB | at most 12 | 9 |
/// | `StochasticRounding` | 16 MiB | at most 46 | 28 |
///
/// RMSprop and Lion, for which libtorch has no fused kernels, take up to 14 launches more, up to 16 more for each
/// further 2^20 elements, and in all modes up to 24 MiB more scratch memory, or 48 MiB for f64 parameters. Muon takes
/// as many for the matrices whose learning rates are adjusted alike, and in addition 18 launches for each 2^20 numbers
/// of matrices, and 17 for each matrix, or 19 if it has more rows than columns. It needs 2 bytes for each number of all
/// matrices, and up to 10 (18 in f64) for each of 2^20 numbers or of the largest matrix.
///
/// With low-bit moments ([`MomentDtype`](crate::optim::MomentDtype)) a step takes up to 132 launches, up to 120 more
/// for each further 2^20 elements, and up to 51 MiB of scratch memory. With a low-bit momentum, Muon takes up to 46
/// launches for the matrices whose learning rates are adjusted alike, up to 37 more for each further 2^20 elements, and
/// those of the orthogonalization. Parameters that are not contiguous are copied in addition.
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
}

/// Spreads neighbouring seeds over all numbers (SplitMix64; Steele, Lea and Flood 2014).
fn spread(seed: u64) -> u64 {
    let x = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
