//! Sentences with labels, as they are read: from a file, or from the doc comments of six crates, labelled by crate.

use crate::crates;
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Cargo has their sources wherever this example builds. All are under the MIT licence, most also under Apache-2.0.
const CRATES: [&str; 6] = ["rayon", "regex-automata", "serde_json", "syn", "tch", "zip"];
/// At most this many sentences of a crate, so that none is much more frequent than the others.
const MOST: usize = 1000;
/// Labels that are numbers are below this one.
const LABELS: u64 = 10_000;

/// Labelled sentences in the order of a file.
#[derive(Debug)]
pub struct Lines {
    /// Pairs of a label and a sentence.
    pub all: Vec<(String, String)>,
    pub labels: Vec<String>,
    /// Where they are from, in words.
    pub origin: String,
}

impl Lines {
    /// Numbers the labels in the order of their names.
    pub fn new(all: Vec<(String, String)>, origin: String) -> Self {
        let labels: BTreeSet<_> = all.iter().map(|(label, _)| label.clone()).collect();
        Self { all, labels: labels.into_iter().collect(), origin }
    }

    /// Reads the doc comments of the crates.
    pub fn of_crates() -> Result<Self> {
        let folders = crates::sources(&CRATES).context(
            "cargo does not say where the crates are, whose doc comments are the sentences: start the program by \
             `cargo run` in a checkout, or give it a file by --data",
        )?;
        let mut lines = Vec::new();
        for (label, folder) in CRATES.into_iter().zip(folders) {
            let mut sentences = BTreeSet::new();
            for file in crates::rust_files(&folder)? {
                sentences.extend(self::sentences(&read(&file)?));
            }
            // In an order without meaning, but always the same one.
            let mut sentences: Vec<String> = sentences.into_iter().collect();
            sentences.sort_by_cached_key(|sentence| crc32c::crc32c(sentence.as_bytes()));
            sentences.truncate(MOST);
            lines.extend(sentences.into_iter().map(|sentence| (label.to_owned(), sentence)));
        }
        Ok(Self::new(lines, format!("doc comments of {}", CRATES.join(", "))))
    }

    /// Reads a file, in JSON if its name says so.
    pub fn read(path: &Path) -> Result<Self> {
        let (text, origin) = (read(path)?, path.display().to_string());
        let extension = path.extension().and_then(|extension| extension.to_str());
        if matches!(extension, Some("json" | "jsonl")) {
            return Self::of_json(&text, origin);
        }
        let line = |(number, line): (usize, &str)| {
            let (label, text) = line
                .split_once('\t')
                .with_context(|| format!("{origin}:{}: no tab after the label", number + 1))?;
            Ok((label.to_owned(), text.to_owned()))
        };
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(line);
        Ok(Self::new(lines.collect::<Result<_>>()?, origin))
    }

    /// Reads rows like `["a sentence", 2]` or `{"text": "a sentence", "label": 2}`, one after the other or in a list.
    /// If all labels are numbers, they are those of the model.
    fn of_json(text: &str, origin: String) -> Result<Self> {
        let mut rows = Vec::new();
        for value in serde_json::Deserializer::from_str(text).into_iter() {
            let what =
                || format!("{origin}: after {} rows is none of a text and a label", rows.len());
            match value.with_context(what)? {
                Json::Row(row) => rows.push(row),
                Json::Rows(more) => rows.extend(more),
            }
        }
        let mut most = Some(0);
        let mut lines = Vec::new();
        for Row::Pair(text, label) | Row::Named { text, label } in rows {
            let (label, number) = match label {
                Label::Number(number) => (number.to_string(), Some(number)),
                Label::Name(name) => (name, None),
            };
            most = most.zip(number).map(|(most, number)| most.max(number));
            lines.push((label, text));
        }
        let lines = Self::new(lines, origin);
        let Some(most) = most else { return Ok(lines) };
        ensure!(most < LABELS, "{}: the label {most} is not below {LABELS}", lines.origin);
        Ok(Self { labels: (0..=most).map(|label| label.to_string()).collect(), ..lines })
    }
}

/// What a file in JSON has at its outermost level.
#[derive(Deserialize)]
#[serde(untagged)]
enum Json {
    Row(Row),
    Rows(Vec<Row>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Row {
    Pair(String, Label),
    Named { text: String, label: Label },
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Label {
    Number(u64),
    Name(String),
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
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
    fn rows_of_json_come_in_lists_and_lines_with_labels_that_are_numbers_or_names() {
        let read = |text: &str| Lines::of_json(text, "it".to_owned());
        let lines = read("[\"a b\", 2]\n[\"c\", 0]\n").unwrap();
        let pairs = |pairs: &[(&str, &str)]| -> Vec<_> {
            pairs.iter().map(|(label, text)| (label.to_string(), text.to_string())).collect()
        };
        assert_eq!((lines.all, lines.labels), (pairs(&[("2", "a b"), ("0", "c")]), strings(3)));
        let lines = read("[[\"a\", 10], {\"label\": 9, \"text\": \"b\"}]").unwrap();
        assert_eq!((lines.all, lines.labels), (pairs(&[("10", "a"), ("9", "b")]), strings(11)));
        let lines = read("[[\"a\", \"x\"], [\"b\", 7]]").unwrap();
        assert_eq!(lines.labels, ["7", "x"]);
        for (bad, word) in [("[\"a\", 1] [\"b\"]", "after 1 rows"), ("[\"a\", 10000]", "10000")] {
            let error = format!("{:#}", read(bad).unwrap_err());
            assert!(error.contains("it") && error.contains(word), "{error}");
        }
    }

    fn strings(count: usize) -> Vec<String> {
        (0..count).map(|number| number.to_string()).collect()
    }
}
