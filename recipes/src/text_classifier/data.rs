//! Sentences with labels, divided into those to learn, those that are held out, and those of the test.

use super::lines::Lines;
use super::python;
use anyhow::{Result, ensure};
use std::mem;
use std::sync::Arc;

/// Of this many sentences, one is held out and one is for the test.
const PARTS: usize = 10;

/// Sentences, each with the number of its label.
pub type Sentences = Arc<Vec<(String, i64)>>;

/// Labelled sentences.
#[derive(Debug)]
pub struct Data {
    pub labels: Vec<String>,
    /// Those to learn.
    pub train: Sentences,
    /// Those that say during the training how good the weights are.
    pub held_out: Sentences,
    /// Those on which the weights that were chosen are tested at the end: the same, if the data were divided in two.
    pub test: Sentences,
    /// Where they are from, in words.
    pub origin: String,
    checksum: u32,
}

impl Data {
    /// Divides pairs of a label and a sentence into those to learn, those that are held out, and those of the test.
    pub fn new(lines: Vec<(String, String)>, origin: String) -> Result<Self> {
        Lines::new(lines, origin).divided_in_three()
    }

    /// Names labels that are the numbers from 0 on. There may be more names than labels that occur.
    pub fn name_labels(&mut self, names: &[String]) -> Result<()> {
        let (count, given) = (self.labels.len(), names.len());
        let mut numbered = self.labels.iter().enumerate();
        ensure!(
            numbered.all(|(number, label)| *label == number.to_string()),
            "the labels of {} are not the numbers from 0 on",
            self.origin
        );
        ensure!(given >= count, "{given} names, but there are {count} labels in {}", self.origin);
        self.labels = names.to_vec();
        Ok(())
    }

    /// What tells them from other sentences, wherever they are from.
    pub fn identity(&self) -> String {
        let other = if self.is_tested_on_held_out() { 0 } else { self.test.len() };
        let count = self.train.len() + self.held_out.len() + other;
        format!("{count} sentences with the checksum {:08x}", self.checksum)
    }

    /// How many sentences there are, and where they are from.
    pub fn describe(&self) -> String {
        let [train, held_out, test] =
            [&self.train, &self.held_out, &self.test].map(|part| part.len());
        let test = match self.is_tested_on_held_out() {
            true => "the same for the test".to_owned(),
            false => format!("{test} for the test"),
        };
        format!("{train} sentences to learn, {held_out} held out and {test}: {}", self.origin)
    }

    /// Whether the weights are tested on the sentences by which they are chosen.
    pub fn is_tested_on_held_out(&self) -> bool {
        Arc::ptr_eq(&self.test, &self.held_out)
    }

    /// The accuracy in the test of always answering with its most frequent label.
    pub fn majority(&self) -> f64 {
        let count = |label| self.test.iter().filter(|(_, other)| *other == label).count();
        let most = (0..self.labels.len() as i64).map(count).max().unwrap_or(0);
        most as f64 / self.test.len() as f64
    }
}

/// How the sentences are divided.
impl Lines {
    /// Four fifths to learn, a tenth that is held out, and a tenth for the test, in whichever order they come.
    pub fn divided_in_three(mut self) -> Result<Data> {
        self.all.sort();
        let checksum = self.checksum();
        self.all.sort_by_cached_key(|(_, text)| crc32c::crc32c(text.as_bytes()));
        let (mut train, mut held_out, mut test) = (Vec::new(), Vec::new(), Vec::new());
        for (number, sentence) in self.numbered().into_iter().enumerate() {
            let part = match number % PARTS {
                0 => &mut test,
                5 => &mut held_out,
                _ => &mut train,
            };
            part.push(sentence);
        }
        self.data(train, Arc::new(held_out), Arc::new(test), checksum)
    }

