//! Conversion of small values to and from Python's.

use crate::checkpoint::pickle::Value;
use crate::checkpoint::plain::Plain;

/// Returns the value as a Python value.
pub(super) fn to_python(value: &Plain) -> Value {
    match value {
        Plain::None => Value::None,
        Plain::Bool(value) => Value::Bool(*value),
        Plain::Int(number) => Value::Int(*number),
        Plain::Uint(number) => Value::Uint(*number),
        Plain::Float(number) => Value::Float(*number),
        Plain::Text(text) => Value::Str(text.clone()),
        Plain::List(items) => Value::List(items.iter().map(to_python).collect()),
        Plain::Map(fields) => {
            let field = |(name, value): &(String, Plain)| (name.as_str().into(), to_python(value));
            Value::Dict(fields.iter().map(field).collect())
        }
    }
}

/// Converts a Python value. Returns `None` if it contains anything else, such as a tensor. Keys that are numbers become
/// text.
pub(super) fn from_python(value: &Value) -> Option<Plain> {
    Some(match value {
        Value::None => Plain::None,
        Value::Bool(value) => Plain::Bool(*value),
        Value::Int(number) => Plain::Int(*number),
        Value::Uint(number) => Plain::Uint(*number),
        Value::Float(number) => Plain::Float(*number),
        Value::Str(text) => Plain::Text(text.clone()),
        Value::List(items) | Value::Tuple(items) => {
            Plain::List(items.iter().map(from_python).collect::<Option<_>>()?)
        }
        Value::Dict(items) => {
            let item = |(key, value): &(Value, Value)| Some((text(key)?, from_python(value)?));
            Plain::map(items.iter().map(item).collect::<Option<_>>()?)
        }
        Value::Tensor(_) | Value::Opaque(_) => return None,
    })
}

/// Returns the name of what is under a key: that of a key which is not text, a number or `None` says what it is.
pub(super) fn name(key: &Value) -> String {
    text(key).unwrap_or_else(|| {
        let what = match key {
            Value::Tuple(_) => "a tuple",
            Value::Tensor(_) => "a tensor",
            Value::Opaque(what) => what,
            _ => "an object",
        };
        format!("(the key is {what})")
    })
}

/// Returns a key as text.
pub(super) fn text(key: &Value) -> Option<String> {
    Some(match key {
        Value::Str(text) => text.clone(),
        Value::Int(number) => number.to_string(),
        Value::Uint(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Bool(value) => value.to_string(),
        Value::None => "None".to_owned(),
        _ => return None,
    })
}
