//! Names that differ between checkpoint and model, and parts of a model that are skipped.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::{Checkpoint, CheckpointError};
use tch_amp::optim::{Optimizer, Sgd};

use crate::checkpoint::checkpoint_error;
use testkit::checkpoints::{checkpoint_of, reloaded};
use testkit::handmade::{manifest, metadata, safetensors, signed};
use testkit::tensors::{TIES, tied};

/// A model of variables with these names and sizes, and an optimizer that has stepped once with gradients of
/// `gradient`.
fn model(names: &[(&str, i64)], value: f64, gradient: Option<f64>) -> (VarStore, Optimizer) {
    let vs = VarStore::new(Device::Cpu);
    for (name, size) in names {
        let (path, name) = name.rsplit_once('.').unwrap_or(("", name));
        let parts = path.split('.').filter(|part| !part.is_empty());
        let path = parts.fold(vs.root(), |path, part| path / part);
        let _variable = path.var(name, &[*size], tch::nn::Init::Const(value));
    }
    let mut opt = Sgd { momentum: 0.5, ..Default::default() }.build(&vs, 0.25).unwrap();
    if let Some(gradient) = gradient {
        for variable in vs.trainable_variables() {
            (variable * gradient).sum(Kind::Float).backward();
        }
        opt.step().unwrap();
    }
    (vs, opt)
}

fn saved(mut vs: &VarStore, opt: &mut Optimizer, name: &str) -> Checkpoint {
    reloaded(&checkpoint_of([("model", &mut vs), ("opt", opt)]), name)
}

fn first(tensor: &Tensor) -> f64 {
    tensor.double_value(&[0])
}

fn buffer(opt: &mut Optimizer, name: &str) -> Option<f64> {
    let state = opt.state_dict().unwrap().state;
    state.get(name).map(|entries| first(&entries["momentum_buffer"]))
}

#[test]
fn a_prefix_is_renamed_in_models_and_optimizers() {
    for file in ["x.safetensors", "x.pt"] {
        let (ddp, mut ddp_opt) =
            model(&[("module.a.weight", 2), ("module.module.b", 3), ("c", 1)], 4.0, Some(2.0));
        let checkpoint = saved(&ddp, &mut ddp_opt, file);
        let (vs, mut opt) = model(&[("a.weight", 2), ("module.b", 3), ("c", 1)], 0.0, None);
        // The error names the keys that do not match, and nothing changes.
        let error = checkpoint_error(checkpoint.restore().add("model", &vs).apply());
        let CheckpointError::Keys { missing, unexpected, .. } = &error else { panic!("{error}") };
        assert_eq!(missing, &["a.weight", "module.b"]);
        assert_eq!(unexpected, &["module.a.weight", "module.module.b"]);
        assert!(error.to_string().contains("use `rename_prefix`"), "{error}");
        let restore = checkpoint.restore().add("model", &vs).add("opt", &mut opt);
        let restored = restore.rename_prefix("module.", "").apply().unwrap();
        assert_eq!(restored, Default::default());
        let variables = vs.variables();
        for name in ["a.weight", "module.b", "c"] {
            assert_eq!(first(&variables[name]), 3.5, "{name} of {file}");
            assert_eq!(buffer(&mut opt, name), Some(2.0), "{name} of {file}");
        }
    }
}

#[test]
fn the_first_prefix_that_matches_is_renamed() {
    let (source, mut source_opt) = model(&[("old.body.w", 2), ("old.head.w", 3)], 1.0, Some(4.0));
    let checkpoint = saved(&source, &mut source_opt, "x.safetensors");
    let (vs, mut opt) = model(&[("encoder.w", 2), ("new.head.w", 3)], 5.0, None);
    let restore = checkpoint.restore().add("model", &vs).add("opt", &mut opt);
    let restore = restore.rename_prefix("old.body.", "encoder.").rename_prefix("old.", "new.");
    drop(restore.apply().unwrap());
    assert_eq!(vs.variables().values().map(first).collect::<Vec<_>>(), [0.0, 0.0]);
    assert_eq!(buffer(&mut opt, "encoder.w"), Some(4.0));
    assert_eq!(buffer(&mut opt, "new.head.w"), Some(4.0));
}

