//! The memory in use and its peak.
#![allow(dead_code, reason = "each benchmark uses its own part")]

use std::fs;

/// A field of a file in /proc/self in bytes, if it exists.
fn field(file: &str, field: &str) -> Option<f64> {
    let text = fs::read_to_string(format!("/proc/self/{file}")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kilobytes: f64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kilobytes * 1024.0)
}

fn status(name: &str) -> Option<f64> {
    field("status", name)
}

/// The anonymous memory in use. It is counted page by page, because the counts in /proc/self/status lag by some pages.
pub fn anonymous() -> Option<f64> {
    field("smaps_rollup", "Anonymous")
}

/// Runs `work` and returns the increase of the memory in use at its peak, in bytes; NaN if the system does not report
/// it.
pub fn peak(work: impl FnOnce()) -> f64 {
    // Resets the peak to the memory in use now.
    let reset = fs::write("/proc/self/clear_refs", "5");
    let before = status("VmRSS");
    work();
    let peak = status("VmHWM");
    reset.ok().and_then(|()| Some(peak? - before?)).unwrap_or(f64::NAN)
}
