//! Gradient scaling: the loss is multiplied by a large number before backward, so that small fp16 gradients do not
//! underflow, and the gradients are divided by it before the optimizer uses them.
//!
//! [`GradScaler`] does this. The module also has its options, its state, the types that its methods return, and
//! [`PerLossScalers`] for several losses.

mod carried;
mod counter;
mod first_steps;
pub(crate) mod grad_scaler;
mod iteration;
mod outcome;
mod per_loss;
mod record;
mod spikes;
mod step;
mod transaction;

pub use crate::error::ScalerError;
pub use crate::scale::{GradScalerConfig, GradScalerState};
pub use counter::StepCounter;
pub(crate) use grad_scaler::GradScaler;
#[cfg(feature = "distributed")]
pub(crate) use grad_scaler::{Agreement, Averaged};
pub use outcome::StepOutcome;
pub(crate) use outcome::noted;
pub(crate) use outcome::{Answer, StepResult};
pub use per_loss::PerLossScalers;
pub use spikes::{SpikeConfig, SpikeCounts, SpikeDetector};
pub use transaction::Unscaled;
