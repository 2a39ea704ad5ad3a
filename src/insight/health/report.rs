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
/// Shares are those of the gradients that are neither zero, infinite nor NaN, unless said otherwise.
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
    /// All layers together.
    pub model: LayerHealth,
    /// The layers that have gradients, in the order of their names.
    pub layers: Vec<LayerHealth>,
}

/// The gradients of a layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LayerHealth {
    /// The name of the layer; `model` for all layers together.
    pub name: String,
    /// The share of zeros among all elements. Whether they were zero before they were rounded, nobody knows.
    pub zeros: f64,
    /// The shares at the scale of the report.
    pub now: AtScale,
    /// How often each exponent occurs among them.
    pub exponents: Exponents,
}

/// The fate of gradients in fp16 if they are multiplied by a scale.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AtScale {
    /// The scale by which the gradients are multiplied.
    pub scale: f64,
    /// The share below fp16's smallest normal number, 2^-14, where precision is lost. Includes `lost`.
    pub below_normal: f64,
    /// The share below fp16's smallest subnormal number, 2^-24: they become zero, or at best that number.
    pub lost: f64,
    /// The share from 2^-24 to 2^-23, the last binade that is not lost. Of gradients that have been fp16, what is lost
    /// is zero already, and so `lost` is zero. If gradients are spread evenly around zero, up to as many are lost as
    /// there are here.
    pub edge: f64,
    /// The share of at least 2^16, which overflows.
    pub overflowing: f64,
    /// How many times the scale can be doubled before the largest element, rounded down to a power of two, exceeds
    /// 2^15, the exponent of fp16's largest number, 65504. Negative if it does already. `None` if all elements are
    /// zero, infinite or NaN.
    pub headroom: Option<i32>,
}

/// How often each exponent occurs among gradients, which are divided by the power of two that is at most the scale.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Exponents {
    /// The number of elements that are zero.
    pub zeros: u64,
    /// The number of infinite elements.
    pub infinite: u64,
    /// The number of elements that are NaN.
    pub nan: u64,
    /// The exponent of the first number in `counts`: `e` for elements from 2^e to 2^(e+1).
    pub first: i32,
    /// How many elements have each exponent. Those below -160 are counted there, and those above 128 there.
    pub counts: Vec<u64>,
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

    /// Returns what would become of the layer's gradients if the scale were multiplied by 2^`binades`.
    pub fn at(&self, binades: i32) -> AtScale {
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

    /// Returns the number of all elements.
    pub fn elements(&self) -> u64 {
        total([self.zeros, self.infinite, self.nan, self.counted()])
    }

    /// Returns the number of elements that are neither zero, infinite nor NaN.
    pub(in crate::insight) fn counted(&self) -> u64 {
        total(self.counts.iter().copied())
    }

    /// Returns the exponent of the largest element that is neither zero, infinite nor NaN.
    pub fn largest(&self) -> Option<i32> {
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

/// The numbers of an `AtScale` without the scale.
fn shares(at: &AtScale) -> String {
    let AtScale { lost, edge, overflowing, headroom, .. } = *at;
    let Some(headroom) = headroom else {
        return "no gradient that is neither zero nor infinite".to_owned();
    };
    let is_at_edge =
        if edge > lost { format!(" and {} at its edge", percent(edge)) } else { String::new() };
    let room = match headroom {
        1 => "1 binade of headroom".to_owned(),
        0.. => format!("{headroom} binades of headroom"),
        _ => format!("{} overflow", percent(overflowing)),
    };
    format!("{} underflow{is_at_edge}, {room}", percent(lost))
}

/// Prints such as `at 2^13: 0.02 % underflow, 3 binades of headroom`.
impl fmt::Display for AtScale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {}: {}", power_of_two(self.scale), shares(self))
    }
}

/// Prints such as `layers.3.q: 31 % underflow, 5 binades of headroom, 12 % zeros`.
impl fmt::Display for LayerHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}, {} zeros", self.name, shares(&self.now), percent(self.zeros))
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
        write!(f, "{}", model.now)?;
        if *skipped > 0 {
            write!(f, ", {skipped} of {observed} iterations skipped")?;
        }
        write!(f, ": {verdict}")?;
        let lost = |layer: &LayerHealth| layer.now.lost.max(layer.now.edge);
        let mut worst: Vec<_> = layers.iter().filter(|layer| lost(layer) > NAMED_SHARE).collect();
        worst.sort_by(|a, b| lost(b).total_cmp(&lost(a)));
        worst.iter().take(MOST_LAYERS).try_for_each(|layer| write!(f, "\n  {layer}"))
    }
}
