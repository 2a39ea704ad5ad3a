//! The files that Python programs, Lightning and transformers write, each shape in the table of docs/checkpoints.md.

use tch::nn::{self, VarStore};
use tch::{Device, Kind};
use tch_amp::GradScaler;
use tch_amp::average::{AveragedWeights, Averaging, Ema, Swa};
use tch_amp::checkpoint::{Checkpoint, CheckpointError, Format, Restore, Restored, Rng};
use tch_amp::optim::{Optimizer, Sgd};
use tch_amp::scaler::GradScalerConfig;

use crate::checkpoint::{
    averages_of, checkpoint_error, damaged, debiased_averages_of, from_python, listed, unsaveable,
};
use testkit::assert_says;
use testkit::checkpoints::{checkpoint_of, reloaded};
use testkit::files::Folder;
use testkit::python::Oracle;

/// The files, and what Python says is in them.
struct Files {
    folder: Folder,
    content: serde_json::Value,
}

fn files() -> Option<Files> {
    let (folder, printed) = from_python("checkpoint_files.py", "shapes")?;
    Some(Files { folder, content: serde_json::from_str(&printed).unwrap() })
}

impl Files {
    fn load(&self, name: &str) -> Checkpoint {
        let loaded = Checkpoint::load(self.folder.file(name));
        loaded.unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// The numbers of a tensor, by its path in what Python says.
    fn numbers(&self, path: &[&str]) -> Vec<f64> {
        let value = path.iter().fold(&self.content, |value, name| &value[*name]);
        let mut numbers = Vec::new();
        flatten(value, &mut numbers);
        assert!(!numbers.is_empty(), "{path:?}");
        numbers
    }

    fn check_weights(&self, file: &str, run: &Run) {
        for (name, tensor) in run.vs.variables() {
            assert_eq!(testkit::to_f64(&tensor), self.numbers(&["weights", &name]), "{file}");
        }
    }

    fn check_optimizer(&self, file: &str, run: &mut Run) {
        let state = run.opt.state_dict().unwrap().state;
        for name in ["weight", "bias"] {
            let buffer = testkit::to_f64(&state[name]["momentum_buffer"]);
            assert_eq!(buffer, self.numbers(&["buffers", name]), "{file}");
        }
        assert_eq!(run.opt.lr(0).unwrap(), self.content["lr"].as_f64().unwrap(), "{file}");
    }

    fn check_scaler(&self, file: &str, run: &Run) {
        let state = serde_json::to_value(run.scaler.state_dict().unwrap()).unwrap();
        for name in ["scale", "_growth_tracker"] {
            let expected = self.content["scaler"][name].as_f64();
            assert_eq!(state[name].as_f64(), expected, "{name} of {file}");
            assert!(expected.is_some());
        }
    }
}

fn flatten(value: &serde_json::Value, numbers: &mut Vec<f64>) {
    match value {
        serde_json::Value::Array(items) => items.iter().for_each(|item| flatten(item, numbers)),
        number => numbers.extend(number.as_f64()),
    }
}

struct Run {
    vs: VarStore,
    opt: Optimizer,
    scaler: GradScaler,
}

impl Run {
    fn new() -> Self {
        let vs = VarStore::new(Device::Cpu);
        nn::linear(vs.root(), 3, 2, Default::default());
        let opt = Sgd { momentum: 0.9, ..Default::default() };
        let opt = opt.build(listed(&vs, ["weight", "bias"]), 0.75).unwrap();
        let scaler = GradScalerConfig { init_scale: 2.0, growth_interval: 7, ..Default::default() };
        Self { vs, opt, scaler: scaler.build(Device::Cpu).unwrap() }
    }

    fn model<'r>(&'r self, restore: Restore<'r>, name: &str) -> Restored {
        restore.add(name, &self.vs).apply().unwrap_or_else(|error| panic!("{name}: {error}"))
    }
}

