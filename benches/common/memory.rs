//! How much memory this process has at most.
#![allow(dead_code, reason = "each benchmark uses its own part")]

use std::fs;

/// A field of /proc/self/status in bytes, where there is one.
fn status(field: &str) -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kilobytes: f64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kilobytes * 1024.0)
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
