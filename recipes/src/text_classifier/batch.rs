//! Batches: the order of the sentences, padding, and masks.

use super::data::Sentences;
use super::tokens::Tokens;
use crate::Ranks;
use crate::ahead::ahead;
use crate::order::order;
use anyhow::{Context, Result};
use std::sync::Arc;
use tch::{Device, Tensor};
use tch_amp::distributed::SamplerConfig;

/// Some sentences of the same length, by padding.
#[derive(Debug)]
pub struct Batch {
    /// The numbers of the tokens, a sentence in each row.
    pub tokens: Tensor,
    /// The part of the sentence that each token belongs to: 0, as no sentence has a second part.
    pub types: Tensor,
    /// Which tokens are not padding.
    pub mask: Tensor,
    pub labels: Tensor,
}

impl Batch {
    /// Copies it to a device, without waiting for what a GPU still has to do.
    pub fn to(&self, device: Device) -> Self {
        let to = |tensor: &Tensor| tensor.to_device_(device, tensor.kind(), true, false);
        let Self { tokens, types, mask, labels } = self;
        Self { tokens: to(tokens), types: to(types), mask: to(mask), labels: to(labels) }
    }
}

/// How sentences become rows of the same length.
#[derive(Clone, Debug)]
pub struct Collate {
    pub tokens: Arc<Tokens>,
    /// The most tokens of a sentence.
    pub length: usize,
    /// Whether every batch is as long as that, and not only as its longest sentence.
    pub pads_to_length: bool,
}

impl Collate {
    /// Makes a batch of sentences.
    pub fn batch<'a>(&self, rows: impl Iterator<Item = &'a (String, i64)>) -> Result<Batch> {
        let row =
            |(text, label): &(String, i64)| Ok((self.tokens.encode(text, self.length)?, *label));
        let rows: Vec<(Vec<i64>, i64)> = rows.map(row).collect::<Result<_>>()?;
        let longest = rows.iter().map(|(ids, _)| ids.len()).max().unwrap_or(0);
        let length = if self.pads_to_length { self.length } else { longest };
        let (mut ids, mut mask) = (Vec::new(), Vec::new());
        for (row, _) in &rows {
            let padding = std::iter::repeat_n(self.tokens.pad, length - row.len());
            ids.extend(row.iter().copied().chain(padding));
            mask.extend((0..length).map(|place| place < row.len()));
        }
        let shape = [rows.len() as i64, length as i64];
        let labels: Vec<i64> = rows.iter().map(|(_, label)| *label).collect();
        let tokens = Tensor::from_slice(&ids).view(shape);
        let mask = Tensor::from_slice(&mask).view(shape);
        Ok(Batch { types: tokens.zeros_like(), tokens, mask, labels: Tensor::from_slice(&labels) })
    }
}

/// In which order sentences are read.
#[derive(Clone, Copy, Debug)]
pub enum Order {
    /// In a new order in each epoch. A batch may begin in one epoch and end in the next.
    Endless { seed: i64 },
    /// In the orders of PyTorch's `DistributedSampler` with its default options, for the epochs from 1 on. The last
    /// batch of an epoch may be smaller. If the sentences cannot be divided among the ranks, each epoch repeats the
    /// first ones.
    Epochs,
    /// Once, like an epoch of those. They are in the sampler's order for the epoch 0 if they are shuffled, and
    /// otherwise from first to last.
    Once { shuffled: bool },
}

/// Reads this rank's part of each batch.
#[derive(Clone, Debug)]
pub struct Reader {
    sentences: Sentences,
    collate: Collate,
    order: Order,
    /// The rows of a batch, on all ranks together.
    rows: usize,
    rank: usize,
    ranks: usize,
    /// The last epoch that was read from, and the order of what is read from it: by this rank if the epochs end, and
    /// otherwise by all of them.
    epoch: Option<(u64, Vec<usize>)>,
}

impl Reader {
    /// Reads batches of so many rows on all ranks together, which these can be divided among.
    pub fn new(
        sentences: &Sentences,
        collate: &Collate,
        order: Order,
        rows: usize,
        ranks: &Ranks,
    ) -> Self {
        let (rank, ranks) = (ranks.rank(), ranks.size());
        let (sentences, collate) = (sentences.clone(), collate.clone());
        Self { sentences, collate, order, rows, rank, ranks, epoch: None }
    }

