//! The verdict of the exponents of gradients on the loss scale.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::Number;
use crate::ffi::exponents::{ExponentCounts, ExponentRow, LOWEST_EXPONENT};
use crate::insight::numbers::total;

/// The exponents of fp16's smallest normal number, of its smallest subnormal number, and of its largest number, 65504.
const NORMAL: i32 = -14;
const SUBNORMAL: i32 = -24;
const LARGEST: i32 = 15;

/// The share of gradients that may underflow in a healthy training.
const HEALTHY_SHARE: f64 = 0.01;

/// Gradients that are within so many binades of an overflow soon overflow.
const CLOSE: i32 = 1;

/// The most binades by which another scale is suggested, those between the smallest and the largest scale.
const MOST_BINADES: i32 = 250;

/// How many layers a text names.
const MOST_LAYERS: usize = 3;

/// Layers in which a larger share than this underflows are named.
const NAMED_SHARE: f64 = 0.01;

/// The health of the loss scale. Its text, by `Display`, begins with one line of advice.
///
/// A program that wants the numbers behind the text serializes the report, which has these rows beside the fields
/// below. Shares, from 0 to 1, are those of the gradients that are neither zero, infinite nor NaN, unless said
/// otherwise.
///
/// - `layers`: the layers that have gradients, in the order of their names. A row has the `name`, `zeros` (the share of
///   zeros among all elements; whether they were zero before they were rounded, nobody knows), `now` and `exponents`.
/// - `model`: such a row for all layers together, whose `name` is `model`.
/// - `now` of a row: the fate of these gradients in fp16 at the scale of the report. It has the `scale`, `below_normal`
///   (the share below fp16's smallest normal number, 2^-14, where precision is lost; includes `lost`), `lost` (the
///   share below fp16's smallest subnormal number, 2^-24: they become zero, or at best that number), `edge` (the share
///   from 2^-24 to 2^-23, the last binade that is not lost), `overflowing` (the share of at least 2^16, which
///   overflows) and `headroom` (how many times the scale can be doubled before the largest element, rounded down to a
///   power of two, exceeds 2^15, the exponent of fp16's largest number, 65504; negative if it does already, and null if
///   all elements are zero, infinite or NaN). Of gradients that have been fp16, what is lost is zero already, and so
///   `lost` is zero. If gradients are spread evenly around zero, up to as many are lost as there are at the `edge`.
/// - `exponents` of a row: how often each exponent occurs among these gradients, which are divided by the power of two
///   that is at most the scale. It has `zeros`, `infinite` and `nan` (the numbers of such elements), `first` (the
///   exponent of the first number in `counts`: `e` for elements from 2^e to 2^(e+1)) and `counts` (how many elements
///   have each exponent from there on; those below -160 are counted there, and those above 128 there). At a scale of
///   2^k, an element that is counted at `e` has the exponent `e + k`, so that what would be lost at another scale is a
///   sum of `counts`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HealthReport {
    /// The scale of the last observation; 1 for a disabled scaler.
    pub scale: f64,
    /// The number of iterations that were observed.
    pub observed: u64,
    /// In how many of these a gradient was infinite or NaN, so that the step is skipped.
    pub skipped: u64,
    /// The advice for the scale.
    pub verdict: Verdict,
    pub(in crate::insight) model: LayerHealth,
    pub(in crate::insight) layers: Vec<LayerHealth>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::insight) struct LayerHealth {
    pub(in crate::insight) name: String,
    zeros: f64,
    now: AtScale,
    pub(in crate::insight) exponents: Exponents,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct AtScale {
    scale: f64,
    below_normal: f64,
    lost: f64,
    edge: f64,
    overflowing: f64,
    headroom: Option<i32>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::insight) struct Exponents {
    zeros: u64,
    infinite: u64,
    nan: u64,
    pub(in crate::insight) first: i32,
    pub(in crate::insight) counts: Vec<u64>,
}

/// The advice for a loss scale.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Verdict {
    /// No gradient was seen that is neither zero, infinite nor NaN.
    Unknown,
    /// At most one gradient in a hundred underflows, as far as can be told.
    Healthy,
    /// A larger scale fits.
    TooLow {
        /// The smallest multiple of the scale by a power of two at which at most one gradient in a hundred underflows.
        scale: f64,
    },
    /// No scale fits: the largest gradients overflow before the small ones stop underflowing.
    TooWide,
    /// More than half of the observed iterations were skipped.
    Overflowing,
    /// Overflows have driven the scale below 1: the model itself overflows fp16.
    BelowOne,
}

