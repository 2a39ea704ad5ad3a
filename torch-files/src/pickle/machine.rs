//! The state of the pickle machine: an arena of nodes, a stack with marks, and a memo.
//!
//! A node is stored once and referred to by its index, as often as the pickle recalls it from the memo. Every value
//! that is pushed counts against [`Limits`], and a value below the last mark cannot be taken. A list and a dict are
//! built in two steps, empty first and then filled, so that a pickle can memorize them before their items: such a
//! container may contain itself, which `tree` refuses.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use crate::dtype::Dtype;

use super::{Elements, Global};
use crate::error::Malformed;
use crate::limits::Limits;
use crate::source::Source;
use crate::value::{TensorRef, Text};

/// The index of a node in the arena.
pub(super) type Id = usize;

/// A value that the pickle has built.
pub(super) enum Node {
    None,
    Bool(bool),
    Int(i64),
    /// Only for numbers that an `i64` cannot hold.
    Uint(u64),
    Float(f64),
    Text(Text),
    List(Vec<Id>),
    Tuple(Box<[Id]>),
    Dict(Vec<(Id, Id)>),
    OrderedDict(Vec<(Id, Id)>),
    Global(Global),
    Storage(Storage),
    Tensor(Box<TensorRef>),
    /// A TorchScript module or an object of an index, with the dict of its attributes once it was set. An object of an
    /// index can have a tuple of them.
    Module(Option<Id>),
    /// Bytes, which a checkpoint cannot hold, and what they are. Those of a numpy array become a tensor.
    Bytes(Bytes, &'static str),
    /// The dtype of numpy's arrays, if a tensor can have it.
    NumpyDtype(Option<Dtype>),
    /// A numpy array before its content was set.
    NumpyArray,
    /// A value that a checkpoint cannot hold, and what makes it.
    Opaque(Text),
}

/// Where bytes of a pickle are.
#[derive(Clone, Debug)]
pub(crate) enum Bytes {
    /// In the pickle, as they are.
    Here(Range<usize>),
    /// Made of a text of the pickle.
    Made(Arc<Source>),
}

impl Bytes {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Here(range) => range.len() as u64,
            Self::Made(source) => source.len(),
        }
    }
}

/// A storage as the pickle refers to it.
#[derive(Clone)]
pub(super) struct Storage {
    pub key: Text,
    pub bytes: u64,
    /// `None` for an untyped storage, whose tensors have dtypes of their own.
    pub elements: Option<Elements>,
}

/// A storage as the pickle declares it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Declared {
    pub(super) elements: Elements,
    pub(crate) bytes: u64,
}

impl Declared {
    /// The size in bytes of what the number of its elements counts.
    pub(crate) fn element_bytes(&self) -> u64 {
        self.elements.size()
    }
}

/// Returns the size in bytes of the storage with a key, if there is one.
pub(crate) type Storages<'a> = dyn Fn(&str) -> Option<u64> + 'a;

const LONG: &str = "an integer of more than 64 bits";

pub(super) struct Machine<'a> {
    pub bytes: &'a [u8],
    pub nodes: Vec<Node>,
    /// `None` if the storages come after the pickle.
    pub storages: Option<&'a Storages<'a>>,
    /// Each storage by its key, as it was declared first.
    pub declared: HashMap<Text, Declared>,
    pub limits: &'a Limits,
    /// Whether the pickle is the index of a folder, whose classes have attributes.
    pub is_index: bool,
    pub at: usize,
    /// The position of the current opcode.
    pub opcode_at: usize,
    pub stack: Vec<Id>,
    /// The content of numpy arrays, by the key that their tensors have for a storage.
    pub arrays: BTreeMap<Text, Bytes>,
    /// The bytes that were made of texts, so that each is made once.
    pub made: HashMap<(Id, bool), Option<Arc<Source>>>,
    /// The heights of the stack at which the marks were set.
    pub marks: Vec<usize>,
    /// By index, which takes at most four bytes in a pickle.
    pub memo: HashMap<u32, Id>,
    /// Descriptions that many nodes share.
    descriptions: RefCell<HashMap<&'static str, Text>>,
    spent: u64,
    tensors: u64,
}

pub(super) type Step<T = ()> = Result<T, Malformed>;

