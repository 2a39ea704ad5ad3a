//! An audit, with the most suspicious parts first.

use super::milliseconds;
use crate::insight::audit::Conclusion;
use crate::insight::html::{Document, Table};
use crate::insight::{Audit, AuditedGradient, AuditedOutput, AuditedPart};

/// How many parts are listed.
const MOST_PARTS: usize = 60;

/// Adds the section of an audit.
pub(super) fn add(html: Document, audit: &Audit) -> Document {
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
