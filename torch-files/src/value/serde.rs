//! Plain values to and from the types of a program, like `serde_json::to_value` and `from_value`, but with infinite and
//! NaN floats; and values as JSON. JSON has no such numbers: they are written as texts, and a list of JSON pointers
//! says where they are.

use std::fmt;

use ::serde::de::value::{
    BorrowedStrDeserializer, MapAccessDeserializer, MapDeserializer, SeqDeserializer,
};
use ::serde::de::{
    self, Deserialize, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Unexpected, Visitor,
};
use ::serde::forward_to_deserialize_any;
use ::serde::ser::{self, Serialize, SerializeMap as _, Serializer};

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
    text.ok_or_else(|| <Error as ser::Error>::custom("key must be a string"))
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
        number.map_err(|_| <Error as ser::Error>::custom("number out of range"))
    }

    fn serialize_u128(self, value: u128) -> Result {
        u64::try_from(value)
            .map(Value::from)
            .map_err(|_| <Error as ser::Error>::custom("number out of range"))
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
        let key = self
            .key
            .take()
            .ok_or_else(|| <Error as ser::Error>::custom("a value without a key"))?;
        self.push(key, value)
    }

    fn end(self) -> Result {
        self.finish()
    }
}

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
                Err(<Error as de::Error>::custom("only Python has such a value"))
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
                Err(<Error as de::Error>::invalid_type(Unexpected::Other("another value"), wanted))
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
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
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
                Err(<S::Error as ser::Error>::custom("only Python has such a value"))
            }
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
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

    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::None)
    }

    fn visit_bool<E>(self, value: bool) -> std::result::Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, number: i64) -> std::result::Result<Value, E> {
        Ok(Value::Int(number))
    }

    fn visit_u64<E>(self, number: u64) -> std::result::Result<Value, E> {
        Ok(number.into())
    }

    fn visit_f64<E>(self, number: f64) -> std::result::Result<Value, E> {
        Ok(Value::Float(number))
    }

    fn visit_str<E>(self, text: &str) -> std::result::Result<Value, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        items.shrink_to_fit();
        Ok(Value::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Value, A::Error> {
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
    /// Returns JSON pointers (RFC 6901) to all non-finite floats of a plain value, which are texts once it is JSON.
    pub fn non_finite(&self) -> Vec<String> {
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
    pub fn with_non_finite(mut self, pointers: &[String]) -> Option<Self> {
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
