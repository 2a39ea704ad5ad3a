//! Casts between floating dtypes: who asked for them, and which cast the same numbers again.

use std::collections::{BTreeMap, HashMap, HashSet};

use tch::{Kind, Tensor};

use super::report::{CastReason, CastRow, seconds};
use super::work::{Work, written};
use crate::ffi::insight::{EventKind, RecordedEvent, RecordedTensor};
use crate::insight::dtype::Dtype;
use crate::insight::recording::Pass;

/// Operators of which a cast consists.
const CASTS: &[&str] = &[
    "aten::to",
    "aten::_to_copy",
    "aten::copy_",
    "aten::type_as",
    "aten::_autocast_to_reduced_precision",
    "aten::_autocast_to_full_precision",
];

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CastKey {
    from: Dtype,
    to: Dtype,
    reason: CastReason,
    operator: Option<String>,
    path: Option<String>,
    parameter: Option<String>,
    pass: Pass,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CastSums {
    calls: u64,
    bytes: i64,
    nanoseconds: i64,
    repeats: u64,
    cacheable: u64,
    repeat_nanoseconds: i64,
}

/// What tells a cast of a memory from another: where the numbers begin, the version, the sizes and the dtype.
type CastPart = (i64, i64, Vec<i64>, i8);

pub(super) type CastRows = BTreeMap<CastKey, CastSums>;

/// Adds the casts of one run.
pub(super) fn add(work: &Work<'_>, parameters: &[(String, Tensor)], rows: &mut CastRows) {
    // By memory: the versions, places, sizes and dtypes of its parts that were cast since an operator wrote to it. The
    // versions tell of writes that are no operators, such as those of an optimizer's kernel.
    let mut seen: HashMap<u64, HashSet<CastPart>> = HashMap::new();
    for (index, event) in work.operators().filter(|(index, _)| work.computes[*index]) {
        for memory in written(event) {
            seen.remove(&memory);
        }
        let Some((to, from)) = cast(event) else { continue };
        let (key, forward) = key(work, index, (to, from), parameters);
        let again = from.memory.is_some_and(|memory| {
            let part = (from.version, from.offset, from.sizes().to_vec(), to.dtype);
            !seen.entry(memory).or_default().insert(part)
        });
        let cacheable =
            again && key.reason == CastReason::Autocast && is_cached(from, to, parameters);
        let sums = rows.entry(CastKey { operator: forward, ..key }).or_default();
        sums.calls += 1;
        sums.bytes += from.bytes() + to.bytes();
        sums.nanoseconds += work.own[index];
        if again {
            sums.repeats += 1;
            sums.repeat_nanoseconds += work.own[index];
        }
        sums.cacheable += u64::from(cacheable);
    }
}

/// The result and the source of a cast between floating dtypes.
fn cast(event: &RecordedEvent) -> Option<(&RecordedTensor, &RecordedTensor)> {
    let (to, from) = match event.inputs.as_slice() {
        [to, from, ..] if event.name == "aten::copy_" => (to, from),
        _ => return None,
    };
    // A number of the program is an f64 tensor without dimensions before it takes part in an operator.
    let is_number = from.kind == Some(Kind::Double) && from.dims == 0;
    let differ = to.kind.is_some() && from.kind.is_some() && to.kind != from.kind;
    (differ && !is_number).then_some((to, from))
}

/// Describes a cast, and names the operator that asked for it.
fn key(
    work: &Work<'_>,
    index: usize,
    (to, from): (&RecordedTensor, &RecordedTensor),
    parameters: &[(String, Tensor)],
) -> (CastKey, Option<String>) {
    let (at, path) = work.place(index);
    let asked_by = asking(work, index);
    let (reason, operator) = match asked_by.map(|index| &work.recording.events[index]) {
        Some(event) => {
            // An operator on no list is not called again: it casts on its own, even inside of a region.
            let by_autocast = asked_by.is_some_and(|index| work.called_again[index]);
            let reason = if by_autocast { CastReason::Autocast } else { CastReason::Operator };
            (reason, Some(event.name.clone()))
        }
        None if at == Pass::Backward => {
            let forward = work.recording.pass(index).1;
            let forward = forward.and_then(|index| asking(work, index));
            let name = |index: usize| work.recording.events[index].name.clone();
            (CastReason::Derivative, forward.map(name))
        }
        None => (CastReason::Program, None),
    };
    let parameter = from.parameter.and_then(|index| parameters.get(index));
    let key = CastKey {
        from: Dtype::of(from),
        to: Dtype::of(to),
        reason,
        operator: None,
        path,
        parameter: parameter.map(|(name, _)| name.clone()),
        pass: at,
    };
    (key, operator)
}

/// The operator that a cast belongs to, if it ran in one.
fn asking(work: &Work<'_>, index: usize) -> Option<usize> {
    let above = work.recording.ancestors(index);
    let mut operators = above.take_while(|(_, event)| event.kind == EventKind::Operator);
    operators.find(|(_, event)| !CASTS.contains(&event.name.as_str())).map(|(index, _)| index)
}

/// Whether autocast's cache keeps this cast: that of a trainable f32 parameter, as a whole.
fn is_cached(from: &RecordedTensor, to: &RecordedTensor, parameters: &[(String, Tensor)]) -> bool {
    let parameter = from.parameter.and_then(|index| parameters.get(index));
    from.kind == Some(Kind::Float)
        && Dtype::of(to).is_half()
        && parameter.is_some_and(|(_, tensor)| {
            tensor.requires_grad() && tensor.is_leaf() && tensor.size() == from.sizes()
        })
}

/// The rows of the report, by time.
pub(super) fn rows(rows: CastRows) -> Vec<CastRow> {
    let mut rows: Vec<_> = rows.into_iter().map(row).collect();
    rows.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    rows
}

fn row((key, sums): (CastKey, CastSums)) -> CastRow {
    CastRow {
        from: key.from,
        to: key.to,
        reason: key.reason,
        operator: key.operator,
        path: key.path,
        parameter: key.parameter,
        pass: key.pass,
        calls: sums.calls,
        bytes: u64::try_from(sums.bytes).unwrap_or(0),
        seconds: seconds(sums.nanoseconds),
        repeats: sums.repeats,
        cacheable: sums.cacheable,
        repeat_seconds: seconds(sums.repeat_nanoseconds),
    }
}
