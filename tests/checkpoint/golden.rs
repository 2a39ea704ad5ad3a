//! Files of every format that this crate has ever written, and of PyTorch's, still load with their original content.
//!
//! A new format gets new files with its number: `cargo test --test checkpoint golden -- --ignored` writes those that
//! are missing. Existing files never change.

use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::Checkpoint;

use crate::Run;
use crate::common::bits::bits;
use crate::common::python::{Oracle, root};

const OURS: [&str; 2] = ["format-1.safetensors", "format-1.pt"];
const PYTHONS: [&str; 2] = ["torch-2.11.pt", "torch-2.13.pt"];
const KINDS: [Kind; 5] =
    [Kind::Half, Kind::BFloat16, Kind::Double, Kind::Int64, Kind::Float8e4m3fn];

fn golden(name: &str) -> PathBuf {
    root().join("tests/checkpoint/golden").join(name)
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

#[test]
fn golden_files_load() {
    for name in OURS.into_iter().chain(PYTHONS) {
        check(&golden(name));
    }
}

#[test]
#[ignore = "writes the golden files that are missing"]
fn write_golden_files() {
    let mut run = trained();
    let mut checkpoint = run.checkpoint();
    for kind in KINDS {
        checkpoint.add_tensor(&format!("{kind:?}"), &tensor(kind)).unwrap();
    }
    checkpoint.add_value("value", &(7, "ä", 0.1)).unwrap();
    for name in OURS.map(golden).iter().filter(|path| !path.exists()) {
        checkpoint.save(name).unwrap();
    }
    let Some(python) = Oracle::find("checkpoint.py") else { return };
    let version = python.run(&["version"], "");
    for name in PYTHONS.iter().filter(|name| **name == format!("torch-{}.pt", version.trim())) {
        if !golden(name).exists() {
            python.run(&["golden", golden(name).to_str().unwrap()], "");
        }
    }
}
