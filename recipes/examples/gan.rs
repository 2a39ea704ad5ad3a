//! A generative adversarial network that learns eight Gaussians on a ring: two networks, each with an optimizer, and a
//! scale for each loss.
//!
//! ```text
//! cargo run --release --example gan
//! cargo run --release --example gan -- --help
//! cargo run --release --example gan -- --amp fp16
//! ```
//!
//! The generator has two losses that share the graph of the fakes: the verdict of the discriminator, whose gradients
//! pass through two networks, and the distance between the moments of fakes and data. Each is multiplied by a scale of
//! its own.
//!
//! Read `src/gan/train.rs` first, which has the training step and what a checkpoint contains.

use std::process::ExitCode;

fn main() -> anyhow::Result<ExitCode> {
    Ok(recipes::gan::main(std::env::args_os().skip(1))?.exit_code())
}
