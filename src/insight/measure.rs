//! How far a run is from the same run in f32: the measure of audits, budgets and tunings.

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::numbers;
use crate::error::{Error, Result};
use crate::ffi::OutsideRegions;
use crate::ffi::insight::Compared;

/// The numbers of a tensor without its history, and of a sparse one with its zeros.
pub(super) fn dense(tensor: &Tensor) -> Result<Tensor> {
    let _own = OutsideRegions::enter();
    Ok(if tensor.is_sparse() { tensor.f_to_dense(None, false)? } else { tensor.f_detach()? })
}

/// The sum of a tensor in f64. Synchronizes.
pub(super) fn sum(tensor: &Tensor) -> Result<f64> {
    let _own = OutsideRegions::enter();
    Ok(tensor.f_sum(Kind::Double)?.f_double_value(&[])?)
}

/// The sum of the squares.
pub(super) fn squares(tensor: &Tensor) -> Result<f64> {
    let _own = OutsideRegions::enter();
    sum(&tensor.f_square()?)
}

/// The 2-norm. Synchronizes.
pub(super) fn norm(tensor: &Tensor) -> Result<f64> {
    let _own = OutsideRegions::enter();
    Ok(tensor.f_norm()?.f_double_value(&[])?)
}

/// The norm of the difference of all gradients from those in f32, over the norm of the latter. Not finite if a gradient
/// is not.
pub(super) fn of_gradients(found: &[Option<Tensor>], f32: &[Option<Tensor>]) -> Result<f64> {
    let _own = OutsideRegions::enter();
    let (mut difference, mut norm) = (0.0, 0.0);
    for (found, exact) in found.iter().zip(f32) {
        let (Some(found), Some(exact)) = (found, exact) else { continue };
        let single = |gradient| Ok::<_, Error>(dense(gradient)?.f_to_kind(Kind::Float)?);
        let (found, exact) = (single(found)?, single(exact)?);
        difference += squares(&found.f_sub(&exact)?)?;
        norm += squares(&exact)?;
    }
    Ok(if norm > 0.0 { (difference / norm).sqrt() } else { difference.sqrt() })
}

/// The error of an operator's results, relative to their norm in f32.
pub(super) fn relative(compared: Compared) -> f64 {
    // There is nothing to be relative to.
    if compared.norm == 0.0 && compared.difference.is_finite() {
        return 0.0;
    }
    let ratio = ratio(compared.difference, compared.norm);
    if ratio.is_nan() { f64::INFINITY } else { ratio }
}

pub(super) fn ratio(a: f64, b: f64) -> f64 {
    if a == 0.0 { 0.0 } else { a / b }
}

/// The smallest noise of an error: what f32 does on other kernels and with other numbers of threads.
pub(super) const LEAST_NOISE: f64 = 2e-6;

/// The smallest noise of the median of an update, which moves few bits of a parameter.
const LEAST_NOISE_OF_UPDATE: f64 = 1e-3;

/// Numbers h beside numbers f in f32.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Deviation {
    /// ‖h − f‖ / ‖f‖, or ‖h‖ if f is zero.
    #[serde(with = "numbers")]
    pub(super) error: f64,
    /// ⟨h, f⟩ / ⟨f, f⟩: the factor by which h is larger.
    #[serde(with = "numbers")]
    pub(super) factor: f64,
    /// median |h − f| / median |f|, which a few elements do not move.
    #[serde(with = "numbers")]
    pub(super) median: f64,
}

impl Deviation {
    /// That of what is not there, or not finite.
    pub(super) const MISSING: Self =
        Self { error: f64::INFINITY, factor: f64::NAN, median: f64::INFINITY };

