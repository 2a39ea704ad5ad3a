//! What does not fit is refused, and nothing changes.

use serde::de::DeserializeOwned;
use serde_json::{Value as Json, json};
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::accumulation::Accumulation;
use tch_amp::checkpoint::{
    Checkpoint, CheckpointError, Format, Limits, Prepared, Restored, Rng, SaveState, SavedState,
    Stateful,
};
use tch_amp::insight::{BudgetFile, HistoryReport};
use tch_amp::loss_scale::{DynamicLossScaleState, LossScaleState};
use tch_amp::optim::{AdamW, MasterWeights, OptimizerError, ParamGroupState, Sgd};
use tch_amp::scaler::{GradScalerState, PerLossScalers, ScalerError};
use tch_amp::schedule::StepLr;
use tch_amp::{Error, GradScaler};

use crate::checkpoint::own::Ema;
use crate::checkpoint::{Run, checkpoint_error, damaged, unsaveable};
use testkit::bits::bits;
use testkit::checkpoints::{checkpoint_of, reloaded};
use testkit::files::{Folder, names_in};
use testkit::handmade::{archive, text};

/// A checkpoint that was saved to a file and loaded from it.
fn saved(fill: impl FnOnce(&mut Checkpoint)) -> Checkpoint {
    let mut checkpoint = Checkpoint::new();
    fill(&mut checkpoint);
    reloaded(&checkpoint, "x.safetensors")
}

#[test]
fn one_part_that_does_not_fit_leaves_all_unchanged() {
    let mut source = Run::new(Device::Cpu);
    source.train(4);
    let other = VarStore::new(Device::Cpu);
    let _net = nn::linear(other.root() / "linear", 3, 5, Default::default());
    let whole = saved(|checkpoint| {
        checkpoint.add("model", &source.vs).unwrap();
        checkpoint.add("other", &other).unwrap();
        checkpoint.add("optimizer", &mut source.opt).unwrap();
        let mut sgd = Sgd::default().build(&source.vs, 0.1).unwrap();
        checkpoint.add("sgd", &mut sgd).unwrap();
        checkpoint.add("scaler", &mut source.scaler).unwrap();
        checkpoint.add("disabled", &mut GradScaler::disabled()).unwrap();
        checkpoint.add_tensor("rng", &Tensor::zeros([3], (Kind::Uint8, Device::Cpu))).unwrap();
    });
    let mut run = Run::new(Device::Cpu);
    run.train(1);
    let before = run.fingerprint();
    let parts = [
        ["other", "optimizer", "scaler"],
        ["model", "sgd", "scaler"],
        ["model", "optimizer", "disabled"],
        ["model", "nothing", "scaler"],
        ["scaler", "optimizer", "scaler"],
        ["model", "model", "scaler"],
        ["model", "optimizer", "rng"],
    ];
    for [model, optimizer, scaler] in parts {
        let Run { vs, opt, scaler: target, .. } = &mut run;
        let restore = whole.restore().add(model, vs).add(optimizer, opt);
        assert!(restore.add(scaler, target).apply().is_err());
        assert_eq!(run.fingerprint(), before, "{model} {optimizer} {scaler}");
    }
    let Run { vs, opt, .. } = &mut run;
    let restore = whole.restore().add("model", vs).add("optimizer", opt);
    assert!(matches!(restore.add("rng", Rng(Device::Cpu)).apply(), Err(Error::Torch(_))));
    assert_eq!(run.fingerprint(), before);
    run.restore(&whole).unwrap();
    assert_eq!(run.fingerprint(), source.fingerprint());
}

#[test]
fn an_open_iteration_is_not_saved_and_not_overwritten() {
    let whole = reloaded(&Run::new(Device::Cpu).checkpoint(), "x.safetensors");
    let mut run = Run::new(Device::Cpu);
    let loss = run.net.ws.sum(Kind::Float);
    run.scaler.backward(&loss).unwrap();
    run.scaler.unscale_(&mut run.opt).unwrap();
    let refused = Checkpoint::new().add("scaler", &mut run.scaler);
    assert!(matches!(refused, Err(Error::Scaler(ScalerError::IterationOpen { .. }))));
    let before = bits(&run.net.ws);
    assert!(matches!(run.restore(&whole), Err(Error::Scaler(ScalerError::IterationOpen { .. }))));
    assert_eq!(bits(&run.net.ws), before);
}

