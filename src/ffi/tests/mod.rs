//! The functions of the shim where no public call reaches them as such.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test fails by panicking")]

#[cfg(tamp_testing)]
mod border;
#[cfg(tamp_testing)]
mod failures;
mod gradients;
#[cfg(tamp_testing)]
mod inference;
#[cfg(tamp_testing)]
mod sanitized;
