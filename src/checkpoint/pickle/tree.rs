//! Converts the arena of a pickle to values.
//!
//! A node of the arena can be in many places of the tree, so that a small pickle could become a huge value. Values,
//! text and expanded tensors are therefore counted once more here, for each place, before they are allocated.

use super::globals::{self, Global};
use super::machine::{Bytes, Id, Machine, Node, Step};
use crate::checkpoint::limits::Limits;
use crate::checkpoint::malformed::Malformed;
use crate::checkpoint::value::{TensorRef, Text, Value, check_keys};

/// How many values a tensor counts as, besides those of its shape and strides. It is less than what a pickle spends on
/// making one.
const TENSOR: usize = 12;

/// What remains of the limits. The arena holds each node once, but a node can be in many places of the tree.
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
        self.spend(TENSOR + 2 * tensor.size.len())?;
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
            Node::Global(Global::Dtype(kind)) => {
                let name = globals::names(kind).map_or("", |(name, _)| name);
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
