//! The tables on the terminal, and the report.

use super::data::Data;
use super::options::Options;
use super::test::Tested;
use super::train::IMAGES_PER_SECOND;
use super::{Run, train};
use crate::precision_name;
use crate::report::{document, mebibytes, or_dash};
use crate::{Ranks, computer, measure, print};
use anyhow::Result;
use run_report::{Document, Plot, Series, Spacing, Table};
use tch::Device;

/// Prints the tables, and writes the report.
pub fn write(
    options: &Options,
    runs: &[Run],
    data: &Data,
    device: Device,
    ranks: &Ranks,
) -> Result<()> {
    print(table(runs));
    if let [Run { tested: Some(tested), .. }] = runs {
        print(format_args!(
            "Averaged weights:\n{}",
            tested.averaged.scores_table(&data.labels, "images")
        ));
    }
    crate::report::write(&options.common, runs.len(), || page(options, runs, data, device, ranks))
}

/// The result in numbers, with a row for each run.
pub fn table(runs: &[Run]) -> Table<9> {
    let mut table = Table::new([
        "run",
        "test accuracy",
        "of the last weights",
        "seconds",
        "images/s",
        "relative speed",
        "peak memory",
        "skipped steps",
        "final scale",
    ]);
    let rate = |run: &Run| run.log.median(IMAGES_PER_SECOND).unwrap_or(f64::NAN);
    let first = runs.first().map_or(f64::NAN, rate);
    for run in runs {
        let tested = |part: fn(&Tested) -> f64| {
            or_dash(run.tested.as_ref().map(|tested| format!("{:.4}", part(tested))))
        };
        let relative = (runs.len() > 1).then(|| format!("{:.2}", rate(run) / first));
        let peak = run.log.last(measure::PEAK_MEMORY).map(|bytes| bytes as u64);
        table.rows.push([
            precision_name(run.amp).to_owned(),
            tested(|tested| tested.averaged.accuracy()),
            tested(|tested| tested.last.accuracy()),
            format!("{:.1}", run.seconds),
            format!("{:.0}", rate(run)),
            or_dash(relative),
            mebibytes(peak),
            run.skipped.to_string(),
            or_dash(run.log.last(measure::SCALE)),
        ]);
    }
    table
}

/// The report.
pub fn page(
    options: &Options,
    runs: &[Run],
    data: &Data,
    device: Device,
    ranks: &Ranks,
) -> Document {
    let mut page = document("A residual network on images");
    for run in runs {
        if let Some(tested) = &run.tested {
            page = page.result(&format!(
                "In {}, the averaged weights give the right answer for {:.2} % of the images of the test.",
                precision_name(run.amp),
                100.0 * tested.averaged.accuracy()
            ));
        }
    }
    page = page
        .table(&table(runs))
        .note(
            "Test accuracy: of the averaged weights, on images by which nothing was chosen. Seconds: of the training, \
             without evaluations. Images/s: of all processes; median. Relative speed: that of the first run is 1. Peak memory: of the \
             tensors on a GPU, or of the whole process on the CPU, of the first process.",
        )
        .heading("Loss")
        .plot_of_precisions(&plot(runs, "loss in training", measure::LOSS, "loss (nats)"))
        .note("Faint line: the step of each line of the log. Strong line: exponential moving average.")
        .heading("Accuracy on held-out images")
        .plot_of_precisions(&plot(runs, "accuracy on held-out images", measure::ACCURACY, "accuracy"))
        .note("Of the weights of the step, not of the averaged ones.")
        .heading("Learning rate")
        .plot(&plot(&runs[..runs.len().min(1)], "learning rate", measure::LEARNING_RATE, "learning rate"));
    for run in runs {
        if let Some(Tested { averaged, .. }) = &run.tested {
            page = page
                .heading(&format!("Classes in {}", precision_name(run.amp)))
                .table(&averaged.scores_table(&data.labels, "images"))
                .preformatted(&averaged.matrix(&data.labels))
                .note(
                    "Of the averaged weights. Rows of the matrix: the class; columns: the answer.",
                );
        }
    }
    page.heading("The run").facts(facts(options, data, device, ranks))
}

/// A line for each run.
fn plot(runs: &[Run], description: &'static str, column: &str, label: &'static str) -> Plot {
    let line = |run: &Run| {
        let (name, points) = (precision_name(run.amp), run.log.series(column));
        if column != measure::LOSS {
            return Series::line(name, name, points);
        }
        // An average over a small part of the plot.
        let keep = (1.0 - 20.0 / points.len() as f64).clamp(0.0, 0.9);
        Series::smoothed(name, name, points, keep)
    };
    let series = runs.iter().map(line).collect();
    Plot::new(description, ["step", label], Spacing::Linear, series)
}

fn facts(
    options: &Options,
    data: &Data,
    device: Device,
    ranks: &Ranks,
) -> [(&'static str, String); 6] {
    let Options { width, stages, blocks, rows, lr, swa_every, moved, .. } = options;
    let (_, before) = train::phases(options);
    let mirrored =
        if options.mirror || data.has_mirror_images { ", half of them mirrored" } else { "" };
    let layout = if options.channels_first { "channels-first" } else { "channels-last" };
    let synced =
        if options.sync_batch_norm { ", with synchronized batch normalization" } else { "" };
    [
        ("Images", data.describe()),
        ("Augmentation", format!("moved by up to {moved} pixels{mirrored}")),
        ("Model", format!("{stages} stages of {blocks} residual blocks, width {width}, {layout}")),
        (
            "Steps",
            format!(
                "{} of {rows} images, SGD with momentum and a learning rate of {lr}, weights averaged every \
                 {swa_every} steps after step {before}, seed {}",
                options.common.steps, options.common.seed
            ),
        ),
        ("Processes", format!("{}{synced}", ranks.size())),
        ("Device", computer::device(device)),
    ]
}
