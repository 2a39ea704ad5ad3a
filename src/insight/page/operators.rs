//! What the operators cost.

use super::Html;
use super::text::milliseconds;
use crate::insight::html::table::Table;
use crate::insight::{OperatorReport, Pass};

/// How many rows the table has.
const MOST_ROWS: usize = 40;

/// Adds the section of a report.
pub(super) fn add(html: Html, report: &OperatorReport) -> Html {
    let (own, runs) = (report.own_seconds().max(f64::MIN_POSITIVE), report.runs.max(1) as f64);
    let mut table = Table::new([
        "operator", "dtype", "device", "pass", "calls", "ms", "share", "MB read", "written",
        "GFLOP/s",
    ]);
    let share = |seconds: f64| format!("{:.1} %", 100.0 * seconds / own);
    let mega = |bytes: u64| format!("{:.3}", bytes as f64 / 1e6 / runs);
    for row in report.operators.iter().take(MOST_ROWS) {
        let pass = if row.pass == Pass::Forward { "forward" } else { "backward" };
        let has_speed = row.flops > 0 && row.seconds > 0.0;
        let speed = has_speed.then(|| format!("{:.1}", row.flops as f64 / 1e9 / row.seconds));
        table.row([
            row.operator.clone(),
            row.dtype.clone(),
            row.device.clone(),
            pass.to_owned(),
            row.calls.div_ceil(report.runs.max(1)).to_string(),
            milliseconds(row.seconds / runs),
            share(row.seconds),
            mega(row.bytes_read),
            mega(row.bytes_written),
            speed.unwrap_or_default(),
        ]);
    }
    let rest: f64 = report.operators.iter().skip(MOST_ROWS).map(|row| row.seconds).sum();
    let text = report.to_string();
    let (summary, sections) = text.split_once("\n\n").unwrap_or((&text, ""));
    // The table is the first section.
    let sections = sections.split_once("\n\n").map_or("", |(_, sections)| sections);
    html.heading("Operators")
        .preformatted(summary)
        .table(&table)
        .note(&format!(
            "Per run. Operators that only call others, allocate memory or make views take another {}, and operators that \
             are not listed {}.",
            share(report.wrappers.seconds),
            share(rest)
        ))
        .preformatted(sections.trim_end())
}