#[test]
fn names_are_compared_unless_strict_is_off() {
    let model = |names: &[&str]| {
        let vs = VarStore::new(Device::Cpu);
        for name in names {
            drop(vs.root().ones(name, &[2]));
        }
        vs
    };
    let mut source = model(&["a", "b"]);
    let mut sgd = Sgd { momentum: 0.5, ..Default::default() }.build(&source, 0.5).unwrap();
    source.trainable_variables().iter().for_each(|w| w.sum(Kind::Float).backward());
    sgd.step().unwrap();
    source.freeze();
    let whole = saved(|checkpoint| {
        checkpoint.add("model", &source).unwrap();
        checkpoint.add("opt", &mut sgd).unwrap();
    });
    let target = model(&["b", "c"]);
    let CheckpointError::Keys { missing, unexpected, .. } =
        checkpoint_error(whole.restore().add("model", &target).apply())
    else {
        panic!("another error")
    };
    assert_eq!((missing, unexpected), (vec!["c".to_owned()], vec!["a".to_owned()]));
    let mut opt = Sgd { momentum: 0.9, ..Default::default() }.build(&target, 0.1).unwrap();
    let refused = whole.restore().add("opt", &mut opt).apply();
    assert!(matches!(refused, Err(Error::Optimizer(OptimizerError::State { .. }))), "{refused:?}");
    let restore = whole.restore().add("model", &target).add("opt", &mut opt);
    let restored = restore.strict(false).apply().unwrap();
    assert_eq!(restored.missing_keys, ["model/c", "opt/c"]);
    assert_eq!(restored.unexpected_keys, ["model/a", "opt/a"]);
    let state = opt.state_dict().unwrap();
    assert_eq!(state.state.keys().collect::<Vec<_>>(), ["b"]);
    assert_eq!(opt.lr(0).unwrap(), 0.5);
    let variables = target.variables();
    let mean = |name: &str| variables[name].mean(Kind::Float).double_value(&[]);
    assert_eq!((mean("b"), mean("c")), (0.5, 1.0));
}

#[test]
fn another_dtype_is_converted_only_on_request() {
    let mut source = VarStore::new(Device::Cpu);
    let _w = source.root().randn_standard("w", &[3]);
    source.bfloat16();
    let whole = saved(|checkpoint| checkpoint.add("m", &source).unwrap());
    let target = VarStore::new(Device::Cpu);
    let w = target.root().zeros("w", &[3]);
    let error = checkpoint_error(whole.restore().add("m", &target).apply());
    assert!(matches!(error, CheckpointError::Tensor { .. }) && error.to_string().contains("cast"));
    whole.restore().add("m", &target).cast(true).apply().unwrap();
    assert_eq!(bits(&w), bits(&source.variables()["w"].to_kind(Kind::Float)));
}

fn weights(numbers: &[f64], kind: Kind) -> Ema {
    Ema::of(Tensor::from_slice(numbers).to_kind(kind))
}

