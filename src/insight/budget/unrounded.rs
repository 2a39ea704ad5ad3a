//! The common parts of the noise runs and the run in half precision besides rounding: an enabled scaler, and branches
//! of the program on it, on whether a region is open or on the dtype of the run.

use tch::{Device, Kind, Tensor};

use super::program::{Mode, Observed, Value};
use super::report::{Measured, named};
use super::{BudgetProblem, BudgetQuantity, Runner, ScaleFault, compared};
use crate::error::Result;
use crate::ffi::emulation::Rounding;
use crate::ffi::{self, OutsideRegions};
use crate::insight::measure::{Deviation, LEAST_NOISE, Noise, norm};

/// The scales that are tried, as multiples of that of the run in half precision, until two of them do not overflow.
/// None is that of the run before, which a stale scale would be. The last two are near it, for a fault that overflows
/// further away.
const SCALES: [f64; 6] = [4.0, 1.0 / 16.0, 1.0 / 1024.0, 1.0 / 65536.0, 0.25, 2.0];

/// Instead of a scale of 1. No other of these multiples is as large there.
const INSTEAD_OF_ONE: f64 = 128.0;

/// A scale at which no gradients are clipped that are not unscaled.
const TINY: f64 = 1.0 / 1_073_741_824.0;

/// The largest part of the noise that a quantity may be moved without any rounding.
const PART_OF_NOISE: f64 = 0.25;

/// How many times as far from f32 as another run in f32 a quantity is that no order of sums explains.
const UNSTEADY: f64 = 100.0;

/// The relative error up to which gradients follow a pattern, and up to which two scales move them alike.
const PATTERN: f64 = 1e-2;
const SAME: f64 = 1e-4;

/// How far f32 rounds gradients that are multiplied by a factor.
const ROUNDED: f64 = 1.0 / 4_194_304.0;

/// The relative change up to which clipping hides a factor, and how far the factors that it leaves at two scales are
/// from each other. It divides by the norm and a small number, of which a scale changes the proportion.
const HIDDEN: f64 = 1e-3;
const ALIKE: f64 = 0.1;

/// The differences between f32 and a run that has all that noise has but the rounding.
#[derive(Default)]
pub(super) struct Unrounded {
    /// Faults in the use of the scale.
    pub(super) problems: Vec<BudgetProblem>,
    /// How far the quantities are from those in f32, if it is not the scale that moves them.
    deviations: Option<Vec<Deviation>>,
}

/// Runs the iteration in f32 with a scale and with regions that say that they are on. Multiplying by a power of two is
/// exact, and a backward pass is linear, so that no bit may change; if one does, more runs find out why.
pub(super) fn look(runner: &mut Runner<'_>, f32: &Observed, half: &Observed) -> Result<Unrounded> {
    if !f32.returned.is_empty() {
        // That is a problem by itself, and such a run is rounded.
        return Ok(Unrounded::default());
    }
    // A program without a scaler is not concerned.
    let scales = scales(half);
    let inside = Mode::Emulated(Rounding::None);
    let mut exact = runner.run_afresh(inside, Some(scales[0]), None)?;
    for &scale in &scales[1..] {
        if !half.is_scaled || !overflows(f32, &exact) {
            break;
        }
        exact = runner.run_afresh(inside, Some(scale), None)?;
    }
    if differing(f32, &exact)?.is_empty() {
        return Ok(Unrounded::default());
    }
    if half.is_scaled {
        // A fault in a branch that the program takes in half precision shows there alone.
        for mode in [Mode::F32, inside] {
            let unscaled = match mode {
                Mode::F32 => None,
                _ => Some(runner.run_afresh(mode, None, None)?),
            };
            let unscaled = unscaled.as_ref().unwrap_or(f32);
            let steady = Steady { unscaled, again: runner.run_afresh(mode, None, None)? };
            if let Some(problem) = of_scale(runner, mode, &steady, &scales)? {
                return Ok(Unrounded { problems: vec![problem], deviations: None });
            }
        }
    }
    Ok(Unrounded { problems: Vec::new(), deviations: Some(compared(f32, &exact)?) })
}

