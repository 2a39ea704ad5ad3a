//! What the pickle machine does where Python would call a function.
//!
//! `REDUCE`, `NEWOBJ` and `BUILD` would call functions, make objects and set attributes. Here each of them accepts the
//! few cases that occur in PyTorch's files, builds a node instead, and refuses everything else.

use super::arena::{Id, Machine, Node, Step};
use super::globals::Global;

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
            // A counter is a dict, and nothing else refers to this one, so it is used itself.
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
            // The fourth argument holds attributes that Python code has set on the parameter, which are ignored.
            (Global::Parameter, &[data, requires_grad, hooks])
            | (Global::ParameterWithState, &[data, requires_grad, hooks, _]) => {
                self.parameter(data, requires_grad, hooks)?
            }
            _ => return Err(self.refuse("calls a function with arguments that it does not take")),
        };
        if let Node::Tensor(tensor) = &made {
            self.spend_tensor(tensor.size.len())?;
        }
        self.push(made)
    }

    /// Whether hooks and metadata are empty. Metadata marks conjugated and negated views, whose elements differ from
    /// those of the storage.
    pub(super) fn is_plain(&self, extras: &[Id]) -> bool {
        extras.iter().all(|&id| match &self.nodes[id] {
            Node::None => true,
            Node::Dict(entries) | Node::OrderedDict(entries) => entries.is_empty(),
            _ => false,
        })
    }

    pub(super) fn items(&self, tuple: Id) -> Option<&[Id]> {
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

    pub(super) fn count(&self, id: Id) -> Option<u64> {
        self.int(id).and_then(|value| u64::try_from(value).ok())
    }

    pub(super) fn bool(&self, id: Id) -> Option<bool> {
        match self.nodes[id] {
            Node::Bool(value) => Some(value),
            _ => None,
        }
    }

    pub(super) fn ints(&self, tuple: Id) -> Option<Vec<i64>> {
        let items = self.items(tuple)?;
        // Checked before the tuple is copied: a pickle could refer to a long one again and again.
        if items.len() > 64 {
            return None;
        }
        items.iter().map(|&id| self.int(id)).collect()
    }

    /// `torch.Size`, which becomes a tuple.
    fn size(&mut self, sizes: Id) -> Step<Node> {
        if self.ints(sizes).is_none() {
            return Err(self.refuse("has a size that is not made of at most 64 integers"));
        }
        let items: Box<[Id]> = self.items(sizes).unwrap_or_default().into();
        self.spend(items.len() as u64)?;
        Ok(Node::Tuple(items))
    }

    /// `torch.device`, which becomes the text that `torch.device` accepts.
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

    /// `NEWOBJ`: makes an object. Only TorchScript's modules are allowed, whose attributes [`build`](Self::build) sets.
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
            // The `_metadata` of a module's `state_dict`, which holds the versions of its layers, is ignored.
            (Node::OrderedDict(_), Node::Dict(_)) | (Node::Opaque(_), _) => {}
            (Node::Module(None), Node::Dict(_)) => self.nodes[object] = Node::Module(Some(state)),
            _ => return Err(self.refuse("gives attributes to what has none")),
        }
        Ok(())
    }
}
