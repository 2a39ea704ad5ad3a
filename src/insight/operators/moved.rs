//! Operators that autocast ran in f32 although they had inputs in half precision.

use std::collections::BTreeMap;

use tch::Kind;

use crate::ffi::insight::{RecordedEvent, RecordedTensor};

use super::lists::{AutocastList, LINKED, list_in};
use super::report::MovedOperator;
use super::rows::seconds;
use super::work::Work;

/// An operator, the part of the model, the module before, and the list.
type MovedKey = (String, Option<String>, Option<String>, AutocastList);

/// The calls and the nanoseconds.
pub(super) type MovedRows = BTreeMap<MovedKey, (u64, i64)>;

/// Adds the operators of one run.
///
/// Autocast casts the inputs of an operator and calls it again, outside of the region. The dtypes of the second call
/// show what it did, whatever the list.
pub(super) fn add(work: &Work<'_>, rows: &mut MovedRows) {
    for (_, inner) in work.operators() {
        let Some(above) = inner.parent else { continue };
        let outer = &work.recording.events[above];
        let called_again =
            outer.autocast.is_some() && inner.autocast.is_none() && outer.name == inner.name;
        if !called_again || !outer.inputs.iter().any(is_half) || !is_f32(inner) {
            continue;
        }
        let on_cuda = outer.inputs.iter().any(|tensor| tensor.device.0 == 1);
        let list = list_in(LINKED, on_cuda, &outer.name);
        let (_, path) = work.place(above);
        let after = if path.is_none() { work.module_before(above) } else { None };
        let key = (outer.name.clone(), path, after, list);
        let (calls, nanoseconds) = rows.entry(key).or_default();
        *calls += 1;
        *nanoseconds += work.total[above];
    }
}

/// Whether all floating results are f32.
fn is_f32(event: &RecordedEvent) -> bool {
    let mut floats = event.outputs.iter().filter_map(|tensor| tensor.kind).peekable();
    floats.peek().is_some() && floats.all(|kind| kind == Kind::Float)
}

fn is_half(tensor: &RecordedTensor) -> bool {
    matches!(tensor.kind, Some(Kind::Half | Kind::BFloat16))
}

/// The rows of the report, by time.
pub(super) fn rows(rows: MovedRows) -> Vec<MovedOperator> {
    let row = |((operator, path, after, list), (calls, nanoseconds))| MovedOperator {
        operator,
        path,
        after,
        list,
        calls,
        seconds: seconds(nanoseconds),
    };
    let mut rows: Vec<_> = rows.into_iter().map(row).collect();
    rows.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    rows
}
