//! Enums that serde writes with a tag, read by hand: the code that it derives for them buffers numbers, and cannot read
//! them again if a crate of the program enables serde_json's `arbitrary_precision`.

use serde::de::{Deserialize, Deserializer, Error};
use serde_json::{Map, Value};

/// The name of a variant, and how it is read from its fields.
pub(crate) type Variant<T> = (&'static str, fn(Value) -> serde_json::Result<T>);

/// The variants of an enum that hold one type each.
macro_rules! variants {
    ($($name:ident)*) => {{
        let variants: &[$crate::tagged::Variant<Self>] =
            &[$((stringify!($name), |fields| serde_json::from_value(fields).map(Self::$name))),*];
        variants
    }};
}

pub(crate) use variants;

/// Reads one of these variants, whose name is in the field `tag`.
pub(crate) fn read<'de, T, D: Deserializer<'de>>(
    from: D,
    tag: &'static str,
    variants: &[Variant<T>],
) -> Result<T, D::Error> {
    let mut fields = Map::deserialize(from)?;
    let name = fields.remove(tag).ok_or_else(|| D::Error::missing_field(tag))?;
    let named = |variant: &&Variant<T>| Some(variant.0) == name.as_str();
    match variants.iter().find(named) {
        Some((_, read)) => read(Value::Object(fields)).map_err(D::Error::custom),
        None => {
            let names: Vec<_> = variants.iter().map(|(name, _)| format!("`{name}`")).collect();
            let names = names.join(", ");
            Err(D::Error::custom(format!("unknown variant {name}, expected one of {names}")))
        }
    }
}
