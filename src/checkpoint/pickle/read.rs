//! Reading a pickle. Nothing is executed: the opcodes can only build the nodes of an arena.

use std::collections::BTreeMap;
use std::ops::Range;

use super::arena::{Id, Machine, Node, Step, What};
use super::globals::Global;
use super::opcodes as op;
use super::{Declared, Limits, Storages, Value, globals, tree};
use crate::checkpoint::malformed::Malformed;

/// Reads a pickle.
pub(crate) fn read(bytes: &[u8], storages: &Storages<'_>, limits: &Limits) -> Step<Value> {
    let mut machine = Machine::new(bytes, Some(storages), limits);
    let root = machine.run()?;
    if machine.at != machine.bytes.len() {
        return Err(machine.refuse("ends before the end of its record"));
    }
    tree::value(&machine, root)
}

/// A pickle that is followed by something else.
pub(crate) struct First {
    pub(crate) root: Value,
    /// Its length in bytes.
    pub(crate) len: usize,
    /// The storages that it declares, by key. The caller must compare them with what follows.
    pub(crate) storages: BTreeMap<String, Declared>,
}

/// Reads the pickle at the beginning of `bytes`.
pub(crate) fn read_first(bytes: &[u8], limits: &Limits) -> Step<First> {
    let mut machine = Machine::new(bytes, None, limits);
    let root = machine.run()?;
    let root = tree::value(&machine, root)?;
    let key = |key: &[u8]| String::from_utf8_lossy(key).into_owned();
    let storages = machine.declared.iter().map(|(name, declared)| (key(name), *declared)).collect();
    Ok(First { root, len: machine.at, storages })
}

impl<'a> Machine<'a> {
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
    fn global(&mut self, module: &Range<usize>, name: &Range<usize>) -> Step {
        let what = self.named(module, name);
        let text = |range: &Range<usize>| std::str::from_utf8(&self.bytes[range.clone()]);
        // Names are compared at each use, and a pickle could use a long one again and again.
        let known = match what {
            What::Known(_) => None,
            What::Named(..) => match (text(module), text(name)) {
                (Ok(module), Ok(name)) => globals::find(module, name),
                _ => return Err(self.refuse("has a name that is not UTF-8")),
            },
        };
        self.push(Node::Global(known.unwrap_or(Global::Other(what))))
    }

    fn stack_global(&mut self) -> Step {
        let (name, module) = (self.pop()?, self.pop()?);
        match (&self.nodes[module], &self.nodes[name]) {
            (Node::Text(module), Node::Text(name)) => {
                let (module, name) = (module.clone(), name.clone());
                self.global(&module, &name)
            }
            _ => Err(self.refuse("has a name that is not a string")),
        }
    }

    fn memoize(&mut self) -> Step {
        match u32::try_from(self.memo.len()) {
            Ok(index) => self.put(index),
            Err(_) => Err(self.refuse("memorizes too much")),
        }
    }

    /// Executes the next opcode. Returns whether it was `STOP`.
    fn step(&mut self) -> Step<bool> {
        self.opcode_at = self.at;
        match self.byte()? {
            op::STOP => return Ok(true),
            op::FRAME => {
                let len = u64::from_le_bytes(self.take()?);
                if len > (self.bytes.len() - self.at) as u64 {
                    return Err(self.refuse("has a frame that is longer than the rest"));
                }
            }
            op::MARK => self.mark()?,
            op::BINPUT => {
                let index = self.byte()?;
                self.put(index.into())?;
            }
            op::LONG_BINPUT => {
                let index = self.u32()?;
                self.put(index)?;
            }
            op::MEMOIZE => self.memoize()?,
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
            op::POP => {
                self.pop()?;
            }
            op::POP_MARK => {
                self.pop_mark()?;
            }
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

    /// Executes an opcode that only pushes a value.
    fn push_opcode(&mut self, opcode: u8) -> Step {
        match opcode {
            op::NONE => self.push(Node::None),
            op::NEWTRUE => self.push(Node::Bool(true)),
            op::NEWFALSE => self.push(Node::Bool(false)),
            op::BININT1 => {
                let value = self.byte()?;
                self.push(Node::Int(value.into()))
            }
            op::BININT2 => {
                let value = u16::from_le_bytes(self.take()?);
                self.push(Node::Int(value.into()))
            }
            op::BININT => {
                let value = i32::from_le_bytes(self.take()?);
                self.push(Node::Int(value.into()))
            }
            op::LONG1 => {
                let len = self.byte()?;
                self.long(len.into())
            }
            op::LONG4 => {
                let len = self.u32()?;
                self.long(len as usize)
            }
            op::BINFLOAT => {
                let value = f64::from_be_bytes(self.take()?);
                self.push(Node::Float(value))
            }
            op::SHORT_BINUNICODE => {
                let len = self.byte()?;
                self.text_of(len.into())
            }
            op::BINUNICODE => {
                let len = self.u32()?;
                self.text_of(len as usize)
            }
            op::BINUNICODE8 => {
                let len = self.u64()?;
                self.text_of(len)
            }
            // Strings of Python 2.
            op::SHORT_BINSTRING => {
                let len = self.byte()?;
                self.text_of(len.into())
            }
            op::BINSTRING => {
                let len = self.u32()?;
                self.text_of(len as usize)
            }
            op::SHORT_BINBYTES => {
                let len = self.byte()?;
                self.opaque_of(len.into(), "bytes")
            }
            op::BINBYTES => {
                let len = self.u32()?;
                self.opaque_of(len as usize, "bytes")
            }
            op::BINBYTES8 => {
                let len = self.u64()?;
                self.opaque_of(len, "bytes")
            }
            op::BYTEARRAY8 => {
                let len = self.u64()?;
                self.opaque_of(len, "a bytearray")
            }
            op::EMPTY_SET => self.opaque_of(0, "a set"),
            op::FROZENSET => {
                self.pop_mark()?;
                self.opaque_of(0, "a frozenset")
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
            op::GLOBAL => {
                let (module, name) = (self.line()?, self.line()?);
                self.global(&module, &name)
            }
            op::STACK_GLOBAL => self.stack_global(),
            op::BINGET => {
                let index = self.byte()?;
                self.get(index.into())
            }
            op::LONG_BINGET => {
                let index = self.u32()?;
                self.get(index)
            }
            opcode => Err(Malformed::Opcode { opcode, at: self.opcode_at }),
        }
    }
}
