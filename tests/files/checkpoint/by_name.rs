//! Optimizers whose parameters have names in the place of numbers, as FSDP and `torch.distributed.checkpoint` save
//! them.

use std::collections::BTreeMap;

use tch::{Device, Kind};
use tch_amp::checkpoint::{Checkpoint, CheckpointError, Format, Restore};
use tch_amp::optim::{AdamW, Muon, Optimizer};
use tch_amp::{Error, Result};

use crate::checkpoint::Run;
use crate::checkpoint::python::{ALGORITHMS, Twin, losses};
use testkit::assert_refused;
use testkit::checkpoints::checkpoint_of;
use testkit::files::Folder;
use testkit::python::Oracle;
use testkit::tensors::leaf;

/// The numbers of the parameters of the optimizer differ from Python's: it lists the bias first.
fn other_order(algorithm: &str) -> Twin {
    Twin::with_order(algorithm, ["bias", "weight"])
}

struct Files {
    folder: Folder,
    /// What Python computes from each file on.
    losses: BTreeMap<String, Vec<u32>>,
    /// What this crate computes after each file that Python loads.
    ours: BTreeMap<String, Vec<u32>>,
}

/// Trains on, and returns the bits of the losses.
fn next(twin: &mut Twin) -> Vec<u32> {
    twin.train(4, &[])
}

/// Writes `rust.pt` and `rust.dcp`, and lets Python read them and write its own files.
fn files() -> Option<Files> {
    let python = Oracle::find("checkpoint.py")?;
    let folder = Folder::new();
    let mut ours = BTreeMap::new();
    let mut checkpoint = Checkpoint::new();
    let mut twins = Vec::new();
    for name in ALGORITHMS {
        let mut twin = other_order(name);
        twin.train(5, &[2]);
        checkpoint.add(&format!("{name} model"), &twin.vs).unwrap();
        checkpoint.add(&format!("{name} optimizer"), &mut twin.opt).unwrap();
        checkpoint.add(&format!("{name} scaler"), &mut twin.scaler).unwrap();
        twins.push(twin);
    }
    checkpoint.save_as(folder.file("rust.pt"), Format::TorchByName).unwrap();
    checkpoint.save_as(folder.file("rust.dcp"), Format::Dcp).unwrap();
    for (name, mut twin) in ALGORITHMS.into_iter().zip(twins) {
        let losses = next(&mut twin);
        ours.insert(format!("rust {name}"), losses.clone());
        ours.insert(format!("dcp {name}"), losses);
    }
    let printed = python.run(&["by_name", folder.0.to_str().unwrap()], "");
    let losses = printed.lines().map(|line| {
        let (name, printed) = line.split_once(',').unwrap();
        (name.to_owned(), losses(printed))
    });
    Some(Files { losses: losses.collect(), ours, folder })
}

fn refused(restore: Restore<'_>, name: &str, opt: &mut Optimizer) -> String {
    let before = format!("{:?}", opt.state_dict().unwrap());
    let error = restore.add(name, &mut *opt).apply().unwrap_err();
    assert_eq!(format!("{:?}", opt.state_dict().unwrap()), before, "{name}");
    error.to_string()
}

#[test]
fn training_resumes_from_names_in_rust_and_in_python() {
    let Some(files) = files() else { return };
    for (name, ours) in &files.ours {
        assert_eq!(ours, &files.losses[name], "{name}");
    }
    let load = |name: &str| Checkpoint::load(files.folder.file(name)).unwrap();
    let python = ["dcp", "dcp.pt"].map(load);
    let rust = ["rust.pt", "rust.dcp", "converted.pt"].map(load);
    let resumed = |checkpoint: &Checkpoint, name: &str, parts: &[String; 3]| {
        let mut twin = other_order(name);
        twin.train(1, &[]);
        twin.restore_parts(checkpoint, parts);
        next(&mut twin)
    };
    for name in ALGORITHMS {
        for (checkpoint, part) in python.iter().flat_map(|it| [(it, "optim"), (it, "flat")]) {
            let parts = ["model", part, "scaler"].map(|part| format!("{name}.{part}"));
            assert_eq!(resumed(checkpoint, name, &parts), files.losses[name], "{name}.{part}");
        }
        let parts = ["model", "optimizer", "scaler"].map(|part| format!("{name} {part}"));
        for checkpoint in &rust {
            let losses = resumed(checkpoint, name, &parts);
            assert_eq!(losses, files.ours[&format!("rust {name}")], "{name}");
        }
        // By numbers, which a folder has as texts, in Python's order of the parameters.
        let mut twin = Twin::new(name);
        let parts = ["model", "numbers", "scaler"].map(|part| format!("{name}.{part}"));
        twin.restore_parts(&python[0], &parts);
        assert_eq!(next(&mut twin), files.losses[name], "{name}.numbers");
    }
    assert_eq!(files.losses.len(), 3 * ALGORITHMS.len() + 1);
    // A file of its own is found like any other optimizer.
    let flat = Checkpoint::load(files.folder.file("flat.pt")).unwrap();
    let mut opt = other_order("adamw").opt;
    flat.restore().add("optimizer", &mut opt).apply().unwrap();
    assert_eq!(opt.state_dict().unwrap().state["bias"]["step"].double_value(&[]), 4.0);

    let odd = Checkpoint::load(files.folder.file("odd.pt")).unwrap();
    options_that_are_tensors_are_read(&files, &odd);
    folders_of_pieces_are_named(&files.folder);
    names_that_do_not_fit_are_refused(&odd);
}

fn options_that_are_tensors_are_read(files: &Files, odd: &Checkpoint) {
    let mut twin = Twin::new("adamw");
    twin.restore_from(odd, "tensors");
    assert_eq!(twin.opt.param_group(0).unwrap().lr, f64::from(0.05f32));
    assert_eq!(next(&mut twin), files.losses["tensors"]);
}