impl HealthReport {
    pub(super) fn new(scale: f64, counts: ExponentCounts, layers: &[String]) -> Self {
        let ExponentCounts { observed, non_finite: skipped, rows } = counts;
        let mut all = ExponentRow::default();
        rows.iter().for_each(|row| add(&mut all, row));
        let model = LayerHealth::new("model", scale, &all);
        let layers = layers.iter().zip(&rows).map(|(name, row)| LayerHealth::new(name, scale, row));
        let layers = layers.filter(|layer| layer.exponents.elements() > 0).collect();
        let mut report =
            Self { scale, observed, skipped, verdict: Verdict::Unknown, model, layers };
        report.verdict = report.judge();
        report
    }

    /// Returns whether overflows, and not the program, keep the scale as low as it is.
    fn is_driven_down(&self) -> bool {
        self.skipped > 0 || self.model.now.headroom.is_some_and(|headroom| headroom <= CLOSE)
    }

    fn judge(&self) -> Verdict {
        if self.scale < 1.0 && self.is_driven_down() {
            return Verdict::BelowOne;
        }
        if self.skipped > self.observed / 2 {
            return Verdict::Overflowing;
        }
        if self.model.exponents.counted() == 0 {
            return Verdict::Unknown;
        }
        let now = self.model.now;
        // Exponents beyond the edge are seen only in gradients that were never fp16. Up to as many are expected there
        // as at the edge, and half as many after each doubling of the scale.
        let expected = |binades: i32| now.edge * 0.5f64.powi(binades);
        let underflows = |binades: i32| {
            let at = self.model.at(binades);
            at.lost.max(at.edge).max(expected(binades))
        };
        // Overflows need no verdict: the scaler lowers its scale.
        if underflows(0) <= HEALTHY_SHARE {
            return Verdict::Healthy;
        }
        let fits = |binades: &i32| {
            let has_room = self.model.at(*binades).headroom.is_some_and(|headroom| headroom >= 0);
            underflows(*binades) <= HEALTHY_SHARE && has_room
        };
        match (1..=MOST_BINADES).find(fits) {
            Some(binades) => Verdict::TooLow { scale: self.model.at(binades).scale },
            None => Verdict::TooWide,
        }
    }
}

impl LayerHealth {
    fn new(name: &str, scale: f64, row: &ExponentRow) -> Self {
        let exponents = Exponents::new(row);
        let zeros = share(exponents.zeros, exponents.elements());
        Self { name: name.to_owned(), zeros, now: exponents.at(scale, 0), exponents }
    }

    /// What would become of the gradients if the scale were multiplied by 2^`binades`.
    fn at(&self, binades: i32) -> AtScale {
        self.exponents.at(self.now.scale, binades)
    }
}

impl Exponents {
    /// Leaves out the empty bins at both ends.
    fn new(row: &ExponentRow) -> Self {
        let ExponentRow { zeros, infinite, nan, exponents } = row;
        let used = |count: &u64| *count > 0;
        let from = exponents.iter().position(used).unwrap_or(0);
        let to = exponents.iter().rposition(used).map_or(from, |last| last + 1);
        Self {
            zeros: *zeros,
            infinite: *infinite,
            nan: *nan,
            first: LOWEST_EXPONENT + from as i32,
            counts: exponents[from..to].to_vec(),
        }
    }

    fn elements(&self) -> u64 {
        total([self.zeros, self.infinite, self.nan, self.counted()])
    }

    /// The number of elements that are neither zero, infinite nor NaN.
    pub(in crate::insight) fn counted(&self) -> u64 {
        total(self.counts.iter().copied())
    }

    /// The exponent of the largest element that is neither zero, infinite nor NaN.
    fn largest(&self) -> Option<i32> {
        let last = self.counts.len().checked_sub(1)?;
        Some(self.first.saturating_add(i32::try_from(last).unwrap_or(i32::MAX)))
    }

    /// The number of elements whose exponents are in a range.
    fn within(&self, from: i32, to: i32) -> u64 {
        let place = |exponent: i32| {
            let place = i64::from(exponent) - i64::from(self.first);
            place.clamp(0, self.counts.len() as i64) as usize
        };
        total(self.counts[place(from)..place(to).max(place(from))].iter().copied())
    }

    fn at(&self, scale: f64, binades: i32) -> AtScale {
        let shift = exponent(scale).saturating_add(binades);
        let here = |bound: i32| bound.saturating_sub(shift);
        let share = |from: i32, to: i32| share(self.within(from, to), self.counted());
        AtScale {
            scale: scale * 2f64.powi(binades),
            below_normal: share(i32::MIN, here(NORMAL)),
            lost: share(i32::MIN, here(SUBNORMAL)),
            edge: share(here(SUBNORMAL), here(SUBNORMAL + 1)),
            overflowing: share(here(LARGEST + 1), i32::MAX),
            headroom: self.largest().map(|largest| here(LARGEST).saturating_sub(largest)),
        }
    }
}

