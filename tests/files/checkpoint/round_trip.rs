//! What is saved is restored bit by bit.

use std::collections::BTreeMap;
use std::mem::discriminant;

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::optim::{
    Adafactor, Adagrad, Adam, AdamW, Algorithm, Lion, MasterWeights, NAdam, Optimizer, RmsProp, Sgd,
};
use tch_amp::scaler::ScalerError;
use tch_amp::{Error, GradScaler};

use crate::checkpoint::Run;
use testkit::bits::bits;
use testkit::checkpoints::{checkpoint_of, reloaded};
use testkit::files::{Folder, names_in};
use testkit::for_each_device;

const KINDS: [Kind; 14] = [
    Kind::Bool,
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Int,
    Kind::Int64,
    Kind::Half,
    Kind::BFloat16,
    Kind::Float,
    Kind::Double,
    Kind::Float8e5m2,
    Kind::Float8e4m3fn,
    Kind::Float8e5m2fnuz,
    Kind::Float8e4m3fnuz,
];

/// Random bytes as a tensor, including NaNs with payloads, infinities and subnormal numbers.
fn noise(kind: Kind, size: &[i64]) -> Tensor {
    let bytes = size.iter().product::<i64>() * kind.elt_size_in_bytes() as i64;
    let high = if kind == Kind::Bool { 2 } else { 256 };
    let bytes = Tensor::randint(high, [bytes], (Kind::Uint8, Device::Cpu));
    bytes.view_dtype(kind).view(size)
}

pub(crate) fn same(one: &Tensor, other: &Tensor) -> bool {
    let bytes = |t: &Tensor| {
        let t = t.to_device(Device::Cpu).contiguous().view([-1]);
        Vec::<u8>::try_from(t.view_dtype(Kind::Uint8)).unwrap()
    };
    one.kind() == other.kind() && one.size() == other.size() && bytes(one) == bytes(other)
}

#[test]
fn every_dtype_and_layout_is_restored() {
    for_each_device(|device| {
        let mut tensors = BTreeMap::new();
        for kind in KINDS {
            tensors.insert(format!("{kind:?}"), noise(kind, &[3, 5]));
        }
        let base = noise(Kind::Float, &[6, 8]);
        let other = [
            ("complex", Tensor::complex(&base, &base)),
            ("transposed", base.transpose(0, 1)),
            ("sliced", base.slice(1, 1, 7, 2)),
            ("expanded", base.slice(0, 0, 1, 1).expand([4, 8], false)),
            ("scalar", Tensor::from(-0f32)),
            ("empty", Tensor::zeros([0, 3], (Kind::Float, Device::Cpu))),
            ("conjugate", Tensor::complex(&base, &base).conj()),
            ("shared", base.shallow_clone()),
            ("large", noise(Kind::Half, &[300_000])),
            ("名 \"\\\n.{}", Tensor::from(1i64)),
        ];
        tensors.extend(other.map(|(name, tensor)| (name.to_owned(), tensor)));
        let mut checkpoint = Checkpoint::new();
        for (name, tensor) in &tensors {
            checkpoint.add_tensor(name, &tensor.to_device(device)).unwrap();
        }
        let loaded = reloaded(&checkpoint, "all.safetensors");
        assert!(loaded.names().eq(tensors.keys().map(String::as_str)));
        for (name, tensor) in &tensors {
            assert!(same(&loaded.tensor(name).unwrap(), &tensor.resolve_conj()), "{name}");
        }
    });
}

