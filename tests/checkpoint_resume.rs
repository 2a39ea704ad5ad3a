//! A resumed run takes the same steps as one that was never interrupted. These tests have a program of their own,
//! because the random state that they save belongs to the whole process.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Mutex;

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::{Checkpoint, CheckpointError, Rng, rng_state, set_rng_state};
use tch_amp::optim::{Adagrad, AdamW, Algorithm, Lion, Muon, Optimizer, RmsProp, Sgd};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Error, GradScaler};

use common::bits::bits;
use common::files::Folder;
use common::for_each_device;

/// A model with dropout, trained on shuffled rows, with an occasional overflow.
struct Shuffled {
    vs: VarStore,
    net: nn::Linear,
    opt: Optimizer,
    scaler: GradScaler,
    data: Tensor,
    step: i64,
}

impl Shuffled {
    fn new(device: Device, algorithm: Algorithm) -> Self {
        let vs = VarStore::new(device);
        let net = nn::linear(vs.root(), 4, 3, Default::default());
        let opt = algorithm.build(&vs, 0.1);
        let config = GradScalerConfig::default().init_scale(64.0).growth_interval(2);
        let scaler = config.build(device).unwrap();
        let data = Tensor::arange(32, (Kind::Float, device)).view([8, 4]) / 32.0;
        Self { vs, net, opt: opt.unwrap(), scaler, data, step: 0 }
    }

    fn train(&mut self, steps: i64) -> Vec<u64> {
        let mut losses = Vec::new();
        for _ in 0..steps {
            let rows = Tensor::randperm(8, (Kind::Int64, Device::Cpu)).to_device(self.vs.device());
            let xs = self.data.index_select(0, &rows.slice(0, 0, 4, 1)).dropout(0.5, true);
            let overflow = if self.step % 3 == 2 { f64::INFINITY } else { 1.0 };
            let loss = xs.apply(&self.net).square().mean(Kind::Float);
            self.opt.zero_grad().unwrap();
            self.scaler.backward(&(&loss * overflow)).unwrap();
            drop(self.scaler.step(&mut self.opt).unwrap());
            self.scaler.update().unwrap();
            self.step += 1;
            losses.push(loss.double_value(&[]).to_bits());
        }
        losses
    }

    fn save(&mut self, path: &std::path::Path) {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_model("model", &self.vs).unwrap();
        checkpoint.add_optimizer("optimizer", &mut self.opt).unwrap();
        checkpoint.add_scaler("scaler", &self.scaler).unwrap();
        checkpoint.add("rng", &mut Rng(Device::Cpu)).unwrap();
        if self.vs.device() != Device::Cpu {
            checkpoint.add_rng("rng_device", self.vs.device()).unwrap();
        }
        checkpoint.add_value("step", &self.step).unwrap();
        checkpoint.save(path).unwrap();
    }

    fn load(&mut self, path: &std::path::Path) {
        let checkpoint = Checkpoint::load(path).unwrap();
        self.step = checkpoint.value("step").unwrap();
        let mut rng = Rng(Device::Cpu);
        let mut restore = checkpoint
            .restore()
            .model("model", &self.vs)
            .optimizer("optimizer", &mut self.opt)
            .scaler("scaler", &mut self.scaler)
            .add("rng", &mut rng);
        if self.vs.device() != Device::Cpu {
            restore = restore.rng("rng_device", self.vs.device());
        }
        assert_eq!(restore.apply().unwrap(), Default::default());
    }
}

