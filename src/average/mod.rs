//! Averages of a model's weights over the steps of a training, which often evaluate better than the last weights.
//!
//! [`Ema`] is an exponential moving average and [`Swa`] the equal average of stochastic weight averaging. Both are kept
//! in f32 for weights in f32, bf16 and fp16, and follow the steps that were taken: a step that the scaler skips changes
//! neither the weights nor their average, and nothing synchronizes to find that out. A guard puts the averages in the
//! place of the weights for an evaluation, and then the weights back. The counterpart of `torch.optim.swa_utils`.
//!
//! # Examples
//!
//! ```
//! use tch::nn::{self, Module};
//! use tch::{Device, Kind, Tensor};
//! use tch_amp::GradScaler;
//! use tch_amp::average::Ema;
//! use tch_amp::optim::AdamW;
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let net = nn::linear(vs.root(), 4, 1, Default::default());
//! let mut opt = AdamW::default().build(&vs, 1e-2)?;
//! let mut scaler = GradScaler::new(Device::Cpu)?;
//! let mut ema = Ema { decay: 0.99, warmup: true, ..Ema::default() }.build(&vs)?;
//! for _ in 0..10 {
//!     let loss = net.forward(&Tensor::randn([8, 4], (Kind::Float, Device::Cpu))).square().mean(Kind::Float);
//!     opt.zero_grad()?;
//!     scaler.backward(&loss)?;
//!     let outcome = scaler.step(&mut opt)?;
//!     scaler.update()?;
//!     ema.update(&outcome)?;
//! }
//! let averaged = {
//!     let _averages = ema.swap_in()?;
//!     net.forward(&Tensor::ones([1, 4], (Kind::Float, Device::Cpu)))
//! };
//! // The weights of the last step are back.
//! let last = net.forward(&Tensor::ones([1, 4], (Kind::Float, Device::Cpu)));
//! assert_ne!(averaged, last);
//! # Ok::<(), tch_amp::Error>(())
//! ```

mod averaged;
mod batch_norm;
mod progress;

use serde::{Deserialize, Deserializer, Serialize};

use crate::tagged;

pub use averaged::{AveragedWeights, SwappedIn};

/// An exponential moving average: each update moves it by 1 - decay of the way to the weights. The first one copies
/// them. The counterpart of `AveragedModel` with `get_ema_multi_avg_fn`, whose numbers it has on a CPU.
///
/// The average extends over about 1 / (1 - decay) steps, and for as many steps after the start the first weights
/// dominate it. Use `warmup` or `debias` if it is evaluated earlier.
///
/// # Examples
///
/// ```
/// use tch::{Device, nn};
/// use tch_amp::average::Ema;
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let w = vs.root().ones("w", &[1]);
/// let mut ema = Ema { decay: 0.75, ..Ema::default() }.build(&vs)?;
/// for value in [1.0, 5.0] {
///     tch::no_grad(|| w.shallow_clone().fill_(value));
///     ema.advance()?;
/// }
/// assert_eq!(ema.average("w").map(|average| average.double_value(&[0])), Some(2.0));
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Ema {
    /// The share of the average that an update keeps; at least 0 and less than 1. Defaults to 0.999.
    pub decay: f64,
    /// Whether the decay of update t, from 0 on, is at most (1 + t) / (10 + t), as in TensorFlow's
    /// `ExponentialMovingAverage` with `num_updates`. Defaults to `false`.
    pub warmup: bool,
    /// Whether the average is as if it had started with zeros and were divided by the sum of the weights so far,
    /// 1 - decayᵗ, like the averages of Adam (Kingma and Ba, section 3). All steps so far then count by their age
    /// alone. Defaults to `false`.
    pub debias: bool,
    /// Whether floating-point variables that are not trainable, such as the statistics of batch normalization, are
    /// averaged, too. Defaults to `false`: they stay those of the model. Corresponds to `use_buffers` of
    /// `AveragedModel`.
    pub use_buffers: bool,
}

impl Default for Ema {
    fn default() -> Self {
        Self { decay: 0.999, warmup: false, debias: false, use_buffers: false }
    }
}

/// The equal average of all updates, for stochastic weight averaging. The counterpart of `AveragedModel` with
/// `get_swa_multi_avg_fn`, whose numbers it has on a CPU for averages in f32. In f64 PyTorch rounds the weight of an
/// update to f32.
///
/// Update it once an epoch at the end of a training, with a high constant learning rate, and compute the statistics of
/// batch normalization for the average with [`AveragedWeights::update_batch_norm`] before it is used. Source: Izmailov
/// et al., *Averaging Weights Leads to Wider Optima and Better Generalization*, <https://arxiv.org/abs/1803.05407>.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Swa {
    /// Whether floating-point variables that are not trainable are averaged, too. Defaults to `false`.
    pub use_buffers: bool,
}

/// Any kind of average.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "averaging")]
#[non_exhaustive]
pub enum Averaging {
    /// [`Ema`].
    Ema(Ema),
    /// [`Swa`].
    Swa(Swa),
}

impl<'de> Deserialize<'de> for Averaging {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        tagged::read(from, "averaging", tagged::variants!(Ema Swa))
    }
}

impl Averaging {
    pub(super) fn uses_buffers(self) -> bool {
        match self {
            Self::Ema(ema) => ema.use_buffers,
            Self::Swa(swa) => swa.use_buffers,
        }
    }
}
