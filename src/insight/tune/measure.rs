//! The iterations of a tuning.

use std::collections::BTreeMap;
use std::time::Instant;

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::{COMPOSED, Candidate, best, candidates};
use super::{TunedOperator, Tuner, Tuning};
use crate::Autocast;
use crate::autocast::{Plan, Rule, RunAs, autocast_dtype};
use crate::error::{AutocastError, Error, Result};
use crate::ffi::insight::{EventKind, RecordedEvent, RecordingMode};
use crate::insight::audit::{Audit, check_parameters, without_times};
use crate::insight::measure::of_gradients;
use crate::insight::operators::AutocastList;
use crate::insight::recording::{Pass, Recording};
use crate::insight::rerun::{Repeatable, Runs};
use crate::precision::{bf16_is_native, synchronize};

/// How often iterations are compared in turns.
const ROUNDS: usize = 4;

/// The most iterations of a tuning.
const MOST_ITERATIONS: u64 = 40;

/// How much faster iterations should be, by their medians, to be compared again where the noise has not let them win;
/// and how much faster than the fastest one without it, to win in spite of slow ones.
const PROMISING: f64 = 1.05;

/// For how many operators rules are tried.
const MOST_CANDIDATES: usize = 3;

/// How many iterations two audits run at most.
const OF_AUDITS: u64 = 7;

/// How much further from those in f32 gradients may be with rules than without. It is for the noise of rounding.
const MOST_ERROR: f64 = 1.1;

type Gradients = Vec<Option<Tensor>>;

/// The iterations of a tuning.
struct Iterations<'a, F> {
    runs: Runs<'a, F>,
    region: Autocast,
    dtype: Kind,
    /// The CPU, and the devices of the parameters.
    devices: &'a [Device],
    /// Returns the seconds since some moment.
    clock: &'a dyn Fn() -> f64,
}

