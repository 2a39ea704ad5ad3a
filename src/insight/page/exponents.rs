//! The exponents of the gradients: over time, and of each layer.

use run_report::{Document, HeatMap};

use crate::insight::HealthReport;
use crate::insight::health::{Exponents, LayerHealth};

/// How many reports have a column.
const MOST_COLUMNS: usize = 120;

/// How many exponents have a row or column. Smaller ones are counted to the last.
const MOST_EXPONENTS: i64 = 80;

/// How many layers have a row.
const MOST_LAYERS: usize = 60;

/// The share of the faintest shade.
const FAINTEST: f64 = 1e-5;

/// The exponents of fp16's smallest subnormal number, and of the smallest power of two above its range.
const SMALLEST: i64 = -24;
const TOO_LARGE: i64 = 16;

/// Adds the section of the exponents.
pub(super) fn add(html: Document, health: &[(u64, HealthReport)]) -> Document {
    let Some((step, last)) = health.last() else { return html };
    let html = html.heading("Exponents of the gradients");
    let html = html.result(last.to_string().lines().next().unwrap_or_default());
    let html = if health.len() > 1 { html.heat_map(&over_time(health)) } else { html };
    html.note(
        "Shade: how many of the gradients have the exponent, in powers of ten from 0.001 % to all. Gradients are divided \
         by the scale. In fp16, those below the lower line become zero, and those above the upper line overflow.",
    )
    .subheading(&format!("Layers, up to step {step}"))
    .heat_map(&of_layers(last))
}

/// From the largest exponent downwards. Its numbers are wider than exponents, so that sums of these fit.
#[derive(Clone, Copy)]
struct Range {
    top: i64,
    count: i64,
}

impl Range {
    /// The exponents of these counts, and the limits of fp16.
    fn over<'a>(all: impl Iterator<Item = &'a Exponents>, limits: &[(i64, i64)]) -> Self {
        let used = all.filter(|exponents| !exponents.counts.is_empty());
        let of_counts =
            used.map(|e| (e.first.into(), i64::from(e.first) + e.counts.len() as i64 - 1));
        let limits = limits.iter().map(|(low, high)| (*low, high - 1));
        let span = of_counts.chain(limits).reduce(|all, one| (all.0.min(one.0), all.1.max(one.1)));
        let (low, top) = span.unwrap_or((SMALLEST, TOO_LARGE));
        Self { top, count: (top - low + 1).min(MOST_EXPONENTS) }
    }

    fn exponents(self) -> impl Iterator<Item = i64> {
        (0..self.count).map(move |row| self.top - row)
    }

    /// The place of each exponent, with its share of the gradients that are neither zero, infinite nor NaN.
    fn shares(self, exponents: &Exponents) -> Vec<(usize, f64)> {
        let mut counts = vec![0; self.count as usize];
        for (exponent, count) in (i64::from(exponents.first)..).zip(&exponents.counts) {
            let place = (self.top - exponent).clamp(0, self.count - 1);
            let sum: &mut u64 = &mut counts[place as usize];
            *sum = sum.saturating_add(*count);
        }
        let all = exponents.counted().max(1) as f64;
        let shares = counts.into_iter().enumerate().filter(|(_, count)| *count > 0);
        shares.map(|(place, count)| (place, count as f64 / all)).collect()
    }

    /// How many rows are above the lower end of an exponent's row.
    fn rows_above(self, exponent: i64) -> f64 {
        (self.top - exponent + 1) as f64
    }

    /// A name at every fourth exponent.
    fn names(self) -> Vec<String> {
        let name = |exponent: i64| match exponent % 4 {
            0 => format!("2^{exponent}"),
            _ => String::new(),
        };
        self.exponents().map(name).collect()
    }
}

/// The smallest exponent that fp16 keeps at a scale, and the smallest that overflows.
fn limits(report: &HealthReport) -> (i64, i64) {
    let exponent = report.scale.log2().floor().clamp(-1100.0, 1100.0) as i64;
    (SMALLEST - exponent, TOO_LARGE - exponent)
}

fn shade(share: f64) -> f64 {
    1.0 - share.log10() / FAINTEST.log10()
}

fn over_time(health: &[(u64, HealthReport)]) -> HeatMap {
    let stride = health.len().div_ceil(MOST_COLUMNS);
    let shown: Vec<_> = health.iter().rev().step_by(stride).collect();
    let shown: Vec<_> = shown.into_iter().rev().collect();
    let limits: Vec<_> = shown.iter().map(|(_, report)| limits(report)).collect();
    let range = Range::over(shown.iter().map(|(_, report)| &report.model.exponents), &limits);
    let columns = shown.iter().map(|(step, _)| step.to_string()).collect();
    let description = "The exponents of the gradients over time";
    let mut map = HeatMap::new(description, "step", columns, range.names()).row_height(8.0);
    for (column, (step, report)) in shown.iter().enumerate() {
        for (row, share) in range.shares(&report.model.exponents) {
            let exponent = range.top - row as i64;
            let title = format!("step {step}, 2^{exponent}: {:.2} %", 100.0 * share);
            map.shade((column, row), shade(share), &title);
        }
    }
    let rows = |exponent: fn(&(i64, i64)) -> i64| {
        limits.iter().map(|limits| range.rows_above(exponent(limits))).collect()
    };
    map.bound("second", "overflows in fp16 above", rows(|limits| limits.1)).bound(
        "third",
        "becomes zero in fp16 below",
        rows(|limits| limits.0),
    )
}

fn of_layers(report: &HealthReport) -> HeatMap {
    let layers: Vec<&LayerHealth> = report.layers.iter().take(MOST_LAYERS).collect();
    let range = Range::over(layers.iter().map(|layer| &layer.exponents), &[]);
    let mut columns: Vec<String> = range.exponents().map(|e| format!("2^{e}")).collect();
    columns.reverse();
    let rows = layers.iter().map(|layer| layer.name.clone()).collect();
    let description = "The exponents of the gradients of each layer";
    let mut map =
        HeatMap::new(description, "size of the gradients, divided by the scale", columns, rows);
    for (row, layer) in layers.iter().enumerate() {
        for (place, share) in range.shares(&layer.exponents) {
            let exponent = range.top - place as i64;
            let title = format!("{}, 2^{exponent}: {:.2} %", layer.name, 100.0 * share);
            // From the smallest on the left to the largest on the right.
            let column = range.count as usize - 1 - place;
            map.shade((column, row), shade(share), &title);
        }
    }
    map
}
