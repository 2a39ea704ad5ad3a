//! Precision budgets: correct training is within them, published faults are not, and nothing is left behind.

mod context;
mod correct;
mod cuda;
mod edges;
mod faults;
mod files;
mod models;
mod program;
mod programs;
mod recipes;
mod restored;

use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::Kind;

pub(crate) const DTYPES: [Kind; 2] = [Kind::BFloat16, Kind::Half];

/// Keeps other tests from the generator of random numbers, which is the process's. Small products are slower on
/// several threads.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static RANDOM: Mutex<()> = Mutex::new(());
    let alone = RANDOM.lock().unwrap_or_else(PoisonError::into_inner);
    tch::set_num_threads(1);
    alone
}

/// The seeds of the models: more of them with `TCH_AMP_LONG=1`.
pub(crate) fn seeds(usual: i64, long: i64) -> std::ops::Range<i64> {
    let is_long = std::env::var("TCH_AMP_LONG").is_ok_and(|value| value == "1");
    0..if is_long { long } else { usual }
}