impl<F: FnMut(Autocast) -> Result<Tensor>> Iterations<'_, F> {
    /// A plan in half precision.
    fn plan(&self, rules: Vec<Rule>) -> Result<Plan> {
        Ok(Plan { dtype: Some(self.dtype), rules, ..Plan::new(self.region.device())? })
    }

    /// The region with rules.
    fn with(&self, rules: &[Rule]) -> Result<Autocast> {
        self.region.plan(&self.plan(rules.to_vec())?)
    }

    /// The seconds of an iteration, and its gradients.
    fn timed(&mut self, region: Autocast) -> Result<(f64, Gradients)> {
        let start = (self.clock)();
        let passes = self.runs.run(region, None)?;
        self.devices.iter().copied().for_each(synchronize);
        Ok(((self.clock)() - start, passes.gradients))
    }

    /// Returns the costs of the operators, after one iteration to warm up.
    fn costs(&mut self, region: Autocast) -> Result<ListedCosts> {
        self.timed(region)?;
        let (recording, _) = self.runs.record(RecordingMode::Times, region)?;
        Ok(costs(&recording, region.device()))
    }

    /// The candidates, whether each operator of the list of half precision is fastest in f32 at every size, and the
    /// seconds that casts of weights take in the region.
    fn find(&mut self, allow_half: bool) -> Result<(Vec<Candidate>, bool, f64)> {
        let f32 = self.costs(self.region.enabled(false))?.lower;
        let ListedCosts { lower, f32: kept, weight_casts } = self.costs(self.region)?;
        let attention = Rule::new("scaled_dot_product_attention", COMPOSED);
        // On other devices the fused kernels are fast, and it could take more memory than there is.
        let mut composed =
            match self.region.device() == Device::Cpu && lower.contains_key(ATTENTION) {
                true => self.costs(self.with(&[attention])?)?.lower,
                false => Costs::new(),
            };
        composed.retain(|operator, _| operator == ATTENTION);
        let mut found = candidates(&lower, &[(RunAs::F32, &f32), (COMPOSED, &composed)]);
        let is_always_f32 = !lower.is_empty()
            && found.len() == lower.len()
            && found.iter().all(|candidate| candidate.is_always_f32);
        if allow_half && !is_always_f32 {
            let half = self.in_half(&kept)?;
            found.extend(candidates(&kept, &[(RunAs::Half, &half)]));
        }
        Ok((found, is_always_f32, 1e-9 * weight_casts as f64))
    }

    /// Returns the costs in half precision of the operators that autocast keeps in f32, those for which that is
    /// possible.
    fn in_half(&mut self, kept: &Costs) -> Result<Costs> {
        let rules = kept.keys().map(|operator| {
            let name = operator.strip_prefix("aten::").unwrap_or(operator);
            Rule::new(name, RunAs::Half)
        });
        let mut possible = Vec::new();
        for rule in rules {
            match self.with(std::slice::from_ref(&rule))?.run(|| ()) {
                Ok(()) => possible.push(rule),
                Err(Error::Autocast(AutocastError::NotOverridable { .. })) => {}
                Err(error) => return Err(error),
            }
        }
        match possible[..] {
            [] => Ok(Costs::new()),
            _ => Ok(self.costs(self.with(&possible)?)?.f32),
        }
    }

    /// Audits the region without and with the rules for half precision, beside the others, and takes these rules away
    /// if something is suspicious with them that is not without. Returns what is suspicious.
    fn audited(
        &mut self,
        rules: &mut Vec<Rule>,
        operators: &mut [TunedOperator],
    ) -> Result<[Vec<String>; 2]> {
        let others: Vec<_> =
            rules.iter().filter(|rule| rule.run_as != RunAs::Half).cloned().collect();
        let regions = [self.with(&others)?, self.with(rules)?];
        let audits = without_times(&mut self.runs, regions)?;
        let [before, after] = audits.each_ref().map(Audit::suspicions);
        if after.iter().any(|part| !before.contains(part)) {
            *rules = others;
            let in_half = |tried: &&mut TunedOperator| {
                tried.rules.iter().any(|rule| rule.run_as == RunAs::Half)
            };
            operators.iter_mut().filter(in_half).for_each(|tried| tried.is_in_plan = false);
        }
        Ok([before, after])
    }

    /// Tries the candidates that promise most. Returns the rules of those that win, and what became of each.
    fn try_all(
        &mut self,
        found: Vec<Candidate>,
        exact: &Gradients,
        audits: u64,
    ) -> Result<(Vec<Rule>, Vec<TunedOperator>)> {
        let comparison = 2 * ROUNDS as u64;
        let left = MOST_ITERATIONS.saturating_sub(self.runs.count + audits + comparison);
        let found = best(found, MOST_CANDIDATES.min((left / comparison) as usize));
        let (mut rules, mut operators) = (Vec::new(), Vec::new());
        // The comparisons of the candidates after each, the audits, and the comparison with f32.
        let later = (1..=found.len()).rev().map(|left| left as u64 * comparison + audits);
        for (candidate, later) in found.into_iter().zip(later) {
            let all = [rules.clone(), candidate.rules.clone()].concat();
            let compared = self.compare_again([self.with(&rules)?, self.with(&all)?], later)?;
            let tried = tried(candidate, &compared, exact)?;
            if tried.is_in_plan {
                rules = all;
            }
            operators.push(tried);
        }
        Ok((rules, operators))
    }

    /// Runs iterations without and with something in turns.
    fn compare(&mut self, regions: [Autocast; 2]) -> Result<Comparison> {
        let (mut seconds, mut gradients) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        for _ in 0..ROUNDS {
            for (i, region) in regions.into_iter().enumerate() {
                let (time, last) = self.timed(region)?;
                seconds[i].push(time);
                gradients[i] = last;
            }
        }
        Ok(Comparison::new(seconds, gradients))
    }

    /// Compares as [`compare`](Self::compare), and as often again if that promises something that the noise hides and
    /// `later` iterations are still possible after that.
    fn compare_again(&mut self, regions: [Autocast; 2], later: u64) -> Result<Comparison> {
        let first = self.compare(regions)?;
        let [without, with] = first.medians();
        let is_open = !first.is_faster() && without > PROMISING * with;
        if !is_open || self.runs.count + 2 * ROUNDS as u64 + later > MOST_ITERATIONS {
            return Ok(first);
        }
        let [mut without, mut with] = first.seconds;
        let second = self.compare(regions)?;
        let [more_without, more_with] = second.seconds;
        without.extend(more_without);
        with.extend(more_with);
        Ok(Comparison::new([without, with], second.gradients))
    }
}

