//! A program's own types in a checkpoint, through nothing but the public trait.

use tch::{Device, Kind, Tensor};
use tch_amp::Result;
use tch_amp::checkpoint::{
    Checkpoint, CheckpointError, Prepared, Restored, SaveState, SavedState, Stateful,
};
use tch_amp::loss_scale::StaticLossScale;

use crate::checkpoint::own::{DECAY, Decay, Ema, ZERO};
use crate::checkpoint::{Run, checkpoint_error, unsaveable};
use testkit::checkpoints::{checkpoint_of, reloaded};
use testkit::files::Folder;
use testkit::python::Oracle;

fn saved(name: &str, ema: &mut Ema) -> Checkpoint {
    reloaded(&checkpoint_of([("decay", &mut DECAY.clone()), ("ema", ema)]), name)
}

#[test]
fn user_types_are_restored_from_both_formats() {
    for name in ["x.safetensors", "x.pt"] {
        let mut source = Ema::new(3, &[("w", &[1.0, 2.0]), ("/", &[f32::NAN])]);
        let checkpoint = saved(name, &mut source);
        let (mut decay, mut ema) = (ZERO, Ema::new(0, &[("w", &[0.0, 0.0]), ("/", &[0.0])]));
        let kept = ema.weights["w"].shallow_clone();
        let restore = checkpoint.restore().add("decay", &mut decay).add("ema", &mut ema);
        assert_eq!(restore.apply().unwrap(), Restored::default());
        assert_eq!((&decay, ema.updates), (&DECAY, 3), "{name}");
        assert_eq!(kept, source.weights["w"], "in place");
        assert!(ema.weights["/"].double_value(&[0]).is_nan());
        // Once loaded, it can be saved again, in either format.
        for again in ["again.pt", "again.safetensors"] {
            let mut decay = ZERO;
            let again = reloaded(&checkpoint, again);
            let restore = again.restore().add("decay", &mut decay).add("ema", &mut ema);
            restore.apply().unwrap();
            assert_eq!(decay, DECAY);
        }
    }
}

#[test]
fn parts_that_do_not_fit_are_typed_errors() {
    let checkpoint = saved("x.pt", &mut Ema::new(3, &[("w", &[1.0, 2.0]), ("x", &[1.0])]));
    let ema = |weights: &[(&str, &[f32])]| {
        let mut ema = Ema::new(0, weights);
        let error = checkpoint_error(checkpoint.restore().add("ema", &mut ema).apply());
        assert_eq!(ema, Ema::new(0, weights), "nothing changes");
        error
    };
    let CheckpointError::Keys { missing, unexpected, .. } = ema(&[("w", &[0.0; 2]), ("y", &[0.0])])
    else {
        panic!("another error");
    };
    assert_eq!((&missing[..], &unexpected[..]), (&["y".to_owned()][..], &["x".to_owned()][..]));
    let shape = ema(&[("w", &[0.0; 3]), ("x", &[0.0])]).to_string();
    assert!(shape.contains("[3] here"), "{shape}");
    let mut decay = ZERO;
    let mut refuse =
        |part: &str| checkpoint_error(checkpoint.restore().add(part, &mut decay).apply());
    assert!(matches!(refuse("nothing"), CheckpointError::NoPart { .. }));
    // It lacks both values, and has names that were not requested.
    assert!(matches!(refuse("ema"), CheckpointError::Keys { .. }));
    let mut other = Checkpoint::new();
    other.add_value("decay", &serde_json::json!({"lr": "high", "epoch": 1})).unwrap();
    other.add_value("number", &1).unwrap();
    let mut refuse = |part: &str| checkpoint_error(other.restore().add(part, &mut decay).apply());
    assert!(matches!(refuse("decay"), CheckpointError::Value { .. }));
    assert!(matches!(refuse("number"), CheckpointError::OtherPart { .. }));
    assert_eq!(decay, ZERO);
}

#[test]
fn a_restore_is_all_or_nothing() {
    let mut source = Ema::new(3, &[("w", &[1.0, 2.0])]);
    let mut checkpoint = saved("x.safetensors", &mut source);
    let mut run = Run::new(Device::Cpu);
    checkpoint.add("scaler", &mut run.scaler).unwrap();
    checkpoint.add("model", &run.vs).unwrap();
    let zero = || Ema::new(0, &[("w", &[0.0, 0.0])]);
    let before = run.fingerprint();
    // The part that is refused comes first or last.
    for last in [false, true] {
        let (mut decay, mut ema, mut bad) = (ZERO, zero(), ZERO);
        let mut restore = checkpoint.restore();
        if !last {
            restore = restore.add("ema", &mut bad);
        }
        restore = restore.add("decay", &mut decay).add("ema", &mut ema).add("model", &mut run.vs);
        restore = restore.add("scaler", &mut run.scaler);
        let mut worse = ZERO;
        assert!(restore.add("model", &mut worse).apply().is_err());
        assert_eq!((decay, ema, bad, worse), (ZERO, zero(), ZERO, ZERO));
        assert_eq!(run.fingerprint(), before);
    }
}

#[test]
fn values_are_unchanged_if_reading_the_tensors_fails_midway() {
    let (_folder, path) = Folder::with("x.safetensors");
    let mut source = Ema::new(3, &[("w", &[1.0; 2])]);
    checkpoint_of([("decay", &mut DECAY.clone()), ("ema", &mut source)]).save(&path).unwrap();
    let checkpoint = Checkpoint::load(&path).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() - 4).unwrap();
    let (mut decay, mut ema) = (ZERO, Ema::new(0, &[("w", &[0.0; 2])]));
    let restore = checkpoint.restore().add("decay", &mut decay).add("ema", &mut ema);
    assert!(matches!(checkpoint_error(restore.apply()), CheckpointError::Interrupted { .. }));
    assert_eq!((decay, ema.updates), (ZERO, 0));
}

