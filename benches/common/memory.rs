//! The memory in use and its peak.
#![allow(dead_code, reason = "each benchmark uses its own part")]
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

use std::fmt::{self, Display, Formatter};
use std::fs;
use std::process::Command;

use tch_amp::memory::peak_during;

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

/// By how many bytes a piece of work raises the memory at its peak.
#[derive(Clone, Copy, Debug)]
pub struct Peaks {
    /// As the system counts it; NaN if it does not.
    pub resident: f64,
    /// As libtorch's allocator counts it.
    pub tensors: f64,
}

/// Runs `work` and measures its peaks.
pub fn peaks(work: impl FnOnce()) -> Peaks {
    let mut tensors = 0;
    let resident = peak(|| tensors = peak_during(work).expect("the allocator counts").1);
    Peaks { resident, tensors: tensors as f64 }
}

impl Peaks {
    /// Prints what [`in_new_process`] reads.
    pub fn print(self) {
        println!("peaks {} {}", self.resident, self.tensors);
    }
}

impl Display for Peaks {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let [resident, tensors] = [self.resident, self.tensors].map(mib);
        write!(f, "{resident:7.1} MiB resident, {tensors:7.1} MiB of tensors")
    }
}

pub fn mib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 20)
}

/// Makes glibc give tensors of more than 128 KiB back to the system as soon as they are freed.
pub const GIVES_BACK: (&str, &str) = ("MALLOC_MMAP_THRESHOLD_", "131072");

const REQUEST: &str = "TCH_AMP_BENCH_MEMORY";

/// What this process is asked to measure, if [`in_new_process`] has started it.
pub fn request() -> Option<String> {
    std::env::var(REQUEST).ok()
}

/// Starts the program once more with a request, and reads the peaks that it prints. In a process of its own, no memory
/// of another measurement is used again.
pub fn in_new_process(request: &str) -> Peaks {
    let mut command = Command::new(std::env::current_exe().expect("the program has a path"));
    command.args(std::env::args().skip(1)).envs([GIVES_BACK, (REQUEST, request)]);
    let output = command.output().expect("the program starts");
    let [text, errors] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    let peaks = text.lines().find_map(|line| {
        let mut numbers = line.strip_prefix("peaks ")?.split(' ').map(str::parse);
        Some(Peaks { resident: numbers.next()?.ok()?, tensors: numbers.next()?.ok()? })
    });
    peaks.unwrap_or_else(|| panic!("{request}: {text}{errors}"))
}
