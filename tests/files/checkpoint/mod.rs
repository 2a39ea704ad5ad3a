//! The rules of checkpoints, one test each.

mod background;
mod by_name;
mod damage;
mod dcp;
mod files;
mod folder;
mod golden;
mod kinds;
mod low_bit;
mod memory;
mod messages;
mod muon;
mod names;
mod numpy;
mod others;
mod own;
mod precision;
mod python;
mod refused;
mod round_trip;
mod stateful;
mod unsupported;
mod values;
mod weights;

use std::collections::BTreeMap;

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::average::{AveragedWeights, Ema};
use tch_amp::checkpoint::{Checkpoint, CheckpointError, CheckpointFolder};
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Error, GradScaler};

use testkit::files::Folder;
use testkit::python::Oracle;

/// The error of a call that a checkpoint has refused.
#[track_caller]
fn checkpoint_error<T: std::fmt::Debug>(result: tch_amp::Result<T>) -> CheckpointError {
    match result {
        Err(Error::Checkpoint(error)) => error,
        other => panic!("not refused by the checkpoint: {other:?}"),
    }
}

/// What is said of something that cannot be saved.
#[track_caller]
fn unsaveable<T: std::fmt::Debug>(result: tch_amp::Result<T>) -> String {
    match checkpoint_error(result) {
        error @ CheckpointError::Unsaveable { .. } => error.to_string(),
        other => panic!("{other:?}"),
    }
}

/// The problem of a file that is refused as damaged.
#[track_caller]
fn damaged(result: tch_amp::Result<Checkpoint>) -> String {
    match checkpoint_error(result) {
        CheckpointError::Damaged { problem, .. } => problem,
        other => panic!("{other:?}"),
    }
}

/// A folder in which a command of an oracle has written its files, and what it has printed.
fn from_python(script: &str, command: &str) -> Option<(Folder, String)> {
    let python = Oracle::find(script)?;
    let folder = Folder::new();
    let printed = python.run(&[command, folder.0.to_str().unwrap()], "");
    Some((folder, printed))
}

/// The steps of the checkpoints in a folder.
fn steps(folder: &CheckpointFolder) -> Vec<u64> {
    folder.files().unwrap().iter().map(|file| file.step).collect()
}

/// Variables with their names, in this order.
fn listed<'n, const N: usize>(vs: &VarStore, names: [&'n str; N]) -> Vec<(&'n str, Tensor)> {
    let variables = vs.variables();
    names.map(|name| (name, variables[name].shallow_clone())).into()
}

/// Averages of a model, which go half of the way in each update.
fn averages_of(vs: &VarStore) -> AveragedWeights {
    Ema { decay: 0.5, ..Ema::default() }.build(vs).unwrap()
}

/// The same without the bias towards the first weights.
fn debiased_averages_of(vs: &VarStore) -> AveragedWeights {
    Ema { decay: 0.5, debias: true, ..Ema::default() }.build(vs).unwrap()
}

/// A model for the weights that tests/oracle/checkpoint_files.py saves.
fn linear() -> VarStore {
    let vs = VarStore::new(Device::Cpu);
    nn::linear(vs.root(), 3, 2, Default::default());
    vs
}

/// Asserts that a model has these weights.
#[track_caller]
fn assert_has_pythons_weights(vs: &VarStore, what: &str) {
    let [weight, bias] = ["weight", "bias"].map(|name| testkit::to_f64(&vs.variables()[name]));
    assert_eq!(weight, [0.0, 0.25, 0.5, 0.75, 1.0, 1.25], "{what}");
    assert_eq!(bias, [0.5, -0.5], "{what}");
}

/// A small model with what trains it.
struct Run {
    vs: VarStore,
    net: nn::Linear,
    opt: Optimizer,
    scaler: GradScaler,
}

impl Run {
    fn new(device: Device) -> Self {
        let vs = VarStore::new(device);
        let net = nn::linear(vs.root() / "linear", 3, 2, Default::default());
        let mut opt = AdamW::default().build(&vs, 1e-2).unwrap();
        opt.assign_group(1, &["*bias"]).unwrap();
        opt.set_weight_decay_group(1, 0.0).unwrap();
        let config = GradScalerConfig { init_scale: 8.0, growth_interval: 3, ..Default::default() };
        Self { vs, net, opt, scaler: config.build(device).unwrap() }
    }

    /// Takes some steps on random data and returns the losses.
    fn train(&mut self, steps: usize) -> Vec<f64> {
        let step = |_| {
            let xs = Tensor::randn([4, 3], (Kind::Float, self.vs.device()));
            let loss = xs.apply(&self.net).square().mean(Kind::Float);
            self.opt.zero_grad().unwrap();
            self.scaler.backward(&loss).unwrap();
            drop(self.scaler.step(&mut self.opt).unwrap());
            self.scaler.update().unwrap();
            loss.double_value(&[])
        };
        (0..steps).map(step).collect()
    }

    fn checkpoint(&mut self) -> Checkpoint {
        let mut checkpoint = Checkpoint::new();
        self.add_to(&mut checkpoint);
        checkpoint
    }

    fn add_to(&mut self, checkpoint: &mut Checkpoint) {
        checkpoint.add("model", &self.vs).unwrap();
        checkpoint.add("optimizer", &mut self.opt).unwrap();
        checkpoint.add("scaler", &mut self.scaler).unwrap();
        checkpoint.add_value("step", &7).unwrap();
    }

    fn restore(&mut self, checkpoint: &Checkpoint) -> tch_amp::Result<()> {
        let Self { vs, opt, scaler, .. } = self;
        let restore = checkpoint.restore().add("model", vs).add("optimizer", opt);
        restore.add("scaler", scaler).apply().map(drop)
    }

    /// Everything that a restore may change, as text.
    fn fingerprint(&mut self) -> String {
        let model: BTreeMap<_, _> =
            self.vs.variables().into_iter().map(|(name, t)| (name, testkit::to_f64(&t))).collect();
        let state = self.opt.state_dict().unwrap();
        let entries = state.state.iter().flat_map(|(name, entries)| {
            entries.iter().map(move |(key, t)| (name, key, testkit::to_f64(t)))
        });
        let entries: Vec<_> = entries.collect();
        let scaler = self.scaler.state_dict().unwrap();
        format!("{model:?} {entries:?} {:?} {scaler:?}", state.param_groups)
    }
}
