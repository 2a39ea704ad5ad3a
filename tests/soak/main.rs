//! Many iterations leave the memory of the process as it was.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "a test fails by panicking"
)]

mod function;
mod scaler;
