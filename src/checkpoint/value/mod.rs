//! The values in a checkpoint: those of a program, and the objects that a Python program has saved.
//!
//! A *plain* value has the data model of JSON, plus infinite and NaN floats: `ser` and `de` convert a program's types
//! to and from it, and a safetensors file holds it as `json`. The objects in a file in PyTorch's format can also be
//! tuples, dicts with other keys, tensors, and what this crate knows only by name.

mod ser;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::Kind;

use crate::error::shown;

/// A text. Copies share its memory, because a pickle can refer to one text in a million places.
pub(crate) type Text = Arc<str>;

/// The items of a Python dict.
pub(crate) type Items = [(Value, Value)];

/// A value or a Python object.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Value {
    #[default]
    None,
    Bool(bool),
    Int(i64),
    /// Only for numbers that an `i64` cannot hold.
    Uint(u64),
    /// May be infinite or NaN.
    Float(f64),
    Text(Text),
    List(Vec<Value>),
    /// A dict of plain values: sorted by key, without duplicates; made by [`Value::map`].
    Map(Vec<(Text, Value)>),
    /// A tuple, which is not plain, and neither are the objects below.
    Tuple(Vec<Value>),
    /// Has no two equal keys. In a file of this crate each key is none, a bool, a number or a text.
    Dict(Vec<(Value, Value)>),
    /// Boxed, because the other values are much smaller, and there may be millions of them.
    Tensor(Box<TensorRef>),
    /// A Python object of which only the kind is known. It cannot be written.
    Opaque(Text),
}

/// The error of serde's traits here, which is the cause in the public error for values.
type Error = serde_json::Error;

impl Value {
    /// Serializes a value of the program. The result is plain.
    pub(crate) fn of(value: &(impl Serialize + ?Sized)) -> Result<Self, Error> {
        value.serialize(ser::ToValue)
    }

    /// Deserializes a plain value to a type of the program.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> Result<T, Error> {
        T::deserialize(self)
    }

    /// Makes a map of plain values. Of two equal keys the last one counts.
    pub(crate) fn map(mut fields: Vec<(Text, Self)>) -> Self {
        // Sorted, so that the bytes of a file do not depend on the iteration order of a hash map.
        fields.sort_by(|(one, _), (other, _)| one.cmp(other));
        fields.reverse();
        fields.dedup_by(|(later, _), (kept, _)| later == kept);
        fields.reverse();
        // There may be millions of small maps.
        fields.shrink_to_fit();
        Self::Map(fields)
    }

    /// Makes an object plain: tuples become lists, and keys become texts. Returns it as it was if it contains anything
    /// else, such as a tensor.
    pub(crate) fn into_plain(self) -> Result<Self, Self> {
        if self.can_be_plain() { Ok(self.plain()) } else { Err(self) }
    }

    fn can_be_plain(&self) -> bool {
        match self {
            Self::Tensor(_) | Self::Opaque(_) => false,
            Self::List(items) | Self::Tuple(items) => items.iter().all(Self::can_be_plain),
            Self::Dict(items) => {
                items.iter().all(|(key, item)| Key::of(key).is_some() && item.can_be_plain())
            }
            _ => true,
        }
    }

    fn plain(self) -> Self {
        match self {
            Self::List(items) | Self::Tuple(items) => {
                Self::List(items.into_iter().map(Self::plain).collect())
            }
            Self::Dict(items) => {
                let field = |(key, item): (Self, Self)| Some((key.key_text()?, item.plain()));
                Self::map(items.into_iter().filter_map(field).collect())
            }
            other => other,
        }
    }

    /// Returns a key of a dict as text; `None` for a key that no checkpoint of this crate has.
    pub(crate) fn key_text(&self) -> Option<Text> {
        Some(match self {
            Self::Text(text) => text.clone(),
            Self::Int(number) => number.to_string().into(),
            Self::Uint(number) => number.to_string().into(),
            Self::Float(number) => number.to_string().into(),
            Self::Bool(value) => value.to_string().into(),
            Self::None => "None".into(),
            _ => return None,
        })
    }

    /// Returns the value of a key, if this is a map that has it.
    pub(crate) fn get(&self, key: &str) -> Option<&Self> {
        let Self::Map(fields) = self else {
            return None;
        };
        let found = fields.binary_search_by(|(name, _)| (**name).cmp(key));
        found.ok().map(|at| &fields[at].1)
    }

    /// Returns the value at the end of names of fields and places of items, separated by dots.
    pub(crate) fn within(&self, path: &str) -> Option<&Self> {
        let step = |name: &str| match self {
            Self::List(items) => items.get(name.parse::<usize>().ok()?),
            other => other.get(name),
        };
        let inside = |(at, _)| step(&path[..at])?.within(&path[at + 1..]);
        step(path).or_else(|| path.match_indices('.').find_map(inside))
    }

    /// Returns whether two plain values are equal in Python, where 1 is 1.0.
    pub(crate) fn equals(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::List(here), Self::List(there)) => {
                here.len() == there.len() && here.iter().zip(there).all(|(a, b)| a.equals(b))
            }
            (Self::Map(here), Self::Map(there)) => {
                let same = |((a, x), (b, y)): (&(Text, Self), &(Text, Self))| a == b && x.equals(y);
                here.len() == there.len() && here.iter().zip(there).all(same)
            }
            _ => match (self.number(), other.number()) {
                (Some(here), Some(there)) => here == there,
                _ => self == other,
            },
        }
    }

    fn number(&self) -> Option<f64> {
        match *self {
            Self::Int(number) => Some(number as f64),
            Self::Uint(number) => Some(number as f64),
            Self::Float(number) => Some(number),
            _ => None,
        }
    }

    /// Returns the text, if this is one.
    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        i64::try_from(number).map_or(Self::Uint(number), Self::Int)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