#[test]
fn two_names_that_become_equal_are_refused() {
    let (source, mut source_opt) = model(&[("module.w", 2), ("w", 2)], 1.0, Some(4.0));
    let checkpoint = saved(&source, &mut source_opt, "x.pt");
    let (vs, mut opt) = model(&[("w", 2)], 7.0, None);
    let of_model = checkpoint.restore().add("model", &vs).rename_prefix("module.", "").apply();
    let error = checkpoint_error(of_model).to_string();
    assert_eq!(
        error,
        "`module.w` in `model` and `w` would both be `w` here; let `rename_prefix` give them different names"
    );
    let of_opt = checkpoint.restore().add("opt", &mut opt).rename_prefix("module.", "");
    assert!(matches!(checkpoint_error(of_opt.apply()), CheckpointError::Tensor { .. }));
    assert_eq!(first(&vs.variables()["w"]), 7.0);
}

#[test]
fn skipped_variables_are_unchanged() {
    let names = [("module.body.w", 2), ("module.head.w", 5), ("module.head.b", 5)];
    let (source, mut source_opt) = model(&names, 1.0, Some(4.0));
    source_opt.assign_group(1, &["*.b"]).unwrap();
    source_opt.set_lr_group(1, 0.125).unwrap();
    let checkpoint = saved(&source, &mut source_opt, "x.safetensors");
    // Another head: one variable has another shape, one is missing and one is new.
    let (vs, mut opt) = model(&[("body.w", 2), ("head.w", 3), ("head.scale", 3)], 9.0, Some(8.0));
    let renamed = || checkpoint.restore().rename_prefix("module.", "");
    let error = checkpoint_error(renamed().add("model", &vs).strict(false).apply()).to_string();
    assert_eq!(
        error,
        "`head.w` in `model` has the shape [5] in the checkpoint, as `module.head.w`, and [3] in the model; \
         `skip(&[\"head.w\"])` leaves it as it is"
    );
    let restore = renamed().add("model", &vs).add("opt", &mut opt);
    let restored = restore.skip(&["head.*"]).apply().unwrap();
    assert_eq!(
        restored.skipped_keys,
        [
            "model/head.b",
            "model/head.scale",
            "model/head.w",
            "opt/head.b",
            "opt/head.scale",
            "opt/head.w"
        ]
    );
    assert!(restored.missing_keys.is_empty() && restored.unexpected_keys.is_empty());
    let variables = vs.variables();
    assert_eq!(first(&variables["body.w"]), 0.0);
    assert_eq!(first(&variables["head.w"]), 7.0);
    assert_eq!(first(&variables["head.scale"]), 7.0);
    assert_eq!(buffer(&mut opt, "body.w"), Some(4.0));
    assert_eq!(buffer(&mut opt, "head.w"), None);
    let groups = opt.state_dict().unwrap().param_groups;
    assert_eq!(groups.len(), 2);
    assert_eq!(groups[1].params, Vec::<String>::new());
    assert!(groups[0].params.iter().any(|name| name == "head.scale"));
}

#[test]
fn skipped_variables_that_were_saved_keep_their_saved_group() {
    let names = [("a", 2), ("b", 2)];
    let (source, mut source_opt) = model(&names, 1.0, Some(4.0));
    source_opt.assign_group(1, &["b"]).unwrap();
    let checkpoint = saved(&source, &mut source_opt, "x.safetensors");
    let (_vs, mut opt) = model(&names, 1.0, None);
    opt.assign_group(1, &["b"]).unwrap();
    drop(checkpoint.restore().add("opt", &mut opt).skip(&["b"]).apply().unwrap());
    assert_eq!((buffer(&mut opt, "a"), buffer(&mut opt, "b")), (Some(4.0), None));
    assert_eq!(opt.state_dict().unwrap().param_groups[1].params, ["b"]);
}

