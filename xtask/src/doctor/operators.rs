//! How fast the operators that autocast casts to bf16 are on the CPU, measured with Python's torch.

use std::path::Path;
use std::process::Command;

use crate::process;

const PROGRAM: &str = include_str!("operators.py");

/// Those that a region can keep in f32; the others read what these return.
const FOLLOWERS: &str = " of half";

/// A table of the ratios, and what to do about the operators that are slower in bf16; `None` if Python cannot measure
/// them.
pub(super) fn table(python: &Path) -> Option<String> {
    let printed = process::read(Command::new(python).args(["-c", PROGRAM])).ok()?;
    let rows: Option<Vec<_>> = printed.lines().map(Row::parse).collect();
    Some(text(&rows?))
}

/// An operator, and its time in f32 over that in bf16 at three sizes, or nothing where bf16 took too long or failed.
#[derive(Debug, PartialEq)]
struct Row {
    name: String,
    ratios: [Option<f64>; 3],
}

impl Row {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split('\t');
        let name = words.next()?.to_owned();
        let ratios = [words.next()?, words.next()?, words.next()?].map(|word| word.parse().ok());
        Some(Self { name, ratios })
    }

    /// libtorch's name.
    fn operator(&self) -> String {
        let name = self.name.split(',').next().unwrap_or(&self.name);
        name.trim_end_matches(FOLLOWERS).to_owned()
    }

    fn is_slower(&self) -> bool {
        self.ratios.iter().any(|ratio| ratio.is_none_or(|ratio| ratio < 1.0))
    }
}

fn text(rows: &[Row]) -> String {
    let head =
        ["f32 over bf16, forward and backward", "small", "medium", "large"].map(str::to_owned);
    let shown = |ratio: Option<f64>| ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
    let cells = rows.iter().map(|row| {
        let [small, medium, large] = row.ratios.map(shown);
        [row.name.clone(), small, medium, large]
    });
    let line = |[name, a, b, c]: [String; 4]| format!("{name:<42} {a:>7} {b:>7} {c:>7}");
    let table: Vec<_> = std::iter::once(head).chain(cells).map(line).collect();
    let mut slower: Vec<_> = rows.iter().filter(|row| row.is_slower()).map(Row::operator).collect();
    slower.dedup();
    let advice = match slower.first() {
        None => "None of them is slower in bf16.".to_owned(),
        Some(first) => format!(
            "Slower in bf16 at one of the sizes: {}.\n\
             `insight::Tuner` measures which of them a model should keep in f32, at which sizes, and whether attention\n\
             is faster when it is composed; `Autocast::keep_in_f32([\"{first}\"])` keeps one in f32 at all sizes.",
            slower.join(", ")
        ),
    };
    format!("{}\n{advice}", table.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_the_program_are_read_and_slow_operators_named() {
        let row = |line| Row::parse(line).unwrap();
        let rows = [
            row("linear\t0.50\t1.20\t3.00"),
            row("lstm\t-\t-\t-"),
            row("scaled_dot_product_attention, causal\t1.50\t1.00\t0.90"),
            row("gelu of half\t1.50\t1.50\t1.40"),
        ];
        assert_eq!(rows[0].ratios, [Some(0.5), Some(1.2), Some(3.0)]);
        assert_eq!(rows[1].ratios, [None; 3]);
        assert_eq!(Row::parse("linear\t0.50"), None);
        let text = text(&rows);
        assert!(text.contains("sizes: linear, lstm, scaled_dot_product_attention.\n"), "{text}");
        assert!(text.contains("keep_in_f32([\"linear\"])"), "{text}");
        let fast = [row("bmm\t1.00\t2.00\t3.00")];
        assert!(super::text(&fast).ends_with("None of them is slower in bf16."));
    }
}
