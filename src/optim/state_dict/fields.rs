//! Deserializing options and groups.
//!
//! Implemented by hand: serde's derive for tagged and flattened fields buffers numbers, and cannot read them again if
//! any crate of the program enables serde_json's feature `arbitrary_precision`.

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::optim::{Algorithm, ParamGroup, ParamGroupState};

type Fields = Map<String, Value>;
type Result<T> = std::result::Result<T, serde_json::Error>;

impl<'de> Deserialize<'de> for Algorithm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        algorithm(&Fields::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl<'de> Deserialize<'de> for ParamGroup {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        group(&Fields::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl<'de> Deserialize<'de> for ParamGroupState {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let mut fields = Fields::deserialize(deserializer)?;
        // Taken out first: there may be far more parameters than options, which are copied.
        let params = fields.remove("params").ok_or_else(|| D::Error::missing_field("params"))?;
        let state =
            || Ok(Self { options: group(&fields)?, params: serde_json::from_value(params)? });
        state().map_err(|error: serde_json::Error| D::Error::custom(error))
    }
}

fn group(fields: &Fields) -> Result<ParamGroup> {
    Ok(ParamGroup { lr: field(fields, "lr")?, algorithm: algorithm(fields)? })
}

fn algorithm(fields: &Fields) -> Result<Algorithm> {
    let options = Value::Object(fields.clone());
    Ok(match field::<String>(fields, "algorithm")?.as_str() {
        "AdamW" => Algorithm::AdamW(serde_json::from_value(options)?),
        "Adam" => Algorithm::Adam(serde_json::from_value(options)?),
        "Sgd" => Algorithm::Sgd(serde_json::from_value(options)?),
        "Adagrad" => Algorithm::Adagrad(serde_json::from_value(options)?),
        "RmsProp" => Algorithm::RmsProp(serde_json::from_value(options)?),
        "Lion" => Algorithm::Lion(serde_json::from_value(options)?),
        "Muon" => Algorithm::Muon(serde_json::from_value(options)?),
        other => {
            let known = &["AdamW", "Adam", "Sgd", "Adagrad", "RmsProp", "Lion", "Muon"];
            return Err(Error::unknown_variant(other, known));
        }
    })
}

fn field<T: DeserializeOwned>(fields: &Fields, name: &'static str) -> Result<T> {
    let value = fields.get(name).ok_or_else(|| Error::missing_field(name))?;
    T::deserialize(value)
}
