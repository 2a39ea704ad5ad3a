//! Gradient scaling: the loss is multiplied by a large number before backward, so that small fp16 gradients do not
//! underflow, and the gradients are divided by it before the optimizer uses them.
//!
//! [`GradScaler`] does this. The module also has its options, its state, the types that its methods return, and
//! [`PerLossScalers`] for several losses.

mod agreement;
mod checkpoint;
mod claim;
mod clip;
pub(crate) mod grad_scaler;
mod iteration;
mod names;
mod outcome;
mod per_loss;
mod record;
mod settings;
mod spikes;
mod step;
mod step_counter;
mod transaction;
mod update;

pub use crate::error::ScalerError;
pub use crate::scale::{GradScalerConfig, GradScalerState};
#[cfg(feature = "distributed")]
pub(crate) use agreement::{Agreement, Averaged};
pub(crate) use grad_scaler::GradScaler;
pub use outcome::StepOutcome;
pub(crate) use outcome::Taken;
pub use per_loss::PerLossScalers;
pub use spikes::{SpikeConfig, SpikeCounts, SpikeDetector};
pub use step_counter::StepCounter;
pub use transaction::Unscaled;