/// Restores a model under this name.
fn check_model(files: &Files, file: &str, name: &str, prefixes: &[&str]) -> Restored {
    let (checkpoint, run) = (files.load(file), Run::new());
    let restore = prefixes
        .iter()
        .fold(checkpoint.restore(), |restore, prefix| restore.rename_prefix(prefix, ""));
    let restored = run.model(restore, name);
    files.check_weights(file, &run);
    restored
}

#[test]
fn a_model_is_found_wherever_it_is() {
    let Some(files) = files() else { return };
    let whole = [
        ("bare_model.pt", "model"),
        ("bare_model.old.pt", "model"),
        ("pytorch_model.bin", "model"),
        ("model.safetensors", "model"),
        ("model.safetensors.index.json", "model"),
        ("pytorch_model.bin.index.json", "model"),
        ("run.pt", "model"),
        ("run.old.pt", "model"),
        ("state_dict.pt", "state_dict"),
        ("deep.pt", "checkpoint.last.model"),
        ("list.pt", "0"),
        ("deepspeed.pt", "module"),
    ];
    for (file, name) in whole {
        assert_eq!(check_model(&files, file, name, &[]), Restored::default(), "{file}");
    }
    for file in ["lightning.pt", "lightning.old.pt"] {
        check_model(&files, file, "state_dict", &["net."]);
    }
}

#[test]
fn what_is_not_a_tensor_in_a_model_is_left_out_and_listed() {
    let Some(files) = files() else { return };
    let mut restored = check_model(&files, "model_with_others.pt", "model", &[]);
    restored.unexpected_keys.sort();
    let names = ["f", "meta", "names", "version"].map(|name| format!("model/{name}"));
    assert_eq!(restored.unexpected_keys, names);
    // At the top of a file such entries are parts beside the model.
    let restored = check_model(&files, "bare_model_with_others.pt", "model", &[]);
    assert_eq!(restored.unexpected_keys, ["model/args"]);
    let checkpoint = files.load("bare_model_with_others.pt");
    assert_eq!(checkpoint.value::<u64>("version").unwrap(), 3);
    assert_eq!(checkpoint.value::<Vec<String>>("classes").unwrap(), ["a", "b"]);
    let error = checkpoint.value::<serde_json::Value>("args").unwrap_err().to_string();
    assert!(error.contains("argparse.Namespace"), "{error}");
    // A variable of such a name is asked for.
    let (checkpoint, run) = (files.load("model_with_others.pt"), Run::new());
    drop(run.vs.root().zeros("version", &[1]));
    let refused = checkpoint.restore().add("model", &run.vs).strict(false).apply();
    match checkpoint_error(refused) {
        CheckpointError::OtherPart { name, .. } => assert_eq!(name, "model/version"),
        other => panic!("{other:?}"),
    }
}

/// Only the names of variables within layers have a dot, so that a tensor without one beside them may be a variable, too.
#[test]
fn a_tensor_beside_a_model_belongs_to_it_if_it_has_such_a_variable() {
    let Some(files) = files() else { return };
    let checkpoint = files.load("bare_model_with_tensors.pt");
    assert_eq!(
        checkpoint.names().collect::<Vec<_>>(),
        ["cls_token", "epoch", "mean", "model", "step"]
    );
    for again in [None, Some("again.pt"), Some("again.safetensors")] {
        let checkpoint = match again {
            None => files.load("bare_model_with_tensors.pt"),
            Some(file) => reloaded(&checkpoint, file),
        };
        let run = Run::new();
        let restored = checkpoint.restore().rename_prefix("fc.", "").add("model", &run.vs).apply();
        assert_eq!(restored.unwrap(), Restored::default(), "{again:?}");
        files.check_weights("bare_model_with_tensors.pt", &run);
        assert_eq!(testkit::to_f64(&checkpoint.tensor("mean").unwrap()), [0.25]);
    }
    let run = Run::new();
    let token = run.vs.root().sub("vit").zeros("cls_token", &[4]);
    let rename = || checkpoint.restore().rename_prefix("fc.", "").rename_prefix("cls", "vit.cls");
    assert_eq!(rename().add("model", &run.vs).apply().unwrap(), Restored::default());
    let wanted: Vec<_> = (0..4).map(|index| f64::from(index) * 0.5).collect();
    assert_eq!(testkit::to_f64(&token), wanted);
    drop(run.vs.root().zeros("mean", &[2]));
    let refused = checkpoint_error(rename().add("model", &run.vs).apply());
    assert!(matches!(refused, CheckpointError::Tensor { .. }), "{refused}");
    drop(run.vs.root().zeros("std", &[1]));
    let refused = rename().skip(&["mean"]).add("model", &run.vs).apply();
    assert!(matches!(checkpoint_error(refused), CheckpointError::Keys { .. }));
}

