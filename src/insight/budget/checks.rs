//! What rounding cannot change.

use std::collections::BTreeSet;

use tch::Kind;

use super::BudgetProblem;
use super::program::Observed;
use super::report::Measured;
use crate::patterns::matches_any;

/// Adds what differs between an iteration in half precision and the same in f32.
pub(super) fn compare(
    f32: &Observed,
    half: &Observed,
    dtype: Kind,
    unused: &[String],
    measured: &Measured,
    problems: &mut Vec<BudgetProblem>,
) {
    if let Some(&other) = half.returned.iter().find(|&&kind| kind != dtype) {
        problems.push(BudgetProblem::OtherHalf(other.into()));
    }
    if !half.returned.contains(&dtype) {
        problems.push(BudgetProblem::NothingInHalf);
    }
    if let Some(&kind) = f32.returned.first() {
        problems.push(BudgetProblem::HalfInF32(kind.into()));
    }
    for (name, &of_f32) in &f32.dtypes {
        if let Some(&of_half) = half.dtypes.get(name).filter(|&&of_half| of_half != of_f32) {
            let (f32, half) = (of_f32, of_half);
            problems.push(BudgetProblem::Dtype { name: name.clone(), f32, half });
        }
    }
    let only = |in_one: &BTreeSet<String>, other: &BTreeSet<String>, decided: bool| {
        let names = in_one.difference(other);
        let counts = |name: &&String| !decided || !measured.is_only_rounding(name);
        names.filter(counts).cloned().collect::<Vec<_>>()
    };
    let (missing, added) = (
        only(&half.without_gradient, &f32.without_gradient, false),
        only(&f32.without_gradient, &half.without_gradient, false),
    );
    if !missing.is_empty() || !added.is_empty() {
        problems.push(BudgetProblem::Gradients { missing, added });
    }
    // Where a gradient is rounding alone, that decides whether it is zero and too small to change a parameter.
    let zeros = [&half.zero_gradient, &f32.zero_gradient];
    let unchanged = [&half.unchanged, &f32.unchanged];
    let both = |[half, f32]: [&BTreeSet<String>; 2]| (only(half, f32, true), only(f32, half, true));
    let (half_zeros, f32_zeros) = both(zeros);
    if !half_zeros.is_empty() || !f32_zeros.is_empty() {
        problems.push(BudgetProblem::ZeroGradients { half: half_zeros, f32: f32_zeros });
    }
    let (half_same, f32_same) = both(unchanged);
    if !half_same.is_empty() || !f32_same.is_empty() {
        problems.push(BudgetProblem::Unchanged { half: half_same, f32: f32_same });
    }
    let nothing = |run: &Observed| -> BTreeSet<String> {
        run.without_gradient.union(&run.zero_gradient).cloned().collect()
    };
    let untrained = nothing(f32).intersection(&nothing(half)).cloned().collect::<Vec<_>>();
    let untrained: Vec<_> =
        untrained.into_iter().filter(|name| !matches_any(unused, name)).collect();
    if !untrained.is_empty() {
        problems.push(BudgetProblem::Untrained(untrained));
    }
    let different = f32.steps.iter().find_map(|(name, &of_f32)| {
        let of_half = half.steps.get(name).copied().unwrap_or(0);
        (of_f32 != of_half).then(|| BudgetProblem::Steps {
            name: name.clone(),
            f32: of_f32,
            half: of_half,
        })
    });
    problems.extend(different.filter(|_| !half.is_skipped));
    let drawn =
        |run: &Observed| run.random.iter().map(tch::Tensor::shallow_clone).collect::<Vec<_>>();
    if drawn(f32) != drawn(half) {
        problems.push(BudgetProblem::RandomNumbers);
    }
    let not_finite: Vec<_> = half.not_finite.difference(&f32.not_finite).cloned().collect();
    if !not_finite.is_empty() {
        problems.push(BudgetProblem::NotFinite(not_finite));
    }
    if half.scale.log2().fract() != 0.0 {
        problems.push(BudgetProblem::Scale(half.scale));
    }
}
