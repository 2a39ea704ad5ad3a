//! What the pickle machine does where Python would call a function.
//!
//! `REDUCE`, `NEWOBJ` and `BUILD` would call functions, make objects and set attributes. Here each of them builds a node
//! instead for the few cases that a checkpoint can hold. Whatever else a function would return, or a class make, is an
//! opaque node, whose attributes and items are ignored.

use super::arena::{Id, Machine, Node, Step, What};
use super::globals::Global;

impl Machine<'_> {
    /// `REDUCE`: calls a function with a tuple of arguments.
    pub fn reduce(&mut self) -> Step {
        let (args, function) = (self.pop()?, self.pop()?);
        match (&self.nodes[function], &self.nodes[args]) {
            (&Node::Global(function), Node::Tuple(_)) => self.call(function, args),
            // Something that a function has returned.
            (&Node::Opaque(what), Node::Tuple(_)) => self.push(Node::Opaque(what)),
            _ => Err(self.refuse("calls what is not a function")),
        }
    }

    fn call(&mut self, function: Global, args: Id) -> Step {
        let made = match (function, self.items(args).unwrap_or_default()) {
            (Global::Other(what), _) => Node::Opaque(what),
            (Global::FromType, &[function, class, args, _attributes]) => {
                return self.tensor_of_class(function, class, args);
            }
            (Global::Counter, []) => Node::Dict(Vec::new()),
            // A counter is a dict, and nothing else refers to this one, so it is used itself.
            (Global::Counter, &[counts]) if matches!(self.nodes[counts], Node::Dict(_)) => {
                return self.push_id(counts);
            }
            (Global::OrderedDict, []) => Node::OrderedDict(Vec::new()),
            (Global::OrderedDict, &[pairs]) => self.of_pairs(pairs)?,
            (Global::Size, &[sizes]) => self.size(sizes)?,
            (Global::Device, [name, index @ ..]) => self.device(*name, index)?,
            (Global::TensorV1, args) if args.len() == 4 => self.tensor(args, None, &[])?,
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
            (Global::TensorClass, []) => Node::Opaque(What::Known("a tensor without data")),
            (Global::TensorClass, &[data, ..]) if matches!(self.nodes[data], Node::Tensor(_)) => {
                return self.push_id(data);
            }
            _ => return Err(self.refuse("calls a function with arguments that it does not take")),
        };
        if let Node::Tensor(tensor) = &made {
            self.spend_tensor(tensor.size.len())?;
        }
        self.push(made)
    }

    /// Makes a tensor of a class. The attributes that Python code has set on it are ignored.
    fn tensor_of_class(&mut self, function: Id, class: Id, args: Id) -> Step {
        match (&self.nodes[function], &self.nodes[class], &self.nodes[args]) {
            (_, &(Node::Global(Global::Other(what)) | Node::Opaque(what)), _) => {
                self.push(Node::Opaque(what))
            }
            (&Node::Global(function), Node::Global(Global::TensorClass), Node::Tuple(_))
                if function != Global::FromType =>
            {
                self.call(function, args)
            }
            _ => Err(self.refuse("calls a function with arguments that it does not take")),
        }
    }

    /// Makes an `OrderedDict` of a list of pairs, as Python 2 saves it.
    fn of_pairs(&mut self, pairs: Id) -> Step<Node> {
        // A pickle could refer to a long list again and again.
        if let Node::List(pairs) = &self.nodes[pairs] {
            self.spend(2 * pairs.len() as u64)?;
        }
        let pair = |&pair: &Id| match &self.nodes[pair] {
            Node::List(pair) => {
                <[Id; 2]>::try_from(&pair[..]).ok().map(|[key, value]| (key, value))
            }
            _ => None,
        };
        let made = match &self.nodes[pairs] {
            Node::List(pairs) => pairs.iter().map(pair).collect(),
            _ => None,
        };
        let problem = "calls a function with arguments that it does not take";
        made.map(Node::OrderedDict).ok_or_else(|| self.refuse(problem))
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

    /// `NEWOBJ` and `NEWOBJ_EX`: makes an object. [`build`](Self::build) sets the attributes of TorchScript's modules.
    pub fn new_object(&mut self, args: Id) -> Step {
        let class = self.pop()?;
        match (&self.nodes[class], self.items(args)) {
            (Node::Global(Global::Module), Some([])) => self.push(Node::Module(None)),
            (Node::Global(Global::TensorClass), Some(_)) => self.call(Global::TensorClass, args),
            (&(Node::Global(Global::Other(what)) | Node::Opaque(what)), Some(_)) => {
                self.push(Node::Opaque(what))
            }
            _ => Err(self.refuse("makes an object of what is not a class")),
        }
    }

    /// `BUILD`: gives an object its attributes.
    pub fn build(&mut self, object: Id, state: Id) -> Step {
        match (&self.nodes[object], &self.nodes[state]) {
            // The `_metadata` of a module's `state_dict`, which holds the versions of its layers, is ignored, and so is
            // whether a parameter of PyTorch before 0.4 requires gradients.
            (Node::OrderedDict(_), Node::Dict(_)) | (Node::Opaque(_), _) => {}
            (Node::Tensor(_), Node::Tuple(state)) if state.len() == 3 => {}
            (Node::Module(None), Node::Dict(_)) => self.nodes[object] = Node::Module(Some(state)),
            _ => return Err(self.refuse("gives attributes to what has none")),
        }
        Ok(())
    }
}
