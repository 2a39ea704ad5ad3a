//! Whatever bytes a checkpoint contains, it is refused, or restored in part or completely, and nothing else happens.
//!
//! Either format can be in the bytes, so one target tests both readers. The folders `seeds/safetensors` and
//! `seeds/torch` provide the initial inputs. When `cargo xtask fuzz` builds it, checksums are computed, but not
//! compared.
#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use tch::nn::{self, VarStore};
use tch::{Device, Kind};
use tch_amp::GradScaler;
use tch_amp::checkpoint::Checkpoint;
use tch_amp::optim::{AdamW, Optimizer, Sgd};

const GOLDEN: &[u8] = include_bytes!("../../tests/files/checkpoint/golden/format-1.safetensors");

/// The objects to restore, created once: those of the seeds.
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
        let sgd =
            Sgd { momentum: 0.9, ..Default::default() }.build(&vs, 1e-2).expect("an optimizer");
        let scaler = GradScaler::new(Device::Cpu).expect("a scaler");
        let mut target = Self { vs, optimizers: [adam, sgd], scaler };
        target.check();
        target
    }

    /// A valid checkpoint is restored completely. serde_json keeps numbers as text here, which any crate of a program
    /// can enable.
    fn check(&mut self) {
        let checkpoint = Checkpoint::from_bytes(GOLDEN.to_vec()).expect("a checkpoint");
        let restore = checkpoint.restore().add("model", &self.vs);
        let restore = restore.add("optimizer", &mut self.optimizers[0]);
        restore.add("scaler", &mut self.scaler).apply().expect("all of it");
    }

    /// Restores parts of all names, whether or not that is refused.
    fn restore(&mut self, checkpoint: &Checkpoint) {
        for name in checkpoint.names() {
            drop(checkpoint.restore().add(name, &self.vs).strict(false).cast(true).apply());
            for optimizer in &mut self.optimizers {
                drop(checkpoint.restore().add(name, &mut *optimizer).apply());
                drop(checkpoint.restore().add(name, &mut *optimizer).strict(false).apply());
            }
            drop(checkpoint.restore().add(name, &mut self.scaler).apply());
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
