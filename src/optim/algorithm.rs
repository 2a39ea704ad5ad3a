//! The algorithm of a parameter group, with its options.
//!
//! Deserialized by hand: serde's derive for tagged and flattened fields buffers numbers, and cannot read them again if
//! any crate of the program enables serde_json's feature `arbitrary_precision`.

use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::error::Result;
use crate::ffi::OptimOptions;
use crate::optim::config::non_negative;
use crate::optim::{Adagrad, Adam, AdamW, Lion, Muon, RmsProp, Sgd};

/// The algorithm of a fused optimizer, with its options.
///
/// # Examples
///
/// ```
/// use tch::{Device, nn};
/// use tch_amp::optim::{AdamW, Algorithm};
///
/// let configured = r#"{"algorithm": "AdamW", "weight_decay": 0.1}"#;
/// let algorithm: Algorithm = serde_json::from_str(configured)?;
/// assert_eq!(algorithm, AdamW { weight_decay: 0.1, ..Default::default() }.into());
/// let opt = algorithm.build(&nn::VarStore::new(Device::Cpu), 1e-3)?;
/// assert_eq!(opt.param_group(0)?.algorithm, algorithm);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "algorithm")]
#[non_exhaustive]
pub enum Algorithm {
    /// [`AdamW`].
    AdamW(AdamW),
    /// [`Adam`].
    Adam(Adam),
    /// [`Sgd`].
    Sgd(Sgd),
    /// [`Adagrad`].
    Adagrad(Adagrad),
    /// [`RmsProp`].
    RmsProp(RmsProp),
    /// [`Lion`].
    Lion(Lion),
    /// [`Muon`].
    Muon(Muon),
}

macro_rules! from {
    ($($config:ident)*) => {$(
        impl From<$config> for Algorithm {
            fn from(config: $config) -> Self {
                Self::$config(config)
            }
        }
    )*};
}

from!(AdamW Adam Sgd Adagrad RmsProp Lion Muon);

impl Algorithm {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::AdamW(_) => "AdamW",
            Self::Adam(_) => "Adam",
            Self::Sgd(_) => "Sgd",
            Self::Adagrad(_) => "Adagrad",
            Self::RmsProp(_) => "RmsProp",
            Self::Lion(_) => "Lion",
            Self::Muon(_) => "Muon",
        }
    }

    pub(crate) fn check(&self, lr: f64) -> Result<()> {
        non_negative("lr", lr)?;
        match self {
            Self::AdamW(config) => config.check(),
            Self::Adam(config) => config.check(),
            Self::Sgd(config) => config.check(),
            Self::Adagrad(config) => config.check(),
            Self::RmsProp(config) => config.check(),
            Self::Lion(config) => config.check(),
            Self::Muon(config) => config.check(lr),
        }
    }

    /// The options of a step, as the shim takes them.
    pub(crate) fn options(&self, lr: f64) -> OptimOptions {
        match self {
            Self::AdamW(config) => config.options(lr),
            Self::Adam(config) => config.options(lr),
            Self::Sgd(config) => config.options(lr),
            Self::Adagrad(config) => config.options(lr),
            Self::RmsProp(config) => config.options(lr),
            Self::Lion(config) => config.options(lr),
            Self::Muon(config) => config.options(lr),
        }
    }

    /// Sets the weight decay, for Muon also that of its AdamW.
    pub(crate) fn set_weight_decay(&mut self, weight_decay: f64) {
        match self {
            Self::AdamW(config) => config.weight_decay = weight_decay,
            Self::Adam(config) => config.weight_decay = weight_decay,
            Self::Sgd(config) => config.weight_decay = weight_decay,
            Self::Adagrad(config) => config.weight_decay = weight_decay,
            Self::RmsProp(config) => config.weight_decay = weight_decay,
            Self::Lion(config) => config.weight_decay = weight_decay,
            Self::Muon(config) => {
                (config.weight_decay, config.adamw.weight_decay) = (weight_decay, weight_decay);
            }
        }
    }

    /// The momentum; for Adam, AdamW and Lion the first beta, as in tch.
    pub(crate) fn momentum(mut self) -> Option<f64> {
        self.momentum_mut().map(|momentum| *momentum)
    }

    /// The momentum; for Adam, AdamW and Lion the first beta, as in tch.
    pub(crate) fn momentum_mut(&mut self) -> Option<&mut f64> {
        match self {
            Self::AdamW(config) => Some(&mut config.betas.0),
            Self::Adam(config) => Some(&mut config.betas.0),
            Self::Sgd(config) => Some(&mut config.momentum),
            Self::Adagrad(_) => None,
            Self::RmsProp(config) => Some(&mut config.momentum),
            Self::Lion(config) => Some(&mut config.betas.0),
            Self::Muon(config) => Some(&mut config.momentum),
        }
    }

    /// Returns whether AdamW steps a parameter in place of Muon.
    pub(crate) fn leaves_to_adamw(&self, is_matrix: bool) -> bool {
        matches!(self, Self::Muon(muon) if !(muon.use_muon && is_matrix))
    }

    /// The algorithm that steps a parameter: AdamW where Muon leaves it to that.
    pub(crate) fn of(&self, is_matrix: bool) -> Self {
        match *self {
            Self::Muon(Muon { adamw, .. }) if self.leaves_to_adamw(is_matrix) => adamw.into(),
            algorithm => algorithm,
        }
    }
}

