//! The opcodes that build plain values.
//!
//! A list and a dict are built in two steps, empty first and then filled, so that a pickle can memorize them before
//! their items: such a container may contain itself, which `tree` refuses.

use super::arena::{Id, Machine, Node, Step};

impl Machine<'_> {
    pub fn tuple(&mut self, len: usize) -> Step {
        let start = self.above(len)?;
        let items = self.stack.split_off(start);
        self.push(Node::Tuple(items.into()))
    }

    pub fn text_of(&mut self, len: usize) -> Step {
        let range = self.slice(len)?;
        if std::str::from_utf8(&self.bytes[range.clone()]).is_err() {
            return Err(self.refuse("has a string that is not UTF-8"));
        }
        self.push(Node::Text(range))
    }

    pub fn long1(&mut self) -> Step {
        let len = self.byte()?;
        let range = self.slice(len.into())?;
        let given = &self.bytes[range];
        let negative = given.last().is_some_and(|byte| byte & 0x80 != 0);
        let mut bytes = if negative { [0xff; 16] } else { [0; 16] };
        let Some(places) = bytes.get_mut(..given.len()) else {
            return self.push(Node::Opaque("an integer of more than 64 bits"));
        };
        places.copy_from_slice(given);
        let value = i128::from_le_bytes(bytes);
        self.push(match (i64::try_from(value), u64::try_from(value)) {
            (Ok(value), _) => Node::Int(value),
            (_, Ok(value)) => Node::Uint(value),
            _ => Node::Opaque("an integer of more than 64 bits"),
        })
    }

    pub fn append(&mut self, items: &[Id]) -> Step {
        let list = self.top()?;
        match &mut self.nodes[list] {
            Node::List(values) => values.extend_from_slice(items),
            _ => return Err(self.refuse("appends to what is not a list")),
        }
        Ok(())
    }

    pub fn set_items(&mut self, items: &[Id]) -> Step {
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
}