impl From<TensorRef> for Value {
    fn from(tensor: TensorRef) -> Self {
        Self::Tensor(Box::new(tensor))
    }
}

/// Returns the value of a key in the items of a dict.
pub(crate) fn get<'a>(items: &'a Items, key: &str) -> Option<&'a Value> {
    items.iter().find(|(other, _)| other.text() == Some(key)).map(|(_, value)| value)
}

/// A key of a dict. Two keys are equal if they are equal in Python.
#[derive(PartialEq, Eq, Hash)]
pub(crate) enum Key<'a> {
    None,
    Int(i64),
    Uint(u64),
    Float(u64),
    Text(&'a str),
}

impl<'a> Key<'a> {
    /// Returns the key for a value, or `None` if a checkpoint cannot hold such keys.
    pub(crate) fn of(value: &'a Value) -> Option<Self> {
        Some(match value {
            Value::None => Self::None,
            Value::Bool(value) => Self::Int((*value).into()),
            Value::Int(value) => Self::Int(*value),
            Value::Float(value) => float_key(*value),
            Value::Text(value) => Self::Text(value),
            Value::Uint(value) => Self::Uint(*value),
            Value::List(_) | Value::Map(_) | Value::Tuple(_) | Value::Dict(_) => return None,
            Value::Tensor(_) | Value::Opaque(_) => return None,
        })
    }
}

/// In Python 1.0 is the same key as 1, and -0.0 the same as 0.
fn float_key(value: f64) -> Key<'static> {
    const TOO_BIG: f64 = 9_223_372_036_854_775_808.0;
    if value.fract() == 0.0 && (-TOO_BIG..TOO_BIG).contains(&value) {
        #[expect(clippy::cast_possible_truncation, reason = "it is whole and in range")]
        return Key::Int(value as i64);
    }
    Key::Float(value.to_bits())
}

/// Returns an error if a dict has two equal keys. Those that a checkpoint cannot hold are not compared.
pub(crate) fn check_keys(items: &Items) -> Result<(), String> {
    let mut seen = HashSet::with_capacity(items.len());
    for (key, _) in items {
        if Key::of(key).is_some_and(|known| !seen.insert(known)) {
            let key = shown(&format!("{key:?}"));
            return Err(format!("has a dict with the key {key} twice"));
        }
    }
    Ok(())
}

/// A tensor in a file in PyTorch's format: a view of a storage.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TensorRef {
    /// The key of its storage.
    pub storage: Text,
    pub kind: Kind,
    /// The offset of the first element, in elements.
    pub offset: u64,
    pub size: Vec<i64>,
    /// In elements.
    pub stride: Vec<i64>,
    pub requires_grad: bool,
}

/// The most dimensions that libtorch's kernels support.
pub(crate) const MAX_DIMS: usize = 64;

impl TensorRef {
    /// Checks that the tensor stays within a storage of `storage_bytes` bytes. Returns the size of its elements in
    /// bytes if it has more elements than the storage, like an expanded tensor, and zero otherwise.
    pub(crate) fn check(&self, storage_bytes: u64) -> Result<u64, &'static str> {
        let element = element_bytes(self.kind);
        let available = storage_bytes / element;
        if self.size.len() != self.stride.len() {
            return Err("has a different number of strides and sizes");
        }
        if self.size.len() > MAX_DIMS {
            return Err("has more than 64 dimensions");
        }
        let (mut numel, mut last) = (Some(1u64), Some(self.offset));
        for (&size, &stride) in self.size.iter().zip(&self.stride) {
            let (Ok(size), Ok(stride)) = (u64::try_from(size), u64::try_from(stride)) else {
                return Err("has a negative size or stride");
            };
            // Sizes of zero count as one, so that no product overflows in any order of multiplication.
            numel = numel.and_then(|numel| numel.checked_mul(size.max(1)));
            let reach = size.saturating_sub(1).checked_mul(stride);
            last = last.and_then(|last| last.checked_add(reach?));
        }
        let bytes = numel.and_then(|numel| numel.checked_mul(element));
        let (Some(numel), Some(bytes)) = (numel, bytes.filter(|&n| i64::try_from(n).is_ok()))
        else {
            return Err("has more elements than a tensor can have");
        };
        let empty = self.size.contains(&0);
        let inside = if empty {
            self.offset <= available
        } else {
            last.is_some_and(|last| last < available)
        };
        if !inside {
            return Err("reaches beyond the end of its storage");
        }
        Ok(if !empty && numel > available { bytes } else { 0 })
    }
}

/// Returns the size of an element in bytes.
pub(crate) fn element_bytes(kind: Kind) -> u64 {
    kind.elt_size_in_bytes() as u64
}