/// Sorted times of iterations without and with something, and the gradients of the last ones.
struct Comparison {
    seconds: [Vec<f64>; 2],
    gradients: [Gradients; 2],
}

impl Comparison {
    fn new(mut seconds: [Vec<f64>; 2], gradients: [Gradients; 2]) -> Self {
        seconds.iter_mut().for_each(|seconds| seconds.sort_by(f64::total_cmp));
        Self { seconds, gradients }
    }

    /// Returns whether three quarters of the iterations with it are faster than all without it but the fastest: of
    /// four, all but the slowest than all, which equally fast ones are by chance in 5 of 70 orders; of eight, six than
    /// all but the fastest. Or whether half of them are clearly faster than every one without it: other programs make
    /// iterations of a millisecond slow many at a time, and none fast.
    fn is_faster(&self) -> bool {
        let [without, with] = &self.seconds;
        let quarter = with.len() / ROUNDS;
        let [_, median] = self.medians();
        with[with.len() - quarter - 1] < without[quarter - 1] || PROMISING * median < without[0]
    }

    fn medians(&self) -> [f64; 2] {
        self.seconds.each_ref().map(|sorted| {
            let half = sorted.len() / 2;
            (sorted[half - 1] + sorted[half]) / 2.0
        })
    }
}

pub(super) fn tune(
    options: Tuner,
    vs: &VarStore,
    region: Autocast,
    scale: f64,
    loss: impl FnMut(Autocast) -> Result<Tensor>,
) -> Result<Tuning> {
    let start = Instant::now();
    tune_by(&|| start.elapsed().as_secs_f64(), options, vs, region, scale, loss)
}

/// Tunes by a clock, which returns the seconds since some moment.
fn tune_by(
    clock: &dyn Fn() -> f64,
    options: Tuner,
    vs: &VarStore,
    region: Autocast,
    scale: f64,
    loss: impl FnMut(Autocast) -> Result<Tensor>,
) -> Result<Tuning> {
    let device = region.device();
    if !region.is_enabled() {
        let problem = "is switched off: give the one to compare with f32, for instance with \
                       `.enabled(true).dtype(Kind::BFloat16)`";
        return Err(Error::InvalidArgument { name: "region", problem: problem.to_owned() });
    }
    let dtype = region.try_run(|| autocast_dtype(device))?;
    let off = region.enabled(false);
    let repeatable = Repeatable::new(vs)?;
    if options.allow_half {
        check_parameters(&repeatable)?;
    }
    let mut beginning = repeatable.begin()?;
    let runs = Runs::new(repeatable.rerun(&mut beginning)?, scale, loss);
    let devices = repeatable.devices();
    let mut iterations = Iterations { runs, region, dtype, devices, clock };

    let (found, is_always_f32, weight_casts) = iterations.find(options.allow_half)?;
    let name = name_of(dtype, device)?;
    let [(in_f32, exact), (in_half, _)] = [iterations.timed(off)?, iterations.timed(region)?];
    if is_always_f32 && in_f32 < in_half {
        let ratio = in_half / in_f32;
        let reason = format!(
            "everything is in f32: each operator is faster there, and an iteration is {ratio:.2} times as fast as in {name}"
        );
        return Ok(Tuning {
            plan: Plan::new(device)?,
            reason,
            seconds: [in_f32, in_half, in_f32],
            operators: Vec::new(),
            suspicious: None,
            weight_casts: 0.0,
            iterations: iterations.runs.count,
        });
    }
    let in_half = |rule: &Rule| rule.run_as == RunAs::Half;
    let audits = match found.iter().any(|candidate| candidate.rules.iter().any(in_half)) {
        true => OF_AUDITS,
        false => 0,
    };
    let (mut rules, mut operators) = iterations.try_all(found, &exact, audits)?;
    let has_half = rules.iter().any(in_half);
    let suspicious =
        has_half.then(|| iterations.audited(&mut rules, &mut operators)).transpose()?;
    let last = iterations.compare_again([off, iterations.with(&rules)?], 0)?;
    let mut tuning = confirmed(iterations.plan(rules)?, &last, name, operators);
    (tuning.suspicious, tuning.iterations) = (suspicious, iterations.runs.count);
    tuning.weight_casts = if tuning.plan.dtype.is_some() { weight_casts } else { 0.0 };
    Ok(tuning)
}

