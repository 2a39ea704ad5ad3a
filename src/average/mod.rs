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
mod options;
mod progress;
mod swapped;

pub use averaged::AveragedWeights;
pub use options::{Averaging, Ema, Swa};
pub use swapped::SwappedIn;