/// The whole part of the logarithm to base 2 of a positive, normal number.
fn exponent(number: f64) -> i32 {
    (number.to_bits() >> 52 & 0x7ff) as i32 - 1023
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

fn add(sum: &mut ExponentRow, row: &ExponentRow) {
    sum.zeros += row.zeros;
    sum.infinite += row.infinite;
    sum.nan += row.nan;
    sum.exponents.resize(row.exponents.len(), 0);
    for (sum, count) in sum.exponents.iter_mut().zip(&row.exponents) {
        *sum += count;
    }
}

/// A scale, as a power of two if it is one.
pub(super) fn power_of_two(scale: f64) -> String {
    match exponent(scale) {
        power if power != 0 && scale == 2f64.powi(power) => format!("2^{power}"),
        _ => Number(scale).to_string(),
    }
}

/// A share in percent, with two digits that count.
fn percent(share: f64) -> String {
    match 100.0 * share {
        0.0 => "0 %".to_owned(),
        percent if percent < 0.01 => "<0.01 %".to_owned(),
        percent if percent < 1.0 => format!("{percent:.2} %"),
        percent if percent < 10.0 => format!("{percent:.1} %"),
        percent if percent < 100.0 && percent > 99.0 => ">99 %".to_owned(),
        percent => format!("{percent:.0} %"),
    }
}

/// Prints such as `0.02 % underflow, 3 binades of headroom`.
impl fmt::Display for AtScale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lost, edge, overflowing, headroom, .. } = *self;
        let Some(headroom) = headroom else {
            return f.write_str("no gradient that is neither zero nor infinite");
        };
        write!(f, "{} underflow", percent(lost))?;
        if edge > lost {
            write!(f, " and {} at its edge", percent(edge))?;
        }
        match headroom {
            1 => f.write_str(", 1 binade of headroom"),
            0.. => write!(f, ", {headroom} binades of headroom"),
            _ => write!(f, ", {} overflow", percent(overflowing)),
        }
    }
}

/// Prints the advice.
impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLow { scale } => {
                write!(f, "too low, raise init_scale to at least {}", power_of_two(*scale))
            }
            Self::Unknown => f.write_str("nothing to judge"),
            Self::Healthy => f.write_str("healthy"),
            Self::TooWide => f.write_str(
                "no scale fits: use bf16, or keep the layers in f32 whose gradients differ most",
            ),
            Self::Overflowing => {
                f.write_str("most iterations overflow: a Tracer names the operation, or use bf16")
            }
            Self::BelowOne => f.write_str(
                "the scale keeps falling below 1: the model itself overflows fp16, use bf16",
            ),
        }
    }
}

