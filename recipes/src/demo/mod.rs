//! The demo: a small GPT and a network for handwritten digits, in several precisions.

pub mod digits;
pub mod gpt;
mod process;
mod speed;

use crate::{Ranks, print, writable};
use anyhow::{Context, Result, ensure};
use digits::computer::Facts;
use digits::data::BATCH;
use digits::options::{Options, USAGE};
use digits::{report, table};
use gpt::Comparison;
use gpt::train::{Options as GptOptions, Tuning};
use std::ffi::OsString;
use tch::{Device, Kind};
use tch_amp::Amp;
use tch_amp::memory::keep_freed_memory;

/// How many steps bf16 takes where it is slow: enough to tell how slow.
const FEW: usize = 5;

/// How many bytes the GPT writes.
const SAMPLE: usize = 300;

/// Runs the program with these arguments.
pub fn main(args: impl IntoIterator<Item: Into<OsString>>) -> Result<()> {
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    if args.first().is_some_and(|arg| arg == process::ARGUMENT) {
        return gpt_run(&args[1..]);
    }
    let Some(options) = Options::parse(args)? else {
        print(USAGE);
        return Ok(());
    };
    let device = options.device()?;
    let steps = match options.ranks {
        Some(_) => {
            let steps = options.gpt_steps.unwrap_or(0);
            ensure!(steps == 0, "--ranks trains the digits only, without --gpt-steps");
            0
        }
        None => options.gpt_steps.unwrap_or(200),
    };
    let Some(ranks) = Ranks::start(options.ranks)? else { return Ok(()) };
    ranks.on_first(|| writable::check_file(&options.report_path()).context("--out"))?;
    let gpt = (steps > 0).then(|| compare(steps, device, options.seed)).transpose()?;
    if let Some(gpt) = &gpt {
        print(format_args!("\n{}\n{}\n", gpt::report::table(gpt), gpt::report::verdict(gpt)));
    }

    let results = digits::run(&options, true, &ranks)?;
    if !ranks.is_first() {
        return Ok(());
    }
    print(table::table(&results));
    print(table::verdict(&results));
    if options.ranks.is_some() {
        print(together(&ranks));
    }

    let path = options.report_path();
    report::page(&results, &Facts::gather(&options)?, gpt.as_ref()).write(&path)?;
    if let Some(gpt) = &gpt {
        for (name, gain) in report::gains(&results, gpt) {
            print(format_args!("{name}: {gain}"));
        }
        if let Some(incident) = &gpt.bf16.incident {
            print(format_args!("\n{}\n\n{incident}\n", gpt::report::BAD_BATCH));
        }
    }
    print(format_args!("Report: {}", path.display()));
    Ok(())
}

/// Trains in fp32 and in bf16, each in a process of its own, and in bf16 with the plan that is fastest. Where bf16 is
/// slow, that is said before, and it takes a few steps only, without the plan, which is measured all the same.
fn compare(steps: usize, device: Device, seed: i64) -> Result<Comparison> {
    let advice = Amp::advice(device)?;
    print(format_args!("Advice for this device: {advice}."));
    let bf16 = advice.speedups.iter().find(|(dtype, _)| *dtype == Kind::BFloat16);
    let is_slow = bf16.is_none_or(|(_, [_, _, high])| *high * speed::SAME < 1.0);
    let (tuning, taken, fp32_sample) = match is_slow {
        true => (Tuning::After, steps.min(FEW), SAMPLE),
        false => (Tuning::Before, steps, 0),
    };
    if taken < steps {
        print(format_args!("bf16 is slow here, so it takes only {taken} of the {steps} steps."));
    }
    let run = |precision, tuning, taken, sample| {
        process::run(GptOptions { precision, tuning, steps, taken, seed, sample }, device)
    };
    Ok(Comparison {
        advice: advice.to_string(),
        is_slow,
        fp32: run(Amp::Off, Tuning::Never, steps, fp32_sample)?,
        bf16: run(Amp::Bf16, tuning, taken, SAMPLE - fp32_sample)?,
    })
}

/// One run in this process: prints it as JSON.
fn gpt_run(args: &[OsString]) -> Result<()> {
    let args: Vec<_> = args.iter().filter_map(|arg| arg.to_str()).collect();
    let [options, device] = args[..] else {
        anyhow::bail!("{} takes options and a device", process::ARGUMENT);
    };
    let device = if device == "cpu" { Device::Cpu } else { Device::Cuda(0) };
    let text = crate::gpt::data::Text::load()?;
    keep_freed_memory();
    let run = gpt::run(serde_json::from_str(options)?, &text, device, true)?;
    println!("{}", serde_json::to_string(&run)?);
    Ok(())
}

/// One sentence on what several ranks did, after it was checked that they have the same weights.
fn together(ranks: &Ranks) -> String {
    format!(
        "{} processes trained together: each one computed the gradients of its share of every batch of {BATCH} images, \
         and they were averaged, so that all processes have the same weights, bit by bit.",
        ranks.size()
    )
}