impl<'a> Machine<'a> {
    pub fn new(bytes: &'a [u8], storages: Option<&'a Storages<'a>>, limits: &'a Limits) -> Self {
        Self {
            bytes,
            nodes: Vec::new(),
            storages,
            declared: HashMap::new(),
            limits,
            is_index: false,
            at: 0,
            opcode_at: 0,
            stack: Vec::new(),
            arrays: BTreeMap::new(),
            made: HashMap::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
            descriptions: RefCell::default(),
            spent: 0,
            tensors: 0,
        }
    }

    pub fn refuse(&self, problem: impl Into<String>) -> Malformed {
        Malformed::Pickle { problem: problem.into(), at: self.opcode_at }
    }

    pub fn slice(&mut self, len: usize) -> Step<Range<usize>> {
        let end = self.at.checked_add(len).filter(|&end| end <= self.bytes.len());
        let Some(end) = end else {
            return Err(self.refuse("ends within an opcode"));
        };
        let range = self.at..end;
        self.at = end;
        Ok(range)
    }

    pub fn take<const N: usize>(&mut self) -> Step<[u8; N]> {
        let range = self.slice(N)?;
        self.bytes[range].first_chunk().copied().ok_or_else(|| self.refuse("ends within an opcode"))
    }

    /// Returns the number in the next `width` bytes, at most eight.
    pub fn number(&mut self, width: usize) -> Step<u64> {
        let range = self.slice(width)?;
        let mut wide = [0; 8];
        wide[..width].copy_from_slice(&self.bytes[range]);
        Ok(u64::from_le_bytes(wide))
    }

    /// Returns the next bytes, whose number comes before them in `width` bytes.
    fn block(&mut self, width: usize) -> Step<Range<usize>> {
        // One that no memory holds is longer than the rest of the pickle.
        let len = usize::try_from(self.number(width)?).unwrap_or(usize::MAX);
        self.slice(len)
    }

    /// Counts values against the limit on them.
    pub fn spend(&mut self, values: u64) -> Step {
        self.spent = self.spent.saturating_add(values);
        let limit = self.limits.max_values;
        if self.spent > limit { Err(Malformed::TooMuch { what: "values", limit }) } else { Ok(()) }
    }

    /// Counts a tensor, and the values in its shape and strides.
    pub fn spend_tensor(&mut self, dims: usize) -> Step {
        self.tensors += 1;
        let limit = self.limits.max_tensors;
        if self.tensors > limit {
            return Err(Malformed::TooMuch { what: "tensors", limit });
        }
        self.spend(2 * dims as u64)
    }

    pub fn push_id(&mut self, id: Id) -> Step {
        self.spend(1)?;
        self.stack.push(id);
        Ok(())
    }

    pub fn push(&mut self, node: Node) -> Step {
        let id = self.nodes.len();
        self.push_id(id)?;
        self.nodes.push(node);
        Ok(())
    }

