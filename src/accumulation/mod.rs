//! Gradient accumulation in which every token or sample counts the same: several backward passes for one step.
//!
//! The mean loss of each micro-batch is weighted by its number of tokens or samples, so that the sum of the gradients
//! is that of the concatenated batch. Dividing each loss by the number of micro-batches is right only if all of them
//! have the same number of tokens, and the last one of an epoch, or a batch with padding, does not.
//!
//! # Examples
//!
//! ```
//! use tch::nn::{self, Module};
//! use tch::{Device, Kind, Reduction, Tensor};
//! use tch_amp::accumulation::Accumulation;
//! use tch_amp::optim::Sgd;
//! use tch_amp::{GradScaler, autocast};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let net = nn::linear(vs.root(), 4, 1, Default::default());
//! let mut opt = Sgd::default().build(&vs, 0.1)?;
//! let mut scaler = GradScaler::new(Device::Cpu)?;
//! let batches = [5, 5, 2].map(|size| Tensor::randn([size, 4], (Kind::Float, Device::Cpu)));
//!
//! let mut window = Accumulation::of_weights(batches.each_ref().map(|xs| xs.size()[0] as f64))?;
//! for xs in &batches {
//!     let ys = xs.sum_dim_intlist(1, true, Kind::Float);
//!     let loss = autocast(Device::Cpu, || net.forward(xs).mse_loss(&ys, Reduction::Mean))?;
//!     window.backward(&mut scaler, &loss)?;
//! }
//! scaler.step(&mut opt)?;
//! scaler.update()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod window;

pub use window::Accumulation;
