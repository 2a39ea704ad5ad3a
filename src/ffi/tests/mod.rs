//! Tests of the shim's functions that cannot be made through the public interface.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test fails by panicking")]

#[cfg(tamp_testing)]
mod border;
#[cfg(feature = "insight")]
mod emulation;
#[cfg(tamp_testing)]
mod failures;
mod gradients;
#[cfg(tamp_testing)]
mod inference;
#[cfg(tamp_testing)]
mod sanitized;
#[cfg(tamp_testing)]
mod saved_tensors;