/// The plan, if it has won the comparison with f32, or one that leaves everything in f32.
fn confirmed(
    mut plan: Plan,
    last: &Comparison,
    name: &str,
    mut operators: Vec<TunedOperator>,
) -> Tuning {
    let [in_f32, in_plan] = last.medians();
    let without = operators.first().map_or(in_plan, |tried| tried.seconds[0]);
    let mut seconds = [in_f32, without, in_plan];
    let ratio = in_f32 / in_plan;
    let mut reason = format!("the fastest plan in {name} is {ratio:.2} times as fast as f32");
    if !last.is_faster() {
        (plan.dtype, plan.rules) = (None, Vec::new());
        operators.iter_mut().for_each(|tried| tried.is_in_plan = false);
        reason = format!("everything is in f32: no plan is faster beyond the noise in {name}");
        seconds[2] = in_f32;
    }
    Tuning { plan, reason, seconds, operators, suspicious: None, weight_casts: 0.0, iterations: 0 }
}

/// Returns the outcome of a candidate.
fn tried(candidate: Candidate, compared: &Comparison, exact: &Gradients) -> Result<TunedOperator> {
    let [without, with] = &compared.gradients;
    let gradient_errors = [of_gradients(without, exact)?, of_gradients(with, exact)?];
    let [before, after] = gradient_errors;
    // The error before is not finite if the scale was too large without the rules.
    let is_precise = after.is_finite() && (!before.is_finite() || after <= MOST_ERROR * before);
    Ok(TunedOperator {
        operator: candidate.operator,
        rules: candidate.rules,
        seconds: compared.medians(),
        gradient_errors,
        is_in_plan: compared.is_faster() && is_precise,
    })
}

/// The name of a dtype in a reason.
fn name_of(dtype: Kind, device: Device) -> Result<&'static str> {
    Ok(match dtype {
        Kind::Half => "fp16",
        _ if bf16_is_native(device)? => "bf16",
        _ => "bf16, which is emulated here",
    })
}

/// The operator of which there are fused and composed kernels.
pub(super) const ATTENTION: &str = "aten::scaled_dot_product_attention";

/// The nanoseconds of the calls of one size.
pub(super) type BySize = BTreeMap<u64, i64>;

/// Operators, by name.
pub(super) type Costs = BTreeMap<String, BySize>;

/// The costs of the operators that autocast runs in half precision, and of those that it runs in f32.
#[derive(Debug, Default)]
pub(super) struct ListedCosts {
    pub(super) lower: Costs,
    pub(super) f32: Costs,
    /// The nanoseconds in which parameters become half precision and their gradients f32.
    pub(super) weight_casts: i64,
}

/// Adds up the time of each operator that the program calls: with everything in it, such as casts of its inputs, and
/// with the backward pass of all that.
pub(super) fn costs(recording: &Recording, device: Device) -> ListedCosts {
    let mut costs = ListedCosts::default();
    for (index, nanoseconds) in recording.times().0.into_iter().enumerate() {
        let forward = match recording.pass(index) {
            (Pass::Forward, _) => Some(index),
            (Pass::Backward, forward) => forward,
        };
        let Some(forward) = forward else { continue };
        if is_weight_cast(recording, forward) {
            costs.weight_casts += nanoseconds;
        }
        let Some(called) = recording.outermost(forward) else { continue };
        let event = &recording.events[called];
        let list = match AutocastList::of(device, &event.name) {
            AutocastList::LowerPrecision => &mut costs.lower,
            AutocastList::F32 | AutocastList::F32UnlessAsked => &mut costs.f32,
            _ => continue,
        };
        *list.entry(event.name.clone()).or_default().entry(event.size).or_default() += nanoseconds;
    }
    costs
}

