//! Runs whose region has a plan: it is measured once, saved with the run, and the same on all ranks.

use recipes::gpt::train::Trainer;
use recipes::gpt::{self, options::Options};
use recipes::{Ranks, Training};
use serde_json::json;
use tch::Device;
use tch_amp::Amp;
use tch_amp::checkpoint::{Checkpoint, CheckpointFolder};

use crate::recipe::resumed::GPT;
use crate::recipe::same::alone;
use testkit::files::Folder;

#[test]
fn a_plan_is_measured_once_and_saved_with_the_run() {
    let _random = alone();
    let (options, text) = gpt::small(Amp::Bf16, 2).unwrap();
    let common = recipes::Options { wants_plan: true, ..options.common };
    let options = Options { common, dropout: 0.0, ..options };
    let ranks = Ranks::alone();
    let mut trainer = Trainer::new(&options, &text, Device::Cpu, &ranks).unwrap();
    let line = trainer.tune().unwrap().expect("a plan is wanted");
    assert!(line.contains("f32"), "{line}");
    assert_eq!(trainer.tune().unwrap(), None);
    trainer.step().unwrap();
    let mut checkpoint = Checkpoint::new();
    trainer.save(&mut checkpoint).unwrap();

    let mut resumed = Trainer::new(&options, &text, Device::Cpu, &ranks).unwrap();
    resumed.restore(&checkpoint).unwrap();
    assert_eq!(resumed.tune().unwrap(), None);
    let losses = [&mut trainer, &mut resumed].map(|trainer| trainer.step().unwrap().loss);
    assert_eq!(losses[0], losses[1]);

    // A plan of another machine does not hold here.
    let mut plan: serde_json::Value = checkpoint.value("plan").unwrap();
    plan["platform"]["threads"] = json!(1_000_000);
    let mut moved = Trainer::new(&options, &text, Device::Cpu, &ranks).unwrap();
    let mut elsewhere = Checkpoint::new();
    moved.save(&mut elsewhere).unwrap();
    elsewhere.add_value("plan", &plan).unwrap();
    moved.restore(&elsewhere).unwrap();
    assert!(moved.tune().unwrap().is_some());
}

/// On the CPU `auto` never chooses fp16.
#[test]
fn a_run_by_auto_that_is_resumed_keeps_its_precision() {
    let folder = Folder::new();
    let checkpoints = folder.file("checkpoints");
    let mut options = recipes::Options {
        amp: Amp::Auto,
        checkpoints: Some(checkpoints.clone()),
        resume: true,
        ..recipes::Options::silent("gpt", 2)
    };
    let ranks = Ranks::alone();
    let mut checkpoint = Checkpoint::new();
    // A checkpoint of an earlier version has no precision.
    CheckpointFolder::new(&checkpoints).unwrap().save(1, &checkpoint).unwrap();
    options.decide(Device::Cpu, &ranks).unwrap();
    assert!([Amp::Off, Amp::Bf16].contains(&options.amp));
    checkpoint.add("amp", &Amp::Fp16.on(Device::Cpu).unwrap()).unwrap();
    CheckpointFolder::new(&checkpoints).unwrap().save(2, &checkpoint).unwrap();
    options.amp = Amp::Auto;
    options.decide(Device::Cpu, &ranks).unwrap();
    assert_eq!((options.amp, options.has_plan()), (Amp::Fp16, true));
    // Only `auto` asks what it was.
    options.amp = Amp::Bf16;
    options.decide(Device::Cpu, &ranks).unwrap();
    assert_eq!(options.amp, Amp::Bf16);
}

#[test]
fn ranks_agree_on_what_auto_stands_for() {
    let folder = Folder::new();
    let output = GPT.start(&folder, "--amp auto --ranks 2 --steps 3").output();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    // f32 where bf16 is emulated, and a plan elsewhere. The first rank alone says so.
    assert_eq!(said.matches(" on Cpu: ").count(), 1, "{said}");
}