#[test]
fn a_cast_that_would_make_finite_numbers_infinite_is_refused() {
    let (half, bfloat16) = (65520.0, (2.0 - 2f64.powi(-8)) * 2f64.powi(127));
    let float = (2.0 - 2f64.powi(-24)) * 2f64.powi(127);
    let large = f64::from(f32::MAX);
    let numbers =
        [1.0, 65504.0, 65519.0, half, -1e30, f64::INFINITY, f64::NAN, large, -1e300, 0.0, 1e5];
    // The saved and the wanted dtype, and the smallest number that rounds to infinity there.
    let cases = [
        (Kind::Float, Kind::Half, half),
        (Kind::Double, Kind::Half, half),
        (Kind::BFloat16, Kind::Half, half),
        (Kind::Double, Kind::Float, float),
        (Kind::Double, Kind::BFloat16, bfloat16),
        (Kind::Float, Kind::BFloat16, bfloat16),
    ];
    for (from, to, limit) in cases {
        let mut source = weights(&numbers, from);
        let there = testkit::to_f64(&source.weights["w"]);
        let lost = there.iter().filter(|number| number.is_finite() && number.abs() >= limit);
        let count = lost.count();
        assert!(count > 0, "{from:?} {to:?}");
        let checkpoint = saved(|checkpoint| checkpoint.add("e", &mut source).unwrap());
        let mut target = weights(&[0.5; 11], to);
        let error = checkpoint_error(checkpoint.restore().cast(true).add("e", &mut target).apply());
        assert!(matches!(error, CheckpointError::Tensor { .. }), "{error:?}");
        let message = error.to_string();
        assert!(message.contains(&format!("`w` in `e` has {count} numbers")), "{message}");
        assert_eq!(testkit::to_f64(&target.weights["w"]), [0.5; 11]);
        let skip = checkpoint.restore().cast(true).skip(&["w"]).add("e", &mut target);
        assert_eq!(skip.apply().unwrap().skipped_keys, ["e/w"]);
        // The other way nothing is lost.
        let checkpoint =
            saved(|checkpoint| checkpoint.add("e", &mut weights(&numbers, to)).unwrap());
        let mut target = weights(&[0.5; 11], from);
        checkpoint.restore().cast(true).add("e", &mut target).apply().unwrap();
    }
    for (numbers, is_refused) in [
        ([1.0, f64::INFINITY, f64::NAN], false),
        ([65519.0, -65519.0, 2.0], false),
        ([7e4, 0.0, 1.0], true),
    ] {
        let kinds =
            if numbers[1].is_finite() { vec![Kind::Float, Kind::Int64] } else { vec![Kind::Float] };
        for kind in kinds {
            let checkpoint =
                saved(|checkpoint| checkpoint.add("e", &mut weights(&numbers, kind)).unwrap());
            let mut target = weights(&[0.5; 3], Kind::Half);
            let applied = checkpoint.restore().cast(true).add("e", &mut target).apply();
            assert_eq!(applied.is_err(), is_refused, "{numbers:?} {kind:?}");
        }
    }
}

/// Restores numbers of one dtype into another with a cast, and returns how many the message says are lost.
fn lost_by_cast(numbers: &Tensor, to: Kind) -> Option<usize> {
    let mut source = Ema::of(numbers.shallow_clone());
    let checkpoint = reloaded(&checkpoint_of([("e", &mut source)]), "x.pt");
    let mut target = Ema::of(Tensor::zeros(numbers.size(), (to, Device::Cpu)));
    let applied = checkpoint.restore().cast(true).add("e", &mut target).apply();
    let target = target.weights["w"].to_kind(Kind::ComplexDouble);
    match applied {
        Ok(_) => {
            let differences = target - numbers.to_kind(Kind::ComplexDouble);
            let largest = numbers.to_kind(Kind::ComplexDouble).abs().max().double_value(&[]);
            assert!(differences.abs().max().double_value(&[]) <= largest / 8.0, "{numbers}");
            None
        }
        Err(error) => {
            assert_eq!(target.abs().max().double_value(&[]), 0.0);
            let message = checkpoint_error::<()>(Err(error)).to_string();
            let count = message.strip_prefix("`w` in `e` has ").unwrap().split(' ').next();
            Some(count.unwrap().parse().unwrap())
        }
    }
}

