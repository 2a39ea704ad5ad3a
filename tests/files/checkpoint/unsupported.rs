//! One entry that this crate does not support is named and left out, and everything else in its file is read.

use std::path::Path;

use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::checkpoint::{Checkpoint, CheckpointError, Restored};
use tch_amp::optim::AdamW;

use crate::checkpoint::{
    assert_has_pythons_weights, checkpoint_error, damaged, debiased_averages_of, from_python,
    linear,
};
use testkit::assert_says;
use testkit::checkpoints::checkpoint_of;
use testkit::files::Folder;
use testkit::handmade::safetensors;
use testkit::python::Oracle;

fn load(path: &Path) -> Checkpoint {
    Checkpoint::load(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns what the error of a kind that does not fit names.
#[track_caller]
fn other_part(what: &str, result: tch_amp::Result<impl std::fmt::Debug>) -> String {
    match checkpoint_error(result) {
        CheckpointError::OtherPart { name, .. } => name,
        other => panic!("{what}: {other:?}"),
    }
}

/// Restores the model strictly, with the report as the result.
fn restored(name: &str, checkpoint: &Checkpoint, skip: &[&str]) -> Restored {
    let vs = linear();
    let restored = checkpoint.restore().add("model", &vs).skip(skip).apply();
    let restored = restored.unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_has_pythons_weights(&vs, name);
    restored
}

/// Asks for the entry as a variable of the model.
fn asked(name: &str, checkpoint: &Checkpoint, skip: &[&str]) {
    let vs = linear();
    let other = vs.root().zeros("other", &[4]);
    let before = vs.variables()["weight"].copy();
    let refused = checkpoint.restore().add("model", &vs).skip(skip).apply();
    assert_eq!(other_part(name, refused), "model/other");
    let refused = checkpoint.restore().add("model", &vs).strict(false).apply();
    assert_eq!(other_part(name, refused), "model/other");
    assert_eq!(vs.variables()["weight"], before, "{name}");
    let both = [&["other"], skip].concat();
    let skipped = checkpoint.restore().add("model", &vs).skip(&both).apply().unwrap();
    assert!(skipped.skipped_keys.contains(&"model/other".to_owned()), "{name}: {skipped:?}");
    assert_eq!(other.sum(Kind::Float).double_value(&[]), 0.0);
}

#[test]
fn an_entry_that_is_not_supported_is_left_out_of_pythons_file() {
    let Some((folder, printed)) = from_python("checkpoint_files.py", "unsupported") else { return };
    let names: Vec<_> = printed.lines().collect();
    assert!(names.len() > 80, "{printed}");
    for name in names {
        for protocol in 2..=5 {
            let file = |way: &str| load(&folder.file(&format!("{name}.{protocol}.{way}.pt")));
            let is_tensor = name.ends_with(" tensor");
            let beside = file("beside");
            assert_eq!(restored(name, &beside, &[]), Restored::default());
            assert_eq!(beside.value::<i64>("seed").unwrap(), 7, "{name}");
            assert_eq!(beside.names().collect::<Vec<_>>(), ["model", "other", "seed"], "{name}");
            let value = beside.value::<serde_json::Value>("other");
            assert_eq!(other_part(name, value), "other");
            if is_tensor {
                let ones = Tensor::ones([2], (Kind::Float, Device::Cpu));
                assert_eq!(beside.tensor("other").unwrap(), ones);
            } else {
                assert_eq!(other_part(name, beside.tensor("other")), "other");
                assert!(beside.save(folder.file("again.pt")).is_err(), "{name}");
            }
            let within = file("within");
            let skip = if is_tensor { &["other"][..] } else { &[] };
            let report = restored(name, &within, skip);
            let listed = [report.unexpected_keys, report.skipped_keys].concat();
            assert_eq!(listed, ["model/other"], "{name}");
            restored(name, &file("bare"), &[]);
            if !is_tensor {
                asked(name, &within, &[]);
            }
        }
    }
}

#[test]
fn a_dtype_that_is_not_supported_is_left_out_of_safetensors() {
    let Some((folder, printed)) = from_python("checkpoint_files.py", "unsupported_dtypes") else {
        return;
    };
    assert_eq!(printed.lines().count(), 7, "{printed}");
    for name in printed.lines() {
        let checkpoint = load(&folder.file(&format!("{name}.safetensors")));
        assert_eq!(restored(name, &checkpoint, &[]).unexpected_keys, ["model/other"], "{name}");
        assert_eq!(restored(name, &checkpoint, &["oth*"]).skipped_keys, ["model/other"], "{name}");
        asked(name, &checkpoint, &[]);
        let error = checkpoint.tensor("model.other").unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn a_model_in_several_files_may_have_other_entries() {
    let Some((folder, _)) = from_python("checkpoint_files.py", "parts_of_models") else { return };
    for name in ["together", "alone", "apart"] {
        let checkpoint = load(&folder.file(&format!("{name}.bin.index.json")));
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["model"], "{name}");
        let skip = ["cls_token", "model"];
        let mut left_out = restored(name, &checkpoint, &skip).unexpected_keys;
        left_out.sort();
        let wanted = ["named.other", "other", "state", "step"].map(|name| format!("model/{name}"));
        assert_eq!(left_out, wanted, "{name}");
        assert_eq!(checkpoint.value::<i64>("model.step").unwrap(), 3, "{name}");
        asked(name, &checkpoint, &skip);
    }
}

#[test]
fn an_object_of_torch_script_is_left_out() {
    let Some((folder, _)) = from_python("checkpoint_files.py", "parts_of_models") else { return };
    let vs = linear();
    let scripted = load(&folder.file("scripted.pt"));
    scripted.restore().add("linear", &vs).apply().unwrap();
    assert_eq!(scripted.value::<(i64, f64)>("pair").unwrap(), (1, 2.0));
    let color = scripted.value::<serde_json::Value>("color");
    assert_says(color, "a TorchScript object");
    let quantized = load(&folder.file("quantized.pt"));
    quantized.restore().add("0", &vs).apply().unwrap();
    let packed = "1.0._packed_params._packed_params";
    assert_says(quantized.value::<serde_json::Value>(packed), "a TorchScript object");
}

#[test]
fn what_python_has_put_in_the_place_of_a_part_does_not_cost_the_others() {
    let Some(python) = Oracle::find("checkpoint_files.py") else { return };
    let (_folder, path) = Folder::with("run.pt");
    let vs = linear();
    let [mut weight, mut bias] =
        ["weight", "bias"].map(|name| vs.variables()[name].shallow_clone());
    tch::no_grad(|| {
        weight.copy_(&(Tensor::arange(6, (Kind::Float, Device::Cpu)) / 4).view([2, 3]));
        bias.copy_(&Tensor::from_slice(&[0.5f32, -0.5]));
    });
    let mut opt = AdamW::default().build(&vs, 1e-3).unwrap();
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    let mut average = debiased_averages_of(&vs);
    (0..3).for_each(|_| average.advance().unwrap());
    let mut saved = checkpoint_of([
        ("model", &mut &vs),
        ("optimizer", &mut opt),
        ("scaler", &mut scaler),
        ("with others", &mut average),
    ]);
    saved.add("updated", &mut average).unwrap();
    saved.add_value("step", &4).unwrap();
    saved.add_tensor("mean", &weight).unwrap();
    saved.add_value("epoch", &3).unwrap();
    saved.save(&path).unwrap();
    python.run(&["edited", path.to_str().unwrap()], "");

    let edited = load(&path);
    assert_eq!(restored("edited", &edited, &[]).unexpected_keys, ["model/other"]);
    assert_eq!(edited.value::<i64>("epoch").unwrap(), 3);
    assert_eq!(edited.tensor("step").unwrap().double_value(&[]), 5.0);
    assert_eq!(other_part("mean", edited.tensor("mean")), "mean");
    let refused = edited.restore().add("optimizer", &mut opt).apply();
    assert_eq!(other_part("optimizer", refused), "optimizer");
    assert_eq!(edited.value::<Option<i64>>("scaler").unwrap(), None);
    let refused = edited.restore().add("scaler", &mut scaler).apply();
    assert_eq!(other_part("scaler", refused), "scaler");
    drop(weight.data().fill_(2.0));
    average.advance().unwrap();
    for (name, updates, unexpected) in
        [("with others", 3, vec!["with others/note", "with others/other"]), ("updated", 4, vec![])]
    {
        let mut other = debiased_averages_of(&vs);
        let restored = edited.restore().add(name, &mut other).strict(false).apply().unwrap();
        assert_eq!(
            (restored.unexpected_keys, other.updates().unwrap()),
            (unexpected.into_iter().map(str::to_owned).collect(), updates)
        );
        other.advance().unwrap();
        let goes_on = other.average("weight") == average.average("weight");
        assert_eq!(goes_on, updates == 3, "{name}");
    }
}

/// What is damaged is still damage.
#[test]
fn a_tensor_of_an_unknown_dtype_cannot_hide_a_gap() {
    let file = |[a, b, c, d]: [usize; 4], len: usize| {
        let header = format!(
            r#"{{"a":{{"dtype":"NEW","shape":[1],"data_offsets":[{a},{b}]}},"b":{{"dtype":"U8","shape":[2],"data_offsets":[{c},{d}]}}}}"#
        );
        Checkpoint::from_bytes(safetensors(&header, len))
    };
    assert!(file([0, 3, 3, 5], 5).is_ok());
    for (offsets, len) in [
        ([0, 3, 4, 6], 6),
        ([0, 3, 2, 4], 4),
        ([1, 3, 3, 5], 5),
        ([3, 0, 3, 5], 5),
        ([0, 3, 3, 5], 6),
    ] {
        damaged(file(offsets, len));
    }
}