#[test]
fn values_are_restored() {
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_value("lr", &0.1f64).unwrap();
    checkpoint.add_value("seed", &u64::MAX).unwrap();
    checkpoint.add_value("best", &None::<f64>).unwrap();
    checkpoint.add_value("names", &vec!["a", "\"checksum\":\"0000000000000000\""]).unwrap();
    let loaded = reloaded(&checkpoint, "values.safetensors");
    assert_eq!(loaded.value::<f64>("lr").unwrap().to_bits(), 0.1f64.to_bits());
    assert_eq!(loaded.value::<u64>("seed").unwrap(), u64::MAX);
    assert_eq!(loaded.value::<Option<f64>>("best").unwrap(), None);
    let names = ["a", "\"checksum\":\"0000000000000000\""];
    assert_eq!(loaded.value::<Vec<String>>("names").unwrap(), names);
    assert!(matches!(loaded.value::<u8>("seed"), Err(Error::Checkpoint(_))));
}

#[test]
fn equal_content_gives_equal_bytes_and_no_other_file() {
    let folder = Folder::new();
    let mut run = Run::new(Device::Cpu);
    run.train(3);
    for name in ["a.safetensors", "b.safetensors", "a.safetensors"] {
        run.checkpoint().save(folder.file(name)).unwrap();
    }
    let read = |name| std::fs::read(folder.file(name)).unwrap();
    assert_eq!(read("a.safetensors"), read("b.safetensors"));
    assert_eq!(names_in(&folder.0), ["a.safetensors", "b.safetensors"]);
}

#[test]
fn a_loaded_checkpoint_can_be_saved_again() {
    let folder = Folder::new();
    let mut run = Run::new(Device::Cpu);
    run.train(3);
    let (first, second) = (folder.file("1.safetensors"), folder.file("2.safetensors"));
    run.checkpoint().save(&first).unwrap();
    Checkpoint::load(&first).unwrap().save(&second).unwrap();
    assert_eq!(std::fs::read(&first).unwrap(), std::fs::read(&second).unwrap());
    // A checkpoint can also be saved over the file from which it is read.
    Checkpoint::load(&second).unwrap().save(&second).unwrap();
    assert_eq!(std::fs::read(&first).unwrap(), std::fs::read(&second).unwrap());
}

#[test]
fn files_of_tch_load_as_a_model() {
    for name in ["tch.safetensors", "tch.ot"] {
        let (_folder, path) = Folder::with(name);
        let (saved, other) = (Run::new(Device::Cpu), Run::new(Device::Cpu));
        saved.vs.save(&path).unwrap();
        Checkpoint::load(&path).unwrap().restore().add("model", &other.vs).apply().unwrap();
        assert_eq!(bits(&other.net.ws), bits(&saved.net.ws), "{name}");
    }
}

#[test]
fn buffers_that_are_not_trained_are_saved_too() {
    let model = || {
        let vs = VarStore::new(Device::Cpu);
        let norm = tch::nn::batch_norm1d(vs.root(), 2, Default::default());
        (vs, norm)
    };
    let ((one, norm), (two, other)) = (model(), model());
    let xs = Tensor::randn([8, 2], (Kind::Float, Device::Cpu));
    drop(tch::nn::ModuleT::forward_t(&norm, &xs, true));
    let loaded = reloaded(&checkpoint_of([("model", &mut &one)]), "x.safetensors");
    loaded.restore().add("model", &two).apply().unwrap();
    assert_eq!(bits(&other.running_mean), bits(&norm.running_mean));
}

#[test]
fn unusual_names_stay_distinct() {
    let names = ["", "a/b", "/", "step", "\"", "__metadata__"];
    let build = || {
        let vs = VarStore::new(Device::Cpu);
        for name in names {
            drop(vs.root().zeros(name, &[2]));
        }
        let opt = AdamW::default().build(&vs, 0.1).unwrap();
        (vs, opt)
    };
    let (vs, mut opt) = build();
    for (w, factor) in vs.variables().into_values().zip(1..) {
        (w * factor).square().sum(Kind::Float).backward();
        opt.step().unwrap();
    }
    let values = |vs: &VarStore, opt: &mut Optimizer| {
        let variables = vs.variables().into_iter().map(|(name, w)| (name, bits(&w)));
        let state = opt.state_dict().unwrap().state;
        let moments = state.into_iter().map(|(name, tensors)| (name, bits(&tensors["exp_avg"])));
        (BTreeMap::from_iter(variables), BTreeMap::from_iter(moments))
    };
    let expected = values(&vs, &mut opt);
    for name in ["x.safetensors", "x.pt"] {
        let loaded = reloaded(&checkpoint_of([("m", &mut &vs), ("o", &mut opt)]), name);
        let (fresh, mut fresh_opt) = build();
        loaded.restore().add("m", &fresh).add("o", &mut fresh_opt).apply().unwrap();
        assert_eq!(values(&fresh, &mut fresh_opt), expected, "{name}");
    }
}

