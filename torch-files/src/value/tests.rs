//! Tests that plain values are those of serde_json, and that all floats round-trip.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use super::Value;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Unit;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Meters(f64);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Shape {
    Point,
    Circle(f64),
    Line(f64, i32),
    Box { width: f64, height: Option<f32> },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Either {
    Number(f64),
    Text(String),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind")]
enum Tagged {
    Best { loss: f64 },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Flat {
    #[serde(flatten)]
    more: BTreeMap<String, f64>,
}

/// Checks that a value survives serde and a round trip through JSON, and that the JSON is that of serde_json.
fn round_trip<T: Serialize + DeserializeOwned + Debug>(value: &T) {
    let plain = Value::of(value).unwrap();
    let shown = format!("{value:?}");
    assert_eq!(format!("{:?}", plain.to::<T>().unwrap()), shown);
    let json = serde_json::to_string(&plain).unwrap();
    let read: Value = serde_json::from_str(&json).unwrap();
    let read = read.with_non_finite(&plain.non_finite()).unwrap();
    assert_eq!(format!("{read:?}"), format!("{plain:?}"), "{json}");
    if plain.non_finite().is_empty() {
        assert_eq!(serde_json::to_value(&plain).unwrap(), serde_json::to_value(value).unwrap());
    }
}

#[test]
fn values_are_those_of_serde_json() {
    round_trip(&(1u8, -5i64, u64::MAX, i64::MIN, 0.1f64, 0.1f32, -0.0, 'ä', true, ()));
    round_trip(&(Unit, Meters(2.5), Some(1), None::<i32>, "text".to_owned()));
    round_trip(&(i128::from(u64::MAX), 7u128, vec![vec![1], Vec::new()], [1.5; 3]));
    let shapes = [
        Shape::Point,
        Shape::Circle(1.0),
        Shape::Line(2.0, 3),
        Shape::Box { width: 4.0, height: None },
    ];
    round_trip(&shapes.to_vec());
    round_trip(&BTreeMap::from([(3, "three".to_owned()), (-1, String::new())]));
    round_trip(&BTreeMap::from([
        (true, Either::Text("inf".to_owned())),
        (false, Either::Number(1.0)),
    ]));
    round_trip(&json!({"a": [1, null, {"b": 1.5}], "": {}, "a/b~c": "nan"}));
    round_trip(&serde_json::Number::from(7));
    for refused in [Value::of(&u128::MAX), Value::of(&HashMap::from([(vec![1], 1)]))] {
        assert!(refused.is_err());
    }
}

#[test]
fn every_float_comes_back() {
    for number in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
        round_trip(&number);
        round_trip(&Some(number as f32));
        round_trip(&vec![(1.0, Meters(number)), (number, Meters(0.0))]);
        round_trip(&Shape::Box { width: number, height: Some(number as f32) });
        round_trip(&[Shape::Circle(number), Shape::Line(number, 1)]);
        // Untagged and tagged types, for which serde buffers a value before its type is known.
        round_trip(&[Either::Number(number), Either::Text("inf".to_owned())]);
        round_trip(&Tagged::Best { loss: number });
        round_trip(&Flat {
            more: BTreeMap::from([("a/b~1".to_owned(), number), ("~".to_owned(), 1.0)]),
        });
    }
}

/// If some crate of the program enables serde_json's `arbitrary_precision`, its numbers are serialized like this.
#[test]
fn numbers_that_serde_json_keeps_as_text_are_numbers() {
    #[derive(Serialize)]
    #[serde(rename = "$serde_json::private::Number")]
    struct Number {
        #[serde(rename = "$serde_json::private::Number")]
        digits: &'static str,
    }
    for (digits, plain) in [
        ("1.5", Value::Float(1.5)),
        ("-7", Value::Int(-7)),
        ("18446744073709551615", Value::Uint(u64::MAX)),
    ] {
        assert_eq!(Value::of(&Number { digits }).unwrap(), plain);
        let json = json!({"$serde_json::private::Number": digits}).to_string();
        assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), plain);
    }
    assert!(serde_json::from_str::<Value>(r#"{"$serde_json::private::Number":"1e999"}"#).is_err());
}

#[test]
fn a_place_without_such_a_text_is_refused() {
    let value = || Value::of(&json!({"a": ["inf", "x", 1]})).unwrap();
    for pointer in ["", "a", "/a", "/b", "/a/1", "/a/2", "/a/3", "/a/0/0", "/a/-1"] {
        assert_eq!(value().with_non_finite(&[pointer.to_owned()]), None, "{pointer}");
    }
    assert!(value().with_non_finite(&["/a/0".to_owned()]).is_some());
}

#[test]
fn what_does_not_fit_a_type_says_so() {
    let error = |value: Json| Value::of(&value).unwrap().to::<Vec<f64>>().unwrap_err().to_string();
    assert_eq!(error(json!(null)), "invalid type: null, expected a sequence");
    assert_eq!(error(json!(["x"])), "invalid type: string \"x\", expected f64");
    let pair = Value::of(&[1, 2, 3]).unwrap().to::<(i32, i32)>();
    assert!(pair.is_err(), "{pair:?}");
    assert!(Value::of(&json!({"Circle": 1.0, "Point": null})).unwrap().to::<Shape>().is_err());
}