#[test]
fn a_cast_that_would_lose_more_than_digits_is_refused() {
    let large = 2f64.powi(60);
    let cases: [(Kind, Kind, &[f64], Option<usize>); 17] = [
        (Kind::Int64, Kind::Int, &[3e9, -3e9, 2147483647.0, -2147483648.0], Some(2)),
        (Kind::Int64, Kind::Uint8, &[300.0, -1.0, 255.0, 0.0], Some(2)),
        (Kind::Uint8, Kind::Int8, &[200.0, 127.0], Some(1)),
        (Kind::Int8, Kind::Uint8, &[-1.0, 127.0], Some(1)),
        (Kind::Int16, Kind::Bool, &[2.0, 1.0, 0.0], Some(1)),
        (Kind::Bool, Kind::Int8, &[1.0, 0.0], None),
        (Kind::Uint8, Kind::Half, &[255.0, 3.0], None),
        (Kind::Int64, Kind::Double, &[large + 3e9, -large], None),
        (Kind::Float, Kind::Int64, &[1.5, 1e30, f64::NAN, f64::INFINITY, 4096.0], Some(4)),
        (Kind::Double, Kind::Int64, &[2.0 * 2f64.powi(62), -2f64.powi(63), large], Some(1)),
        (Kind::Float, Kind::Int64, &[4096.0, -3.0], None),
        (Kind::Half, Kind::Bool, &[0.5, 1.0, 0.0], Some(1)),
        (Kind::Float, Kind::Float8e4m3fn, &[463.0, 464.0, 1000.0, -1e9], Some(3)),
        (Kind::Float, Kind::Float8e5m2, &[61439.0, 61440.0], Some(1)),
        (Kind::Float8e4m3fn, Kind::Int, &[1.5, 2.0], Some(1)),
        (Kind::Double, Kind::ComplexFloat, &[1e300, 1.0], Some(1)),
        (Kind::ComplexFloat, Kind::Half, &[1.0, 7e4], Some(1)),
    ];
    for (from, to, numbers, lost) in cases {
        let numbers = Tensor::from_slice(numbers).to_kind(from);
        assert_eq!(lost_by_cast(&numbers, to), lost, "{from:?} {to:?}");
    }
    let parts = [[1.0, 0.0], [1.0, 2.0], [1e300, 0.0], [1.0, 1e300]];
    let parts = Tensor::from_slice2(&parts).view_as_complex();
    assert_eq!(lost_by_cast(&parts, Kind::Double), Some(2));
    assert_eq!(lost_by_cast(&parts, Kind::Float), Some(3));
    assert_eq!(lost_by_cast(&parts, Kind::ComplexFloat), Some(2));
    assert_eq!(lost_by_cast(&parts.real(), Kind::Double), None);
}

/// It is no error: moments and small weights have many such numbers, and rounding to 0 loses no more than rounding does
/// elsewhere.
#[test]
fn a_number_that_is_too_small_for_the_dtype_becomes_zero_in_a_cast() {
    let least = 2f64.powi(-24);
    let numbers = Tensor::from_slice(&[1e-9, -1e-30, least / 2.0, least * 0.75, least, 1.0]);
    for kind in [Kind::Float, Kind::Double] {
        let mut saved = weights(&Vec::try_from(&numbers).unwrap(), kind);
        let checkpoint = reloaded(&checkpoint_of([("e", &mut saved)]), "x.pt");
        let mut target = weights(&[0.5; 6], Kind::Half);
        let restored = checkpoint.restore().cast(true).add("e", &mut target).apply().unwrap();
        assert_eq!(restored, Restored::default());
        assert_eq!(testkit::to_f64(&target.weights["w"]), [0.0, 0.0, 0.0, least, least, 1.0]);
    }
}

/// As by a program that takes its master weights away, and begins with the moments of f32.
#[test]
fn moments_that_fp16_cannot_hold_are_refused() {
    for (gradient, is_refused) in [(200.0, false), (1e4, true), (1e6, true)] {
        let vs = VarStore::new(Device::Cpu);
        let w = vs.root().ones("w", &[2]);
        let mut wide = AdamW::default().build(&vs, 1e-3).unwrap();
        wide.backward_step(&(&w * gradient).sum(Kind::Float)).unwrap();
        let whole = saved(|checkpoint| checkpoint.add("opt", &mut wide).unwrap());
        let mut half = VarStore::new(Device::Cpu);
        let _w = half.root().ones("w", &[2]);
        half.half();
        let mut narrow = AdamW::default().build(&half, 1e-3).unwrap();
        let loaded = narrow.load_state_dict(&wide.state_dict().unwrap());
        let restored = whole.restore().add("opt", &mut narrow).apply().map(drop);
        for result in [loaded, restored] {
            match result {
                Err(Error::Optimizer(OptimizerError::State { parameter, problem })) => {
                    assert!(is_refused && parameter == "w", "{gradient}: {problem}");
                    assert!(problem.contains("2 numbers that fp16 cannot hold"), "{problem}");
                }
                other => assert!(other.is_ok() && !is_refused, "{gradient}: {other:?}"),
            }
        }
        assert_eq!(narrow.state_dict().unwrap().state.is_empty(), is_refused);
        let masters = AdamW::default().master_weights(MasterWeights::Float);
        let mut masters = masters.build(&half, 1e-3).unwrap();
        whole.restore().add("opt", &mut masters).apply().unwrap();
        let moments = &masters.state_dict().unwrap().state["w"];
        let expected = testkit::to_f64(&wide.state_dict().unwrap().state["w"]["exp_avg_sq"]);
        assert_eq!(testkit::to_f64(&moments["exp_avg_sq"]), expected);
    }
}

