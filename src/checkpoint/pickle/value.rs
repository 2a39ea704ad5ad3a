//! The values that a checkpoint can hold.

use std::borrow::Cow;

use tch::Kind;

/// A Python object of the kinds that checkpoints are made of.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// Only for numbers that an `i64` cannot hold.
    Uint(u64),
    Float(f64),
    Str(String),
    List(Vec<Value>),
    Tuple(Vec<Value>),
    /// Has no two equal keys. In a file of this crate each key is none, a bool, a number or a string.
    Dict(Vec<(Value, Value)>),
    /// Boxed, because the other values are much smaller, and there may be millions of them.
    Tensor(Box<TensorRef>),
    /// A Python object of which only the kind is known. It cannot be written.
    Opaque(Cow<'static, str>),
}

impl From<TensorRef> for Value {
    fn from(tensor: TensorRef) -> Self {
        Self::Tensor(Box::new(tensor))
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Str(text.to_owned())
    }
}

/// Returns the value of a key in the items of a dict.
pub(crate) fn get<'a>(items: &'a [(Value, Value)], key: &str) -> Option<&'a Value> {
    let is = |other: &Value| matches!(other, Value::Str(other) if other == key);
    items.iter().find(|(other, _)| is(other)).map(|(_, value)| value)
}

/// A tensor: a view of a storage.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TensorRef {
    /// The key of its storage.
    pub storage: String,
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
    pub(super) fn check(&self, storage_bytes: u64) -> Result<u64, &'static str> {
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
pub(super) fn element_bytes(kind: Kind) -> u64 {
    kind.elt_size_in_bytes() as u64
}

/// A key of a dict. Two keys are equal if they are equal in Python.
#[derive(PartialEq, Eq, Hash)]
pub(super) enum Key<'a> {
    None,
    Int(i64),
    Uint(u64),
    Float(u64),
    Str(&'a str),
}

impl<'a> Key<'a> {
    /// Returns the key for a value, or `None` if a checkpoint cannot hold such keys.
    pub(super) fn of(value: &'a Value) -> Option<Self> {
        Some(match value {
            Value::None => Self::None,
            Value::Bool(value) => Self::Int((*value).into()),
            Value::Int(value) => Self::Int(*value),
            Value::Float(value) => float_key(*value),
            Value::Str(value) => Self::Str(value),
            Value::Uint(value) => Self::Uint(*value),
            Value::List(_) | Value::Tuple(_) | Value::Dict(_) => return None,
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
pub(super) fn check_keys(items: &[(Value, Value)]) -> Result<(), String> {
    let mut seen = std::collections::HashSet::with_capacity(items.len());
    for (key, _) in items {
        if Key::of(key).is_some_and(|known| !seen.insert(known)) {
            let key = crate::error::shown(&format!("{key:?}"));
            return Err(format!("has a dict with the key {key} twice"));
        }
    }
    Ok(())
}
