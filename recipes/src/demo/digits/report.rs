//! The report of the demo: one self-contained HTML file.

use super::computer::Facts;
use super::table::{table, verdict};
use super::train::{GROWTH_INTERVAL, RunResult};
use crate::demo::gpt::report as gpt_report;
use crate::demo::gpt::train::Run;
use crate::precision_name;
use crate::report::document;
use run_report::{Document, Plot, Series, Spacing};

const SMOOTHING: f64 = 0.9;

const INTRODUCTION: &str = "\
A small convolutional network is trained three times with tch-amp, from the same initial weights and with the same \
batches: in fp32, under bf16 autocast, and under fp16 autocast with a gradient scaler.";

const TABLE_NOTE: &str = "\
Final loss: mean of the last epoch. Test accuracy: 360 held-out images, so one image is 0.28 points. Time per step: \
median; on most CPUs fp16 is slow, and bf16 is the better choice. Peak memory: of the whole process, libtorch \
included, or of the tensors on a GPU; - if it is unknown.";

const FOOTER: &str = r#"<footer>Data: <em>Optical Recognition of Handwritten Digits</em>, E. Alpaydin and C. Kaynak,
1998, UCI Machine Learning Repository, <a href="https://doi.org/10.24432/C50P49">DOI 10.24432/C50P49</a>,
CC BY 4.0.</footer>"#;

/// The whole page, with the runs of the GPT first, if there are any.
pub fn page(results: &[RunResult], facts: &Facts, gpt: &[Run]) -> Document {
    let mut page = document("Mixed precision on this computer");
    if let [fp32, bf16] = gpt {
        page = page.result(&gpt_report::verdict(fp32, bf16));
        page = gpt_report::section(page, gpt);
    }
    let steps = results.iter().map(|run| run.steps.len()).max().unwrap_or(0);
    page.heading("Handwritten digits in three precisions")
        .paragraph(INTRODUCTION)
        .paragraph(&verdict(results))
        .table(&table(results))
        .note(TABLE_NOTE)
        .subheading("Training loss")
        .plot_of_precisions(&loss_plot(results))
        .note("Faint lines: every step. Strong lines: exponential moving average.")
        .subheading("Loss scale of the fp16 run")
        .plot(&scale_plot(results))
        .note(&format!(
            "The largest fp16 number is 65504. The scaler multiplies the loss so that small gradients do not become \
             zero. It doubles the scale after {GROWTH_INTERVAL} steps in a row without overflow. When gradients \
             overflow, it skips the step and halves the scale. The default interval, as in PyTorch, is 2000 steps; \
             this run has {steps}, so it uses {GROWTH_INTERVAL} to show growth and overflow."
        ))
        .heading("The run")
        .facts(run(facts, steps, !gpt.is_empty()))
        .html(FOOTER)
}

fn run(facts: &Facts, steps: usize, has_gpt: bool) -> [(&'static str, String); 4] {
    let of_gpt = if has_gpt { "; all of them for the GPT" } else { "" };
    let (threads, epochs) = (facts.threads, facts.epochs);
    [
        ("Device", facts.device.clone()),
        (
            "CPU threads",
            format!(
                "{threads} for the digits, so that results do not depend on the number of cores{of_gpt}"
            ),
        ),
        ("Seed", facts.seed.to_string()),
        (
            "Digits",
            format!(
                "{epochs} epochs, {steps} steps per run, 1,437 images of 8 x 8 pixels, batches of 64, AdamW"
            ),
        ),
    ]
}

/// The loss of every step and its moving average, with one series for each run.
pub fn loss_plot(results: &[RunResult]) -> Plot {
    let series = |run: &RunResult| {
        let points = (0..).zip(&run.steps).map(|(index, step)| (f64::from(index), step.loss));
        let name = precision_name(run.precision);
        Series::smoothed(name, name, points.collect(), SMOOTHING)
    };
    Plot::new(
        "Training loss per step of the three runs",
        ["step", "loss (cross-entropy, nats)"],
        Spacing::Log10,
        results.iter().map(series).collect(),
    )
}

/// The scale over time, with one series for each run that has a scaler. Crosses mark the skipped steps.
pub fn scale_plot(results: &[RunResult]) -> Plot {
    Plot::new(
        "Loss scale per step of the fp16 run",
        ["step", "loss scale"],
        Spacing::Log2,
        results.iter().filter_map(scale_series).collect(),
    )
    .mark_name("step skipped: the gradients overflowed at this scale")
}

fn scale_series(run: &RunResult) -> Option<Series> {
    run.final_scale?;
    let (mut curve, mut marks) = (Vec::new(), Vec::new());
    for (index, step) in run.steps.iter().enumerate() {
        let (start, scale) = (index as f64, step.scale?);
        curve.extend([(start, scale), (start + 1.0, scale)]);
        if step.skipped {
            marks.push((start + 1.0, scale, format!("step {index} skipped at scale {scale}")));
        }
    }
    let name = precision_name(run.precision);
    Some(Series { marks, ..Series::line(name, name, curve) })
}