#[test]
fn parts_that_cannot_be_saved_are_named() {
    let mut checkpoint = Checkpoint::new();
    let one = Tensor::from(1f32);
    checkpoint.add_tensor("one", &one).unwrap();
    for name in ["", "a/b", "one", "__metadata__"] {
        unsaveable(checkpoint.add_tensor(name, &one));
    }
    let square = one.expand([2, 2], false).contiguous();
    for tensor in [
        one.view([1]).to_sparse_sparse_dim(1),
        square.to_sparse_csr(None),
        square.to_sparse_csc(None),
        square.to_sparse_bsr([1i64, 1], None),
        square.to_mkldnn(),
        one.view(&[1i64; 65][..]),
        Tensor::new(),
    ] {
        unsaveable(checkpoint.add_tensor("x", &tensor));
    }
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["one"]);
}

#[test]
fn a_save_that_fails_leaves_the_old_file() {
    let (folder, path) = Folder::with("x.safetensors");
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_value("step", &1).unwrap();
    checkpoint.save(&path).unwrap();
    let before = std::fs::read(&path).unwrap();
    // safetensors has no such dtype.
    let complex = Tensor::zeros([2], (Kind::ComplexDouble, Device::Cpu));
    checkpoint.add_tensor("z", &complex).unwrap();
    unsaveable(checkpoint.save(&path));
    assert_eq!(std::fs::read(&path).unwrap(), before);
    let refused = checkpoint_error(Checkpoint::new().save(folder.file("nowhere/x.safetensors")));
    let is_of_disk = matches!(refused, CheckpointError::Save(torch_files::Error::Io { .. }));
    assert!(is_of_disk, "{refused:?}");
    assert_eq!(names_in(&folder.0), ["x.safetensors"]);
}

#[test]
fn a_restore_that_fails_midway_is_reported_as_partial() {
    let mut source = Run::new(Device::Cpu);
    source.train(2);
    let (_folder, path) = Folder::with("x.safetensors");
    source.checkpoint().save(&path).unwrap();
    let checkpoint = Checkpoint::load(&path).unwrap();
    // Unlike any save, this shortens the open file.
    std::fs::File::options().write(true).open(&path).unwrap().set_len(400).unwrap();
    let target = Run::new(Device::Cpu);
    match checkpoint_error(checkpoint.restore().add("model", &target.vs).apply()) {
        CheckpointError::Interrupted { cause } => {
            assert!(cause.to_string().contains("ends too early"), "{cause}");
        }
        other => panic!("{other:?}"),
    }
    // An optimizer is read completely before anything changes.
    let mut run = Run::new(Device::Cpu);
    let before = run.fingerprint();
    assert!(matches!(checkpoint_error(run.restore(&checkpoint)), CheckpointError::Damaged { .. }));
    assert_eq!(run.fingerprint(), before);
}

