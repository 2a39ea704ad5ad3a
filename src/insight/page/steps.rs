//! The steps: the loss, the scale, the norms, and why steps were skipped.

use std::collections::HashMap;

use run_report::{Document, Plot, Series, Spacing, Table};

use super::{Page, reason, with_rest};
use crate::error::Number;
use crate::insight::health::StepRecord;
use crate::insight::{Explanation, HistoryReport, SkipCause};

/// How many points of a line are drawn.
const MOST_POINTS: usize = 2000;

/// How many skipped steps are marked and listed.
const MOST_SKIPS: usize = 100;

/// Adds the sections of the steps.
pub(super) fn add(mut html: Document, page: &Page) -> Document {
    let explained: HashMap<u64, &Explanation> =
        page.explanations.iter().map(|explanation| (explanation.iteration, explanation)).collect();
    if let Some(history) = &page.history {
        html = html.result(&history.to_string());
        html = plots(html, history, &explained);
        html = skips(html, history, &explained);
    }
    if !page.explanations.is_empty() {
        html = html.subheading("Explanations");
        for explanation in &page.explanations {
            let summary = format!("step {}: {}", explanation.iteration, reason(explanation));
            html = html.details(&summary, &explanation.to_string());
        }
    }
    html
}

fn plots(
    html: Document,
    history: &HistoryReport,
    explained: &HashMap<u64, &Explanation>,
) -> Document {
    let html = plot(html, "Loss", "loss", Spacing::Linear, points(history, |step| step.loss));
    let html = scale(html, history, explained);
    let norms = points(history, |step| step.norm.filter(|norm| *norm > 0.0));
    let html = plot(html, "Norm of the gradients", "2-norm before clipping", Spacing::Log10, norms);
    let rates = points(history, |step| Some(step.learning_rate));
    let changes = rates.iter().any(|rate| Some(rate.1) != rates.first().map(|first| first.1));
    let rates = if changes { rates } else { Vec::new() };
    plot(html, "Learning rate", "learning rate", Spacing::Linear, rates)
}

/// A number of each step in which it is known, of which as many as can be drawn.
fn points(history: &HistoryReport, number: impl Fn(&StepRecord) -> Option<f64>) -> Vec<(f64, f64)> {
    let all = history.steps.iter();
    let all = all.filter_map(|step| number(step).map(|number| (step.step as f64, number)));
    thinned(all.filter(|point| point.1.is_finite()).collect())
}

/// The smallest and the largest of each stretch, so that no peak is lost.
fn thinned(points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    if points.len() <= MOST_POINTS {
        return points;
    }
    let by_value = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
    let ends = |stretch: &[(f64, f64)]| {
        let low = stretch.iter().min_by(by_value).copied();
        let high = stretch.iter().max_by(by_value).copied();
        let mut ends: Vec<_> = low.into_iter().chain(high).collect();
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        ends
    };
    points.chunks(points.len().div_ceil(MOST_POINTS / 2)).flat_map(ends).collect()
}

fn plot(
    html: Document,
    heading: &'static str,
    label: &'static str,
    spacing: Spacing,
    points: Vec<(f64, f64)>,
) -> Document {
    if points.is_empty() {
        return html;
    }
    let series = vec![Series::line("first", label, points)];
    html.heading(heading).plot(&Plot::new(heading, ["step", label], spacing, series))
}

/// The scale, with a cross at each skipped step.
fn scale(
    html: Document,
    history: &HistoryReport,
    explained: &HashMap<u64, &Explanation>,
) -> Document {
    let skips = skipped(history);
    let scales = points(history, |step| Some(step.scale).filter(|scale| *scale > 0.0));
    let is_constant = scales.iter().all(|scale| scale.1 == 1.0);
    if scales.is_empty() || (is_constant && skips.is_empty()) {
        return html;
    }
    let mark = |(step, cause): &(&StepRecord, SkipCause)| {
        let number = step.step;
        let why = why(explained, number, *cause);
        (number as f64, step.scale, format!("step {number} skipped: {why}"))
    };
    let marks = skips.iter().map(mark).collect();
    let series = Series { marks, ..Series::line("first", "loss scale", scales) };
    let labels = ["step", "loss scale"];
    let description = "The loss scale, with the skipped steps";
    let plot = Plot::new(description, labels, Spacing::Log2, vec![series])
        .mark_name(if skips.is_empty() { "" } else { "skipped step" });
    html.heading("Loss scale").plot(&plot)
}

/// The last skipped steps.
fn skipped(history: &HistoryReport) -> Vec<(&StepRecord, SkipCause)> {
    let skipped = history.steps.iter().filter_map(|step| Some((step, step.skipped?)));
    let all: Vec<_> = skipped.collect();
    all[all.len().saturating_sub(MOST_SKIPS)..].to_vec()
}

/// Why a step was skipped.
fn why(explained: &HashMap<u64, &Explanation>, step: u64, cause: SkipCause) -> String {
    let cause = match cause {
        SkipCause::Overflow => "a gradient was infinite or NaN",
        SkipCause::Spike => "the gradient norm or the loss was a spike",
    };
    explained.get(&step).map_or_else(|| cause.to_owned(), |explanation| reason(explanation))
}

/// The table of the skipped steps.
fn skips(
    html: Document,
    history: &HistoryReport,
    explained: &HashMap<u64, &Explanation>,
) -> Document {
    let skipped = skipped(history);
    if skipped.is_empty() {
        return html;
    }
    let mut table = Table::new(["step", "scale", "gradient norm", "why"]);
    for (step, cause) in &skipped {
        table.rows.push([
            step.step.to_string(),
            Number(step.scale).to_string(),
            step.norm.map_or_else(|| "-".to_owned(), |norm| format!("{norm:.3e}")),
            why(explained, step.step, *cause),
        ]);
    }
    let html = html.heading("Skipped steps").table(&table);
    let all = history.skips(SkipCause::Overflow) + history.skips(SkipCause::Spike);
    with_rest(html, all - skipped.len(), "earlier ones")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinning_keeps_the_peaks_and_the_order() {
        let mut points: Vec<(f64, f64)> =
            (0..100_000).map(|i| (f64::from(i), f64::from(i % 7))).collect();
        points[54_321].1 = 1000.0;
        points[54_322].1 = -1000.0;
        let thin = thinned(points.clone());
        assert!(thin.len() <= MOST_POINTS, "{}", thin.len());
        assert!(thin.contains(&points[54_321]) && thin.contains(&points[54_322]));
        assert!(thin.is_sorted_by(|a, b| a.0 <= b.0));
        assert_eq!(thinned(points[..10].to_vec()), points[..10]);
    }
}