/// In PyTorch every norm has a batch count, so one that tch's model lacks is written beside the statistics.
#[test]
fn a_batch_count_of_the_models_own_is_restored() {
    let names = [
        ("counted.running_mean", 2),
        ("counted.running_var", 2),
        ("counted.num_batches_tracked", 1),
        ("other.running_mean", 2),
        ("other.running_var", 2),
    ];
    for file in ["x.safetensors", "x.pt"] {
        let (source, mut source_opt) = model(&names, 7.0, None);
        let checkpoint = saved(&source, &mut source_opt, file);
        let (vs, _) = model(&names, 0.0, None);
        let restored = checkpoint.restore().add("model", &vs).apply().unwrap();
        assert_eq!(restored, Default::default(), "{file}");
        for (name, variable) in vs.variables() {
            assert_eq!(first(&variable), 7.0, "{name} of {file}");
        }
    }
}

#[test]
fn a_tied_weight_is_written_under_every_name_and_restored_from_any() {
    for way in TIES {
        let (vs, w) = tied(way, &[3.0], Kind::Float, Device::Cpu);
        for file in ["x.safetensors", "x.pt"] {
            let both = reloaded(&checkpoint_of([("model", &mut &vs)]), file);
            let own = || tied(way, &[0.0], Kind::Float, Device::Cpu).0;
            let restored = own();
            both.restore().add("model", &restored).apply().unwrap();
            assert_eq!(first(&restored.variables()["head"]), 3.0);
            for name in ["head", "embedding"] {
                let (one, _opt) = model(&[(name, 1)], 0.0, None);
                let report = both.restore().strict(false).add("model", &one).apply().unwrap();
                assert_eq!((report.missing_keys.len(), report.unexpected_keys.len()), (0, 1));
                assert_eq!(first(&one.variables()[name]), 3.0);
                let checkpoint = checkpoint_of([("model", &mut &one)]);
                let restored = own();
                let report = checkpoint.restore().add("model", &restored).apply().unwrap();
                assert_eq!(
                    (report, first(&restored.variables()["head"])),
                    (Default::default(), 3.0)
                );
                // What is skipped stays as it is, whatever else it is called.
                let restored = own();
                let skipped = both.restore().skip(&[name]).add("model", &restored);
                assert_eq!(skipped.apply().unwrap().skipped_keys.len(), 2);
                assert_eq!(first(&restored.variables()["head"]), 0.0);
            }
        }
        let (other, _opt) = model(&[("other", 1)], 0.0, None);
        let checkpoint = checkpoint_of([("model", &mut &other)]);
        let restore = checkpoint.restore().add("model", &vs);
        let error = checkpoint_error(restore.apply());
        let CheckpointError::Keys { missing, .. } = error else { panic!("{error:?}") };
        assert_eq!((missing, first(&w)), (vec!["embedding".to_owned()], 3.0));
    }
}

/// Each name is looked up, not compared with every other one.
#[test]
fn skipping_many_parameters_takes_little_time() {
    let names: Vec<_> = (0..200_000).map(|index| format!("layers.{index}.bias")).collect();
    let group = serde_json::json!({
        "params": names, "algorithm": "Sgd", "lr": 0.1, "momentum": 0.0, "dampening": 0.0,
        "weight_decay": 0.0, "nesterov": false, "maximize": false,
    });
    let parts = serde_json::json!({ "opt": { "kind": "optimizer", "param_groups": [group] } });
    let header = signed(&format!("{{{}}}", metadata(&manifest(&parts.to_string(), 0))));
    let checkpoint = Checkpoint::from_bytes(safetensors(&header, 0)).unwrap();
    let vs = VarStore::new(Device::Cpu);
    let _w = vs.root().zeros("w", &[1]);
    let mut opt = Sgd::default().build(&vs, 0.5).unwrap();
    let started = std::time::Instant::now();
    let restore = checkpoint.restore().add("opt", &mut opt).skip(&["*.bias"]);
    let restored = restore.strict(false).apply().unwrap();
    assert_eq!(restored.skipped_keys.len(), names.len());
    assert_eq!(restored.missing_keys, ["opt/w"]);
    assert!(started.elapsed().as_secs() < 10, "{:?}", started.elapsed());
}
