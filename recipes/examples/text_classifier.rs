//! Trains a BERT that classifies sentences, from scratch: the counterpart of a fine-tuning with Hugging Face's Trainer,
//! with a WordPiece vocabulary, padding and masks, parameter groups without weight decay, a warm-up, evaluations, and
//! the best weights kept.
//!
//! ```text
//! cargo run --release --example text_classifier
//! cargo run --release --example text_classifier -- --help
//! cargo run --release --example text_classifier -- --ranks 2
//! ```
//!
//! Read `src/text_classifier/train.rs` first, which has the training step, and then `data.rs` and `batch.rs`, which
//! make its batches.

use std::process::ExitCode;

fn main() -> anyhow::Result<ExitCode> {
    Ok(recipes::text_classifier::main(std::env::args_os().skip(1))?.exit_code())
}