impl Unrounded {
    /// Returns the quantities that move by a part of the noise or more although nothing is rounded, so that the noise
    /// is no measure of rounding.
    pub(super) fn branches(&self, measured: &Measured) -> Option<BudgetProblem> {
        let beside = measured.quantities.iter().zip(self.deviations.as_deref()?);
        let is_far = |noise: &Noise, deviation: &Deviation| {
            let least = LEAST_NOISE / PART_OF_NOISE;
            deviation.error.is_nan() || deviation.error > PART_OF_NOISE * noise.error.max(least)
        };
        let names: Vec<String> = beside
            .filter(|(known, deviation)| {
                known.quantity != BudgetQuantity::Update
                    && is_far(&Noise::of(&known.noise), deviation)
            })
            .map(|(known, _)| named(known.quantity, &known.name))
            .collect();
        (!names.is_empty()).then_some(BudgetProblem::OtherThanRounding(names))
    }
}

/// The scales that are tried: powers of two other than 1, at which no fault would show.
fn scales(half: &Observed) -> [f64; SCALES.len()] {
    SCALES.map(|multiple| {
        let scale = half.scale * multiple;
        if scale == 1.0 { INSTEAD_OF_ONE } else { scale }
    })
}

fn overflows(f32: &Observed, other: &Observed) -> bool {
    other.is_skipped || !other.not_finite.is_subset(&f32.not_finite)
}

/// The places of the quantities that are not bit for bit those in f32. Differences below f32's smallest normal number,
/// where scaling is not exact, do not count, and an update does only if the gradients are the same.
fn differing(f32: &Observed, other: &Observed) -> Result<Vec<usize>> {
    let (mut found, mut is_moved) = (Vec::new(), false);
    let beside = f32.values.iter().zip(f32.beside(other));
    for (index, ((quantity, _, f), h)) in beside.enumerate() {
        let (is_same, is_near) = h.map_or(Ok((false, false)), |h| same(h, f))?;
        if !(is_near || is_moved && *quantity == BudgetQuantity::Update) {
            found.push(index);
        }
        is_moved = match quantity {
            BudgetQuantity::Gradient => is_moved || !is_same,
            _ => false,
        };
    }
    Ok(found)
}

/// Returns whether numbers are the same, and whether they are the same but for numbers that f32 cannot hold exactly.
fn same(h: &Tensor, f: &Tensor) -> Result<(bool, bool)> {
    let _own = OutsideRegions::enter();
    if h.size() != f.size() {
        return Ok((false, false));
    }
    if h.kind() == f.kind() && h.f_equal(f)? {
        return Ok((true, true));
    }
    let difference = h.f_to_kind(Kind::Double)?.f_sub(&f.f_to_kind(Kind::Double)?)?;
    let largest = difference.f_abs()?.f_max()?.f_double_value(&[])?;
    Ok((false, largest < f64::from(f32::MIN_POSITIVE)))
}

/// Two runs without a scale, which differ where the order of sums is not fixed.
struct Steady<'a> {
    unscaled: &'a Observed,
    again: Observed,
}

impl Steady<'_> {
    /// Returns the quantities that differ in another run by more than the two do.
    fn differing(&self, other: &Observed) -> Result<Vec<usize>> {
        let unsteady = differing(self.unscaled, &self.again)?;
        let mut found = differing(self.unscaled, other)?;
        if unsteady.is_empty() {
            return Ok(found);
        }
        let (repeated, far) =
            (compared(self.unscaled, &self.again)?, compared(self.unscaled, other)?);
        found.retain(|&index| {
            let least = repeated[index].error.max(LEAST_NOISE);
            let is_update = self.unscaled.values[index].0 == BudgetQuantity::Update;
            let error = far[index].error;
            !is_update && (error.is_nan() || error > UNSTEADY * least)
        });
        Ok(found)
    }
}