    /// How many sentences there are.
    pub fn len(&self) -> usize {
        self.sentences.len()
    }

    /// How many tokens this rank's part of a batch with the longest sentence has at least.
    pub fn least_tokens(&self) -> usize {
        let Collate { length, pads_to_length, .. } = self.collate;
        let tokens = |(text, _): &(String, i64)| 2 + text.split_whitespace().count();
        let longest = self.sentences.iter().map(tokens).max().unwrap_or(0);
        let tokens = if pads_to_length { length } else { longest.min(length) };
        (self.rows / self.ranks).saturating_mul(tokens)
    }

    /// The epoch of the batch with this number, from 1 on, if the batches end with the epochs.
    pub fn epoch_of(&self, number: u64) -> u64 {
        1 + number / batches(self.len(), self.rows, self.ranks)
    }

    /// The batches from this number on, which so many threads make ahead of their use.
    pub fn batches(
        &self,
        first: u64,
        threads: usize,
    ) -> impl Iterator<Item = Result<Batch>> + use<> {
        let mut reader = self.clone();
        ahead(threads, first, move |number| reader.batch(number).transpose())
    }

    /// The batch with this number, from 0 on, if there is one.
    fn batch(&mut self, number: u64) -> Result<Option<Batch>> {
        let Some(places) = self.places(number)? else { return Ok(None) };
        self.collate.batch(places.iter().map(|&place| &self.sentences[place])).map(Some)
    }

    /// The places of this rank's sentences in the batch with this number, if there is one.
    fn places(&mut self, number: u64) -> Result<Option<Vec<usize>>> {
        let in_epoch = batches(self.len(), self.rows, self.ranks);
        let (epoch, shuffled) = match self.order {
            Order::Endless { seed } => return self.endless(number, seed).map(Some),
            Order::Epochs => (self.epoch_of(number), true),
            Order::Once { shuffled } if number < in_epoch => (0, shuffled),
            Order::Once { .. } => return Ok(None),
        };
        let (size, rows, rank, ranks) = (self.len(), self.rows, self.rank, self.ranks);
        let order = self.of_epoch(epoch, || {
            let mut sampler = SamplerConfig { shuffle: shuffled, ..Default::default() }
                .build_for(size, rank, ranks)?;
            sampler.set_epoch(epoch);
            let order = Vec::<i64>::try_from(sampler.indices()?)?;
            Ok(order.into_iter().map(|place| place as usize).collect())
        })?;
        let mut batches = order.chunks(rows / ranks);
        let batch = batches.nth((number % in_epoch) as usize).context("there is no such batch")?;
        Ok(Some(batch.to_vec()))
    }

    fn endless(&mut self, batch: u64, seed: i64) -> Result<Vec<usize>> {
        let (rows, size) = (self.rows as u64, self.len() as u64);
        let numbers = (batch * rows..(batch + 1) * rows).skip(self.rank).step_by(self.ranks);
        let place = |number| {
            let epoch = number / size;
            let order = self.of_epoch(epoch, || Ok(order(size as usize, seed, epoch)))?;
            Ok(order[(number % size) as usize])
        };
        numbers.map(place).collect()
    }

    /// The order of an epoch, which is made if it is not that of the last call.
    fn of_epoch(
        &mut self,
        epoch: u64,
        make: impl FnOnce() -> Result<Vec<usize>>,
    ) -> Result<&[usize]> {
        if self.epoch.as_ref().is_none_or(|(known, _)| *known != epoch) {
            self.epoch = Some((epoch, make()?));
        }
        Ok(self.epoch.as_ref().map_or(&[], |(_, order)| order))
    }
}

