//! Whatever bytes a checkpoint has: it is refused, or restored in part or whole, and nothing else happens.
//!
//! The same bytes can be of either format, so that one target serves both readers; the folders `seeds/safetensors` and
//! `seeds/torch` start it with each. Built by `cargo xtask fuzz`, checksums are taken but not compared.
#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use tch::nn::{self, VarStore};
use tch::{Device, Kind};
use tch_amp::GradScaler;
use tch_amp::checkpoint::Checkpoint;
use tch_amp::optim::{AdamW, Optimizer, Sgd};

const GOLDEN: &[u8] = include_bytes!("../../tests/checkpoint/golden/format-1.safetensors");

/// What is restored, made once: the model of the seeds.
struct Target {
    vs: VarStore,
    optimizers: [Optimizer; 2],
    scaler: GradScaler,
}

impl Target {
    fn new() -> Self {
        let vs = VarStore::new(Device::Cpu);
        let _net = nn::linear(vs.root() / "linear", 3, 2, Default::default());
        let adam = AdamW::default().build(&vs, 1e-2).expect("an optimizer");
        let sgd = Sgd::default().momentum(0.9).build(&vs, 1e-2).expect("an optimizer");
        let scaler = GradScaler::new(Device::Cpu).expect("a scaler");
        let mut target = Self { vs, optimizers: [adam, sgd], scaler };
        target.check();
        target
    }

    /// A whole checkpoint is restored whole. Here serde_json keeps numbers as text, as any crate of a program may ask.
    fn check(&mut self) {
        let checkpoint = Checkpoint::from_bytes(GOLDEN.to_vec()).expect("a checkpoint");
        let restore = checkpoint.restore().model("model", &self.vs);
        let restore = restore.optimizer("optimizer", &mut self.optimizers[0]);
        restore.scaler("scaler", &mut self.scaler).apply().expect("all of it");
    }

    /// Parts by whatever names, refused or not.
    fn restore(&mut self, checkpoint: &Checkpoint) {
        for name in checkpoint.names() {
            drop(checkpoint.restore().model(name, &self.vs).strict(false).cast(true).apply());
            for optimizer in &mut self.optimizers {
                drop(checkpoint.restore().optimizer(name, optimizer).apply());
                drop(checkpoint.restore().optimizer(name, optimizer).strict(false).apply());
            }
            drop(checkpoint.restore().scaler(name, &mut self.scaler).apply());
            drop(checkpoint.value::<serde_json::Value>(name));
            if let Ok(tensor) = checkpoint.tensor(name) {
                // Every element can be read.
                let _sum = tensor.f_to_kind(Kind::Double).and_then(|t| t.f_sum(Kind::Double));
            }
        }
    }
}

thread_local!(static TARGET: RefCell<Target> = RefCell::new(Target::new()));

fuzz_target!(|bytes: &[u8]| {
    if let Ok(checkpoint) = Checkpoint::from_bytes(bytes.to_vec()) {
        TARGET.with_borrow_mut(|target| target.restore(&checkpoint));
    }
});
