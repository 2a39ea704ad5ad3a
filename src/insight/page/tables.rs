//! The sections that are tables: audits, precision budgets and operators.

use super::milliseconds;
use crate::insight::audit::Conclusion;
use crate::insight::html::{Document, Table};
use crate::insight::operators::{COLUMNS, Sections, Summary, percent};
use crate::insight::{
    Audit, AuditedGradient, AuditedOutput, AuditedPart, BudgetReport, BudgetRow, OperatorReport,
};

/// How many parts of an audit are listed.
const MOST_PARTS: usize = 60;

/// How many rows another table has.
const MOST_ROWS: usize = 40;

/// Adds the section of an audit, with the most suspicious parts first.
pub(super) fn add_audit(html: Document, audit: &Audit) -> Document {
    let clean = audit.parts.iter().filter(|part| part.suspicions.is_empty());
    let parts: Vec<&AuditedPart> = audit.suspicious().into_iter().chain(clean).collect();
    let mut table = Table::new([
        "part",
        "suspicion",
        "error",
        "× expected",
        "× noise",
        "gradient error",
        "cosine",
        "underflow",
        "ms in f32",
        "ms in the region",
        "dtypes",
    ]);
    for part in parts.iter().take(MOST_PARTS) {
        table.rows.push(row(part));
    }
    let html = html
        .heading(&format!("Audit in {}", audit.dtype))
        .preformatted(&Conclusion(audit).to_string())
        .table(&table);
    let html = match parts.len().saturating_sub(MOST_PARTS) {
        0 => html,
        rest => html.note(&format!("{rest} parts that are less suspicious are not listed.")),
    };
    html.note(
        "Error: the distance from the results in f32, divided by their norm. × expected: the same as a multiple of what \
         roundings add up to at that depth. × noise: as a multiple of what rounding at random does. Underflow: gradients that are zero here and not in f32.",
    )
}

fn row(part: &AuditedPart) -> [String; 11] {
    let suspicions: Vec<String> = part.suspicions.iter().map(ToString::to_string).collect();
    let output = |text: fn(f64) -> String, number: fn(&AuditedOutput) -> f64| {
        part.output.as_ref().map_or_else(String::new, |output| text(number(output)))
    };
    let gradient = |text: fn(f64) -> String, of: fn(&AuditedGradient) -> f64| {
        part.gradient.as_ref().map_or_else(String::new, |gradient| text(of(gradient)))
    };
    let dtypes = part.dtypes.iter().map(|(dtype, count)| format!("{count} {dtype}"));
    [
        part.path.clone(),
        suspicions.join(", and "),
        output(scientific, |output| output.error),
        output(one_digit, |output| output.multiple),
        part.output.as_ref().and_then(AuditedOutput::of_noise).map_or_else(String::new, one_digit),
        gradient(scientific, |gradient| gradient.error),
        gradient(|cosine| format!("{cosine:.5}"), |gradient| gradient.cosine),
        gradient(|share| format!("{:.2} %", 100.0 * share), |gradient| gradient.underflow),
        milliseconds(part.seconds[0]),
        milliseconds(part.seconds[1]),
        dtypes.collect::<Vec<_>>().join(", "),
    ]
}

fn one_digit(number: f64) -> String {
    format!("{number:.1}")
}

fn scientific(number: f64) -> String {
    format!("{number:.1e}")
}

/// Adds the section of a precision budget, with what is over it first.
pub(super) fn add_budget(html: Document, report: &BudgetReport) -> Document {
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

/// Adds the section of what the operators cost.
pub(super) fn add_operators(html: Document, report: &OperatorReport) -> Document {
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