#[test]
fn prefixes_are_renamed_one_after_the_other() {
    let Some(files) = files() else { return };
    check_model(&files, "prefixes.pt", "model", &["module.", "_orig_mod."]);
    check_model(&files, "prefixes.pt", "model", &["module._orig_mod."]);
    let (checkpoint, run) = (files.load("prefixes.pt"), Run::new());
    let restore = checkpoint.restore().rename_prefix("_orig_mod.", "").rename_prefix("module.", "");
    let refused = restore.add("model", &run.vs).apply();
    assert!(matches!(checkpoint_error(refused), CheckpointError::Keys { .. }));
}

#[test]
fn an_optimizer_is_found_wherever_it_is() {
    let Some(files) = files() else { return };
    let places = [
        ("optimizer.pt", "optimizer"),
        ("run.pt", "optimizer"),
        ("run.old.pt", "optimizer"),
        ("deep.pt", "checkpoint.last.optimizer"),
        ("lightning.pt", "optimizer_states"),
        ("lightning.pt", "optimizer_states.0"),
        ("lightning.old.pt", "optimizer_states.0"),
        ("two.pt", "optimizer_states.0"),
        ("mmengine_amp.pt", "optimizer"),
        ("timm.pt", "optimizer"),
    ];
    for (file, name) in places {
        let (checkpoint, mut run) = (files.load(file), Run::new());
        checkpoint.restore().add(name, &mut run.opt).apply().unwrap();
        files.check_optimizer(file, &mut run);
    }
    let (two, mut run) = (files.load("two.pt"), Run::new());
    two.restore().add("optimizer_states.1", &mut run.opt).apply().unwrap();
    assert_eq!(run.opt.lr(0).unwrap(), 0.25);
    let refused = two.restore().add("optimizer_states", &mut run.opt).apply();
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("optimizer_states") && error.contains(".0"), "{error}");
    let refused = two.restore().add("optimizer_states.2", &mut run.opt).apply();
    assert!(matches!(checkpoint_error(refused), CheckpointError::NoPart { .. }));
}

#[test]
fn a_scaler_a_schedule_and_values_are_found_wherever_they_are() {
    let Some(files) = files() else { return };
    let places = [
        ("scaler.pt", "scaler"),
        ("run.pt", "scaler"),
        ("run.old.pt", "scaler"),
        ("deep.pt", "checkpoint.last.scaler"),
        ("lightning.pt", "MixedPrecision"),
        ("mmengine_amp.pt", "optimizer.loss_scaler"),
        ("timm.pt", "amp_scaler"),
    ];
    for (file, name) in places {
        let (checkpoint, mut run) = (files.load(file), Run::new());
        checkpoint.restore().add(name, &mut run.scaler).apply().unwrap();
        files.check_scaler(file, &run);
    }
    let lightning = files.load("lightning.pt");
    assert_eq!(lightning.value::<u64>("loops.fit_loop.epoch_progress.total.ready").unwrap(), 1);
    assert_eq!(lightning.value::<u64>("hyper_parameters.widths.1").unwrap(), 2);
    let callback = "callbacks.ModelCheckpoint{'monitor': 'loss'}";
    let score = lightning.tensor(&format!("{callback}.best_model_score")).unwrap();
    assert_eq!(score.double_value(&[]), 0.25);
    let best = lightning.value::<String>(&format!("{callback}.best_model_path")).unwrap();
    assert_eq!(best, "a.ckpt");
    assert_eq!(files.load("deep.pt").value::<u64>("checkpoint.last.epoch").unwrap(), 3);
    let epochs = lightning.value::<u64>("lr_schedulers.0.last_epoch").unwrap();
    assert_eq!(files.load("scheduler.pt").value::<u64>("scheduler.last_epoch").unwrap(), epochs);
    assert_eq!(files.load("bare_tensor.pt").tensor("tensor").unwrap().size(), [2, 3]);
    assert_eq!(files.load("bare_tensor.old.pt").tensor("tensor").unwrap().size(), [2, 3]);
    let random = files.load("rng_state.pth");
    random.restore().add("cpu", Rng(Device::Cpu)).apply().unwrap();
}