/// Prints such as `at 2^13: 0.02 % underflow, 3 binades of headroom: healthy`, and the layers of which most underflows.
impl fmt::Display for HealthReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { observed, skipped, verdict, model, layers, .. } = self;
        write!(f, "at {}: {}", power_of_two(model.now.scale), model.now)?;
        if *skipped > 0 {
            write!(f, ", {skipped} of {observed} iterations skipped")?;
        }
        write!(f, ": {verdict}")?;
        let lost = |layer: &LayerHealth| layer.now.lost.max(layer.now.edge);
        let mut worst: Vec<_> = layers.iter().filter(|layer| lost(layer) > NAMED_SHARE).collect();
        worst.sort_by(|a, b| lost(b).total_cmp(&lost(a)));
        worst.iter().take(MOST_LAYERS).try_for_each(|LayerHealth { name, now, zeros, .. }| {
            write!(f, "\n  {name}: {now}, {} zeros", percent(*zeros))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    /// The whole part of log2|x|, by doubling and halving.
    fn exponent(x: f64) -> i32 {
        let (mut x, mut exponent) = (x.abs(), 0);
        while x >= 2.0 {
            (x, exponent) = (x / 2.0, exponent + 1);
        }
        while x < 1.0 {
            (x, exponent) = (x * 2.0, exponent - 1);
        }
        exponent
    }

    /// Some numbers of each of these exponents, powers of two and others, and some that have none.
    fn gradients(powers: Range<i32>) -> Vec<f64> {
        let numbers = powers.flat_map(|power| {
            // In two steps, because 2^1074 is infinite.
            let x = 2f64.powi(power / 2) * 2f64.powi(power - power / 2);
            let count = power.rem_euclid(5) as usize;
            [x, -1.75 * x].into_iter().cycle().take(count + 1)
        });
        let others = [0.0, -0.0, 0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
        numbers.chain(others).collect()
    }

    /// The counts of scaled gradients.
    fn counted(gradients: &[f64], scale_power: i32) -> ExponentRow {
        let mut row = ExponentRow { exponents: vec![0; 289], ..ExponentRow::default() };
        for x in gradients {
            if *x == 0.0 {
                row.zeros += 1;
            } else if x.is_infinite() {
                row.infinite += 1;
            } else if x.is_nan() {
                row.nan += 1;
            } else {
                let exponent = (exponent(*x) - scale_power).clamp(-160, 128);
                row.exponents[(exponent - LOWEST_EXPONENT) as usize] += 1;
            }
        }
        row
    }

    /// What a report must say of scaled gradients that are multiplied by 2^`binades`.
    fn assert_shares(at: AtScale, gradients: &[f64], binades: i32, context: &str) {
        let numbers = gradients.iter().filter(|x| x.is_finite() && **x != 0.0);
        let scaled: Vec<_> = numbers.map(|x| x.abs() * 2f64.powi(binades)).collect();
        let share = |which: &dyn Fn(f64) -> bool| {
            scaled.iter().filter(|x| which(**x)).count() as f64 / scaled.len() as f64
        };
        let [normal, smallest, too_large] = [-14, -24, 16].map(|power| 2f64.powi(power));
        assert_eq!(at.below_normal, share(&|x| x < normal), "{context}");
        assert_eq!(at.lost, share(&|x| x < smallest), "{context}");
        assert_eq!(at.edge, share(&|x| x >= smallest && x < 2.0 * smallest), "{context}");
        assert_eq!(at.overflowing, share(&|x| x >= too_large), "{context}");
        let largest = scaled.iter().copied().fold(0.0, f64::max);
        // Beyond, the last bin is all that is known.
        if largest > 2f64.powi(-100) && largest < 2f64.powi(90) {
            assert_eq!(at.headroom, Some(15 - exponent(largest)), "{context}");
        }
    }

    #[test]
    fn shares_at_another_scale_are_those_of_a_plain_loop() {
        let layers = [3..4, -28..17, -152..40, -152..127, -1074..1023].map(gradients);
        for scale_power in [0, 5, 13, 16, -3] {
            let rows = layers.iter().map(|gradients| counted(gradients, scale_power)).collect();
            let counts = ExponentCounts { observed: 1, non_finite: 1, rows };
            let names = ["a", "b", "c", "d", "e"].map(str::to_owned);
            let report = HealthReport::new(2f64.powi(scale_power), counts, &names);
            assert_eq!(report.layers.len(), layers.len());
            for (layer, gradients) in report.layers.iter().zip(&layers) {
                let context = format!("{} at 2^{scale_power}", layer.name);
                for binades in [-20, -7, -1, 0, 1, 4, 30] {
                    assert_shares(layer.at(binades), gradients, binades, &context);
                }
                assert_eq!(layer.now, layer.at(0));
                assert_eq!(layer.exponents.elements(), gradients.len() as u64);
                let finite = gradients.iter().filter(|x| x.is_finite() && **x != 0.0);
                let largest = finite.map(|x| exponent(*x) - scale_power).max();
                assert_eq!(layer.exponents.largest(), largest.map(|largest| largest.min(128)));
            }
            assert_shares(report.model.at(3), &layers.concat(), 3, "all");
        }
    }

    fn use_numbers(scale: f64, exponents: Exponents) {
        let now = AtScale { scale, ..exponents.at(1.0, 0) };
        let layer = LayerHealth { name: String::new(), zeros: 0.0, now, exponents };
        for binades in [i32::MIN, -1, 0, 1, i32::MAX] {
            let _at = layer.at(binades);
        }
        let _counts = (layer.exponents.elements(), layer.exponents.largest());
    }

    /// A report that was read from a file may have any.
    #[test]
    fn numbers_that_no_run_has_break_nothing() {
        for scale in [f64::MAX, -1e308, 5e-324, 0.0, f64::NAN, f64::INFINITY] {
            for first in [i32::MIN, -1, 0, i32::MAX] {
                for n in [0, 1, u64::MAX / 2 + 1, u64::MAX] {
                    for counts in [vec![], vec![n; 3]] {
                        use_numbers(
                            scale,
                            Exponents { zeros: n, infinite: n, nan: n, first, counts },
                        );
                    }
                }
            }
        }
    }
}
