//! The WordPiece tokenizer: with a vocabulary that is trained, or with that of a pretrained model.

use anyhow::{Context, Result, anyhow};
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::Path;
use tokenizers::models::wordpiece::{WordPiece, WordPieceTrainer};
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{
    AddedToken, Model, NormalizedString, Normalizer, OffsetReferential, OffsetType,
    PreTokenizedString, PreTokenizer, Tokenizer, Trainer,
};

const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

/// Turns texts into the numbers of tokens.
#[derive(Debug)]
pub struct Tokens {
    tokenizer: Tokenizer,
    /// The tokens by their numbers.
    pub vocabulary: Vec<String>,
    pub pad: i64,
    begin: i64,
    end: i64,
}

impl Tokens {
    /// Makes a vocabulary of at most `size` tokens for these texts; the same one for the same texts.
    pub fn train<'a>(texts: impl Iterator<Item = &'a str>, size: usize) -> Result<Self> {
        let words: Vec<Vec<String>> = texts.map(words).collect::<Result<_>>()?;
        let characters: BTreeSet<char> =
            words.iter().flatten().flat_map(|word| word.chars()).collect();
        // The trainer numbers the continuations in the order in which it meets them, which is not always the same.
        let continued = characters.iter().map(|character| format!("##{character}"));
        let first = SPECIAL.into_iter().map(str::to_owned).chain(continued);
        let mut trainer = WordPieceTrainer::builder()
            .vocab_size(size)
            .min_frequency(2)
            .show_progress(false)
            .special_tokens(first.map(|token| AddedToken::from(token, true)).collect())
            .build();
        let mut words = words.into_iter();
        trainer
            .feed(words.by_ref().map(|words| words.join(" ")), |text| {
                Ok(text.split(' ').map(str::to_owned).collect())
            })
            .map_err(failed)?;
        let mut model = WordPiece::default();
        let _special: Vec<AddedToken> = trainer.train(&mut model).map_err(failed)?;
        let mut vocabulary: Vec<(u32, String)> =
            model.get_vocab().into_iter().map(|(token, number)| (number, token)).collect();
        vocabulary.sort();
        Self::new(vocabulary.into_iter().map(|(_, token)| token).collect())
    }

    /// Reads the `vocab.txt` of a pretrained model.
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::new(text.lines().map(str::to_owned).collect())
    }

    fn new(vocabulary: Vec<String>) -> Result<Self> {
        let number = |token: &str| -> Result<i64> {
            let place = vocabulary.iter().position(|other| other == token);
            Ok(place.with_context(|| format!("the vocabulary has no {token}"))? as i64)
        };
        let [pad, begin, end] = [number("[PAD]")?, number("[CLS]")?, number("[SEP]")?];
        let numbers: HashMap<String, u32, _> = vocabulary.iter().cloned().zip(0..).collect();
        let model = WordPiece::builder()
            .vocab(numbers)
            .unk_token("[UNK]".to_owned())
            .build()
            .map_err(failed)?;
        let mut tokenizer = Tokenizer::new(model);
        tokenizer
            .with_normalizer(Some(BertNormalizer::default()))
            .with_pre_tokenizer(Some(BertPreTokenizer));
        Ok(Self { tokenizer, vocabulary, pad, begin, end })
    }

    /// The tokens of a text, between `[CLS]` and `[SEP]`; no more than `length`.
    pub fn encode(&self, text: &str, length: usize) -> Result<Vec<i64>> {
        let encoding = self.tokenizer.encode(text, false).map_err(failed)?;
        let ids = encoding.get_ids().iter().take(length - 2).map(|&id| i64::from(id));
        Ok([self.begin].into_iter().chain(ids).chain([self.end]).collect())
    }
}

/// The words of a text, as BERT divides it.
fn words(text: &str) -> Result<Vec<String>> {
    let mut text = NormalizedString::from(text);
    BertNormalizer::default().normalize(&mut text).map_err(failed)?;
    let mut parts = PreTokenizedString::from(text);
    BertPreTokenizer.pre_tokenize(&mut parts).map_err(failed)?;
    let splits = parts.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
    Ok(splits.into_iter().map(|(word, ..)| word.to_owned()).collect())
}

fn failed(error: tokenizers::Error) -> anyhow::Error {
    anyhow!("the tokenizer failed: {error}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    const TEXTS: [&str; 3] =
        ["Learning rates are learned", "the learner learns rates", "A rate, learned"];

    #[test]
    fn words_are_divided_into_pieces_of_the_vocabulary() {
        let tokens = Tokens::train(TEXTS.into_iter(), 60).unwrap();
        let again = Tokens::train(TEXTS.into_iter(), 60).unwrap();
        assert_eq!(tokens.vocabulary, again.vocabulary);
        let named = |text: &str, length| -> Vec<String> {
            let ids = tokens.encode(text, length).unwrap();
            ids.into_iter().map(|id| tokens.vocabulary[id as usize].clone()).collect()
        };
        let pieces = named("RATES learners", 20);
        assert_eq!((pieces[0].as_str(), pieces.last().unwrap().as_str()), ("[CLS]", "[SEP]"));
        let joined = pieces[1..pieces.len() - 1].concat().replace("##", "");
        assert_eq!(joined, "rateslearners");
        assert!(pieces.len() < 10, "{pieces:?}");
        assert_eq!(named("x", 20), ["[CLS]", "[UNK]", "[SEP]"]);
        assert_eq!(named("rates rates rates", 4).len(), 4);
    }
}
