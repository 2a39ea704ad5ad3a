//! Trains a residual network on images, in one precision or in several that it compares: batch normalization,
//! augmentation, channels-last, and stochastic weight averaging.
//!
//! ```text
//! cargo run --release --example images
//! cargo run --release --example images -- --help
//! cargo run --release --example images -- --compare all
//! cargo run --release --example images -- --ranks 2 --sync-batch-norm
//! ```
//!
//! The images are those of Fashion-MNIST, which Debian has as the package `dataset-fashion-mnist`, or of any folder
//! with files in the format of MNIST; without them, the small digits in `recipes/data`.
//!
//! Read `src/images/train.rs` first, which has the training step, then `batch.rs`, which makes its batches, and
//! `test.rs`, which tests the averaged weights.

use std::process::ExitCode;

fn main() -> anyhow::Result<ExitCode> {
    Ok(recipes::images::main(std::env::args_os().skip(1))?.exit_code())
}
