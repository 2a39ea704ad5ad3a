//! Weights alone are opened by tch, by Python and by this crate.

use std::collections::BTreeMap;

use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::{Checkpoint, CheckpointError, Stateful, save_weights};
use tch_amp::optim::AdamW;

use crate::checkpoint::python::hex_float;
use crate::checkpoint::{averages_of, checkpoint_error, own, unsaveable};
use testkit::Case;
use testkit::bits::{bits, hex};
use testkit::checkpoints::checkpoint_of;
use testkit::files::{Folder, names_in};
use testkit::for_each_device;
use testkit::programs::this_test_by;
use testkit::python::Oracle;

const EXTENSIONS: [&str; 6] = ["safetensors", "pt", "bin", "pth", "ckpt", "ot"];

/// The formats that tch expects under these names.
const FOR_TCH: [&str; 4] = ["safetensors", "pt", "bin", "ot"];

struct Net {
    vs: VarStore,
    conv: nn::Conv2D,
    norm: nn::BatchNorm,
}

impl Net {
    fn new(device: Device) -> Self {
        let vs = VarStore::new(device);
        let conv = nn::conv2d(vs.root() / "conv", 1, 2, 1, Default::default());
        let norm = nn::batch_norm2d(vs.root() / "norm", 2, Default::default());
        // Statistics other than those of a new norm.
        let data = Tensor::randn([8, 2, 4, 4], (Kind::Float, device)) * 3.0 + 1.0;
        drop(norm.forward_t(&data, true));
        Self { vs, conv, norm }
    }

    fn forward(&self) -> Tensor {
        let device = self.vs.device();
        let data = Tensor::arange(4, (Kind::Float, device)).view([1, 1, 2, 2]);
        tch::no_grad(|| self.norm.forward_t(&data.apply(&self.conv), false))
    }

    fn bits(&self) -> BTreeMap<String, Vec<u8>> {
        let host = |t: &Tensor| bits(&t.to_device(Device::Cpu));
        self.vs.variables().iter().map(|(name, tensor)| (name.clone(), host(tensor))).collect()
    }
}

#[test]
fn tch_opens_the_weights_that_were_saved() {
    for_each_device(|device| {
        let folder = Folder::new();
        let net = Net::new(device);
        for extension in FOR_TCH {
            let path = folder.file(&format!("x.{extension}"));
            save_weights(&path, &net.vs.variables()).unwrap();
            let mut other = Net::new(device);
            assert_ne!(other.bits(), net.bits());
            other.vs.load(&path).unwrap_or_else(|error| panic!("{extension}: {error}"));
            assert_eq!(other.bits(), net.bits(), "{extension}");
        }
        assert_eq!(names_in(&folder.0).len(), FOR_TCH.len());
    });
}

#[test]
fn this_crate_opens_the_weights_that_were_saved() {
    let folder = Folder::new();
    let net = Net::new(Device::Cpu);
    for extension in EXTENSIONS {
        let path = folder.file(&format!("x.{extension}"));
        save_weights(&path, &net.vs.variables()).unwrap();
        let other = Net::new(Device::Cpu);
        let checkpoint = Checkpoint::load(&path).unwrap();
        let restored = checkpoint.restore().add("model", &other.vs).apply().unwrap();
        assert_eq!(restored, Default::default(), "{extension}");
        assert_eq!(other.bits(), net.bits(), "{extension}");
    }
}

#[test]
fn this_crate_opens_weights_of_dtypes_without_a_storage_in_python() {
    let folder = Folder::new();
    for kind in [
        Kind::ComplexHalf,
        Kind::Float8e5m2,
        Kind::Float8e4m3fn,
        Kind::Float8e5m2fnuz,
        Kind::Float8e4m3fnuz,
    ] {
        let weights = (Tensor::arange(4, (Kind::Float, Device::Cpu)) / 8).to_kind(kind);
        for extension in ["pt", "ot"] {
            let path = folder.file(&format!("x.{extension}"));
            save_weights(&path, [("a.b", &weights)]).unwrap();
            let read = Checkpoint::load(&path).unwrap().tensor("model.a.b").unwrap();
            assert_eq!(read.kind(), kind, "{extension}");
            let wide = |t: &Tensor| t.to_kind(Kind::ComplexDouble);
            assert_eq!(wide(&read), wide(&weights), "{kind:?} {extension}");
        }
    }
}

