//! Functions of values: checkpoints, trees, policies, finiteness.

use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::{Checkpoint, Format};
use tch_amp::policy::{cast_to_full, cast_to_half};
use tch_amp::{Policy, all_finite, select_tree};

use crate::{assert_takes, with_each_kind};

/// What has numbers in memory, in any order.
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
    assert_takes("all_finite", &taken, PLAIN);
    assert_takes("all_finite", &taken, &["sparse COO", "complex64", "conjugate"]);
    // Zeros are finite, and negative numbers are as finite as those that they are made of.
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
    assert_takes("select_tree", &taken, PLAIN);
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
    let policy = Policy::new(Kind::Float, Kind::BFloat16, Kind::Double).unwrap();
    let casts: [(&str, Cast<'_>); 5] = [
        ("cast_to_full", &|t| cast_to_full(t)),
        ("cast_to_half", &|t| cast_to_half(t)),
        ("cast_to_param", &|t| policy.cast_to_param(t)),
        ("cast_to_compute", &|t| policy.cast_to_compute(t)),
        ("cast_to_output", &|t| policy.cast_to_output(t)),
    ];
    for (what, cast) in casts {
        let taken = with_each_kind(what, |tensor| cast(&tensor).map(drop));
        assert_takes(what, &taken, PLAIN);
        assert_takes(what, &taken, &["i64", "bool", "complex64"]);
    }
}

#[test]
fn checkpoints() {
    for (format, end) in [(Format::Safetensors, "safetensors"), (Format::Torch, "pt")] {
        let name = format!("tch-amp-kinds-{}.{end}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let what = format!("a checkpoint as {format:?}");
        let taken = with_each_kind(&what, |tensor| {
            let mut checkpoint = Checkpoint::new();
            checkpoint.add_tensor("t", &tensor)?;
            checkpoint.save(&path)?;
            let loaded = Checkpoint::load(&path)?.tensor("t")?;
            let finite = tensor.f_isfinite();
            if finite.is_ok_and(|finite| finite.all().is_nonzero()) {
                let plain = tensor.detach().contiguous();
                let plain = if plain.is_complex() { plain.resolve_conj() } else { plain };
                assert_eq!(loaded.size(), tensor.size());
                assert!(
                    loaded.eq_tensor(&plain.resolve_neg()).all().is_nonzero(),
                    "{what}: {tensor:?}"
                );
            }
            Ok(())
        });
        std::fs::remove_file(&path).unwrap();
        assert_takes(&what, &taken, PLAIN);
        assert_takes(&what, &taken, &["i64", "bool", "complex64", "conjugate"]);
    }
}
