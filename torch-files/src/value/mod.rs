//! The values in a file: those of a program, and the objects that a Python program has saved.
//!
//! A *plain* value has the data model of JSON, plus infinite and NaN floats: `serde` converts a program's types to and
//! from it.

mod serde;
mod tensor;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;

use ::serde::Serialize;
use ::serde::de::DeserializeOwned;

use crate::text::shown;

pub use tensor::TensorRef;

pub(crate) const MAX_DIMS: usize = TensorRef::MAX_DIMS;

/// A text. Copies share its memory, because a pickle can refer to one text in a million places.
pub(crate) type Text = Arc<str>;

/// The items of a Python dict.
pub(crate) type Items = [(Value, Value)];

/// A value or a Python object, as a file holds it. Tensors are places in the file, from which
/// [`TorchFile::read`](crate::TorchFile::read) reads their elements.
///
/// A *plain* value has the data model of JSON, plus infinite and NaN floats. [`Value::of`] and [`Value::to`] convert
/// any type with serde's traits to and from one; the value itself implements both traits, so that it can be written as
/// JSON, with the texts `inf`, `-inf` and `nan` in place of the floats that JSON lacks.
///
/// # Examples
///
/// ```
/// use torch_files::Value;
///
/// let value = Value::of(&vec![("lr", 0.1)])?;
/// assert_eq!(value.to::<Vec<(String, f64)>>()?, [("lr".to_owned(), 0.1)]);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// `None`.
    #[default]
    None,
    /// A bool.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// An integer that an `i64` cannot hold.
    Uint(u64),
    /// A float, which may be infinite or NaN.
    Float(f64),
    /// A string. Copies share its memory, because a pickle can refer to one in a million places.
    Text(Arc<str>),
    /// A list.
    List(Vec<Value>),
    /// A dict of plain values: sorted by key, without duplicates; made by [`Value::map`]. A file has a `Dict`.
    Map(Vec<(Arc<str>, Value)>),
    /// A tuple, which is not plain, and neither are the objects below.
    Tuple(Vec<Value>),
    /// A dict of Python in its order, which has no two equal keys. In a file that is written each key is none, a bool,
    /// a number or a text.
    Dict(Vec<(Value, Value)>),
    /// A tensor. Boxed, because the other values are much smaller, and there may be millions of them.
    Tensor(Box<TensorRef>),
    /// A Python object of which only the kind is known, as a description in English. It cannot be written.
    Opaque(Arc<str>),
}

/// The error of serde's traits here.
type Error = serde_json::Error;

impl Value {
    /// Serializes a value of the program. The result is plain.
    ///
    /// # Errors
    ///
    /// That of the type's own `Serialize`, and one for a map whose keys are neither texts nor numbers.
    pub fn of(value: &(impl Serialize + ?Sized)) -> Result<Self, Error> {
        value.serialize(serde::ToValue)
    }

    /// Deserializes a plain value to a type of the program.
    ///
    /// # Errors
    ///
    /// That of the type's own `Deserialize`; also for a value that is not plain, see [`into_plain`](Self::into_plain).
    pub fn to<T: DeserializeOwned>(&self) -> Result<T, Error> {
        T::deserialize(self)
    }

    /// Makes a map of plain values. Of two equal keys the last one counts.
    pub fn map(mut fields: Vec<(Arc<str>, Self)>) -> Self {
        // Sorted, so that the bytes of a file do not depend on the iteration order of a hash map.
        fields.sort_by(|(one, _), (other, _)| one.cmp(other));
        fields.reverse();
        fields.dedup_by(|(later, _), (kept, _)| later == kept);
        fields.reverse();
        // There may be millions of small maps.
        fields.shrink_to_fit();
        Self::Map(fields)
    }

    /// Makes an object plain: tuples become lists, and keys become texts.
    ///
    /// # Errors
    ///
    /// The value as it was if it contains anything else, such as a tensor.
    pub fn into_plain(self) -> Result<Self, Self> {
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

    /// Returns a key of a dict as text; `None` for a key that is neither none, a bool, a number nor a text.
    pub fn key_text(&self) -> Option<Arc<str>> {
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

    /// Returns the value of a key, if this is a map or a dict that has it.
    pub fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Map(fields) => {
                let found = fields.binary_search_by(|(name, _)| (**name).cmp(key));
                found.ok().map(|at| &fields[at].1)
            }
            Self::Dict(items) => {
                items.iter().find(|(name, _)| name.text() == Some(key)).map(|(_, value)| value)
            }
            _ => None,
        }
    }

    /// Returns the value at the end of names of fields and places of items, separated by dots.
    pub fn within(&self, path: &str) -> Option<&Self> {
        let step = |name: &str| match self {
            Self::List(items) => items.get(name.parse::<usize>().ok()?),
            other => other.get(name),
        };
        let inside = |(at, _)| step(&path[..at])?.within(&path[at + 1..]);
        step(path).or_else(|| path.match_indices('.').find_map(inside))
    }

    /// Returns whether two plain values are equal in Python, where 1 is 1.0.
    pub fn equals(&self, other: &Self) -> bool {
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
    pub fn text(&self) -> Option<&str> {
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