/// Returns whether an operator of the forward pass casts a parameter in f32 to half precision, or is a part of that.
fn is_weight_cast(recording: &Recording, index: usize) -> bool {
    let casts = |event: &RecordedEvent| {
        let (from, to) = (event.inputs.first(), event.outputs.first().and_then(|to| to.kind));
        ["aten::to", "aten::_to_copy"].contains(&event.name.as_str())
            && from.is_some_and(|from| from.parameter.is_some() && from.kind == Some(Kind::Float))
            && matches!(to, Some(Kind::Half | Kind::BFloat16))
    };
    let around = recording.ancestors(index);
    let mut operators = around.take_while(|(_, event)| event.kind == EventKind::Operator);
    operators.any(|(_, event)| casts(event))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tch::Tensor;
    use tch::nn;

    use super::*;
    use crate::Autocast;
    use crate::error::Result;
    use crate::ffi::insight::{RecordingMode, Times};
    use crate::insight::recording::RecordedModel;

    fn compared(without: [f64; ROUNDS], with: [f64; ROUNDS]) -> Comparison {
        Comparison::new([without, with].map(Vec::from), [Vec::new(), Vec::new()])
    }

    #[test]
    fn one_slow_iteration_decides_nothing() {
        let faster = compared([1.95, 2.0, 2.1, 2.2], [1.7, 1.8, 1.9, 5.0]);
        assert!(faster.is_faster());
        assert_eq!(faster.medians(), [2.05, 1.85]);
        assert!(!compared([1.9, 1.9, 2.1, 2.2], [1.7, 1.8, 1.9, 2.0]).is_faster());
        assert!(!compared([1.0; ROUNDS], [1.0; ROUNDS]).is_faster());
        let of_eight = |without: [f64; 8], with: [f64; 8]| {
            Comparison::new([without, with].map(Vec::from), [Vec::new(), Vec::new()])
        };
        let without = [1.6, 2.0, 2.0, 2.0, 2.1, 2.1, 2.2, 3.0];
        assert!(of_eight(without, [1.5, 1.5, 1.6, 1.6, 1.7, 1.9, 2.5, 4.0]).is_faster());
        assert!(!of_eight(without, [1.5, 1.5, 1.6, 1.6, 1.7, 2.1, 2.5, 4.0]).is_faster());
    }

    #[test]
    fn slow_iterations_in_a_row_hide_nothing_that_is_clear() {
        assert!(compared([2.0, 2.0, 2.0, 9.0], [1.0, 1.0, 9.0, 9.0]).medians()[1] > 2.0);
        assert!(!compared([2.0, 2.0, 2.0, 9.0], [1.0, 1.0, 9.0, 9.0]).is_faster());
        let of_eight = |with: [f64; 8]| {
            let without = [1.8, 2.0, 2.0, 2.0, 2.1, 2.1, 9.0, 9.0];
            Comparison::new([without, with].map(Vec::from), [Vec::new(), Vec::new()])
        };
        assert!(of_eight([1.0, 1.0, 1.0, 1.0, 1.1, 9.0, 9.0, 9.0]).is_faster());
        assert!(!of_eight([1.0, 1.0, 1.0, 1.7, 1.8, 9.0, 9.0, 9.0]).is_faster());
    }

    /// A linear layer and a product, whose iterations take the planted seconds, by the dtypes of both results.
    struct Planted {
        vs: VarStore,
        now: Cell<f64>,
        seconds: fn([Kind; 2]) -> f64,
    }

    impl Planted {
        fn new(seconds: fn([Kind; 2]) -> f64) -> Self {
            let vs = VarStore::new(Device::Cpu);
            // Half precision has all of the numbers, so that no rule is less precise than another.
            for name in ["layer", "product"] {
                let _eye = vs.root().var_copy(name, &Tensor::eye(4, (Kind::Float, Device::Cpu)));
            }
            Self { vs, now: Cell::new(0.0), seconds }
        }

        fn loss(&self, region: Autocast) -> Result<Tensor> {
            let [layer, product] =
                ["layer", "product"].map(|name| self.vs.variables()[name].shallow_clone());
            let x = Tensor::f_ones([4, 4], (Kind::Float, Device::Cpu))?;
            region.try_run(|| {
                let hidden = x.f_linear(&layer, None::<&Tensor>)?;
                let result = hidden.f_matmul(&product)?;
                self.now.set(self.now.get() + (self.seconds)([hidden.kind(), result.kind()]));
                Ok(result.f_to_kind(Kind::Float)?.f_square()?.f_sum(None)?)
            })
        }
    }

    const REGION: Kind = Kind::BFloat16;

    /// Rules for the product make an iteration faster than without any, and slower than with those for the layer alone.
    #[test]
    fn rules_are_compared_beside_those_that_have_won() -> Result<()> {
        let planted = Planted::new(|kinds| match kinds.map(|kind| kind == Kind::Float) {
            [false, false] => 4.0,
            [true, false] => 2.0,
            [_, true] => 3.0,
        });
        let device = Device::Cpu;
        let region = Autocast::new(device).dtype(REGION);
        let repeatable = Repeatable::new(&planted.vs)?;
        let mut beginning = repeatable.begin()?;
        let (rerun, devices) = (repeatable.rerun(&mut beginning)?, repeatable.devices());
        let (clock, loss) = (&|| planted.now.get(), |region| planted.loss(region));
        let runs = Runs::new(rerun, 1.0, loss);
        let mut runs = Iterations { runs, region, dtype: REGION, devices, clock };
        let candidate = |name: &str, gain| Candidate {
            operator: format!("aten::{name}"),
            rules: vec![Rule::new(name, RunAs::F32)],
            gain,
            is_always_f32: true,
        };
        let (_, exact) = runs.timed(region.enabled(false))?;
        let found = vec![candidate("matmul", 1), candidate("linear", 2)];
        let (rules, operators) = runs.try_all(found, &exact, 0)?;
        let found: Vec<_> = operators
            .iter()
            .map(|tried| (&*tried.operator, tried.seconds, tried.is_in_plan))
            .collect();
        let layer = ("aten::linear", [4.0, 2.0], true);
        assert_eq!(found, [layer, ("aten::matmul", [2.0, 3.0], false)]);
        assert_eq!(rules, [Rule::new("linear", RunAs::F32)]);
        Ok(())
    }

    /// Whichever rules are tried, they make no iteration faster than f32, or none slower than without rules.
    #[test]
    fn the_plan_is_compared_with_f32() -> Result<()> {
        let tuned = |seconds: fn([Kind; 2]) -> f64| {
            let planted = Planted::new(seconds);
            let region = Autocast::new(Device::Cpu).dtype(REGION);
            let (clock, loss) = (|| planted.now.get(), |region| planted.loss(region));
            tune_by(&clock, Tuner::default(), &planted.vs, region, 1.0, loss)
        };
        let f32_is_fastest = tuned(|kinds| match kinds.map(|kind| kind == Kind::Float) {
            [true, true] => 1.0,
            [false, false] => 3.0,
            _ => 2.0,
        })?;
        assert_eq!(f32_is_fastest.plan.dtype, None, "{f32_is_fastest}");
        assert_eq!(f32_is_fastest.seconds, [1.0, 3.0, 1.0], "{f32_is_fastest}");
        let half_is_fastest = tuned(|kinds| if kinds == [Kind::Float; 2] { 3.0 } else { 2.0 })?;
        assert_eq!(half_is_fastest.plan.dtype, Some(REGION), "{half_is_fastest}");
        assert!(half_is_fastest.plan.rules.is_empty(), "{half_is_fastest}");
        assert_eq!(half_is_fastest.seconds, [3.0, 2.0, 2.0], "{half_is_fastest}");
        Ok(())
    }

    /// Composed attention with scores of a temperature of 30 has twice the error of the fused kernel.
    #[test]
    fn what_is_faster_and_less_precise_is_left_out() -> Result<()> {
        let one = |x: f32| vec![Some(Tensor::from_slice(&[x, 3.0]))];
        let is_in_plan = |without: f32, with: f32, seconds: f64| {
            let rule = Rule::new("scaled_dot_product_attention", COMPOSED);
            let candidate = Candidate {
                operator: ATTENTION.to_owned(),
                rules: vec![rule],
                gain: 1,
                is_always_f32: false,
            };
            let compared = Comparison::new(
                [vec![1.0; ROUNDS], vec![seconds; ROUNDS]],
                [one(without), one(with)],
            );
            Ok::<_, Error>(tried(candidate, &compared, &one(4.0))?.is_in_plan)
        };
        assert!(is_in_plan(4.1, 4.1, 0.8)?);
        assert!(is_in_plan(4.1, 3.9, 0.8)?);
        assert!(!is_in_plan(4.1, 4.2, 0.8)?);
        assert!(!is_in_plan(4.1, f32::NAN, 0.8)?);
        // Without the rules the scale was too large.
        assert!(is_in_plan(f32::INFINITY, 4.2, 0.8)?);
        assert!(!is_in_plan(4.1, 4.1, 1.0)?);
        Ok(())
    }

    /// Audits a squared error around `offset` in f32 and in half precision. Returns whether its rule is still in the
    /// plan, and what is suspicious.
    fn squared_error(offset: f64) -> Result<(bool, [Vec<String>; 2])> {
        let vs = VarStore::new(Device::Cpu);
        let weight = vs.root().f_randn_standard("weight", &[8, 8])?;
        let x = Tensor::f_ones([8, 8], (Kind::Float, Device::Cpu))?;
        let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
        let loss = |region: Autocast| {
            region.run(|| {
                let found = x.matmul(&weight).to_kind(Kind::Float) + offset;
                found.mse_loss(&(&x + offset), tch::Reduction::Mean)
            })
        };
        let repeatable = Repeatable::new(&vs)?;
        let mut beginning = repeatable.begin()?;
        let (rerun, devices) = (repeatable.rerun(&mut beginning)?, repeatable.devices());
        let clock = &|| 0.0;
        let runs = Runs::new(rerun, 1.0, loss);
        let mut runs = Iterations { runs, region, dtype: REGION, devices, clock };
        let kept = runs.costs(region)?.f32;
        let half = runs.in_half(&kept)?;
        assert!(kept.contains_key("aten::mse_loss") && half.keys().eq(kept.keys()), "{half:?}");
        let mut rules = vec![Rule::new("mse_loss", RunAs::Half)];
        let mut operators = [TunedOperator {
            operator: "aten::mse_loss".to_owned(),
            rules: rules.clone(),
            seconds: [1.0, 0.5],
            gradient_errors: [0.0; 2],
            is_in_plan: true,
        }];
        let found = runs.audited(&mut rules, &mut operators)?;
        assert!(runs.runs.count <= 4 + OF_AUDITS, "{}", runs.runs.count);
        assert_eq!(operators[0].is_in_plan, !rules.is_empty());
        Ok((operators[0].is_in_plan, found))
    }

    #[test]
    fn half_precision_that_an_audit_suspects_is_taken_back() -> Result<()> {
        let (is_in_plan, found) = squared_error(0.0)?;
        assert!(is_in_plan && found == [Vec::<String>::new(), Vec::new()], "{found:?}");
        // bf16 does not tell apart the numbers from 1000 to 1004.
        let (is_in_plan, [before, after]) = squared_error(1000.0)?;
        assert!(!is_in_plan && before.len() < after.len(), "{before:?} {after:?}");
        Ok(())
    }

    /// The nanoseconds that casts of the weights of a layer and of their gradients take in bf16.
    fn weight_casts(cast_before: bool) -> Result<i64> {
        let mut vs = VarStore::new(Device::Cpu);
        let layer = nn::linear(vs.root() / "layer", 64, 64, Default::default());
        if cast_before {
            vs.bfloat16();
        }
        let x = Tensor::f_ones([8, 64], (Kind::Float, Device::Cpu))?;
        let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
        let loss = |region: Autocast| {
            region.run(|| (x.to_kind(Kind::BFloat16)).apply(&layer).mean(Kind::Float))
        };
        let repeatable = Repeatable::new(&vs)?;
        let mut beginning = repeatable.begin()?;
        let (rerun, devices) = (repeatable.rerun(&mut beginning)?, repeatable.devices());
        let clock = &|| 0.0;
        let runs = Runs::new(rerun, 1.0, loss);
        let mut runs = Iterations { runs, region, dtype: REGION, devices, clock };
        Ok(runs.costs(region)?.weight_casts)
    }

    #[test]
    fn only_weights_in_f32_are_cast() -> Result<()> {
        assert!(weight_casts(false)? > 0);
        assert_eq!(weight_casts(true)?, 0);
        Ok(())
    }

    #[test]
    fn the_error_of_gradients_is_relative() -> Result<()> {
        let one = |x: f32| vec![Some(Tensor::from_slice(&[x, 3.0])), None];
        assert_eq!(of_gradients(&one(4.0), &one(4.0))?, 0.0);
        assert_eq!(of_gradients(&one(5.0), &one(4.0))?, 0.2);
        assert!(of_gradients(&one(f32::NAN), &one(4.0))?.is_nan());
        Ok(())
    }

    /// Each event of the forward pass takes a nanosecond, and each of the backward pass a thousand.
    #[test]
    fn an_operator_costs_what_its_forward_and_its_backward_pass_take() -> Result<()> {
        let device = Device::Cpu;
        let [x, weight] = [false, true].map(|is_weight| {
            Tensor::ones([4, 4], (Kind::Float, device)).set_requires_grad(is_weight)
        });
        let model = RecordedModel::new(vec![("weight".to_owned(), weight.shallow_clone())]);
        let (mut recording, ()) = Recording::of(&model, RecordingMode::Times, || {
            let region = Autocast::new(device).dtype(Kind::BFloat16);
            let loss = region.try_run(|| {
                let result = x.f_matmul(&weight)?;
                Ok::<_, crate::Error>(result.f_mse_loss(&x, tch::Reduction::Sum)?)
            })?;
            Ok(loss.f_backward()?)
        })?;
        let of_node = |index| {
            let node = recording.node(index).map(|node| recording.events[node].name.clone());
            node.unwrap_or_default()
        };
        let nodes: Vec<_> = (0..recording.events.len()).map(of_node).collect();
        for (event, node) in recording.events.iter_mut().zip(&nodes) {
            let ended = if node.is_empty() { 1 } else { 1000 };
            event.times = Times { entered: 0, started: 0, ended, left: 0 };
        }
        let found = costs(&recording, device);
        let of_forward = |operator: &str| {
            let is_inside = |index: &usize| {
                recording.ancestors(*index).any(|(_, event)| event.name == operator)
            };
            (0..nodes.len()).filter(is_inside).count() as i64
        };
        let of_backward = |name: &str| nodes.iter().filter(|node| *node == name).count() as i64;
        let total = |costs: &Costs, operator: &str| costs[operator].values().sum::<i64>();
        let product = total(&found.lower, "aten::matmul");
        let loss = total(&found.f32, "aten::mse_loss");
        assert_eq!(product % 1000, of_forward("aten::matmul"), "{found:?} {nodes:?}");
        assert_eq!(loss % 1000, of_forward("aten::mse_loss"), "{found:?} {nodes:?}");
        let products = of_backward("MmBackward0");
        let losses = of_backward("MseLossBackward0");
        // The casts of inputs are a part of both, and so are their backward passes.
        let casts = of_backward("ToCopyBackward0");
        assert!(products > 0 && losses > 0 && casts > 0, "{nodes:?}");
        assert!(product / 1000 > products && loss / 1000 > losses, "{found:?} {nodes:?}");
        assert_eq!((product + loss) / 1000, products + losses + casts, "{found:?} {nodes:?}");
        Ok(())
    }
}
