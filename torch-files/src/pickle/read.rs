//! Reading a pickle. Nothing is executed: the opcodes can only build the nodes of an arena.
//!
//! Python would call functions, make objects and set attributes at `REDUCE`, `NEWOBJ` and `BUILD`. Here each of them
//! builds a node instead for the few cases that a checkpoint can hold. Whatever else a function would return, or a
//! class make, is an opaque node, whose attributes and items are ignored.
//!
//! A pickle holds no elements of tensors. A persistent id declares a storage by its dtype, key and number of elements,
//! which must agree with its record in the archive; a tensor is a view of a storage and must lie inside it.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::dtype::Dtype;

use super::machine::{Bytes, Declared, Id, Machine, Node, Step, Storage, Storages};
use super::op;
use super::{Elements, Global};
use crate::error::Malformed;
use crate::limits::Limits;
use crate::text::shown;
use crate::value::{MAX_DIMS, TensorRef, Text, Value, check_keys};

/// The longest name of a class or a function in bytes. Names are compared at each use, and a pickle could use a long
/// one again and again.
const LONGEST_NAME: usize = 512;

/// The longest key of a storage in bytes. PyTorch uses numbers.
const LONGEST_KEY: usize = 64;

const NOT_PLAIN: &str = "a tensor with hooks, or a conjugated or negated one";
const NUMPY: &str = "a numpy object";
const OBJECT: &str = "a TorchScript object";
const LONG_SIZE: &str = "a size of more than 64 dimensions";

/// Reads a pickle that is a record of its own, whose storages are others.
pub(crate) fn read(bytes: &[u8], storages: &Storages<'_>, limits: &Limits) -> Step<First> {
    let mut machine = Machine::new(bytes, Some(storages), limits);
    let root = machine.run()?;
    if machine.at != machine.bytes.len() {
        return Err(machine.refuse("ends before the end of its record"));
    }
    first(machine, root)
}

/// A pickle, which may be followed by something else.
pub(crate) struct First {
    pub(crate) root: Value,
    /// Its length in bytes.
    pub(crate) len: usize,
    /// The storages that it declares, by key. The caller must compare them with what follows.
    pub(crate) storages: BTreeMap<Text, Declared>,
    /// The content of numpy arrays, by the key that their tensors have for a storage.
    pub(crate) arrays: BTreeMap<Text, Bytes>,
}

/// Reads the pickle at the beginning of `bytes`.
pub(crate) fn read_first(bytes: &[u8], limits: &Limits) -> Step<First> {
    let mut machine = Machine::new(bytes, None, limits);
    let root = machine.run()?;
    first(machine, root)
}

/// Reads the pickle at the beginning of the index of a folder, and returns its length as well. Objects are dicts of
/// their attributes, or tuples of them.
pub(crate) fn read_index(bytes: &[u8], limits: &Limits) -> Step<(Value, usize)> {
    let limits = super::index::limits_of(limits);
    let mut machine = Machine::new(bytes, Some(&|_| None), &limits);
    machine.is_index = true;
    let root = machine.run()?;
    let First { root, len, .. } = first(machine, root)?;
    Ok((root, len))
}

fn first(machine: Machine<'_>, root: Id) -> Step<First> {
    let root = value(&machine, root)?;
    let Machine { at, declared, arrays, .. } = machine;
    Ok(First { root, len: at, storages: declared.into_iter().collect(), arrays })
}

