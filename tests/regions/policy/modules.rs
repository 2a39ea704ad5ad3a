//! Modules wrapped in a policy.

use std::sync::{Arc, Mutex};

use rstest::rstest;
use tch::nn::{self, Module, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::autocast::is_autocast_enabled;
use tch_amp::policy::{PolicyError, half_dtype, run_in_f32, run_in_f32_t};
use tch_amp::{Autocast, Error, Policy, autocast};

use crate::policy::POLICY_KINDS;
use testkit::{for_each_device, to_f64};

/// Records the dtype of its input and whether autocast is enabled.
#[derive(Debug, Default)]
struct Probe(Arc<Mutex<Vec<(Kind, bool)>>>);

impl Module for Probe {
    fn forward(&self, xs: &Tensor) -> Tensor {
        self.0.lock().unwrap().push((xs.kind(), is_autocast_enabled(xs.device())));
        xs.shallow_clone()
    }
}

fn seen(policy: Policy, xs: &Tensor) -> (Kind, bool, Kind) {
    let probe = Probe::default();
    let log = Arc::clone(&probe.0);
    let ys = policy.apply_to(probe).unwrap().f_forward(xs).unwrap();
    let (kind, on) = log.lock().unwrap()[0];
    (kind, on, ys.kind())
}

#[test]
fn inputs_and_outputs_are_cast_and_autocast_is_on_if_the_dtypes_differ() {
    for_each_device(|device| {
        let xs = Tensor::ones([2, 2], (Kind::Double, device));
        let mixed = Policy::MIXED_BF16;
        assert_eq!(seen(mixed, &xs), (Kind::BFloat16, true, Kind::Float));
        assert_eq!(seen(Policy::BF16, &xs), (Kind::BFloat16, false, Kind::BFloat16));
        assert_eq!(seen(Policy::FULL, &xs), (Kind::Float, false, Kind::Float));
        let words = Tensor::ones([2, 2], (Kind::Int64, device));
        assert_eq!(seen(mixed, &words), (Kind::Int64, true, Kind::Int64));
        // The policy decides, whatever region it runs in.
        let inside = autocast(device, || seen(Policy::FULL, &xs)).unwrap();
        assert_eq!(inside, (Kind::Float, false, Kind::Float));
        let off = Autocast::new(device).enabled(false).run(|| seen(mixed, &xs)).unwrap();
        assert_eq!(off, (Kind::BFloat16, true, Kind::Float));
        assert!(!is_autocast_enabled(device));
    });
}

#[test]
fn a_policy_that_autocast_cannot_follow_is_refused() {
    for param in POLICY_KINDS {
        for compute in POLICY_KINDS {
            let policy = Policy { param, compute, output: Kind::Float };
            let half = [Kind::Half, Kind::BFloat16].contains(&compute);
            let possible = param == compute || (half && param != Kind::Double);
            let result = policy.apply_to(nn::func(Tensor::relu));
            assert_eq!(result.is_ok(), possible, "{policy}");
            if let Err(error) = result {
                assert!(
                    matches!(error, Error::Policy(PolicyError::Module { param: p, compute: c }) if (p, c) == (param, compute))
                );
            }
            let net = Policy { param: Kind::Bool, ..policy }.apply_to_t(nn::func(Tensor::relu));
            assert!(matches!(net, Err(Error::Policy(PolicyError::Dtype { field: "param", .. }))));
        }
    }
}

/// The layers that accept half-precision inputs with f32 weights on the CPU, as documented for `run_in_f32`.
#[rstest]
fn norms_take_half_inputs_on_the_cpu(#[values(Kind::BFloat16, Kind::Half)] half: Kind) {
    let vs = VarStore::new(Device::Cpu);
    let xs = Tensor::randn([3, 4, 5], (half, Device::Cpu));
    let batch = nn::batch_norm1d(vs.root() / "b", 4, Default::default());
    let layer = nn::layer_norm(vs.root() / "l", vec![5], Default::default());
    let group = nn::group_norm(vs.root() / "g", 2, 4, Default::default());
    let outputs = [
        (batch.forward_t(&xs, true), run_in_f32_t(batch).forward_t(&xs, true)),
        (layer.forward(&xs), run_in_f32(layer).forward(&xs)),
        (group.forward(&xs), run_in_f32(group).forward(&xs)),
    ];
    for (plain, kept) in outputs {
        assert_eq!((plain.kind(), kept.kind()), (half, half));
        let far = to_f64(&(plain.to_kind(Kind::Float) - kept.to_kind(Kind::Float)).abs().max());
        // Normalized values of n elements are below the square root of n, so below 4 here. There, neighbouring bf16
        // numbers are 2^-6 apart, and fp16 numbers are closer. Both computations run in f32, so they round to the same
        // number or to neighbours.
        assert!(far[0] <= 2f64.powi(-6), "{far:?}");
    }
}

#[test]
fn a_kept_layer_runs_in_f32_inside_of_a_region() {
    for_each_device(|device| {
        let half = half_dtype(device);
        let probe = Probe::default();
        let log = Arc::clone(&probe.0);
        let layer = run_in_f32(probe);
        for kind in [half, Kind::Float, Kind::Double, Kind::Int64] {
            let xs = Tensor::ones([2], (kind, device));
            let ys = autocast(device, || layer.forward(&xs)).unwrap();
            assert_eq!(ys.kind(), kind);
            let inside = if kind == half { Kind::Float } else { kind };
            assert_eq!(log.lock().unwrap().pop(), Some((inside, false)));
        }
        assert!(layer.module.0.lock().unwrap().is_empty());
    });
}

/// Products under a mixed policy equal those of autocast.
#[test]
fn a_mixed_policy_equals_autocast() {
    for_each_device(|device| {
        let vs = VarStore::new(device);
        let linear = nn::linear(vs.root(), 8, 8, Default::default());
        let xs = Tensor::randn([4, 8], (Kind::Float, device));
        let half = half_dtype(device);
        let want = autocast(device, || linear.forward(&xs)).unwrap().to_kind(Kind::Float);
        let policy = Policy { compute: half, ..Policy::FULL };
        let got = policy.apply_to(linear).unwrap().forward(&xs);
        assert_eq!(to_f64(&got), to_f64(&want));
    });
}