/// Groups alone are an optimizer without a state only if nothing else is in the dict.
#[test]
fn groups_beside_a_model_do_not_hide_it() {
    let Some(files) = files() else { return };
    let (checkpoint, run) = (files.load("groups.pt"), Run::new());
    checkpoint.restore().add("model", &run.vs).apply().unwrap();
    assert!(checkpoint.contains("param_groups"));
}

/// A file of Python's numbers has no names to write in their place.
#[test]
fn numbers_are_not_written_as_names() {
    let Some(files) = files() else { return };
    let checkpoint = files.load("optimizer.pt");
    let path = files.folder.file("numbers.pt");
    assert_says(checkpoint.save_as(&path, Format::TorchByName), "numbers and no names");
    assert!(!path.exists());
}

#[test]
fn what_an_optimizer_has_beside_its_state_is_restored_or_listed() {
    let Some(files) = files() else { return };
    let (checkpoint, mut run) = (files.load("mmengine_amp.pt"), Run::new());
    let restored = checkpoint.restore().add("optimizer", &mut run.opt).apply().unwrap();
    assert_eq!(restored.unexpected_keys, ["optimizer/loss_scaler"]);
    let both = checkpoint.restore().add("optimizer", &mut run.opt);
    let restored = both.add("optimizer.loss_scaler", &mut run.scaler).apply().unwrap();
    assert_eq!(restored, Restored::default());
    files.check_optimizer("mmengine_amp.pt", &mut run);
    files.check_scaler("mmengine_amp.pt", &run);
    // A file of this crate has no place for it, and it is not dropped in silence.
    for file in ["again.pt", "again.safetensors"] {
        unsaveable(checkpoint.save(files.folder.file(file)));
    }
}

/// Changes a weight, as a step does.
fn step(linear: &nn::Linear) {
    let mut weight = linear.ws.shallow_clone();
    tch::no_grad(|| weight += 1.0);
}

/// A model with a norm, as in the oracle.
pub(crate) fn wide() -> (VarStore, nn::Linear, nn::BatchNorm) {
    let vs = VarStore::new(Device::Cpu);
    let linear = nn::linear(vs.root() / "linear", 3, 2, Default::default());
    let norm = nn::batch_norm1d(vs.root() / "norm", 2, Default::default());
    (vs, linear, norm)
}

fn check_averages(files: &Files, ema: &AveragedWeights, key: &str) {
    for name in ["linear.weight", "linear.bias", "norm.weight", "norm.bias"] {
        let expected = files.numbers(&[key, &format!("module.{name}")]);
        assert_eq!(testkit::to_f64(&ema.average(name).unwrap()), expected, "{name}");
    }
}

#[test]
fn an_averaged_model_becomes_averages_and_back() {
    let Some(files) = files() else { return };
    for (file, part) in
        [("averaged.pt", "ema"), ("averaged.old.pt", "ema"), ("bare_averaged.pt", "model")]
    {
        let (vs, linear, _norm) = wide();
        let mut ema = averages_of(&vs);
        let checkpoint = files.load(file);
        let restored = checkpoint.restore().add(part, &mut ema).apply().unwrap();
        assert_eq!(restored, Restored::default(), "{file}");
        assert_eq!(ema.updates().unwrap(), 2);
        check_averages(&files, &ema, "averages");
        // The next update is the same as Python's.
        if file == "averaged.pt" {
            checkpoint.restore().add("model", &vs).apply().unwrap();
            step(&linear);
            ema.advance().unwrap();
            check_averages(&files, &ema, "next averages");
        }
        // Its statistics are those that Python evaluates with.
        drop(ema.swap_in().unwrap());
        let mean = files.numbers(&["averages", "module.norm.running_mean"]);
        let guard = ema.swap_in().unwrap();
        assert_eq!(testkit::to_f64(&vs.variables()["norm.running_mean"]), mean, "{file}");
        drop(guard);
    }
}

