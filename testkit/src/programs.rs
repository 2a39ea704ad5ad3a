//! Which random programs run, and where.

use std::ops::Range;

use super::{cuda_or_skip, simulation, skipped};

/// The number in an environment variable, if it is set.
pub fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {value:?}")))
}

/// The seeds of random programs: the one in `TCH_AMP_SEED` alone, or as many as the variable `count` says.
pub fn seeds(count: &str, usual: u64) -> Range<u64> {
    match number("TCH_AMP_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number(count).unwrap_or(usual),
    }
}

/// Whether Python can have the GPU of this process, too; prints a message if it cannot.
pub fn python_can_have_the_gpu() -> bool {
    if !cuda_or_skip() {
        return false;
    }
    if simulation::is_model() {
        skipped("Python has no simulated GPU");
    }
    !simulation::is_model()
}
