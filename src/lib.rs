#![doc = include_str!("../README.md")]

mod autocast;
mod buffers;
pub mod checkpoint;
mod device;
mod error;
mod ffi;
pub mod function;
mod gradcheck;
mod messages;
mod names;
pub mod optim;
mod panics;
mod scaler;
mod sys;

pub use autocast::{
    Autocast, AutocastGuard, AutocastState, autocast, autocast_dtype, clear_autocast_cache,
    is_autocast_available, is_autocast_enabled, is_cache_enabled,
};
pub use buffers::{BufferSnapshot, check_buffers_finite};
pub use error::{Error, Result};
pub use function::{Function, function};
pub use gradcheck::{GradCheck, gradcheck, gradgradcheck};
pub use optim::{AmpOptimizer, AmpScaling, Parameters, ScaledStep};
pub use scaler::{GradScaler, GradScalerConfig, GradScalerState, StepOutcome, Unscaled};
