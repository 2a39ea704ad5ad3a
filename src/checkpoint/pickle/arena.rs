//! The state of the pickle machine: an arena of nodes, a stack with marks, and a memo.
//!
//! A node is stored once and referred to by its index, as often as the pickle recalls it from the memo. Every value
//! that is pushed counts against [`Limits`], and a value below the last mark cannot be taken.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;

use tch::Kind;

use super::globals::Global;
use super::{Declared, Limits, Storages, TensorRef};
use crate::checkpoint::malformed::Malformed;
use crate::error::shown;

/// The index of a node in the arena. A value that a pickle refers to several times is stored once.
pub(super) type Id = usize;

/// A value that the pickle has built.
pub(super) enum Node {
    None,
    Bool(bool),
    Int(i64),
    /// Only for numbers that an `i64` cannot hold.
    Uint(u64),
    Float(f64),
    /// A range of the pickle that is valid UTF-8.
    Text(Range<usize>),
    List(Vec<Id>),
    Tuple(Box<[Id]>),
    Dict(Vec<(Id, Id)>),
    OrderedDict(Vec<(Id, Id)>),
    Global(Global),
    Device(String),
    Storage(Storage),
    Tensor(Box<TensorRef>),
    /// A TorchScript module, with the dict of its attributes once it was set.
    Module(Option<Id>),
    /// A value that a checkpoint cannot hold.
    Opaque(What),
}

/// What a value is that a checkpoint cannot hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum What {
    Known(&'static str),
    /// Something of a class, or from a function, that this crate does not have: the places of its module and its name.
    Named(Place, Place),
}

/// The place of a short text in the pickle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Place {
    start: u32,
    len: u16,
}

impl Place {
    /// Returns `None` for a text that is longer than names are.
    fn of(range: &Range<usize>) -> Option<Self> {
        let len = u16::try_from(range.len()).ok().filter(|&len| len <= MAX_NAME_BYTES)?;
        Some(Self { start: u32::try_from(range.start).ok()?, len })
    }

    fn range(self) -> Range<usize> {
        let start = self.start as usize;
        start..start + usize::from(self.len)
    }
}

/// The longest name of a class or a function.
const MAX_NAME_BYTES: u16 = 512;

/// A storage as the pickle declares it.
#[derive(Clone)]
pub(super) struct Storage {
    pub key: Range<usize>,
    pub bytes: u64,
    /// `None` for an untyped storage, whose tensors have dtypes of their own.
    pub kind: Option<Kind>,
}

pub(super) struct Machine<'a> {
    pub bytes: &'a [u8],
    pub nodes: Vec<Node>,
    /// `None` if the storages come after the pickle.
    pub storages: Option<&'a Storages<'a>>,
    /// Each storage by its key, as it was declared first.
    pub declared: HashMap<&'a [u8], Declared>,
    pub limits: &'a Limits,
    pub at: usize,
    /// The position of the current opcode.
    pub opcode_at: usize,
    pub stack: Vec<Id>,
    /// The heights of the stack at which the marks were set.
    pub marks: Vec<usize>,
    pub memo: HashMap<u32, Id>,
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
            at: 0,
            opcode_at: 0,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
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

    pub fn byte(&mut self) -> Step<u8> {
        Ok(self.take::<1>()?[0])
    }

    pub fn u32(&mut self) -> Step<u32> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    /// Returns a length of eight bytes. One that no memory holds is longer than the rest of the pickle.
    pub fn u64(&mut self) -> Step<usize> {
        Ok(usize::try_from(u64::from_le_bytes(self.take()?)).unwrap_or(usize::MAX))
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

    /// Describes what is made by a class or a function of this name.
    pub fn named(&self, module: &Range<usize>, name: &Range<usize>) -> What {
        match (Place::of(module), Place::of(name)) {
            (Some(module), Some(name)) => What::Named(module, name),
            _ => What::Known("an object of a class with a long name"),
        }
    }

    /// Describes a value that a checkpoint cannot hold.
    pub fn describe(&self, what: What) -> Cow<'static, str> {
        let text = |place: Place| {
            String::from_utf8_lossy(self.bytes.get(place.range()).unwrap_or_default())
        };
        match what {
            What::Known(what) => what.into(),
            What::Named(module, name) => shown(&format!("{}.{}", text(module), text(name))).into(),
        }
    }

    /// Returns the text of a node, if it is one.
    pub fn text(&self, id: Id) -> Option<&'a str> {
        match &self.nodes[id] {
            Node::Text(range) => std::str::from_utf8(self.bytes.get(range.clone())?).ok(),
            _ => None,
        }
    }

    pub fn put(&mut self, index: u32) -> Step {
        self.memo.insert(index, self.top()?);
        let limit = self.limits.max_values;
        if self.memo.len() as u64 > limit {
            return Err(Malformed::TooMuch { what: "memorized values", limit });
        }
        Ok(())
    }

    pub fn get(&mut self, index: u32) -> Step {
        match self.memo.get(&index) {
            Some(&id) => self.push_id(id),
            None => Err(self.refuse(format!("recalls {index}, which it has not memorized"))),
        }
    }
}