impl Machine<'_> {
    fn proto(&mut self) -> Step {
        let [opcode, version] = self.take()?;
        if opcode != op::PROTO || !(2..=5).contains(&version) {
            return Err(self.refuse("is not of protocol 2 to 5"));
        }
        Ok(())
    }

    /// Executes all opcodes, and returns the only value that is left.
    fn run(&mut self) -> Step<Id> {
        self.proto()?;
        while !self.step()? {}
        let root = self.pop()?;
        if !self.stack.is_empty() || !self.marks.is_empty() {
            return Err(self.refuse("ends with more than one value"));
        }
        Ok(root)
    }

    fn line(&mut self) -> Step<Range<usize>> {
        let rest = &self.bytes[self.at..];
        let Some(len) = rest.iter().position(|&byte| byte == b'\n') else {
            return Err(self.refuse("ends within an opcode"));
        };
        let range = self.at..self.at + len;
        self.at += len + 1;
        Ok(range)
    }

    /// Pushes a class or a function. One that checkpoints do not need is never called: it only stands for itself.
    fn global(&mut self, module: &str, name: &str) -> Step {
        if module.len().max(name.len()) > LONGEST_NAME {
            return self.push_opaque("an object of a class with a long name");
        }
        let of_index = self.is_index && super::index::is_class(module);
        let known = if of_index { Some(Global::Module) } else { super::find(module, name) };
        let node = match (known, super::description(module, name)) {
            (Some(known), _) => Node::Global(known),
            (None, Some(what)) => self.opaque(what),
            (None, None) => Node::Opaque(shown(&format!("{module}.{name}")).into()),
        };
        self.push(node)
    }

    /// `GLOBAL`: the names are two lines.
    fn global_of_lines(&mut self) -> Step {
        let (module, name) = (self.line()?, self.line()?);
        match (std::str::from_utf8(&self.bytes[module]), std::str::from_utf8(&self.bytes[name])) {
            (Ok(module), Ok(name)) => self.global(module, name),
            _ => Err(self.refuse("has a name that is not UTF-8")),
        }
    }

    /// `STACK_GLOBAL`: the names are two texts on the stack.
    fn stack_global(&mut self) -> Step {
        let (name, module) = (self.pop()?, self.pop()?);
        match (self.text(module).cloned(), self.text(name).cloned()) {
            (Some(module), Some(name)) => self.global(&module, &name),
            _ => Err(self.refuse("has a name that is not a string")),
        }
    }

    /// Executes the next opcode. Returns whether it was `STOP`.
    fn step(&mut self) -> Step<bool> {
        self.opcode_at = self.at;
        let [opcode] = self.take()?;
        match opcode {
            op::STOP => return Ok(true),
            op::FRAME => self.frame()?,
            op::MARK => self.mark()?,
            op::BINPUT | op::LONG_BINPUT => {
                let index = self.number(if opcode == op::BINPUT { 1 } else { 4 })?;
                self.put(index)?;
            }
            op::MEMOIZE => self.put(self.memo.len() as u64)?,
            op::APPEND => {
                let item = self.pop()?;
                self.append(&[item])?;
            }
            op::APPENDS => {
                let items = self.pop_mark()?;
                self.append(&items)?;
            }
            op::SETITEM => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set_items(&[key, value])?;
            }
            op::SETITEMS => {
                let items = self.pop_mark()?;
                self.set_items(&items)?;
            }
            op::ADDITEMS => {
                self.pop_mark()?;
                self.add_items()?;
            }
            op::POP => drop(self.pop()?),
            op::POP_MARK => drop(self.pop_mark()?),
            op::REDUCE => self.reduce()?,
            op::NEWOBJ => {
                let args = self.pop()?;
                self.new_object(args)?;
            }
            op::NEWOBJ_EX => {
                let (_named, args) = (self.pop()?, self.pop()?);
                self.new_object(args)?;
            }
            op::BUILD => {
                let (state, object) = (self.pop()?, self.top()?);
                self.build(object, state)?;
            }
            op::BINPERSID => self.storage()?,
            opcode => self.push_opcode(opcode)?,
        }
        Ok(false)
    }

    /// `FRAME`: the length of the opcodes that follow, which only a reader of a stream needs.
    fn frame(&mut self) -> Step {
        let len = self.number(8)?;
        if len > (self.bytes.len() - self.at) as u64 {
            return Err(self.refuse("has a frame that is longer than the rest"));
        }
        Ok(())
    }

    /// Executes an opcode that only pushes a value.
    fn push_opcode(&mut self, opcode: u8) -> Step {
        match opcode {
            op::NONE => self.push(Node::None),
            op::NEWTRUE => self.push(Node::Bool(true)),
            op::NEWFALSE => self.push(Node::Bool(false)),
            op::BININT1 => self.short_int(1),
            op::BININT2 => self.short_int(2),
            op::BININT => {
                let value = i32::from_le_bytes(self.take()?);
                self.push(Node::Int(value.into()))
            }
            op::LONG1 => self.long(1),
            op::LONG4 => self.long(4),
            op::BINFLOAT => {
                let value = f64::from_be_bytes(self.take()?);
                self.push(Node::Float(value))
            }
            op::SHORT_BINUNICODE => self.text_of(1),
            op::BINUNICODE => self.text_of(4),
            // Strings of Python 2.
            op::SHORT_BINSTRING => self.string_of(1),
            op::BINSTRING => self.string_of(4),
            op::BINUNICODE8 => self.text_of(8),
            op::SHORT_BINBYTES => self.bytes_of(1, "bytes"),
            op::BINBYTES => self.bytes_of(4, "bytes"),
            op::BINBYTES8 => self.bytes_of(8, "bytes"),
            op::BYTEARRAY8 => self.bytes_of(8, "a bytearray"),
            op::EMPTY_SET => self.push_opaque("a set"),
            op::FROZENSET => {
                self.pop_mark()?;
                self.push_opaque("a frozenset")
            }
            op::EMPTY_LIST => self.push(Node::List(Vec::new())),
            op::EMPTY_DICT => self.push(Node::Dict(Vec::new())),
            op::EMPTY_TUPLE => self.tuple(0),
            op::TUPLE1 => self.tuple(1),
            op::TUPLE2 => self.tuple(2),
            op::TUPLE3 => self.tuple(3),
            op::TUPLE => {
                let items = self.pop_mark()?;
                self.push(Node::Tuple(items.into()))
            }
            op::GLOBAL => self.global_of_lines(),
            op::STACK_GLOBAL => self.stack_global(),
            op::BINGET | op::LONG_BINGET => {
                let index = self.number(if opcode == op::BINGET { 1 } else { 4 })?;
                self.get(index)
            }
            opcode => Err(Malformed::Opcode { opcode, at: self.opcode_at }),
        }
    }

    /// Pushes the unsigned integer in the next `width` bytes.
    fn short_int(&mut self, width: usize) -> Step {
        let value = self.number(width)?;
        self.push(Node::Int(value as i64))
    }

    /// `REDUCE`: calls a function with a tuple of arguments.
    fn reduce(&mut self) -> Step {
        let (args, function) = (self.pop()?, self.pop()?);
        match (&self.nodes[function], &self.nodes[args]) {
            // TorchScript calls the class of an enum with the value itself instead of a tuple.
            (Node::Global(Global::Module), _) => self.push_opaque(OBJECT),
            (&Node::Global(function), Node::Tuple(_)) => self.call(function, args),
            // An unknown function, or something that one has returned.
            (Node::Opaque(what), Node::Tuple(_)) => self.push(Node::Opaque(what.clone())),
            _ => Err(self.refuse("calls what is not a function")),
        }
    }

    fn call(&mut self, function: Global, args: Id) -> Step {
        let made = match (function, self.items(args).unwrap_or_default()) {
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
            (Global::Encode, []) => Node::Bytes(Bytes::Here(0..0), "bytes"),
            (Global::Encode, &[text, encoding]) => self.encoded(text, encoding),
            (Global::Encode, _) => self.opaque("bytes"),
            (Global::NumpyDtype, [name, ..]) => Node::NumpyDtype(self.numpy_dtype(*name)),
            (Global::NumpyArray, &[class, _, _]) => match &self.nodes[class] {
                Node::Opaque(what) => Node::Opaque(what.clone()),
                _ => Node::NumpyArray,
            },
            (Global::NumpyFromBuffer, &[content, dtype, shape, order, ..])
                if ["C", "F"].iter().any(|known| self.is_text(order, known)) =>
            {
                let is_fortran = self.is_text(order, "F");
                self.numpy_array([shape, dtype, content], is_fortran)?
            }
            (Global::NumpyScalar, &[dtype, content]) => self.numpy_scalar(dtype, content)?,
            (
                Global::NumpyArray
                | Global::NumpyFromBuffer
                | Global::NumpyScalar
                | Global::NumpyDtype
                | Global::NumpyClass,
                _,
            ) => self.opaque(NUMPY),
            (Global::TensorClass, []) => self.opaque("a tensor without data"),
            (Global::TensorClass, &[data, ..])
                if matches!(self.nodes[data], Node::Tensor(_) | Node::Opaque(_)) =>
            {
                return self.push_id(data);
            }
            _ => return Err(self.refuse("calls a function with arguments that it does not take")),
        };
        if let Node::Tensor(tensor) = &made {
            self.spend_tensor(tensor.shape.len())?;
        }
        self.push(made)
    }

    /// Makes a tensor of a class. The attributes that Python code has set on it are ignored.
    fn tensor_of_class(&mut self, function: Id, class: Id, args: Id) -> Step {
        match (&self.nodes[function], &self.nodes[class], &self.nodes[args]) {
            (_, Node::Opaque(what), _) | (Node::Opaque(what), ..) => {
                self.push(Node::Opaque(what.clone()))
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

    /// Returns whether hooks and metadata are empty. Metadata marks conjugated and negated views, whose elements differ
    /// from those of the storage.
    fn is_plain(&self, extras: &[Id]) -> bool {
        extras.iter().all(|&id| match &self.nodes[id] {
            Node::None => true,
            Node::Dict(entries) | Node::OrderedDict(entries) => entries.is_empty(),
            _ => false,
        })
    }

    /// Returns whether a node is this text.
    pub(super) fn is_text(&self, id: Id, text: &str) -> bool {
        self.text(id).is_some_and(|found| **found == *text)
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

    pub(super) fn ints(&self, tuple: Id) -> Option<Vec<i64>> {
        // Checked before the tuple is copied: a pickle could refer to a long one again and again.
        let items = self.items(tuple).filter(|items| items.len() <= MAX_DIMS)?;
        items.iter().map(|&id| self.int(id)).collect()
    }

    /// `torch.Size`, which becomes a tuple.
    fn size(&mut self, sizes: Id) -> Step<Node> {
        if self.items(sizes).is_some_and(|items| items.len() > MAX_DIMS) {
            return Ok(self.opaque(LONG_SIZE));
        }
        if self.ints(sizes).is_none() {
            return Err(self.refuse("has a size that is not made of integers"));
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
            (Some(name), Some(index)) => Ok(Node::Text(format!("{name}{index}").into())),
            _ => Err(self.refuse("has a device without a name")),
        }
    }

    /// `NEWOBJ` and `NEWOBJ_EX`: makes an object. [`build`](Self::build) sets the attributes of TorchScript's modules.
    fn new_object(&mut self, args: Id) -> Step {
        let class = self.pop()?;
        match (&self.nodes[class], self.items(args)) {
            (Node::Global(Global::Module), Some([])) => self.push(Node::Module(None)),
            (Node::Global(Global::TensorClass), Some(_)) => self.call(Global::TensorClass, args),
            (Node::Global(Global::Encode), Some(_)) => self.push_opaque("bytes"),
            (Node::Global(Global::NumpyClass | Global::NumpyDtype), Some(_)) => {
                self.push_opaque(NUMPY)
            }
            (Node::Opaque(what), Some(_)) => self.push(Node::Opaque(what.clone())),
            _ => Err(self.refuse("makes an object of what is not a class")),
        }
    }

    /// `BUILD`: gives an object its attributes.
    fn build(&mut self, object: Id, state: Id) -> Step {
        match (&self.nodes[object], &self.nodes[state]) {
            // The `_metadata` of a module's `state_dict`, which holds the versions of its layers, is ignored, and so is
            // whether a parameter of PyTorch before 0.4 requires gradients.
            (Node::OrderedDict(_), Node::Dict(_)) | (Node::Opaque(_) | Node::Bytes(..), _) => {}
            (Node::Tensor(_), Node::Tuple(state)) if state.len() == 3 => {}
            (Node::NumpyDtype(_), Node::Tuple(state)) => {
                // Numbers of another byte order are no tensor.
                if state.get(1).is_some_and(|&order| self.is_text(order, ">")) {
                    self.nodes[object] = Node::NumpyDtype(None);
                }
            }
            (Node::NumpyArray, Node::Tuple(state)) => {
                let array = match **state {
                    [_, shape, dtype, order, content] => {
                        let is_fortran = self.bool(order).unwrap_or(self.int(order) == Some(1));
                        self.numpy_array([shape, dtype, content], is_fortran)?
                    }
                    _ => self.opaque(NUMPY),
                };
                if let Node::Tensor(tensor) = &array {
                    self.spend_tensor(tensor.shape.len())?;
                }
                self.nodes[object] = array;
            }
            (Node::Module(None), Node::Dict(_)) => self.nodes[object] = Node::Module(Some(state)),
            (Node::Module(None), Node::Tuple(_)) if self.is_index => {
                self.nodes[object] = Node::Module(Some(state));
            }
            // The meaning of another state is known to its class alone, such as the packed weights of a quantized
            // layer.
            (Node::Module(None), _) => self.nodes[object] = self.opaque(OBJECT),
            _ => return Err(self.refuse("gives attributes to what has none")),
        }
        Ok(())
    }

    /// Makes a tensor. `args` are the four arguments of `_rebuild_tensor` or the first five of `_rebuild_tensor_v2` and
    /// `_rebuild_tensor_v3`, which has a `dtype` as well.
    fn tensor(&self, args: &[Id], dtype: Option<Id>, extras: &[Id]) -> Step<Node> {
        if !self.is_plain(extras) {
            return Ok(self.opaque(NOT_PLAIN));
        }
        let &[storage, offset, size, stride, ref requires_grad @ ..] = args else {
            return Err(self.refuse("calls a function with arguments that it does not take"));
        };
        let storage = match &self.nodes[storage] {
            Node::Storage(storage) => storage.clone(),
            Node::Opaque(what) => return Ok(Node::Opaque(what.clone())),
            _ => return Err(self.refuse("has a tensor without a storage")),
        };
        let elements = match dtype.map(|dtype| &self.nodes[dtype]) {
            Some(&Node::Global(Global::Dtype(dtype))) => Some(Elements::Of(dtype)),
            Some(Node::Opaque(what)) => return Ok(Node::Opaque(what.clone())),
            Some(_) => None,
            None => storage.elements,
        };
        let dtype = match elements {
            Some(Elements::Of(dtype)) => dtype,
            Some(Elements::Quantized(_)) => return Ok(self.opaque("a quantized tensor")),
            None => return Err(self.refuse("has a tensor without a dtype")),
        };
        let Some(offset) = self.count(offset) else {
            return Err(self.refuse("has a tensor with an offset that is not a count"));
        };
        let (Some(shape), Some(strides)) = (self.ints(size), self.ints(stride)) else {
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
        let Storage { key, bytes, .. } = storage;
        let tensor = TensorRef { storage: key, dtype, offset, shape, strides, requires_grad };
        if let Err(problem) = tensor.check(bytes) {
            let (storage, problem) = (shown(&tensor.storage), problem.to_owned());
            return Err(Malformed::Tensor { storage, problem });
        }
        Ok(Node::Tensor(Box::new(tensor)))
    }

    fn parameter(&self, data: Id, requires_grad: Id, hooks: Id) -> Step<Node> {
        if !self.is_plain(&[hooks]) {
            return Ok(self.opaque(NOT_PLAIN));
        }
        match (&self.nodes[data], self.bool(requires_grad)) {
            (Node::Opaque(what), _) => Ok(Node::Opaque(what.clone())),
            (Node::Tensor(tensor), Some(requires_grad)) => {
                Ok(Node::Tensor(Box::new(TensorRef { requires_grad, ..(**tensor).clone() })))
            }
            _ => Err(self.refuse("has a parameter that is not a tensor")),
        }
    }

    /// `BINPERSID`: declares a storage, which must be in the archive, or follow the pickle.
    fn storage(&mut self) -> Step {
        let id = self.pop()?;
        let Some(&[tag, class, ref rest @ ..]) = self.items(id) else {
            return Err(self.refuse("has a persistent id that is not PyTorch's"));
        };
        // Before PyTorch 1.6, the class of a module has its source beside it.
        if self.storages.is_none() && self.text(tag).is_some_and(|tag| **tag == *"module") {
            return self.push_id(class);
        }
        let (key, numel, view) = match *rest {
            [key, _location, numel] => (key, numel, None),
            [key, _location, numel, view] => (key, numel, Some(view)),
            _ => return Err(self.refuse("has a persistent id that is not PyTorch's")),
        };
        let elements = match &self.nodes[class] {
            &Node::Global(Global::Storage(elements)) => Some(elements),
            Node::Global(Global::UntypedStorage) => None,
            // The size of its elements is unknown, so that it cannot be compared with its record.
            Node::Opaque(what) => return self.push(Node::Opaque(what.clone())),
            _ => return Err(self.refuse("has a storage of an unknown class")),
        };
        let (Some("storage"), Some(key), Some(numel)) =
            (self.text(tag).map(|tag| &**tag), self.text(key).cloned(), self.count(numel))
        else {
            return Err(self.refuse("has a persistent id that is not PyTorch's"));
        };
        if key.len() > LONGEST_KEY {
            return Err(self.refuse("has a storage with a long key"));
        }
        let refuse = |problem: String| Malformed::Tensor { storage: shown(&key), problem };
        // The number of an untyped storage counts bytes.
        let counted = elements.unwrap_or(Elements::Of(Dtype::Uint8));
        let Some(bytes) = numel.checked_mul(counted.size()) else {
            return Err(refuse("has more elements than a storage can have".to_owned()));
        };
        if let Some(storages) = self.storages {
            let Some(len) = storages(&key) else {
                return Err(refuse("has no record".to_owned()));
            };
            if len != bytes {
                return Err(refuse(format!("should have {bytes} bytes, but its record has {len}")));
            }
        }
        // PyTorch would give all tensors of a storage the dtype that it was first declared with.
        let declared = Declared { elements: counted, bytes };
        if *self.declared.entry(key.clone()).or_insert(declared) != declared {
            return Err(refuse("is declared with two dtypes or sizes".to_owned()));
        }
        // PyTorch before 0.4 could save a storage that was a part of another one.
        if view.is_some_and(|view| !matches!(self.nodes[view], Node::None)) {
            return self.push_opaque("a tensor in a part of a storage");
        }
        self.push(Node::Storage(Storage { key, bytes, elements }))
    }
}

/// How many values a tensor counts as, besides those of its shape and strides. It is less than what a pickle spends on
/// making one.
const TENSOR: usize = 12;

/// The rest of the limits, while the arena of a pickle becomes values. The arena holds each node once, but a node can
/// be in many places of the tree, so that a small pickle could become a huge value. Values, text and expanded tensors
/// are therefore counted once more here, for each place, before they are allocated.
struct Tree<'a> {
    machine: &'a Machine<'a>,
    values: u64,
    text_bytes: u64,
    expanded_bytes: u64,
    /// The containers around the present node.
    around: Vec<Id>,
}

/// Converts a node to a value.
pub(super) fn value(machine: &Machine<'_>, root: Id) -> Step<Value> {
    let limits = machine.limits;
    let mut tree = Tree {
        machine,
        values: limits.max_values,
        text_bytes: text_limit(machine),
        expanded_bytes: limits.max_expanded_bytes,
        around: Vec::new(),
    };
    tree.spend(1)?;
    tree.value(root)
}

/// Returns the limit on the total size of all strings. Files repeat names, but only so often.
fn text_limit(machine: &Machine<'_>) -> u64 {
    let Limits { max_pickle_bytes, max_text_factor, .. } = *machine.limits;
    let pickle = machine.bytes.len() as u64;
    pickle.saturating_mul(max_text_factor).saturating_add(1 << 20).min(max_pickle_bytes)
}

fn spend(left: &mut u64, amount: u64, what: &'static str, limit: u64) -> Step {
    match left.checked_sub(amount) {
        Some(rest) => *left = rest,
        None => return Err(Malformed::TooMuch { what, limit }),
    }
    Ok(())
}

impl Tree<'_> {
    /// Counts values before they are allocated.
    fn spend(&mut self, values: usize) -> Step {
        spend(&mut self.values, values as u64, "values", self.machine.limits.max_values)
    }

    /// Counts a text, which takes memory for each place once it is saved again.
    fn text(&mut self, text: &Text) -> Step<Text> {
        let limit = text_limit(self.machine);
        spend(&mut self.text_bytes, text.len() as u64, "bytes of text", limit)?;
        Ok(text.clone())
    }

    /// Converts a node. The caller has counted the value itself.
    fn value(&mut self, id: Id) -> Step<Value> {
        let machine = self.machine;
        Ok(match &machine.nodes[id] {
            Node::None => Value::None,
            Node::Bool(value) => Value::Bool(*value),
            Node::Int(value) => Value::Int(*value),
            Node::Uint(value) => Value::Uint(*value),
            Node::Float(value) => Value::Float(*value),
            Node::Text(text) => Value::Text(self.text(text)?),
            Node::Bytes(_, what) => Value::Opaque(machine.description(what)),
            Node::Opaque(what) => Value::Opaque(what.clone()),
            Node::List(_)
            | Node::Tuple(_)
            | Node::Dict(_)
            | Node::OrderedDict(_)
            | Node::Module(Some(_)) => self.container(id)?,
            // An object without attributes has no state.
            Node::Module(None) if machine.is_index => Value::Dict(Vec::new()),
            Node::Tensor(tensor) => Value::Tensor(Box::new(self.tensor(tensor)?)),
            Node::Module(None)
            | Node::Storage(_)
            | Node::Global(_)
            | Node::NumpyDtype(_)
            | Node::NumpyArray => self.bare(id)?,
        })
    }

    /// Converts a container, unless it is too deep or around itself.
    fn container(&mut self, id: Id) -> Step<Value> {
        let machine = self.machine;
        if self.around.len() >= machine.limits.max_depth || self.around.contains(&id) {
            return Ok(Value::Opaque("nested too deep, or contains itself".into()));
        }
        self.around.push(id);
        let value = match &machine.nodes[id] {
            Node::List(items) => Value::List(self.items(items)?),
            Node::Tuple(items) => Value::Tuple(self.items(items)?),
            Node::Dict(entries) | Node::OrderedDict(entries) => Value::Dict(self.entries(entries)?),
            Node::Module(Some(state)) if machine.is_index => {
                self.spend(1)?;
                self.value(*state)?
            }
            Node::Module(Some(state)) => self.module(*state)?,
            _ => self.bare(id)?,
        };
        self.around.pop();
        Ok(value)
    }

    fn items(&mut self, items: &[Id]) -> Step<Vec<Value>> {
        self.spend(items.len())?;
        let mut values = Vec::with_capacity(items.len());
        for &item in items {
            values.push(self.value(item)?);
        }
        Ok(values)
    }

    fn entries(&mut self, entries: &[(Id, Id)]) -> Step<Vec<(Value, Value)>> {
        self.spend(2 * entries.len())?;
        let mut values = Vec::with_capacity(entries.len());
        for &(key, item) in entries {
            values.push((self.value(key)?, self.value(item)?));
        }
        check_keys(&values).map_err(Malformed::Content)?;
        Ok(values)
    }

    fn tensor(&mut self, tensor: &TensorRef) -> Step<TensorRef> {
        // A pickle can recall one tensor again and again, and each place takes as much memory as many values.
        self.spend(TENSOR + 2 * tensor.shape.len())?;
        let storage = self.text(&tensor.storage)?;
        let declared = self.machine.declared.get(&storage).map(|known| known.bytes);
        let array = || self.machine.arrays.get(&storage).map(Bytes::len);
        let len = declared.or_else(array).unwrap_or(0);
        // The tensor was checked before. Here it counts once for each place that it is in.
        let expanded = tensor.check(len).unwrap_or(u64::MAX);
        let limit = self.machine.limits.max_expanded_bytes;
        spend(&mut self.expanded_bytes, expanded, "bytes of expanded tensors", limit)?;
        Ok(TensorRef { storage, ..tensor.clone() })
    }

    /// Converts a TorchScript module to a dict of its attributes. In their names tch writes `|` instead of dots, which
    /// attributes cannot have.
    fn module(&mut self, state: Id) -> Step<Value> {
        let machine = self.machine;
        let (Node::Dict(entries) | Node::OrderedDict(entries)) = &machine.nodes[state] else {
            return Err(Malformed::Content("has a module whose state is not a dict".to_owned()));
        };
        let mut attributes = self.entries(entries)?;
        for (name, _) in &mut attributes {
            match name {
                Value::Text(name) => *name = name.replace('|', ".").into(),
                _ => return Err(Malformed::Content("has an attribute without a name".to_owned())),
            }
        }
        // The names with dots may have existed already.
        check_keys(&attributes).map_err(Malformed::Content)?;
        Ok(Value::Dict(attributes))
    }

    /// Converts a node that is meaningful only as part of another one, except for a dtype.
    fn bare(&mut self, id: Id) -> Step<Value> {
        let what = match self.machine.nodes[id] {
            Node::Global(Global::Dtype(dtype)) => {
                let name = dtype.name();
                return Ok(Value::Text(self.text(&format!("torch.{name}").into())?));
            }
            Node::Global(_) => "a class or a function",
            Node::Storage(_) => "a storage",
            Node::NumpyDtype(_) => "a numpy dtype",
            _ => "an object without attributes",
        };
        Ok(Value::Opaque(what.into()))
    }
}