/// Tensors of every kind that a model may have.
fn odd() -> Vec<(String, Tensor)> {
    let ramp = || Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]) / 8;
    let tensors = [
        ("plain", ramp()),
        ("a.b.c", ramp().set_requires_grad(true)),
        ("half", ramp().to_kind(Kind::Half)),
        ("bfloat", ramp().to_kind(Kind::BFloat16)),
        ("double", ramp().to_kind(Kind::Double)),
        ("counts", Tensor::from_slice(&[1i64, -1])),
        ("flags", Tensor::from_slice(&[true, false, true])),
        ("scalar", Tensor::from(2.5f32)),
        ("empty", Tensor::zeros([0, 3], (Kind::Float, Device::Cpu))),
        ("transposed", ramp().transpose(0, 1)),
        ("slice", ramp().slice(1, 1, 3, 1)),
        ("expanded", Tensor::from(0.5f32).expand([2, 2], false)),
        ("größe", ramp()),
        ("it's \"quoted\" /\\", ramp()),
        ("0", ramp()),
        ("", ramp()),
    ];
    let mut tensors: Vec<_> = tensors.map(|(name, tensor)| (name.to_owned(), tensor)).into();
    // Two names of one tensor.
    tensors.push(("tied".to_owned(), tensors[0].1.shallow_clone()));
    tensors
}

#[test]
fn python_opens_the_weights_that_were_saved() {
    let Some(python) = Oracle::find("weights.py") else { return };
    let folder = Folder::new();
    for extension in EXTENSIONS {
        let path = folder.file(&format!("x.{extension}"));
        let mut tensors = odd();
        if extension == "ot" {
            tensors.retain(|(name, _)| !name.is_empty() && !name.contains('"'));
        }
        save_weights(&path, tensors.iter().map(|(name, tensor)| (name, tensor))).unwrap();
        let printed = python.run(&["read", path.to_str().unwrap()], "");
        let lines = tensors.iter().map(|(name, tensor)| {
            let kind = match tensor.kind() {
                Kind::Half => "float16",
                Kind::BFloat16 => "bfloat16",
                Kind::Double => "float64",
                Kind::Int64 => "int64",
                Kind::Bool => "bool",
                _ => "float32",
            };
            format!("{name} {kind} {:?} {}", tensor.size(), hex(tensor))
        });
        let mut lines: Vec<_> = lines.collect();
        let mut printed: Vec<_> = printed.lines().collect();
        lines.sort();
        printed.sort_unstable();
        assert_eq!(printed, lines, "{extension}");
    }
}

/// Names as they are in a Python module, which has a count of batches for each norm.
#[test]
fn a_python_module_takes_the_weights_strictly() {
    let Some(python) = Oracle::find("weights.py") else { return };
    let folder = Folder::new();
    let net = Net::new(Device::Cpu);
    let expected = net.forward();
    for extension in ["safetensors", "pt", "pth"] {
        let path = folder.file(&format!("x.{extension}"));
        let variables = net.vs.variables();
        let renamed = variables.iter().map(|(name, tensor)| (format!("body.{name}"), tensor));
        save_weights(&path, renamed).unwrap();
        let printed = python.run(&["strict", path.to_str().unwrap()], "");
        let numbers = printed.split_whitespace().map(hex_float).collect::<Vec<_>>();
        assert_eq!(numbers, testkit::to_f64(&expected), "{extension}");
    }
}

