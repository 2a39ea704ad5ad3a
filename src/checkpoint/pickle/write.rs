//! Writing a pickle that PyTorch reads with `weights_only=True`: protocol 2, with the opcodes that `torch.save` uses.
//!
//! Only the names of functions and classes are memorized. Before a file is saved, `torch` checks its pickle by reading
//! it again.

use std::collections::HashMap;
use std::io;

use tch::Kind;

use super::value::{Key, check_keys, element_bytes};
use super::{Limits, TensorRef, Value, globals, opcodes as op};
use crate::checkpoint::malformed::invalid;

struct Pickler<'a> {
    out: Vec<u8>,
    storages: HashMap<&'a str, u64>,
    /// The class that each storage was declared with. PyTorch would give all tensors of a storage the dtype that it was
    /// first declared with.
    classes: HashMap<&'a str, &'static str>,
    /// The names that are in the memo, by their index there.
    memo: Vec<(&'static str, &'static str)>,
}

/// Writes a pickle of a value. `storages` has the key and the size in bytes of each storage.
pub(crate) fn write(root: &Value, storages: &[(String, u64)]) -> io::Result<Vec<u8>> {
    let mut pickler = Pickler {
        out: vec![op::PROTO, 2],
        storages: storages.iter().map(|(key, bytes)| (key.as_str(), *bytes)).collect(),
        classes: HashMap::new(),
        memo: Vec::new(),
    };
    pickler.value(root, Limits::default().max_depth)?;
    pickler.out.push(op::STOP);
    Ok(pickler.out)
}

impl<'a> Pickler<'a> {
    fn opcode(&mut self, opcode: u8, argument: &[u8]) {
        self.out.push(opcode);
        self.out.extend_from_slice(argument);
    }

    /// Writes a value. `depth` is how many more containers may be nested.
    fn value(&mut self, value: &'a Value, depth: usize) -> io::Result<()> {
        match value {
            Value::None => self.out.push(op::NONE),
            Value::Bool(value) => self.bool(*value),
            Value::Int(value) => self.int(*value),
            Value::Uint(value) => {
                // Without a ninth byte the number would be negative.
                self.opcode(op::LONG1, &[9]);
                self.out.extend_from_slice(&value.to_le_bytes());
                self.out.push(0);
            }
            Value::Opaque(what) => return Err(invalid(format!("{what} cannot be written"))),
            Value::Float(value) => self.opcode(op::BINFLOAT, &value.to_be_bytes()),
            Value::Str(text) => self.text(text)?,
            Value::Tensor(tensor) => self.tensor(tensor)?,
            Value::List(_) | Value::Tuple(_) | Value::Dict(_) => {
                let depth = depth
                    .checked_sub(1)
                    .ok_or_else(|| invalid("the values are nested too deep"))?;
                self.container(value, depth)?;
            }
        }
        Ok(())
    }

    fn container(&mut self, value: &'a Value, depth: usize) -> io::Result<()> {
        match value {
            Value::List(items) => {
                self.out.push(op::EMPTY_LIST);
                self.out.push(op::MARK);
                items.iter().try_for_each(|item| self.value(item, depth))?;
                self.out.push(op::APPENDS);
            }
            Value::Tuple(items) => {
                self.out.push(op::MARK);
                items.iter().try_for_each(|item| self.value(item, depth))?;
                self.out.push(op::TUPLE);
            }
            Value::Dict(items) => {
                if items.iter().any(|(key, _)| Key::of(key).is_none()) {
                    return Err(invalid("a key is not a string, a number or None"));
                }
                check_keys(items).map_err(|problem| invalid(format!("the state {problem}")))?;
                self.out.push(op::EMPTY_DICT);
                self.out.push(op::MARK);
                for (key, item) in items {
                    self.value(key, depth)?;
                    self.value(item, depth)?;
                }
                self.out.push(op::SETITEMS);
            }
            _ => {}
        }
        Ok(())
    }

    fn bool(&mut self, value: bool) {
        self.out.push(if value { op::NEWTRUE } else { op::NEWFALSE });
    }