/// A file of a folder is no checkpoint, and the message names the folder that is one.
fn folders_of_pieces_are_named(folder: &Folder) {
    let dcp = folder.file("dcp");
    for piece in ["__0_0.distcp", ".metadata"] {
        let path = dcp.join(piece);
        match Checkpoint::load(&path) {
            Err(Error::Checkpoint(CheckpointError::Damaged { path: named, problem })) => {
                assert_eq!(named, path);
                assert!(
                    problem.contains(&format!("load the folder, `{}`", dcp.display())),
                    "{problem}"
                );
            }
            other => panic!("{piece}: {other:?}"),
        }
    }
    // The content counts where it is a checkpoint, and a missing file is missing.
    let renamed = folder.file("renamed.distcp");
    std::fs::copy(folder.file("flat.pt"), &renamed).unwrap();
    assert!(Checkpoint::load(&renamed).unwrap().contains("optimizer"));
    assert_refused!(
        Checkpoint::load(folder.file("missing.distcp")),
        Error::Checkpoint(CheckpointError::Io { .. })
    );
    assert_refused!(Checkpoint::load(&folder.0), Error::Checkpoint(CheckpointError::Io { .. }));
}

fn names_that_do_not_fit_are_refused(odd: &Checkpoint) {
    let mut twin = other_order("adamw");
    let opt = &mut twin.opt;
    let unknown = refused(odd.restore(), "unknown", opt);
    assert!(unknown.contains("weigth") && unknown.contains("did you mean `weight`?"), "{unknown}");
    let missing = refused(odd.restore(), "missing", opt);
    assert!(missing.contains("bias") && missing.contains("in no group"), "{missing}");
    let misspelled = refused(odd.restore(), "misspelled", opt);
    assert!(misspelled.contains("`wieght`"), "{misspelled}");
    assert!(misspelled.contains("did you mean `weight`?"), "{misspelled}");
    let mixed = refused(odd.restore(), "mixed", opt);
    assert!(mixed.contains("`weight`, and others by numbers, such as 1"), "{mixed}");
    let wrapped = refused(odd.restore(), "wrapped", opt);
    assert!(wrapped.contains("rename_prefix(\"module._orig_mod.\", \"\")"), "{wrapped}");
    let unwrap = || odd.restore().rename_prefix("module.", "").rename_prefix("_orig_mod.", "");
    drop(unwrap().add("wrapped", &mut *opt).apply().unwrap());
    drop(odd.restore().add("beside", &mut *opt).apply().unwrap());
    for name in ["weight", "bias"] {
        assert_eq!(opt.state_dict().unwrap().state[name]["step"].double_value(&[]), 4.0, "{name}");
    }
    // As in a model, what only one side has is listed instead.
    let restored = odd.restore().strict(false).add("unknown", &mut *opt).apply().unwrap();
    assert_eq!(restored.unexpected_keys, ["unknown/weigth"]);
    assert_eq!(restored.missing_keys, ["unknown/weight"]);
    let skipped = odd.restore().skip(&["weight"]).strict(false).add("unknown", opt).apply();
    assert_eq!(skipped.unwrap().skipped_keys, ["unknown/weight"]);
}

/// Two parameters of one group and one shape, of which only the names tell which is which.
#[test]
fn parameters_of_a_group_are_found_by_their_names_in_any_order() -> Result<()> {
    let folder = Folder::new();
    let [a, b] = [1.0, 2.0].map(|x| leaf(&[x; 3], Kind::Float, Device::Cpu));
    let built = |names: [&str; 2]| {
        let of = |name: &str| if name == "a" { &a } else { &b }.shallow_clone();
        let list = names.map(|name| (name.to_owned(), of(name)));
        AdamW::default().build(Vec::from(list), 0.1)
    };
    let mut saved = built(["a", "b"])?;
    saved.backward_step(&(&a * 3.0 + &b * 5.0).sum(Kind::Float))?;
    let checkpoint = checkpoint_of([("optimizer", &mut saved)]);
    for (file, format) in [("x.pt", Format::TorchByName), ("x.dcp", Format::Dcp)] {
        checkpoint.save_as(folder.file(file), format)?;
        let mut restored = built(["b", "a"])?;
        let loaded = Checkpoint::load(folder.file(file))?;
        loaded.restore().add("optimizer", &mut restored).apply()?;
        let state = restored.state_dict()?.state;
        for (name, gradient) in [("a", 3.0), ("b", 5.0)] {
            let moment = state[name]["exp_avg"].double_value(&[0]);
            assert!((moment - 0.1 * gradient).abs() < 1e-6, "{name} of {file}: {moment}");
        }
    }
    Ok(())
}

/// Muon is two optimizers in Python, whose numbers both begin at 0.
#[test]
fn muon_is_written_by_names_and_read_again() -> Result<()> {
    let folder = Folder::new();
    let muon =
        Muon { adamw: AdamW { weight_decay: 0.25, ..Default::default() }, ..Default::default() };
    let mut run = Run::new(tch::Device::Cpu);
    run.opt = muon.build(&run.vs, 0.1)?;
    run.train(3);
    run.checkpoint().save_as(folder.file("muon.pt"), Format::TorchByName)?;
    let saved = run.fingerprint();
    run.train(1);
    let checkpoint = Checkpoint::load(folder.file("muon.pt"))?;
    run.restore(&checkpoint)?;
    assert_eq!(run.fingerprint(), saved);
    let python =
        checkpoint.restore().add("optimizer", &mut AdamW::default().build(&run.vs, 0.1)?).apply();
    assert!(matches!(python, Err(Error::Optimizer(_))), "{python:?}");
    Ok(())
}
