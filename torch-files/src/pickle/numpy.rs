//! numpy's arrays and numbers, whose content is in the pickle.
//!
//! An array becomes a tensor of a storage that is the bytes of its content, which stay where they are in the file. A
//! pickle of protocol 2 has no bytes, and a text in their place, of which they are made.

use std::sync::Arc;

use crate::dtype::Dtype;

use super::machine::{Bytes, Id, Machine, Node, Step};
use crate::error::Malformed;
use crate::source::Source;
use crate::value::TensorRef;

const OTHER_DTYPE: &str =
    "a numpy array of objects, or of a dtype or byte order that torch-files does not have";

/// The characters of a text as one byte each; `None` if one is beyond latin-1. Memory is asked for once.
fn latin_bytes(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.chars().count());
    for char in text.chars() {
        bytes.push(u8::try_from(char).ok()?);
    }
    Some(bytes)
}

impl Machine<'_> {
    /// `_codecs.encode`, which makes bytes of a text. In the encoding that Python takes for bytes, each character is
    /// one.
    pub(super) fn encoded(&mut self, text: Id, encoding: Id) -> Node {
        if !self.is_text(encoding, "latin1") {
            return self.opaque("bytes");
        }
        match self.made_of(text, true) {
            Some(made) => Node::Bytes(Bytes::Made(made), "bytes"),
            None => self.opaque("bytes"),
        }
    }

    /// Makes bytes of a text, of each character one or those of UTF-8. A pickle can refer to a long text again and
    /// again, so that this is done once, also if there are none.
    fn made_of(&mut self, text: Id, is_latin: bool) -> Option<Arc<Source>> {
        if let Some(made) = self.made.get(&(text, is_latin)) {
            return made.clone();
        }
        let content = &**self.text(text)?;
        let bytes = if is_latin { latin_bytes(content) } else { Some(content.as_bytes().to_vec()) };
        let made = bytes.map(|bytes| Arc::new(Source::in_memory(bytes)));
        self.made.insert((text, is_latin), made.clone());
        made
    }

    /// Returns the dtype of a name such as `f4`.
    pub(super) fn numpy_dtype(&self, name: Id) -> Option<Dtype> {
        Some(match &**self.text(name)? {
            "b1" => Dtype::Bool,
            "u1" => Dtype::Uint8,
            "u2" => Dtype::Uint16,
            "u4" => Dtype::Uint32,
            "u8" => Dtype::Uint64,
            "i1" => Dtype::Int8,
            "i2" => Dtype::Int16,
            "i4" => Dtype::Int32,
            "i8" => Dtype::Int64,
            "f2" => Dtype::Float16,
            "f4" => Dtype::Float32,
            "f8" => Dtype::Float64,
            "c8" => Dtype::Complex64,
            "c16" => Dtype::Complex128,
            _ => return None,
        })
    }

    /// Makes a tensor of an array.
    pub(super) fn numpy_array(
        &mut self,
        [shape, dtype, content]: [Id; 3],
        is_fortran: bool,
    ) -> Step<Node> {
        let Node::NumpyDtype(Some(dtype)) = self.nodes[dtype] else {
            return Ok(self.opaque(OTHER_DTYPE));
        };
        let bytes = match &self.nodes[content] {
            Node::Bytes(bytes, _) => bytes.clone(),
            // A string of Python 2.
            Node::Text(_) => match self.made_of(content, false) {
                Some(made) => Bytes::Made(made),
                None => return Ok(self.opaque(OTHER_DTYPE)),
            },
            _ => return Ok(self.opaque(OTHER_DTYPE)),
        };
        let Some(size) = self.ints(shape) else {
            return Err(
                self.refuse("has a numpy array with a shape that is not at most 64 integers")
            );
        };
        let mut stride = vec![1i64; size.len()];
        let mut step = 1i64;
        let mut dims: Vec<_> = (0..size.len()).collect();
        if !is_fortran {
            dims.reverse();
        }
        for dim in dims {
            stride[dim] = step;
            step = step.saturating_mul(size[dim].max(1));
        }
        let storage = match &bytes {
            Bytes::Here(range) => format!("bytes at {}", range.start),
            Bytes::Made(_) => format!("text {content}"),
        };
        let len = bytes.len();
        let tensor = TensorRef {
            storage: storage.into(),
            dtype,
            offset: 0,
            shape: size,
            strides: stride,
            requires_grad: false,
        };
        let numel = tensor
            .shape
            .iter()
            .try_fold(1u64, |numel, &size| numel.checked_mul(u64::try_from(size).ok()?));
        let problem = match tensor.check(len) {
            Ok(_) if numel.and_then(|n| n.checked_mul(dtype.size() as u64)) != Some(len) => {
                Some("does not have the size of its numpy array")
            }
            Ok(_) => None,
            Err(problem) => Some(problem),
        };
        if let Some(problem) = problem {
            let (storage, problem) = (tensor.storage.to_string(), problem.to_owned());
            return Err(Malformed::Tensor { storage, problem });
        }
        self.arrays.insert(tensor.storage.clone(), bytes);
        Ok(Node::Tensor(Box::new(tensor)))
    }

    /// Makes a number of the bytes of one.
    pub(super) fn numpy_scalar(&self, dtype: Id, content: Id) -> Step<Node> {
        let mut bytes = [0; 8];
        let dtype = match self.nodes[dtype] {
            Node::NumpyDtype(Some(dtype))
                if self.few_bytes(content, &mut bytes) == Some(dtype.size() as u64) =>
            {
                dtype
            }
            _ => return Ok(self.opaque("a numpy number of a dtype that a value does not have")),
        };
        let signed = i64::from_le_bytes(bytes);
        let shift = 64 - 8 * (dtype.size() as u64).min(8);
        Ok(match dtype {
            Dtype::Bool => Node::Bool(bytes[0] != 0),
            Dtype::Uint8 | Dtype::Uint16 | Dtype::Uint32 => Node::Int(signed),
            Dtype::Uint64 => {
                let value = u64::from_le_bytes(bytes);
                i64::try_from(value).map_or(Node::Uint(value), Node::Int)
            }
            Dtype::Int8 | Dtype::Int16 | Dtype::Int32 | Dtype::Int64 => {
                Node::Int(signed << shift >> shift)
            }
            Dtype::Float16 => {
                let [low, high, ..] = bytes;
                Node::Float(half::f16::from_le_bytes([low, high]).into())
            }
            Dtype::Float32 => {
                let [a, b, c, d, ..] = bytes;
                Node::Float(f32::from_le_bytes([a, b, c, d]).into())
            }
            Dtype::Float64 => Node::Float(f64::from_le_bytes(bytes)),
            _ => self.opaque("a complex number"),
        })
    }

    /// Reads at most eight bytes, and returns how many there are.
    fn few_bytes(&self, content: Id, to: &mut [u8; 8]) -> Option<u64> {
        let bytes = match &self.nodes[content] {
            Node::Bytes(bytes, _) => bytes,
            Node::Text(text) => {
                to.get_mut(..text.len())?.copy_from_slice(text.as_bytes());
                return Some(text.len() as u64);
            }
            _ => return None,
        };
        let few = to.get_mut(..usize::try_from(bytes.len()).ok()?)?;
        match bytes {
            Bytes::Here(range) => few.copy_from_slice(&self.bytes[range.clone()]),
            Bytes::Made(source) => source.read_at(0, few).ok()?,
        }
        Some(bytes.len())
    }
}
