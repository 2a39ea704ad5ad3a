//! Trains a small GPT over bytes, with what a longer training needs: mixed precision, accumulated and clipped
//! gradients, a warm-up and a cosine schedule, averaged weights, activation checkpointing, several processes,
//! checkpoints that a killed run goes on from with the same numbers, logs, and a report.
//!
//! ```text
//! cargo run --release --example gpt
//! cargo run --release --example gpt -- --help
//! cargo run --release --example gpt -- --ranks 2 --zero
//! ```
//!
//! Read `src/gpt/train.rs` first, which has the training step and what a checkpoint contains.

use std::process::ExitCode;

fn main() -> anyhow::Result<ExitCode> {
    Ok(recipes::gpt::main(std::env::args_os().skip(1))?.exit_code())
}
