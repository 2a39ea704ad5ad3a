//! Serializes the types of a program to plain values, like `serde_json::to_value`, but with infinite and NaN floats.

use serde::ser::{self, Error as _, Serialize, Serializer};

use super::{Error, Text, Value};

/// The prefix of the names of serde_json's own types that hold JSON text.
const TEXT_OF_JSON: &str = "$serde_json::private::";

/// The serializer.
pub(super) struct ToValue;

/// Collects the items of a sequence.
pub(super) struct Items {
    items: Vec<Value>,
    variant: Option<&'static str>,
}

/// Collects the fields of a map or a struct.
pub(super) struct Fields {
    fields: Vec<(Text, Value)>,
    key: Option<Text>,
    variant: Option<&'static str>,
    is_text_of_json: bool,
}

type Result<T = Value> = std::result::Result<T, Error>;

/// Wraps the value of an enum variant in a map from the variant's name, serde's default representation.
fn tagged(variant: Option<&'static str>, value: Value) -> Value {
    match variant {
        Some(variant) => Value::Map(vec![(variant.into(), value)]),
        None => value,
    }
}

fn fields(len: usize, variant: Option<&'static str>) -> Fields {
    Fields { fields: Vec::with_capacity(len), key: None, variant, is_text_of_json: false }
}

fn items(len: usize, variant: Option<&'static str>) -> Items {
    Items { items: Vec::with_capacity(len), variant }
}

/// Returns a key as text, as serde_json writes it.
fn key_of(key: &Value) -> Result<Text> {
    let text = if *key == Value::None { None } else { key.key_text() };
    text.ok_or_else(|| Error::custom("key must be a string"))
}

macro_rules! numbers {
    ($variant:ident: $($method:ident $type:ty),+) => {
        $(fn $method(self, value: $type) -> Result {
            Ok(Value::$variant(value.into()))
        })+
    };
}

impl Serializer for ToValue {
    type Ok = Value;
    type Error = Error;
    type SerializeSeq = Items;
    type SerializeTuple = Items;
    type SerializeTupleStruct = Items;
    type SerializeTupleVariant = Items;
    type SerializeMap = Fields;
    type SerializeStruct = Fields;
    type SerializeStructVariant = Fields;

    numbers!(Bool: serialize_bool bool);
    numbers!(Int: serialize_i8 i8, serialize_i16 i16, serialize_i32 i32, serialize_i64 i64);
    numbers!(Int: serialize_u8 u8, serialize_u16 u16, serialize_u32 u32);
    numbers!(Float: serialize_f32 f32, serialize_f64 f64);

    fn serialize_char(self, value: char) -> Result {
        self.serialize_str(value.encode_utf8(&mut [0; 4]))
    }

    fn serialize_str(self, value: &str) -> Result {
        Ok(value.into())
    }

    fn serialize_u64(self, value: u64) -> Result {
        Ok(value.into())
    }

    fn serialize_i128(self, value: i128) -> Result {
        let small = i64::try_from(value).map(Value::Int);
        let number = small.or_else(|_| u64::try_from(value).map(Value::Uint));
        number.map_err(|_| Error::custom("number out of range"))
    }

    fn serialize_u128(self, value: u128) -> Result {
        u64::try_from(value).map(Value::from).map_err(|_| Error::custom("number out of range"))
    }

    fn serialize_bytes(self, bytes: &[u8]) -> Result {
        Ok(Value::List(bytes.iter().map(|&byte| Value::Int(byte.into())).collect()))
    }

    fn serialize_none(self) -> Result {
        Ok(Value::None)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result {
        Ok(Value::None)
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result {
        Ok(Value::None)
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result {
        Ok(variant.into())
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> Result {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Result {
        Ok(tagged(Some(variant), value.serialize(self)?))
    }

    fn serialize_seq(self, len: Option<usize>) -> Result<Items> {
        Ok(items(len.unwrap_or(0), None))
    }

    fn serialize_tuple(self, len: usize) -> Result<Items> {
        Ok(items(len, None))
    }

    fn serialize_tuple_struct(self, _: &'static str, len: usize) -> Result<Items> {
        Ok(items(len, None))
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        len: usize,
    ) -> Result<Items> {
        Ok(items(len, Some(variant)))
    }

    fn serialize_map(self, len: Option<usize>) -> Result<Fields> {
        Ok(fields(len.unwrap_or(0), None))
    }

    fn serialize_struct(self, name: &'static str, len: usize) -> Result<Fields> {
        let is_text_of_json = name.starts_with(TEXT_OF_JSON);
        Ok(Fields { is_text_of_json, ..fields(len, None) })
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        len: usize,
    ) -> Result<Fields> {
        Ok(fields(len, Some(variant)))
    }
}

impl Items {
    fn push<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<()> {
        self.items.push(Value::of(value)?);
        Ok(())
    }

    fn finish(self) -> Result {
        Ok(tagged(self.variant, Value::List(self.items)))
    }
}

impl Fields {
    fn push<T: Serialize + ?Sized>(&mut self, key: Text, value: &T) -> Result<()> {
        self.fields.push((key, Value::of(value)?));
        Ok(())
    }

    fn finish(self) -> Result {
        match &self.fields[..] {
            [(_, Value::Text(json))] if self.is_text_of_json => serde_json::from_str(json),
            _ => Ok(tagged(self.variant, Value::map(self.fields))),
        }
    }
}

macro_rules! sequences {
    ($($trait:ident $method:ident),+) => {
        $(impl ser::$trait for Items {
            type Ok = Value;
            type Error = Error;

            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<()> {
                self.push(value)
            }

            fn end(self) -> Result {
                self.finish()
            }
        })+
    };
}

sequences!(
    SerializeSeq serialize_element,
    SerializeTuple serialize_element,
    SerializeTupleStruct serialize_field,
    SerializeTupleVariant serialize_field
);

macro_rules! structs {
    ($($trait:ident),+) => {
        $(impl ser::$trait for Fields {
            type Ok = Value;
            type Error = Error;

            fn serialize_field<T: Serialize + ?Sized>(
                &mut self,
                key: &'static str,
                value: &T,
            ) -> Result<()> {
                self.push(key.into(), value)
            }

            fn end(self) -> Result {
                self.finish()
            }
        })+
    };
}

structs!(SerializeStruct, SerializeStructVariant);

impl ser::SerializeMap for Fields {
    type Ok = Value;
    type Error = Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<()> {
        self.key = Some(key_of(&Value::of(key)?)?);
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<()> {
        let key = self.key.take().ok_or_else(|| Error::custom("a value without a key"))?;
        self.push(key, value)
    }

    fn end(self) -> Result {
        self.finish()
    }
}
