//! What the pickle machine does instead of calling Python.

#![forbid(unsafe_code)]

use tch::Kind;

use super::globals::Global;
use super::machine::{Id, Machine, Node, Step, Storage};
use super::value::element_bytes;
use super::{Malformed, TensorRef, shown};

/// PyTorch counts its storages. Each tensor has a copy of the key.
const LONGEST_KEY: usize = 64;

const NOT_PLAIN: &str = "a tensor with hooks, or a conjugated or negated one";

impl Machine<'_> {
    /// `REDUCE`: calls a function with a tuple of arguments.
    pub fn reduce(&mut self) -> Step {
        let (args, function) = (self.pop()?, self.pop()?);
        let (&Node::Global(function), Node::Tuple(args)) =
            (&self.nodes[function], &self.nodes[args])
        else {
            return Err(self.refuse("calls what is not a function"));
        };
        let made = match (function, &args[..]) {
            (Global::Other(what), _) => Node::Opaque(what),
            (Global::Counter, []) => Node::Dict(Vec::new()),
            // The same dict: a counter is one, and nobody else has it.
            (Global::Counter, &[counts]) if matches!(self.nodes[counts], Node::Dict(_)) => {
                return self.push_id(counts);
            }
            (Global::OrderedDict, []) => Node::OrderedDict(Vec::new()),
            (Global::Size, &[sizes]) => self.size(sizes)?,
            (Global::Device, [name, index @ ..]) => self.device(*name, index)?,
            (Global::TensorV2, [args @ .., hooks]) if args.len() == 5 => {
                self.tensor(args, None, &[*hooks])?
            }
            (Global::TensorV2, [args @ .., hooks, metadata]) if args.len() == 5 => {
                self.tensor(args, None, &[*hooks, *metadata])?
            }
            (Global::TensorV3, [args @ .., hooks, dtype]) if args.len() == 5 => {
                self.tensor(args, Some(*dtype), &[*hooks])?
            }
            (Global::TensorV3, [args @ .., hooks, dtype, metadata]) if args.len() == 5 => {
                self.tensor(args, Some(*dtype), &[*hooks, *metadata])?
            }
            // The state of a parameter is what Python code has set as attributes.
            (Global::Parameter, &[data, requires_grad, hooks])
            | (Global::ParameterWithState, &[data, requires_grad, hooks, _]) => {
                self.parameter(data, requires_grad, hooks)?
            }
            _ => return Err(self.refuse("calls a function with arguments that it does not take")),
        };
        if let Node::Tensor(tensor) = &made {
            self.spend(2 * tensor.size.len() as u64)?;
        }
        self.push(made)
    }

    /// Whether hooks and metadata are empty: a view that is conjugated or negated has other elements than its storage.
    fn is_plain(&self, extras: &[Id]) -> bool {
        extras.iter().all(|&id| match &self.nodes[id] {
            Node::None => true,
            Node::Dict(entries) | Node::OrderedDict(entries) => entries.is_empty(),
            _ => false,
        })
    }

    fn items(&self, tuple: Id) -> Option<&[Id]> {
        match &self.nodes[tuple] {
            Node::Tuple(items) => Some(items),
            _ => None,
        }
    }

    fn int(&self, id: Id) -> Option<i64> {
        match self.nodes[id] {
            Node::Int(value) => Some(value),
            _ => None,
        }
    }

    fn count(&self, id: Id) -> Option<u64> {
        self.int(id).and_then(|value| u64::try_from(value).ok())
    }

    fn bool(&self, id: Id) -> Option<bool> {
        match self.nodes[id] {
            Node::Bool(value) => Some(value),
            _ => None,
        }
    }

    fn ints(&self, tuple: Id) -> Option<Vec<i64>> {
        let items = self.items(tuple)?;
        // Checked before a long tuple is copied, which a pickle could ask for again and again.
        if items.len() > 64 {
            return None;
        }
        items.iter().map(|&id| self.int(id)).collect()
    }

    /// `torch.Size`, which is a tuple.
    fn size(&mut self, sizes: Id) -> Step<Node> {
        if self.ints(sizes).is_none() {
            return Err(self.refuse("has a size that is not made of at most 64 integers"));
        }
        let items: Box<[Id]> = self.items(sizes).unwrap_or_default().into();
        self.spend(items.len() as u64)?;
        Ok(Node::Tuple(items))
    }

    /// `torch.device`, as the text that makes it again.
    fn device(&self, name: Id, index: &[Id]) -> Step<Node> {
        let index = match index {
            [] => Some(String::new()),
            &[index] => self.count(index).map(|index| format!(":{index}")),
            _ => None,
        };
        match (self.text(name).filter(|name| name.len() <= 64), index) {
            (Some(name), Some(index)) => Ok(Node::Device(format!("{name}{index}"))),
            _ => Err(self.refuse("has a device without a name")),
        }
    }

    /// The first five arguments of both ways to rebuild a tensor, and the dtype of the second.
    fn tensor(&self, args: &[Id], dtype: Option<Id>, extras: &[Id]) -> Step<Node> {
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

    fn parameter(&self, data: Id, requires_grad: Id, hooks: Id) -> Step<Node> {
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

    /// `NEWOBJ`: TorchScript's modules only, which [`build`](Self::build) fills.
    pub fn new_object(&mut self) -> Step {
        let (args, class) = (self.pop()?, self.pop()?);
        match (&self.nodes[class], self.items(args)) {
            (Node::Global(Global::Module), Some([])) => self.push(Node::Module(None)),
            _ => Err(self.refuse("makes an object of a class that no checkpoint has")),
        }
    }

    /// `BUILD`: gives an object its attributes.
    pub fn build(&mut self, object: Id, state: Id) -> Step {
        match (&self.nodes[object], &self.nodes[state]) {
            // The `_metadata` that a module's state_dict carries: versions of its layers.
            (Node::OrderedDict(_), Node::Dict(_)) | (Node::Opaque(_), _) => {}
            (Node::Module(None), Node::Dict(_)) => self.nodes[object] = Node::Module(Some(state)),
            _ => return Err(self.refuse("gives attributes to what has none")),
        }
        Ok(())
    }

    /// `BINPERSID`: a storage, which has to be in the archive.
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
        let Some(record) = self.storages.get(name) else {
            return Err(refuse("has no record".to_owned()));
        };
        let Some(bytes) = numel.checked_mul(element_bytes(kind.unwrap_or(Kind::Uint8))) else {
            return Err(refuse("has more elements than a storage can have".to_owned()));
        };
        if record.len != bytes {
            let len = record.len;
            return Err(refuse(format!("should have {bytes} bytes, but its record has {len}")));
        }
        // PyTorch gives all tensors of a storage the dtype that comes first.
        if *self.kinds.entry(name.as_bytes()).or_insert(kind) != kind {
            return Err(refuse("is declared with two dtypes".to_owned()));
        }
        self.push(Node::Storage(Storage { key, bytes, kind }))
    }
}
