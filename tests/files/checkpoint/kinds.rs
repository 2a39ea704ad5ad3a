//! The crate's own kinds of parts, through the trait that all of them implement.

use tch::{Device, Tensor};
use tch_amp::checkpoint::{CheckpointError, Rng, Stateful};
use tch_amp::loss_scale::{
    DynamicLossScale, DynamicLossScaleState, LossScale, LossScaleState, NoOpLossScale,
    StaticLossScale,
};
use tch_amp::scaler::{GradScalerConfig, PerLossScalers, ScalerError};
use tch_amp::{Error, Result};

use crate::checkpoint::Run;
use testkit::bits::bits;
use testkit::checkpoints::{checkpoint_of, reloaded};
use testkit::files::Folder;

const CPU: Device = Device::Cpu;

#[test]
fn parts_are_saved_the_same_by_any_reference() {
    let folder = Folder::new();
    let mut run = Run::new(CPU);
    run.train(3);
    let mut scalers = PerLossScalers::new(CPU, 2).unwrap();
    let mut short = run.checkpoint();
    short.add("scalers", &mut scalers).unwrap();
    let Run { vs, opt, scaler, .. } = &mut run;
    let mut long = checkpoint_of([
        ("model", vs),
        ("optimizer", opt),
        ("scaler", scaler),
        ("scalers", &mut scalers),
    ]);
    long.add_value("step", &7).unwrap();
    for ending in ["safetensors", "pt"] {
        let path = |name: &str| folder.file(&format!("{name}.{ending}"));
        short.save(path("short")).unwrap();
        long.save(path("long")).unwrap();
        let read = |name| std::fs::read(path(name)).unwrap();
        assert_eq!(read("short"), read("long"), "{ending}");
    }
}

#[test]
fn all_kinds_are_restored_by_the_trait() {
    let mut run = Run::new(CPU);
    run.train(3);
    let mut scalers = PerLossScalers::new(CPU, 2).unwrap();
    let mut checkpoint = run.checkpoint();
    checkpoint.add("scalers", &mut scalers).unwrap();
    let checkpoint = reloaded(&checkpoint, "x.pt");
    let mut other = Run::new(CPU);
    let mut other_scalers =
        PerLossScalers::with_configs(CPU, &[GradScalerConfig::default(); 2]).unwrap();
    let Run { vs, opt, scaler, .. } = &mut other;
    let restore = checkpoint.restore().add("model", vs).add("optimizer", opt).add("scaler", scaler);
    let restore = restore.add("scalers", &mut other_scalers);
    assert_eq!(restore.apply().unwrap(), Default::default());
    assert_eq!(other.fingerprint(), run.fingerprint());
    assert_eq!(other_scalers.state_dict().unwrap(), scalers.state_dict().unwrap());
}

#[test]
fn each_kind_refuses_parts_of_other_kinds() {
    let mut run = Run::new(CPU);
    let mut checkpoint = run.checkpoint();
    checkpoint.add_tensor("tensor", &Tensor::from(1f32)).unwrap();
    let mut scalers = PerLossScalers::new(CPU, 1).unwrap();
    let mut boxed: Box<dyn LossScale> = Box::new(NoOpLossScale);
    let Run { vs, opt, scaler, .. } = &mut run;
    let kinds: [(&str, &mut dyn Stateful); 6] = [
        ("optimizer", vs),
        ("scaler", opt),
        ("tensor", scaler),
        ("model", &mut NoOpLossScale),
        ("model", &mut boxed),
        ("step", &mut Rng(CPU)),
    ];
    for (part, kind) in kinds {
        let refused = checkpoint.restore().add(part, kind).apply();
        let Err(Error::Checkpoint(CheckpointError::OtherPart { name, .. })) = refused else {
            panic!("{part}: {refused:?}");
        };
        assert_eq!(name, part);
    }
    let refused = checkpoint.restore().add("scaler", &mut scalers).apply();
    let Err(Error::Checkpoint(CheckpointError::NoPart { name, .. })) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(name, "scaler.0");
}

/// Saves one loss scale and restores it as another.
fn through(saved: &mut dyn Stateful, restored: &mut dyn Stateful) -> Result<()> {
    let checkpoint = reloaded(&checkpoint_of([("loss_scale", saved)]), "x.safetensors");
    // In the form that loss scales had before there was the trait.
    let _state: LossScaleState = checkpoint.value("loss_scale")?;
    checkpoint.restore().add("loss_scale", restored).apply().map(drop)
}

#[test]
fn loss_scales_are_restored_only_to_their_own_kind() {
    let state = DynamicLossScaleState {
        loss_scale: 0.1f32.into(),
        counter: 3,
        period: 5,
        ..Default::default()
    };
    let state = DynamicLossScaleState { min_loss_scale: 0.01, ..state };
    let mut saved = state.build(CPU).unwrap();
    let mut dynamic = DynamicLossScale::new(CPU).unwrap();
    let before = dynamic.loss_scale().unwrap().shallow_clone();
    through(&mut saved, &mut dynamic).unwrap();
    assert_eq!(dynamic.state().unwrap(), state);
    assert_eq!(bits(&before), bits(&Tensor::from(32768f32)), "the old tensor never changes");
    let mut fixed = StaticLossScale::new(CPU, 2.0).unwrap();
    through(&mut StaticLossScale::new(CPU, 512.0).unwrap(), &mut fixed).unwrap();
    assert_eq!(fixed.value().unwrap(), 512.0);
    through(&mut NoOpLossScale, &mut NoOpLossScale).unwrap();
    let mut boxed: Box<dyn LossScale> = Box::new(DynamicLossScale::new(CPU).unwrap());
    through(&mut saved, &mut boxed).unwrap();
    assert_eq!(boxed.state_dict().unwrap(), LossScaleState::Dynamic(state));
    through(&mut boxed, &mut dynamic).unwrap();
    // Another kind is refused, also in a box.
    for refused in [
        through(&mut boxed, &mut fixed),
        through(&mut boxed, &mut NoOpLossScale),
        through(&mut fixed, &mut boxed),
    ] {
        let is_other = matches!(refused, Err(Error::Scaler(ScalerError::OtherLossScale { .. })));
        assert!(is_other, "{refused:?}");
    }
    assert_eq!(boxed.state_dict().unwrap(), LossScaleState::Dynamic(state));
}
