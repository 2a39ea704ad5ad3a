//! The opcodes that build plain values.
//!
//! A list and a dict are built in two steps, empty first and then filled, so that a pickle can memorize them before
//! their items: such a container may contain itself, which `tree` refuses.

use super::arena::{Id, Machine, Node, Step, What};

const LONG: What = What::Known("an integer of more than 64 bits");

impl Machine<'_> {
    pub fn tuple(&mut self, len: usize) -> Step {
        let start = self.above(len)?;
        let items = self.stack.split_off(start);
        self.push(Node::Tuple(items.into()))
    }

    pub fn text_of(&mut self, len: usize) -> Step {
        let range = self.slice(len)?;
        // Python also has strings with halves of surrogate pairs, such as names of files that are not UTF-8.
        match std::str::from_utf8(&self.bytes[range.clone()]) {
            Ok(_) => self.push(Node::Text(range)),
            Err(_) => self.push(Node::Opaque(What::Known("a string that is not UTF-8"))),
        }
    }

    /// Skips the `len` bytes of a value that a checkpoint cannot hold.
    pub fn opaque_of(&mut self, len: usize, what: &'static str) -> Step {
        let _bytes = self.slice(len)?;
        self.push(Node::Opaque(What::Known(what)))
    }

    pub fn long(&mut self, len: usize) -> Step {
        let range = self.slice(len)?;
        let given = &self.bytes[range];
        let negative = given.last().is_some_and(|byte| byte & 0x80 != 0);
        let mut bytes = if negative { [0xff; 16] } else { [0; 16] };
        let Some(places) = bytes.get_mut(..given.len()) else {
            return self.push(Node::Opaque(LONG));
        };
        places.copy_from_slice(given);
        let value = i128::from_le_bytes(bytes);
        self.push(match (i64::try_from(value), u64::try_from(value)) {
            (Ok(value), _) => Node::Int(value),
            (_, Ok(value)) => Node::Uint(value),
            _ => Node::Opaque(LONG),
        })
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
