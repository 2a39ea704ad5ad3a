//! Tests of files in PyTorch's format.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod archives;
mod damage;
mod hostile;
mod limits;
mod oracle;
mod round_trip;

use std::io::{Cursor, Seek, Write};

use ::zip::write::SimpleFileOptions;
use ::zip::{CompressionMethod, ZipWriter};

use crate::dtype::Dtype;
use crate::error::{Malformed, invalid};
use crate::limits::Limits;
use crate::pickle;
use crate::torch::{Opened, open};
use crate::value::{TensorRef, Value};
use crate::zip as container;

pub(super) fn text(text: &str) -> Value {
    text.into()
}

pub(super) fn tensor(storage: &str, offset: u64, size: &[i64], stride: &[i64]) -> TensorRef {
    TensorRef {
        storage: storage.into(),
        dtype: Dtype::Float32,
        offset,
        shape: size.to_vec(),
        strides: stride.to_vec(),
        requires_grad: false,
    }
}

/// Writes a file. `storage` is called once for each storage, in order.
pub(super) fn save<W: Write + Seek>(
    out: W,
    root: &Value,
    storages: &[(String, u64)],
    storage: &mut dyn FnMut(usize, &mut dyn Write) -> std::io::Result<()>,
) -> std::io::Result<W> {
    let pickle = pickle::write(root, storages, &Limits::default()).map_err(invalid)?;
    container::write(out, &pickle, storages, storage)
}

pub(super) fn saved(root: &Value, storages: &[(&str, Vec<u8>)]) -> std::io::Result<Vec<u8>> {
    let sizes: Vec<_> =
        storages.iter().map(|(key, data)| ((*key).to_owned(), data.len() as u64)).collect();
    let mut fill = |index: usize, out: &mut dyn Write| out.write_all(&storages[index].1);
    Ok(save(Cursor::new(Vec::new()), root, &sizes, &mut fill)?.into_inner())
}

pub(super) fn opened(bytes: &[u8]) -> Result<Opened, Malformed> {
    open(Cursor::new(bytes), &Limits::default())
}

/// Makes an archive with the given records.
pub(super) fn archive(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    for (name, data) in records {
        zip.start_file(*name, options).unwrap();
        zip.write_all(data).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

/// Makes a checkpoint with the given pickle and one storage of four floats.
pub(super) fn with_pickle(pickle: &[u8]) -> Vec<u8> {
    archive(&[("a/data.pkl", pickle), ("a/data/0", &[1; 16])])
}

/// Makes a pickle of protocol 2 with a `STOP` at its end.
pub(super) fn pickled(parts: &[&[u8]]) -> Vec<u8> {
    [b"\x80\x02", parts.concat().as_slice(), b"."].concat()
}

pub(super) fn refused(bytes: &[u8]) -> String {
    opened(bytes).expect_err("it is refused").to_string()
}

/// Makes a checkpoint with values of every kind.
pub(super) fn small() -> Vec<u8> {
    let root = Value::Dict(vec![
        (text("w"), Value::from(tensor("0", 1, &[3], &[1]))),
        (text("n"), Value::List(vec![Value::Int(1 << 40), Value::Float(0.5), Value::None])),
    ]);
    saved(&root, &[("0", vec![3; 16])]).unwrap()
}