#[test]
fn averages_are_saved_while_they_are_swapped_in() {
    for_each_device(|device| {
        let folder = Folder::new();
        let net = Net::new(device);
        let mut ema = averages_of(&net.vs);
        for _ in 0..2 {
            for mut variable in net.vs.trainable_variables() {
                drop(tch::no_grad(|| variable.g_add_scalar_(1.0)));
            }
            ema.advance().unwrap();
        }
        let last = net.bits();
        let mut averaged = BTreeMap::new();
        for extension in FOR_TCH {
            let path = folder.file(&format!("x.{extension}"));
            {
                let _averages = ema.swap_in().unwrap();
                save_weights(&path, &net.vs.variables()).unwrap();
                averaged = net.bits();
            }
            assert_eq!(net.bits(), last);
            let mut other = Net::new(device);
            other.vs.load(&path).unwrap();
            assert_eq!(other.bits(), averaged, "{extension}");
        }
        let average = ema.average("conv.weight").unwrap();
        assert_eq!(averaged["conv.weight"], bits(&average.to_device(Device::Cpu)));
        assert_ne!(averaged, last);
    });
}

#[test]
fn weights_that_a_format_cannot_hold_are_refused_and_leave_the_old_file() {
    let folder = Folder::new();
    let one = Tensor::from(1f32);
    let complex = Tensor::zeros([2], (Kind::ComplexDouble, Device::Cpu));
    let sparse = Tensor::ones([2], (Kind::Float, Device::Cpu)).to_sparse_sparse_dim(1);
    let undefined = Tensor::new();
    let compressed = one.view([1, 1]).to_sparse_csr(None);
    let deep = one.view(&[1i64; 65][..]);
    let cases: [(_, _, &[(&str, &Tensor)]); 21] = [
        ("x", "ends in", &[("a", &one)]),
        ("x.npz", "ends in", &[("a", &one)]),
        ("x.pt", "another tensor", &[("a", &one), ("a", &one)]),
        ("x.safetensors", "save it as `.pt`", &[("a", &complex)]),
        ("x.safetensors", "something else", &[("__metadata__", &one)]),
        ("x.ot", "none of the characters", &[("a|b", &one)]),
        ("x.ot", "none of the characters", &[("a\0b", &one)]),
        ("x.ot", "none of the characters", &[("a\"b", &one)]),
        ("x.ot", "none of the characters", &[("a\\b", &one)]),
        ("x.ot", "none of the characters", &[("a\nb", &one)]),
        ("x.ot", "without a name", &[("", &one)]),
        ("x.pt", "dense", &[("a", &one), ("b", &sparse)]),
        ("x.safetensors", "dense", &[("a", &compressed)]),
        ("x.pt", "dense", &[("a", &compressed)]),
        ("x.ot", "dense", &[("a", &compressed)]),
        ("x.safetensors", "65 dimensions", &[("a", &deep)]),
        ("x.pt", "65 dimensions", &[("a", &deep)]),
        ("x.ot", "65 dimensions", &[("a", &deep)]),
        ("x.ot", "TorchScript reserves", &[("class", &one)]),
        ("x.ot", "TorchScript reserves", &[("None", &one)]),
        ("x.ot", "undefined", &[("a", &undefined)]),
    ];
    for (name, expected, tensors) in cases {
        let path = folder.file(name);
        std::fs::write(&path, "before").unwrap();
        let _case = Case(format!("{name}: {expected}"));
        let error = unsaveable(save_weights(&path, tensors.iter().copied()));
        assert!(error.contains(expected), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"before");
        std::fs::remove_file(path).unwrap();
    }
    for extension in EXTENSIONS {
        let refused = save_weights(folder.file(&format!("nowhere/x.{extension}")), [("a", &one)]);
        let refused = checkpoint_error(refused);
        let is_of_disk = matches!(refused, CheckpointError::Save(torch_files::Error::Io { .. }));
        assert!(is_of_disk, "{refused:?}");
    }
    assert!(names_in(&folder.0).is_empty());
}