/// A restore that fails, before any change or midway, leaves the state of the generator unchanged.
fn refuse(folder: &Folder, vs: &VarStore) {
    let path = folder.file("refused.pt");
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_rng("rng", Device::Cpu).unwrap();
    checkpoint.add_model("weights", vs).unwrap();
    checkpoint.add_tensor("wrong", &Tensor::from(1i64)).unwrap();
    checkpoint.save(&path).unwrap();
    let checkpoint = Checkpoint::load(&path).unwrap();
    drop(Tensor::randn([10], (Kind::Float, Device::Cpu)));
    let before = bits(&rng_state(Device::Cpu).unwrap());
    let unchanged = || bits(&rng_state(Device::Cpu).unwrap()) == before;
    let twice = checkpoint.restore().rng("rng", Device::Cpu).rng("wrong", Device::Cpu);
    assert!(matches!(twice.apply(), Err(Error::Torch(_))));
    assert!(unchanged());
    // Unlike any save, this shortens the open file, within the weights.
    let bytes = std::fs::read(&path).unwrap();
    let end = bytes.windows(15).position(|window| window == b"archive/version").unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(end as u64 - 200).unwrap();
    let cut = checkpoint.restore().rng("rng", Device::Cpu).model("weights", vs).apply();
    assert!(matches!(cut, Err(Error::Checkpoint(CheckpointError::Interrupted { .. }))), "{cut:?}");
    assert!(unchanged());
    // A state may be a row of a tensor.
    let state = rng_state(Device::Cpu).unwrap();
    let rows = Tensor::stack(&[state.zeros_like(), state], 0);
    set_rng_state(Device::Cpu, &rows.get(1)).unwrap();
    assert!(unchanged());
}

#[test]
fn a_resumed_run_takes_the_same_steps_around_skipped_ones() {
    let _alone = ALONE.lock().unwrap();
    let folder = Folder::new();
    let path = folder.file("x.safetensors");
    let algorithms: [Algorithm; 7] = [
        AdamW::default().amsgrad(true).into(),
        Sgd::default().momentum(0.9).into(),
        Sgd::default().momentum(0.9).dampening(0.5).into(),
        Adagrad::default().into(),
        RmsProp::default().momentum(0.9).centered(true).into(),
        Lion::default().into(),
        Muon::default().into(),
    ];
    for_each_device(|device| {
        for algorithm in algorithms {
            // Before the first step, after a taken step, and right before and after a skipped one.
            for before in [0, 1, 2, 3, 5] {
                tch::manual_seed(7);
                let mut whole = Shuffled::new(device, algorithm);
                whole.train(before);
                whole.save(&path);
                let expected = whole.train(5);
                tch::manual_seed(8);
                let mut resumed = Shuffled::new(device, algorithm);
                // The run that is overwritten has a history of its own.
                resumed.train(before % 2);
                resumed.load(&path);
                assert_eq!(resumed.train(5), expected, "{algorithm:?} after {before}");
                assert_eq!(bits(&resumed.net.ws), bits(&whole.net.ws));
                refuse(&folder, &resumed.vs);
            }
        }
    });
}

/// The tests share the generators of the process.
static ALONE: Mutex<()> = Mutex::new(());

/// Draws numbers, which other threads' refused restores must not change.
fn draws(device: Device) -> Vec<f64> {
    (0..4000).map(|_| Tensor::rand([1], (Kind::Double, device)).double_value(&[0])).collect()
}

#[test]
fn a_refused_restore_leaves_the_random_numbers_of_other_threads_alone() {
    let _alone = ALONE.lock().unwrap();
    for_each_device(|device| {
        tch::manual_seed(11);
        let expected = draws(device);
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_rng("rng", device).unwrap();
        checkpoint.add_tensor("wrong", &Tensor::from(1i64)).unwrap();
        tch::manual_seed(11);
        let (drawn, refused) = std::thread::scope(|scope| {
            let drawing = scope.spawn(|| draws(device));
            let mut refused = 0;
            while !drawing.is_finished() || refused == 0 {
                let restore = checkpoint.restore().rng("rng", device).rng("wrong", device);
                assert!(matches!(restore.apply(), Err(Error::Torch(_))));
                refused += 1;
            }
            (drawing.join().unwrap(), refused)
        });
        assert!(drawn == expected, "{device:?}: changed by {refused} refused restores");
    });
}
