//! Deserializes plain values to the types of a program, like `serde_json::from_value`, but with infinite and NaN
//! floats.

use serde::de::value::{
    BorrowedStrDeserializer, MapAccessDeserializer, MapDeserializer, SeqDeserializer,
};
use serde::de::{Deserializer, Error as _, IntoDeserializer, Unexpected, Visitor};
use serde::forward_to_deserialize_any;

use super::{Error, Text, Value};

type Result<T> = std::result::Result<T, Error>;

impl<'de> IntoDeserializer<'de, Error> for &'de Value {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for &'de Value {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        match self {
            Value::None => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Int(number) => visitor.visit_i64(*number),
            Value::Uint(number) => visitor.visit_u64(*number),
            Value::Float(number) => visitor.visit_f64(*number),
            Value::Text(text) => visitor.visit_borrowed_str(text),
            Value::List(items) => {
                let mut items = SeqDeserializer::new(items.iter());
                let value = visitor.visit_seq(&mut items)?;
                items.end()?;
                Ok(value)
            }
            Value::Map(fields) => {
                let mut fields = access(fields);
                let value = visitor.visit_map(&mut fields)?;
                fields.end()?;
                Ok(value)
            }
            Value::Tuple(_) | Value::Dict(_) | Value::Tensor(_) | Value::Opaque(_) => {
                Err(Error::custom("only Python has such a value"))
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        match self {
            Value::None => visitor.visit_none(),
            value => visitor.visit_some(value),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value> {
        match self {
            Value::Text(variant) => visitor.visit_enum(BorrowedStrDeserializer::new(variant)),
            Value::Map(fields) if fields.len() == 1 => {
                visitor.visit_enum(MapAccessDeserializer::new(access(fields)))
            }
            _ => {
                let wanted = &"the name of a variant, or a map of one to its content";
                Err(Error::invalid_type(Unexpected::Other("another value"), wanted))
            }
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

type Pair<'de> = (Key<'de>, &'de Value);

fn access(fields: &[(Text, Value)]) -> MapDeserializer<'_, impl Iterator<Item = Pair<'_>>, Error> {
    MapDeserializer::new(fields.iter().map(|(key, value)| (Key(key), value)))
}

/// The key of a map, which is text but may be deserialized as a number.
struct Key<'de>(&'de str);

impl<'de> IntoDeserializer<'de, Error> for Key<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

macro_rules! numbers {
    ($($deserialize:ident $visit:ident),+) => {
        $(fn $deserialize<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
            match self.0.parse() {
                Ok(number) => visitor.$visit(number),
                Err(_) => visitor.visit_borrowed_str(self.0),
            }
        })+
    };
}

impl<'de> Deserializer<'de> for Key<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        visitor.visit_borrowed_str(self.0)
    }

    numbers!(deserialize_bool visit_bool);
    numbers!(deserialize_i8 visit_i8, deserialize_i16 visit_i16, deserialize_i32 visit_i32);
    numbers!(deserialize_i64 visit_i64, deserialize_i128 visit_i128);
    numbers!(deserialize_u8 visit_u8, deserialize_u16 visit_u16, deserialize_u32 visit_u32);
    numbers!(deserialize_u64 visit_u64, deserialize_u128 visit_u128);
    numbers!(deserialize_f32 visit_f32, deserialize_f64 visit_f64);

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value> {
        visitor.visit_enum(BorrowedStrDeserializer::new(self.0))
    }

    forward_to_deserialize_any! {
        char str string bytes byte_buf unit unit_struct seq tuple tuple_struct map struct
        identifier ignored_any
    }
}