/// libtorch's own writer would end the process, because it fails a second time in a destructor.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_an_error() {
    let folder = Folder::new();
    for extension in EXTENSIONS {
        let path = folder.file(&format!("x.{extension}"));
        std::fs::write(&path, "before").unwrap();
        let shell = ["sh", "-c", "ulimit -f 64; trap '' XFSZ; exec \"$@\"", "sh"];
        let mut save = this_test_by(&shell, "checkpoint::weights::save_on_a_full_disk");
        let saved = save.env("TCH_AMP_TEST_WEIGHTS", &path).output().unwrap();
        let said = String::from_utf8_lossy(&saved.stdout);
        let is_told = saved.status.success() && said.contains("File too large");
        assert!(is_told, "{extension}: {saved:?}");
        assert_eq!(std::fs::read(&path).unwrap(), b"before", "{extension}");
        std::fs::remove_file(path).unwrap();
    }
    assert!(names_in(&folder.0).is_empty());
}

#[test]
#[ignore = "saves one file for another test"]
fn save_on_a_full_disk() {
    let Some(path) = std::env::var_os("TCH_AMP_TEST_WEIGHTS") else { return };
    let large = Tensor::zeros([1 << 20], (Kind::Float, Device::Cpu));
    match checkpoint_error(save_weights(path, [("a", &large)])) {
        CheckpointError::Save(error) => println!("{error}"),
        other => panic!("{other:?}"),
    }
}

/// The averages would be taken for the weights later, and restored weights would be lost with the guard.
#[test]
fn a_checkpoint_neither_saves_nor_restores_what_averages_have_replaced() {
    let vs = VarStore::new(Device::Cpu);
    let linear = nn::linear(vs.root(), 3, 2, Default::default());
    let mut opt = AdamW::default().build(&vs, 0.1).unwrap();
    let other = VarStore::new(Device::Cpu);
    nn::linear(other.root(), 3, 2, Default::default());
    let mut ema = averages_of(&vs);
    let saved = checkpoint_of([("model", &mut &vs), ("optimizer", &mut opt)]);
    ema.advance().unwrap();
    drop(tch::no_grad(|| linear.ws.shallow_clone().fill_(7.0)));
    ema.advance().unwrap();
    let averages = ema.average("weight").unwrap();
    let expected = averages.copy();
    {
        let _averages = ema.swap_in().unwrap();
        let mut checkpoint = Checkpoint::new();
        let mut vs_by_value = &vs;
        let mut tied = own::Ema::of(linear.ws.shallow_clone());
        let parts: [(&str, &mut dyn Stateful); 3] =
            [("model", &mut vs_by_value), ("optimizer", &mut opt), ("own", &mut tied)];
        for (name, part) in parts {
            let refused = unsaveable(checkpoint.add(name, part));
            assert!(refused.contains("drop the guard of `swap_in`"), "{refused}");
        }
        assert_eq!(checkpoint.names().count(), 0);
        for refused in [
            saved.restore().add("model", &vs).apply(),
            saved.restore().add("optimizer", &mut opt).apply(),
        ] {
            assert!(matches!(checkpoint_error(refused), CheckpointError::Tensor { .. }));
        }
        // Another model is saved and restored as ever.
        checkpoint.add("model", &other).unwrap();
        checkpoint.restore().add("model", &other).apply().unwrap();
        assert_eq!(linear.ws, expected);
    }
    assert_eq!(linear.ws.max().double_value(&[]), 7.0);
    assert_eq!(averages, expected);
    let after = checkpoint_of([("model", &mut &vs), ("optimizer", &mut opt)]);
    assert_eq!(after.tensor("model.weight").unwrap(), linear.ws);
    saved.restore().add("optimizer", &mut opt).apply().unwrap();
}
