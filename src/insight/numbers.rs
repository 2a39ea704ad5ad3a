//! Numbers in reports: sums of counts, and numbers that may be infinite or NaN, which JSON has no words for: they are
//! written as text.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The sum of counts. Those of a report that was read from a file may be any numbers.
pub(super) fn total(counts: impl IntoIterator<Item = u64>) -> u64 {
    counts.into_iter().fold(0, u64::saturating_add)
}

/// A number, or `"inf"`, `"-inf"` or `"NaN"` in formats that people read.
struct Written(f64);

impl Serialize for Written {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() || !serializer.is_human_readable() {
            serializer.serialize_f64(self.0)
        } else {
            serializer.collect_str(&self.0)
        }
    }
}

impl<'de> Deserialize<'de> for Written {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            // No f64, which is not read from here if a crate of the program enables `arbitrary_precision` of serde_json.
            Number(serde_json::Number),
            Text(String),
        }
        if !deserializer.is_human_readable() {
            return f64::deserialize(deserializer).map(Self);
        }
        match Either::deserialize(deserializer)? {
            Either::Number(number) => {
                number.as_f64().map(Self).ok_or_else(|| serde::de::Error::custom("no f64"))
            }
            Either::Text(text) => text.parse().map(Self).map_err(serde::de::Error::custom),
        }
    }
}

pub(super) fn serialize<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    Written(*number).serialize(serializer)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Written::deserialize(deserializer).map(|number| number.0)
}

/// For an `Option<f64>`.
pub(super) mod option {
    use super::{Deserialize, Deserializer, Serialize, Serializer, Written};

    pub(in crate::insight) fn serialize<S: Serializer>(
        number: &Option<f64>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        number.map(Written).serialize(serializer)
    }

    pub(in crate::insight) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<f64>, D::Error> {
        let number = Option::<Written>::deserialize(deserializer)?;
        Ok(number.map(|number| number.0))
    }
}

/// For two numbers.
pub(super) mod pair {
    use super::{Deserialize, Deserializer, Serialize, Serializer, Written};

    pub(in crate::insight) fn serialize<S: Serializer>(
        numbers: &[f64; 2],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        numbers.map(Written).serialize(serializer)
    }

    pub(in crate::insight) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<[f64; 2], D::Error> {
        let numbers = <[Written; 2]>::deserialize(deserializer)?;
        Ok(numbers.map(|number| number.0))
    }
}
