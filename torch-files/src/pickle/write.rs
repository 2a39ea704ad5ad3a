//! Writing a pickle that PyTorch reads with `weights_only=True`: protocol 2, with the opcodes that `torch.save` uses.
//!
//! Only the names of functions and classes are memorized. What would make a pickle unreadable later is refused, so that
//! it need not be read again before it is saved.

use std::collections::HashMap;

use super::op;
use crate::error::Malformed;
use crate::limits::Limits;
use crate::value::{Items, Key, TensorRef, Value, check_keys};

/// Why a value cannot be written.
pub(super) type Problem = String;

pub(super) struct Pickler<'a> {
    pub(super) out: Vec<u8>,
    /// How many values the pickle makes when it is read, as `Machine::spend` counts them.
    values: u64,
    storages: HashMap<&'a str, u64>,
    /// The class that each storage was declared with. PyTorch would give all tensors of a storage the dtype that it was
    /// first declared with.
    classes: HashMap<&'a str, &'static str>,
    /// The names that are in the memo, by their index there.
    memo: Vec<(&'static str, &'static str)>,
}

/// Writes a pickle of a value. `storages` has the key and the size in bytes of each storage. Returns an error if it
/// could not be read again within the limits.
pub(crate) fn write(
    root: &Value,
    storages: &[(String, u64)],
    limits: &Limits,
) -> Result<Vec<u8>, Problem> {
    Ok(write_counted(root, storages, limits)?.0)
}

/// Does the same as [`write`], and returns how many values the pickle makes as well.
pub(crate) fn write_counted(
    root: &Value,
    storages: &[(String, u64)],
    limits: &Limits,
) -> Result<(Vec<u8>, u64), Problem> {
    let mut pickler = Pickler::new(storages);
    pickler.value(root, limits.max_depth)?;
    let values = pickler.values;
    Ok((pickler.finish(limits)?, values))
}

impl<'a> Pickler<'a> {
    /// Begins a pickle of a value with these storages.
    pub(super) fn new(storages: &'a [(String, u64)]) -> Self {
        Self {
            out: vec![op::PROTO, 2],
            values: 0,
            storages: storages.iter().map(|(key, bytes)| (key.as_str(), *bytes)).collect(),
            classes: HashMap::new(),
            memo: Vec::new(),
        }
    }

    /// Ends the pickle. Returns an error if it could not be read again within the limits.
    pub(super) fn finish(self, limits: &Limits) -> Result<Vec<u8>, Problem> {
        let Self { mut out, values, .. } = self;
        out.push(op::STOP);
        let Limits { max_pickle_bytes, max_values, .. } = *limits;
        if out.len() as u64 > max_pickle_bytes {
            return Err(format!("more than {max_pickle_bytes} bytes of names and values"));
        }
        if values > max_values {
            return Err(Malformed::TooMuch { what: "values", limit: max_values }.to_string());
        }
        Ok(out)
    }

    pub(super) fn opcode(&mut self, opcode: u8, argument: &[u8]) {
        self.out.push(opcode);
        self.out.extend_from_slice(argument);
    }

    /// Writes an opcode that pushes a value or a mark.
    pub(super) fn push(&mut self, opcode: u8, argument: &[u8]) {
        self.values += 1;
        self.opcode(opcode, argument);
    }

    /// Writes a value. `depth` is how many more containers may be nested.
    fn value(&mut self, value: &'a Value, depth: usize) -> Result<(), Problem> {
        let inside = || depth.checked_sub(1).ok_or("the values are nested too deep");
        match value {
            Value::None => self.push(op::NONE, &[]),
            Value::Bool(value) => self.bool(*value),
            Value::Int(value) => self.int(*value),
            // Without a ninth byte the number would be negative.
            Value::Uint(value) => {
                self.push(op::LONG1, &[9]);
                self.out.extend_from_slice(&value.to_le_bytes());
                self.out.push(0);
            }
            Value::Float(value) => self.push(op::BINFLOAT, &value.to_be_bytes()),
            Value::Text(text) => self.text(text)?,
            Value::List(items) => {
                let depth = inside()?;
                self.push(op::EMPTY_LIST, &[]);
                self.push(op::MARK, &[]);
                items.iter().try_for_each(|item| self.value(item, depth))?;
                self.opcode(op::APPENDS, &[]);
            }
            Value::Tuple(items) => {
                let depth = inside()?;
                self.push(op::MARK, &[]);
                items.iter().try_for_each(|item| self.value(item, depth))?;
                self.push(op::TUPLE, &[]);
            }
            Value::Map(fields) => {
                let depth = inside()?;
                self.dict(|pickler| {
                    fields.iter().try_for_each(|(key, item)| {
                        pickler.text(key)?;
                        pickler.value(item, depth)
                    })
                })?;
            }
            Value::Dict(items) => {
                let depth = inside()?;
                check_items(items)?;
                self.dict(|pickler| {
                    items.iter().try_for_each(|(key, item)| {
                        pickler.value(key, depth)?;
                        pickler.value(item, depth)
                    })
                })?;
            }
            Value::Tensor(tensor) => self.tensor(tensor)?,
            Value::Opaque(what) => return Err(format!("{what} cannot be written")),
        }
        Ok(())
    }

