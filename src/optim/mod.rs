//! Fused optimizers, which step all parameters in one call without synchronizing, and the trait through which a scaler
//! steps an optimizer.
//!
//! The structs of options, such as [`AdamW`], choose the algorithm, and `build` returns an [`Optimizer`], the one type
//! of all of them.
//!
//! ```
//! use tch::{Device, Kind, Tensor, nn};
//! use tch_amp::{GradScaler, optim};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let net = nn::linear(vs.root(), 4, 1, Default::default());
//! let mut opt = optim::AdamW::default().build(&vs, 1e-3)?;
//! let mut scaler = GradScaler::new(Device::Cpu)?;
//! for _ in 0..3 {
//!     let loss = Tensor::randn([8, 4], (Kind::Float, Device::Cpu)).apply(&net).square().mean(Kind::Float);
//!     opt.zero_grad()?;
//!     scaler.backward(&loss)?;
//!     scaler.step_clip_norm(&mut opt, 1.0)?;
//!     scaler.update()?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod algorithms;
mod amp_optimizer;
mod master_weights;
mod masters;
mod optimizer;
pub(crate) mod parameters;
mod rates;
mod saved;
mod shards;
mod state;
mod state_dict;
mod step;

pub use crate::error::{OptimizerError, ParameterProblem};
pub use crate::variables::Parameters;
pub use algorithms::{
    Adafactor, Adagrad, Adam, AdamW, AdjustLr, Algorithm, Lion, Muon, NAdam, ParamGroup, RmsProp,
    Sgd,
};
pub(crate) use algorithms::{EXPONENTS, TorchGroup};
#[cfg(feature = "insight")]
pub(crate) use amp_optimizer::watched;
pub use amp_optimizer::{AmpOptimizer, Step};
pub(crate) use amp_optimizer::{drop_gradients, take_step};
pub use master_weights::MasterWeights;
pub use optimizer::{Optimizer, OptimizerBuilder};
pub use parameters::IntoParameters;
pub(crate) use rates::{DrivesRates, device_numbers};
pub(crate) use saved::Saved;
pub use saved::{OptimizerState, ParamGroupState};
pub(crate) use shards::{Ranks, divided};
pub use state::MomentDtype;
pub(crate) use state::STEP;
pub(crate) use state_dict::CheckedState;
pub use state_dict::MemoryUsage;