#[test]
fn averages_of_timm_and_mmengine_go_on() {
    let Some(files) = files() else { return };
    let cases = [
        ("steps.pt", "state_dict", "ema_state_dict", None),
        ("steps.pt", "state_dict", "ema_state_dict", Some(2)),
        ("timm.pt", "state_dict", "state_dict_ema", Some(2)),
        ("mmengine.pt", "ema_state_dict", "state_dict", Some(2)),
    ];
    for (file, model, averages, updates) in cases {
        let (vs, linear, _norm) = wide();
        let mut ema = averages_of(&vs);
        let checkpoint = files.load(file);
        let mut restore = checkpoint.restore().add(model, &vs).add(averages, &mut ema);
        if file == "mmengine.pt" {
            restore = restore.rename_prefix("module.", "").skip(&["steps"]);
        }
        restore = updates.into_iter().fold(restore, Restore::averages_updates);
        drop(restore.apply().unwrap());
        assert_eq!(ema.updates().unwrap(), 2, "{file}");
        check_averages(&files, &ema, "averages");
        step(&linear);
        ema.advance().unwrap();
        check_averages(&files, &ema, "next averages");
    }
}

#[test]
fn the_number_of_updates_is_the_files_or_the_programs() {
    let Some(files) = files() else { return };
    let (vs, linear, _norm) = wide();
    let mut ema = debiased_averages_of(&vs);
    ema.advance().unwrap();
    let before = ema.average("linear.weight").unwrap().copy();
    for (file, part, says) in [
        ("timm.pt", "state_dict_ema", "averages_updates"),
        ("bad_steps.pt", "ema_state_dict", "`steps` in `ema_state_dict` is -1"),
    ] {
        let refused = checkpoint_error(files.load(file).restore().add(part, &mut ema).apply());
        assert!(matches!(refused, CheckpointError::Tensor { .. }), "{refused:?}");
        assert!(refused.to_string().contains(says), "{refused}");
        assert_eq!(ema.updates().unwrap(), 1);
        assert_eq!(ema.average("linear.weight").unwrap(), before);
    }
    let own = checkpoint_of([("ema", &mut ema)]);
    let averaged = files.load("averaged.pt");
    for (checkpoint, part) in [
        (&averaged, "ema"),
        (&files.load("steps.pt"), "ema_state_dict"),
        (&files.load("bad_steps.pt"), "ema_state_dict"),
        (&own, "ema"),
    ] {
        drop(checkpoint.restore().add(part, &mut ema).averages_updates(9).apply().unwrap());
        assert_eq!(ema.updates().unwrap(), 9, "{part}");
    }
    // After none, the next update is the first, which takes the weights as they are, also of averages of this crate.
    let mut debiased = debiased_averages_of(&vs);
    debiased.advance().unwrap();
    let own = checkpoint_of([("ema", &mut debiased)]);
    drop(own.restore().add("ema", &mut debiased).averages_updates(0).apply().unwrap());
    step(&linear);
    debiased.advance().unwrap();
    assert_eq!(debiased.average("linear.weight").unwrap(), linear.ws);
    let timm = files.load("timm.pt");
    drop(timm.restore().add("state_dict_ema", &mut ema).averages_updates(0).apply().unwrap());
    ema.advance().unwrap();
    assert_eq!(ema.average("linear.weight").unwrap(), linear.ws);
}

