//! Mixed precision on this computer: a small GPT in fp32 and bf16, and a network for handwritten digits in fp32, bf16
//! and fp16. It prints what bf16 gains and writes a report. With `--ranks`, several processes train the digits
//! together.
//!
//! ```text
//! cargo run --example demo -- --gpt-steps 200 --device cpu --epochs 20 --seed 0 --out report.html
//! cargo run --example demo -- --ranks 2
//! ```
//!
//! Read `recipes/src/gpt/train.rs` and `recipes/src/demo/digits/train.rs` first: they have the training steps.
//! Everything else is data, tables and plots.

fn main() -> anyhow::Result<()> {
    recipes::demo::main(std::env::args_os().skip(1))
}
