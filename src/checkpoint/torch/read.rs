//! Reading a pickle. Nothing is executed: what the opcodes may build are the nodes of an arena.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use super::machine::{Id, Machine, Node, Step};
use super::opcodes as op;
use super::{Limits, Malformed, Record, Value, globals, shown, tree};

/// Reads a pickle.
pub(super) fn read(
    bytes: &[u8],
    storages: &BTreeMap<String, Record>,
    limits: &Limits,
) -> Step<Value> {
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

    fn tuple(&mut self, len: usize) -> Step {
        let start = self.above(len)?;
        let items = self.stack.split_off(start);
        self.push(Node::Tuple(items.into()))
    }

    fn text_of(&mut self, len: usize) -> Step {
        let range = self.slice(len)?;
        if std::str::from_utf8(&self.bytes[range.clone()]).is_err() {
            return Err(self.refuse("has a string that is not UTF-8"));
        }
        self.push(Node::Text(range))
    }

    fn long1(&mut self) -> Step {
        let len = self.byte()?;
        if len > 8 {
            return Err(self.refuse("has an integer of more than 64 bits"));
        }
        let range = self.slice(len.into())?;
        let given = &self.bytes[range];
        let negative = given.last().is_some_and(|byte| byte & 0x80 != 0);
        let mut bytes = if negative { [0xff; 8] } else { [0; 8] };
        bytes[..given.len()].copy_from_slice(given);
        self.push(Node::Int(i64::from_le_bytes(bytes)))
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
        match globals::find(module, name) {
            Some(global) => self.push(Node::Global(global)),
            None => Err(Malformed::Global {
                name: shown(&format!("{module}.{name}")),
                at: self.opcode_at,
            }),
        }
    }

    fn stack_global(&mut self) -> Step {
        let (name, module) = (self.pop()?, self.pop()?);
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

    fn append(&mut self, items: &[Id]) -> Step {
        let list = self.top()?;
        match &mut self.nodes[list] {
            Node::List(values) => values.extend_from_slice(items),
            _ => return Err(self.refuse("appends to what is not a list")),
        }
        Ok(())
    }

    fn set_items(&mut self, items: &[Id]) -> Step {
        let dict = self.top()?;
        let (pairs, rest) = items.as_chunks::<2>();
        match &mut self.nodes[dict] {
            Node::Dict(entries) | Node::OrderedDict(entries) if rest.is_empty() => {
                entries.extend(pairs.iter().map(|&[key, value]| (key, value)));
            }
            _ => {
                return Err(
                    self.refuse("sets items of what is not a dict, or a key without a value")
                );
            }
        }
        Ok(())
    }

    /// Does what the next opcode says. Returns whether that was to stop.
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

    /// The opcodes that only push a value.
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
