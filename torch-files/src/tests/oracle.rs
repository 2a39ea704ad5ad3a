//! Tests against PyTorch: this crate reads the files that PyTorch saves, and PyTorch reads those of this crate.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use super::*;
use crate::value::Text;

/// Writes a value like `oracle.py` does.
#[derive(Default)]
struct Dump<'a> {
    file: &'a [u8],
    storages: HashMap<Text, usize>,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn joined(numbers: &[i64]) -> String {
    numbers.iter().map(i64::to_string).collect::<Vec<_>>().join(",")
}

impl Dump<'_> {
    fn tensor(&mut self, tensor: &TensorRef, opened: &Opened) -> String {
        let record = &opened.storages[&tensor.storage];
        let start = usize::try_from(record.offset).unwrap();
        let data = &self.file[start..][..usize::try_from(record.len).unwrap()];
        assert_eq!(crc32fast::hash(data), record.crc32);
        let next = self.storages.len();
        let empty = format!("empty {next}").into();
        let key = if data.is_empty() { empty } else { tensor.storage.clone() };
        let number = *self.storages.entry(key).or_insert(next);
        let mut places = if tensor.shape.contains(&0) { vec![] } else { vec![tensor.offset] };
        for (&size, &stride) in tensor.shape.iter().zip(&tensor.strides) {
            let (size, stride) = (u64::try_from(size).unwrap(), u64::try_from(stride).unwrap());
            let along = |place: u64| (0..size).map(move |index| place + index * stride);
            places = places.into_iter().flat_map(along).collect();
        }
        let element = tensor.dtype.size();
        let places = places.into_iter().map(|place| usize::try_from(place).unwrap() * element);
        let elements: Vec<_> = places.flat_map(|at| data[at..at + element].to_vec()).collect();
        let dtype = tensor.dtype;
        let (size, stride) = (joined(&tensor.shape), joined(&tensor.strides));
        let (bytes, offset, elements) = (data.len(), tensor.offset, hex(&elements));
        format!("torch.{dtype} {number}/{bytes}@{offset} [{size}] [{stride}] {elements}")
    }

    fn value(&mut self, value: &Value, opened: &Opened) -> String {
        let all = |dump: &mut Self, items: &[Value]| {
            items.iter().map(|item| dump.value(item, opened) + ";").collect::<String>()
        };
        match value {
            Value::None => "None".to_owned(),
            Value::Bool(value) => if *value { "True" } else { "False" }.to_owned(),
            Value::Int(value) => format!("i{value}"),
            Value::Uint(value) => format!("i{value}"),
            Value::Map(_) => panic!("a file holds dicts"),
            Value::Opaque(what) => format!("?{what}"),
            Value::Float(value) => format!("f{:016x}", value.to_bits()),
            Value::Text(text) => format!("s{}", hex(text.as_bytes())),
            Value::List(items) => format!("[{}]", all(self, items)),
            Value::Tuple(items) => format!("({})", all(self, items)),
            Value::Dict(items) => {
                let items = items.iter().map(|(key, item)| {
                    format!("{}:{};", self.value(key, opened), self.value(item, opened))
                });
                format!("{{{}}}", items.collect::<String>())
            }
            Value::Tensor(tensor) => {
                let requires_grad = self.value(&Value::Bool(tensor.requires_grad), opened);
                format!("<{} {requires_grad}>", self.tensor(tensor, opened))
            }
        }
    }
}

fn dumped(file: &[u8]) -> String {
    let opened = opened(file).unwrap();
    Dump { file, ..Dump::default() }.value(&opened.root, &opened)
}

/// Returns the Python to compare with. With `TCH_AMP_REQUIRE_PYTHON=1` it is a failure if there is none.
fn python() -> Option<std::path::PathBuf> {
    let set = std::env::var_os("TCH_AMP_PYTHON").map(std::path::PathBuf::from);
    let required = std::env::var_os("TCH_AMP_REQUIRE_PYTHON").is_some_and(|value| value == "1");
    assert!(set.is_some() || !required, "TCH_AMP_PYTHON names no Python");
    if set.is_none() {
        println!("skipped: set TCH_AMP_PYTHON to a Python with torch");
    }
    set
}

