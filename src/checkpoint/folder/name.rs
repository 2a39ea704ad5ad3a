//! The file names of checkpoints, which hold their step and score.
//!
//! A name is `step-` and the step in at least eight digits, `-score-` and the score if there is one, and the ending of
//! the format. There is no other index of a folder.

use crate::checkpoint::Format;

const STEP: &str = "step-";
const SCORE: &str = "-score-";

/// The longest score, in characters, that is written without an exponent. With an exponent every number takes at most
/// 24 characters.
const MAX_DIGITS: usize = 20;

/// Returns the name of a checkpoint. Names sort by step up to eight digits, and a score parses back to exactly the same
/// number.
pub(super) fn of(step: u64, score: Option<f64>, format: Format) -> String {
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
        (of(step, score, format) == name).then_some((step, score))
    })
}

fn ending(format: Format) -> &'static str {
    match format {
        Format::Safetensors => "safetensors",
        Format::Torch => "pt",
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
                assert_eq!(parse(&of(step, None, format)), Some((step, None)));
                for score in scores {
                    let name = of(step, Some(score), format);
                    assert!(name.len() < 80, "{name}");
                    let (parsed, found) = parse(&name).unwrap_or_else(|| panic!("{name}"));
                    assert_eq!((parsed, found.map(f64::to_bits)), (step, Some(score.to_bits())));
                }
            }
        }
        let nan = parse(&of(3, Some(f64::NAN), Format::Torch));
        assert!(nan.is_some_and(|(step, score)| step == 3 && score.is_some_and(f64::is_nan)));
        assert_eq!(
            of(100, Some(0.25), Format::Safetensors),
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