    /// Compares in f64. Synchronizes.
    pub(super) fn of(h: &Tensor, f: &Tensor) -> Result<Self> {
        let _own = OutsideRegions::enter();
        if h.size() != f.size() {
            return Ok(Self::MISSING);
        }
        let flat = |t: &Tensor| t.f_detach()?.f_to_kind(Kind::Double)?.f_flatten(0, -1);
        let (h, f) = (flat(h)?, flat(f)?);
        if f.numel() == 0 {
            return Ok(Self { error: 0.0, factor: 1.0, median: 0.0 });
        }
        let number = |t: Tensor| t.f_double_value(&[]);
        if number(h.f_isfinite()?.f_all()?)? == 0.0 {
            return Ok(Self::MISSING);
        }
        let norm = number(f.f_dot(&f)?)?;
        if norm == 0.0 {
            // There is nothing to be relative to: the noise is not relative, either.
            let error = number(h.f_dot(&h)?)?.sqrt();
            return Ok(Self { error, factor: 1.0, median: number(h.f_abs()?.f_median()?)? });
        }
        let difference = h.f_sub(&f)?;
        let middle = number(f.f_abs()?.f_median()?)?;
        Ok(Self {
            error: (number(difference.f_dot(&difference)?)? / norm).sqrt(),
            factor: number(h.f_dot(&f)?)? / norm,
            median: number(difference.f_abs()?.f_median()?)? / middle.max(f64::MIN_POSITIVE),
        })
    }
}

/// How far rounding alone moves numbers: the root mean squares over runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Noise {
    pub(super) error: f64,
    pub(super) median: f64,
}

impl Noise {
    pub(super) fn of(runs: &[Deviation]) -> Self {
        Self {
            error: root_mean_square(runs.iter().map(|run| run.error)),
            median: root_mean_square(runs.iter().map(|run| run.median)),
        }
    }

    /// The error as a multiple of the noise.
    pub(super) fn of_error(&self, deviation: &Deviation) -> f64 {
        multiple(deviation.error, self.error)
    }

    /// The smaller of the multiples of the error and of the median. Where a ReLU switches in half precision and in no
    /// noise run, the error grows alone.
    pub(super) fn of_gradient(&self, deviation: &Deviation) -> f64 {
        let of_median = multiple(deviation.median, self.median);
        self.of_error(deviation).min(of_median)
    }

    /// The multiple of the median of an update. The first update of Adam is a sign, so that the error has heavy tails.
    pub(super) fn of_update(&self, deviation: &Deviation) -> f64 {
        multiple(deviation.median, self.median.max(LEAST_NOISE_OF_UPDATE))
    }
}

/// The deviation of the factor of several quantities together, as a multiple of that of the runs but of no less than
/// `least`, and the factor. A quantity counts by the square of its norm.
pub(super) fn of_factors<'a>(
    least: f64,
    quantities: impl IntoIterator<Item = (f64, &'a Deviation, &'a [Deviation])> + Clone,
) -> (f64, f64) {
    let squares = || quantities.clone().into_iter().map(|(norm, _, _)| norm * norm);
    let total: f64 = squares().sum();
    if total == 0.0 {
        return (0.0, 1.0);
    }
    let mean = |factors: &dyn Fn(&Deviation, &[Deviation]) -> f64| {
        let weighted = quantities.clone().into_iter();
        weighted.map(|(norm, half, noise)| norm * norm * factors(half, noise)).sum::<f64>() / total
    };
    let half = mean(&|half, _| half.factor);
    let runs = quantities.clone().into_iter().map(|(_, _, noise)| noise.len()).min().unwrap_or(0);
    let factors = (0..runs).map(|run| mean(&|_, noise| noise[run].factor) - 1.0);
    (multiple((half - 1.0).abs(), root_mean_square(factors).max(least)), half)
}

pub(super) fn root_mean_square(numbers: impl Iterator<Item = f64>) -> f64 {
    let (mut sum, mut count) = (0.0, 0.0);
    for number in numbers {
        sum += number * number;
        count += 1.0;
    }
    if count > 0.0 { f64::sqrt(sum / count) } else { 0.0 }
}

/// A number as a multiple of its noise. What is not finite is beyond every limit.
pub(super) fn multiple(number: f64, noise: f64) -> f64 {
    if number.is_finite() { number / noise.max(LEAST_NOISE) } else { f64::INFINITY }
}
