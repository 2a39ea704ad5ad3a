//! The tables on the terminal, and the report.

use super::options::Options;
use super::{Run, Task};
use crate::precision_name;
use crate::report::{document, mebibytes, or_dash};
use crate::{Ranks, computer, measure, print};
use anyhow::Result;
use run_report::{Document, Plot, Series, Spacing, Table};
use tch::Device;

/// Prints the tables, and writes the report.
pub fn write(
    options: &Options,
    run: &Run,
    task: &Task<'_>,
    device: Device,
    ranks: &Ranks,
) -> Result<()> {
    let labels = &task.data.labels;
    print(format_args!(
        "{}\n{}",
        table(options, run, task),
        run.test.scores_table(labels, "sentences")
    ));
    print(format_args!("Rows: the class; columns: the answer\n{}", run.test.matrix(labels)));
    crate::report::write(&options.common, 1, || page(options, run, task, device, ranks))
}

/// The result in numbers.
pub fn table(options: &Options, run: &Run, task: &Task<'_>) -> Table<10> {
    let mut table = Table::new([
        "run",
        "accuracy",
        "most frequent class",
        "loss",
        "held-out accuracy",
        "best step",
        "skipped steps",
        "seconds",
        "peak memory",
        "sent in a step",
    ]);
    table.rows.push([
        precision_name(options.common.amp).to_owned(),
        format!("{:.3}", run.test.accuracy()),
        format!("{:.3}", task.data.majority()),
        format!("{:.3}", run.test.loss),
        format!("{:.3}", run.held_out.accuracy()),
        or_dash(run.best_step),
        run.skipped.to_string(),
        format!("{:.1}", run.seconds),
        mebibytes(run.log.last(measure::PEAK_MEMORY).map(|bytes| bytes as u64)),
        or_dash(run.log.median(measure::SENT).map(|bytes| format!("{:.0} kB", bytes / 1e3))),
    ]);
    table
}

/// The report.
pub fn page(
    options: &Options,
    run: &Run,
    task: &Task<'_>,
    device: Device,
    ranks: &Ranks,
) -> Document {
    let labels = &task.data.labels;
    let accuracy = 100.0 * run.test.accuracy();
    document("A BERT that classifies sentences")
        .result(&format!(
            "In {}, {accuracy:.1} % of the sentences of the test get the right answer, and {:.1} % if the \
             answer is always the most frequent class.",
            precision_name(options.common.amp),
            100.0 * task.data.majority()
        ))
        .table(&table(options, run, task))
        .note(&note(task))
        .heading("Classes")
        .table(&run.test.scores_table(labels, "sentences"))
        .heading("Confusion matrix")
        .preformatted(&run.test.matrix(labels))
        .note("Rows: the class; columns: the answer.")
        .heading("Loss")
        .plot(&loss_plot(run))
        .note("Faint line: the step of each line of the log. Strong line: exponential moving average.")
        .heading("Accuracy on held-out sentences")
        .plot(&plot(run, measure::ACCURACY, "accuracy"))
        .heading("Learning rate")
        .plot(&plot(run, measure::LEARNING_RATE, "learning rate"))
        .heading("The run")
        .facts(facts(options, task, device, ranks))
}

fn loss_plot(run: &Run) -> Plot {
    let losses = run.log.series(measure::LOSS);
    // An average over a small part of the plot.
    let keep = (1.0 - 20.0 / losses.len() as f64).clamp(0.0, 0.9);
    let mut series = vec![Series::smoothed("first", "training", losses, keep)];
    series.push(Series::line("second", "held-out sentences", run.log.series(measure::HELD_OUT)));
    let labels = ["step", "loss (nats)"];
    Plot::new("Loss in training and on held-out sentences", labels, Spacing::Linear, series)
}

fn plot(run: &Run, column: &str, label: &'static str) -> Plot {
    let series = vec![Series::line("first", label, run.log.series(column))];
    Plot::new(label, ["step", label], Spacing::Linear, series)
}

/// What the numbers in the table are.
fn note(task: &Task<'_>) -> String {
    let chosen = if task.data.is_tested_on_held_out() {
        "by which the weights were chosen"
    } else {
        "on which nothing was chosen"
    };
    format!(
        "Of the weights whose accuracy on held-out sentences was the best. Accuracy: on the sentences of the test, \
         {chosen}. Seconds: training and evaluations of this part of the run. Peak memory: of the tensors on a GPU, or \
         of the whole process on the CPU, of the first process. Sent in a step: by the first process to the others, \
         median, where the system counts it."
    )
}

fn facts(
    options: &Options,
    task: &Task<'_>,
    device: Device,
    ranks: &Ranks,
) -> [(&'static str, String); 5] {
    let Options { length, rows, lr, dropout, weight_decay, .. } = options;
    let (data, config) = (task.data, task.config);
    let schedule = if options.constant_lr { "constant" } else { "linear" };
    let clipped = options.max_norm.map(|norm| format!(", gradients clipped to a norm of {norm}"));
    [
        ("Sentences", data.describe()),
        (
            "Model",
            format!(
                "{} layers of width {}, {} tokens, {length} of a sentence at most, dropout {}",
                config.num_hidden_layers, config.hidden_size, config.vocab_size, dropout.hidden
            ),
        ),
        (
            "Steps",
            format!(
                "{} of {rows} sentences, AdamW with a learning rate of {lr} ({schedule}) and a weight decay of \
                 {weight_decay}{}, seed {}",
                options.common.steps,
                clipped.unwrap_or_default(),
                options.common.seed
            ),
        ),
        ("Processes", ranks.size().to_string()),
        ("Device", computer::device(device)),
    ]
}
