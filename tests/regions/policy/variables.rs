//! The variables of a VarStore.

use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::optim::Sgd;
use tch_amp::policy::{KeepF32, PolicyError};
use tch_amp::{Error, Policy};

use testkit::tensors::{TIES, tied};
use testkit::{for_each_device, to_f64};

/// Paths of variables, and whether each belongs to a norm.
const NAMES: [(&[&str], bool); 25] = [
    (&["linear", "weight"], false),
    (&["blocks", "0", "norm1", "bias"], true),
    (&["blocks", "0", "LayerNorm", "weight"], true),
    (&["rmsnorm", "weight"], true),
    (&["layer1", "bn2", "weight"], true),
    (&["bn", "bias"], true),
    (&["h", "3", "ln_1", "weight"], true),
    (&["ln_f", "bias"], true),
    (&["gn", "weight"], true),
    (&["gnn", "weight"], false),
    (&["in_proj", "weight"], false),
    (&["lnear", "weight"], false),
    (&["head", "norm"], true),
    (&["bnb4", "weight"], false),
    (&["blocks", "0", "layer_norm", "bias"], true),
    (&["RMSNorm_0", "scale"], true),
    (&["batchnorm2d", "weight"], true),
    (&["norms", "3", "weight"], true),
    (&["norm_weight"], true),
    (&["normal_head", "weight"], false),
    (&["normalize_proj", "x", "w"], false),
    (&["normalizer"], false),
    // A variable, not a layer.
    (&["head", "ln"], false),
    (&["ln"], false),
    (&["weight"], false),
];

fn store(device: Device) -> VarStore {
    let vs = VarStore::new(device);
    for (path, _) in NAMES {
        let (name, layers) = path.split_last().unwrap();
        let path = layers.iter().fold(vs.root(), |path, layer| path / *layer);
        let _variable = path.ones(name, &[2]);
    }
    vs
}

#[test]
fn norms_are_recognized_by_their_names() {
    for_each_device(|device| {
        let mut vs = store(device);
        let kept = Policy::BF16.cast_variables(&mut vs, KeepF32::Norms).unwrap();
        let mut want: Vec<_> =
            NAMES.iter().filter(|(_, norm)| *norm).map(|(path, _)| path.join(".")).collect();
        want.sort();
        assert_eq!(kept, want);
        for (name, variable) in vs.variables() {
            let kind = if want.contains(&name) { Kind::Float } else { Kind::BFloat16 };
            assert_eq!((variable.kind(), to_f64(&variable)), (kind, vec![1.0; 2]), "{name}");
        }
    });
}

#[test]
fn patterns_apply_with_or_without_the_norms() {
    for (keep, want) in [
        (KeepF32::Nothing, vec![]),
        (KeepF32::Names(&["head.*", "gnn*"]), vec!["gnn.weight", "head.w"]),
        (KeepF32::Names(&["*"]), vec!["bn.bias", "bn.running_mean", "gnn.weight", "head.w"]),
        (KeepF32::NormsAnd(&["head.*"]), vec!["bn.bias", "bn.running_mean", "head.w"]),
        (KeepF32::NormsExcept(&["*.bias"]), vec!["bn.running_mean"]),
        // Patterns that match nothing.
        (KeepF32::Names(&["tail.*"]), vec![]),
        (KeepF32::NormsAnd(&["tail.*"]), vec!["bn.bias", "bn.running_mean"]),
        (KeepF32::NormsExcept(&["tail.*"]), vec!["bn.bias", "bn.running_mean"]),
    ] {
        let mut vs = VarStore::new(Device::Cpu);
        for name in ["gnn/weight", "head/w", "bn/bias", "bn/running_mean"] {
            let (layer, name) = name.split_once('/').unwrap();
            let _variable = (vs.root() / layer).ones(name, &[1]);
        }
        assert_eq!(Policy::F16.cast_variables(&mut vs, keep).unwrap(), want);
    }
}

#[test]
fn a_batch_norm_of_any_name_keeps_its_statistics() {
    for_each_device(|device| {
        let mut vs = VarStore::new(device);
        let root = vs.root();
        let conv = nn::conv2d(&root / "a", 3, 4, 3, Default::default());
        let norm = nn::batch_norm2d(&root / "b", 4, Default::default());
        drop(root);
        let kept = Policy::BF16.cast_variables(&mut vs, KeepF32::default()).unwrap();
        assert_eq!(kept, ["b.bias", "b.running_mean", "b.running_var", "b.weight"]);
        assert_eq!((conv.ws.kind(), norm.running_mean.kind()), (Kind::BFloat16, Kind::Float));
        let x = Tensor::randn([2, 3, 5, 5], (Kind::BFloat16, device));
        assert_eq!(norm.forward_t(&x.apply(&conv), true).kind(), Kind::BFloat16);
    });
}

