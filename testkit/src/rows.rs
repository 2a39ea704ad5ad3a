//! The rows of a report, which are not public types, from its serialized form.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The rows that a serialized report has under this key, as the type that a test reads them into.
pub fn rows<T: DeserializeOwned>(report: &impl Serialize, key: &str) -> Vec<T> {
    let mut report = serde_json::to_value(report).unwrap();
    serde_json::from_value(report[key].take()).unwrap()
}
