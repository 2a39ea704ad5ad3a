//! The tensors in a pickle, and their storages.
//!
//! A pickle holds no elements. A persistent id declares a storage by its dtype, key and number of elements, which must
//! agree with its record in the archive; a tensor is a view of a storage and must lie inside it.

use tch::Kind;

use super::TensorRef;
use super::arena::{Id, Machine, Node, Step, Storage};
use super::globals::Global;
use super::value::element_bytes;
use crate::checkpoint::malformed::Malformed;
use crate::error::shown;

/// The longest key of a storage in bytes. PyTorch uses numbers, and each tensor holds a copy of the key.
const LONGEST_KEY: usize = 64;

const NOT_PLAIN: &str = "a tensor with hooks, or a conjugated or negated one";

impl Machine<'_> {
    /// Makes a tensor. `args` are the first five arguments of `_rebuild_tensor_v2` and `_rebuild_tensor_v3`, and
    /// `dtype` is that of the latter.
    pub(super) fn tensor(&self, args: &[Id], dtype: Option<Id>, extras: &[Id]) -> Step<Node> {
        if !self.is_plain(extras) {
            return Ok(Node::Opaque(NOT_PLAIN));
        }
        let &[storage, offset, size, stride, requires_grad] = args else {
            return Err(self.refuse("calls a function with arguments that it does not take"));
        };
        let Node::Storage(storage) = &self.nodes[storage] else {
            return Err(self.refuse("has a tensor without a storage"));
        };
        let kind = match dtype.map(|dtype| &self.nodes[dtype]) {
            Some(&Node::Global(Global::Dtype(kind))) => Some(kind),
            Some(&Node::Global(Global::Other(what))) => return Ok(Node::Opaque(what)),
            Some(_) => None,
            None => storage.kind,
        };
        let Some(kind) = kind else {
            return Err(self.refuse("has a tensor without a dtype"));
        };
        let Some(offset) = self.count(offset) else {
            return Err(self.refuse("has a tensor with an offset that is not a count"));
        };
        let (Some(size), Some(stride)) = (self.ints(size), self.ints(stride)) else {
            let problem = "has a tensor with sizes or strides that are not at most 64 integers";
            return Err(self.refuse(problem));
        };
        let Some(requires_grad) = self.bool(requires_grad) else {
            return Err(self.refuse("has a tensor with requires_grad that is not a bool"));
        };
        let key = String::from_utf8_lossy(&self.bytes[storage.key.clone()]).into_owned();
        let tensor = TensorRef { storage: key, kind, offset, size, stride, requires_grad };
        if let Err(problem) = tensor.check(storage.bytes) {
            let (storage, problem) = (shown(&tensor.storage), problem.to_owned());
            return Err(Malformed::Tensor { storage, problem });
        }
        Ok(Node::Tensor(Box::new(tensor)))
    }

    pub(super) fn parameter(&self, data: Id, requires_grad: Id, hooks: Id) -> Step<Node> {
        if !self.is_plain(&[hooks]) {
            return Ok(Node::Opaque(NOT_PLAIN));
        }
        match (&self.nodes[data], self.bool(requires_grad)) {
            (Node::Opaque(what), _) => Ok(Node::Opaque(what)),
            (Node::Tensor(tensor), Some(requires_grad)) => {
                Ok(Node::Tensor(Box::new(TensorRef { requires_grad, ..(**tensor).clone() })))
            }
            _ => Err(self.refuse("has a parameter that is not a tensor")),
        }
    }

    /// `BINPERSID`: declares a storage, which must be in the archive.
    pub fn storage(&mut self) -> Step {
        let id = self.pop()?;
        let Some(&[tag, class, key, _location, numel]) = self.items(id) else {
            return Err(self.refuse("has a persistent id that is not PyTorch's"));
        };
        let kind = match self.nodes[class] {
            Node::Global(Global::Storage(kind)) => Some(kind),
            Node::Global(Global::UntypedStorage) => None,
            _ => return Err(self.refuse("has a storage of an unknown class")),
        };
        let (Some("storage"), Some(name), Some(numel), Node::Text(key)) =
            (self.text(tag), self.text(key), self.count(numel), &self.nodes[key])
        else {
            return Err(self.refuse("has a persistent id that is not PyTorch's"));
        };
        let key = key.clone();
        if key.len() > LONGEST_KEY {
            return Err(self.refuse("has a storage with a long key"));
        }
        let refuse = |problem: String| Malformed::Tensor { storage: shown(name), problem };
        let Some(len) = (self.storages)(name) else {
            return Err(refuse("has no record".to_owned()));
        };
        let Some(bytes) = numel.checked_mul(element_bytes(kind.unwrap_or(Kind::Uint8))) else {
            return Err(refuse("has more elements than a storage can have".to_owned()));
        };
        if len != bytes {
            return Err(refuse(format!("should have {bytes} bytes, but its record has {len}")));
        }
        // PyTorch would give all tensors of a storage the dtype that it was first declared with.
        if *self.kinds.entry(name.as_bytes()).or_insert(kind) != kind {
            return Err(refuse("is declared with two dtypes".to_owned()));
        }
        self.push(Node::Storage(Storage { key, bytes, kind }))
    }
}