#[test]
fn a_disabled_scaler_is_saved_and_restored() {
    let disabled = checkpoint_of([("scaler", &mut GradScaler::disabled())]);
    let loaded = reloaded(&disabled, "x.safetensors");
    loaded.restore().add("scaler", &mut GradScaler::disabled()).apply().unwrap();
    let mut enabled = GradScaler::new(Device::Cpu).unwrap();
    let refused = loaded.restore().add("scaler", &mut enabled).apply();
    assert!(matches!(refused, Err(Error::Scaler(ScalerError::EmptyState))), "{refused:?}");
}

#[test]
fn restoring_works_on_any_device_and_keeps_the_tensors() {
    for_each_device(|device| {
        let mut saved = Run::new(Device::Cpu);
        saved.train(3);
        let mut other = Run::new(device);
        other.restore(&reloaded(&saved.checkpoint(), "x.safetensors")).unwrap();
        assert_eq!(other.fingerprint(), saved.fingerprint());
        // The optimizer still steps the variables of the model.
        let before = bits(&other.net.ws);
        other.train(1);
        assert_ne!(bits(&other.net.ws), before);
        assert!(other.net.ws.requires_grad());
    });
}

#[test]
fn master_weights_are_restored() {
    let build = || {
        let mut vs = VarStore::new(Device::Cpu);
        let w = vs.root().randn_standard("w", &[50]);
        vs.bfloat16();
        let adam = AdamW::default();
        let opt = adam.master_weights(MasterWeights::Remainder).build(&vs, 0.01).unwrap();
        (vs, w, opt)
    };
    let step = |w: &Tensor, opt: &mut Optimizer| {
        opt.zero_grad().unwrap();
        w.square().sum(Kind::BFloat16).backward();
        opt.step().unwrap();
    };
    let (vs, w, mut opt) = build();
    (0..3).for_each(|_| step(&w, &mut opt));
    for name in ["x.safetensors", "x.pt"] {
        let saved = checkpoint_of([("model", &mut &vs), ("optimizer", &mut opt)]);
        let (other_vs, other, mut other_opt) = build();
        let loaded = reloaded(&saved, name);
        let restore = loaded.restore().add("model", &other_vs);
        restore.add("optimizer", &mut other_opt).apply().unwrap();
        step(&w, &mut opt);
        step(&other, &mut other_opt);
        assert_eq!(bits(&w), bits(&other), "{name}");
    }
}

