//! The values that a checkpoint can hold.

use tch::Kind;

/// A Python object of the kinds that checkpoints are made of.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// More than an `i64` holds.
    Uint(u64),
    Float(f64),
    Str(String),
    List(Vec<Value>),
    Tuple(Vec<Value>),
    /// Without two equal keys. The keys are none, bools, numbers and strings.
    Dict(Vec<(Value, Value)>),
    /// In a box: the other values are much smaller, and there may be millions.
    Tensor(Box<TensorRef>),
    /// Something of Python's that is only known by its kind. Cannot be written.
    Opaque(&'static str),
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

/// The value of a key in the items of a dict.
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
    /// Where it begins, in elements.
    pub offset: u64,
    pub size: Vec<i64>,
    /// In elements.
    pub stride: Vec<i64>,
    pub requires_grad: bool,
}

/// More are unknown to libtorch's kernels.
pub(crate) const MAX_DIMS: usize = 64;

impl TensorRef {
    /// Refuses a tensor that reaches outside of its storage of so many bytes. Returns the bytes of its elements if they
    /// are more than the storage has, as an expanded tensor's are, else zero.
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
            // Without the zeros: no product may overflow, in whatever order it is taken.
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

/// The bytes of one element.
pub(super) fn element_bytes(kind: Kind) -> u64 {
    kind.elt_size_in_bytes() as u64
}

/// A key of a dict, equal where Python's are.
#[derive(PartialEq, Eq, Hash)]
pub(super) enum Key<'a> {
    None,
    Int(i64),
    Uint(u64),
    Float(u64),
    Str(&'a str),
}

impl<'a> Key<'a> {
    /// The key that a value makes, or none if a checkpoint has no such keys.
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

/// 1.0 is the key 1 in Python, and -0.0 is 0.
fn float_key(value: f64) -> Key<'static> {
    const TOO_BIG: f64 = 9_223_372_036_854_775_808.0;
    if value.fract() == 0.0 && (-TOO_BIG..TOO_BIG).contains(&value) {
        #[expect(clippy::cast_possible_truncation, reason = "it is whole and in range")]
        return Key::Int(value as i64);
    }
    Key::Float(value.to_bits())
}

/// Refuses two equal keys in a dict, and keys that a checkpoint does not have.
pub(super) fn check_keys(items: &[(Value, Value)]) -> Result<(), String> {
    let mut seen = std::collections::HashSet::with_capacity(items.len());
    for (key, _) in items {
        let Some(known) = Key::of(key) else {
            return Err("has a dict with a key that is not a string, a number or None".to_owned());
        };
        if !seen.insert(known) {
            let key = crate::checkpoint::malformed::shown(&format!("{key:?}"));
            return Err(format!("has a dict with the key {key} twice"));
        }
    }
    Ok(())
}
