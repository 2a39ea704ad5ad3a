//! What rounding cannot change.

use std::collections::BTreeSet;

use tch::{Kind, Tensor};

use super::program::Observed;
use super::report::{Measured, MeasuredQuantity};
use super::{Budget, BudgetProblem, BudgetQuantity};
use crate::error::Result;
use crate::ffi::OutsideRegions;
use crate::patterns::matches_any;

/// What differs between an iteration in half precision and the same in f32.
pub(super) fn problems(
    f32: &Observed,
    half: &Observed,
    dtype: Kind,
    budget: &Budget<'_>,
    measured: &Measured,
) -> Vec<BudgetProblem> {
    let mut problems = of_operators(f32, half, dtype);
    problems.extend(of_dtypes(f32, half));
    problems.extend(of_gradients(f32, half, budget, measured));
    problems.extend(untrained(f32, half, &budget.unused));
    problems.extend(of_steps(f32, half));
    if f32.random != half.random {
        problems.push(BudgetProblem::RandomNumbers);
    }
    let not_finite = names(half.not_finite.difference(&f32.not_finite));
    if !not_finite.is_empty() {
        problems.push(BudgetProblem::NotFinite(not_finite));
    }
    if half.scale.log2().fract() != 0.0 {
        problems.push(BudgetProblem::Scale(half.scale));
    }
    problems
}

fn of_operators(f32: &Observed, half: &Observed, dtype: Kind) -> Vec<BudgetProblem> {
    let other = half.returned.iter().find(|&&kind| kind != dtype);
    // A region that is switched off has f32, which is not among these.
    let nothing = dtype != Kind::Float && !half.returned.contains(&dtype);
    let in_f32 = f32.returned.first();
    let other = other.map(|&kind| BudgetProblem::OtherHalf(kind.into()));
    let in_f32 = in_f32.map(|&kind| BudgetProblem::HalfInF32(kind.into()));
    let nothing = nothing.then_some(BudgetProblem::NothingInHalf);
    [other, nothing, in_f32].into_iter().flatten().collect()
}

fn of_dtypes(f32: &Observed, half: &Observed) -> Vec<BudgetProblem> {
    let beside = f32.dtypes.iter().map(|(name, &of_f32)| (name, of_f32, half.dtypes.get(name)));
    let differ = beside.filter_map(|(name, f32, half)| Some((name, f32, *half?)));
    let differ = differ.filter(|(_, f32, half)| f32 != half);
    differ.map(|(name, f32, half)| BudgetProblem::Dtype { name: name.clone(), f32, half }).collect()
}

/// Where a gradient is rounding alone, that decides whether it is zero, and whether it is too small to change a
/// parameter.
fn of_gradients(
    f32: &Observed,
    half: &Observed,
    budget: &Budget<'_>,
    measured: &Measured,
) -> Vec<BudgetProblem> {
    let alone = |one: &BTreeSet<String>, other: &BTreeSet<String>| names(one.difference(other));
    let exact = |one: &BTreeSet<String>, other: &BTreeSet<String>| {
        let mut names = alone(one, other);
        names.retain(|name| {
            let is_allowed = matches_any(&budget.underflow, name);
            let known = measured.gradient(name);
            !known.is_some_and(|known| known.is_only_noise() && (is_allowed || !known.underflows()))
        });
        names
    };
    let all = [
        BudgetProblem::Gradients {
            missing: alone(&half.without_gradient, &f32.without_gradient),
            added: alone(&f32.without_gradient, &half.without_gradient),
        },
        BudgetProblem::ZeroGradients {
            half: exact(&half.zero_gradient, &f32.zero_gradient),
            f32: exact(&f32.zero_gradient, &half.zero_gradient),
        },
        BudgetProblem::Unchanged {
            half: exact(&half.unchanged, &f32.unchanged),
            f32: exact(&f32.unchanged, &half.unchanged),
        },
    ];
    all.into_iter().filter(|problem| !problem.is_empty()).collect()
}

fn untrained(f32: &Observed, half: &Observed, unused: &[String]) -> Option<BudgetProblem> {
    let nothing = |run: &Observed| &run.without_gradient | &run.zero_gradient;
    let mut untrained = names(nothing(f32).intersection(&nothing(half)));
    untrained.retain(|name| !matches_any(unused, name));
    (!untrained.is_empty()).then_some(BudgetProblem::Untrained(untrained))
}

/// No step at all, or the first parameter that was stepped more or less often. A skipped step is another problem.
fn of_steps(f32: &Observed, half: &Observed) -> Option<BudgetProblem> {
    let is_still = |run: &Observed| {
        run.steps.keys().all(|name| run.unchanged.contains(name))
            && run.steps.values().all(|&steps| steps == 0)
    };
    if is_still(f32) && is_still(half) && !half.is_skipped {
        return Some(BudgetProblem::NotStepped);
    }
    let beside = f32
        .steps
        .iter()
        .map(|(name, &of_f32)| (name.clone(), of_f32, half.steps.get(name).copied().unwrap_or(0)));
    let mut differ = beside.filter(|(_, f32, half)| f32 != half);
    let (name, f32, of_half) = differ.next().filter(|_| !half.is_skipped)?;
    Some(BudgetProblem::Steps { name, f32, half: of_half })
}

fn names<'a>(names: impl Iterator<Item = &'a String>) -> Vec<String> {
    names.cloned().collect()
}

/// For each quantity that is too small for the dtype, so that noise is as large as it is, the share of its numbers that
/// become zero in half precision.
pub(super) fn lost(
    f32: &Observed,
    half: &Observed,
    measured: &Measured,
    is_allowed: impl Fn(&str) -> bool,
) -> Result<Vec<Option<f64>>> {
    let halves = half.by_name();
    let share = |(known, f): (&MeasuredQuantity, &(BudgetQuantity, String, Tensor))| {
        let is_judged = !matches!(known.quantity, BudgetQuantity::Update | BudgetQuantity::Loss);
        if !is_judged || !known.underflows() || is_allowed(&known.name) {
            return Ok(None);
        }
        let half = halves.get(&(known.quantity, known.name.as_str()));
        half.map(|half| share_of_zeros(&f.2, half)).transpose()
    };
    measured.quantities.iter().zip(&f32.values).map(share).collect()
}

/// The share of the numbers of `f` that are not zero and are in `h`.
fn share_of_zeros(f: &Tensor, h: &Tensor) -> Result<f64> {
    let _own = OutsideRegions::enter();
    let count = |t: Tensor| -> Result<f64> { Ok(t.f_sum(Kind::Double)?.f_double_value(&[])?) };
    if f.size() != h.size() {
        return Ok(0.0);
    }
    let is_number = f.f_to_kind(Kind::Bool)?;
    let zeros = count(is_number.f_logical_and(&h.f_logical_not()?)?)?;
    Ok(zeros / count(is_number)?.max(1.0))
}
