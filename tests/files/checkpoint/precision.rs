//! The precision of a run in its checkpoint.

use rstest::rstest;
use serde_json::{Value, json};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::autocast::{AutocastError, Plan, Rule, RunAs};
use tch_amp::checkpoint::{Checkpoint, CheckpointError};
use tch_amp::scaler::ScalerError;
use tch_amp::{Amp, Error, MixedPrecision};

use crate::checkpoint::checkpoint_error;
use testkit::checkpoints::{checkpoint_of, reloaded};
use testkit::for_each_device;

fn on_cpu(amp: Amp) -> MixedPrecision {
    amp.on(Device::Cpu).unwrap()
}

/// A plan in bf16, with whatever a rule can have.
fn planned(device: Device) -> MixedPrecision {
    let narrow = Rule { at_least: 8, below: Some(100_000), ..Rule::new("matmul", RunAs::F32) };
    let composed = RunAs::Composed { most_bytes: 1 << 28 };
    let attention = Rule::new("scaled_dot_product_attention", composed);
    let rules = vec![narrow, Rule::new("softmax", RunAs::Half), attention];
    let plan = Plan { dtype: Some(Kind::BFloat16), rules, ..Plan::new(device).unwrap() };
    Amp::Off.on(device).unwrap().plan(&plan).unwrap()
}

fn saved(amp: &MixedPrecision) -> Checkpoint {
    let mut amp = amp;
    checkpoint_of([("amp", &mut amp)])
}

/// The dtypes of a small and of a large product, and of a softmax.
fn kinds(amp: &MixedPrecision) -> [Kind; 3] {
    let ones = |size: i64| Tensor::ones([size, size], (Kind::Float, amp.device()));
    let (small, large) = (ones(4), ones(64));
    let kinds = || {
        let softmax = small.softmax(-1, None::<Kind>);
        [small.matmul(&small).kind(), large.matmul(&large).kind(), softmax.kind()]
    };
    amp.autocast(kinds).unwrap()
}

#[rstest]
#[case("x.safetensors")]
#[case("x.pt")]
fn every_precision_is_restored_with_its_plan(#[case] name: &str) {
    for_each_device(|device| {
        let all = [Amp::Off, Amp::Bf16, Amp::Fp16].map(|amp| amp.on(device).unwrap());
        for amp in all.iter().chain([&planned(device)]) {
            let checkpoint = reloaded(&saved(amp), name);
            for mut other in all.iter().chain([&planned(device)]).cloned() {
                checkpoint.restore().add("amp", &mut other).apply().unwrap();
                assert_eq!((other.dtype(), other.region()), (amp.dtype(), amp.region()));
                assert_eq!((kinds(&other), other.device()), (kinds(amp), device));
                assert!(other.to_string().ends_with("restored from a checkpoint"), "{other}");
                // A shared reference, too, now that it is the same.
                checkpoint.restore().add("amp", &other).apply().unwrap();
            }
        }
    });
}

#[test]
fn a_precision_of_the_cpu_goes_on_elsewhere_without_its_plan() {
    for_each_device(|device| {
        let mut amp = Amp::Off.on(device).unwrap();
        saved(&on_cpu(Amp::Bf16)).restore().add("amp", &mut amp).apply().unwrap();
        assert_eq!((amp.amp(), amp.device()), (Amp::Bf16, device));
        // The lists of the device it is on, and not those of the CPU.
        assert_eq!(amp.region(), Amp::Bf16.on(device).unwrap().region());
        let refused = saved(&planned(Device::Cpu)).restore().add("amp", &mut amp).apply();
        let is_elsewhere =
            matches!(refused, Err(Error::Autocast(AutocastError::PlanElsewhere { .. })));
        assert_eq!(is_elsewhere, device != Device::Cpu, "{refused:?}");
        assert!(is_elsewhere || refused.is_ok(), "{refused:?}");
    });
}

