//! From the operators of the compared runs to the parts of the model.

use std::collections::{BTreeMap, HashMap};

use tch::{Kind, Tensor};

use super::{AuditedGradient, AuditedOutput, AuditedPart, Suspicion};
use crate::error::Result;
use crate::ffi::OutsideRegions;
use crate::ffi::insight::{self as ffi, EventKind, RecordedEvent, Usage};
use crate::insight::dtype::Dtype;
use crate::insight::measure::{dense, ratio, relative, squares, sum};
use crate::insight::recording::{Recording, is_bad};
use crate::insight::rerun::SCALED_LOSS;

/// From this multiple of the expected error on, a part is suspicious if the multiple also grew in it by this factor.
/// Healthy models have multiples of about 1, because a random walk of roundings is what happens in them.
const MULTIPLE: f64 = 4.0;

/// From this share of gradient elements on that become zero, a part is suspicious.
const UNDERFLOW: f64 = 0.01;

/// Gradients are suspicious if their error exceeds this, and that of rounded results by the factor [`MULTIPLE`].
const GRADIENT_ERROR: f64 = 0.1;

/// The dtype of half precision in which operators returned results.
pub(super) fn lower_kind(recording: &Recording) -> Option<Kind> {
    let kinds = recording.events.iter().flat_map(|event| &event.outputs).map(|output| output.kind);
    kinds.flatten().find(|kind| matches!(kind, Kind::BFloat16 | Kind::Half))
}

/// The largest relative error of rounding to a dtype.
fn unit_roundoff(dtype: Option<Kind>) -> f64 {
    match dtype {
        Some(Kind::BFloat16) => 2f64.powi(-8),
        Some(Kind::Half) => 2f64.powi(-11),
        _ => 0.0,
    }
}

/// The expected error of the numbers in a memory, and how many times as large their error is.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    expected: f64,
    multiple: f64,
    /// The largest multiple of what was given to the part.
    base: f64,
    part: Option<usize>,
}

struct Parts<'a> {
    lower: &'a Recording,
    rounded: HashMap<usize, ffi::Compared>,
    /// How far rounding at random moves each operator's results: the root mean square of the runs.
    noise: HashMap<usize, f64>,
    unit: f64,
    known: HashMap<u64, Known>,
    places: HashMap<String, usize>,
    found: Vec<AuditedPart>,
}

/// Sorts the compared operators and the gradients into parts.
pub(super) fn parts(
    lower: &Recording,
    rounded: Option<&Recording>,
    noisy: &[Recording],
    dtype: Option<Kind>,
    gradients: BTreeMap<String, GradientSums>,
) -> Vec<AuditedPart> {
    let order = compared(lower);
    let beside = rounded.map_or_else(Vec::new, compared);
    let beside = beside.into_iter().filter_map(|index| rounded?.events[index].compared);
    let rounded = order.iter().copied().zip(beside).collect();
    let mut squares = HashMap::<usize, f64>::new();
    for run in noisy {
        let errors = compared(run).into_iter().filter_map(|index| run.events[index].compared);
        for (&index, compared) in order.iter().zip(errors) {
            *squares.entry(index).or_default() += relative(compared).powi(2) / noisy.len() as f64;
        }
    }
    let mut parts = Parts {
        lower,
        rounded,
        noise: squares.into_iter().map(|(index, square)| (index, square.sqrt())).collect(),
        unit: unit_roundoff(dtype),
        known: HashMap::new(),
        places: HashMap::new(),
        found: Vec::new(),
    };
    for index in lower.ended() {
        parts.add(index);
    }
    for (path, sums) in gradients {
        let place = parts.place(path);
        parts.found[place].gradient = Some(gradient(sums));
    }
    let underflows = dtype == Some(Kind::Half);
    for part in &mut parts.found {
        part.suspicions = of_output(part).into_iter().collect();
    }
    let finite = !parts.found.iter().any(|part| part.suspicions.contains(&Suspicion::NotFinite));
    for part in &mut parts.found {
        let gradient = part.gradient.iter().flat_map(|g| of_gradient(g, underflows, finite));
        part.suspicions.extend(gradient);
    }
    parts.found
}

/// The compared events, in the order of their ends.
fn compared(recording: &Recording) -> Vec<usize> {
    let mut order = recording.ended();
    order.retain(|&index| recording.events[index].compared.is_some());
    order
}

