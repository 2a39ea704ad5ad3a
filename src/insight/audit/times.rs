//! The time that each part of the model takes.

use std::collections::BTreeMap;

use super::parts::{keep_in_f32, place};
use super::{AFTER, Audit, AuditedPart};
use crate::insight::operators::own_times;
use crate::insight::passes::SCALED_LOSS;
use crate::insight::recording::Recording;

/// How often the time is measured in f32 and in the region, in turn.
pub(super) const ROUNDS: usize = 3;

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

/// Keeps the shorter time of each part.
pub(super) fn keep_fastest(fastest: &mut Times, other: Times) {
    for (path, seconds) in other {
        fastest
            .entry(path)
            .and_modify(|fastest| *fastest = fastest.min(seconds))
            .or_insert(seconds);
    }
}

/// Gives the parts of an audit their times in f32 and in the region.
pub(super) fn add(parts: &mut [AuditedPart], measured: &[Times; 2]) {
    for part in parts {
        let seconds = |times: &Times| times.get(&part.path).copied().unwrap_or(0.0);
        part.seconds = [seconds(&measured[0]), seconds(&measured[1])];
    }
}

impl Audit {
    /// Estimates how many seconds longer an iteration takes with the parts of [`keep_in_f32`](Self::keep_in_f32) in
    /// f32: the difference of their [times](AuditedPart::seconds). Casts between these parts and others are not
    /// included.
    pub fn f32_seconds(&self) -> f64 {
        let keep = keep_in_f32(&self.parts);
        // Where operators after a module are to be kept, so is the module.
        let is_kept = |part: &&AuditedPart| {
            let followers = format!("{AFTER}{}", part.path);
            keep.contains(&part.path.as_str()) || keep.contains(&followers.as_str())
        };
        let kept = self.parts.iter().filter(is_kept);
        kept.map(|part| part.seconds[0] - part.seconds[1]).sum()
    }
}
