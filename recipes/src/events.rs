//! Event files of TensorBoard with scalars.
//!
//! A file is a sequence of records: the length in 8 bytes, its checksum, the data, and their checksum, with numbers in
//! little endian. The data is an `Event` in the encoding of Protocol Buffers, of which a few fields are enough:
//! `wall_time = 1` (double), `step = 2` (int64), `file_version = 3` (string), `summary = 5` with
//! `value = 1 { tag = 1 (string), simple_value = 2 (float) }`, and `session_log = 7 { status = 1 (1: START) }`.

use anyhow::{Context, Result};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// An event file, to which each call appends whole records.
#[derive(Debug)]
pub struct Events(File);

impl Events {
    /// Makes a new file in a folder. TensorBoard drops what older files of the folder say of steps from `first` on,
    /// which a resumed run repeats.
    pub fn create(folder: &Path, first: u64) -> Result<Self> {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot make the folder {}", folder.display()))?;
        // TensorBoard reads the files of a folder in the order of their names.
        let name = format!("events.out.tfevents.{:010}.{}", seconds() as u64, std::process::id());
        let path = (0..)
            .map(|number| folder.join(format!("{name}.{number}")))
            .find(|path| !path.exists())
            .unwrap_or_else(|| folder.join(name));
        let file = File::create_new(&path)
            .with_context(|| format!("cannot make the file {}", path.display()))?;
        let mut events = Self(file);
        events.record(&event(0, text(3, "brain.Event:2")))?;
        events.record(&event(first, message(7, &number(1, 1))))?;
        Ok(events)
    }

    /// Adds scalars with their names at a step.
    pub fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<()> {
        let value = |&(name, value): &(&str, f64)| {
            message(1, &[text(1, name), float(2, value as f32)].concat())
        };
        let values: Vec<u8> = scalars.iter().flat_map(value).collect();
        self.record(&event(step, message(5, &values)))
    }

    /// Appends a record with one call of the system, so that a killed process leaves whole records.
    fn record(&mut self, data: &[u8]) -> Result<()> {
        let length = (data.len() as u64).to_le_bytes();
        let record = [&length[..], &masked(&length), data, &masked(data)].concat();
        self.0.write_all(&record).context("cannot write to the event file")
    }
}

fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// The checksum, in the form that protects data which themselves contain checksums.
fn masked(data: &[u8]) -> [u8; 4] {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// An event at the present time with further fields.
fn event(step: u64, fields: Vec<u8>) -> Vec<u8> {
    let time = [&tag(1, 1)[..], &seconds().to_le_bytes()].concat();
    [time, number(2, step), fields].concat()
}

/// The number of a field and its type: 0 for a varint, 1 for 8 bytes, 2 for bytes with their length, 5 for 4 bytes.
fn tag(field: u64, kind: u64) -> Vec<u8> {
    varint(field << 3 | kind)
}

/// Seven bits in each byte, the lowest first; the highest bit says that another byte follows.
fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

fn number(field: u64, value: u64) -> Vec<u8> {
    [tag(field, 0), varint(value)].concat()
}

fn float(field: u64, value: f32) -> Vec<u8> {
    [&tag(field, 5)[..], &value.to_le_bytes()].concat()
}

fn message(field: u64, content: &[u8]) -> Vec<u8> {
    [&tag(field, 2)[..], &varint(content.len() as u64), content].concat()
}

fn text(field: u64, value: &str) -> Vec<u8> {
    message(field, value.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_encoded_as_the_documentation_of_protocol_buffers_says() {
        assert_eq!(number(1, 150), [0x08, 0x96, 0x01]);
        assert_eq!(text(2, "testing"), b"\x12\x07testing");
        assert_eq!(varint(u64::MAX).len(), 10);
        // The check value of CRC-32C is 0xe3069283. Turned right by 15 bits, plus the constant, it is this.
        assert_eq!(masked(b"123456789"), 0xc78a_b0e5_u32.to_le_bytes());
    }
}
