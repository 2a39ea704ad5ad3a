//! Rules from the costs of operators.

use super::costs::Costs;
use crate::autocast::{Rule, RunAs};

/// The limit on the memory of composed attention in the rules of a plan.
const MOST_BYTES: u64 = 1 << 30;

pub(super) const COMPOSED: RunAs = RunAs::Composed { most_bytes: MOST_BYTES };

/// An operator that is expected to be faster with rules.
#[derive(Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) operator: String,
    pub(super) rules: Vec<Rule>,
    /// The nanoseconds by which an iteration is expected to be shorter.
    pub(super) gain: i64,
    /// Whether f32 is the fastest at every size.
    pub(super) is_always_f32: bool,
}

/// The candidates among the operators of a region, by what they cost there and otherwise.
pub(super) fn candidates(region: &Costs, otherwise: &[(RunAs, &Costs)]) -> Vec<Candidate> {
    let mut candidates = Vec::new();
    for (operator, sizes) in region {
        let fastest = |(size, cost): (&u64, &i64)| {
            let of = |(run_as, costs): &(RunAs, &Costs)| {
                Some((*run_as, *costs.get(operator)?.get(size)?))
            };
            let faster = otherwise.iter().filter_map(of).filter(|(_, other)| other < cost);
            let best = faster.min_by_key(|(_, other)| *other);
            (*size, best.map(|(run_as, _)| run_as), best.map_or(0, |(_, other)| cost - other))
        };
        let choices: Vec<_> = sizes.iter().map(fastest).collect();
        let gain = choices.iter().map(|(.., gain)| gain).sum();
        let choices: Vec<_> = choices.into_iter().map(|(size, run_as, _)| (size, run_as)).collect();
        let is_always_f32 = choices.iter().all(|(_, run_as)| *run_as == Some(RunAs::F32));
        let rules = rules(operator, &choices);
        if !rules.is_empty() {
            candidates.push(Candidate { operator: operator.clone(), rules, gain, is_always_f32 });
        }
    }
    candidates
}

/// Puts the candidates that promise most first, and keeps so many.
pub(super) fn best(mut candidates: Vec<Candidate>, most: usize) -> Vec<Candidate> {
    candidates.sort_by_key(|candidate| std::cmp::Reverse(candidate.gain));
    candidates.truncate(most);
    candidates
}

/// The rules for an operator with these choices at ascending sizes. What holds between two measured sizes is decided by
/// their geometric mean, and above the largest nothing is known beyond twice its size.
fn rules(operator: &str, choices: &[(u64, Option<RunAs>)]) -> Vec<Rule> {
    let mut rules: Vec<Rule> = Vec::new();
    let mut start = 0;
    for (i, (size, run_as)) in choices.iter().enumerate() {
        let next = choices.get(i + 1);
        if next.is_some_and(|(_, next)| next == run_as) {
            continue;
        }
        let end = next.map_or(size.saturating_mul(2), |(next, _)| between(*size, *next));
        if let Some(run_as) = *run_as {
            let name = operator.strip_prefix("aten::").unwrap_or(operator);
            rules.push(Rule { at_least: start, below: Some(end), ..Rule::new(name, run_as) });
        }
        start = end;
    }
    rules
}

/// A size between two others: above the smaller, and at most the larger.
fn between(smaller: u64, larger: u64) -> u64 {
    let mean = (smaller as f64 * larger as f64).sqrt() as u64;
    mean.clamp(smaller + 1, larger)
}

#[cfg(test)]
mod tests {
    use super::super::costs::ATTENTION;
    use super::*;

    fn costs(operator: &str, sizes: &[(u64, i64)]) -> Costs {
        Costs::from([(operator.to_owned(), sizes.iter().copied().collect())])
    }

    #[test]
    fn each_size_gets_what_is_fastest_there() {
        let f32 = costs(ATTENTION, &[(4, 10), (16, 10), (64, 90), (256, 90)]);
        let region = costs(ATTENTION, &[(4, 20), (16, 20), (64, 80), (256, 80)]);
        let composed = costs(ATTENTION, &[(4, 30), (16, 5), (64, 50), (256, 81)]);
        let rule = |at_least, below, run_as| {
            let name = "scaled_dot_product_attention";
            Rule { at_least, below: Some(below), ..Rule::new(name, run_as) }
        };
        let otherwise = [(RunAs::F32, &f32), (COMPOSED, &composed)];
        let found = candidates(&region, &otherwise);
        let rules = vec![rule(0, 8, RunAs::F32), rule(8, 128, COMPOSED)];
        let candidate = |rules, gain| {
            let operator = ATTENTION.to_owned();
            Candidate { operator, rules, gain, is_always_f32: false }
        };
        assert_eq!(found, [candidate(rules, 10 + 15 + 30)]);
        let found = candidates(&region, &otherwise[..1]);
        assert_eq!(found, [candidate(vec![rule(0, 32, RunAs::F32)], 20)]);
        let found = candidates(&f32, &[(RunAs::Half, &region)]);
        assert_eq!(found[0].rules, [rule(32, 512, RunAs::Half)]);
        assert_eq!(candidates(&region, &[(RunAs::F32, &Costs::new())]), []);
        assert_eq!((between(4, 5), between(4, 6), between(100, 10_000)), (5, 5, 1000));
    }

    #[test]
    fn the_operator_that_promises_most_is_first() {
        let both = |mm, bmm| {
            let mut both = costs("aten::mm", &[(8, mm)]);
            both.extend(costs("aten::bmm", &[(8, bmm)]));
            both
        };
        let found = candidates(&both(15, 12), &[(RunAs::F32, &both(10, 10))]);
        assert!(found.iter().all(|found| found.is_always_f32));
        let found = best(found, 2);
        let names: Vec<_> = found.iter().map(|found| found.operator.as_str()).collect();
        assert_eq!(names, ["aten::mm", "aten::bmm"]);
        assert_eq!(best(found, 1)[0].operator, "aten::mm");
    }
}
