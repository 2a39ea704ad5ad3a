//! Which files of PyTorch this crate and other readers read, and in what time: see `corpus.py` for the files.
//!
//! `peers FOLDER` prints, for each reader, how many files it read completely, in part, with other numbers, or refused;
//! what Python's `torch.load` did is read from `FOLDER/python.jsonl`, which `corpus.py read` prints. `peers time READER
//! FILE` prints the seconds, the peak memory in MB and the number of tensors of reading all of a big file.

use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};

/// The dtype, the shape and the CRC-32 of a tensor.
type Described = (String, Vec<usize>, u32);

type Read = Result<Vec<Described>, String>;

const READERS: [(&str, fn(&Path) -> Read); 3] = [
    ("torch-files", by_torch_files),
    ("burn-store (pytorch-reader 0.22.1)", by_burn),
    ("candle-core 0.11.1", by_candle),
];

fn main() {
    let args: Vec<_> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [folder] => compare(Path::new(folder)),
        ["time", reader, path] => time(reader, Path::new(path)),
        _ => eprintln!("usage: peers FOLDER | peers time READER FILE"),
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn by_torch_files(path: &Path) -> Read {
    let file = torch_files::TorchFile::open(path).map_err(text)?;
    file.verify().map_err(text)?;
    let tensors = file.tensors().into_iter().map(|(_, tensor)| {
        let mut bytes = vec![0; tensor.size_in_bytes() as usize];
        file.read(tensor, &mut bytes).map_err(text)?;
        let shape = tensor.shape.iter().map(|&size| size as usize).collect();
        Ok((tensor.dtype.to_string(), shape, crc32fast::hash(&bytes)))
    });
    tensors.collect()
}

fn by_burn(path: &Path) -> Read {
    let reader = pytorch_reader::PytorchReader::new(path).map_err(text)?;
    let tensors = reader.tensors().values().map(|tensor| {
        let bytes = tensor.read().map_err(text)?;
        let dtype = format!("{:?}", tensor.dtype()).to_lowercase();
        let name = match dtype.as_str() {
            "f64" => "float64",
            "f32" => "float32",
            "f16" => "float16",
            "bf16" => "bfloat16",
            "i64" => "int64",
            "i32" => "int32",
            "i16" => "int16",
            "i8" => "int8",
            "u64" => "uint64",
            "u32" => "uint32",
            "u16" => "uint16",
            "u8" => "uint8",
            other => other,
        };
        Ok((name.to_owned(), tensor.shape().to_vec(), crc32fast::hash(&bytes)))
    });
    tensors.collect()
}

fn by_candle(path: &Path) -> Read {
    let tensors = candle_core::pickle::read_all(path).map_err(text)?;
    tensors.iter().map(|(_, tensor)| of_candle(tensor)).collect()
}

fn of_candle(tensor: &Tensor) -> Result<Described, String> {
    let flat = tensor.flatten_all().map_err(text)?;
    macro_rules! bytes {
        ($type:ty) => {
            flat.to_vec1::<$type>()
                .map_err(text)?
                .into_iter()
                .flat_map(<$type>::to_le_bytes)
                .collect()
        };
    }
    let (name, bytes): (_, Vec<u8>) = match tensor.dtype() {
        DType::U8 => ("uint8", bytes!(u8)),
        DType::U32 => ("uint32", bytes!(u32)),
        DType::I64 => ("int64", bytes!(i64)),
        DType::BF16 => ("bfloat16", bytes!(half::bf16)),
        DType::F16 => ("float16", bytes!(half::f16)),
        DType::F32 => ("float32", bytes!(f32)),
        DType::F64 => ("float64", bytes!(f64)),
        other => return Err(format!("the dtype {other:?}")),
    };
    Ok((name.to_owned(), tensor.dims().to_vec(), crc32fast::hash(&bytes)))
}

/// The outcomes of one reader, and an example of each.
#[derive(Default)]
struct Outcomes(BTreeMap<&'static str, (usize, String)>);

impl Outcomes {
    fn note(&mut self, name: &str, read: &Read, expected: &[Described]) {
        let outcome = match read {
            Err(_) => "refused",
            Ok(found) => {
                let mut left = expected.to_vec();
                let mut others = 0;
                for one in found {
                    match left.iter().position(|other| other == one) {
                        Some(at) => drop(left.swap_remove(at)),
                        None => others += 1,
                    }
                }
                match (others, left.len()) {
                    (0, 0) => "complete",
                    (0, _) => "in part",
                    _ => "other numbers",
                }
            }
        };
        let why = read.as_ref().err().map_or(String::new(), |why| format!(": {why}"));
        let (count, _) = self.0.entry(outcome).or_insert((0, format!("{name}{why}")));
        *count += 1;
    }
}

fn compare(folder: &Path) {
    let mut names: Vec<_> = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .filter_map(|name| Some(name.strip_suffix(".json")?.to_owned()))
        .collect();
    names.sort();
    let python = fs::read_to_string(folder.join("python.jsonl")).unwrap_or_default();
    let python: BTreeMap<String, Read> = python.lines().map(of_python).collect();
    let mut all: Vec<(&str, Outcomes)> =
        READERS.iter().map(|(name, _)| (*name, Outcomes::default())).collect();
    all.push(("torch.load, weights_only=True", Outcomes::default()));
    for name in &names {
        let json = fs::read(folder.join(format!("{name}.json"))).expect("a list");
        let expected: Vec<Described> = serde_json::from_slice(&json).expect("tensors");
        for ((_, read), (_, outcomes)) in READERS.iter().zip(&mut all) {
            let path = folder.join(name);
            let found = catch_unwind(AssertUnwindSafe(|| read(&path)));
            outcomes.note(name, &found.unwrap_or_else(|_| Err("a panic".to_owned())), &expected);
        }
        if let (Some(read), Some((_, outcomes))) = (python.get(name), all.last_mut()) {
            outcomes.note(name, read, &expected);
        }
    }
    println!("{} files\n", names.len());
    println!("| reader | complete | in part | other numbers | refused |\n|---|---|---|---|---|");
    for (reader, Outcomes(outcomes)) in &all {
        let cells = ["complete", "in part", "other numbers", "refused"]
            .map(|kind| outcomes.get(kind).map_or(0, |(count, _)| *count).to_string());
        println!("| {reader} | {} |", cells.join(" | "));
    }
    println!("\nThe first of each that is not complete:\n");
    for (reader, Outcomes(outcomes)) in &all {
        for (kind, (_, example)) in outcomes.iter().filter(|(kind, _)| **kind != "complete") {
            println!("- {reader}, {kind}: {example}");
        }
    }
}

fn of_python(line: &str) -> (String, Read) {
    let (name, found, why): (String, Option<Vec<Described>>, Option<String>) =
        serde_json::from_str(line).expect("a line of corpus.py");
    (name, found.ok_or_else(|| why.unwrap_or_default()))
}

fn time(reader: &str, path: &Path) {
    let before = status("VmRSS");
    fs::write("/proc/self/clear_refs", "5").expect("Linux");
    let start = Instant::now();
    let is_safetensors = path.extension().is_some_and(|extension| extension == "safetensors");
    let count = match (reader, is_safetensors) {
        ("torch-files", _) => {
            let file = torch_files::TorchFile::open(path).expect("a file");
            file.verify().expect("no damage");
            let read: Vec<_> = file
                .tensors()
                .into_iter()
                .map(|(_, tensor)| {
                    let mut bytes = vec![0; tensor.size_in_bytes() as usize];
                    file.read(tensor, &mut bytes).expect("its elements");
                    bytes
                })
                .collect();
            read.len()
        }
        ("burn", false) => {
            let reader = pytorch_reader::PytorchReader::new(path).expect("a file");
            let read: Vec<_> =
                reader.tensors().values().map(|one| one.read().expect("bytes")).collect();
            read.len()
        }
        ("candle", false) => candle_core::pickle::read_all(path).expect("a file").len(),
        ("candle", true) => {
            candle_core::safetensors::load(path, &Device::Cpu).expect("a file").len()
        }
        ("safetensors", true) => {
            let bytes = fs::read(path).expect("a file");
            safetensors::SafeTensors::deserialize(&bytes).expect("a header").len()
        }
        _ => panic!("{reader} does not read {}", path.display()),
    };
    let seconds = start.elapsed().as_secs_f64();
    println!("{seconds:.3} {:.0} {count}", status("VmHWM") - before);
}

/// A field of this process in MB.
fn status(field: &str) -> f64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|line| line.starts_with(field)).expect("the field");
    line.split_whitespace().nth(1).expect("a number").parse::<f64>().expect("a number") / 1000.0
}
