//! Counts what the parts of a checkpoint take in a file.
//!
//! Files have limits, so that loading a hostile one takes little memory. A part that would exceed those of either
//! format is refused when it is added, and not when the checkpoint is saved, which may be after hours of training.

use std::io::{self, Write};

use crate::checkpoint::CheckpointError;
use crate::checkpoint::limits::{
    MAX_HEADER_BYTES, MAX_MANIFEST_BYTES, MAX_PARTS, MAX_TENSORS, MAX_VALUES,
};
use crate::checkpoint::part::{OptimizerPart, Part, StatePart};
use crate::checkpoint::safetensors::PartManifest;
use crate::checkpoint::value::Value;
use crate::error::unsaveable;

/// The most values in all parts. A quarter of what a file may hold is left for the names and shapes of tensors, which
/// PyTorch's format counts as well.
const MOST_VALUES: u64 = MAX_VALUES / 4 * 3;

/// How deep the values of a part may be nested. PyTorch's format has a few levels around them.
const MOST_LEVELS: u64 = 60;

/// The most bytes that this crate's JSON, and a header with it, may take in a safetensors file. A little is left for
/// what surrounds the parts.
const MOST_JSON: u64 = MAX_MANIFEST_BYTES as u64 - (1 << 16);
const MOST_HEADER: u64 = MAX_HEADER_BYTES - (1 << 16);

/// The values of a group of an optimizer, and of each of its parameters.
const PER_GROUP: u64 = 64;
const PER_PARAMETER: u64 = 6;

/// The bytes of a tensor in the JSON, which has its checksum, and at most in the header besides its name.
const CHECKSUM: u64 = 20;
const TENSOR: u64 = 256;

/// What has been added so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Room {
    parts: u64,
    tensors: u64,
    values: u64,
    json: u64,
    header: u64,
}

impl Room {
    /// Adds a part. Returns an error if there is no room for it.
    pub(super) fn with(mut self, name: &str, part: &Part) -> Result<Self, CheckpointError> {
        let levels = self.add(name, part).map_err(|error| unsaveable(name, error.to_string()))?;
        let problem = if levels > MOST_LEVELS {
            format!("its values are nested deeper than {MOST_LEVELS} levels")
        } else if self.values > MOST_VALUES {
            let Self { values, .. } = self;
            format!(
                "the checkpoint would have about {values} values, more than {MOST_VALUES}; save long values as tensors"
            )
        } else if self.tensors > MAX_TENSORS as u64 {
            let Self { tensors, .. } = self;
            format!("the checkpoint would have {tensors} tensors, more than {MAX_TENSORS}")
        } else if self.parts > MAX_PARTS as u64 {
            format!(
                "the checkpoint would have more than {MAX_PARTS} parts; add them as one value or state"
            )
        } else if self.json > MOST_JSON || self.header > MOST_HEADER {
            let json = self.json;
            format!(
                "the names and values of the checkpoint would take {json} bytes, too many; save long values as tensors"
            )
        } else {
            return Ok(self);
        };
        Err(unsaveable(name, problem))
    }

    /// Adds what a part takes. Returns how deep its values are nested.
    pub(super) fn add(&mut self, name: &str, part: &Part) -> serde_json::Result<u64> {
        for (tensor, _) in part.tensors() {
            self.tensors += 1;
            self.values += 1;
            self.json += CHECKSUM;
            self.header += 2 * (CHECKSUM + (name.len() + tensor.len()) as u64) + TENSOR;
        }
        self.parts += 1;
        let mut levels = 0;
        match part {
            Part::Value(values) | Part::State(StatePart { values, .. }) => {
                levels = nested(values, &mut self.values);
            }
            Part::Optimizer(OptimizerPart { param_groups, .. }) => {
                let parameters = param_groups.iter().map(|group| group.params.len() as u64);
                self.values += parameters.map(|n| PER_GROUP + PER_PARAMETER * n).sum::<u64>();
            }
            _ => self.values += PER_GROUP,
        }
        let mut written = Written::default();
        if levels <= MOST_LEVELS {
            serde_json::to_writer(&mut written, &(name, PartManifest::of(part)))?;
        }
        self.json += written.bytes;
        self.header += written.bytes + written.escapes;
        Ok(levels)
    }
}

/// Counts the values in one, and what both formats need for a non-finite float. Returns how deep it is nested.
fn nested(value: &Value, values: &mut u64) -> u64 {
    *values += 1;
    match value {
        Value::Float(number) if !number.is_finite() => {
            *values += 1;
            0
        }
        Value::List(items) => 1 + items.iter().map(|item| nested(item, values)).max().unwrap_or(0),
        Value::Map(fields) => {
            *values += fields.len() as u64;
            1 + fields.iter().map(|(_, item)| nested(item, values)).max().unwrap_or(0)
        }
        _ => 0,
    }
}

/// Counts the bytes of JSON, and those that JSON within JSON escapes.
#[derive(Default)]
struct Written {
    bytes: u64,
    escapes: u64,
}

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes += bytes.len() as u64;
        self.escapes += bytes.iter().filter(|byte| matches!(byte, b'"' | b'\\')).count() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
