//! Whether one run is faster than another.

/// Medians within this ratio of each other are not reported as different.
pub const SAME: f64 = 1.1;

/// A quantile of the seconds that steps took: the median for `0.5`, the lower quartile for `0.25`.
pub fn quantile(seconds: &[f64], quantile: f64) -> f64 {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get((quantile * sorted.len() as f64) as usize).copied().unwrap_or(f64::NAN)
}

/// The ratio of the median step times of fp32 and of a run, or exactly 1 if the middle halves of the times overlap,
/// because other work on the machine shifts a median as easily as the precision does.
pub fn speedup(run: &[f64], fp32: &[f64]) -> f64 {
    let ratio = quantile(fp32, 0.5) / quantile(run, 0.5);
    let faster = ratio >= SAME && quantile(fp32, 0.25) > quantile(run, 0.75);
    let slower = ratio.recip() >= SAME && quantile(run, 0.25) > quantile(fp32, 0.75);
    if faster || slower { ratio } else { 1.0 }
}

/// What a run is, by its [`speedup`].
pub fn in_words(speedup: f64) -> String {
    match speedup {
        1.0 => "not measurably faster or slower than fp32".to_owned(),
        ratio if ratio > 1.0 => format!("{ratio:.1}x faster than fp32 here"),
        ratio => format!("{:.1}x slower than fp32 here", ratio.recip()),
    }
}