/// The options of a parameter group.
///
/// # Examples
///
/// ```
/// use tch::{Device, nn};
/// use tch_amp::optim::{AdamW, ParamGroup};
///
/// let mut opt = AdamW::default().build(&nn::VarStore::new(Device::Cpu), 1e-3)?;
/// let options = ParamGroup::new(1e-4, AdamW { weight_decay: 0.1, ..Default::default() });
/// opt.set_param_group(0, options)?;
/// assert_eq!(opt.param_group(0)?, &options);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ParamGroup {
    /// The learning rate.
    pub lr: f64,
    /// The algorithm, which is the same for all groups, and its options.
    #[serde(flatten)]
    pub algorithm: Algorithm,
}

impl ParamGroup {
    /// Makes the options of a group, for example from an [`AdamW`](crate::optim::AdamW).
    pub fn new(lr: f64, algorithm: impl Into<Algorithm>) -> Self {
        Self { lr, algorithm: algorithm.into() }
    }

    /// The options of a step, as the shim takes them: those of the algorithm, and those of AdamW for what Muon leaves
    /// to it.
    pub(crate) fn options(&self) -> [OptimOptions; 2] {
        let own = self.algorithm.options(self.lr);
        let rest = match self.algorithm {
            Algorithm::Muon(Muon { adamw, adamw_lr_factor, .. }) => {
                Algorithm::from(adamw).options(self.lr * adamw_lr_factor)
            }
            _ => own,
        };
        [own, rest]
    }
}

/// The fields of a saved form.
pub(super) type OptionFields = Map<String, Value>;

type JsonResult<T> = std::result::Result<T, serde_json::Error>;

impl<'de> Deserialize<'de> for Algorithm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        Self::read(&OptionFields::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl<'de> Deserialize<'de> for ParamGroup {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        Self::read(&OptionFields::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl ParamGroup {
    /// Reads the options, whatever other fields there are.
    pub(super) fn read(fields: &OptionFields) -> JsonResult<Self> {
        Ok(Self { lr: field(fields, "lr")?, algorithm: Algorithm::read(fields)? })
    }
}

impl Algorithm {
    fn read(fields: &OptionFields) -> JsonResult<Self> {
        let options = Value::Object(fields.clone());
        Ok(match field::<String>(fields, "algorithm")?.as_str() {
            "AdamW" => Self::AdamW(serde_json::from_value(options)?),
            "Adam" => Self::Adam(serde_json::from_value(options)?),
            "Sgd" => Self::Sgd(serde_json::from_value(options)?),
            "Adagrad" => Self::Adagrad(serde_json::from_value(options)?),
            "RmsProp" => Self::RmsProp(serde_json::from_value(options)?),
            "Lion" => Self::Lion(serde_json::from_value(options)?),
            "Muon" => Self::Muon(serde_json::from_value(options)?),
            other => {
                let known = &["AdamW", "Adam", "Sgd", "Adagrad", "RmsProp", "Lion", "Muon"];
                return Err(serde_json::Error::unknown_variant(other, known));
            }
        })
    }
}

fn field<T: DeserializeOwned>(fields: &OptionFields, name: &'static str) -> JsonResult<T> {
    let value = fields.get(name).ok_or_else(|| serde_json::Error::missing_field(name))?;
    T::deserialize(value)
}
