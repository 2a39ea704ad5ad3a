//! What the operators cost.

use crate::insight::OperatorReport;
use crate::insight::html::{Document, Table};
use crate::insight::operators::{COLUMNS, Sections, Summary, percent};

/// How many rows the table has.
const MOST_ROWS: usize = 40;

/// Adds the section of a report.
pub(super) fn add(html: Document, report: &OperatorReport) -> Document {
    let mut table = Table::new(COLUMNS);
    for row in report.operators.iter().take(MOST_ROWS) {
        table.rows.push(report.cells(row));
    }
    let rest = report.operators.iter().skip(MOST_ROWS).map(|row| row.seconds).sum::<f64>();
    let share = |seconds: f64| percent(seconds / report.own_seconds().max(f64::MIN_POSITIVE));
    html.heading("Operators")
        .preformatted(Summary(report).to_string().trim_end())
        .table(&table)
        .note(&format!(
            "Per run. Operators that only call others, allocate memory or make views take another {}, and operators that \
             are not listed {}.",
            share(report.wrapper_seconds),
            share(rest)
        ))
        .preformatted(Sections(report).to_string().trim())
}