/// Finds what the program does wrong with the scale, by runs at two scales that do not overflow.
fn of_scale(
    runner: &mut Runner<'_>,
    mode: Mode,
    steady: &Steady<'_>,
    scales: &[f64],
) -> Result<Option<BudgetProblem>> {
    let mut at = Vec::new();
    for &scale in scales {
        let scaled = runner.run_afresh(mode, Some(scale), None)?;
        if !overflows(steady.unscaled, &scaled) {
            at.push((scale, scaled));
        }
        if at.len() == 2 {
            break;
        }
    }
    let Some((scale, first)) = at.first() else { return Ok(None) };
    let found = steady.differing(first)?;
    if found.is_empty() {
        return Ok(None);
    }
    let values = &steady.unscaled.values;
    let is_gradient = |index: &usize| values[*index].0 == BudgetQuantity::Gradient;
    let all = (0..values.len()).filter(is_gradient).count();
    let mut indices: Vec<usize> = found.iter().copied().filter(is_gradient).collect();
    let fault = match at.as_slice() {
        [first, second] if !indices.is_empty() => {
            let found = fault(steady.unscaled, [first, second], &mut indices)?;
            match found {
                None => hidden(runner, mode, steady.unscaled, &first.1, &indices)?,
                found => found,
            }
        }
        _ => Some(ScaleFault::Other),
    };
    let Some(fault) = fault else {
        // The scale does not matter: the program asks whether the scaler is enabled.
        let names = found.iter().map(|&index| text(&values[index])).collect();
        return Ok(Some(BudgetProblem::OtherThanRounding(names)));
    };
    let names = match fault {
        ScaleFault::Other => found.iter().map(|&index| text(&values[index])).collect(),
        // Some may be rounded to the same numbers.
        ScaleFault::HiddenByClipping => Vec::new(),
        // All others follow from them.
        _ if indices.len() == all => Vec::new(),
        _ => indices.iter().map(|&index| values[index].1.clone()).collect(),
    };
    Ok(Some(BudgetProblem::Scaling { scale: *scale, fault, names }))
}

/// Returns the fault of gradients that are the same at two scales, if they are others at a scale that is so small that
/// what clips them at all others does not.
fn hidden(
    runner: &mut Runner<'_>,
    mode: Mode,
    f32: &Observed,
    first: &Observed,
    indices: &[usize],
) -> Result<Option<ScaleFault>> {
    let tiny = runner.run_afresh(mode, Some(TINY), None)?;
    if overflows(f32, &tiny) {
        return Ok(None);
    }
    let [Some(f), Some(h1), Some(h2)] = [
        gradients(f32, f32, indices)?,
        gradients(first, f32, indices)?,
        gradients(&tiny, f32, indices)?,
    ] else {
        return Ok(None);
    };
    let _own = OutsideRegions::enter();
    let [f, h1, h2] = [Tensor::f_cat(&f, 0)?, Tensor::f_cat(&h1, 0)?, Tensor::f_cat(&h2, 0)?];
    if !depends_on_scale(&f, [&h1, &h2])? {
        return Ok(None);
    }
    let is_hidden = is_multiple(&Deviation::of(&h1, &f)?);
    Ok(Some(if is_hidden {
        ScaleFault::HiddenByClipping
    } else {
        ScaleFault::ChangedBeforeUnscaling
    }))
}

/// A quantity and its name.
fn text((quantity, name, _): &Value) -> String {
    named(*quantity, name)
}