/// The first update of averages takes the weights as they are, and the later ones have the weights that they have
/// without a file.
#[test]
fn averages_that_python_has_not_updated_yet_begin_with_the_first_update() {
    let Some(files) = files() else { return };
    let checkpoint = files.load("not_averaged_yet.pt");
    let ema = |debias, warmup| Ema { decay: 0.5, debias, warmup, ..Ema::default() }.into();
    let ways: [Averaging; 5] = [
        ema(false, false),
        ema(true, false),
        ema(false, true),
        ema(true, true),
        Swa::default().into(),
    ];
    for averaging in ways {
        let (vs, linear, _norm) = wide();
        let (mut restored, mut new) =
            (averaging.build(&vs).unwrap(), averaging.build(&vs).unwrap());
        drop(checkpoint.restore().add("ema", &mut restored).apply().unwrap());
        assert_eq!(restored.updates().unwrap(), 0);
        for update in 1..5 {
            step(&linear);
            restored.advance().unwrap();
            new.advance().unwrap();
            let [ours, theirs] = [&restored, &new]
                .map(|averages| testkit::to_f64(&averages.average("linear.weight").unwrap()));
            assert_eq!(ours, theirs, "{averaging:?}, update {update}");
            if update == 1 {
                assert_eq!(ours, testkit::to_f64(&linear.ws), "{averaging:?}");
            }
            assert_eq!(restored.updates().unwrap(), update);
        }
    }
}

#[test]
fn averages_become_an_averaged_model() {
    let (vs, linear, norm) = wide();
    let step = |ema: &mut AveragedWeights, linear: &nn::Linear| {
        step(linear);
        ema.advance().unwrap();
    };
    let mut ema = debiased_averages_of(&vs);
    (0..3).for_each(|_| step(&mut ema, &linear));
    drop(norm.running_mean.shallow_clone().fill_(5.0));
    let folder = Folder::new();
    let checkpoint = checkpoint_of([("model", &mut &vs), ("ema", &mut ema)]);
    for file in ["rust.pt", "rust.safetensors"] {
        checkpoint.save(folder.file(file)).unwrap();
        let checkpoint = Checkpoint::load(folder.file(file)).unwrap();
        let (other_vs, other_linear, other_norm) = wide();
        let mut other = debiased_averages_of(&other_vs);
        let restore = checkpoint.restore().add("model", &other_vs).add("ema", &mut other);
        assert_eq!(restore.apply().unwrap(), Restored::default(), "{file}");
        // The averages go on as if nothing had been saved, and the model's own statistics remain in use.
        step(&mut other, &other_linear);
        drop(other_norm.running_mean.shallow_clone().fill_(7.0));
        let guard = other.swap_in().unwrap();
        assert_eq!(testkit::to_f64(&other_norm.running_mean), [7.0, 7.0], "{file}");
        drop(guard);
        let (again_vs, again_linear, _norm) = wide();
        let mut again = debiased_averages_of(&again_vs);
        let restore = checkpoint.restore().add("model", &again_vs).add("ema", &mut again);
        drop(restore.apply().unwrap());
        step(&mut again, &again_linear);
        for name in ["linear.weight", "norm.bias"] {
            assert_eq!(other.average(name), again.average(name), "{name} of {file}");
        }
        // The averages are a model as well.
        let (plain, _linear, _norm) = wide();
        drop(checkpoint.restore().add("ema", &plain).strict(false).apply().unwrap());
        assert_eq!(plain.variables()["linear.weight"], ema.average("linear.weight").unwrap());
    }
    let mut goes_on = debiased_averages_of(&vs);
    let saved = Checkpoint::load(folder.file("rust.pt")).unwrap();
    drop(saved.restore().add("ema", &mut goes_on).apply().unwrap());
    step(&mut ema, &linear);
    goes_on.advance().unwrap();
    assert_eq!(goes_on.average("linear.weight"), ema.average("linear.weight"));
    let Some(python) = Oracle::find("checkpoint_files.py") else { return };
    let printed = python.run(&["average", folder.file("rust.pt").to_str().unwrap()], "");
    let content: serde_json::Value = serde_json::from_str(&printed).unwrap();
    let (plain, _linear, _norm) = wide();
    drop(saved.restore().add("ema", &plain).strict(false).apply().unwrap());
    for (name, tensor) in plain.variables() {
        let mut numbers = Vec::new();
        flatten(&content[0][format!("module.{name}")], &mut numbers);
        if name == "norm.running_mean" {
            assert_eq!(numbers, [5.0, 5.0]);
        } else if name != "norm.running_var" {
            assert_eq!(testkit::to_f64(&tensor), numbers, "{name}");
        }
    }
    assert_eq!((&content[0]["n_averaged"], &content[1]["n_averaged"]), (&3.into(), &4.into()));
}

