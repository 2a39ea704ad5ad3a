//! The rows of a report, which are not public types, from its serialized form.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tch_amp::insight::{HistoryReport, SkipCause};

/// The rows that a serialized report has under this key, as the type that a test reads them into.
pub fn rows<T: DeserializeOwned>(report: &impl Serialize, key: &str) -> Vec<T> {
    let mut report = serde_json::to_value(report).unwrap();
    serde_json::from_value(report[key].take()).unwrap()
}

/// A step of a history.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Step {
    /// Its number, counted from 1.
    pub step: u64,
    /// The loss scale.
    pub scale: f64,
    /// Why it was skipped.
    pub skipped: Option<SkipCause>,
    /// The norm of the gradients.
    pub norm: Option<f64>,
    /// The loss.
    pub loss: Option<f64>,
    /// The learning rate, finite in these tests.
    pub learning_rate: f64,
}

/// The steps of a history, the oldest first.
pub fn steps_of(report: &HistoryReport) -> Vec<Step> {
    rows(report, "steps")
}