/// A checkpoint that could not be loaded again must not replace an existing file. This one was loaded from a file in
/// which strings are shared: its JSON would be longer than safetensors files may have it.
#[test]
fn saving_refuses_values_that_would_not_load() {
    let (_folder, target) = Folder::with("x.safetensors");
    let long = text(&"x".repeat(3_000_000));
    let list = [b"](".as_slice(), &long, b"q\0", &b"h\0".repeat(12), b"e"].concat();
    let pickle = [b"\x80\x02}".as_slice(), &text("value"), &list, b"s."].concat();
    let checkpoint = Checkpoint::from_bytes(archive(&[("a/data.pkl", &pickle)])).unwrap();
    std::fs::write(&target, "before").unwrap();
    unsaveable(checkpoint.save(&target));
    assert_eq!(std::fs::read(&target).unwrap(), b"before");
}

/// In every format of this crate: of the tensors, and of the values, which are in a pickle or in the manifest.
#[test]
fn a_file_is_loaded_within_the_limits_of_the_call() {
    let (_folder, path) = Folder::with("run");
    let few_tensors = Limits { max_tensors: 2, ..Limits::default() };
    let few_values = Limits { max_values: 500, ..Limits::default() };
    for format in [Format::Safetensors, Format::Torch] {
        let mut run = Checkpoint::new();
        for name in ["a", "b", "c"] {
            run.add_tensor(name, &Tensor::from(1.0)).unwrap();
        }
        run.add_value("numbers", &vec![1; 1000]).unwrap();
        run.save_as(&path, format).unwrap();
        assert!(Checkpoint::load_with(&path, &Limits::default()).is_ok());
        for (limits, expected) in
            [(&few_tensors, "more than 2 tensors"), (&few_values, "more than 500")]
        {
            let problem = damaged(Checkpoint::load_with(&path, limits));
            assert!(problem.contains(expected), "{format:?}: {problem}");
        }
    }
}

#[test]
fn complex_state_is_not_converted_to_real() {
    let vs = VarStore::new(Device::Cpu);
    let _w = vs.root().zeros("w", &[2]);
    let mut opt = Sgd { momentum: 0.5, ..Default::default() }.build(&vs, 0.1).unwrap();
    let mut state = opt.state_dict().unwrap();
    let complex = Tensor::zeros([2], (Kind::ComplexFloat, Device::Cpu));
    state.state.insert("w".to_owned(), [("momentum_buffer".to_owned(), complex)].into());
    let refused = opt.load_state_dict(&state).unwrap_err().to_string();
    assert!(refused.contains("complex"), "{refused}");
}

#[test]
fn a_generator_is_unchanged_if_a_later_one_cannot_be_restored() {
    let whole = saved(|checkpoint| {
        checkpoint.add("rng", Rng(Device::Cpu)).unwrap();
        checkpoint.add_tensor("wrong", &Tensor::zeros([3], (Kind::Uint8, Device::Cpu))).unwrap();
    });
    // Other tests may only advance the generator further.
    let _drawn = Tensor::rand([1], (Kind::Float, Device::Cpu));
    let restore = whole.restore().add("rng", Rng(Device::Cpu)).add("wrong", Rng(Device::Cpu));
    assert!(matches!(restore.apply(), Err(Error::Torch(_))));
    assert_ne!(Rng(Device::Cpu).get_state().unwrap(), whole.tensor("rng").unwrap());
}

#[test]
fn the_scalers_of_losses_cannot_use_a_name_twice() {
    let mut scalers = PerLossScalers::new(Device::Cpu, 2).unwrap();
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_value("scaler.1", &7).unwrap();
    let error = checkpoint.add("scaler", &mut scalers).unwrap_err().to_string();
    assert!(error.contains("already"), "{error}");
    assert!(!checkpoint.contains("scaler.0"));
    assert_eq!(checkpoint.value::<i32>("scaler.1").unwrap(), 7);
}

/// Restores a value as a `T`, and returns what is said of it.
fn refused_value<T: DeserializeOwned>(value: &Json) -> String {
    let loaded = saved(|checkpoint| checkpoint.add_value("it", value).unwrap());
    let error = checkpoint_error(loaded.value::<T>("it").map(drop));
    assert!(matches!(error, CheckpointError::Value { .. }), "{value}: {error:?}");
    error.to_string()
}

/// A part with the keys of a map.
struct Foreign(Json);

impl Stateful for Foreign {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> tch_amp::Result<()> {
        let fields = self.0.as_object().unwrap();
        fields.iter().try_for_each(|(key, value)| state.value(key, value))
    }

