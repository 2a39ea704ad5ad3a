//! Small values: what serde makes of the types of a program, as JSON would hold them, and the floats that JSON lacks.

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
    /// More than an `i64` holds.
    Uint(u64),
    /// Infinite numbers and NaN included.
    Float(f64),
    Text(String),
    List(Vec<Plain>),
    /// Sorted by the keys, of which no two are equal; made by [`Plain::map`].
    Map(Vec<(String, Plain)>),
}

/// The one error that serde's traits and the public one of a value share.
type Error = serde_json::Error;

impl Plain {
    /// The value that serde makes.
    pub(crate) fn of(value: &(impl Serialize + ?Sized)) -> Result<Self, Error> {
        value.serialize(ser::ToPlain)
    }

    /// A value of a type of the program.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> Result<T, Error> {
        T::deserialize(self)
    }

    /// A map. Of two equal keys the last counts.
    pub(crate) fn map(mut fields: Vec<(String, Self)>) -> Self {
        // Sorted, so that the bytes of a file do not depend on the order of a hash map.
        fields.sort_by(|(one, _), (other, _)| one.cmp(other));
        fields.reverse();
        fields.dedup_by(|(later, _), (kept, _)| later == kept);
        fields.reverse();
        // There may be millions of small ones.
        fields.shrink_to_fit();
        Self::Map(fields)
    }

    /// The value of a key, if this is a map that has it.
    pub(crate) fn get(&self, key: &str) -> Option<&Self> {
        let Self::Map(fields) = self else {
            return None;
        };
        let found = fields.binary_search_by(|(name, _)| name.as_str().cmp(key));
        found.ok().map(|at| &fields[at].1)
    }

    /// The text, if this is one.
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
