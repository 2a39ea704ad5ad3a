//! The tokens of a text: its bytes, or these and its most frequent words.

use anyhow::{Result, ensure};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

/// The number of different bytes, which come before the words.
pub const BYTES: i64 = 256;

/// The words, the most frequent one first. A word that is none of them is spelled in bytes, so that every text can be
/// written.
#[derive(Clone, Debug, Default)]
pub struct Vocabulary {
    words: Vec<Vec<u8>>,
}

impl Vocabulary {
    /// Bytes alone.
    pub fn bytes() -> Self {
        Self::default()
    }

    /// Bytes and the most frequent words of a text, `count` tokens together.
    pub fn of(text: &[u8], count: i64) -> Result<Self> {
        let mut counts = BTreeMap::<&[u8], u64>::new();
        for word in words(text).filter(|word| word.len() > 1) {
            *counts.entry(word).or_default() += 1;
        }
        let wanted = usize::try_from(count - BYTES)?;
        ensure!(
            counts.len() >= wanted,
            "--words {count}: the text has {} different words; take at most {}",
            counts.len(),
            counts.len() as i64 + BYTES
        );
        let mut words: Vec<_> = counts.into_iter().collect();
        words.sort_by_key(|(_, times)| Reverse(*times));
        Ok(Self { words: words.iter().take(wanted).map(|(word, _)| word.to_vec()).collect() })
    }

    /// The number of different tokens.
    pub fn len(&self) -> i64 {
        BYTES + self.words.len() as i64
    }

    /// Whether there are words beside the bytes.
    pub fn has_words(&self) -> bool {
        !self.words.is_empty()
    }

    /// What a token is called.
    pub fn unit(&self) -> &'static str {
        if self.has_words() { "token" } else { "byte" }
    }

    /// The tokens of a text.
    pub fn tokens(&self, text: &[u8]) -> Vec<i32> {
        let numbers: HashMap<&[u8], i32> =
            self.words.iter().map(Vec::as_slice).zip(BYTES as i32..).collect();
        let mut tokens = Vec::new();
        for word in words(text) {
            match numbers.get(word) {
                Some(&number) => tokens.push(number),
                None => tokens.extend(word.iter().map(|&byte| i32::from(byte))),
            }
        }
        tokens
    }

    /// The text of tokens.
    pub fn text(&self, tokens: &[i64]) -> String {
        let mut bytes = Vec::new();
        for &token in tokens {
            match usize::try_from(token - BYTES).ok().and_then(|word| self.words.get(word)) {
                Some(word) => bytes.extend_from_slice(word),
                None => bytes.push(token as u8),
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Cuts a text into words, each with the space before it, runs of spaces, and single bytes.
fn words(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let is_letter = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_' || !byte.is_ascii();
    let mut rest = text;
    std::iter::from_fn(move || {
        let letters = |from: usize| rest[from..].iter().take_while(|byte| is_letter(byte)).count();
        let spaces = rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        let length = match (rest.first()?, spaces) {
            (b' ', 1) if letters(1) > 0 => 1 + letters(1),
            // The last space belongs to the word behind it.
            (_, 2..) if rest[spaces - 1] == b' ' && letters(spaces) > 0 => spaces - 1,
            (_, 1..) => spaces,
            _ => letters(0).max(1),
        };
        let (word, after) = rest.split_at(length);
        rest = after;
        Some(word)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    const TEXT: &[u8] = b"fn a() -> Result {\n    let x_1 = a();\n\n    a(x_1)\xc3\xa9 }  \n";

    #[test]
    fn a_text_is_its_words() {
        let cut: Vec<_> = words(TEXT).map(String::from_utf8_lossy).collect();
        assert_eq!(cut.concat(), String::from_utf8_lossy(TEXT));
        assert_eq!(cut[..6], ["fn", " a", "(", ")", " ", "-"]);
        assert_eq!(cut[7..12], [" Result", " ", "{", "\n   ", " let"]);
    }

    #[test]
    fn every_text_can_be_written_with_any_vocabulary() {
        for count in [BYTES, BYTES + 1, BYTES + 5] {
            let vocabulary = Vocabulary::of(TEXT, count).unwrap();
            assert_eq!(vocabulary.len(), count);
            for text in [TEXT, b"", b"other words\n", b"   "] {
                let tokens: Vec<i64> = vocabulary.tokens(text).into_iter().map(i64::from).collect();
                assert!(tokens.iter().all(|token| (0..count).contains(token)));
                assert_eq!(vocabulary.text(&tokens), String::from_utf8_lossy(text));
            }
        }
        // The most frequent word is the first.
        let tokens = Vocabulary::of(TEXT, BYTES + 1).unwrap().tokens(b" a");
        assert_eq!(tokens, [256]);
    }

    #[test]
    fn more_words_than_the_text_has_are_refused() {
        let error = Vocabulary::of(TEXT, 8192).unwrap_err().to_string();
        assert!(error.contains("different words; take at most"), "{error}");
    }
}
