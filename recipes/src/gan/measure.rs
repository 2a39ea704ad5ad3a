//! The numbers of a run.

use super::ring::MODES;
use crate::measure::{self, Number};

/// The columns of the log, and the names in TensorBoard.
pub const COLUMNS: [&str; 8] =
    [DISCRIMINATOR, VERDICT, DISTANCE, COVERED, CLOSE, SCALES[0], SCALES[1], SCALES[2]];
/// The discriminator's loss.
pub const DISCRIMINATOR: &str = "discriminator";
/// The generator's loss by the verdict of the discriminator.
pub const VERDICT: &str = "generator_verdict";
/// The generator's loss by the moments.
pub const DISTANCE: &str = "generator_moments";
/// The number of modes that the fakes cover.
pub const COVERED: &str = "modes";
/// The share of the fakes that are close to a mode.
pub const CLOSE: &str = "close";
/// The scales of the three losses, in fp16.
pub const SCALES: [&str; 3] = ["scale_discriminator", "scale_verdict", "scale_moments"];

/// The numbers of a step that are shown with the progress.
pub fn words(numbers: &[Number]) -> String {
    let find = |column| measure::find(numbers, column).unwrap_or(f64::NAN);
    let scales = SCALES.into_iter().filter_map(|column| measure::find(numbers, column));
    let scales: String = scales.map(|scale| format!(" {scale}")).collect();
    let scales = if scales.is_empty() { scales } else { format!(", scales{scales}") };
    format!(
        "discriminator {:.3}, generator {:.3} and {:.4}, {} of {MODES} modes{scales}",
        find(DISCRIMINATOR),
        find(VERDICT),
        find(DISTANCE),
        find(COVERED)
    )
}