fn run(python: &Path, args: &[&str]) -> String {
    let mut command = Command::new(python);
    command.args(["-B", "-W", "ignore", "-c", include_str!("oracle.py")]).args(args);
    let output = command.env_remove("LD_LIBRARY_PATH").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn folder(name: &str) -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("tch-amp-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn what_pytorch_saves_is_read() {
    if let Some(python) = python() {
        let folder = folder("made");
        let answer = run(&python, &["make", folder.to_str().unwrap()]);
        let mut count = 0;
        for line in answer.lines() {
            let (path, expected) = line.split_once(' ').unwrap();
            assert_eq!(dumped(&std::fs::read(path).unwrap()), expected, "{path}");
            count += 1;
        }
        assert_eq!(count, 17);
        std::fs::remove_dir_all(folder).unwrap();
    }
}

fn assert_pytorch_reads(root: &Value, storages: &[(&str, Vec<u8>)], name: &str) {
    let file = saved(root, storages).unwrap();
    let expected = dumped(&file);
    if let Some(python) = python() {
        let folder = folder(name);
        let path = folder.join("saved.pt");
        std::fs::write(&path, &file).unwrap();
        let answer = run(&python, &["dump", path.to_str().unwrap()]);
        for line in answer.lines() {
            assert_eq!(line, expected);
        }
        assert_eq!(answer.lines().count(), 2, "with and without mmap");
        std::fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn pytorch_reads_what_is_saved() {
    let nan = 0xffc0_dead_u32.to_le_bytes();
    let storages = vec![("0", nan.repeat(12)), ("1", vec![])];
    let keys: Vec<_> = (2..2 + Dtype::ALL.len()).map(|key| key.to_string()).collect();
    let more = keys.iter().zip(Dtype::ALL).map(|(key, dtype)| (key.as_str(), data(dtype)));
    let storages: Vec<_> = storages.into_iter().chain(more).collect();
    let kinds = keys
        .iter()
        .zip(Dtype::ALL)
        .map(|(key, dtype)| Value::from(TensorRef { dtype, ..tensor(key, 1, &[2, 1], &[1, 1]) }));
    let ints = [0, 255, 256, 65_535, 65_536, -1, -129, 1 << 40, i64::MIN, i64::MAX];
    let parameter = TensorRef { requires_grad: true, ..tensor("0", 0, &[12], &[1]) };
    let root = Value::Dict(vec![
        (text("kinds"), Value::List(kinds.collect())),
        (text("parameter"), Value::from(parameter)),
        (text("transposed"), Value::from(tensor("0", 1, &[3, 2], &[1, 3]))),
        (text("expanded"), Value::from(tensor("0", 1, &[3, 2], &[0, 1]))),
        (text("scalar"), Value::from(tensor("0", 11, &[], &[]))),
        (text("empty"), Value::from(tensor("1", 0, &[0, 3], &[3, 1]))),
        (text("ints"), Value::List(ints.map(Value::Int).to_vec())),
        (text("floats"), Value::Tuple(vec![Value::Float(1e-3), Value::Float(f64::INFINITY)])),
        (text("täst 🦀"), Value::Dict(vec![(Value::Int(0), Value::None)])),
        (text("flags"), Value::Tuple(vec![Value::Bool(true), Value::None, Value::Tuple(vec![])])),
        (text("lists"), Value::List(vec![Value::List(vec![]), Value::Dict(vec![])])),
    ]);
    assert_pytorch_reads(&root, &storages, "saved");
}

fn data(dtype: Dtype) -> Vec<u8> {
    let bytes = 3 * u8::try_from(dtype.size()).unwrap();
    if dtype == Dtype::Bool { vec![1, 0, 1] } else { (1..=bytes).collect() }
}

#[test]
fn pytorch_reads_a_bare_tensor() {
    let root = Value::from(tensor("0", 0, &[2], &[1]));
    assert_pytorch_reads(&root, &[("0", vec![0; 8])], "bare");
}

/// Needs 5 GB of disk space and a minute.
#[test]
#[ignore = "big"]
fn zip64_is_written_and_read() {
    let root = Value::List(vec![
        Value::from(tensor("0", (1 << 30) + 100, &[3], &[1])),
        Value::from(tensor("70000", 0, &[1], &[1])),
    ]);
    let mut storages = vec![("0".to_owned(), (1u64 << 32) + 4096)];
    storages.extend((1..=70_000).map(|key| (key.to_string(), 4)));
    let mut fill = |index: usize, out: &mut dyn Write| {
        let chunk = vec![1; 4096];
        let left = storages[index].1;
        (0..left / 4096).try_for_each(|_| out.write_all(&chunk))?;
        out.write_all(&chunk[..usize::try_from(left % 4096).unwrap()])
    };
    let folder = folder("big");
    let path = folder.join("big.pt");
    let out = std::fs::File::create(&path).unwrap();
    save(out, &root, &storages, &mut fill).unwrap().sync_all().unwrap();
    let opened = open(std::fs::File::open(&path).unwrap(), &Limits::default()).unwrap();
    assert_eq!(opened.root, root);
    assert_eq!(opened.storages.len(), 70_001);
    assert_eq!(opened.storages["0"].len, (1 << 32) + 4096);
    assert!(opened.storages["70000"].offset > 1 << 32);
    assert!(opened.storages.values().all(|record| record.offset % 64 == 0));
    let script = "import sys, torch; a, b = torch.load(sys.argv[1], mmap=True, weights_only=True); \
        print(a.view(torch.int32).tolist(), b.view(torch.int32).tolist())";
    if let Some(python) = python() {
        let mut command = Command::new(python);
        let output = command.args(["-c", script]).arg(&path).output().unwrap();
        let answer = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(answer.trim(), "[16843009, 16843009, 16843009] [16843009]");
    }
    std::fs::remove_dir_all(folder).unwrap();
}
