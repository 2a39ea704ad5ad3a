//! Files: checkpoints, and public functions with every kind of tensor.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "a test fails by panicking"
)]

mod checkpoint;
mod tensors;
mod threads;
