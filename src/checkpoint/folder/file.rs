//! A checkpoint in a folder. Its file name holds its step and score; there is no other index of a folder.
//!
//! A name is `step-` and the step in at least eight digits, `-score-` and the score if there is one, and the ending of
//! the format.

use std::path::{Path, PathBuf};

use crate::checkpoint::{Checkpoint, CheckpointError, Format};

const STEP: &str = "step-";
const SCORE: &str = "-score-";

/// The longest score, in characters, that is written without an exponent. With an exponent every number takes at most
/// 24 characters.
const MAX_DIGITS: usize = 20;

/// A checkpoint in a folder, as described by its file name. The file may be damaged.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CheckpointFile {
    /// The step that it was saved under, such as the number of completed steps or epochs.
    pub step: u64,
    /// The score that [`save_scored`](crate::checkpoint::CheckpointFolder::save_scored) was called with.
    pub score: Option<f64>,
    /// The path of the file.
    pub path: PathBuf,
}

/// A checkpoint that was found in a folder, loaded and verified.
#[derive(Debug)]
#[non_exhaustive]
pub struct Found {
    /// The file that it was loaded from.
    pub file: CheckpointFile,
    /// The loaded checkpoint.
    pub checkpoint: Checkpoint,
    /// Why the checkpoints that would have been preferred were skipped.
    pub damaged: Vec<CheckpointError>,
}

/// Where a run starts; see [`resume_or_start`](crate::checkpoint::CheckpointFolder::resume_or_start).
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Start {
    /// The step of the checkpoint, or 0 for a new run.
    pub step: u64,
    /// The checkpoint that the run resumes from; `None` for a new run.
    pub from: Option<PathBuf>,
    /// Why newer checkpoints were skipped.
    pub damaged: Vec<CheckpointError>,
}

impl CheckpointFile {
    /// Returns the file at a path if its name is that of a checkpoint and it is not a folder.
    pub(super) fn at(path: &Path) -> Option<Self> {
        let (step, score) = parse(path.file_name()?.to_str()?)?;
        path.is_file().then(|| Self { step, score, path: path.to_owned() })
    }
}

/// Returns the name of a checkpoint. Names sort by step up to eight digits, and a score parses back to exactly the same
/// number.
pub(super) fn name_of(step: u64, score: Option<f64>, format: Format) -> String {
    let score = score.map(|score| {
        let plain = score.to_string();
        let text = if plain.len() > MAX_DIGITS { format!("{score:e}") } else { plain };
        format!("{SCORE}{text}")
    });
    let ending = ending(format);
    format!("{STEP}{step:08}{}.{ending}", score.unwrap_or_default())
}

/// Returns the step and the score in a name, or `None` if it is not the name of a checkpoint.
pub(super) fn parse(name: &str) -> Option<(u64, Option<f64>)> {
    let formats = [Format::Safetensors, Format::Torch];
    formats.into_iter().find_map(|format| {
        let stem = name.strip_suffix(ending(format))?.strip_suffix('.')?;
        let (step, score) = match stem.split_once(SCORE) {
            Some((step, score)) => (step, Some(score.parse().ok()?)),
            None => (stem, None),
        };
        let step = step.strip_prefix(STEP)?.parse().ok()?;
        // Only names exactly as this crate writes them: a copy under a similar name belongs to the user.
        (name_of(step, score, format) == name).then_some((step, score))
    })
}

fn ending(format: Format) -> &'static str {
    match format {
        Format::Safetensors => "safetensors",
        Format::Torch | Format::TorchByName => "pt",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_its_step_and_score() {
        let scores =
            [0.25, -3.0, 1e300, -5e-324, f64::MIN_POSITIVE, f64::INFINITY, -0.0, 1e22, 0.1 + 0.2];
        for format in [Format::Safetensors, Format::Torch] {
            for step in [0, 7, 99_999_999, 100_000_000, u64::MAX] {
                assert_eq!(parse(&name_of(step, None, format)), Some((step, None)));
                for score in scores {
                    let name = name_of(step, Some(score), format);
                    assert!(name.len() < 80, "{name}");
                    let (parsed, found) = parse(&name).unwrap_or_else(|| panic!("{name}"));
                    assert_eq!((parsed, found.map(f64::to_bits)), (step, Some(score.to_bits())));
                }
            }
        }
        let nan = parse(&name_of(3, Some(f64::NAN), Format::Torch));
        assert!(nan.is_some_and(|(step, score)| step == 3 && score.is_some_and(f64::is_nan)));
        assert_eq!(
            name_of(100, Some(0.25), Format::Safetensors),
            "step-00000100-score-0.25.safetensors"
        );
    }

    #[test]
    fn other_names_are_not_ours() {
        for name in [
            "step-100.safetensors",
            "step-+0000100.pt",
            "step-00000100.ckpt",
            "step-00000100",
            "step-.pt",
            "step-00000100-score-.pt",
            "step-00000100-score-0.250.pt",
            "step-00000100-score-1-score-2.pt",
            "step-00000100.pt.bak",
            "my-step-00000100.pt",
            "step-99999999999999999999.pt",
            "",
        ] {
            assert_eq!(parse(name), None, "{name}");
        }
    }
}
