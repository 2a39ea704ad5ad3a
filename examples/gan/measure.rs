//! The numbers of a run.

use super::ring::{self, MODES};
use super::train::{Losses, Trainer};
use crate::recipe::Precision;
use anyhow::Result;

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

impl Trainer {
    /// Returns the numbers of a step for the log.
    pub fn read(&self, losses: &Losses) -> Result<Vec<(&'static str, f64)>> {
        let Losses { discriminator, verdict, distance } = losses;
        let (covered, close) = ring::coverage(&self.points()?, &self.centres);
        let mut numbers = vec![
            (DISCRIMINATOR, discriminator.double_value(&[])),
            (VERDICT, verdict.double_value(&[])),
            (DISTANCE, distance.double_value(&[])),
            (COVERED, covered),
            (CLOSE, close),
        ];
        if self.amp == Precision::Fp16 {
            let of_generator = [self.scalers.get_scale(0)?, self.scalers.get_scale(1)?];
            numbers.push((SCALES[0], self.scaler.get_scale()?));
            numbers.extend([(SCALES[1], of_generator[0]), (SCALES[2], of_generator[1])]);
        }
        Ok(numbers)
    }
}

/// The numbers of a step that are shown with the progress.
pub fn words(numbers: &[(&str, f64)]) -> String {
    let find = |name: &str| {
        let found = numbers.iter().find(|number| number.0 == name);
        found.map_or(f64::NAN, |number| number.1)
    };
    let scales: Vec<_> = numbers.iter().filter(|number| SCALES.contains(&number.0)).collect();
    let scales: Vec<_> = scales.iter().map(|scale| scale.1.to_string()).collect();
    let scales = match scales.is_empty() {
        true => String::new(),
        false => format!(", scales {}", scales.join(" ")),
    };
    format!(
        "discriminator {:.3}, generator {:.3} and {:.4}, {} of {MODES} modes{scales}",
        find(DISCRIMINATOR),
        find(VERDICT),
        find(DISTANCE),
        find(COVERED)
    )
}