impl Parts<'_> {
    fn place(&mut self, path: String) -> usize {
        let next = self.found.len();
        let place = *self.places.entry(path.clone()).or_insert(next);
        if place == next {
            self.found.push(AuditedPart { path, ..AuditedPart::default() });
        }
        place
    }

    fn add(&mut self, index: usize) {
        let event = &self.lower.events[index];
        let Some(compared) = event.compared else {
            self.pass_on(event);
            return;
        };
        let path = self.lower.path(index);
        if path.as_deref() == Some(SCALED_LOSS) {
            return;
        }
        let path = path.unwrap_or_else(|| self.lower.unnamed_part(index));
        let place = self.place(path);
        let dtype = event.outputs.first().map_or(Dtype::Other, Dtype::of);
        *self.found[place].dtypes.entry(dtype).or_default() += 1;
        let (output, base) = self.output(index, place, compared, dtype);
        let (expected, multiple) = (output.expected, output.multiple);
        let known = Known { expected, multiple, base, part: Some(place) };
        for memory in event.outputs.iter().filter_map(|output| output.memory) {
            self.known.insert(memory, known);
        }
        let worst = &mut self.found[place].output;
        if worst.as_ref().is_none_or(|worst| output.rank() > worst.rank()) {
            *worst = Some(output);
        }
    }

    /// A copy or cast that the program calls has the numbers of what it reads. What runs inside of another operator
    /// does not count.
    fn pass_on(&mut self, event: &RecordedEvent) {
        if event.kind != EventKind::Operator || event.parent.is_some_and(|p| self.is_operator(p)) {
            return;
        }
        let Some(known) = self.worst_input(event) else { return };
        let written = event.outputs.iter().filter(|output| output.usage != Usage::View);
        for memory in written.filter_map(|output| output.memory) {
            self.known.insert(memory, known);
        }
    }

    fn is_operator(&self, index: usize) -> bool {
        self.lower.events[index].kind != EventKind::Name
    }

    fn inputs(&self, event: &RecordedEvent) -> Vec<Known> {
        let read = event.inputs.iter().filter(|input| input.usage != Usage::Overwrite);
        read.filter_map(|input| self.known.get(&input.memory?).copied()).collect()
    }

    fn worst_input(&self, event: &RecordedEvent) -> Option<Known> {
        self.inputs(event).into_iter().max_by(|a, b| a.multiple.total_cmp(&b.multiple))
    }

    /// Returns the error of an operator's result, and the largest multiple among the inputs of its part.
    fn output(
        &self,
        index: usize,
        place: usize,
        compared: ffi::Compared,
        dtype: Dtype,
    ) -> (AuditedOutput, f64) {
        let event = &self.lower.events[index];
        let inputs = self.inputs(event);
        let unit = if dtype.is_half() { self.unit } else { 0.0 };
        let before = inputs.iter().map(|input| input.expected).fold(0.0, f64::max);
        // Numbers that were not rounded at all would be expected to be exact.
        let expected = before.hypot(unit);
        let finite = !event.outputs.iter().any(is_bad) || compared.difference.is_finite();
        let error = if finite { relative(compared) } else { f64::INFINITY };
        let multiple = if error == 0.0 { 0.0 } else { error / expected.max(self.unit) };
        let base =
            |input: &Known| if input.part == Some(place) { input.base } else { input.multiple };
        let base = inputs.iter().map(base).fold(1.0, f64::max);
        let output = AuditedOutput {
            operator: event.name.clone(),
            error,
            cosine: compared.cosine,
            expected,
            rounded: self.rounded.get(&index).map_or(0.0, |rounded| relative(*rounded)),
            noise: self.noise.get(&index).copied(),
            multiple,
            inputs: self.paths(&inputs, place),
            growth: self.growth(event, multiple, base),
        };
        (output, base)
    }

    /// How much the multiple grew. A single number that is finite, such as a sum of both signs, can be near zero by
    /// chance, and has no relative error that tells anything.
    fn growth(&self, event: &RecordedEvent, multiple: f64, base: f64) -> f64 {
        let is_single = event.outputs.iter().all(|output| output.elements == 1);
        match (multiple.is_infinite(), base.is_infinite()) {
            (true, true) => 1.0,
            (false, _) if is_single => (multiple / base).min(1.0),
            _ => multiple / base,
        }
    }

    /// The other parts that computed these inputs.
    fn paths(&self, inputs: &[Known], place: usize) -> Vec<String> {
        let mut parts: Vec<usize> = inputs.iter().filter_map(|input| input.part).collect();
        parts.retain(|&part| part != place);
        parts.sort_unstable();
        parts.dedup();
        parts.into_iter().map(|part| self.found[part].path.clone()).collect()
    }
}

impl AuditedOutput {
    /// Returns the number by which the operators of a part are compared: the worst has the largest.
    fn rank(&self) -> f64 {
        self.growth.min(self.multiple)
    }
}

