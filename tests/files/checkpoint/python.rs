//! Files are exchanged between Python and Rust, and training continues on the other side.

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::{Checkpoint, CheckpointError, Format, Restored, Rng};
use tch_amp::optim::{Adafactor, Adagrad, Adam, AdamW, Algorithm, NAdam, Optimizer, RmsProp, Sgd};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Error, GradScaler};

use crate::checkpoint::round_trip::{class, every_option, of_one_weight, restored_options};
use crate::checkpoint::{Run, from_python, listed};
use testkit::checkpoints::{checkpoint_of, reloaded};
use testkit::files::Folder;
use testkit::python::Oracle;

/// The same training as in tests/oracle/checkpoint.py.
pub(crate) struct Twin {
    pub(crate) vs: VarStore,
    pub(crate) net: nn::Linear,
    pub(crate) opt: Optimizer,
    pub(crate) scaler: GradScaler,
}

impl Twin {
    pub(crate) fn new(algorithm: &str) -> Self {
        Self::with_order(algorithm, ["weight", "bias"])
    }

    /// The optimizer has its parameters in this order.
    pub(crate) fn with_order(algorithm: &str, names: [&str; 2]) -> Self {
        let vs = VarStore::new(Device::Cpu);
        let net = nn::linear(vs.root(), 3, 2, Default::default());
        let algorithm: Algorithm = match algorithm {
            "adamw" => AdamW { amsgrad: true, ..Default::default() }.into(),
            "adam" => Adam { weight_decay: 0.1, ..Default::default() }.into(),
            "sgd" => Sgd { momentum: 0.9, weight_decay: 0.1, ..Default::default() }.into(),
            "plain" => Sgd::default().into(),
            "rmsprop" => {
                let rmsprop = RmsProp { momentum: 0.5, centered: true, ..Default::default() };
                RmsProp { weight_decay: 0.1, ..rmsprop }.into()
            }
            "nadam" => {
                let nadam = NAdam { decoupled_weight_decay: true, ..Default::default() };
                NAdam { weight_decay: 0.1, ..nadam }.into()
            }
            "adafactor" => Adafactor { weight_decay: 0.1, ..Default::default() }.into(),
            _ => Adagrad { lr_decay: 0.1, ..Default::default() }.into(),
        };
        let mut opt = algorithm.build(listed(&vs, names), 0.05).unwrap();
        opt.assign_group(1, &["bias"]).unwrap();
        opt.set_weight_decay_group(1, 0.0).unwrap();
        let config =
            GradScalerConfig { init_scale: 16.0, growth_interval: 3, ..Default::default() };
        Self { vs, net, opt, scaler: config.build(Device::Cpu).unwrap() }
    }

    /// Trains, and returns the bits of the losses.
    pub(crate) fn train(&mut self, steps: usize, overflow: &[usize]) -> Vec<u32> {
        let xs = Tensor::arange(12, (Kind::Float, Device::Cpu)).view([4, 3]) / 8 - 0.5;
        let mut losses = Vec::new();
        for step in 0..steps {
            let loss = xs.apply(&self.net).square().mean(Kind::Float);
            self.opt.zero_grad().unwrap();
            let factor = if overflow.contains(&step) { f64::INFINITY } else { 1.0 };
            self.scaler.backward(&(&loss * factor)).unwrap();
            drop(self.scaler.step(&mut self.opt).unwrap());
            self.scaler.update().unwrap();
            losses.push((loss.double_value(&[]) as f32).to_bits());
        }
        losses
    }

    fn restore(&mut self, checkpoint: &Checkpoint) {
        self.restore_from(checkpoint, "optimizer");
    }

    pub(crate) fn restore_from(&mut self, checkpoint: &Checkpoint, optimizer: &str) {
        self.restore_parts(checkpoint, &["model", optimizer, "scaler"].map(str::to_owned));
    }

