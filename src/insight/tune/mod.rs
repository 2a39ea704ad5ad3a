//! Finding the plan with which the iterations of a model are fastest, by measuring them.

mod measure;

use std::fmt;

use serde::{Deserialize, Serialize};
use tch::Tensor;
use tch::nn::VarStore;

use self::measure::Costs;
use super::dtype::Dtype;
use super::numbers;
use crate::autocast::{Plan, Rule, RunAs};
use crate::capture;
use crate::error::Result;
use crate::{Autocast, GradScaler};

/// A [`Plan`] and what was measured for it: made by a [`Tuner`]. Its text, by `Display`, is meant for a terminal; its
/// fields for programs. Its serialized form has a list besides:
///
/// - `operators`: the operators for which rules were tried, on whole iterations without and with them. A row has
///   `operator` (libtorch's name), `rules` (each a [`Rule`]), `seconds` (of an iteration without and with the rules: the
///   median of four or eight, run in turns), `gradient_errors` (the distance of all gradients from those in f32, over
///   the norm of the latter, without and with the rules; one that is infinite or NaN is a text in JSON, such as `inf`)
///   and `is_in_plan` (whether the rules are in the plan: with them, iterations are faster beyond the noise, gradients
///   are at most a tenth further from those in f32, and for half precision an audit finds nothing new; none are if the
///   plan is in f32).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Tuning {
    /// The fastest plan that was found, for [`Autocast::plan`].
    pub plan: Plan,
    /// Why the plan is in the dtype that it has.
    pub reason: String,
    /// The seconds of an iteration, forward and backward, in f32, in the region without a plan, and with the plan.
    pub seconds: [f64; 3],
    operators: Vec<TunedOperator>,
    /// The parts that [`audit`](super::audit()) suspects without and with the rules for half precision, beside the
    /// other rules that won: a line for each suspicion. `None` unless rules for half precision won; see
    /// [`Tuner::allow_half`].
    #[serde(default)]
    pub suspicious: Option<[Vec<String>; 2]>,
    /// The seconds of an iteration in which parameters are cast to half precision and their gradients to f32, in the
    /// region without a plan. Parameters in half precision with
    /// [`MasterWeights`](crate::optim::MasterWeights) need none of these casts. 0 if the plan is in f32.
    #[serde(default)]
    pub weight_casts: f64,
    /// How many iterations were run.
    pub iterations: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct TunedOperator {
    operator: String,
    rules: Vec<Rule>,
    seconds: [f64; 2],
    #[serde(with = "numbers::pair")]
    gradient_errors: [f64; 2],
    is_in_plan: bool,
}

/// Finds the [`Plan`] with which the iterations of a model are fastest, by measuring them.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor, nn};
/// use tch_amp::insight::Tuner;
/// use tch_amp::{Autocast, GradScaler};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let layer = nn::linear(vs.root() / "layer", 4, 4, Default::default());
/// let x = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
/// let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
/// let tuning = Tuner::default().tune(&vs, &region, &GradScaler::disabled(), |region| {
///     region.run(|| x.apply(&layer).square().mean(Kind::Float))
/// })?;
/// println!("{tuning}");
/// let planned = region.plan(&tuning.plan)?;
/// # let _loss = planned.run(|| x.apply(&layer))?;
///
/// let tuner = Tuner { allow_half: true };
/// let tuning = tuner.tune(&vs, &region, &GradScaler::disabled(), |region| {
///     region.run(|| x.apply(&layer).mse_loss(&x, tch::Reduction::Mean))
/// })?;
/// assert!(tuning.iterations <= 40);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tuner {
    /// Whether half precision is also tried for operators that autocast runs in f32; `false` by default. Rules for them
    /// come into the plan under the same conditions as others, and only if [`audit`](super::audit()) finds nothing
    /// suspicious with them that it does not find without them. If an operator has no kernel for half precision, the
    /// tuning fails. The audits leave iterations to try two operators, or one where a CPU composes attention. Nothing
    /// is tried where every operator is faster in f32.
    pub allow_half: bool,
}

