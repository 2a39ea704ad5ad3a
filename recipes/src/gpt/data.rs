//! The text: a file, or the Rust sources of tch and torch-sys, which cargo has wherever this example builds.

use crate::crates;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use tch::{Device, Kind, Tensor};

/// A text as bytes.
#[derive(Debug)]
pub struct Text {
    bytes: Tensor,
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
        Self::new(&bytes, format!("{origin}, {size} in {} files", files.len()))
    }

    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::new(&bytes, format!("{}, {:.1} MB", path.display(), bytes.len() as f64 / 1e6))
    }

    /// Takes a text.
    pub fn new(bytes: &[u8], origin: String) -> Result<Self> {
        ensure!(bytes.len() > 1000, "the text is too short: {} bytes", bytes.len());
        Ok(Self { bytes: Tensor::from_slice(bytes), checksum: crc32c::crc32c(bytes), origin })
    }

    /// The number of bytes.
    pub fn len(&self) -> i64 {
        self.bytes.size()[0]
    }

    /// What tells it from other texts, wherever it is from.
    pub fn identity(&self) -> String {
        format!("the text of {} bytes with the checksum {:08x}", self.len(), self.checksum)
    }

    /// The excerpts of `length` bytes that begin at `starts`, and what follows each of their bytes.
    pub fn excerpts(&self, starts: &Tensor, length: i64, device: Device) -> (Tensor, Tensor) {
        let starts = starts.view([-1, 1]);
        let places = &starts + Tensor::arange(length + 1, (Kind::Int64, Device::Cpu));
        let excerpts = self.bytes.index_select(0, &places.view([-1])).view([-1, length + 1]);
        // Without waiting for what a GPU still has to do: CUDA first copies the bytes to memory of its own.
        let excerpts = excerpts.to_device_(device, Kind::Uint8, true, false).to_kind(Kind::Int64);
        (excerpts.narrow(1, 0, length), excerpts.narrow(1, 1, length))
    }
}