#[test]
fn the_old_format_keeps_views_and_dtypes() {
    let Some(files) = files() else { return };
    let views = files.load("views.old.pt");
    for name in ["base", "part", "column", "a"] {
        let tensor = views.tensor(&format!("model.{name}")).unwrap();
        let expected = files.numbers(&["views", name]);
        assert_eq!(testkit::to_f64(&tensor.reshape([-1])), expected, "{name}");
    }
    assert_eq!(views.tensor("model.a").unwrap().kind(), Kind::BFloat16);
    assert_eq!(views.tensor("model.b").unwrap().kind(), Kind::ComplexFloat);
    assert_eq!(views.tensor("model.empty").unwrap().size(), [0]);
}

#[test]
fn a_cut_file_of_the_old_format_is_refused() {
    let Some(files) = files() else { return };
    let bytes = std::fs::read(files.folder.file("run.old.pt")).unwrap();
    for len in 0..bytes.len() {
        damaged(Checkpoint::from_bytes(bytes[..len].to_vec()));
    }
    // It has no checksums, but no damage makes it panic, and none reaches out of the file.
    for at in 0..bytes.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut bytes = bytes.clone();
            bytes[at] ^= flip;
            if let Ok(checkpoint) = Checkpoint::from_bytes(bytes) {
                let mut run = Run::new();
                drop(checkpoint.restore().add("model", &run.vs).apply());
                drop(checkpoint.restore().add("optimizer", &mut run.opt).apply());
            }
        }
    }
}

#[test]
fn an_index_that_does_not_fit_its_files_is_refused() {
    let Some(files) = files() else { return };
    let index = |text: &str| {
        let path = files.folder.file("x.safetensors.index.json");
        std::fs::write(&path, text).unwrap();
        Checkpoint::load(path)
    };
    let first = "model-00001-of-00002.safetensors";
    assert!(index(&format!(r#"{{"weight_map":{{"weight":"{first}"}}}}"#)).is_ok());
    let outside = format!(r#"{{"weight_map":{{"weight":"../{first}"}}}}"#);
    assert!(damaged(index(&outside)).contains("not the name of a file"));
    for path in ["/etc/passwd", "..", ".", "", "a/b"] {
        let problem = damaged(index(&format!(r#"{{"weight_map":{{"weight":"{path}"}}}}"#)));
        assert!(problem.contains("not the name of a file"), "{path}: {problem}");
    }
    let wrong = damaged(index(&format!(r#"{{"weight_map":{{"bias":"{first}"}}}}"#)));
    assert!(wrong.contains("`bias` is not in"), "{wrong}");
    for text in
        ["{", "{}", r#"{"weight_map":[]}"#, r#"{"weight_map":{"a":1}}"#, r#"{"a":{"b":"c"}}"#]
    {
        damaged(index(text));
    }
    let twice = format!(r#"{{"weight_map":{{"weight":"{first}","weight":"{first}"}}}}"#);
    assert!(damaged(index(&twice)).contains("twice"));
    let itself = r#"{"weight_map":{"weight":"x.safetensors.index.json"}}"#;
    damaged(index(itself));
    match checkpoint_error(index(r#"{"weight_map":{"weight":"gone.safetensors"}}"#)) {
        CheckpointError::Io { path, .. } => assert_eq!(path, files.folder.file("gone.safetensors")),
        other => panic!("{other:?}"),
    }
}