#[test]
fn a_plan_of_another_platform_is_refused_and_nothing_changes() {
    let mut state: Value = saved(&planned(Device::Cpu)).value("amp").unwrap();
    state["plan"]["platform"]["threads"] = json!(1_000_000);
    let vs = VarStore::new(Device::Cpu);
    let w = vs.root().ones("w", &[2]);
    let mut checkpoint = checkpoint_of([("model", &mut &vs)]);
    checkpoint.add_value("amp", &state).unwrap();
    let checkpoint = reloaded(&checkpoint, "x.pt");
    drop(tch::no_grad(|| w.shallow_clone().fill_(5.0)));
    let mut amp = on_cpu(Amp::Fp16);
    let refused = checkpoint.restore().add("model", &vs).add("amp", &mut amp).apply();
    let error = refused.unwrap_err();
    let elsewhere = matches!(error, Error::Autocast(AutocastError::PlanElsewhere { .. }));
    assert!(elsewhere && error.to_string().contains("1000000 threads"), "{error}");
    assert!(error.to_string().contains("leave the precision out"), "{error}");
    assert_eq!((amp, w.double_value(&[0])), (on_cpu(Amp::Fp16), 5.0));
    // What the message advises.
    checkpoint.restore().add("model", &vs).apply().unwrap();
    let saved: Value = checkpoint.value("amp").unwrap();
    let amp: Amp = saved["amp"].as_str().unwrap().parse().unwrap();
    assert_eq!((amp, w.double_value(&[0])), (Amp::Bf16, 1.0));
}

#[test]
fn what_no_precision_has_saved_is_refused_and_nothing_changes() {
    let mut other_dtype: Value = saved(&planned(Device::Cpu)).value("amp").unwrap();
    other_dtype["amp"] = json!("fp16");
    for (state, words) in [
        (json!({ "amp": "bf16", "dtyp": "fp16" }), "unknown field `dtyp`"),
        (json!({ "amp": "half" }), "unknown variant `half`"),
        (json!({ "plan": null }), "missing field `amp`"),
        (json!("bf16"), "invalid type"),
        (json!({ "amp": "auto" }), "auto"),
        (other_dtype, "plan of another dtype"),
    ] {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_value("amp", &state).unwrap();
        let mut amp = on_cpu(Amp::Bf16);
        let error = checkpoint.restore().add("amp", &mut amp).apply().unwrap_err().to_string();
        assert!(error.contains(words), "{state}: {error}");
        assert_eq!(amp, on_cpu(Amp::Bf16));
    }
    // Like any other part, it must be there if it is asked for.
    let mut amp = on_cpu(Amp::Bf16);
    let missing =
        checkpoint_error(Checkpoint::new().restore().strict(false).add("amp", &mut amp).apply());
    assert!(matches!(missing, CheckpointError::NoPart { .. }), "{missing}");
}

#[test]
fn a_shared_precision_is_restored_from_the_same_one_only() {
    let checkpoint = saved(&on_cpu(Amp::Fp16));
    let amp = on_cpu(Amp::Bf16);
    let error = checkpoint.restore().add("amp", &amp).apply().unwrap_err().to_string();
    assert!(error.contains("bf16 on Cpu") && error.contains("fp16 on Cpu"), "{error}");
    let mut taken = amp;
    checkpoint.restore().add("amp", &mut taken).apply().unwrap();
    checkpoint.restore().add("amp", &taken).apply().unwrap();
}

/// The scaler of the restored precision loads the state; one from before does not, and says what to do.
#[test]
fn the_scaler_is_made_after_the_precision_is_restored() {
    let run = on_cpu(Amp::Fp16);
    let mut scaler = run.skipping_scaler().unwrap();
    scaler.update_with(8.0).unwrap();
    let mut checkpoint = saved(&run);
    checkpoint.add("scaler", &mut scaler).unwrap();

    let mut amp = on_cpu(Amp::Bf16);
    let mut early = amp.skipping_scaler().unwrap();
    let restore = checkpoint.restore().add("amp", &mut amp).add("scaler", &mut early);
    let error = restore.apply().unwrap_err();
    let other = matches!(error, Error::Scaler(ScalerError::OtherPrecision { scales: true }));
    assert!(other && error.to_string().contains("after the precision is restored"), "{error}");
    assert_eq!((amp.amp(), early.get_scale().unwrap()), (Amp::Bf16, 1.0));

    checkpoint.restore().add("amp", &mut amp).apply().unwrap();
    let mut late = amp.skipping_scaler().unwrap();
    checkpoint.restore().add("scaler", &mut late).apply().unwrap();
    assert_eq!((amp.amp(), late.get_scale().unwrap()), (Amp::Fp16, 8.0));
}
