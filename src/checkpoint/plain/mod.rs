//! Small values: what serde makes of the types of a program, with the data model of JSON plus infinite and NaN floats.
//!
//! `ser` and `de` convert a program's types to and from a [`Plain`]. A safetensors file holds it as `json`, and a file
//! in PyTorch's format as Python values, whose floats can be infinite and NaN.

mod de;
mod json;
mod ser;
#[cfg(test)]
mod tests;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A value without tensors.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Plain {
    #[default]
    None,
    Bool(bool),
    Int(i64),
    /// Only for numbers that an `i64` cannot hold.
    Uint(u64),
    /// May be infinite or NaN.
    Float(f64),
    Text(String),
    List(Vec<Plain>),
    /// Sorted by key, without duplicates; made by [`Plain::map`].
    Map(Vec<(String, Plain)>),
}

/// The error of serde's traits here, which is the cause in the public error for values.
type Error = serde_json::Error;

impl Plain {
    /// Serializes a value of the program.
    pub(crate) fn of(value: &(impl Serialize + ?Sized)) -> Result<Self, Error> {
        value.serialize(ser::ToPlain)
    }

    /// Deserializes to a type of the program.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> Result<T, Error> {
        T::deserialize(self)
    }

    /// Makes a map. Of two equal keys the last one counts.
    pub(crate) fn map(mut fields: Vec<(String, Self)>) -> Self {
        // Sorted, so that the bytes of a file do not depend on the iteration order of a hash map.
        fields.sort_by(|(one, _), (other, _)| one.cmp(other));
        fields.reverse();
        fields.dedup_by(|(later, _), (kept, _)| later == kept);
        fields.reverse();
        // There may be millions of small maps.
        fields.shrink_to_fit();
        Self::Map(fields)
    }

    /// Returns the value of a key, if this is a map that has it.
    pub(crate) fn get(&self, key: &str) -> Option<&Self> {
        let Self::Map(fields) = self else {
            return None;
        };
        let found = fields.binary_search_by(|(name, _)| name.as_str().cmp(key));
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

    /// Returns the text, if this is one.
    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

impl From<u64> for Plain {
    fn from(number: u64) -> Self {
        i64::try_from(number).map_or(Self::Uint(number), Self::Int)
    }
}
