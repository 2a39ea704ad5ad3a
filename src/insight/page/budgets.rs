//! A precision budget, with what is over it first.

use crate::insight::html::{Document, Table};
use crate::insight::{BudgetReport, BudgetRow};

/// How many rows the table has.
const MOST_ROWS: usize = 40;

/// Adds the section of a report.
pub(super) fn add(html: Document, report: &BudgetReport) -> Document {
    let mut table = Table::new(["quantity", "name", "error", "factor", "× noise", "limit", ""]);
    let within = report.rows.iter().filter(|row| !row.is_over());
    let rows: Vec<&BudgetRow> = report.over().into_iter().chain(within).collect();
    for row in rows.iter().take(MOST_ROWS) {
        table.rows.push([
            row.quantity.to_string(),
            row.name.clone(),
            format!("{:.1e}", row.error),
            format!("{:.4}", row.factor),
            format!("{:.2}", row.multiple),
            row.limit.to_string(),
            if row.is_over() { "over" } else { "" }.to_owned(),
        ]);
    }
    let html = html
        .heading(&format!("Precision budget of {}", report.dtype))
        .preformatted(&report.to_string())
        .table(&table);
    let html = match rows.len().saturating_sub(MOST_ROWS) {
        0 => html,
        rest => html.note(&format!("{rest} rows within the budget are not listed.")),
    };
    html.note(
        "Error: the distance from f32, divided by the norm. Factor: how much larger it is than in f32. × noise: the distance \
         as a multiple of what rounding at random does.",
    )
}