impl Tuner {
    /// Measures which operators of a model are faster in f32 than in half precision, and whether attention is faster
    /// when it is composed of products, and returns the plan with which whole iterations are fastest.
    ///
    /// `loss` computes the unscaled loss in the region that it is given, as for [`audit`](super::audit()). This records
    /// the operators of one iteration in f32, in `region` and, if there is attention, with attention
    /// [composed](crate::autocast::RunAs::Composed), forward and backward, with the casts that each needs. For each
    /// operator of autocast's lower-precision list it makes rules from the fastest of these at each size, and tries
    /// those of the three operators that promise most on whole iterations in turns. It keeps the rules with which three
    /// of four iterations are faster than each of four without, or the median one is faster by a twentieth, and with
    /// which gradients are at most a tenth further from those in f32. Where the medians promise more than the noise
    /// lets it see, it compares once more, if 40 iterations allow that. Finally it compares the plan with f32 in the
    /// same way: where half precision does not win, the plan leaves everything in f32, as on processors that emulate
    /// bf16. Rules reach to twice the largest size that was measured. It puts into half precision what autocast keeps
    /// in f32 only if [asked](Self::allow_half). Attention is composed on the CPU alone. The rules of the plan come
    /// after those of the region, so that they replace overrides of the same operators.
    ///
    /// It runs at most 40 iterations, the first of them in f32, and only a few where each operator is faster in f32.
    /// Gradients, buffers and random numbers are put back afterwards, so that training goes on as without the call;
    /// `loss` must not change anything else. On several ranks, let all of them use the plan of one. PyTorch has no
    /// counterpart.
    ///
    /// Synchronizes after every operator of the recorded iterations, and at the end of the others. Measure on a machine
    /// that does nothing else.
    ///
    /// # Errors
    ///
    /// The error of `loss`; [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a region that is switched
    /// off;
    /// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable);
    /// [`Error::Torch`](crate::Error::Torch) if an iteration cannot be recorded; with
    /// [`allow_half`](Self::allow_half), those of [`audit`](super::audit()).
    pub fn tune(
        self,
        vs: &VarStore,
        region: &Autocast,
        scaler: &GradScaler,
        loss: impl FnMut(Autocast) -> Result<Tensor>,
    ) -> Result<Tuning> {
        capture::refuse("a report of iterations", "make it of iterations without a graph")?;
        measure::tune(self, vs, *region, scaler.get_scale()?, loss)
    }
}

/// The part of an iteration beyond which casts of weights are mentioned.
const WORTH_A_LINE: f64 = 0.02;

impl Tuning {
    /// Returns a line on what the plan does and gains, such as `bf16, scaled_dot_product_attention composed (1.28 times
    /// as fast): an iteration is 2.50 times as fast as in f32`. For a plan in f32 it is the [`reason`](Self::reason).
    pub fn summary(&self) -> String {
        let Some(dtype) = self.plan.dtype else { return self.reason.clone() };
        let mut line = Dtype::from(dtype).to_string();
        for tried in self.operators.iter().filter(|tried| tried.is_in_plan) {
            let name = tried.operator.strip_prefix("aten::").unwrap_or(&tried.operator);
            let mut ways: Vec<_> = tried.rules.iter().map(|rule| rule.run_as.words()).collect();
            ways.dedup();
            let [without, with] = tried.seconds;
            let gain = without / with;
            line += &format!(", {name} {} ({gain:.2} times as fast)", ways.join(" and "));
        }
        let [f32, _, plan] = self.seconds;
        format!("{line}: an iteration is {:.2} times as fast as in f32", f32 / plan)
    }
}

impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.plan)?;
        writeln!(f, "{}", self.reason)?;
        for tried in &self.operators {
            let [without, with] = tried.seconds;
            let [before, after] = tried.gradient_errors;
            let verdict = if tried.is_in_plan { "in the plan" } else { "left out" };
            writeln!(
                f,
                "{}: {:.2} times as fast, error of the gradients {after:.1e} after {before:.1e}: {verdict}",
                tried.operator,
                without / with
            )?;
        }
        for (what, found) in ["without", "with"].iter().zip(self.suspicious.iter().flatten()) {
            let found = if found.is_empty() { "nothing".to_owned() } else { found.join("; ") };
            writeln!(f, "suspicious {what} the rules for half precision: {found}")?;
        }
        if self.weight_casts > WORTH_A_LINE * self.seconds[2] {
            let milliseconds = 1e3 * self.weight_casts;
            writeln!(
                f,
                "casts of weights and of their gradients take {milliseconds:.2} ms: weights in half precision with \
                 MasterWeights need none"
            )?;
        }
        let [f32, region, plan] = self.seconds.map(|seconds| 1e3 * seconds);
        write!(
            f,
            "an iteration: {f32:.2} ms in f32, {region:.2} ms without a plan, {plan:.2} ms with it; {} were run",
            self.iterations
        )
    }
}

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
    use super::measure::ATTENTION;
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
