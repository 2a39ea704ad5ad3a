//! The table on the terminal, and the report.

use super::Run;
use super::data::Text;
use super::options::Options;
use super::train::TOKENS_PER_SECOND;
use crate::precision_name;
use crate::report::{document, mebibytes, or_dash};
use crate::{Ranks, computer, measure, print};
use anyhow::Result;
use run_report::{Document, Plot, Series, Spacing, Table};
use tch::Device;
use tch_amp::Amp;

/// The lines of the log over which the last loss is averaged, but no more than half of them.
const LAST: usize = 5;

/// Prints the table and what the model has written, and writes the report.
pub fn write(
    options: &Options,
    run: &Run,
    text: &Text,
    device: Device,
    ranks: &Ranks,
) -> Result<()> {
    let kept = run.kept.map(|kept| format!("Activations: {}.\n", kept.words()));
    print(format_args!("{}\n{}{}\n", table(options, run), kept.unwrap_or_default(), run.sample));
    crate::report::write(&options.common, 1, || page(options, run, text, device, ranks))
}

/// The result in numbers.
pub fn table(options: &Options, run: &Run) -> Table<7> {
    let losses = run.log.series(measure::LOSS);
    let tail = &losses[losses.len() - LAST.min(losses.len().div_ceil(2))..];
    let loss = tail.iter().map(|point| point.1).sum::<f64>() / tail.len() as f64;
    let number = |column| run.log.last(column);
    let mut table = Table::new([
        "run",
        "final loss",
        "held-out loss",
        "tokens/s",
        "peak memory",
        "skipped steps",
        "final scale",
    ]);
    table.rows.push([
        precision_name(options.common.amp).to_owned(),
        format!("{loss:.3}"),
        or_dash(number(measure::HELD_OUT).map(|loss| format!("{loss:.3}"))),
        or_dash(run.log.median(TOKENS_PER_SECOND).map(|rate| format!("{rate:.0}"))),
        mebibytes(number(measure::PEAK_MEMORY).map(|bytes| bytes as u64)),
        run.skipped.to_string(),
        or_dash(number(measure::SCALE)),
    ]);
    table
}

/// The report.
pub fn page(options: &Options, run: &Run, text: &Text, device: Device, ranks: &Ranks) -> Document {
    let (steps, unit) = (options.common.steps, text.vocabulary.unit());
    let held_out = run.log.last(measure::HELD_OUT).unwrap_or(f64::NAN);
    let page = document(&format!("A GPT over {unit}s"))
        .result(&format!(
            "After {steps} steps in {}, the averaged weights predict held-out text with a loss of {held_out:.3} nats \
             per {unit}.",
            precision_name(options.common.amp)
        ))
        .table(&table(options, run))
        .note(&format!(
            "Final loss: mean of the last {LAST} lines of the log, or of half of them, in nats per {unit}. Held-out \
             loss: of the averaged weights. Tokens are {}, of all processes; median. Peak memory: of the tensors \
             on a GPU, or of the whole process on the CPU, of the first process.",
            if text.vocabulary.has_words() { "bytes and words" } else { "bytes" }
        ))
        .heading("Loss")
        .plot(&loss_plot(run, unit))
        .note("Faint line: the step of each line of the log. Strong line: exponential moving average.")
        .heading("Learning rate")
        .plot(&plot(run, measure::LEARNING_RATE, "learning rate", Spacing::Linear))
        .heading("Norm of the gradients")
        .plot(&plot(run, measure::GRADIENT_NORM, "2-norm before clipping", Spacing::Log10));
    let page = if options.common.amp == Amp::Fp16 {
        page.heading("Loss scale").plot(&plot(run, measure::SCALE, "loss scale", Spacing::Log2))
    } else {
        page
    };
    page.heading("What the model writes")
        .preformatted(&run.sample)
        .heading("The run")
        .facts(facts(options, run, text, device, ranks))
}

fn loss_plot(run: &Run, unit: &str) -> Plot {
    let losses = run.log.series(measure::LOSS);
    // An average over a small part of the plot.
    let keep = (1.0 - 20.0 / losses.len() as f64).clamp(0.0, 0.9);
    let mut series = vec![Series::smoothed("first", "training", losses, keep)];
    let held_out = run.log.series(measure::HELD_OUT);
    series.push(Series::line("second", "held-out text, averaged weights", held_out));
    let loss = format!("loss (nats per {unit})");
    let labels = ["step", &loss];
    Plot::new("Loss on the training text and on held-out text", labels, Spacing::Linear, series)
}

fn plot(run: &Run, column: &str, label: &'static str, spacing: Spacing) -> Plot {
    let series = vec![Series::line("first", label, run.log.series(column))];
    Plot::new(label, ["step", label], spacing, series)
}

fn facts(
    options: &Options,
    run: &Run,
    text: &Text,
    device: Device,
    ranks: &Ranks,
) -> [(&'static str, String); 7] {
    let Options { width, layers, length, rows, micro_batches, lr, dropout, ema, .. } = options;
    let yes = |is: bool| if is { "yes" } else { "no" }.to_owned();
    let zero = if options.zero { ", which divide the state of the optimizer (ZeRO-1)" } else { "" };
    [
        ("Text", text.origin.clone()),
        (
            "Model",
            format!(
                "{layers} layers of width {width}, excerpts of {length} tokens, a vocabulary of {}, dropout {dropout}",
                text.vocabulary.len()
            ),
        ),
        (
            "Steps",
            format!(
                "{} of {micro_batches} micro-batches with {rows} excerpts, AdamW with a learning rate of {lr}, \
                 gradients clipped to a norm of 1, averaged weights with a decay of {ema}, seed {}",
                options.common.steps, options.common.seed
            ),
        ),
        ("Recomputed", yes(options.recompute)),
        ("Activations", or_dash(run.kept.map(|kept| kept.words()))),
        ("Processes", format!("{}{zero}", ranks.size())),
        ("Device", computer::device(device)),
    ]
}
