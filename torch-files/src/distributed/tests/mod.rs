//! Tests of folders of `torch.distributed.checkpoint`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[cfg(target_os = "linux")]
mod faults;
mod hostile;
mod python;
mod replaced;
mod shards;
mod shared;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{FolderKind, FolderWriter, ShardWriter, SharedSave};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::file::{FileKind, TorchFile};
use crate::limits::Limits;
use crate::value::{TensorRef, Value};
use crate::writer::Storage;

/// A folder of a test, which is removed with it.
pub(super) struct Temporary(PathBuf);

impl Temporary {
    pub(super) fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("torch-files-folder-{}-{count}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the path of a checkpoint in it.
    pub(super) fn run(&self) -> PathBuf {
        self.0.join("run")
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

pub(super) fn dict(items: &[(&str, Value)]) -> Value {
    Value::Dict(items.iter().map(|(key, value)| ((*key).into(), value.clone())).collect())
}

/// Saves a value with these storages.
pub(super) fn save(folder: &Path, value: &Value, storages: &[Vec<u8>]) -> Result<()> {
    let writer = FolderWriter::new(value, storages.to_vec(), &Limits::default())?;
    let _durable = writer.save(folder)?;
    Ok(())
}

/// Saves by one process what [`small`] returns, or its storages as tensors of bytes.
pub(super) fn save_small(kind: FolderKind, folder: &Path, seed: u8) -> Result<()> {
    let (value, storages) = small(seed);
    if kind == FolderKind::Distcp {
        return save(folder, &value, &storages);
    }
    let tensors = storages
        .into_iter()
        .enumerate()
        .map(|(at, bytes)| (format!("t{at}"), Dtype::Uint8, vec![bytes.len() as i64], bytes));
    save_shard(folder, ShardWriter::new(tensors, BTreeMap::new(), &Limits::default())?)
}

/// Saves by one process, as `FolderWriter::save` does.
pub(super) fn save_shard(folder: &Path, mut writer: ShardWriter<impl Storage>) -> Result<()> {
    let begun = SharedSave::begin(folder, FolderKind::Safetensors)?;
    let share = writer.save_share(&begun, 0);
    let finished = share.and_then(|share| begun.finish([share], &Limits::default()));
    let _durable = finished.inspect_err(|_| {
        begun.remove_share(0);
        begun.remove_folder();
    })?;
    Ok(())
}

/// The name of the file of a rank, in the save with this number since the first one.
pub(super) fn file_of(kind: FolderKind, rank: u64, number: u64) -> String {
    kind.name_of(rank, kind.first_number() + number)
}

/// A value with tensors and everything else, and its storages.
pub(super) fn small(seed: u8) -> (Value, Vec<Vec<u8>>) {
    let tensor = |key: &str, dtype, shape: &[i64]| {
        Value::from(TensorRef::contiguous(key, dtype, shape.to_vec()))
    };
    let value = dict(&[
        (
            "model",
            dict(&[
                ("weight", tensor("0", Dtype::Float32, &[2, 3])),
                ("half", tensor("1", Dtype::BFloat16, &[3])),
            ]),
        ),
        ("list", Value::List(vec![tensor("2", Dtype::Int64, &[]), Value::Int(3), dict(&[])])),
        ("empty", tensor("3", Dtype::Float16, &[0, 4])),
        ("values", dict(&[("a", Value::Float(0.5)), ("b", Value::None), ("c", "x".into())])),
        ("numbers", Value::List(vec![Value::Int(1 << 40), Value::Bool(true)])),
        ("nothing", dict(&[])),
    ]);
    let bytes = |len: u8| (0..len).map(|at| at.wrapping_mul(7).wrapping_add(seed)).collect();
    (value, vec![bytes(24), bytes(6), bytes(8), Vec::new()])
}

/// Writes a file's value as `oracle.py` does.
pub(super) fn dumped(file: &TorchFile) -> String {
    shown(file, file.value())
}

fn shown(file: &TorchFile, value: &Value) -> String {
    match value {
        Value::None => "None".to_owned(),
        Value::Bool(value) => if *value { "True" } else { "False" }.to_owned(),
        Value::Int(value) => value.to_string(),
        Value::Float(value) => format!("f{:016x}", value.to_bits()),
        Value::Text(text) => text.to_string(),
        Value::List(items) | Value::Tuple(items) => {
            let items: String = items.iter().map(|item| shown(file, item) + ";").collect();
            format!("[{items}]")
        }
        Value::Dict(items) => {
            let item = |(key, item): &(Value, Value)| (key.key_text().unwrap(), shown(file, item));
            let mut items: Vec<_> = items.iter().map(item).collect();
            items.sort();
            let items: String = items.iter().map(|(key, item)| format!("{key}:{item};")).collect();
            format!("{{{items}}}")
        }
        Value::Tensor(tensor) => {
            let mut bytes = vec![0; usize::try_from(tensor.size_in_bytes()).unwrap()];
            file.read(tensor, &mut bytes).unwrap();
            let hex = bytes.iter().fold(String::new(), |mut text, byte| {
                write!(text, "{byte:02x}").unwrap();
                text
            });
            let shape: Vec<_> = tensor.shape.iter().map(i64::to_string).collect();
            format!("<torch.{}[{}]{hex}>", tensor.dtype, shape.join(","))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_saved_is_read_and_takes_the_same_names_as_in_python() {
    let folder = Temporary::new();
    let (value, storages) = small(1);
    save(&folder.run(), &value, &storages).unwrap();
    let file = TorchFile::open(folder.run()).unwrap();
    assert_eq!((file.kind(), file.path()), (FileKind::Distributed, &*folder.run()));
    file.verify().unwrap();
    let names: Vec<_> = file.tensors().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["empty", "list.0", "model.half", "model.weight"]);
    // A folder has its names in order, and nothing else differs.
    let mut out = std::io::Cursor::new(Vec::new());
    let writer = crate::Writer::torch(&value, storages, &Limits::default()).unwrap();
    writer.write_to(&mut out).unwrap();
    let one = TorchFile::from_bytes(out.into_inner()).unwrap();
    assert_eq!(dumped(&file), dumped(&one));
    // Elements begin at places that are good for memory maps.
    let name = folder.run().join("__0_0.distcp");
    let bytes = fs::read(name).unwrap();
    let weight: Vec<u8> = (0..24u8).map(|at| at.wrapping_mul(7).wrapping_add(1)).collect();
    let at = bytes.windows(24).position(|window| window == weight).unwrap();
    assert_eq!(at % 64, 0);
}

#[test]
fn large_tensors_are_written_without_a_copy_of_them() {
    let folder = Temporary::new();
    let elements: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    let tensor = TensorRef::contiguous("0", Dtype::Int32, vec![300_000]);
    let second = TensorRef::contiguous("1", Dtype::Uint8, vec![3]);
    let value = dict(&[("a", tensor.clone().into()), ("b", second.into())]);
    save(&folder.run(), &value, &[elements.clone(), vec![7, 8, 9]]).unwrap();
    let file = TorchFile::open(folder.run()).unwrap();
    file.verify().unwrap();
    let read: Vec<i32> = file.to_vec(file.tensors()[0].1).unwrap();
    assert!(read.iter().copied().eq(0..300_000));
    assert_eq!(file.to_vec::<u8>(file.tensors()[1].1).unwrap(), [7, 8, 9]);
}

#[test]
fn what_python_would_confuse_is_refused() {
    let one = |key: &str| Value::from(TensorRef::contiguous(key, Dtype::Uint8, vec![2]));
    let refused = |value: &Value, expected: &str| {
        let error = FolderWriter::new(value, [vec![0u8; 2]], &Limits::default()).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    };
    let twice = dict(&[("a", dict(&[("b.c", one("0"))])), ("a.b", dict(&[("c", Value::Int(1))]))]);
    refused(&twice, "a.b.c cannot");
    refused(&twice, "two of its entries");
    refused(&Value::List(Vec::new()), "only a dict");
    refused(&dict(&[("a", one("1"))]), "no data");
    let part = TensorRef::contiguous("0", Dtype::Uint8, vec![1]);
    refused(&dict(&[("a", part.into())]), "not the whole");
    refused(&dict(&[("a", Value::Tuple(vec![one("0")]))]), "has no data");
    let few = Limits { max_tensors: 1, ..Limits::default() };
    let two = dict(&[("a", one("0")), ("b", Value::None)]);
    let error = FolderWriter::new(&two, [vec![0u8; 2]], &few).unwrap_err();
    assert!(error.to_string().contains("more than 1 tensors"), "{error}");
    let index = Limits { max_pickle_bytes: 500, ..Limits::default() };
    let error = FolderWriter::new(&two, [vec![0u8; 2]], &index).unwrap_err();
    assert!(error.to_string().contains("500 bytes"), "{error}");
}