/// Recognizes a fault by how the gradients at two scales follow from those in f32; returns `None` for a difference that
/// does not depend on the scale. If most gradients have a factor in common, such as that of clipping, and the fault is
/// in the others, only the places of these are left in `indices`. One that is so large that clipping leaves nothing of
/// the rest looks like a loss of which the rest is not scaled.
fn fault(
    f32: &Observed,
    at: [&(f64, Observed); 2],
    indices: &mut Vec<usize>,
) -> Result<Option<ScaleFault>> {
    let scales = at.map(|(scale, _)| *scale);
    let [Some(f), Some(h1), Some(h2)] = [
        gradients(f32, f32, indices)?,
        gradients(&at[0].1, f32, indices)?,
        gradients(&at[1].1, f32, indices)?,
    ] else {
        return Ok(None);
    };
    let _own = OutsideRegions::enter();
    let all = |of: &[Tensor]| Tensor::f_cat(of, 0);
    let of_all = pattern(&all(&f)?, [&all(&h1)?, &all(&h2)?], scales)?;
    let is_changed = of_all == Some(ScaleFault::ChangedBeforeUnscaling);
    if !is_changed && !matches!(of_all, Some(ScaleFault::PartNotScaled(_))) {
        return Ok(of_all);
    }
    let (common, others) = uncommon(&f, [&h1, &h2])?;
    if others.is_empty() || others.len() == f.len() {
        return Ok(of_all);
    }
    let some =
        |of: &[Tensor]| Tensor::f_cat(&others.iter().map(|&i| &of[i]).collect::<Vec<_>>(), 0);
    let alike =
        |of: &[Tensor], factor: f64| -> Result<Tensor> { Ok(some(of)?.f_div(&number(factor)?)?) };
    let of_others =
        pattern(&some(&f)?, [&alike(&h1, common[0])?, &alike(&h2, common[1])?], scales)?;
    let is_told = match of_others {
        Some(ScaleFault::NotUnscaled | ScaleFault::ScaledTwice) => true,
        Some(ScaleFault::ChangedBeforeUnscaling) => false,
        _ => is_changed,
    };
    if !is_told {
        return Ok(of_all);
    }
    *indices = others.into_iter().map(|i| indices[i]).collect();
    Ok(of_others)
}

/// The numbers of gradients in f64, on the CPU; `None` if one is missing or not finite.
fn gradients(of: &Observed, f32: &Observed, indices: &[usize]) -> Result<Option<Vec<Tensor>>> {
    let _own = OutsideRegions::enter();
    let (known, mut flat) = (f32.beside(of), Vec::new());
    for &index in indices {
        let Some(gradient) = known[index] else { return Ok(None) };
        let wide = gradient.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?.f_flatten(0, -1)?;
        if wide.f_isfinite()?.f_all()?.f_int64_value(&[])? == 0 {
            return Ok(None);
        }
        flat.push(wide);
    }
    Ok(Some(flat))
}

/// The factor that most gradients have in common at each scale, and the places of those that have another.
fn uncommon(f: &[Tensor], at: [&[Tensor]; 2]) -> Result<([f64; 2], Vec<usize>)> {
    let factors = |h: &[Tensor]| -> Result<Vec<f64>> {
        f.iter().zip(h).map(|(f, h)| Ok(Deviation::of(h, f)?.factor)).collect()
    };
    let of_scales = [factors(at[0])?, factors(at[1])?];
    let common = of_scales.each_ref().map(|factors| {
        let mut sorted = factors.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    });
    let is_other = |&i: &usize| {
        of_scales.iter().zip(common).any(|(factors, common)| !is_near(factors[i], common))
    };
    Ok((common, (0..f.len()).filter(is_other).collect()))
}

/// A number beside those of [`gradients`].
fn number(x: f64) -> Result<Tensor> {
    ffi::number_new(x, Kind::Double, Device::Cpu)
}

fn is_near(a: f64, b: f64) -> bool {
    (a / b - 1.0).abs() < PATTERN
}

/// Returns whether numbers at two scales differ from each other, and not only from those in f32.
fn depends_on_scale(f: &Tensor, [h1, h2]: [&Tensor; 2]) -> Result<bool> {
    let _own = OutsideRegions::enter();
    Ok(norm(&h2.f_sub(h1)?)? > SAME * norm(&h1.f_sub(f)?)?)
}

