//! What a policy casts, and to which dtype.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::policy::{KeepF32, PolicyError, half_dtype};
use tch_amp::{Error, Policy};

use crate::policy::{KINDS, POLICY_KINDS, is_floating};
use testkit::rng::Rng;
use testkit::{for_each_device, to_f64};

fn of(kind: Kind, device: Device) -> Tensor {
    Tensor::from_slice(&[0.0, 1.0, 1.0]).to_kind(kind).to_device(device)
}

#[test]
fn floating_tensors_are_cast_and_others_pass_through() {
    for_each_device(|device| {
        for from in KINDS {
            let tensor = of(from, device);
            for to in POLICY_KINDS {
                let policy = Policy { param: to, compute: to, output: to };
                let want = if is_floating(from) { to } else { from };
                let got = [
                    policy.cast_to_param(&tensor).unwrap(),
                    policy.cast_to_compute(&tensor).unwrap(),
                    policy.cast_to_output(&tensor).unwrap(),
                ];
                for got in got {
                    assert_eq!((got.kind(), got.device()), (want, device), "{from:?} to {to:?}");
                }
            }
        }
    });
}

#[test]
fn each_method_casts_to_its_own_dtype() {
    let policy = Policy { param: Kind::Double, compute: Kind::BFloat16, output: Kind::Half };
    let x = Tensor::from(1f32);
    assert_eq!(policy.cast_to_param(&x).unwrap().kind(), Kind::Double);
    assert_eq!(policy.cast_to_compute(&x).unwrap().kind(), Kind::BFloat16);
    assert_eq!(policy.cast_to_output(&x).unwrap().kind(), Kind::Half);
}

#[test]
fn a_tensor_that_has_the_dtype_is_not_copied() {
    let x = Tensor::from_slice(&[1f32, 2.0]);
    let same = Policy::FULL.cast_to_param(&x).unwrap();
    assert_eq!(same.data_ptr(), x.data_ptr());
    let undefined = Policy::BF16.cast_to_param(&Tensor::new()).unwrap();
    assert!(!undefined.defined());
}

/// The reference is the `half` crate, which rounds to nearest, ties to even, as in IEEE 754.
#[test]
fn numbers_are_rounded_to_the_nearest() {
    let mut rng = Rng::new(1);
    let values: Vec<f32> = (0..5000).map(|_| f32::from_bits(rng.next() as u32)).collect();
    let values: Vec<f32> = values.into_iter().filter(|value| !value.is_nan()).collect();
    let x = Tensor::from_slice(&values);
    let half: Vec<f64> = values.iter().map(|&x| half::f16::from_f32(x).to_f64()).collect();
    let brain: Vec<f64> = values.iter().map(|&x| half::bf16::from_f32(x).to_f64()).collect();
    assert_eq!(to_f64(&Policy::F16.cast_to_param(&x).unwrap()), half);
    assert_eq!(to_f64(&Policy::BF16.cast_to_param(&x).unwrap()), brain);
}

#[test]
fn gradients_flow_through_a_cast() {
    for_each_device(|device| {
        let x = of(Kind::Float, device).set_requires_grad(true);
        let (y, _) = Policy::BF16.cast_to_compute(&(&x, of(Kind::Int64, device))).unwrap();
        (y * 3.0).sum(Kind::Float).backward();
        assert_eq!((x.grad().kind(), to_f64(&x.grad())), (Kind::Float, vec![3.0; 3]));
    });
}

#[test]
fn half_is_the_dtype_of_autocast() {
    for device in [Device::Cpu, Device::Cuda(0), Device::Mps] {
        assert_eq!(
            half_dtype(device),
            tch_amp::autocast::autocast_dtype(device).unwrap(),
            "{device:?}"
        );
    }
}

#[test]
fn a_tree_is_cast_to_the_half_precision_of_its_device_and_back() {
    for_each_device(|device| {
        let tree = (of(Kind::Double, device), of(Kind::Bool, device), Tensor::new());
        let half = Policy { compute: half_dtype(device), ..Policy::FULL };
        let (x, flags, undefined) = half.cast_to_compute(&tree).unwrap();
        assert_eq!((x.kind(), flags.kind()), (half_dtype(device), Kind::Bool));
        assert!(!undefined.defined());
        assert_eq!(Policy::FULL.cast_to_compute(&x).unwrap().kind(), Kind::Float);
    });
}

#[test]
fn a_policy_has_only_floating_point_dtypes() {
    for kind in KINDS.into_iter().filter(|kind| !POLICY_KINDS.contains(kind)) {
        let x = Tensor::from(1f32);
        let refused = [
            Policy { param: kind, ..Policy::FULL }.cast_to_param(&x),
            Policy { compute: kind, ..Policy::FULL }.cast_to_compute(&x),
            Policy { output: kind, ..Policy::FULL }.cast_to_output(&x),
            Policy { output: kind, ..Policy::FULL }.run(&x, |x| x),
        ];
        for (result, field) in refused.into_iter().zip(["param", "compute", "output", "output"]) {
            let error = result.unwrap_err();
            assert!(
                matches!(error, Error::Policy(PolicyError::Dtype { field: f, kind: k }) if (f, k) == (field, kind)),
                "{error}"
            );
        }
        let mut vs = VarStore::new(Device::Cpu);
        let policy = Policy { param: kind, ..Policy::FULL };
        let error = policy.cast_variables(&mut vs, KeepF32::Nothing).unwrap_err();
        assert!(matches!(error, Error::Policy(PolicyError::Dtype { field: "param", .. })));
    }
    let policy = Policy { output: Kind::Int64, ..Policy::FULL };
    let text = policy.cast_to_output(&Tensor::from(1f32)).unwrap_err().to_string();
    assert_eq!(
        text,
        "the output dtype of a policy cannot be Int64: use Kind::Float, Kind::Half, Kind::BFloat16 or Kind::Double, for example Policy::MIXED_BF16"
    );
}

#[test]
fn the_constants_match_their_names() {
    let half = Policy { param: Kind::Float, output: Kind::Float, ..Policy::F16 };
    assert_eq!(Policy::MIXED_F16, half);
    let full = Policy { compute: Kind::Float, ..Policy::MIXED_BF16 };
    assert_eq!((full, Policy::default()), (Policy::FULL, Policy::FULL));
    assert_eq!(Policy::DOUBLE.to_string(), "params=float64,compute=float64,output=float64");
}
