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

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::{Checkpoint, CheckpointError};
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Error, GradScaler};

/// The error of a call that a checkpoint has refused.
#[track_caller]
fn checkpoint_error<T: std::fmt::Debug>(result: tch_amp::Result<T>) -> CheckpointError {
    match result {
        Err(Error::Checkpoint(error)) => error,
        other => panic!("not refused by the checkpoint: {other:?}"),
    }
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
        let mut variables: Vec<_> = self.vs.variables().into_iter().collect();
        variables.sort_by(|a, b| a.0.cmp(&b.0));
        let numbers = |tensor: &Tensor| testkit::to_f64(&tensor.to_device(Device::Cpu));
        let model: Vec<_> = variables.iter().map(|(name, t)| (name, numbers(t))).collect();
        let state = self.opt.state_dict().unwrap();
        let tensors: Vec<_> = state
            .state
            .iter()
            .flat_map(|(name, entries)| entries.iter().map(move |(key, t)| (name, key, numbers(t))))
            .collect();
        let scaler = self.scaler.state_dict().unwrap();
        format!("{model:?} {tensors:?} {:?} {scaler:?}", state.param_groups)
    }
}