/// Algorithms with options other than the defaults. The numbers differ, so that none is taken for another, and each flag
/// is set alone.
pub(crate) fn every_option() -> Vec<Algorithm> {
    let adam = Adam { betas: (0.5, 0.75), eps: 0.125, weight_decay: 0.25, ..Default::default() };
    let adamw = AdamW { betas: (0.5, 0.75), eps: 0.125, weight_decay: 0.25, ..Default::default() };
    let sgd = Sgd { momentum: 0.5, weight_decay: 0.25, ..Default::default() };
    let adagrad = Adagrad { lr_decay: 0.5, eps: 0.125, weight_decay: 0.25, ..Default::default() };
    let adagrad = Adagrad { initial_accumulator_value: 0.75, ..adagrad };
    let rmsprop = RmsProp {
        alpha: 0.5,
        eps: 0.125,
        weight_decay: 0.25,
        momentum: 0.75,
        ..Default::default()
    };
    let lion = Lion { betas: (0.5, 0.75), weight_decay: 0.25, ..Default::default() };
    let nadam = NAdam { betas: (0.5, 0.75), eps: 0.125, weight_decay: 0.25, ..Default::default() };
    let nadam = NAdam { momentum_decay: 0.375, ..nadam };
    let adafactor = Adafactor { beta2_decay: -0.5, eps: (Some(0.125), 0.25), ..Default::default() };
    let adafactor = Adafactor { d: 1.5, weight_decay: 0.375, ..adafactor };
    vec![
        adam.into(),
        Adam { amsgrad: true, ..adam }.into(),
        Adam { maximize: true, ..adam }.into(),
        adamw.into(),
        AdamW { amsgrad: true, ..adamw }.into(),
        AdamW { maximize: true, ..adamw }.into(),
        Sgd { dampening: 0.125, ..sgd }.into(),
        Sgd { nesterov: true, ..sgd }.into(),
        Sgd { maximize: true, ..sgd }.into(),
        adagrad.into(),
        Adagrad { maximize: true, ..adagrad }.into(),
        rmsprop.into(),
        RmsProp { centered: true, ..rmsprop }.into(),
        RmsProp { maximize: true, ..rmsprop }.into(),
        lion.into(),
        Lion { maximize: true, ..lion }.into(),
        nadam.into(),
        NAdam { decoupled_weight_decay: true, ..nadam }.into(),
        NAdam { maximize: true, ..nadam }.into(),
        adafactor.into(),
        Adafactor { eps: (None, 0.25), ..adafactor }.into(),
        Adafactor { maximize: true, ..adafactor }.into(),
    ]
}

/// An algorithm with its defaults.
type Defaults = fn() -> Algorithm;

/// The names of PyTorch's classes, and the algorithms.
const CLASSES: [(&str, Defaults); 8] = [
    ("AdamW", || AdamW::default().into()),
    ("Adam", || Adam::default().into()),
    ("SGD", || Sgd::default().into()),
    ("RMSprop", || RmsProp::default().into()),
    ("Lion", || Lion::default().into()),
    ("NAdam", || NAdam::default().into()),
    ("Adafactor", || Adafactor::default().into()),
    ("Adagrad", || Adagrad::default().into()),
];

/// The name of PyTorch's class of an algorithm, and its defaults.
pub(crate) fn class(algorithm: &Algorithm) -> (&'static str, Algorithm) {
    let classes = CLASSES.into_iter().map(|(name, defaults)| (name, defaults()));
    let is_same = |(_, it): &(_, Algorithm)| discriminant(it) == discriminant(algorithm);
    classes.into_iter().find(is_same).unwrap()
}

/// An optimizer of a weight that is called `w`.
pub(crate) fn of_one_weight(algorithm: Algorithm, lr: f64) -> Optimizer {
    let w = Tensor::ones([1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    algorithm.build(vec![("w", w)], lr).unwrap()
}

/// Restores an optimizer that was built with the defaults, and returns its learning rate and options.
pub(crate) fn restored_options(
    checkpoint: &Checkpoint,
    part: &str,
    saved: Algorithm,
) -> (f64, Algorithm) {
    let mut opt = of_one_weight(class(&saved).1, 0.1);
    checkpoint.restore().add(part, &mut opt).apply().unwrap();
    let group = opt.param_group(0).unwrap();
    (group.lr, group.algorithm)
}

#[test]
fn every_option_of_every_algorithm_is_restored() {
    for algorithm in every_option() {
        let mut opt = of_one_weight(algorithm, 0.0625);
        for name in ["x.safetensors", "x.pt"] {
            let loaded = reloaded(&checkpoint_of([("opt", &mut opt)]), name);
            assert_eq!(restored_options(&loaded, "opt", algorithm), (0.0625, algorithm), "{name}");
        }
    }
}
