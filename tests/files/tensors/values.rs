//! Functions of values: checkpoints, trees, policies, finiteness.

use ::half::{bf16, f16};
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::buffers::{BufferSnapshot, check_buffers_finite};
use tch_amp::checkpoint::{Checkpoint, save_weights};
use tch_amp::loss_scale::LossScale as _;
use tch_amp::loss_scale::{
    DynamicLossScale, NoOpLossScale, StaticLossScale, all_finite, select_tree,
};
use tch_amp::policy::{KeepF32, run_in_f32};
use tch_amp::{GradScaler, Policy, half};

use crate::tensors::with_each_kind;
use testkit::files::Folder;

/// The kinds whose numbers are in memory, in any order.
const PLAIN: &[&str] = &[
    "f32",
    "f64",
    "bf16",
    "f16",
    "of no dimensions",
    "empty",
    "empty in one dimension",
    "of many dimensions",
    "transposed",
    "with gaps",
    "with an offset",
    "with huge strides",
    "expanded",
    "overlapping",
    "negative",
    "copy-on-write",
    "zero without memory",
    "a leaf",
    "recorded",
];

#[test]
fn finiteness() {
    let infinite = Tensor::from_slice(&[f32::INFINITY]);
    let taken = with_each_kind("all_finite", |tensor| {
        let alone = all_finite(&tensor)?;
        assert_eq!(alone.kind(), Kind::Bool);
        let both = all_finite(&vec![tensor.shallow_clone(), infinite.shallow_clone()])?;
        assert!(!both.f_is_nonzero()?, "{tensor:?}");
        Ok(())
    });
    taken.includes(PLAIN);
    taken.includes(&["sparse COO", "complex64", "conjugate"]);
    // Zeros are finite, and negative views are finite if the numbers that they negate are.
    let size = [2, 3];
    let zero = Tensor::internal_efficientzerotensor(size, (Kind::Float, Device::Cpu));
    assert!(all_finite(&zero).unwrap().is_nonzero());
    let bad = Tensor::from_slice(&[1f32, f32::NAN]).internal_neg_view();
    assert!(!all_finite(&bad).unwrap().is_nonzero());
}

#[test]
fn selection() {
    let yes = Tensor::from(true);
    let taken =
        with_each_kind("select_tree", |tensor| select_tree(&yes, &tensor, &tensor).map(drop));
    taken.includes(PLAIN);
    with_each_kind("select_tree's condition", |tensor| {
        select_tree(&tensor, &Tensor::from(1f32), &Tensor::from(2f32)).map(drop)
    });
    with_each_kind("select_tree of unlike tensors", |tensor| {
        select_tree(&yes, &tensor, &Tensor::from_slice(&[1f32, 2.0])).map(drop)
    });
}

type Cast<'a> = &'a dyn Fn(&Tensor) -> tch_amp::Result<Tensor>;

