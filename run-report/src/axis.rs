//! The axes of the plots: the positions of values, and the ticks.

/// The spacing of values along an axis, which determines the ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spacing {
    /// Linear, with ticks at 1, 2 or 5 times a power of ten.
    Linear,
    /// Logarithmic, with ticks at powers of ten.
    Log10,
    /// Logarithmic, with ticks at powers of two.
    Log2,
}

/// One axis: a range of values and their spacing.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    /// The quantity on the axis, with its unit.
    pub(super) label: String,
    spacing: Spacing,
    min: f64,
    max: f64,
}

/// A labelled position on an axis.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tick {
    /// The value it marks.
    pub(super) value: f64,
    /// The text of the value.
    pub(super) label: String,
}

impl Axis {
    /// An axis over all of `values`, widened to whole powers where the spacing is logarithmic.
    ///
    /// Values that cannot be drawn (not finite, or not positive on a logarithmic axis) are left out.
    pub(super) fn over(label: &str, spacing: Spacing, values: impl Iterator<Item = f64>) -> Self {
        let drawable =
            |value: &f64| value.is_finite() && (spacing == Spacing::Linear || *value > 0.0);
        let (min, max) = values
            .filter(drawable)
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(min, max), v| (min.min(v), max.max(v)));
        let (min, max) = if min > max { (1.0, 1.0) } else { (min, max) };
        let (min, max) = match spacing {
            Spacing::Linear => apart(min, max),
            Spacing::Log10 | Spacing::Log2 => whole_powers(spacing.base(), min, max),
        };
        Self { label: label.to_owned(), spacing, min, max }
    }

    /// The position of `value`, from 0 at the low end to 1 at the high end. Values outside are moved to the nearer end.
    pub(super) fn position(&self, value: f64) -> f64 {
        let fraction = match self.spacing {
            Spacing::Linear => (value - self.min) / (self.max - self.min),
            Spacing::Log10 | Spacing::Log2 => (value / self.min).ln() / (self.max / self.min).ln(),
        };
        if fraction.is_nan() { 0.0 } else { fraction.clamp(0.0, 1.0) }
    }

    /// The same axis over other values.
    pub(super) fn respanned(&self, values: impl Iterator<Item = f64>) -> Self {
        Self::over(&self.label, self.spacing, values)
    }

    /// About five to ten labelled values inside the range.
    pub(super) fn ticks(&self) -> Vec<Tick> {
        match self.spacing {
            Spacing::Linear => linear_ticks(self.min, self.max),
            Spacing::Log10 | Spacing::Log2 => power_ticks(self.spacing.base(), self.min, self.max),
        }
    }
}

impl Spacing {
    fn base(self) -> f64 {
        if self == Self::Log2 { 2.0 } else { 10.0 }
    }
}

/// The exponent of the largest power of ten on an axis. The smallest one is its inverse.
const LARGEST: f64 = 300.0;

/// The ends of a linear axis, far enough apart for ticks between them, and near enough for their distance to be finite.
fn apart(min: f64, max: f64) -> (f64, f64) {
    let largest = 10f64.powf(LARGEST);
    let (min, max) = (min.clamp(-largest, largest), max.clamp(-largest, largest));
    let size = min.abs().max(max.abs());
    if max - min >= (1e-12 * size).max(1.0 / largest) {
        return (min, max);
    }
    let room = (1e-3 * size).max(1.0);
    (min - room, max + room)
}

/// Exponents are rounded if they differ from a whole number only by the rounding of the logarithm.
fn exponent(base: f64, value: f64) -> f64 {
    let exponent = value.ln() / base.ln();
    if (exponent - exponent.round()).abs() < 1e-9 { exponent.round() } else { exponent }
}

fn whole_powers(base: f64, min: f64, max: f64) -> (f64, f64) {
    let most = (LARGEST / base.log10()).floor();
    let (low, high) = (exponent(base, min).floor(), exponent(base, max).ceil());
    let (low, high) = (low.clamp(-most, most - 1.0), high.clamp(-most, most));
    let high = if low == high { low + 1.0 } else { high };
    (base.powf(low), base.powf(high))
}

fn linear_ticks(min: f64, max: f64) -> Vec<Tick> {
    let raw = (max - min) / 8.0;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    let step = step.into_iter().find(|step| *step >= raw).unwrap_or(10.0 * power);
    let decimals = (-step.log10().floor()).max(0.0) as usize;
    let whole = (min / step).ceil() as i64..=(max / step).floor() as i64;
    whole
        .map(|index| index as f64 * step)
        .map(|value| Tick { value, label: number(value, decimals) })
        .collect()
}

/// A number with so many decimals, or with a power of ten if it would have too many digits.
fn number(value: f64, decimals: usize) -> String {
    if decimals > 8 || value.abs() >= 1e9 {
        return format!("{value:.3e}");
    }
    format!("{value:.decimals$}")
}

