//! The order in which a text is read, which can be continued anywhere.

use super::data::Text;
use super::vocabulary::Vocabulary;
use crate::order::shuffle;
use anyhow::{Result, ensure};
use tch::{Device, Tensor};

/// Of this many excerpts, one is held out.
const HELD_OUT: i64 = 20;

/// Reads a text, which is cut into excerpts, in a new order in each epoch. Every twentieth excerpt is held out.
#[derive(Debug)]
pub struct Reader<'a> {
    text: &'a Text,
    length: i64,
    seed: i64,
    /// Where the excerpts begin.
    train: Vec<i64>,
    held_out: Vec<i64>,
    /// The last epoch that was read from, and its order.
    epoch: (u64, Vec<i64>),
    /// How many excerpts were read so far. A checkpoint has this number, from which a resumed run goes on.
    pub position: u64,
}

impl<'a> Reader<'a> {
    /// Cuts a text into excerpts of `length` tokens. `rows` of each part must fit into a batch.
    pub fn new(text: &'a Text, length: i64, rows: usize, seed: i64) -> Result<Self> {
        // One more token follows each excerpt.
        let starts = (0..(text.len() - 1) / length).map(|number| number * length);
        let (held_out, train): (Vec<i64>, Vec<i64>) =
            starts.partition(|start| (start / length) % HELD_OUT == HELD_OUT - 1);
        ensure!(
            held_out.len() >= rows,
            "the text is too short: it has {} held-out excerpts of {length} {}s, and a batch has {rows}",
            held_out.len(),
            text.vocabulary.unit()
        );
        let epoch = (0, in_order(&train, seed, 0));
        Ok(Self { text, length, seed, train, held_out, epoch, position: 0 })
    }

    /// What the tokens are.
    pub fn vocabulary(&self) -> &'a Vocabulary {
        &self.text.vocabulary
    }

    /// The part of the next batch of `rows` excerpts that `rank` of `ranks` takes: every second one of two ranks. The
    /// batch does not depend on the number of ranks.
    pub fn next(
        &mut self,
        rows: usize,
        [rank, ranks]: [usize; 2],
        device: Device,
    ) -> (Tensor, Tensor) {
        let size = self.train.len() as u64;
        let mut starts = Vec::with_capacity(rows);
        for number in self.position..self.position + rows as u64 {
            if self.epoch.0 != number / size {
                self.epoch = (number / size, in_order(&self.train, self.seed, number / size));
            }
            starts.push(self.epoch.1[(number % size) as usize]);
        }
        self.position += rows as u64;
        self.excerpts(&starts, [rank, ranks], device)
    }

    /// Up to `count` batches of held-out excerpts, always the same ones, of which this rank has its part.
    pub fn held_out(
        &self,
        rows: usize,
        count: usize,
        [rank, ranks]: [usize; 2],
        device: Device,
    ) -> impl Iterator<Item = (Tensor, Tensor)> {
        // From everywhere in the text.
        let count = count.min(self.held_out.len() / rows);
        let stride = self.held_out.len() / (count * rows);
        (0..count).map(move |batch| {
            let starts: Vec<i64> =
                (0..rows).map(|row| self.held_out[(batch * rows + row) * stride]).collect();
            self.excerpts(&starts, [rank, ranks], device)
        })
    }

    fn excerpts(
        &self,
        starts: &[i64],
        [rank, ranks]: [usize; 2],
        device: Device,
    ) -> (Tensor, Tensor) {
        let mine: Vec<i64> = starts.iter().skip(rank).step_by(ranks).copied().collect();
        self.text.excerpts(&Tensor::from_slice(&mine), self.length, device)
    }
}

/// The order of an epoch.
fn in_order(starts: &[i64], seed: i64, epoch: u64) -> Vec<i64> {
    let mut starts = starts.to_vec();
    shuffle(&mut starts, seed, epoch, |&start| start as u64);
    starts
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use std::collections::BTreeSet;

    /// A text in which every byte says where it is, for excerpts of 8 bytes.
    fn text() -> Text {
        let bytes: Vec<u8> = (0..1601).map(|place| (place / 8) as u8).collect();
        Text::new(bytes, "numbers".to_owned()).unwrap()
    }

    fn firsts(batch: &(Tensor, Tensor)) -> Vec<i64> {
        Vec::try_from(batch.0.select(1, 0)).unwrap()
    }

    #[test]
    fn an_epoch_has_every_excerpt_once_and_none_that_is_held_out() {
        let text = text();
        let mut reader = Reader::new(&text, 8, 10, 3).unwrap();
        let mut read = || -> Vec<i64> {
            (0..19).flat_map(|_| firsts(&reader.next(10, [0, 1], Device::Cpu))).collect()
        };
        let (first, second) = (read(), read());
        let held_out = Reader::new(&text, 8, 10, 3).unwrap();
        let held_out: Vec<i64> =
            held_out.held_out(5, 9, [0, 1], Device::Cpu).flat_map(|batch| firsts(&batch)).collect();
        assert_eq!(held_out, (0..10).map(|number| 20 * number + 19).collect::<Vec<_>>());
        let all = |order: &[i64]| order.iter().copied().collect::<BTreeSet<_>>();
        assert_eq!((first.len(), all(&first).len()), (190, 190));
        assert!(all(&first).is_disjoint(&all(&held_out)));
        assert!(first != second && all(&first) == all(&second));
    }

    #[test]
    fn ranks_share_the_batch_of_one_process_and_a_position_goes_on_in_the_next_epoch() {
        let text = text();
        let reader = || Reader::new(&text, 8, 10, 3).unwrap();
        let (mut one, mut two) = (reader(), [reader(), reader()]);
        for step in 0..30 {
            let whole = firsts(&one.next(10, [0, 1], Device::Cpu));
            for (rank, reader) in two.iter_mut().enumerate() {
                let part = firsts(&reader.next(10, [rank, 2], Device::Cpu));
                assert_eq!(part, whole.iter().skip(rank).step_by(2).copied().collect::<Vec<_>>());
            }
            let mut resumed = reader();
            resumed.position = 10 * step;
            assert_eq!(firsts(&resumed.next(10, [0, 1], Device::Cpu)), whole);
        }
    }

    #[test]
    fn what_follows_each_byte_is_the_target() {
        let text = text();
        let (tokens, targets) = text.excerpts(&Tensor::from_slice(&[4i64]), 8, Device::Cpu);
        assert_eq!(tokens, Tensor::from_slice(&[0i64, 0, 0, 0, 1, 1, 1, 1]).view([1, 8]));
        assert_eq!(targets, Tensor::from_slice(&[0i64, 0, 0, 1, 1, 1, 1, 1]).view([1, 8]));
    }
}
