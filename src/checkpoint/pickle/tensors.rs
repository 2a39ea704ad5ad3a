//! The tensors in a pickle, and their storages.
//!
//! A pickle holds no elements. A persistent id declares a storage by its dtype, key and number of elements, which must
//! agree with its record in the archive; a tensor is a view of a storage and must lie inside it.

use tch::Kind;

use super::arena::{Id, Machine, Node, Step, Storage, What};
use super::globals::Global;
use super::value::element_bytes;
use super::{Declared, TensorRef};
use crate::checkpoint::malformed::Malformed;
use crate::error::shown;

/// The longest key of a storage in bytes. PyTorch uses numbers, and each tensor holds a copy of the key.
const LONGEST_KEY: usize = 64;

const NOT_PLAIN: What = What::Known("a tensor with hooks, or a conjugated or negated one");

impl Machine<'_> {
    /// Makes a tensor. `args` are the four arguments of `_rebuild_tensor` or the first five of `_rebuild_tensor_v2` and
    /// `_rebuild_tensor_v3`, and `dtype` is that of the latter.
    pub(super) fn tensor(&self, args: &[Id], dtype: Option<Id>, extras: &[Id]) -> Step<Node> {
        if !self.is_plain(extras) {
            return Ok(Node::Opaque(NOT_PLAIN));
        }
        let &[storage, offset, size, stride, ref requires_grad @ ..] = args else {
            return Err(self.refuse("calls a function with arguments that it does not take"));
        };
        let storage = match &self.nodes[storage] {
            Node::Storage(storage) => storage,
            &Node::Opaque(what) => return Ok(Node::Opaque(what)),
            _ => return Err(self.refuse("has a tensor without a storage")),
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
        if matches!(kind, Kind::QInt8 | Kind::QUInt8 | Kind::QInt32) {
            return Ok(Node::Opaque(What::Known("a quantized tensor")));
        }
        let Some(offset) = self.count(offset) else {
            return Err(self.refuse("has a tensor with an offset that is not a count"));
        };
        let (Some(size), Some(stride)) = (self.ints(size), self.ints(stride)) else {
            let problem = "has a tensor with sizes or strides that are not at most 64 integers";
            return Err(self.refuse(problem));
        };
        let requires_grad = match *requires_grad {
            [] => Some(false),
            [requires_grad, ..] => self.bool(requires_grad),
        };
        let Some(requires_grad) = requires_grad else {
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
            (&Node::Opaque(what), _) => Ok(Node::Opaque(what)),
            (Node::Tensor(tensor), Some(requires_grad)) => {
                Ok(Node::Tensor(Box::new(TensorRef { requires_grad, ..(**tensor).clone() })))
            }
            _ => Err(self.refuse("has a parameter that is not a tensor")),
        }
    }

    /// `BINPERSID`: declares a storage, which must be in the archive, or follow the pickle.
    pub fn storage(&mut self) -> Step {
        let id = self.pop()?;
        let Some(&[tag, class, ref rest @ ..]) = self.items(id) else {
            return Err(self.refuse("has a persistent id that is not PyTorch's"));
        };
        // Before PyTorch 1.6, the class of a module has its source beside it.
        if self.storages.is_none() && self.text(tag) == Some("module") {
            return self.push_id(class);
        }
        let (key, numel, view) = match *rest {
            [key, _location, numel] => (key, numel, None),
            [key, _location, numel, view] => (key, numel, Some(view)),
            _ => return Err(self.refuse("has a persistent id that is not PyTorch's")),
        };
        let kind = match self.nodes[class] {
            Node::Global(Global::Storage(kind)) => Some(kind),
            Node::Global(Global::UntypedStorage) => None,
            // The size of its elements is unknown, so that it cannot be compared with its record.
            Node::Global(Global::Other(what)) => return self.push(Node::Opaque(what)),
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
        let Some(bytes) = numel.checked_mul(element_bytes(kind.unwrap_or(Kind::Uint8))) else {
            return Err(refuse("has more elements than a storage can have".to_owned()));
        };
        if let Some(storages) = self.storages {
            let Some(len) = storages(name) else {
                return Err(refuse("has no record".to_owned()));
            };
            if len != bytes {
                return Err(refuse(format!("should have {bytes} bytes, but its record has {len}")));
            }
        }
        // PyTorch would give all tensors of a storage the dtype that it was first declared with.
        let declared = Declared { kind: kind.or(Some(Kind::Uint8)), bytes };
        if *self.declared.entry(name.as_bytes()).or_insert(declared) != declared {
            return Err(refuse("is declared with two dtypes or sizes".to_owned()));
        }
        // PyTorch before 0.4 could save a storage that was a part of another one.
        if view.is_some_and(|view| !matches!(self.nodes[view], Node::None)) {
            return self.push(Node::Opaque(What::Known("a tensor in a part of a storage")));
        }
        self.push(Node::Storage(Storage { key, bytes, kind }))
    }
}
