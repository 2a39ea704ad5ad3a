//! Small values between JSON and Python.

#![forbid(unsafe_code)]

use serde_json::{Map, Number, Value as Json};

use crate::checkpoint::torch::Value;

/// The Python value; `None` for a number that is neither of 64 bits nor floating.
pub(super) fn to_python(json: &Json) -> Option<Value> {
    Some(match json {
        Json::Null => Value::None,
        Json::Bool(value) => Value::Bool(*value),
        Json::Number(number) if number.is_f64() => Value::Float(number.as_f64()?),
        Json::Number(number) => {
            let small = number.as_i64().map(Value::Int);
            small.or_else(|| number.as_u64().map(Value::Uint))?
        }
        Json::String(text) => Value::Str(text.clone()),
        Json::Array(items) => Value::List(items.iter().map(to_python).collect::<Option<_>>()?),
        Json::Object(fields) => {
            let field = |(name, value)| Some((Value::Str(String::clone(name)), to_python(value)?));
            Value::Dict(fields.iter().map(field).collect::<Option<_>>()?)
        }
    })
}

/// The JSON value; `None` for what has something else in it, such as a tensor. Infinite numbers and NaN become null,
/// and numbers as keys text.
pub(super) fn from_python(value: &Value) -> Option<Json> {
    Some(match value {
        Value::None => Json::Null,
        Value::Bool(value) => Json::Bool(*value),
        Value::Int(number) => Json::from(*number),
        Value::Uint(number) => Json::from(*number),
        Value::Float(number) => Number::from_f64(*number).map_or(Json::Null, Json::Number),
        Value::Str(text) => Json::String(text.clone()),
        Value::List(items) | Value::Tuple(items) => {
            Json::Array(items.iter().map(from_python).collect::<Option<_>>()?)
        }
        Value::Dict(items) => {
            let item = |(key, value): &(Value, Value)| Some((text(key)?, from_python(value)?));
            Json::Object(items.iter().map(item).collect::<Option<Map<_, _>>>()?)
        }
        Value::Tensor(_) | Value::Opaque(_) => return None,
    })
}

/// A key as text.
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
