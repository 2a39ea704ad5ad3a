//! What only the simulated GPUs can tell: how often the host waits, how many kernels run, how much memory they take, and
//! what is left when an allocation fails. Without the simulation every test here says that it is skipped.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod allocations;
mod controls;
mod counts;
mod failing_steps;
mod iteration;
mod kernels;
mod launches;
mod looks;
mod planted;
mod skips;
mod steps;
mod syncs;
mod training;
