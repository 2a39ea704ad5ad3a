//! Closures run under a policy.

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::autocast::is_autocast_enabled;
use tch_amp::policy::{PolicyError, half_dtype};
use tch_amp::{Autocast, Error, Policy, autocast};

use testkit::{for_each_device, to_f64};

fn ones(kind: Kind, device: Device) -> Tensor {
    Tensor::ones([2, 2], (kind, device))
}

#[test]
fn all_inputs_and_outputs_of_a_closure_are_cast() {
    for_each_device(|device| {
        let inputs = (ones(Kind::Int64, device), Some(ones(Kind::Double, device)));
        let mut seen = Vec::new();
        let outputs = Policy::MIXED_BF16.run(&inputs, |(tokens, mask)| {
            let mask = mask.unwrap();
            seen = vec![tokens.kind(), mask.kind()];
            vec![mask, tokens]
        });
        assert_eq!(seen, [Kind::Int64, Kind::BFloat16]);
        let kinds: Vec<_> = outputs.unwrap().iter().map(Tensor::kind).collect();
        assert_eq!(kinds, [Kind::Float, Kind::Int64]);
    });
}

#[test]
fn a_closure_runs_with_autocast_if_and_only_if_the_dtypes_differ() {
    for_each_device(|device| {
        let on = |policy: Policy| {
            let mut on = None;
            let xs = policy.run(&ones(Kind::Float, device), |xs| {
                on = Some(is_autocast_enabled(device));
                xs
            });
            assert_eq!(xs.unwrap().kind(), policy.output);
            on.unwrap()
        };
        // The policy decides, whatever region it runs in.
        for (policy, want) in [(Policy::MIXED_BF16, true), (Policy::BF16, false)] {
            assert_eq!(on(policy), want);
            assert_eq!(autocast(device, || on(policy)).unwrap(), want);
            let off = Autocast::new(device).enabled(false);
            assert_eq!(off.run(|| on(policy)).unwrap(), want);
        }
        assert!(!is_autocast_enabled(device));
    });
}

#[test]
fn the_first_defined_tensor_determines_the_device() {
    for_each_device(|device| {
        let inputs = (Tensor::new(), [None, Some(ones(Kind::Float, device))]);
        let mut on = false;
        let nothing = Policy::MIXED_BF16.run(&inputs, |_| on = is_autocast_enabled(device));
        assert!(nothing.is_ok() && on);
    });
    let mut on = false;
    let ys = Policy::MIXED_BF16.run(&(), |()| {
        on = is_autocast_enabled(Device::Cpu);
        ones(Kind::Half, Device::Cpu)
    });
    assert_eq!(
        (ys.unwrap().kind(), on),
        (Kind::Float, true),
        "without inputs the device is the CPU"
    );
}

#[test]
fn a_closure_is_not_run_under_a_policy_that_autocast_cannot_follow() {
    let mut ran = false;
    let policy = Policy { compute: Kind::Half, ..Policy::DOUBLE };
    let error = policy.run(&ones(Kind::Float, Device::Cpu), |_| ran = true).unwrap_err();
    assert!(matches!(
        error,
        Error::Policy(PolicyError::Module { param: Kind::Double, compute: Kind::Half })
    ));
    assert!(!ran);
}

/// A part of a model can have another precision than the region around it, forward and backward.
#[test]
fn a_part_of_a_region_has_its_own_precision_forward_and_backward() {
    for_each_device(|device| {
        let half = half_dtype(device);
        let vs = VarStore::new(device);
        let mut linear = nn::linear(vs.root(), 8, 8, Default::default());
        let inputs = Tensor::randn([4, 8], (Kind::Float, device));
        let mut gradients = |region: Autocast, part: &dyn Fn(&Tensor, &nn::Linear) -> Tensor| {
            let xs = inputs.copy().set_requires_grad(true);
            linear.ws.zero_grad();
            let ys = region.run(|| part(&xs.matmul(&linear.ws), &linear)).unwrap();
            ys.to_kind(Kind::Float).square().sum(Kind::Float).backward();
            [xs.grad(), linear.ws.grad(), ys.detach()].map(|tensor| to_f64(&tensor))
        };
        let mixed = Policy { compute: half, ..Policy::FULL };
        let on = Autocast::new(device).dtype(half);
        let off = on.enabled(false);

        let by_policy = |policy: Policy| {
            move |xs: &Tensor, linear: &nn::Linear| {
                policy.run(xs, |xs| linear.forward(&xs)).unwrap()
            }
        };
        let in_f32 = |xs: &Tensor, linear: &nn::Linear| {
            off.run(|| linear.forward(&xs.to_kind(Kind::Float))).unwrap()
        };
        assert_eq!(gradients(on, &by_policy(Policy::FULL)), gradients(on, &in_f32));
        let in_half = |xs: &Tensor, linear: &nn::Linear| {
            on.run(|| linear.forward(&xs.to_kind(half))).unwrap().to_kind(Kind::Float)
        };
        assert_eq!(gradients(off, &by_policy(mixed)), gradients(off, &in_half));
        assert_ne!(gradients(on, &by_policy(Policy::FULL)), gradients(on, &by_policy(mixed)));
    });
}
