//! What only the simulated GPUs can show: how often the host synchronizes, how many kernels are launched, how much
//! memory is used, and the state after an allocation has failed. Without the simulation, every test here prints that it
//! is skipped.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod accumulation;
mod allocations;
mod average;
mod controls;
mod counts;
mod distributed;
mod failing_steps;
mod health;
mod insight;
mod iteration;
mod iterations;
mod kernels;
mod launches;
mod lean;
mod looks;
mod low_bit;
mod memory;
mod muon;
mod operators;
mod plans;
mod planted;
mod recipes;
mod recompute;
mod saved_tensors;
mod saves;
mod schedule;
mod skips;
mod spanning;
mod spikes;
mod steps;
mod syncs;
mod training;
mod waits;
