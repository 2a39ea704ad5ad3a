//! numpy's arrays and numbers, whose content is in the pickle.
//!
//! An array becomes a tensor of a storage that is the bytes of its content, which stay where they are in the file. A
//! pickle of protocol 2 has no bytes, and a text in their place, of which they are made.

use std::sync::Arc;

use tch::Kind;

use super::machine::{Bytes, Id, Machine, Node, Step};
use crate::checkpoint::malformed::Malformed;
use crate::checkpoint::source::Source;
use crate::checkpoint::value::{TensorRef, element_bytes};

const OTHER_DTYPE: &str =
    "a numpy array of objects, or of a dtype or byte order that tch does not have";

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
    pub(super) fn numpy_kind(&self, name: Id) -> Option<Kind> {
        Some(match &**self.text(name)? {
            "b1" => Kind::Bool,
            "u1" => Kind::Uint8,
            "i1" => Kind::Int8,
            "i2" => Kind::Int16,
            "i4" => Kind::Int,
            "i8" => Kind::Int64,
            "f2" => Kind::Half,
            "f4" => Kind::Float,
            "f8" => Kind::Double,
            "c8" => Kind::ComplexFloat,
            "c16" => Kind::ComplexDouble,
            _ => return None,
        })
    }

    /// Makes a tensor of an array.
    pub(super) fn numpy_array(
        &mut self,
        [shape, dtype, content]: [Id; 3],
        is_fortran: bool,
    ) -> Step<Node> {
        let Node::NumpyDtype(Some(kind)) = self.nodes[dtype] else {
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
            kind,
            offset: 0,
            size,
            stride,
            requires_grad: false,
        };
        let numel = tensor
            .size
            .iter()
            .try_fold(1u64, |numel, &size| numel.checked_mul(u64::try_from(size).ok()?));
        let problem = match tensor.check(len) {
            Ok(_) if numel.and_then(|n| n.checked_mul(element_bytes(kind))) != Some(len) => {
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
        let kind = match self.nodes[dtype] {
            Node::NumpyDtype(Some(kind))
                if self.few_bytes(content, &mut bytes) == Some(element_bytes(kind)) =>
            {
                kind
            }
            _ => return Ok(self.opaque("a numpy number of a dtype that a value does not have")),
        };
        let signed = i64::from_le_bytes(bytes);
        let shift = 64 - 8 * element_bytes(kind).min(8);
        Ok(match kind {
            Kind::Bool => Node::Bool(bytes[0] != 0),
            Kind::Uint8 => Node::Int(bytes[0].into()),
            Kind::Int8 | Kind::Int16 | Kind::Int | Kind::Int64 => {
                Node::Int(signed << shift >> shift)
            }
            Kind::Half => {
                let [low, high, ..] = bytes;
                Node::Float(half::f16::from_le_bytes([low, high]).into())
            }
            Kind::Float => {
                let [a, b, c, d, ..] = bytes;
                Node::Float(f32::from_le_bytes([a, b, c, d]).into())
            }
            Kind::Double => Node::Float(f64::from_le_bytes(bytes)),
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