    /// Restores the model, the optimizer and the scaler from the parts with these names.
    pub(crate) fn restore_parts(&mut self, checkpoint: &Checkpoint, names: &[String; 3]) {
        let Self { vs, opt, scaler, .. } = self;
        let restore = checkpoint.restore().add(&names[0], vs).add(&names[1], opt);
        restore.add(&names[2], scaler).apply().unwrap();
    }
}

/// Parses the output of Python's `float.hex`.
pub(crate) fn hex_float(text: &str) -> f64 {
    let (sign, text) = text.strip_prefix('-').map_or((1.0, text), |text| (-1.0, text));
    let (mantissa, exponent) = text.strip_prefix("0x").unwrap().split_once('p').unwrap();
    let digits = mantissa.replace('.', "");
    let places = mantissa.split_once('.').map_or(0, |(_, fraction)| fraction.len());
    let mantissa = u64::from_str_radix(&digits, 16).unwrap() as f64;
    let exponent = exponent.parse::<i32>().unwrap() - 4 * places as i32;
    sign * mantissa * f64::from(exponent).exp2()
}

/// The bits of the losses that Python has printed.
pub(crate) fn losses(text: &str) -> Vec<u32> {
    text.split([' ', ',']).map(|loss| (hex_float(loss) as f32).to_bits()).collect()
}

/// What is said of an optimizer of Python that this crate lacks.
fn is_no_optimizer(name: &str) -> String {
    format!(
        "`{name}` in the checkpoint is unsupported (its param_groups are not those of \
         Adam, AdamW, SGD, Adagrad, RMSprop, Lion, Muon, NAdam or Adafactor), not an optimizer"
    )
}

pub(crate) const ALGORITHMS: [&str; 8] =
    ["adamw", "adam", "sgd", "plain", "adagrad", "rmsprop", "nadam", "adafactor"];

#[test]
fn training_resumes_from_pythons_file() {
    let Some((folder, printed)) = from_python("checkpoint.py", "save") else { return };
    for line in printed.lines() {
        let (name, expected) = line.split_once(' ').unwrap();
        let expected = losses(expected);
        let checkpoint = Checkpoint::load(folder.file(&format!("{name}.pt"))).unwrap();
        let mut twin = Twin::new(name);
        twin.train(1, &[]);
        twin.restore(&checkpoint);
        assert_eq!(twin.train(expected.len(), &[]), expected, "{name}");
        twin.restore_from(&checkpoint, "old");
        assert_eq!(twin.train(expected.len(), &[]), expected, "{name} of PyTorch 2.6");
        assert_eq!(checkpoint.value::<i64>("epoch").unwrap(), 3);
        assert_eq!(checkpoint.value::<f64>("lr").unwrap(), 1e-3);
        assert_eq!(checkpoint.value::<f64>("best").unwrap(), f64::INFINITY);
        assert_eq!(
            checkpoint.value::<serde_json::Value>("history").unwrap(),
            serde_json::json!([[1, "a"], null])
        );
        assert_eq!(checkpoint.tensor("rng").unwrap().kind(), Kind::Uint8);
        let unknown = checkpoint.value::<i64>("unknown").unwrap_err();
        assert!(matches!(unknown, Error::Checkpoint(CheckpointError::OtherPart { .. })));
        let mut sgd = Sgd::default().build(&twin.vs, 0.1).unwrap();
        let unknown = checkpoint.restore().add("adamax", &mut sgd).apply().unwrap_err();
        assert_eq!(unknown.to_string(), is_no_optimizer("adamax"));
        // What this crate cannot read is not silently dropped.
        assert!(checkpoint.save(folder.file("again.pt")).is_err());
    }
    assert_eq!(printed.lines().count(), ALGORITHMS.len());
    let model = Checkpoint::load(folder.file("model.pt")).unwrap();
    let twin = Twin::new("plain");
    model.restore().add("model", &twin.vs).apply().unwrap();
    assert_eq!(twin.net.ws.double_value(&[1, 2]), 1.25);
}

