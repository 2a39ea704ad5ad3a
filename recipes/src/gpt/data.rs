//! The text: a file, or the Rust sources of tch and torch-sys, which cargo has wherever this example builds.

use super::vocabulary::Vocabulary;
use crate::crates;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use tch::{Device, Kind, Tensor};

/// A text as tokens.
#[derive(Debug)]
pub struct Text {
    bytes: usize,
    tokens: Tensor,
    /// What the tokens are.
    pub vocabulary: Vocabulary,
    checksum: u32,
    /// Where it is from, in words.
    pub origin: String,
}

impl Text {
    /// Reads every Rust file of tch and torch-sys in cargo's registry, or, where cargo cannot be asked, of the recipes.
    pub fn load() -> Result<Self> {
        let (folders, origin) = match crates::sources(&["tch", "torch-sys"]) {
            Some(folders) => (folders, "the Rust sources of tch and torch-sys"),
            None => (vec![crate::root().join("src")], "the Rust sources of tch-amp's recipes"),
        };
        let mut files = Vec::new();
        for folder in &folders {
            files.extend(crates::rust_files(folder)?);
        }
        files.sort();
        let mut bytes = Vec::new();
        for file in &files {
            bytes
                .extend(fs::read(file).with_context(|| format!("cannot read {}", file.display()))?);
        }
        let size = format!("{:.1} MB", bytes.len() as f64 / 1e6);
        Self::new(bytes, format!("{origin}, {size} in {} files", files.len()))
    }

    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let size = bytes.len() as f64 / 1e6;
        Self::new(bytes, format!("{}, {size:.1} MB", path.display()))
    }

    /// Takes a text, whose tokens are its bytes.
    pub fn new(bytes: Vec<u8>, origin: String) -> Result<Self> {
        ensure!(bytes.len() > 1000, "the text is too short: {} bytes", bytes.len());
        let (tokens, checksum) = (Tensor::from_slice(&bytes), crc32c::crc32c(&bytes));
        Ok(Self { bytes: bytes.len(), tokens, vocabulary: Vocabulary::bytes(), checksum, origin })
    }

    /// The same text in tokens of a vocabulary with its most frequent words.
    pub fn in_words(self, count: i64) -> Result<Self> {
        let bytes = Vec::<u8>::try_from(&self.tokens)?;
        let vocabulary = Vocabulary::of(&bytes, count)?;
        let tokens = Tensor::from_slice(&vocabulary.tokens(&bytes));
        let origin = format!("{}, {} tokens of {count}", self.origin, tokens.numel());
        Ok(Self { tokens, vocabulary, origin, ..self })
    }

    /// The number of tokens.
    pub fn len(&self) -> i64 {
        self.tokens.size()[0]
    }

    /// What tells it from other texts, wherever it is from.
    pub fn identity(&self) -> String {
        format!("the text of {} bytes with the checksum {:08x}", self.bytes, self.checksum)
    }

    /// The excerpts of `length` tokens that begin at `starts`, and what follows each of their tokens.
    pub fn excerpts(&self, starts: &Tensor, length: i64, device: Device) -> (Tensor, Tensor) {
        let starts = starts.view([-1, 1]);
        let places = &starts + Tensor::arange(length + 1, (Kind::Int64, Device::Cpu));
        let excerpts = self.tokens.index_select(0, &places.view([-1])).view([-1, length + 1]);
        // Without waiting for what a GPU still has to do: CUDA first copies the tokens to memory of its own.
        let kind = excerpts.kind();
        let excerpts = excerpts.to_device_(device, kind, true, false).to_kind(Kind::Int64);
        (excerpts.narrow(1, 0, length), excerpts.narrow(1, 1, length))
    }
}
