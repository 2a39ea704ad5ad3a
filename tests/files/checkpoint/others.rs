//! States of other programs whose keys are not those of PyTorch, and averages that do not fit: what is read by a rule,
//! and what is refused by its name, with what to do instead.

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::average::AveragedWeights;
use tch_amp::checkpoint::{Checkpoint, CheckpointError, Restore, Restored};
use tch_amp::optim::{Adam, AdamW, Optimizer};
use tch_amp::scaler::PerLossScalers;
use tch_amp::{Error, GradScaler};

use crate::checkpoint::{averages_of, checkpoint_error, files, from_python};
use testkit::checkpoints::{checkpoint_of, reloaded};
use testkit::files::Folder;
use testkit::python::Oracle;

/// The files, and the moments that Python says are in them.
struct Files {
    folder: Folder,
    moments: serde_json::Value,
}

impl Files {
    fn write() -> Option<Self> {
        let (folder, printed) = from_python("checkpoint_files.py", "others")?;
        Some(Self { folder, moments: serde_json::from_str(&printed).unwrap() })
    }

    fn load(&self, name: &str) -> Checkpoint {
        Checkpoint::load(self.folder.file(&format!("{name}.pt"))).unwrap()
    }
}

/// A model with a norm, as in the oracle, in a dtype.
fn wide(kind: Kind) -> VarStore {
    let (mut vs, _linear, _norm) = files::wide();
    match kind {
        Kind::Half => vs.half(),
        Kind::BFloat16 => vs.bfloat16(),
        _ => {}
    }
    vs
}

/// The statistics that the model computes with while the averages are in the place of the weights.
fn statistics(vs: &VarStore, ema: &mut AveragedWeights) -> [Vec<f64>; 2] {
    let _guard = ema.swap_in().unwrap();
    let variables = vs.variables();
    ["norm.running_mean", "norm.running_var"].map(|name| testkit::to_f64(&variables[name]))
}

fn refused_tensor(restore: Restore<'_>) -> (String, String) {
    let error = checkpoint_error(restore.apply());
    let text = error.to_string();
    match error {
        CheckpointError::Tensor { tensor, .. } => (tensor, text),
        other => panic!("{other:?}"),
    }
}

fn cast<'a>(checkpoint: &'a Checkpoint, ema: &'a mut AveragedWeights) -> Restore<'a> {
    checkpoint.restore().cast(true).add("ema", ema)
}

#[test]
fn statistics_of_averages_are_converted_like_the_variables_of_a_model() {
    let Some(files) = Files::write() else { return };
    let large = files.load("large");
    let wide_file = wide(Kind::Float);
    let mut of_file = averages_of(&wide_file);
    drop(large.restore().add("ema", &mut of_file).apply().unwrap());
    let [mean, variance] = statistics(&wide_file, &mut of_file);
    assert_eq!(variance, [1e5, 2.0]);
    let own = reloaded(&checkpoint_of([("ema", &mut of_file)]), "own.pt");

    for (kind, checkpoint) in
        [Kind::Half, Kind::BFloat16].map(|kind| [(kind, &large), (kind, &own)]).as_flattened()
    {
        let vs = wide(*kind);
        let mut ema = averages_of(&vs);
        let before = (statistics(&vs, &mut ema), ema.average("linear.weight").unwrap().copy());
        let (tensor, text) = refused_tensor(checkpoint.restore().add("ema", &mut ema));
        assert!(tensor.starts_with("norm.running_") && text.contains("`cast(true)`"), "{text}");
        assert!(text.contains("is Float in the checkpoint"), "{text}");
        if *kind == Kind::Half {
            let (tensor, text) = refused_tensor(cast(checkpoint, &mut ema));
            assert_eq!(tensor, "norm.running_var");
            assert!(text.contains("has 1 numbers") && text.contains("Half cannot hold"), "{text}");
        }
        assert_eq!((ema.updates().unwrap(), statistics(&vs, &mut ema)), (0, before.0.clone()));
        assert_eq!(ema.average("linear.weight").unwrap(), before.1);

        let rounded =
            |numbers: &[f64]| testkit::to_f64(&Tensor::from_slice(numbers).to_kind(*kind));
        let restored = cast(checkpoint, &mut ema).skip(&["*running_var"]).apply().unwrap();
        assert_eq!(restored.skipped_keys, ["ema/norm.running_var"]);
        assert_eq!(statistics(&vs, &mut ema), [rounded(&mean), before.0[1].clone()]);
        if *kind == Kind::BFloat16 {
            assert_eq!(cast(checkpoint, &mut ema).apply().unwrap(), Restored::default());
            let new = statistics(&vs, &mut ema);
            assert_eq!(new, [rounded(&mean), rounded(&variance)]);
            // What is skipped stays as it is.
            drop(checkpoint.restore().skip(&["*running*"]).add("ema", &mut ema).apply().unwrap());
            assert_eq!(statistics(&vs, &mut ema), new);
        }
        assert_eq!(ema.updates().unwrap(), 2);
    }
}