fn gradient(sum: GradientSums) -> AuditedGradient {
    let error = ratio(sum.difference, sum.norm).sqrt();
    AuditedGradient {
        error: if error.is_nan() { f64::INFINITY } else { error },
        cosine: if sum.own == 0.0 && sum.norm == 0.0 {
            1.0
        } else {
            ratio(sum.product, sum.own.sqrt() * sum.norm.sqrt())
        },
        rounded: ratio(sum.rounded_difference, sum.norm).sqrt(),
        underflow: ratio(sum.zeros, sum.elements),
        underflow_unscaled: ratio(sum.zeros_unscaled, sum.elements),
    }
}

fn of_output(part: &AuditedPart) -> Option<Suspicion> {
    let output = part.output.as_ref().filter(|o| o.multiple >= MULTIPLE && o.growth >= MULTIPLE)?;
    Some(match output.error.is_infinite() {
        true => Suspicion::NotFinite,
        false if output.rounded >= output.error / 4.0 => Suspicion::MagnifiesRounding,
        false => Suspicion::LosesPrecision,
    })
}

/// Returns the reasons to suspect gradients. After a forward pass that is not finite, no gradient is.
fn of_gradient(gradient: &AuditedGradient, underflows: bool, finite: bool) -> Vec<Suspicion> {
    let mut found = Vec::new();
    if underflows && gradient.underflow >= UNDERFLOW {
        found.push(Suspicion::Underflow);
    }
    let is_judged = finite || gradient.error.is_finite();
    if is_judged && gradient.error >= GRADIENT_ERROR.max(MULTIPLE * gradient.rounded) {
        found.push(Suspicion::Gradient);
    }
    found
}

/// The parts to keep in f32, and those before them whose roundings they magnify, as they are called in an audit.
pub(super) fn needs_f32(parts: &[AuditedPart]) -> Vec<&str> {
    let mut names = Vec::new();
    for part in parts.iter().filter(|part| part.has_suspicious_output()) {
        let magnifies = part.suspicions.contains(&Suspicion::MagnifiesRounding);
        let inputs = part.output.iter().filter(|_| magnifies).flat_map(|output| &output.inputs);
        for path in inputs.chain([&part.path]).map(String::as_str) {
            if path != "start" && !names.contains(&path) {
                names.push(path);
            }
        }
    }
    names
}

/// The gradients of a run, and the scale by which they are divided before they are compared.
pub(super) type Scaled<'a> = (&'a [Option<Tensor>], f64);

/// Sums over the gradients of a part in the region, beside those in f32.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GradientSums {
    difference: f64,
    rounded_difference: f64,
    norm: f64,
    own: f64,
    product: f64,
    /// Elements that are not zero in f32.
    elements: f64,
    /// Those of them that are zero in the region, and with a scale of 1.
    zeros: f64,
    zeros_unscaled: f64,
}

/// A gradient as it would be without the scale, in f64; `None` if there is none.
fn unscaled((gradients, scale): Scaled<'_>, index: usize) -> Result<Option<Tensor>> {
    let Some(Some(gradient)) = gradients.get(index) else { return Ok(None) };
    let _own = OutsideRegions::enter();
    let dense = dense(gradient)?;
    let scale = crate::ffi::number_new(scale, Kind::Double, dense.device())?;
    Ok(Some(dense.f_to_kind(Kind::Double)?.f_div(&scale)?))
}

/// Compares the gradients of every parameter that has one in f32 and in the region, and adds them up by its module.
pub(super) fn compare(
    modules: &[String],
    [f32, lower, at_one]: [Scaled<'_>; 3],
    rounded: Option<Scaled<'_>>,
) -> Result<BTreeMap<String, GradientSums>> {
    let _own = OutsideRegions::enter();
    let mut found = BTreeMap::<_, GradientSums>::new();
    for (index, module) in modules.iter().enumerate() {
        let (Some(f32), Some(lower)) = (unscaled(f32, index)?, unscaled(lower, index)?) else {
            continue;
        };
        let rounded = rounded.map(|run| unscaled(run, index)).transpose()?.flatten();
        let at_one = unscaled(at_one, index)?;
        let nonzero = f32.f_ne_tensor(&f32.f_zeros_like()?)?;
        let zeros = |other: &Tensor| {
            sum(&other.f_eq_tensor(&other.f_zeros_like()?)?.f_logical_and(&nonzero)?)
        };
        let difference = |other: &Tensor| squares(&other.f_sub(&f32)?);
        let sums = found.entry(module.clone()).or_default();
        sums.difference += difference(&lower)?;
        sums.rounded_difference += rounded.as_ref().map_or(Ok(0.0), difference)?;
        sums.norm += squares(&f32)?;
        sums.own += squares(&lower)?;
        sums.product += sum(&lower.f_mul(&f32)?)?;
        sums.elements += sum(&nonzero)?;
        sums.zeros += zeros(&lower)?;
        sums.zeros_unscaled += at_one.as_ref().map_or(Ok(0.0), zeros)?;
    }
    Ok(found)
}
