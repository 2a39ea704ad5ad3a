//! Plain values as JSON. JSON has no infinite numbers and no NaN: they are written as texts, and a list of JSON
//! pointers says where they are.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Error as _, Serialize, SerializeMap as _, Serializer};

use super::{Text, Value};

/// The key of the map as which serde_json presents a number if some crate of the program enables its feature
/// `arbitrary_precision`.
const NUMBER: &str = "$serde_json::private::Number";

/// Returns the text for a non-finite float, which Python's `float` can parse.
fn name_of(number: f64) -> &'static str {
    match number {
        f64::INFINITY => "inf",
        f64::NEG_INFINITY => "-inf",
        _ => "nan",
    }
}

fn named(name: &str) -> Option<f64> {
    Some(match name {
        "inf" => f64::INFINITY,
        "-inf" => f64::NEG_INFINITY,
        "nan" => f64::NAN,
        _ => return None,
    })
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => serializer.serialize_unit(),
            Self::Bool(value) => serializer.serialize_bool(*value),
            Self::Int(number) => serializer.serialize_i64(*number),
            Self::Uint(number) => serializer.serialize_u64(*number),
            Self::Float(number) if number.is_finite() => serializer.serialize_f64(*number),
            Self::Float(number) => serializer.serialize_str(name_of(*number)),
            Self::Text(text) => serializer.serialize_str(text),
            Self::List(items) => serializer.collect_seq(items),
            Self::Map(fields) => {
                let mut map = serializer.serialize_map(Some(fields.len()))?;
                for (key, value) in fields {
                    map.serialize_entry(&**key, value)?;
                }
                map.end()
            }
            Self::Tuple(_) | Self::Dict(_) | Self::Tensor(_) | Self::Opaque(_) => {
                Err(S::Error::custom("only Python has such a value"))
            }
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Json)
    }
}

/// Deserializes values from JSON directly: serde_json's own `Value` would take 600 bytes for the smallest map.
struct Json;

impl<'de> Visitor<'de> for Json {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::None)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(Value::Int(number))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
        Ok(Value::Float(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        items.shrink_to_fit();
        Ok(Value::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut fields: Vec<(Text, Value)> = Vec::new();
        while let Some((key, value)) = map.next_entry::<String, Value>()? {
            if let (NUMBER, Some(digits)) = (key.as_str(), value.text()) {
                return number(digits).ok_or_else(|| de::Error::custom("not a number"));
            }
            fields.push((key.into(), value));
        }
        Ok(Value::map(fields))
    }
}

fn number(digits: &str) -> Option<Value> {
    let small = digits.parse().ok().map(Value::Int);
    let large = || digits.parse().ok().map(Value::Uint);
    let float = || digits.parse().ok().filter(|float: &f64| float.is_finite()).map(Value::Float);
    small.or_else(large).or_else(float)
}

impl Value {
    /// Returns JSON pointers (RFC 6901) to all non-finite floats.
    pub(crate) fn non_finite(&self) -> Vec<String> {
        let mut pointers = Vec::new();
        self.point(&mut String::new(), &mut pointers);
        pointers
    }

    fn point(&self, path: &mut String, pointers: &mut Vec<String>) {
        let len = path.len();
        match self {
            Self::Float(number) if !number.is_finite() => pointers.push(path.clone()),
            Self::List(items) => {
                for (index, item) in items.iter().enumerate() {
                    path.push_str(&format!("/{index}"));
                    item.point(path, pointers);
                    path.truncate(len);
                }
            }
            Self::Map(fields) => {
                for (key, value) in fields {
                    path.push('/');
                    path.push_str(&key.replace('~', "~0").replace('/', "~1"));
                    value.point(path, pointers);
                    path.truncate(len);
                }
            }
            _ => {}
        }
    }

    /// Converts the texts at these places back to floats. Returns `None` if a place does not exist or holds anything
    /// else.
    pub(crate) fn with_non_finite(mut self, pointers: &[String]) -> Option<Self> {
        for pointer in pointers {
            let value = self.at(pointer)?;
            *value = Self::Float(named(value.text()?)?);
        }
        Some(self)
    }

    fn at(&mut self, pointer: &str) -> Option<&mut Self> {
        let mut keys = pointer.split('/');
        // The part before the first slash must be empty.
        keys.next().filter(|start| start.is_empty())?;
        keys.try_fold(self, |value, key| match value {
            Self::List(items) => items.get_mut(key.parse::<usize>().ok()?),
            Self::Map(fields) => {
                let key = key.replace("~1", "/").replace("~0", "~");
                let found = fields.binary_search_by(|(name, _)| (**name).cmp(&key));
                found.ok().map(|at| &mut fields[at].1)
            }
            _ => None,
        })
    }
}