#[test]
fn a_batch_norm_at_the_root_keeps_only_its_own_variables() {
    let mut vs = VarStore::new(Device::Cpu);
    let root = vs.root();
    let _norm = nn::batch_norm1d(&root, 4, Default::default());
    let _others = [root.ones("embedding", &[2]), (&root / "out").ones("weight", &[2])];
    drop(root);
    let kept = Policy::BF16.cast_variables(&mut vs, KeepF32::Norms).unwrap();
    assert_eq!(kept, ["bias", "running_mean", "running_var", "weight"]);
}

/// Layers, optimizers and the VarStore keep sharing one tensor.
#[test]
fn the_variables_stay_the_same_tensors() {
    for_each_device(|device| {
        let mut vs = VarStore::new(device);
        let net = nn::linear(vs.root(), 2, 1, Default::default());
        let _count = vs.root().add("count", Tensor::from(3i64).to_device(device), false);
        net.ws.sum(Kind::Float).backward();
        assert!(Policy::BF16.cast_variables(&mut vs, KeepF32::Norms).unwrap().is_empty());
        assert_eq!(net.ws.kind(), Kind::BFloat16);
        assert!(net.ws.requires_grad() && net.ws.is_leaf());
        assert!(!net.ws.grad().defined(), "a gradient of the old dtype has remained");
        assert_eq!(vs.variables()["count"].kind(), Kind::Int64);

        let mut opt = Sgd::default().build(&vs, 1.0).unwrap();
        let before = to_f64(&net.ws);
        (&net.ws * 2.0).sum(Kind::Float).backward();
        assert_eq!(net.ws.grad().kind(), Kind::BFloat16);
        opt.step().unwrap();
        let after = to_f64(&net.ws);
        assert!(before.iter().zip(&after).all(|(before, after)| after < before));

        Policy::FULL.cast_variables(&mut vs, KeepF32::Norms).unwrap();
        assert_eq!((net.ws.kind(), to_f64(&net.ws)), (Kind::Float, after));
    });
}

#[test]
fn half_precision_variables_that_are_kept_become_f32() {
    let mut vs = store(Device::Cpu);
    Policy::BF16.cast_variables(&mut vs, KeepF32::Nothing).unwrap();
    assert!(vs.variables().values().all(|variable| variable.kind() == Kind::BFloat16));
    Policy::F16.cast_variables(&mut vs, KeepF32::Norms).unwrap();
    assert_eq!(vs.variables()["bn.bias"].kind(), Kind::Float);
    assert_eq!(vs.variables()["linear.weight"].kind(), Kind::Half);
}

#[test]
fn full_precision_casts_everything() {
    for policy in [Policy::FULL, Policy::MIXED_F16, Policy::DOUBLE] {
        let mut vs = store(Device::Cpu);
        assert!(policy.cast_variables(&mut vs, KeepF32::NormsAnd(&["*"])).unwrap().is_empty());
        assert!(vs.variables().values().all(|variable| variable.kind() == policy.param));
    }
}

#[test]
fn an_unsupported_dtype_changes_nothing() {
    let mut vs = store(Device::Cpu);
    let policy = Policy { param: Kind::Int64, ..Policy::FULL };
    let error = policy.cast_variables(&mut vs, KeepF32::Norms).unwrap_err();
    assert!(matches!(
        error,
        Error::Policy(PolicyError::Dtype { field: "param", kind: Kind::Int64 })
    ));
    assert!(vs.variables().values().all(|variable| variable.kind() == Kind::Float));
}

#[test]
fn variables_that_are_not_floating_point_are_neither_cast_nor_named() {
    let mut vs = VarStore::new(Device::Cpu);
    let mut steps = vs.root().zeros_no_train("steps", &[1]);
    let _weight = vs.root().ones("weight", &[1]);
    no_grad(|| steps.set_data(&steps.to_kind(Kind::Int64)));
    let kept = Policy::BF16.cast_variables(&mut vs, KeepF32::Names(&["*"])).unwrap();
    assert_eq!((kept, steps.kind()), (vec!["weight".to_owned()], Kind::Int64));
}

#[test]
fn a_tied_weight_stays_in_f32_if_one_of_its_names_says_so() {
    for way in TIES {
        for keep in [
            KeepF32::Names(&["head"]),
            KeepF32::Names(&["embedding"]),
            KeepF32::NormsAnd(&["head"]),
            KeepF32::NormsAnd(&["emb*"]),
        ] {
            let third = 1.0 / 3.0;
            let (mut vs, w) = tied(way, &[third], Kind::Float, Device::Cpu);
            let before = to_f64(&w);
            let kept = Policy::BF16.cast_variables(&mut vs, keep).unwrap();
            assert_eq!((w.kind(), to_f64(&w)), (Kind::Float, before), "{way:?} {keep:?}");
            assert_eq!(kept, ["embedding"], "{way:?} {keep:?}");
        }
        let (mut vs, w) = tied(way, &[1.0], Kind::Float, Device::Cpu);
        assert!(Policy::F16.cast_variables(&mut vs, KeepF32::Norms).unwrap().is_empty());
        assert_eq!(w.kind(), Kind::Half);
        assert!(vs.variables().values().all(|variable| variable.kind() == Kind::Half));
    }
}