#[test]
fn two_names_that_differ_by_the_module_of_a_wrapper_are_refused() {
    let Some(files) = Files::write() else { return };
    let vs = wide(Kind::Float);
    let mut ema = averages_of(&vs);
    let before = ema.average("linear.weight").unwrap().copy();
    let twice = files.load("twice");
    let check = |refused: (String, String)| {
        assert_eq!(refused.0, "linear.weight", "{}", refused.1);
        assert!(refused.1.contains("`module.linear.weight`"), "{}", refused.1);
    };
    for part in ["n_averaged", "steps"] {
        for strict in [true, false] {
            check(refused_tensor(twice.restore().strict(strict).add(part, &mut ema)));
        }
        assert_eq!(
            (ema.updates().unwrap(), ema.average("linear.weight").unwrap()),
            (0, before.copy())
        );
    }
    let Some(python) = Oracle::find("checkpoint_files.py") else { return };
    let path = files.folder.file("edited.pt");
    checkpoint_of([("ema", &mut ema)]).save(&path).unwrap();
    drop(python.run(&["beside", path.to_str().unwrap()], ""));
    let edited = Checkpoint::load(&path).unwrap();
    check(refused_tensor(edited.restore().add("ema", &mut ema)));
}

#[test]
fn averages_in_a_list_are_refused_by_their_name() {
    let Some(files) = Files::write() else { return };
    let vs = wide(Kind::Float);
    let mut ema = averages_of(&vs);
    for file in ["diffusers", "torch_ema"] {
        let checkpoint = files.load(file);
        for updates in [None, Some(2)] {
            let restore = checkpoint.restore().strict(false).add("ema", &mut ema);
            let restore = updates.into_iter().fold(restore, Restore::averages_updates);
            let (tensor, text) = refused_tensor(restore);
            assert_eq!(tensor, "shadow_params", "{text}");
            for words in ["without names", "`copy_to(model.parameters())`", "averages_updates"] {
                assert!(text.contains(words), "{text}");
            }
        }
        assert_eq!(checkpoint.tensor("ema.shadow_params.0").unwrap().size(), [2, 3], "{file}");
        assert_eq!(ema.updates().unwrap(), 0);
    }
}

/// An optimizer with the parameters of the oracle in its order.
fn adam(is_decoupled: bool) -> Optimizer {
    let vs = VarStore::new(Device::Cpu);
    let net = nn::linear(vs.root(), 3, 2, Default::default());
    let named = vec![("weight", net.ws.shallow_clone()), ("bias", net.bs.unwrap().shallow_clone())];
    match is_decoupled {
        true => AdamW::default().build(named, 0.1).unwrap(),
        false => Adam::default().build(named, 0.1).unwrap(),
    }
}

#[test]
fn the_fused_adam_of_apex_goes_on_as_either_adam() {
    let Some(files) = Files::write() else { return };
    let cases = ["fused_adam", "fused_adam_on_device"].map(|file| [(file, true), (file, false)]);
    for (file, is_decoupled) in cases.into_iter().flatten() {
        let mut opt = adam(is_decoupled);
        let restored = files.load(file).restore().add("optimizer", &mut opt).apply().unwrap();
        assert_eq!(restored, Restored::default(), "{file}");
        let options = *opt.param_group(0).unwrap();
        let (betas, eps, weight_decay) = ((0.5, 0.75), 1e-8, 0.125);
        let algorithm = match is_decoupled {
            true => AdamW { betas, eps, weight_decay, ..Default::default() }.into(),
            false => Adam { betas, eps, weight_decay, ..Default::default() }.into(),
        };
        assert_eq!((options.lr, options.algorithm), (0.25, algorithm), "{file}");
        let state = opt.state_dict().unwrap().state;
        for name in ["weight", "bias"] {
            assert_eq!(testkit::to_f64(&state[name]["step"]), [2.0], "{file}");
            for key in ["exp_avg", "exp_avg_sq"] {
                let wanted: Vec<f64> = match &files.moments[name][key] {
                    nested if name == "weight" => {
                        let rows: Vec<Vec<f64>> = serde_json::from_value(nested.clone()).unwrap();
                        rows.concat()
                    }
                    flat => serde_json::from_value(flat.clone()).unwrap(),
                };
                assert_eq!(testkit::to_f64(&state[name][key]), wanted, "{key} of {name}");
            }
        }
    }
    for (file, words) in [
        ("without_correction", "its param_groups are not those of Adam"),
        ("fused_lamb", "its param_groups are not those of Adam"),
        ("deepspeed", "DeepSpeed's FusedAdam, which counts only those of one parameter"),
    ] {
        let refused = files.load(file).restore().add("optimizer", &mut adam(true)).apply();
        let text = checkpoint_error(refused).to_string();
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn the_loss_scale_of_apex_is_refused_by_its_name_and_is_a_value() {
    let Some(files) = Files::write() else { return };
    let checkpoint = files.load("amp");
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    let before = scaler.get_scale().unwrap();
    for part in ["amp", "amp.loss_scaler0"] {
        let error = checkpoint_error(checkpoint.restore().add(part, &mut scaler).apply());
        assert!(matches!(error, CheckpointError::OtherPart { .. }), "{error:?}");
        let text = error.to_string();
        for words in ["apex", "`loss_scale`", "`init_scale`"] {
            assert!(text.contains(words), "{text}");
        }
        assert_eq!(scaler.get_scale().unwrap(), before);
    }
    assert_eq!(checkpoint.value::<f64>("amp.loss_scaler0.loss_scale").unwrap(), 1024.0);
    let mut scalers = PerLossScalers::new(Device::Cpu, 2).unwrap();
    let refused = files.load("two_amps").restore().add("amp", &mut scalers).apply();
    assert!(matches!(refused, Err(Error::Checkpoint(_))), "{refused:?}");
}
