//! Files of every format that this crate has ever written, and of PyTorch's, still load with their original content.
//!
//! What is written has the bytes of the files of this crate's version. A new format and a new version get new files with
//! their numbers: `cargo test --test files checkpoint::golden -- --ignored` writes those that are missing. Existing files never
//! change.

use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::{Checkpoint, Format, save_weights};

use crate::checkpoint::Run;
use testkit::bits::bits;
use testkit::files::Folder;
use testkit::python::{Oracle, root};

const OURS: [&str; 2] = ["format-1.safetensors", "format-1.pt"];
const PYTHONS: [&str; 2] = ["torch-2.11.pt", "torch-2.13.pt"];

/// The version of this crate, which is in most of the files that it writes.
const VERSION: &str = env!("CARGO_PKG_VERSION");

const KINDS: [Kind; 5] =
    [Kind::Half, Kind::BFloat16, Kind::Double, Kind::Int64, Kind::Float8e4m3fn];

fn golden(name: &str) -> PathBuf {
    root().join("tests/files/checkpoint/golden").join(name)
}

/// `start`, `start + 1/8`, …
fn ramp(start: f64, shape: &[i64]) -> Tensor {
    let count = shape.iter().product::<i64>();
    (Tensor::arange(count, (Kind::Float, Device::Cpu)) / 8 + start).view(shape)
}

/// The content of the files. It is computed only in ways that every processor rounds alike.
fn trained() -> Run {
    let mut run = Run::new(Device::Cpu);
    tch::no_grad(|| {
        for (name, mut variable) in run.vs.variables() {
            let start = if name == "linear.weight" { -0.25 } else { 1.0 };
            variable.copy_(&ramp(start, &variable.size()));
        }
    });
    let mut state = run.opt.state_dict().unwrap();
    for (start, name, shape) in [(1f32, "linear.weight", &[2, 3][..]), (2.0, "linear.bias", &[2])] {
        let tensors = [
            ("step", Tensor::from(start + 4.0)),
            ("exp_avg", ramp(f64::from(-start), shape)),
            ("exp_avg_sq", ramp(f64::from(start), shape)),
        ];
        let tensors = tensors.map(|(key, tensor)| (key.to_owned(), tensor));
        state.state.insert(name.to_owned(), tensors.into());
    }
    run.opt.load_state_dict(&state).unwrap();
    let mut scaler = run.scaler.state_dict().unwrap();
    (scaler.scale, scaler.growth_tracker) = (Some(16.0), Some(2));
    run.scaler.load_state_dict(&scaler).unwrap();
    run
}

fn tensor(kind: Kind) -> Tensor {
    ramp(-1.0, &[3, 5]).to_kind(kind)
}

/// A checkpoint of the run, and of a tensor of each dtype.
fn with_each_kind() -> Checkpoint {
    let mut checkpoint = trained().checkpoint();
    for kind in KINDS {
        checkpoint.add_tensor(&format!("{kind:?}"), &tensor(kind)).unwrap();
    }
    checkpoint
}

fn check(path: &Path) {
    let checkpoint = Checkpoint::load(path).unwrap();
    let mut run = Run::new(Device::Cpu);
    run.restore(&checkpoint).unwrap();
    assert_eq!(run.fingerprint(), trained().fingerprint(), "{}", path.display());
    for kind in KINDS {
        let loaded = checkpoint.tensor(&format!("{kind:?}")).unwrap();
        assert_eq!((loaded.kind(), loaded.size()), (kind, vec![3, 5]), "{}", path.display());
        assert_eq!(bits(&loaded), bits(&tensor(kind)), "{kind:?} in {}", path.display());
    }
    let value: (u64, String, Option<f64>) = checkpoint.value("value").unwrap();
    assert_eq!(value, (7, "ä".to_owned(), Some(0.1)));
}

/// Writes a file of every kind to a folder. Returns their names.
fn write_all(folder: &Path) -> Vec<String> {
    let mut checkpoint = with_each_kind();
    checkpoint.add_value("value", &(7, "ä", [0.1, f64::NAN])).unwrap();
    let transposed = tensor(Kind::BFloat16).transpose(0, 1);
    checkpoint.add_tensor("transposed", &transposed).unwrap();
    let formats = [
        (Format::Safetensors, "run", "safetensors"),
        (Format::Torch, "run", "pt"),
        (Format::TorchByName, "by-name", "pt"),
    ];
    let mut names = Vec::new();
    for (format, kind, extension) in formats {
        let name = format!("{kind}-{VERSION}.{extension}");
        checkpoint.save_as(folder.join(&name), format).unwrap();
        names.push(name);
    }
    let weights = [("a.weight", tensor(Kind::Half)), ("b", transposed), ("c", tensor(Kind::Int64))];
    for extension in ["safetensors", "pt"] {
        let name = format!("weights-{VERSION}.{extension}");
        let tensors = weights.iter().map(|(name, tensor)| (*name, tensor));
        save_weights(folder.join(&name), tensors).unwrap();
        names.push(name);
    }
    names
}

#[test]
fn what_is_written_has_the_bytes_of_before() {
    let folder = Folder::new();
    for name in write_all(&folder.0) {
        let kept = std::fs::read(golden(&name)).unwrap_or_else(|_| panic!("{name} is missing"));
        assert!(std::fs::read(folder.0.join(&name)).unwrap() == kept, "{name}");
    }
}

#[test]
fn golden_files_load() {
    for name in OURS.into_iter().chain(PYTHONS) {
        check(&golden(name));
    }
}

#[test]
#[ignore = "writes the golden files that are missing"]
fn write_golden_files() {
    let mut checkpoint = with_each_kind();
    checkpoint.add_value("value", &(7, "ä", 0.1)).unwrap();
    for name in OURS.map(golden).iter().filter(|path| !path.exists()) {
        checkpoint.save(name).unwrap();
    }
    let folder = Folder::new();
    for name in write_all(&folder.0).iter().filter(|name| !golden(name).exists()) {
        std::fs::copy(folder.0.join(name), golden(name)).unwrap();
    }
    let Some(python) = Oracle::find("checkpoint.py") else { return };
    let version = python.run(&["version"], "");
    for name in PYTHONS.iter().filter(|name| **name == format!("torch-{}.pt", version.trim())) {
        if !golden(name).exists() {
            python.run(&["golden", golden(name).to_str().unwrap()], "");
        }
    }
}
