//! What happens between the backward pass and the next iteration: scaling, steps, averages, schedules.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "a test fails by panicking"
)]

mod accumulation;
mod average;
mod graph;
mod loss_scale;
mod optim;
mod pairs;
mod scaler;
mod schedule;
