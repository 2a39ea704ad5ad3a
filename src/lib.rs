// These link definitions come first and take precedence over those at the end of the README, which link to files.
#![doc = include_str!("guide/links.md")]
#![doc = include_str!("guide/pictures.md")]
#![doc = include_str!("../README.md")]
//!
//! ## How the API is organized
//!
//! The root has what most programs begin with: `Amp`, `autocast()` and `Autocast`, `GradScaler`, `Policy`,
//! `function()`, `Error` and `Result`. Every other item is in the module of its subject, and every item has exactly one
//! path. Eight modules have an error type, for instance `scaler::ScalerError`, which a variant of [`Error`] wraps:
//! `Error::Scaler(ScalerError::…)`. The other modules return these errors, too.
//!
//! Options are structs with public fields, as in tch:
//! `GradScalerConfig { growth_interval: 100, ..Default::default() }.build(device)`. A later version may add fields, for
//! which the `..` stands. The error enums are `#[non_exhaustive]`, so that a `match` on an error needs a wildcard arm.
#![deny(unsafe_code)]
// docs.rs sets this, and builds with a nightly compiler: each item of a feature then says which one it needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod accumulation;
mod amp;
pub mod autocast;
pub mod average;
pub mod buffers;
mod capture;
pub mod checkpoint;
mod device;
#[cfg(feature = "distributed")]
pub mod distributed;
mod dtype;
mod error;
#[allow(unsafe_code, reason = "it calls the shim, with a safety comment for each call")]
mod ffi;
pub mod function;
pub mod gradcheck;
pub mod gradients;
pub mod graph;
pub mod guide;
pub mod half;
#[cfg(feature = "insight")]
pub mod insight;
#[cfg(feature = "jit")]
pub mod jit;
pub mod lean;
pub mod loss_scale;
pub mod memory;
pub mod optim;
mod panics;
mod patterns;
pub mod policy;
pub mod precision;
pub mod recompute;
mod scale;
pub mod scaler;
pub mod schedule;
#[allow(unsafe_code, reason = "it declares the shim's functions")]
mod sys;
mod tagged;
pub mod tree;
mod variables;

pub use amp::{Advice, Amp, MixedPrecision};
pub use autocast::region::{Autocast, autocast, try_autocast};
pub use error::{Error, Result};
pub use function::closures::function;
pub use policy::dtypes::Policy;
pub use scaler::grad_scaler::GradScaler;