    fn prepare_restore<'a>(&'a mut self, _: &SavedState<'a>) -> tch_amp::Result<Prepared<'a>> {
        Ok(Prepared::new(|| ()))
    }
}

/// Where a misspelled key would be taken for one that is missing, and have its default.
#[test]
fn an_unknown_key_in_a_state_of_this_crate_is_refused_with_the_nearest_one() {
    let dynamic = json!({"kind": "Dynamic", "loss_scale": 8.0, "perod": 5});
    let text = refused_value::<LossScaleState>(&dynamic);
    assert!(text.contains("`perod`, did you mean `period`? expected one of"), "{text}");
    let text = refused_value::<DynamicLossScaleState>(&json!({"min_lossscale": 5.0}));
    assert!(text.contains("`min_lossscale`, did you mean `min_loss_scale`?"), "{text}");
    let fixed = json!({"kind": "Static", "loss_scale": 8.0, "factor": 2.0});
    assert!(refused_value::<LossScaleState>(&fixed).contains("unknown field `factor`"));

    let step = json!({
        "step": 1, "scale": 2.0, "skiped": "Overflow", "norm": null, "loss": null, "learning_rate": 0.1,
    });
    let history = json!({"total": 1, "steps": [step]});
    let text = refused_value::<HistoryReport>(&history);
    assert!(text.contains("`skiped`, did you mean `skipped`?"), "{text}");
    let budget = json!({"dtype": "bf16", "device": "cpu", "mesured": {"quantities": []}});
    let text = refused_value::<BudgetFile>(&budget);
    assert!(text.contains("`mesured`, did you mean `measured`?"), "{text}");

    let mut window = Accumulation::of_equal(2).unwrap();
    let mut state = json!({"shares": [0.5, 0.5], "taken": 1, "dropped": []});
    for (key, is_known) in [("taken", true), ("takn", false)] {
        state[key] = 1.into();
        let mut foreign = Foreign(json!({"window": &state}));
        let loaded = saved(|checkpoint| checkpoint.add("window", &mut foreign).unwrap());
        let mut gradients = window.with_gradients(Vec::new());
        let restored = loaded.restore().add("window", &mut gradients).apply();
        if is_known {
            assert!(restored.is_ok(), "{restored:?}");
        } else {
            let text = checkpoint_error(restored).to_string();
            assert!(text.contains("`takn`, did you mean `taken`?"), "{text}");
        }
    }
}

/// Other tools keep what they need beside what PyTorch writes.
#[test]
fn unknown_keys_in_the_states_of_python_are_ignored() {
    let scaler = json!({
        "scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5, "_growth_tracker": 0,
        "cur_hysteresis": 2,
    });
    let state: GradScalerState = serde_json::from_value(scaler.clone()).unwrap();
    assert_eq!(state.scale, Some(8.0));
    let schedule = json!({
        "last_epoch": 3, "base_lrs": [0.1], "_last_lr": [0.1], "_step_count": 4, "verbose": false, "step_size": 30,
        "gamma": 0.5,
    });
    let group = json!({
        "algorithm": "Sgd", "lr": 0.1, "momentum": 0.9, "foreach": null, "fused": true, "params": ["w"],
    });
    let group: ParamGroupState = serde_json::from_value(group).unwrap();
    assert_eq!((group.options.lr, group.params.len()), (0.1, 1));
    let loaded = saved(|checkpoint| {
        checkpoint.add_value("scaler", &scaler).unwrap();
        checkpoint.add("schedule", &mut Foreign(schedule.clone())).unwrap();
    });
    let state: GradScalerState = loaded.value("scaler").unwrap();
    assert_eq!(state.scale, Some(8.0));
    let vs = VarStore::new(Device::Cpu);
    let _w = vs.root().ones("w", &[1]);
    let mut opt = Sgd::default().build(&vs, 0.1).unwrap();
    let mut scheduler = StepLr { step_size: 30, gamma: 0.5 }.build(&mut opt).unwrap();
    loaded.restore().strict(false).add("schedule", &mut scheduler).apply().unwrap();
}