fn power_ticks(base: f64, min: f64, max: f64) -> Vec<Tick> {
    let (low, high) = (exponent(base, min) as i32, exponent(base, max) as i32);
    let stride = ((high - low) / 10 + 1) as usize;
    (low..=high)
        .step_by(stride)
        .map(|power| Tick { value: base.powi(power), label: power_label(base, power) })
        .collect()
}

fn power_label(base: f64, power: i32) -> String {
    let digits = power.to_string();
    let raised = digits.chars().map(|c| match c.to_digit(10) {
        Some(digit) => ['⁰', '¹', '²', '³', '⁴', '⁵', '⁶', '⁷', '⁸', '⁹'][digit as usize],
        None => '⁻',
    });
    format!("{base}{}", raised.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(spacing: Spacing, min: f64, max: f64) -> Axis {
        Axis::over("label", spacing, [min, max].into_iter())
    }

    fn labels(axis: Axis) -> Vec<String> {
        axis.ticks().into_iter().map(|tick| tick.label).collect()
    }

    #[test]
    fn linear_ticks_are_round_numbers_inside_the_range() {
        assert_eq!(labels(axis(Spacing::Linear, 0.0, 440.0)), ["0", "100", "200", "300", "400"]);
        assert_eq!(labels(axis(Spacing::Linear, 0.1, 0.8))[..2], ["0.1", "0.2"]);
        for (min, max) in [(0.0, 7.0), (-3.0, 11.5), (0.001, 0.0023), (5.0, 5.0), (0.0, 12345.0)] {
            let axis = axis(Spacing::Linear, min, max);
            let ticks = axis.ticks();
            assert!((3..=11).contains(&ticks.len()), "{min}..{max}: {ticks:?}");
            assert!(
                ticks.iter().all(|t| t.value >= axis.min - 1e-12 && t.value <= axis.max + 1e-12)
            );
        }
    }

    #[test]
    fn log_axes_span_whole_powers_and_label_them() {
        assert_eq!(
            labels(axis(Spacing::Log10, 0.004, 2.3)),
            ["10⁻³", "10⁻²", "10⁻¹", "10⁰", "10¹"]
        );
        assert_eq!(labels(axis(Spacing::Log2, 65536.0, 131072.0)), ["2¹⁶", "2¹⁷"]);
        assert_eq!(labels(axis(Spacing::Log2, 1.0, 2f64.powi(24))).len(), 9);
    }

    #[test]
    fn a_power_of_the_base_is_its_own_bound() {
        for power in -10..=30 {
            let value = 2f64.powi(power);
            let axis = axis(Spacing::Log2, value, 4.0 * value);
            assert_eq!((axis.min, axis.max), (value, 4.0 * value));
        }
    }

    #[test]
    fn positions_run_from_zero_to_one_and_keep_the_order() {
        let log = axis(Spacing::Log10, 0.01, 100.0);
        for (value, want) in [(0.01, 0.0), (0.1, 0.25), (1.0, 0.5), (10.0, 0.75), (100.0, 1.0)] {
            assert!((log.position(value) - want).abs() < 1e-12, "{value}");
        }
        let linear = axis(Spacing::Linear, -1.0, 3.0);
        assert_eq!([-1.0, 0.0, 1.0, 3.0].map(|v| linear.position(v)), [0.0, 0.25, 0.5, 1.0]);
    }

    #[test]
    fn every_number_has_an_axis_with_a_few_short_labels() {
        let numbers =
            [0.0, 5e-324, 1e-300, 1.0, 1.0 + f64::EPSILON, 1e16, 1e16 + 2.0, 1e300, f64::MAX];
        let all = numbers.into_iter().flat_map(|number| [number, -number]);
        for (low, high) in all.clone().flat_map(|low| all.clone().map(move |high| (low, high))) {
            for spacing in [Spacing::Linear, Spacing::Log10, Spacing::Log2] {
                let axis = axis(spacing, low.min(high), low.max(high));
                let ticks = axis.ticks();
                assert!((2..=12).contains(&ticks.len()), "{spacing:?}, {low}, {high}: {ticks:?}");
                for Tick { value, label } in &ticks {
                    assert!(
                        value.is_finite() && label.chars().count() < 14,
                        "{low}, {high}: {label}"
                    );
                }
                assert!(axis.position(low.min(high)) <= axis.position(low.max(high)));
            }
        }
    }

    #[test]
    fn values_that_cannot_be_drawn_stay_inside_the_picture() {
        for spacing in [Spacing::Linear, Spacing::Log10, Spacing::Log2] {
            let values = [f64::NAN, 2.0, f64::INFINITY, 8.0];
            let axis = Axis::over("label", spacing, values.into_iter());
            for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -1.0, 1e300] {
                assert!((0.0..=1.0).contains(&axis.position(value)), "{spacing:?} {value}");
            }
            assert!(axis.min <= 2.0 && axis.max >= 8.0 && axis.max < 100.0);
            assert!(Axis::over("label", spacing, std::iter::empty()).ticks().len() >= 2);
        }
    }
}