    /// A share to learn, and the rest for everything else, in the order of Python's `random.shuffle`.
    pub fn divided_in_two(mut self, ratio: f64, seed: i64) -> Result<Data> {
        let checksum = self.checksum();
        python::shuffle(&mut self.all, seed);
        let mut train = self.numbered();
        let rest = Arc::new(train.split_off((train.len() as f64 * ratio) as usize));
        ensure!(!rest.is_empty(), "--ratio {ratio}: no sentences are held out");
        self.data(train, rest.clone(), rest, checksum)
    }

    fn data(
        self,
        train: Vec<(String, i64)>,
        held_out: Sentences,
        test: Sentences,
        checksum: u32,
    ) -> Result<Data> {
        let Self { labels, origin, .. } = self;
        ensure!(labels.len() > 1, "{origin}: at least two different labels are needed");
        ensure!(train.len() >= 10, "{origin}: only {} sentences to learn", train.len());
        Ok(Data { labels, train: Arc::new(train), held_out, test, origin, checksum })
    }

    fn checksum(&self) -> u32 {
        let all =
            self.all.iter().flat_map(|(label, text)| [label.as_bytes(), b"\t", text.as_bytes()]);
        all.fold(0, crc32c::crc32c_append)
    }

    /// The sentences with the numbers of their labels.
    fn numbered(&mut self) -> Vec<(String, i64)> {
        let number = |label: &String| self.labels.iter().position(|other| other == label);
        let sentence = |(label, text)| (text, number(&label).unwrap_or(0) as i64);
        mem::take(&mut self.all).into_iter().map(sentence).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn a_tenth_is_held_out_another_one_is_for_the_test_and_labels_are_in_order() {
        let lines: Vec<_> =
            (0..50).map(|i| (["b", "a"][i % 2].to_owned(), format!("text {i}"))).collect();
        let data = Data::new(lines.clone(), String::new()).unwrap();
        assert_eq!(data.labels, ["a", "b"]);
        assert_eq!((data.train.len(), data.held_out.len(), data.test.len()), (40, 5, 5));
        let mut all = Vec::new();
        for (text, label) in data.train.iter().chain(&*data.held_out).chain(&*data.test) {
            let pair = (data.labels[*label as usize].clone(), text.clone());
            assert!(lines.contains(&pair) && !all.contains(&pair), "{pair:?}");
            all.push(pair);
        }
        assert!(Data::new(lines[..1].to_vec(), String::new()).is_err());
    }

    #[test]
    fn labels_that_are_numbers_get_names() {
        let data = |labels: [&str; 2]| {
            let all = (0..50).map(|i| (labels[i % 2].to_owned(), format!("text {i}")));
            Data::new(all.collect(), String::new()).unwrap()
        };
        let names = ["joy", "anger", "fear"].map(str::to_owned);
        let mut numbered = data(["0", "1"]);
        assert!(numbered.name_labels(&names[..1]).is_err());
        numbered.name_labels(&names).unwrap();
        assert_eq!(numbered.labels, names);
        for others in [["1", "2"], ["a", "b"]] {
            assert!(data(others).name_labels(&names).is_err(), "{others:?}");
        }
    }

    #[test]
    fn a_ratio_divides_in_two_and_leaves_something_for_both() {
        let lines = || {
            let all = (0..25).map(|i| (["b", "a"][i % 2].to_owned(), i.to_string()));
            Lines::new(all.collect(), String::new())
        };
        let data = lines().divided_in_two(0.92, 123).unwrap();
        assert_eq!((data.train.len(), data.held_out.len()), (23, 2));
        assert!(data.is_tested_on_held_out() && data.describe().contains("the same"));
        let mut all: Vec<_> = data.train.iter().chain(&*data.held_out).cloned().collect();
        all.sort_by_key(|(text, _)| text.parse::<i64>().unwrap());
        let want: Vec<_> = (0..25).map(|i| (i.to_string(), 1 - i % 2)).collect();
        assert_eq!(all, want);
        for ratio in [0.0, 1.0] {
            assert!(lines().divided_in_two(ratio, 0).is_err(), "{ratio}");
        }
    }
}
