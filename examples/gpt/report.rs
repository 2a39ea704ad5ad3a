//! The model's part of the report, in text and in HTML.

use super::train::Run;
use crate::digits::axis::{Axis, Spacing};
use crate::digits::plot::{Plot, Series};
use crate::digits::report::{escape, smoothed};

/// The steps over which a loss is averaged.
const LAST: usize = 20;

/// One sentence on what bf16 gains, with fp32's run first.
pub fn verdict(fp32: &Run, bf16: &Run) -> String {
    let speed = bf16.tokens_per_second() / fp32.tokens_per_second();
    let speed = if speed >= 1.0 {
        format!("{speed:.1}x faster")
    } else {
        format!("{:.1}x slower", speed.recip())
    };
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
    format!(
        "bf16 is {speed} than fp32 here{memory}; the loss is the same within {difference:.1} %."
    )
}

/// The cells of the table: the precision, bytes per second, milliseconds per step, final loss and memory.
fn cells(run: &Run) -> [String; 5] {
    let rate = run.tokens_per_second();
    let memory =
        run.activations.map_or_else(|| "-".to_owned(), |bytes| format!("{} MiB", bytes >> 20));
    [
        run.precision.name().to_owned(),
        format!("{rate:.0}"),
        format!("{:.0}", 1e3 * (super::train::ROWS * super::train::SIZE.length) as f64 / rate),
        format!("{:.3}", run.final_loss(LAST)),
        memory,
    ]
}

const HEADER: [&str; 5] = ["run", "tokens/s", "ms per step", "final loss", "activations"];

/// The table as text.
pub fn table(runs: &[Run]) -> String {
    let rows: Vec<_> =
        [HEADER.map(str::to_owned)].into_iter().chain(runs.iter().map(cells)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let line = |row: &[String; 5]| {
        let cell = |(i, text): (usize, &String)| match i {
            0 => format!("{text:<0$}", width(0)),
            _ => format!("  {text:>0$}", width(i)),
        };
        row.iter().enumerate().map(cell).collect::<String>() + "\n"
    };
    rows.iter().map(line).collect()
}

/// The section of the page.
pub fn html(runs: &[Run]) -> String {
    let header: String = HEADER.map(|title| format!("<th>{title}</th>")).concat();
    let row = |run: &Run| {
        let cells = cells(run);
        let tds = cells.each_ref().map(|cell| format!("<td>{cell}</td>")).concat();
        format!(r#"<tr class="{}">{tds}</tr>"#, cells[0])
    };
    let rows: String = runs.iter().map(row).collect();
    let sample = runs.iter().rev().find(|run| !run.sample.is_empty());
    let sample = sample.map_or_else(String::new, |run| escape(&run.sample));
    let origin = runs.first().map_or_else(String::new, |run| escape(&run.origin));
    format!(
        r#"<h2>A small GPT</h2>
<p>A transformer with three million parameters learns to continue Rust code, byte by byte, from {origin}: in fp32 and
under bf16 autocast, from the same weights and with the same batches.</p>
<div class="scroll"><table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div>
<p class="note">Final loss: mean of the last {LAST} steps, in nats per byte. Tokens are bytes. Activations: what a step
holds beside the weights, gradients and optimizer state, measured in a process of its own for each run; <code>-</code>
if it is unknown.</p>
<figure class="loss">{plot}</figure>
<p class="note">Faint lines: every step. Strong lines: exponential moving average.</p>
<p>What the model writes after this short training:</p>
<pre>{sample}</pre>
"#,
        plot = loss_plot(runs).svg(),
    )
}

/// The loss of every step and its moving average, with one series for each run.
pub fn loss_plot(runs: &[Run]) -> Plot {
    let series: Vec<Series> =
        runs.iter().map(|run| smoothed(run.precision.name(), &run.losses, 0.8)).collect();
    let drawn = || series.iter().flat_map(|series| series.raw.iter().chain(&series.curve));
    Plot {
        description: "Training loss per step of the GPT in both precisions",
        x: Axis::over("step", Spacing::Linear, drawn().map(|point| point.0)),
        y: Axis::over("loss (nats per byte)", Spacing::Linear, drawn().map(|point| point.1)),
        series,
        mark_name: "",
    }
}