#[test]
fn tensors_follow_the_options_of_the_restore() {
    let mut source =
        Ema::new(3, &[("module.w", &[1.0, 2.0]), ("module.head", &[1.0]), ("old", &[1.0])]);
    let checkpoint = saved("x.safetensors", &mut source);
    let mut ema = Ema::new(0, &[("w", &[0.0; 2]), ("head", &[0.0; 3]), ("new", &[5.0])]);
    let half = ema.weights["w"].to_kind(Kind::BFloat16);
    ema.weights.insert("w".to_owned(), half);
    let restore = checkpoint.restore().rename_prefix("module.", "").skip(&["head"]).strict(false);
    let error = checkpoint_error(restore.add("ema", &mut ema).apply()).to_string();
    assert!(error.contains("`cast(true)` converts it"), "{error}");
    let restore = checkpoint.restore().rename_prefix("module.", "").skip(&["head"]).strict(false);
    let restored = restore.cast(true).add("ema", &mut ema).apply().unwrap();
    assert_eq!(restored.missing_keys, ["ema/new"]);
    assert_eq!(restored.unexpected_keys, ["ema/old"]);
    assert_eq!(restored.skipped_keys, ["ema/head"]);
    assert_eq!(ema.weights["w"].double_value(&[1]), 2.0);
    assert_eq!(ema.weights["head"].size(), [3]);
}

/// A type that saves the same name twice.
struct Twice;

impl Stateful for Twice {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        state.tensor("x", &Tensor::from(1f32))?;
        state.value("x", &1)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        assert!(saved.contains("x")? && !saved.contains("y")?);
        assert_eq!(saved.tensor("x")?, Tensor::from(1f32));
        Ok(Prepared::default())
    }
}

#[test]
fn a_name_can_be_used_only_once() {
    let mut checkpoint = Checkpoint::new();
    let refused = checkpoint.add("twice", &mut Twice).unwrap_err().to_string();
    assert!(refused.contains("`twice/x` cannot be saved"), "{refused}");
    assert_eq!(checkpoint.names().count(), 0);
    checkpoint.add("x", &mut Ema::new(1, &[("x", &[1.0])])).unwrap();
    assert!(checkpoint.add("x", &mut ZERO.clone()).is_err(), "the name is taken");
    let mut one = Ema { updates: 1, weights: [("x".to_owned(), Tensor::from(1f32))].into() };
    let alone = checkpoint_of([("x", &mut one)]);
    let restored = alone.restore().strict(false).add("x", &mut Twice).apply().unwrap();
    assert_eq!(restored.unexpected_keys, ["x/updates"]);
}

/// One list serves both, and is saved wholly or not at all.
#[test]
fn a_list_of_parts_is_saved_and_restored() {
    fn parts<'p>(
        [first, second]: [&'p str; 2],
        decay: &'p mut Decay,
        ema: &'p mut Ema,
    ) -> [(&'p str, &'p mut dyn Stateful); 2] {
        [(first, decay), (second, ema)]
    }
    let mut checkpoint = Checkpoint::new();
    let (mut decay, mut ema) = (DECAY, Ema::new(3, &[("w", &[1.0, 2.0])]));
    for wrong in [["decay", "decay"], ["decay", ""]] {
        unsaveable(checkpoint.add_all(parts(wrong, &mut decay, &mut ema)));
        assert_eq!(checkpoint.names().count(), 0, "{wrong:?}");
    }
    let names = ["decay", "ema"];
    checkpoint.add_all(parts(names, &mut decay, &mut ema)).unwrap();
    let (mut decay, mut zeros) = (ZERO, Ema::new(0, &[("w", &[0.0, 0.0])]));
    checkpoint.restore().add_all(parts(names, &mut decay, &mut zeros)).apply().unwrap();
    assert_eq!((&decay, &zeros), (&DECAY, &ema));
    checkpoint.add_all(parts(names, &mut decay, &mut zeros)).unwrap_err();
}

#[test]
fn user_types_are_exchanged_with_python() {
    let Some(python) = Oracle::find("checkpoint.py") else { return };
    let (folder, path) = Folder::with("rust.pt");
    let mut source = Ema::new(3, &[("w", &[1.0, 2.0])]);
    let mut checkpoint = saved("x.pt", &mut source);
    checkpoint.add("loss_scale", &mut StaticLossScale::new(Device::Cpu, 256.0).unwrap()).unwrap();
    checkpoint.save(path).unwrap();
    let printed = python.run(&["state", folder.0.to_str().unwrap()], "");
    assert_eq!(
        printed.trim(),
        "{'updates': 3, 'w': [1.0, 2.0]} {'epoch': 7, 'lr': inf} {'kind': 'Static', 'loss_scale': 256.0}"
    );
    let checkpoint = Checkpoint::load(folder.file("python.pt")).unwrap();
    let mut decay = DECAY;
    let restore = checkpoint.restore().add("ema", &mut source).add("decay", &mut decay);
    restore.apply().unwrap();
    assert_eq!(source, Ema::new(4, &[("w", &[0.25, 0.5])]));
    assert_eq!(decay, Decay { lr: 0.5, epoch: 0 });
    // A scheduler's state has other names.
    let error = checkpoint_error(checkpoint.restore().add("schedule", &mut decay).apply());
    assert!(matches!(error, CheckpointError::Keys { .. }));
}