#[test]
fn casts() {
    let policy = Policy { param: Kind::Float, compute: Kind::BFloat16, output: Kind::Double };
    let casts: [(&str, Cast<'_>); 3] = [
        ("cast_to_param", &|t| policy.cast_to_param(t)),
        ("cast_to_compute", &|t| policy.cast_to_compute(t)),
        ("cast_to_output", &|t| policy.cast_to_output(t)),
    ];
    for (what, cast) in casts {
        let taken = with_each_kind(what, |tensor| cast(&tensor).map(drop));
        taken.includes(PLAIN);
        taken.includes(&["i64", "bool", "complex64"]);
    }
}

/// Asserts that a tensor has the numbers of another one, if these are finite.
fn assert_has_numbers_of(what: &str, loaded: &Tensor, saved: &Tensor) {
    if saved.f_isfinite().is_ok_and(|finite| finite.all().is_nonzero()) {
        let plain = saved.detach().contiguous();
        let plain = if plain.is_complex() { plain.resolve_conj() } else { plain };
        assert_eq!(loaded.size(), saved.size(), "{what}");
        let same = loaded.eq_tensor(&plain.resolve_neg().to_device(Device::Cpu));
        assert!(same.all().is_nonzero(), "{what}: {saved:?}");
    }
}

#[test]
fn checkpoints() {
    for end in ["safetensors", "pt"] {
        let (_folder, path) = Folder::with(&format!("x.{end}"));
        let what = format!("a checkpoint as {end}");
        let taken = with_each_kind(&what, |tensor| {
            let mut checkpoint = Checkpoint::new();
            checkpoint.add_tensor("t", &tensor)?;
            checkpoint.save(&path)?;
            assert_has_numbers_of(&what, &Checkpoint::load(&path)?.tensor("t")?, &tensor);
            Ok(())
        });
        taken.includes(PLAIN);
        taken.includes(&["i64", "bool", "complex64", "conjugate"]);
    }
}

#[test]
fn weights() {
    for end in ["safetensors", "pt", "ot"] {
        let (_folder, path) = Folder::with(&format!("x.{end}"));
        let what = format!("weights as {end}");
        let taken = with_each_kind(&what, |tensor| {
            save_weights(&path, [("t", &tensor)])?;
            let loaded = match end {
                "safetensors" => Tensor::read_safetensors(&path),
                "pt" => Tensor::loadz_multi(&path),
                _ => Tensor::load_multi(&path),
            };
            // tch cannot read some of the dtypes in a safetensors file.
            let Ok(loaded) = loaded else { return Ok(()) };
            assert_eq!((loaded.len(), loaded[0].0.as_str()), (1, "t"), "{what}");
            assert_has_numbers_of(&what, &loaded[0].1, &tensor);
            Ok(())
        });
        taken.includes(PLAIN);
        taken.includes(&["i64", "bool", "complex64", "conjugate"]);
    }
}

#[test]
fn numbers_of_halves() {
    let taken = with_each_kind("half::to_vec of f16", |t| half::to_vec::<f16>(&t).map(drop));
    assert_eq!(taken.kinds, ["f16"]);
    let taken = with_each_kind("half::to_vec of bf16", |t| half::to_vec::<bf16>(&t).map(drop));
    assert_eq!(taken.kinds, ["bf16"]);
}

#[test]
fn functional_loss_scales() {
    let fixed = StaticLossScale::new(Device::Cpu, 8.0).unwrap();
    let taken = with_each_kind("a loss scale", |tensor| {
        fixed.unscale(&fixed.scale(&tensor)?).map(drop)?;
        NoOpLossScale.scale(&tensor).map(drop)
    });
    taken.includes(&["f32", "bf16", "with gaps", "negative", "i64"]);
    let taken = with_each_kind("adjust", |tensor| {
        let mut scale = DynamicLossScale::new(Device::Cpu)?;
        let before = scale.value()?;
        let adjusted = scale.adjust(&tensor);
        if adjusted.is_err() {
            assert_eq!(scale.value()?, before);
        }
        adjusted
    });
    taken.includes(&["of no dimensions"]);
}

/// The variables of a VarStore, with any kind of tensor in their place.
#[test]
fn variables() {
    for trainable in [false, true] {
        let what = format!("variables, trainable: {trainable}");
        let (_folder, path) = Folder::with("x.pt");
        let taken = with_each_kind(&what, |tensor| {
            let mut vs = VarStore::new(Device::Cpu);
            let root = vs.root();
            let mut variable = match trainable {
                true => root.zeros("w", &[2, 3]),
                false => root.zeros_no_train("w", &[2, 3]),
            };
            if no_grad(|| variable.f_set_data(&tensor)).is_err() {
                return Ok(());
            }
            check_buffers_finite(&vs).ok();
            let mut snapshot = BufferSnapshot::new(&vs)?;
            snapshot.save()?;
            snapshot.restore()?;
            GradScaler::new(Device::Cpu)?.name_parameters(&vs)?;
            let mut checkpoint = Checkpoint::new();
            checkpoint.add("model", &vs)?;
            checkpoint.save(&path)?;
            Checkpoint::load(&path)?.restore().add("model", &vs).apply()?;
            let policy = Policy::MIXED_BF16;
            policy.cast_variables(&mut vs, KeepF32::Nothing).map(drop)
        });
        taken.includes(&["f32", "f64", "bf16", "empty", "transposed", "copy-on-write"]);
    }
}

#[test]
fn modules() {
    // A layer of tch panics on inputs that it does not support. This one accepts whatever the policy passes on.
    let layer = || nn::func(Tensor::shallow_clone);
    let policy = Policy::MIXED_BF16;
    let module = policy.apply_to(layer()).unwrap();
    let taken = with_each_kind("a module's input", |tensor| module.f_forward(&tensor).map(drop));
    taken.includes(PLAIN);
    let kept = run_in_f32(layer());
    let taken = with_each_kind("the input of a module that stays f32", |tensor| {
        kept.f_forward(&tensor).map(drop)
    });
    taken.includes(PLAIN);
    let taken = with_each_kind("Policy::run", |tensor| policy.run(&tensor, |t| t).map(drop));
    taken.includes(PLAIN);
}
