//! Trains a small convolutional network on real handwritten digits in fp32, bf16 and fp16, and compares the runs.
//!
//! ```text
//! cargo run --example digits -- --device cpu --epochs 20 --seed 0 --out report.html
//! ```
//!
//! Read `train.rs` first: it holds the training step. Everything else is data, tables and plots.

#[path = "mod.rs"]
mod digits;

use anyhow::{Context, Result};
use digits::options::{Options, USAGE};
use digits::{computer::Facts, report, table};

fn main() -> Result<()> {
    let Some(options) = Options::parse(std::env::args().skip(1))? else {
        println!("{USAGE}");
        return Ok(());
    };
    let results = digits::run(&options, true)?;
    println!("{}", table::Table::new(&results));
    println!("{}", table::verdict(&results));

    let html = report::html(&results, &Facts::gather(&options)?);
    let path = options.report_path();
    std::fs::write(&path, html).with_context(|| format!("cannot write {}", path.display()))?;
    println!("Report: {}", path.display());
    Ok(())
}