#[test]
fn unsupported_objects_from_python_do_not_prevent_a_restore() {
    let Some((folder, _)) = from_python("checkpoint.py", "odd") else { return };
    let load = |name: &str| Checkpoint::load(folder.file(&format!("{name}.pt"))).unwrap();
    let twin = Twin::new("plain");
    let names = [
        "counter",
        "bytes",
        "bytearray",
        "set",
        "complex",
        "uint16",
        "sparse",
        "conj",
        "huge",
        "radam",
        "nadam",
    ];
    for name in names {
        let checkpoint = load(name);
        checkpoint.restore().add("model", &twin.vs).apply().unwrap();
        assert_eq!(checkpoint.value::<u64>("seed").unwrap(), u64::MAX);
        let other = checkpoint.value::<serde_json::Value>("other");
        assert_eq!(other.is_ok(), name == "counter", "{name}: {other:?}");
    }
    for name in ["12:30:00", "extra"] {
        load(name).restore().add("model", &twin.vs).apply().unwrap();
    }
    // In safetensors, such a name could not be distinguished from a tensor of a part.
    let slash = load("slash");
    assert!(slash.save(folder.file("again.safetensors")).is_err());
    slash.save(folder.file("again.pt")).unwrap();
    assert_eq!(load("again").tensor("a/b").unwrap().size(), [2]);
    assert_eq!(load("again").value::<serde_json::Value>("config").unwrap(), serde_json::json!({}));
    slash.restore().add("model", &VarStore::new(Device::Cpu)).apply().unwrap();
    let mut opt = Twin::new("adam").opt;
    let refused = load("tensors").restore().add("optimizer", &mut opt).apply().unwrap_err();
    assert!(refused.to_string().contains("groups of [2] parameters"), "{refused}");
    let mut opt = AdamW::default().build(listed(&twin.vs, ["weight", "bias"]), 0.1).unwrap();
    load("tensors").restore().add("optimizer", &mut opt).apply().unwrap();
    assert_eq!(opt.lr(0).unwrap(), 0.25);
    let state = opt.state_dict().unwrap().state;
    for name in ["weight", "bias"] {
        assert_eq!(state[name]["step"].double_value(&[]), 3.0, "{name}");
    }
}

/// RAdam has `decoupled_weight_decay` as well, by which AdamW is recognized.
#[test]
fn pythons_other_optimizers_are_refused_by_name() {
    let Some(python) = Oracle::find("checkpoint.py") else { return };
    let folder = Folder::new();
    let printed = python.run(&["others", folder.file("others.pt").to_str().unwrap()], "");
    let checkpoint = Checkpoint::load(folder.file("others.pt")).unwrap();
    for name in printed.lines() {
        for algorithm in ALGORITHMS {
            let mut opt = Twin::new(algorithm).opt;
            let before = opt.state_dict().unwrap().param_groups;
            let refused = checkpoint.restore().add(name, &mut opt).apply().unwrap_err();
            assert_eq!(refused.to_string(), is_no_optimizer(name));
            assert_eq!(opt.state_dict().unwrap().param_groups, before);
        }
    }
    assert_eq!(printed.lines().count(), 8, "{printed}");
}

/// The options of a file of this crate are given to Python's classes, whose state is then saved.
#[test]
fn every_option_survives_the_way_through_python() {
    let Some(python) = Oracle::find("checkpoint.py") else { return };
    let folder = Folder::new();
    let mut checkpoint = Checkpoint::new();
    for (index, algorithm) in every_option().into_iter().enumerate() {
        let mut opt = of_one_weight(algorithm, 0.0625);
        checkpoint.add(&format!("{} {index}", class(&algorithm).0), &mut opt).unwrap();
    }
    checkpoint.save(folder.file("rust.pt")).unwrap();
    python.run(&["options", folder.0.to_str().unwrap()], "");
    let checkpoint = Checkpoint::load(folder.file("python.pt")).unwrap();
    for (index, algorithm) in every_option().into_iter().enumerate() {
        let part = format!("{} {index}", class(&algorithm).0);
        assert_eq!(restored_options(&checkpoint, &part, algorithm), (0.0625, algorithm));
    }
}

