//! How far the results of two runs are apart, in units in the last place of their dtype.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;

use tch::Kind;

use super::bits::canonical;

/// The numbers of elements by their distance: 0, 1, 2, up to 4, up to 8 and so on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram(BTreeMap<u64, u64>);

impl Histogram {
    /// Adds the elements of two tensors, as [`bits`](super::bits::bits) gives them.
    pub fn add(&mut self, kind: Kind, ours: &[u8], theirs: &[u8]) {
        let size = kind.elt_size_in_bytes();
        let [ours, theirs] = [ours, theirs].map(|bytes| canonical(kind, bytes.to_vec()));
        assert_eq!(ours.len(), theirs.len(), "tensors of one size are compared");
        for (ours, theirs) in ours.chunks_exact(size).zip(theirs.chunks_exact(size)) {
            let bin = distance(kind, ours, theirs).checked_next_power_of_two().unwrap_or(u64::MAX);
            let bin = if ours == theirs { 0 } else { bin };
            *self.0.entry(bin).or_default() += 1;
        }
    }

    /// The same, with f64 numbers as f32 numbers: where they were multiplied by an f32 factor, which each side computes in
    /// its own way.
    pub fn add_in_f32(&mut self, kind: Kind, ours: &[u8], theirs: &[u8]) {
        if kind == Kind::Double {
            self.add(Kind::Float, &rounded(ours), &rounded(theirs));
        } else {
            self.add(kind, ours, theirs);
        }
    }

    /// The share of the elements that are at most this far apart, a power of two or 0; 1 if there are none.
    pub fn within(&self, most: u64) -> f64 {
        let all: u64 = self.0.values().sum();
        let near: u64 = self.0.range(..=most).map(|(_, count)| count).sum();
        if all == 0 { 1.0 } else { near as f64 / all as f64 }
    }

    /// Prints a line to the terminal, also if the test passes.
    pub fn print(&self, what: &str) {
        let line = format!("ulps {what}: {self}\n");
        std::io::stderr().write_all(line.as_bytes()).expect("stderr is writable");
    }
}

impl fmt::Display for Histogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |(bin, count): (&u64, &u64)| match bin {
            0..=2 => format!("{bin}: {count}"),
            &u64::MAX => format!("incomparable: {count}"),
            _ => format!("up to {bin}: {count}"),
        };
        f.write_str(&self.0.iter().map(text).collect::<Vec<_>>().join(", "))
    }
}

/// The bytes of f64 numbers as those of f32 numbers.
fn rounded(bytes: &[u8]) -> Vec<u8> {
    let numbers = bytes.chunks_exact(8).map(|bytes| f64::from_le_bytes(bytes.try_into().unwrap()));
    numbers.flat_map(|number| (number as f32).to_le_bytes()).collect()
}

/// How many numbers of the dtype lie between two, and one more; the most there is if one of them is NaN, or if the dtype
/// has no numbers with fractions.
fn distance(kind: Kind, ours: &[u8], theirs: &[u8]) -> u64 {
    let infinity: i64 = match kind {
        Kind::Half => 0x7c00,
        Kind::BFloat16 => 0x7f80,
        Kind::Float => 0x7f80_0000,
        Kind::Double => 0x7ff0_0000_0000_0000,
        _ => return u64::MAX,
    };
    let sign = 1u64 << (ours.len() * 8 - 1);
    // The place among all numbers of the dtype, of which zero is the middle.
    let place = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        let word = u64::from_le_bytes(word);
        let magnitude = (word & !sign) as i64;
        (magnitude <= infinity).then_some(if word & sign == 0 { magnitude } else { -magnitude })
    };
    match (place(ours), place(theirs)) {
        (Some(ours), Some(theirs)) => ours.abs_diff(theirs),
        _ => u64::MAX,
    }
}
