//! Sentences with labels: of a file, or those of the doc comments of six crates, labelled by crate.

use crate::crates;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Cargo has their sources wherever this example builds. All are under the MIT licence, most also under Apache-2.0.
const CRATES: [&str; 6] = ["rayon", "regex-automata", "serde_json", "syn", "tch", "zip"];
/// At most this many sentences of a crate, so that none is much more frequent than the others.
const MOST: usize = 1000;
/// Of this many sentences, one is held out and one is for the test.
const PARTS: usize = 10;

/// Labelled sentences.
#[derive(Debug)]
pub struct Data {
    pub labels: Vec<String>,
    /// Those to learn: a sentence and the number of its label.
    pub train: Vec<(String, i64)>,
    /// Those that say during the training how good the weights are.
    pub held_out: Vec<(String, i64)>,
    /// Those on which the weights that were chosen are tested at the end.
    pub test: Vec<(String, i64)>,
    /// Where they are from, in words.
    pub origin: String,
    checksum: u32,
}

impl Data {
    /// Reads the doc comments of the crates.
    pub fn load() -> Result<Self> {
        let folders = crates::sources(&CRATES).context(
            "cargo does not say where the crates are, whose doc comments are the sentences: start the program by \
             `cargo run` in a checkout, or give it a file by --data",
        )?;
        let mut lines = Vec::new();
        for (label, folder) in CRATES.into_iter().zip(folders) {
            let mut sentences = BTreeSet::new();
            for file in crates::rust_files(&folder)? {
                let text = fs::read_to_string(&file)
                    .with_context(|| format!("cannot read {}", file.display()))?;
                sentences.extend(self::sentences(&text));
            }
            // In an order without meaning, but always the same one.
            let mut sentences: Vec<String> = sentences.into_iter().collect();
            sentences.sort_by_cached_key(|sentence| crc32c::crc32c(sentence.as_bytes()));
            sentences.truncate(MOST);
            lines.extend(sentences.into_iter().map(|sentence| (label.to_owned(), sentence)));
        }
        Self::new(lines, format!("doc comments of {}", CRATES.join(", ")))
    }

    /// Reads a file with a label, a tab and a text on each line.
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let line = |(number, line): (usize, &str)| {
            let (label, text) = line.split_once('\t').with_context(|| {
                format!("{}:{}: no tab after the label", path.display(), number + 1)
            })?;
            Ok((label.to_owned(), text.to_owned()))
        };
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(line);
        Self::new(lines.collect::<Result<_>>()?, path.display().to_string())
    }

    /// Divides pairs of a label and a sentence into those to learn, those that are held out, and those of the test.
    pub fn new(mut lines: Vec<(String, String)>, origin: String) -> Result<Self> {
        lines.sort();
        let all = lines.iter().flat_map(|(label, text)| [label.as_bytes(), b"\t", text.as_bytes()]);
        let checksum = all.fold(0, crc32c::crc32c_append);
        let labels: BTreeSet<_> = lines.iter().map(|(label, _)| label.clone()).collect();
        let labels: Vec<_> = labels.into_iter().collect();
        lines.sort_by_cached_key(|(_, text)| crc32c::crc32c(text.as_bytes()));
        let (mut train, mut held_out, mut test) = (Vec::new(), Vec::new(), Vec::new());
        for (number, (label, text)) in lines.into_iter().enumerate() {
            let label = labels.partition_point(|other| *other < label) as i64;
            let part = match number % PARTS {
                0 => &mut test,
                5 => &mut held_out,
                _ => &mut train,
            };
            part.push((text, label));
        }
        ensure!(labels.len() > 1, "{origin}: at least two different labels are needed");
        ensure!(train.len() >= 10, "{origin}: only {} sentences to learn", train.len());
        Ok(Self { labels, train, held_out, test, origin, checksum })
    }

    /// What tells them from other sentences, wherever they are from.
    pub fn identity(&self) -> String {
        let count = self.train.len() + self.held_out.len() + self.test.len();
        format!("{count} sentences with the checksum {:08x}", self.checksum)
    }

    /// The accuracy in the test of always answering with its most frequent label.
    pub fn majority(&self) -> f64 {
        let count = |label| self.test.iter().filter(|(_, other)| *other == label).count();
        let most = (0..self.labels.len() as i64).map(count).max().unwrap_or(0);
        most as f64 / self.test.len() as f64
    }
}

/// The sentences of the doc comments in a source text, without code, headings and lists.
pub fn sentences(source: &str) -> Vec<String> {
    let (mut all, mut text, mut is_code) = (Vec::new(), String::new(), false);
    for line in source.lines().map(str::trim).chain([""]) {
        let comment = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
        let comment = comment.unwrap_or_default().trim();
        if comment.starts_with("```") {
            is_code = !is_code;
        }
        let is_prose = comment.starts_with(|start: char| start.is_alphabetic()) && !is_code;
        if is_prose {
            text += comment;
            text.push(' ');
        } else {
            let parts = text.split(". ").map(|part| part.trim().trim_end_matches('.'));
            all.extend(parts.filter(|part| part.split(' ').count() >= 4).map(str::to_owned));
            text.clear();
        }
        // A comment ends its block of code at the latest where it ends itself.
        is_code &= line.starts_with("//");
    }
    all
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn sentences_are_prose_of_doc_comments() {
        let source = "//! This is one. And this is the\n//! second one.\n// This is no doc comment.\n/// ```\n/// let \
                      not_this_one = this;\n/// ```\n/// This is the third.\nfn f() {}\n/// Too short.\n";
        let want = ["And this is the second one", "This is the third"];
        assert_eq!(sentences(source), want);
    }

    #[test]
    fn a_tenth_is_held_out_another_one_is_for_the_test_and_labels_are_in_order() {
        let lines: Vec<_> =
            (0..50).map(|i| (["b", "a"][i % 2].to_owned(), format!("text {i}"))).collect();
        let data = Data::new(lines.clone(), String::new()).unwrap();
        assert_eq!(data.labels, ["a", "b"]);
        assert_eq!((data.train.len(), data.held_out.len(), data.test.len()), (40, 5, 5));
        let mut all = Vec::new();
        for (text, label) in data.train.iter().chain(&data.held_out).chain(&data.test) {
            let pair = (data.labels[*label as usize].clone(), text.clone());
            assert!(lines.contains(&pair) && !all.contains(&pair), "{pair:?}");
            all.push(pair);
        }
        assert!(Data::new(lines[..1].to_vec(), String::new()).is_err());
    }
}
