//! Reading a pickle. Nothing is executed: the opcodes can only build the nodes of an arena.

use super::arena::{Id, Machine, Node, Step};
use super::opcodes as op;
use super::{Limits, Storages, Value, globals, tree};
use crate::checkpoint::malformed::Malformed;
use crate::error::shown;

/// The longest name of a class or a function.
const MAX_NAME_BYTES: usize = 512;

/// Reads a pickle.
pub(crate) fn read(bytes: &[u8], storages: &Storages<'_>, limits: &Limits) -> Step<Value> {
    let mut machine = Machine::new(bytes, storages, limits);
    machine.proto()?;
    while !machine.step()? {}
    let root = machine.end()?;
    tree::value(&machine, root)
}

impl<'a> Machine<'a> {
    fn proto(&mut self) -> Step {
        let [opcode, version] = self.take()?;
        if opcode != op::PROTO || !(2..=5).contains(&version) {
            return Err(self.refuse("is not of protocol 2 to 5"));
        }
        Ok(())
    }

    fn end(&mut self) -> Step<Id> {
        if self.at != self.bytes.len() {
            return Err(self.refuse("ends before the end of its record"));
        }
        let root = self.pop()?;
        if !self.stack.is_empty() || !self.marks.is_empty() {
            return Err(self.refuse("ends with more than one value"));
        }
        Ok(root)
    }

    fn line(&mut self) -> Step<&'a str> {
        let rest = &self.bytes[self.at..];
        let Some(len) = rest.iter().position(|&byte| byte == b'\n') else {
            return Err(self.refuse("ends within an opcode"));
        };
        self.at += len + 1;
        std::str::from_utf8(&rest[..len]).map_err(|_| self.refuse("has a name that is not UTF-8"))
    }

    fn global(&mut self, module: &str, name: &str) -> Step {
        // Names are compared at each use, and a pickle could use a long one again and again.
        let short = module.len().max(name.len()) <= MAX_NAME_BYTES;
        match globals::find(module, name).filter(|_| short) {
            Some(global) => self.push(Node::Global(global)),
            None => Err(Malformed::Global {
                name: shown(&format!("{module}.{name}")),
                at: self.opcode_at,
            }),
        }
    }

    fn stack_global(&mut self) -> Step {
        let (name, module) = (self.pop()?, self.pop()?);
        let is_short = |&id: &Id| match &self.nodes[id] {
            Node::Text(range) => range.len() <= MAX_NAME_BYTES,
            _ => false,
        };
        if ![module, name].iter().all(is_short) {
            return Err(self.refuse("has a name that is not a short string"));
        }
        match (self.text(module), self.text(name)) {
            (Some(module), Some(name)) => self.global(module, name),
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
            op::REDUCE => self.reduce()?,
            op::NEWOBJ => self.new_object()?,
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
            op::LONG1 => self.long1(),
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
                self.global(module, name)
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
