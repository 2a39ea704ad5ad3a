//! The model's part of the report, in text and in HTML.

use super::incident::Incident;
use super::train::{LENGTH, ROWS, Run};
use crate::demo::speed;
use crate::precision_name;
use crate::report::mebibytes;
use run_report::{Document, Plot, Series, Spacing, Table};

/// The steps over which a loss is averaged.
const LAST: usize = 20;

/// One sentence on what bf16 gains, with fp32's run first.
pub fn verdict(fp32: &Run, bf16: &Run) -> String {
    let memory = match (fp32.activations, bf16.activations) {
        (Some(of_fp32), Some(of_bf16)) if of_fp32 > 0 => {
            let share = 100.0 * of_bf16 as f64 / of_fp32 as f64;
            format!(" and needs {share:.0} % of the memory for activations")
        }
        _ => String::new(),
    };
    let same = fp32.losses.len().min(bf16.losses.len());
    let within =
        |run: &Run| Run { losses: run.losses[..same].to_vec(), ..run.clone() }.final_loss(LAST);
    let difference = (within(bf16) / within(fp32) - 1.0).abs() * 100.0;
    let plan = bf16.plan.as_ref().map(|plan| format!(" The plan: {plan}.")).unwrap_or_default();
    let gain = if bf16.is_planned_f32 {
        "no dtype is faster than fp32 here, so the plan keeps the whole model in it".to_owned()
    } else {
        let speedup = speed::speedup(&bf16.seconds, &fp32.seconds);
        format!("bf16 is {}{memory}", speed::in_words(speedup))
    };
    format!("{gain}; the loss is the same within {difference:.1} %.{plan}")
}

/// The table: bytes per second, milliseconds per step, final loss and memory.
pub fn table(runs: &[Run]) -> Table<5> {
    let mut table = Table::new(["run", "tokens/s", "ms per step", "final loss", "activations"]);
    for run in runs {
        let rate = run.tokens_per_second();
        table.rows.push([
            precision_name(run.precision).to_owned(),
            format!("{rate:.0}"),
            format!("{:.0}", 1e3 * (ROWS * LENGTH) as f64 / rate),
            format!("{:.3}", run.final_loss(LAST)),
            mebibytes(run.activations),
        ]);
    }
    table
}

/// Adds the section of the page.
pub fn section(page: Document, runs: &[Run]) -> Document {
    let origin = runs.first().map_or("nothing", |run| &run.origin);
    let sample = runs.iter().rev().find(|run| !run.sample.is_empty());
    let page = page.heading("A small GPT")
        .paragraph(&format!(
            "A transformer with three million parameters learns to continue Rust code, byte by byte, from {origin}: in \
             fp32 and under bf16 autocast, from the same weights and with the same batches."
        ))
        .table(&table(runs))
        .note(&format!(
            "Final loss: mean of the last {LAST} steps, in nats per byte. Tokens are bytes. Activations: what a step \
             holds beside the weights, gradients and optimizer state, measured in a process of its own for each run; \
             - if it is unknown."
        ))
        .plot_of_precisions(&loss_plot(runs))
        .note("Faint lines: every step. Strong lines: exponential moving average.")
        .paragraph("What the model writes after this short training:")
        .preformatted(sample.map_or("", |run| &run.sample));
    match incident(runs) {
        None => page,
        Some(incident) => page.paragraph(BAD_BATCH).preformatted(&incident.to_string()),
    }
}

/// What comes before the text of an incident.
pub const BAD_BATCH: &str = "Then a row of a batch is nothing but padding, and the mean over its bytes divides zero by \
                             zero. The step is skipped, and a tracer runs it again to say why:";

/// The bad batch of the run in bf16.
pub fn incident(runs: &[Run]) -> Option<&Incident> {
    runs.iter().find_map(|run| run.incident.as_ref())
}

/// The loss of every step and its moving average, with one series for each run.
pub fn loss_plot(runs: &[Run]) -> Plot {
    let series = |run: &Run| {
        let points = (0..).zip(&run.losses).map(|(index, &loss)| (f64::from(index), loss));
        let name = precision_name(run.precision);
        Series::smoothed(name, name, points.collect(), 0.8)
    };
    Plot::new(
        "Training loss per step of the GPT in both precisions",
        ["step", "loss (nats per byte)"],
        Spacing::Linear,
        runs.iter().map(series).collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch_amp::Amp;

    fn run(precision: Amp, seconds: [f64; 5]) -> Run {
        Run {
            precision,
            plan: None,
            is_planned_f32: false,
            losses: vec![2.0; 4],
            seconds: seconds.to_vec(),
            activations: Some(100),
            sample: String::new(),
            origin: String::new(),
            incident: None,
        }
    }

    #[test]
    fn only_times_that_do_not_overlap_are_a_gain() {
        let fp32 = run(Amp::Off, [2.0, 2.0, 2.1, 2.2, 9.0]);
        let fast = run(Amp::Bf16, [1.0, 1.0, 1.05, 1.1, 8.0]);
        let said = verdict(&fp32, &fast);
        assert!(said.starts_with("bf16 is 2.0x faster than fp32 here and needs 100 %"), "{said}");
        let noisy = run(Amp::Bf16, [0.5, 0.6, 1.0, 2.0, 9.0]);
        let said = verdict(&fp32, &noisy);
        assert!(said.starts_with("bf16 is not measurably faster or slower"), "{said}");
    }

    #[test]
    fn a_plan_in_f32_is_no_gain_of_bf16() {
        let fp32 = run(Amp::Off, [2.0; 5]);
        let planned = Run {
            plan: Some("everything is in f32".to_owned()),
            is_planned_f32: true,
            ..run(Amp::Bf16, [1.0; 5])
        };
        let said = verdict(&fp32, &planned);
        assert!(said.starts_with("no dtype is faster than fp32 here, so the plan keeps"), "{said}");
        assert!(!said.contains("bf16"), "{said}");
    }
}