/// The part of an error that is no common factor.
fn rest(d: &Deviation) -> f64 {
    (d.error * d.error - (d.factor - 1.0).powi(2)).max(0.0).sqrt()
}

fn is_multiple(d: &Deviation) -> bool {
    rest(d) <= PATTERN * d.factor.abs()
}

/// Returns whether clipping to a norm has made multiples of these at two scales: the numbers themselves but for what it
/// adds to the norm, or, if those in f32 are not clipped, larger ones that hardly depend on the scale.
fn is_hidden(d1: &Deviation, d2: &Deviation) -> bool {
    let is_small = |d: &Deviation| {
        let change = (d.factor - 1.0).abs();
        change <= HIDDEN && rest(d) <= f64::max(ALIKE * change, ROUNDED)
    };
    let is_large = |d: &Deviation| d.factor > 1.0 + HIDDEN;
    let are_alike = (d1.factor / d2.factor - 1.0).abs() <= ALIKE;
    is_small(d1) && is_small(d2) || is_large(d1) && is_large(d2) && are_alike
}

/// Returns the pattern of numbers at two scales beside those in f32; nothing if it is not the scale that moves them.
fn pattern(f: &Tensor, [h1, h2]: [&Tensor; 2], [s1, s2]: [f64; 2]) -> Result<Option<ScaleFault>> {
    let _own = OutsideRegions::enter();
    let (d1, d2) = (Deviation::of(h1, f)?, Deviation::of(h2, f)?);
    if !depends_on_scale(f, [h1, h2])? {
        return Ok(None);
    }
    let are_multiples = is_multiple(&d1) && is_multiple(&d2);
    if are_multiples {
        let (f1, f2) = (d1.factor, d2.factor);
        if is_hidden(&d1, &d2) {
            return Ok(Some(ScaleFault::HiddenByClipping));
        }
        if is_near(f1, s1 * s1) && is_near(f2, s2 * s2) {
            return Ok(Some(ScaleFault::ScaledTwice));
        }
        if is_near(f1, s1) && is_near(f2, s2) {
            return Ok(Some(ScaleFault::NotUnscaled));
        }
        // Larger by what is clipped in only one of the two.
        if is_near(f1 * s1, f2 * s2) && f1 * s1 > 1.0 - PATTERN {
            return Ok(Some(ScaleFault::UnscaledTwice));
        }
        // Clipping makes nothing larger. What it does change is too small, and shows too large a divisor.
        if is_near(f1 / s1, f2 / s2) || f1 > 1.0 + PATTERN || f2 > 1.0 + PATTERN {
            return Ok(Some(ScaleFault::UnscaledByAnother(f64::min(s1 / f1, s2 / f2))));
        }
    }
    // A part that is divided by the scale, or multiplied by it, once more than the rest. The gradients are a multiple
    // if those of both parts are, as of two equal micro-batches; of those that are clipped, the part would be all.
    let part =
        |h: &Tensor, whole: f64| -> Result<Tensor> { Ok(f.f_sub(h)?.f_div(&number(whole)?)?) };
    let share = |w1: f64, w2: f64| -> Result<Option<f64>> {
        let (one, other) = (part(h1, w1)?, part(h2, w2)?);
        let is_same = Deviation::of(&other, &one)?.error <= PATTERN;
        is_same.then(|| Ok(norm(&one)? / norm(f)?)).transpose()
    };
    let is_part = |share: &f64| !are_multiples || *share < 1.0 - PATTERN;
    if let Some(share) = share(1.0 - 1.0 / s1, 1.0 - 1.0 / s2)?.filter(is_part) {
        return Ok(Some(ScaleFault::PartNotScaled(share)));
    }
    if are_multiples {
        return Ok(Some(ScaleFault::ChangedBeforeUnscaling));
    }
    if let Some(share) = share(1.0 - s1, 1.0 - s2)? {
        return Ok(Some(ScaleFault::PartNotUnscaled(share)));
    }
    Ok(Some(ScaleFault::ChangedBeforeUnscaling))
}