/// How many batches of so many rows on all ranks together an epoch has, if it ends with a smaller one.
pub fn batches(sentences: usize, rows: usize, ranks: usize) -> u64 {
    sentences.div_ceil(ranks).div_ceil((rows / ranks).max(1)) as u64
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use tch::Kind;

    /// Seven sentences of one to seven words, whose labels say how many, as the rank of two or alone.
    fn reader(order: Order, rows: usize, [rank, ranks]: [usize; 2]) -> Reader {
        let texts: Vec<_> = (1..=7).map(|i| ("a ".repeat(i as usize), i)).collect();
        let tokens = Tokens::train(texts.iter().map(|(text, _)| text.as_str()), 20).unwrap();
        let collate = Collate { tokens: Arc::new(tokens), length: 6, pads_to_length: false };
        Reader { sentences: Arc::new(texts), collate, order, rows, rank, ranks, epoch: None }
    }

    fn labels(batch: &Batch) -> Vec<i64> {
        Vec::try_from(&batch.labels).unwrap()
    }

    /// The labels of the first batches.
    fn first(reader: &Reader, count: usize) -> Vec<Vec<i64>> {
        reader.batches(0, 0).take(count).map(|batch| labels(&batch.unwrap())).collect()
    }

    #[test]
    fn the_mask_covers_the_tokens_and_not_the_padding() {
        let mut reader = reader(Order::Once { shuffled: false }, 3, [0, 1]);
        let batch = reader.batch(0).unwrap().unwrap();
        assert_eq!(batch.tokens.size(), [3, 5]);
        let lengths = batch.mask.sum_dim_intlist(1, false, Kind::Int64);
        assert_eq!(Vec::<i64>::try_from(lengths).unwrap(), [3, 4, 5]);
        assert_eq!(batch.tokens.ne(reader.collate.tokens.pad), batch.mask);
        assert_eq!(batch.types, batch.tokens.zeros_like());
        assert_eq!(first(&reader, 9), [vec![1, 2, 3], vec![4, 5, 6], vec![7]]);

        reader.collate.pads_to_length = true;
        let wide = reader.batch(0).unwrap().unwrap();
        assert_eq!(wide.tokens.size(), [3, 6]);
        assert_eq!(wide.mask.narrow(1, 0, 5), batch.mask);
        assert_eq!(wide.mask.sum(Kind::Int64), batch.mask.sum(Kind::Int64));
    }

    #[test]
    fn an_epoch_has_every_sentence_once_and_a_batch_may_go_on_in_the_next_one() {
        let reader = reader(Order::Endless { seed: 3 }, 7, [0, 1]);
        let epochs = first(&reader, 2);
        for epoch in &epochs {
            let mut sorted = epoch.clone();
            sorted.sort();
            assert_eq!(sorted, (1..=7).collect::<Vec<_>>());
        }
        assert_ne!(epochs[0], epochs[1]);
        let small = Reader { rows: 4, ..reader };
        assert_eq!(first(&small, 3).concat(), epochs.concat()[..12]);
        let resumed = small.batches(2, 0).next().unwrap().unwrap();
        assert_eq!(labels(&resumed), epochs[1][1..5]);
    }

    #[test]
    fn threads_and_ranks_read_the_same_batches() {
        for order in [Order::Endless { seed: 3 }, Order::Epochs] {
            let whole = first(&reader(order, 4, [0, 1]), 10);
            let parts = [0, 1].map(|rank| first(&reader(order, 4, [rank, 2]), 10));
            for (number, whole) in whole.iter().enumerate() {
                let pairs = parts[0][number].iter().zip(&parts[1][number]);
                let both: Vec<_> = pairs.flat_map(|(one, two)| [*one, *two]).collect();
                // Of seven sentences, two ranks read one twice.
                assert_eq!(both[..whole.len()], *whole, "{order:?}");
            }
            let threads = reader(order, 4, [0, 1]).batches(0, 2);
            let threads: Vec<_> = threads.take(10).map(|batch| labels(&batch.unwrap())).collect();
            assert_eq!(threads, whole);
        }
        let reader = reader(Order::Epochs, 4, [0, 2]);
        assert_eq!([0, 1, 2, 5].map(|number| reader.epoch_of(number)), [1, 1, 2, 3]);
        assert_eq!(batches(7, 4, 2), 2);
        assert_eq!(batches(9, 4, 2), 3);
    }

    #[test]
    fn there_are_at_least_as_many_tokens_as_words() {
        let mut reader = reader(Order::Epochs, 4, [0, 2]);
        assert_eq!(reader.least_tokens(), 2 * 6);
        reader.collate.length = 20;
        assert_eq!(reader.least_tokens(), 2 * 9);
        reader.collate.pads_to_length = true;
        assert_eq!(reader.least_tokens(), 2 * 20);
    }
}