/// Parameters without names are identified by their places, which look like PyTorch's numbers.
#[test]
fn parameters_without_names_keep_their_groups() {
    let build = |group: &str| {
        let tensors: Vec<_> = (0..3)
            .map(|n| Tensor::full([2], n, (Kind::Float, Device::Cpu)).set_requires_grad(true))
            .collect();
        let mut opt = Sgd { momentum: 0.5, ..Default::default() }.build(&tensors, 0.1).unwrap();
        opt.assign_group(1, &[group]).unwrap();
        opt.set_lr_group(1, 0.7).unwrap();
        (tensors, opt)
    };
    let (tensors, mut opt) = build("1");
    for (tensor, factor) in tensors.iter().zip(1..) {
        (tensor * factor).sum(Kind::Float).backward();
    }
    opt.step().unwrap();
    for name in ["x.pt", "x.safetensors"] {
        let loaded = reloaded(&checkpoint_of([("opt", &mut opt)]), name);
        let (_tensors, mut other) = build("2");
        loaded.restore().add("opt", &mut other).apply().unwrap();
        let state = other.state_dict().unwrap();
        assert_eq!(state.param_groups[1].params, ["1"], "{name}");
        for (place, factor) in ["0", "1", "2"].into_iter().zip(1..) {
            let buffer = state.state[place]["momentum_buffer"].double_value(&[0]);
            assert_eq!(buffer, f64::from(factor), "{name}");
        }
    }
}

#[test]
fn python_resumes_from_this_crates_file() {
    let Some(python) = Oracle::find("checkpoint.py") else { return };
    let folder = Folder::new();
    let mut expected = Vec::new();
    for name in ALGORITHMS {
        let path = folder.file(&format!("{name}.pt"));
        let mut twin = Twin::new(name);
        twin.train(5, &[2]);
        let Twin { vs, opt, scaler, .. } = &mut twin;
        let mut checkpoint = checkpoint_of([
            ("model", vs),
            ("optimizer", opt),
            ("scaler", scaler),
            ("rng", &mut Rng(Device::Cpu)),
        ]);
        checkpoint.add_value("epoch", &3).unwrap();
        checkpoint.add_value("text", &"ä").unwrap();
        checkpoint.add_value("list", &[1.5, -2.0]).unwrap();
        checkpoint.add_value("none", &()).unwrap();
        checkpoint.add_value("floats", &[f64::INFINITY, -f64::INFINITY, f64::NAN]).unwrap();
        checkpoint.save(&path).unwrap();
        expected.push(twin.train(4, &[1]));
    }
    let printed = python.run(&["resume", folder.0.to_str().unwrap()], "");
    let lines: Vec<_> = printed.lines().collect();
    // An optimizer that is fused, one with PyTorch's default, one with foreach and one that is explicitly not fused
    // load the same file.
    assert_eq!(lines.len(), 4 * ALGORITHMS.len());
    for ((lines, expected), name) in lines.chunks(4).zip(expected).zip(ALGORITHMS) {
        for line in lines {
            let (values, printed) = line.split_once(": ").unwrap();
            assert_eq!(values, "3 ä [1.5, -2.0] None [inf, -inf, nan]");
            assert_eq!(losses(printed), expected, "{name}");
        }
    }
}

