//! Reads policies from text, and prints them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};
use tch::{Device, Kind};

use crate::error::{Error, PolicyError, Result};
use crate::policy::dtypes::{allowed, name, named};
use crate::policy::{OptLevel, Policy};

/// The value, or what is wrong with the text.
type Read<T> = std::result::Result<T, String>;

impl Policy {
    /// Parses a policy, in which `half` and the levels `O1` to `O3` stand for the [`half_dtype`](super::half_dtype) of
    /// `device`. The [type](Policy#as-text) documents the grammar. Corresponds to `jmp.get_policy`.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Text`] with what is wrong, what is allowed, and examples.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind};
    /// use tch_amp::Policy;
    ///
    /// assert_eq!(Policy::parse("O1", Device::Cpu)?, Policy::MIXED_BF16);
    /// assert_eq!(Policy::parse("O1", Device::Cuda(0))?, Policy::MIXED_F16);
    /// assert_eq!(Policy::parse("c=half", Device::Cpu)?.output, Kind::BFloat16);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn parse(text: &str, device: Device) -> Result<Self> {
        let small = text.to_ascii_lowercase();
        let read = if small.trim().is_empty() {
            Err("it is empty".to_owned())
        } else if small.contains('=') {
            assignments(&small, device)
        } else if let Ok(level) = small.parse::<OptLevel>() {
            Ok(level.policy(device))
        } else {
            one_kind(small.trim(), device)
        };
        read.map_err(|problem| Error::Policy(PolicyError::Text { text: text.to_owned(), problem }))
    }
}

fn one_kind(text: &str, device: Device) -> Read<Policy> {
    let unknown = || {
        format!(
            "`{text}` is neither a dtype nor a level; dtypes are {}, levels O0 to O3",
            allowed()
        )
    };
    named(text, device).map(Policy::all).ok_or_else(unknown)
}

fn assignments(text: &str, device: Device) -> Read<Policy> {
    // The values of params, compute and output.
    let mut given: [Option<Kind>; 3] = [None; 3];
    for part in text.split(',') {
        let (field, kind) = assignment(part, device)?;
        if given[field].replace(kind).is_some() {
            return Err(format!("it sets {} twice", FIELDS[field].0));
        }
    }
    let [param, compute, output] = given;
    let param = param.unwrap_or(Kind::Float);
    let compute = compute.unwrap_or(param);
    Ok(Policy { param, compute, output: output.unwrap_or(compute) })
}

const FIELDS: [(&str, &str); 3] = [("params", "p"), ("compute", "c"), ("output", "o")];

fn assignment(part: &str, device: Device) -> Read<(usize, Kind)> {
    if part.trim().is_empty() {
        return Err("it has a comma with nothing before or after it".to_owned());
    }
    let (key, value) = part.split_once('=').ok_or_else(|| {
        format!(
            "`{}` is not an assignment; write params=, compute= or output= before it",
            part.trim()
        )
    })?;
    let (key, value) = (key.trim(), value.trim());
    let fits = |(long, short): &(&str, &str)| [*long, *short].contains(&key);
    let field = FIELDS.iter().position(fits).ok_or_else(|| {
        format!("`{key}` cannot be set; set params (p), compute (c) and output (o)")
    })?;
    let kind = named(value, device).ok_or_else(|| no_kind(value, FIELDS[field].0))?;
    Ok((field, kind))
}

fn no_kind(value: &str, field: &str) -> String {
    let start = format!("`{value}` is not a dtype for {field}");
    if value.contains('=') {
        return format!("{start}; separate assignments by commas");
    }
    format!("{start}; dtypes are {}", allowed())
}

impl FromStr for Policy {
    type Err = Error;

    /// Parses a policy, like [`parse`](Policy::parse), for CUDA if it is available, otherwise for the CPU.
    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text, Device::cuda_if_available())
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for ((field, _), kind) in FIELDS.iter().zip([self.param, self.compute, self.output]) {
            let comma = if *field == "params" { "" } else { "," };
            match name(kind) {
                Some(kind) => write!(f, "{comma}{field}={kind}")?,
                None => write!(f, "{comma}{field}={kind:?}")?,
            }
        }
        Ok(())
    }
}

impl Serialize for Policy {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let policy = self.checked().map_err(ser::Error::custom)?;
        serializer.collect_str(&policy)
    }
}

impl<'de> Deserialize<'de> for Policy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}
