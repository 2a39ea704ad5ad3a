// The definitions of links come first and win over those at the end of the README, which lead to files.
#![doc = include_str!("guide/links.md")]
#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod autocast;
mod buffers;
pub mod checkpoint;
mod device;
mod error;
#[allow(unsafe_code, reason = "it calls the shim, and says for each call why that is sound")]
mod ffi;
pub mod function;
mod gradcheck;
mod gradients;
pub mod guide;
pub mod half;
pub mod loss_scale;
mod messages;
mod names;
pub mod optim;
mod panics;
pub mod policy;
mod scaler;
#[allow(unsafe_code, reason = "it declares the shim's functions")]
mod sys;
mod tree;

pub use autocast::{
    Autocast, AutocastGuard, AutocastState, autocast, autocast_dtype, clear_autocast_cache,
    is_autocast_available, is_autocast_enabled, is_cache_enabled,
};
pub use buffers::{BufferSnapshot, check_buffers_finite};
pub use error::{Error, Result};
pub use function::{Function, function};
pub use gradcheck::{GradCheck, gradcheck, gradgradcheck};
pub use gradients::{NonFiniteGradient, Parameters};
pub use loss_scale::{
    DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale, all_finite, select_tree,
};
pub use optim::{AmpOptimizer, Step};
pub use policy::{OptLevel, Policy};
pub use scaler::{
    GradScaler, GradScalerConfig, GradScalerState, PerLossScalers, StepOutcome, Unscaled,
};
pub use tree::Tree;
