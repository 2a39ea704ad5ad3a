//! Batches: the order of the sentences, padding, and masks.

use super::tokens::Tokens;
use crate::order::order;
use anyhow::Result;
use tch::{Device, Tensor};

/// Sentences as tokens.
#[derive(Debug)]
pub struct Sentences {
    rows: Vec<(Vec<i64>, i64)>,
    pad: i64,
    seed: i64,
    /// The last epoch that was read from, and its order.
    epoch: (u64, Vec<usize>),
    /// How many sentences were read so far. A checkpoint has this number, from which a resumed run goes on.
    pub position: u64,
}

/// Some sentences of the same length, by padding.
#[derive(Debug)]
pub struct Batch {
    /// The numbers of the tokens, a sentence in each row.
    pub tokens: Tensor,
    /// Which tokens are not padding.
    pub mask: Tensor,
    pub labels: Tensor,
}

impl Sentences {
    /// Takes sentences with the numbers of their labels.
    pub fn new(
        sentences: &[(String, i64)],
        tokens: &Tokens,
        length: usize,
        seed: i64,
    ) -> Result<Self> {
        let row = |(text, label): &(String, i64)| Ok((tokens.encode(text, length)?, *label));
        let rows: Vec<_> = sentences.iter().map(row).collect::<Result<_>>()?;
        let epoch = (0, order(rows.len(), seed, 0));
        Ok(Self { rows, pad: tokens.pad, seed, epoch, position: 0 })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// The most tokens of a sentence.
    pub fn longest(&self) -> usize {
        self.rows.iter().map(|(ids, _)| ids.len()).max().unwrap_or(0)
    }

    /// The next sentences, in a new order in each epoch.
    pub fn next(&mut self, count: usize) -> Batch {
        let size = self.len() as u64;
        let mut places = Vec::with_capacity(count);
        for number in self.position..self.position + count as u64 {
            if self.epoch.0 != number / size {
                self.epoch = (number / size, order(self.len(), self.seed, number / size));
            }
            places.push(self.epoch.1[(number % size) as usize]);
        }
        self.position += count as u64;
        self.collate(&places)
    }

    /// All sentences from first to last, in batches of `count`. The last batch begins anew where they end.
    pub fn in_order(&self, count: usize) -> impl Iterator<Item = Batch> {
        let starts = (0..self.len()).step_by(count);
        starts.map(move |start| {
            let places: Vec<_> = (start..start + count).map(|place| place % self.len()).collect();
            self.collate(&places)
        })
    }

    /// Pads sentences to the length of the longest one.
    fn collate(&self, places: &[usize]) -> Batch {
        let rows = || places.iter().map(|&place| &self.rows[place]);
        let longest = rows().map(|(ids, _)| ids.len()).max().unwrap_or(0);
        let shape = [places.len() as i64, longest as i64];
        let (mut ids, mut mask) = (Vec::new(), Vec::new());
        for (row, _) in rows() {
            let padding = longest - row.len();
            ids.extend(row.iter().copied().chain(std::iter::repeat_n(self.pad, padding)));
            mask.extend((0..longest).map(|place| place < row.len()));
        }
        let labels: Vec<i64> = rows().map(|(_, label)| *label).collect();
        Batch {
            tokens: Tensor::from_slice(&ids).view(shape),
            mask: Tensor::from_slice(&mask).view(shape),
            labels: Tensor::from_slice(&labels),
        }
    }
}

impl Batch {
    /// Applies a function to each of the tensors.
    pub fn map(&self, f: impl Fn(&Tensor) -> Tensor) -> Self {
        let Self { tokens, mask, labels } = self;
        Self { tokens: f(tokens), mask: f(mask), labels: f(labels) }
    }

    /// Copies it to a device, without waiting for what a GPU still has to do.
    pub fn to(&self, device: Device) -> Self {
        self.map(|tensor| tensor.to_device_(device, tensor.kind(), true, false))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn sentences() -> Sentences {
        let texts: Vec<_> = (1..=7).map(|i| ("a ".repeat(i as usize), i)).collect();
        let tokens = Tokens::train(texts.iter().map(|(text, _)| text.as_str()), 20).unwrap();
        Sentences::new(&texts, &tokens, 6, 3).unwrap()
    }

    fn labels(batch: &Batch) -> Vec<i64> {
        Vec::try_from(&batch.labels).unwrap()
    }

    #[test]
    fn the_mask_covers_the_tokens_and_not_the_padding() {
        let sentences = sentences();
        let batch = sentences.in_order(3).next().unwrap();
        assert_eq!(batch.tokens.size(), [3, 5]);
        let lengths = batch.mask.sum_dim_intlist(1, false, tch::Kind::Int64);
        assert_eq!(Vec::<i64>::try_from(lengths).unwrap(), [3, 4, 5]);
        assert_eq!(batch.tokens.ne(sentences.pad), batch.mask);
        let all: Vec<i64> = sentences.in_order(3).flat_map(|batch| labels(&batch)).collect();
        assert_eq!(all, [1, 2, 3, 4, 5, 6, 7, 1, 2]);
    }

    #[test]
    fn an_epoch_has_every_sentence_once_and_a_position_goes_on_in_the_next_one() {
        let mut one = sentences();
        let first = labels(&one.next(7));
        let second = labels(&one.next(7));
        let sorted = |mut labels: Vec<i64>| {
            labels.sort();
            labels
        };
        assert!(first != second && sorted(first) == (1..=7).collect::<Vec<_>>());
        assert_eq!(sorted(second.clone()), (1..=7).collect::<Vec<_>>());
        let mut resumed = sentences();
        resumed.position = 9;
        assert_eq!(labels(&resumed.next(3)), second[2..5]);
    }
}