    pub(super) fn dict(
        &mut self,
        items: impl FnOnce(&mut Self) -> Result<(), Problem>,
    ) -> Result<(), Problem> {
        self.push(op::EMPTY_DICT, &[]);
        self.push(op::MARK, &[]);
        items(self)?;
        self.opcode(op::SETITEMS, &[]);
        Ok(())
    }

    pub(super) fn bool(&mut self, value: bool) {
        self.push(if value { op::NEWTRUE } else { op::NEWFALSE }, &[]);
    }

    pub(super) fn int(&mut self, value: i64) {
        if let Ok(value) = u8::try_from(value) {
            self.push(op::BININT1, &[value]);
        } else if let Ok(value) = u16::try_from(value) {
            self.push(op::BININT2, &value.to_le_bytes());
        } else if let Ok(value) = i32::try_from(value) {
            self.push(op::BININT, &value.to_le_bytes());
        } else {
            self.push(op::LONG1, &[8]);
            self.out.extend_from_slice(&value.to_le_bytes());
        }
    }

    fn count(&mut self, count: u64) -> Result<(), Problem> {
        self.int(i64::try_from(count).map_err(|_| "a storage is too big")?);
        Ok(())
    }

    pub(super) fn text(&mut self, text: &str) -> Result<(), Problem> {
        let len = u32::try_from(text.len()).map_err(|_| "a string is too long")?;
        self.push(op::BINUNICODE, &len.to_le_bytes());
        self.out.extend_from_slice(text.as_bytes());
        Ok(())
    }

    /// Writes the sizes or the strides of a tensor, which count once more for the tensor itself.
    pub(super) fn ints(&mut self, values: &[i64]) {
        self.values += values.len() as u64;
        self.push(op::MARK, &[]);
        values.iter().for_each(|&value| self.int(value));
        self.push(op::TUPLE, &[]);
    }

    /// Writes a class or a function.
    pub(super) fn global(&mut self, module: &'static str, name: &'static str) {
        let known = self.memo.iter().position(|&known| known == (module, name));
        // There are far fewer names than a byte can count.
        if let Some(index) = known.and_then(|index| u8::try_from(index).ok()) {
            self.push(op::BINGET, &[index]);
            return;
        }
        self.push(op::GLOBAL, format!("{module}\n{name}\n").as_bytes());
        if let Ok(index) = u8::try_from(self.memo.len()) {
            self.opcode(op::BINPUT, &[index]);
            self.memo.push((module, name));
        }
    }

    /// Writes a tensor like `Tensor.__reduce_ex__`: a dtype without a storage class of its own gets an untyped storage.
    fn tensor(&mut self, tensor: &'a TensorRef) -> Result<(), Problem> {
        let key = &*tensor.storage;
        let refuse = |problem: &str| format!("a tensor in the storage {key} {problem}");
        let class = tensor.dtype.storage();
        let Some(&bytes) = self.storages.get(key) else {
            return Err(refuse("has no data"));
        };
        let element = class.map_or(1, |_| tensor.dtype.size() as u64);
        if bytes % element != 0 {
            return Err(refuse("has a part of an element at its end"));
        }
        tensor.check(bytes).map_err(refuse)?;
        if tensor.requires_grad && !tensor.dtype.is_differentiable() {
            return Err(refuse("is of a dtype that cannot require gradients"));
        }
        let typed = class.unwrap_or("UntypedStorage");
        if *self.classes.entry(key).or_insert(typed) != typed {
            return Err(refuse("does not have the dtype of the storage's other tensors"));
        }
        let function = if class.is_some() { "_rebuild_tensor_v2" } else { "_rebuild_tensor_v3" };
        self.global("torch._utils", function);
        self.push(op::MARK, &[]);
        self.push(op::MARK, &[]);
        self.text("storage")?;
        self.global(if class.is_some() { "torch" } else { "torch.storage" }, typed);
        self.text(key)?;
        self.text("cpu")?;
        self.count(bytes / element)?;
        self.push(op::TUPLE, &[]);
        self.push(op::BINPERSID, &[]);
        self.count(tensor.offset)?;
        self.ints(&tensor.shape);
        self.ints(&tensor.strides);
        self.bool(tensor.requires_grad);
        // No hooks.
        self.global("collections", "OrderedDict");
        self.push(op::EMPTY_TUPLE, &[]);
        self.push(op::REDUCE, &[]);
        if class.is_none() {
            self.global("torch", tensor.dtype.name());
        }
        self.push(op::TUPLE, &[]);
        self.push(op::REDUCE, &[]);
        Ok(())
    }
}

/// Returns an error for a dict with keys that could not be read again.
fn check_items(items: &Items) -> Result<(), Problem> {
    if items.iter().any(|(key, _)| Key::of(key).is_none()) {
        return Err("a key is not a string, a number or None".to_owned());
    }
    check_keys(items).map_err(|problem| format!("the state {problem}"))
}