    /// Returns where the topmost `count` values start. Values below the last mark are out of reach.
    pub fn above(&self, count: usize) -> Step<usize> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let start = self.stack.len().checked_sub(count).filter(|&start| start >= floor);
        start.ok_or_else(|| self.refuse("takes a value where there is none"))
    }

    pub fn pop(&mut self) -> Step<Id> {
        let start = self.above(1)?;
        let id = self.stack[start];
        self.stack.truncate(start);
        Ok(id)
    }

    pub fn top(&self) -> Step<Id> {
        Ok(self.stack[self.above(1)?])
    }

    /// Removes the last mark and everything above it, and returns the values.
    pub fn pop_mark(&mut self) -> Step<Vec<Id>> {
        match self.marks.pop() {
            Some(mark) => Ok(self.stack.split_off(mark)),
            None => Err(self.refuse("takes a mark where there is none")),
        }
    }

    /// Sets a mark, which counts as a value.
    pub fn mark(&mut self) -> Step {
        self.spend(1)?;
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// Makes a node of a value that a checkpoint cannot hold.
    pub fn opaque(&self, what: &'static str) -> Node {
        Node::Opaque(self.description(what))
    }

    /// Returns a description that many values share.
    pub fn description(&self, what: &'static str) -> Text {
        let mut descriptions = self.descriptions.borrow_mut();
        descriptions.entry(what).or_insert_with(|| what.into()).clone()
    }

    /// Returns the text of a node, if it is one.
    pub fn text(&self, id: Id) -> Option<&Text> {
        match &self.nodes[id] {
            Node::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Memorizes the topmost value.
    pub fn put(&mut self, index: u64) -> Step {
        self.memo.insert(index as u32, self.top()?);
        let limit = self.limits.max_values;
        if self.memo.len() as u64 > limit {
            return Err(Malformed::TooMuch { what: "memorized values", limit });
        }
        Ok(())
    }

    /// Recalls a memorized value.
    pub fn get(&mut self, index: u64) -> Step {
        match self.memo.get(&(index as u32)) {
            Some(&id) => self.push_id(id),
            None => Err(self.refuse(format!("recalls {index}, which it has not memorized"))),
        }
    }

    pub fn tuple(&mut self, len: usize) -> Step {
        let start = self.above(len)?;
        let items = self.stack.split_off(start);
        self.push(Node::Tuple(items.into()))
    }

    /// Pushes the next string of Python 2, whose length takes `width` bytes: a text or bytes.
    pub fn string_of(&mut self, width: usize) -> Step {
        let range = self.block(width)?;
        let node = match std::str::from_utf8(&self.bytes[range.clone()]) {
            Ok(text) => Node::Text(text.into()),
            Err(_) => Node::Bytes(Bytes::Here(range), "a string that is not UTF-8"),
        };
        self.push(node)
    }

    /// Pushes the next text, whose length takes `width` bytes.
    pub fn text_of(&mut self, width: usize) -> Step {
        let range = self.block(width)?;
        // Python also has strings with halves of surrogate pairs, such as names of files that are not UTF-8.
        let node = match std::str::from_utf8(&self.bytes[range]) {
            Ok(text) => Node::Text(text.into()),
            Err(_) => self.opaque("a string that is not UTF-8"),
        };
        self.push(node)
    }

    /// Pushes the next bytes, whose number takes `width` bytes.
    pub fn bytes_of(&mut self, width: usize, what: &'static str) -> Step {
        let range = self.block(width)?;
        self.push(Node::Bytes(Bytes::Here(range), what))
    }

    /// Pushes a value that a checkpoint cannot hold.
    pub fn push_opaque(&mut self, what: &'static str) -> Step {
        let node = self.opaque(what);
        self.push(node)
    }

    /// Pushes the next integer, whose length takes `width` bytes.
    pub fn long(&mut self, width: usize) -> Step {
        let range = self.block(width)?;
        let given = &self.bytes[range];
        let negative = given.last().is_some_and(|byte| byte & 0x80 != 0);
        let mut bytes = if negative { [0xff; 16] } else { [0; 16] };
        let Some(places) = bytes.get_mut(..given.len()) else {
            return self.push_opaque(LONG);
        };
        places.copy_from_slice(given);
        let value = i128::from_le_bytes(bytes);
        let node = match (i64::try_from(value), u64::try_from(value)) {
            (Ok(value), _) => Node::Int(value),
            (_, Ok(value)) => Node::Uint(value),
            _ => self.opaque(LONG),
        };
        self.push(node)
    }

    pub fn append(&mut self, items: &[Id]) -> Step {
        let list = self.top()?;
        match &mut self.nodes[list] {
            Node::List(values) => values.extend_from_slice(items),
            Node::Opaque(_) => {}
            _ => return Err(self.refuse("appends to what is not a list")),
        }
        Ok(())
    }

    /// `ADDITEMS`: adds items to a set, which a checkpoint cannot hold.
    pub fn add_items(&mut self) -> Step {
        let set = self.top()?;
        match self.nodes[set] {
            Node::Opaque(_) => Ok(()),
            _ => Err(self.refuse("adds items to what is not a set")),
        }
    }

    pub fn set_items(&mut self, items: &[Id]) -> Step {
        let dict = self.top()?;
        let (pairs, rest) = items.as_chunks::<2>();
        match &mut self.nodes[dict] {
            Node::Dict(entries) | Node::OrderedDict(entries) if rest.is_empty() => {
                entries.extend(pairs.iter().map(|&[key, value]| (key, value)));
            }
            Node::Opaque(_) if rest.is_empty() => {}
            _ => {
                return Err(
                    self.refuse("sets items of what is not a dict, or a key without a value")
                );
            }
        }
        Ok(())
    }
}
