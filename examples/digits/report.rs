//! The report: one self-contained HTML file.

use super::axis::{Axis, Spacing};
use super::computer::Facts;
use super::plot::{Plot, Series, smooth};
use super::table::{Table, verdict};
use super::train::{GROWTH_INTERVAL, RunResult};
use crate::gpt::report as gpt_report;
use crate::gpt::train::Run;

const SMOOTHING: f64 = 0.9;

/// The whole page, with the runs of the GPT first, if there are any.
pub fn html(results: &[RunResult], facts: &Facts, gpt: &[Run]) -> String {
    let steps = results.iter().map(|run| run.steps.len()).max().unwrap_or(0);
    format!(
        include_str!("report.html"),
        style = include_str!("report.css"),
        lead = lead(gpt),
        gpt = if gpt.is_empty() { String::new() } else { gpt_report::html(gpt) },
        verdict = escape(&verdict(results)),
        table = table(&Table::new(results)),
        loss = loss_plot(results).svg(),
        scale = scale_plot(results).svg(),
        steps = steps,
        interval = GROWTH_INTERVAL,
        device = escape(&facts.device),
        threads = facts.threads,
        gpt_threads = if gpt.is_empty() { "" } else { "; all of them for the GPT" },
        torch = escape(facts.torch.as_deref().unwrap_or("unknown")),
        seed = facts.seed,
        epochs = facts.epochs,
    )
}

/// What bf16 gains, in one sentence.
fn lead(gpt: &[Run]) -> String {
    match gpt {
        [fp32, bf16] => {
            format!("<p><strong>{}</strong></p>", escape(&gpt_report::verdict(fp32, bf16)))
        }
        _ => String::new(),
    }
}

fn table(table: &Table) -> String {
    let header: String = table.header.map(|title| format!("<th>{title}</th>")).concat();
    let row = |cells: &[String; 7]| {
        let name = &cells[0];
        let cells = cells.each_ref().map(|cell| format!("<td>{}</td>", escape(cell))).concat();
        format!(r#"<tr class="{name}">{cells}</tr>"#)
    };
    let rows: String = table.rows.iter().map(row).collect();
    format!("<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>")
}

/// The loss of every step and its moving average, with one series for each run.
pub fn loss_plot(results: &[RunResult]) -> Plot {
    let series: Vec<Series> = results.iter().map(loss_series).collect();
    let drawn = || series.iter().flat_map(|series| series.raw.iter().chain(&series.curve));
    Plot {
        description: "Training loss per step of the three runs",
        x: Axis::over("step", Spacing::Linear, drawn().map(|point| point.0)),
        y: Axis::over("loss (cross-entropy, nats)", Spacing::Log10, drawn().map(|point| point.1)),
        series,
        mark_name: "",
    }
}

fn loss_series(run: &RunResult) -> Series {
    let losses: Vec<f64> = run.steps.iter().map(|step| step.loss).collect();
    smoothed(run.precision.name(), &losses, SMOOTHING)
}

/// The losses of a run: every step, and the moving average.
pub fn smoothed(name: &'static str, losses: &[f64], smoothing: f64) -> Series {
    let numbered =
        |values: &[f64]| values.iter().enumerate().map(|(i, &v)| (i as f64, v)).collect();
    Series {
        name,
        label: name,
        curve: numbered(&smooth(losses, smoothing)),
        raw: numbered(losses),
        marks: Vec::new(),
    }
}

/// The scale over time, with one series for each run that has a scaler. Crosses mark the skipped steps.
pub fn scale_plot(results: &[RunResult]) -> Plot {
    let series: Vec<Series> = results.iter().filter_map(scale_series).collect();
    let drawn = || series.iter().flat_map(|series| &series.curve);
    Plot {
        description: "Loss scale per step of the fp16 run",
        x: Axis::over("step", Spacing::Linear, drawn().map(|point| point.0)),
        y: Axis::over("loss scale", Spacing::Log2, drawn().map(|point| point.1)),
        series,
        mark_name: "step skipped: the gradients overflowed at this scale",
    }
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
    let name = run.precision.name();
    Some(Series { name, label: name, curve, raw: Vec::new(), marks })
}

/// A text as HTML shows it.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
