//! Autocast regions, and what is computed in them: operators, custom functions, policies.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "a test fails by panicking"
)]

mod autocast;
mod buffers;
mod function;
mod gradcheck;
mod half;
mod jit;
mod lean;
mod policy;
mod recompute;
mod saved_tensors;
mod tree;

/// Runs a closure when it is dropped.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
