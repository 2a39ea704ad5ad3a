//! The time that each part of the model takes.

use std::collections::BTreeMap;

use super::parts::place;
use super::{Audit, AuditedPart};
use crate::insight::operators::own_times;
use crate::insight::passes::SCALED_LOSS;
use crate::insight::recording::Recording;

/// The seconds of each part, forward and backward.
pub(super) type Times = BTreeMap<String, f64>;

/// Adds up the own times of the operators of each part.
pub(super) fn times(recording: &Recording, modules: &[String]) -> Times {
    let mut times = Times::new();
    for (index, nanoseconds) in own_times(&recording.events).into_iter().enumerate() {
        if nanoseconds > 0 {
            let path = recording.part(index, modules);
            let path = path.unwrap_or_else(|| {
                let forward = recording.pass(index).1;
                place(recording, forward.unwrap_or(index), modules)
            });
            *times.entry(path).or_default() += nanoseconds as f64 / 1e9;
        }
    }
    times.remove(SCALED_LOSS);
    times
}

/// Gives the parts of an audit their times in f32 and in the region.
pub(super) fn add(parts: &mut [AuditedPart], f32: &Times, lower: &Times) {
    let seconds = |times: &Times, path: &str| times.get(path).copied().unwrap_or(0.0);
    for part in parts {
        part.seconds = [seconds(f32, &part.path), seconds(lower, &part.path)];
    }
}

impl Audit {
    /// Estimates how many seconds longer an iteration takes with the parts of [`keep_in_f32`](Self::keep_in_f32) in
    /// f32: the difference of their times in the two runs. Casts between these parts and others are not included.
    pub fn f32_seconds(&self) -> f64 {
        let keep = super::parts::keep_in_f32(&self.parts);
        let kept = self.parts.iter().filter(|part| keep.contains(&part.path.as_str()));
        kept.map(|part| part.seconds[0] - part.seconds[1]).sum()
    }
}
