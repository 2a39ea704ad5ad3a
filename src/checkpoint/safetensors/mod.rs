//! Checkpoints as safetensors files.
//!
//! A file is the length of its header (8 bytes, little-endian), the header as JSON, and the bytes of the tensors. The
//! metadata of the header has one entry, the `manifest`: the parts and an XXH3 checksum for each tensor and for the
//! header itself. `write` computes these while it writes the tensors, and fills in the header last; `read` reads a
//! header in bounded memory, and makes parts of it.

mod manifest;
mod read;

use safetensors::Dtype;
use tch::Kind;

use crate::checkpoint::limits::{MAX_MANIFEST_BYTES, MAX_VALUES};

pub(crate) use manifest::PartManifest;
pub(crate) use read::{Layout, Weights, write};
pub(crate) use read::{is_safetensors, read};

/// Returns a problem if the manifest's JSON would take too much memory, and `None` otherwise.
fn too_much(manifest: &str) -> Option<String> {
    if manifest.len() > MAX_MANIFEST_BYTES {
        return Some(format!("has {} bytes, more than {MAX_MANIFEST_BYTES}", manifest.len()));
    }
    let values = most_values(manifest.as_bytes());
    (values > MAX_VALUES)
        .then(|| format!("has about {values} names and values, more than {MAX_VALUES}"))
}

/// Returns an upper bound of the number of values in a JSON text, by counting the bytes that start or separate values.
fn most_values(json: &[u8]) -> u64 {
    let (mut count, mut in_text, mut escaped) = (1, false, false);
    for &byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_text,
            b'"' => in_text = !in_text,
            b'[' | b'{' | b',' | b':' if !in_text => count += 1,
            _ => {}
        }
    }
    count
}

fn dtype(kind: Kind) -> Option<Dtype> {
    KINDS.iter().find(|(other, _)| *other == kind).map(|(_, dtype)| *dtype)
}

fn kind(dtype: Dtype) -> Option<Kind> {
    KINDS.iter().find(|(_, other)| *other == dtype).map(|(kind, _)| *kind)
}

const KINDS: [(Kind, Dtype); 15] = [
    (Kind::Bool, Dtype::BOOL),
    (Kind::Uint8, Dtype::U8),
    (Kind::Int8, Dtype::I8),
    (Kind::Int16, Dtype::I16),
    (Kind::Int, Dtype::I32),
    (Kind::Int64, Dtype::I64),
    (Kind::Half, Dtype::F16),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Float, Dtype::F32),
    (Kind::Double, Dtype::F64),
    (Kind::ComplexFloat, Dtype::C64),
    (Kind::Float8e5m2, Dtype::F8_E5M2),
    (Kind::Float8e4m3fn, Dtype::F8_E4M3),
    (Kind::Float8e5m2fnuz, Dtype::F8_E5M2FNUZ),
    (Kind::Float8e4m3fnuz, Dtype::F8_E4M3FNUZ),
];