#[test]
fn python_reads_this_crates_safetensors() {
    let Some(python) = Oracle::find("checkpoint.py") else { return };
    let (_folder, path) = Folder::with("x.safetensors");
    let mut run = Run::new(Device::Cpu);
    run.train(2);
    let mut checkpoint = run.checkpoint();
    checkpoint.add_value("best", &f64::INFINITY).unwrap();
    checkpoint.save(&path).unwrap();
    let printed = python.run(&["safe", path.to_str().unwrap()], "");
    let state = run.scaler.state_dict().unwrap();
    assert!(printed.contains(&format!("'scale': {:?}", state.scale.unwrap())), "{printed}");
    let bytes = testkit::bits::hex(&run.net.ws);
    assert!(printed.contains("best inf ['']"), "{printed}");
    assert!(printed.contains(&format!("model/linear.weight F32 [2, 3] {bytes}")), "{printed}");
}

/// Norms have a counter of batches in Python and not in tch; both sides accept the difference.
#[test]
fn norms_are_exchanged_with_python_strictly() {
    let Some(python) = Oracle::find("checkpoint.py") else { return };
    let folder = Folder::new();
    let model = || {
        let vs = VarStore::new(Device::Cpu);
        let norm = nn::batch_norm2d(vs.root() / "features" / "norm", 2, Default::default());
        (vs, norm)
    };
    let printed = python.run(&["save_norm", folder.file("python.pt").to_str().unwrap()], "");
    let ((vs, norm), restore) = (model(), |name: &str, vs: &VarStore| {
        let checkpoint = Checkpoint::load(folder.file(name)).unwrap();
        checkpoint.restore().add("model", vs).apply().unwrap()
    });
    assert_eq!(restore("python.pt", &vs), Restored::default());
    let numbers = |tensor: &Tensor| format!("{:?}", testkit::to_f64(tensor));
    assert_eq!(printed.trim(), numbers(&norm.running_var));
    for name in ["rust.pt", "rust.safetensors"] {
        checkpoint_of([("model", &mut &vs)]).save(folder.file(name)).unwrap();
        let (other_vs, other) = model();
        assert_eq!(restore(name, &other_vs), Restored::default());
        assert_eq!(numbers(&other.running_var), numbers(&norm.running_var));
    }
    let printed = python.run(&["load_norm", folder.file("rust.pt").to_str().unwrap()], "");
    assert_eq!(printed.trim(), numbers(&norm.running_var));
    // Without running statistics beside it, the counter is a name like any other.
    let plain = VarStore::new(Device::Cpu);
    drop(plain.root().sub("features").sub("norm").zeros("running_mean", &[2]));
    let checkpoint = Checkpoint::load(folder.file("python.pt")).unwrap();
    let restored = checkpoint.restore().add("model", &plain).strict(false).apply().unwrap();
    assert!(
        restored.unexpected_keys.contains(&"model/features.norm.num_batches_tracked".to_owned())
    );
}

#[test]
fn both_formats_have_the_same_content() {
    let folder = Folder::new();
    let mut run = Run::new(Device::Cpu);
    run.train(4);
    for name in ["x.pt", "x.safetensors"] {
        run.checkpoint().save(folder.file(name)).unwrap();
        let mut other = Run::new(Device::Cpu);
        other.train(1);
        other.restore(&Checkpoint::load(folder.file(name)).unwrap()).unwrap();
        assert_eq!(other.fingerprint(), run.fingerprint(), "{name}");
        // The content determines the format, not the name of the file.
        let renamed = folder.file("renamed");
        std::fs::rename(folder.file(name), &renamed).unwrap();
        assert!(Checkpoint::load(&renamed).is_ok());
    }
    let pt = folder.file("only-tensors.pt");
    let mut tensors = Checkpoint::new();
    tensors.add_tensor("one", &Tensor::from(1f32)).unwrap();
    tensors.add_tensor("two", &Tensor::from(2f32)).unwrap();
    tensors.save_as(&pt, Format::Torch).unwrap();
    assert_eq!(Checkpoint::load(&pt).unwrap().tensor("two").unwrap().double_value(&[]), 2.0);
}
