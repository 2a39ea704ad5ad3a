//! How much memory this process has at most.
#![allow(dead_code, reason = "each benchmark uses its own part")]

use std::fs;

/// A field of a file in /proc/self in bytes, where there is one.
fn field(file: &str, field: &str) -> Option<f64> {
    let text = fs::read_to_string(format!("/proc/self/{file}")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kilobytes: f64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kilobytes * 1024.0)
}

fn status(name: &str) -> Option<f64> {
    field("status", name)
}

/// The memory in use that is no file's, page by page: the counts in /proc/self/status are behind by some pages.
pub fn anonymous() -> Option<f64> {
    field("smaps_rollup", "Anonymous")
}

/// Runs `work` and returns by how many bytes the memory in use was larger at its peak than before; NaN where the system
/// does not tell.
pub fn peak(work: impl FnOnce()) -> f64 {
    // Makes the peak what is in use now.
    let reset = fs::write("/proc/self/clear_refs", "5");
    let before = status("VmRSS");
    work();
    let peak = status("VmHWM");
    reset.ok().and_then(|()| Some(peak? - before?)).unwrap_or(f64::NAN)
}