    fn int(&mut self, value: i64) {
        if let Ok(value) = u8::try_from(value) {
            self.opcode(op::BININT1, &[value]);
        } else if let Ok(value) = u16::try_from(value) {
            self.opcode(op::BININT2, &value.to_le_bytes());
        } else if let Ok(value) = i32::try_from(value) {
            self.opcode(op::BININT, &value.to_le_bytes());
        } else {
            self.out.push(op::LONG1);
            self.opcode(8, &value.to_le_bytes());
        }
    }

    fn count(&mut self, count: u64) -> io::Result<()> {
        self.int(i64::try_from(count).map_err(|_| invalid("a storage is too big"))?);
        Ok(())
    }

    fn text(&mut self, text: &str) -> io::Result<()> {
        let len = u32::try_from(text.len()).map_err(|_| invalid("a string is too long"))?;
        self.opcode(op::BINUNICODE, &len.to_le_bytes());
        self.out.extend_from_slice(text.as_bytes());
        Ok(())
    }

    fn ints(&mut self, values: &[i64]) {
        self.out.push(op::MARK);
        values.iter().for_each(|&value| self.int(value));
        self.out.push(op::TUPLE);
    }

    /// Writes a class or a function.
    fn global(&mut self, module: &'static str, name: &'static str) {
        let known = self.memo.iter().position(|&known| known == (module, name));
        // There are far fewer names than a byte can count.
        if let Some(index) = known.and_then(|index| u8::try_from(index).ok()) {
            self.opcode(op::BINGET, &[index]);
            return;
        }
        self.opcode(op::GLOBAL, format!("{module}\n{name}\n").as_bytes());
        if let Ok(index) = u8::try_from(self.memo.len()) {
            self.opcode(op::BINPUT, &[index]);
            self.memo.push((module, name));
        }
    }

    /// Writes a tensor like `Tensor.__reduce_ex__`: a dtype without a storage class of its own gets an untyped storage.
    fn tensor(&mut self, tensor: &'a TensorRef) -> io::Result<()> {
        let key = tensor.storage.as_str();
        let refuse = |problem: &str| invalid(format!("a tensor in the storage {key} {problem}"));
        let Some((dtype, class)) = globals::names(tensor.kind) else {
            return Err(refuse("is quantized, which is not supported"));
        };
        let Some(&bytes) = self.storages.get(key) else {
            return Err(refuse("has no data"));
        };
        let element = class.map_or(1, |_| element_bytes(tensor.kind));
        if bytes % element != 0 {
            return Err(refuse("has a part of an element at its end"));
        }
        tensor.check(bytes).map_err(refuse)?;
        if tensor.requires_grad && !differentiable(tensor.kind) {
            return Err(refuse("is of a dtype that cannot require gradients"));
        }
        let typed = class.unwrap_or("UntypedStorage");
        if *self.classes.entry(key).or_insert(typed) != typed {
            return Err(refuse("does not have the dtype of the storage's other tensors"));
        }
        let function = if class.is_some() { "_rebuild_tensor_v2" } else { "_rebuild_tensor_v3" };
        self.global("torch._utils", function);
        self.out.extend([op::MARK, op::MARK]);
        self.text("storage")?;
        self.global(if class.is_some() { "torch" } else { "torch.storage" }, typed);
        self.text(key)?;
        self.text("cpu")?;
        self.count(bytes / element)?;
        self.out.extend([op::TUPLE, op::BINPERSID]);
        self.count(tensor.offset)?;
        self.ints(&tensor.size);
        self.ints(&tensor.stride);
        self.bool(tensor.requires_grad);
        // No hooks.
        self.global("collections", "OrderedDict");
        self.out.extend([op::EMPTY_TUPLE, op::REDUCE]);
        if class.is_none() {
            self.global("torch", dtype);
        }
        self.out.extend([op::TUPLE, op::REDUCE]);
        Ok(())
    }
}

fn differentiable(kind: Kind) -> bool {
    !matches!(kind, Kind::Uint8 | Kind::Int8 | Kind::Int16 | Kind::Int | Kind::Int64 | Kind::Bool)
}
