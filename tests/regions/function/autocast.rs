//! The counterpart of PyTorch's `custom_fwd` and `custom_bwd`: the autocast state of a function.

use std::sync::mpsc::channel;

use tch::{Device, Kind, Tensor};
use tch_amp::autocast::{AutocastGuard, AutocastState, is_autocast_enabled};
use tch_amp::function::Function;
use tch_amp::{Autocast, autocast, function};

use crate::function::{MyMm, backward_below, double_, random_leaf};
use testkit::for_each_device;

#[test]
fn backward_runs_in_the_state_of_forward() {
    for_each_device(|device| {
        let off = |dtype| Autocast::new(device).dtype(dtype).enabled(false);
        let on = |dtype| Autocast::new(device).dtype(dtype);
        let regions: [Option<Autocast>; 7] = [
            None,
            Some(on(Kind::BFloat16)),
            Some(on(Kind::Half)),
            Some(on(Kind::BFloat16).cache(false)),
            Some(on(Kind::Half).cache(false)),
            Some(off(Kind::Half)),
            Some(off(Kind::BFloat16).cache(false)),
        ];
        for forward in regions {
            for backward in regions {
                for depth in [0, 1, 70] {
                    check_state(device, forward, backward, depth);
                }
            }
        }
    });
}

/// Runs forward in one region, and backward in another one inside of `depth` further backwards.
fn check_state(
    device: Device,
    forward: Option<Autocast>,
    backward: Option<Autocast>,
    depth: usize,
) {
    let (seen, receive) = channel();
    let seen_again = seen.clone();
    let probe = function(
        move |_, x| {
            seen.send(AutocastState::current()?)?;
            Ok(x[0] * 2.0)
        },
        move |_, g| {
            seen_again.send(AutocastState::current()?)?;
            Ok(&g[0] * 2.0)
        },
    );
    let x = random_leaf(device, Kind::Float, &[1]);
    let before = AutocastState::current().unwrap();
    let (expected, y) = {
        let _region = forward.map(|region| region.enter().unwrap());
        let state = AutocastState::current().unwrap();
        (state, probe.apply(&[&x]).unwrap())
    };
    {
        let _region = backward.map(|region| region.enter().unwrap());
        let here = AutocastState::current().unwrap();
        backward_below(depth, y).unwrap();
        assert_eq!(AutocastState::current().unwrap(), here, "restored");
    }
    let seen: Vec<_> = receive.iter().collect();
    assert_eq!(seen, [expected; 2], "{forward:?} then {backward:?} at {depth} on {device:?}");
    assert_eq!(AutocastState::current().unwrap(), before);
}

/// PyTorch's `test_custom_enabled`.
#[test]
fn custom_enabled() {
    for_each_device(|device| {
        for dtype in [Kind::BFloat16, Kind::Half] {
            let enabled = function(
                |ctx, x| {
                    assert_eq!([x[0].kind(), x[1].kind()], [Kind::Float; 2]);
                    assert!(is_autocast_enabled(x[0].device()));
                    ctx.save_for_backward(x);
                    Ok(x[0].f_mm(x[1])?)
                },
                |ctx, g| {
                    let [a, b] = ctx.saved_tensors()?;
                    assert!(is_autocast_enabled(a.device()));
                    let grads = [g[0].mm(&b.tr()), a.tr().mm(&g[0])];
                    assert_eq!([grads[0].kind(), grads[1].kind()], [g[0].kind(); 2]);
                    Ok(grads)
                },
            );
            let [x, y] = [(); 2].map(|()| random_leaf(device, Kind::Float, &[8, 8]));
            let region = Autocast::new(device).dtype(dtype);
            let out = region.run(|| enabled.apply(&[&x, &y])).unwrap().unwrap();
            assert_eq!(out.kind(), dtype);
            out.sum(None).backward();
            assert_eq!([x.grad().kind(), y.grad().kind()], [Kind::Float; 2]);
        }
    });
}

/// PyTorch's `test_custom_cast_inputs`.
#[test]
fn custom_cast_inputs() {
    for_each_device(|device| {
        let product = |expected: Kind| {
            function(
                move |ctx, x| {
                    assert_eq!([x[0].kind(), x[1].kind()], [expected; 2]);
                    assert_eq!([x[2].kind(), x[3].kind()], [Kind::Double, Kind::Int64]);
                    assert!(!is_autocast_enabled(x[0].device()));
                    ctx.save_for_backward(&x[..2]);
                    Ok(x[0].f_mm(x[1])?)
                },
                |ctx, g| {
                    let [a, b] = ctx.saved_tensors()?;
                    assert!(!is_autocast_enabled(a.device()));
                    let grads = [g[0].mm(&b.tr()), a.tr().mm(&g[0])];
                    assert_eq!(grads[0].kind(), a.kind());
                    let [da, db] = grads.map(Some);
                    Ok([da, db, None, None])
                },
            )
            .cast_inputs(Kind::Float)
        };
        let half = || random_leaf(device, Kind::BFloat16, &[8, 8]);
        let double = Tensor::ones([2], (Kind::Double, device));
        let (x, y, integer) = (half(), half(), Tensor::ones([2], (Kind::Int64, device)));
        let inputs = [&x, &y, &double, &integer];
        let out = autocast(device, || product(Kind::Float).apply(&inputs)).unwrap().unwrap();
        assert_eq!(out.kind(), Kind::Float);
        autocast(device, || out.sum(None).backward()).unwrap();
        assert_eq!([x.grad().kind(), y.grad().kind()], [Kind::BFloat16; 2]);
        // Outside of a region nothing is cast.
        let out = product(Kind::BFloat16).apply(&inputs).unwrap();
        assert_eq!(out.kind(), Kind::BFloat16);
        out.sum(None).backward();
        // Nor in a region that is disabled.
        let region = Autocast::new(device).enabled(false);
        drop(region.run(|| product(Kind::BFloat16).apply(&inputs)).unwrap().unwrap());
    });
}

/// PyTorch's `test_cast_cache_is_global` expects a single cast of the weight. Casting again is also correct; using a
/// stale cast is not.
#[test]
fn a_weight_that_changed_is_cast_again_in_backward() {
    for_each_device(|device| {
        let w = Tensor::full([1, 1], 2, (Kind::Float, device)).set_requires_grad(true);
        let x = Tensor::ones([1, 1], (Kind::Float, device)).set_requires_grad(true);
        let linear = function(
            |ctx, x| {
                ctx.save_value(x[1].detach());
                Ok(x[0].f_mm(x[1])?)
            },
            |ctx, g| {
                let w = ctx.saved_value::<Tensor>()?;
                Ok([Some(g[0].mm(&w.shallow_clone())), None])
            },
        );
        let y = autocast(device, || linear.apply(&[&x, &w])).unwrap().unwrap();
        drop(tch::no_grad(|| w.shallow_clone().fill_(16.0)));
        y.sum(None).backward();
        assert_eq!(x.grad().double_value(&[0, 0]), 16.0);
    });
}

#[test]
fn only_the_devices_that_are_named_are_cast() {
    let cpu_only = |dtype| {
        function(
            move |_, x| {
                assert_eq!(x[0].kind(), dtype);
                Ok(x[0] * 2.0)
            },
            |_, g| Ok(&g[0] * 2.0),
        )
    };
    let x = random_leaf(Device::Cpu, Kind::BFloat16, &[2]);
    let cast = cpu_only(Kind::Float).cast_inputs_on(Device::Cpu, Kind::Float);
    drop(autocast(Device::Cpu, || cast.apply(&[&x])).unwrap().unwrap());
    let not = cpu_only(Kind::BFloat16).cast_inputs_on(Device::Cuda(1), Kind::Float);
    drop(autocast(Device::Cpu, || not.apply(&[&x])).unwrap().unwrap());
}

#[test]
fn each_device_has_its_own_cast() {
    for gpu in testkit::gpus() {
        // The dtypes to which inputs are cast on the CPU and on the GPU.
        let both = |expected: [Kind; 2]| {
            function(
                move |_, x| {
                    assert_eq!([x[0].kind(), x[1].kind()], expected);
                    let on = [Device::Cpu, gpu].map(is_autocast_enabled);
                    assert_eq!(on, [false, expected[1] == Kind::Half]);
                    Ok([x[0] * 2.0, x[1] * 2.0])
                },
                |_, g| Ok([&g[0] * 2.0, &g[1] * 2.0]),
            )
            .cast_inputs_on(Device::Cpu, Kind::Float)
        };
        let inputs = [Device::Cpu, gpu].map(|device| random_leaf(device, Kind::Half, &[2]));
        let _cpu = AutocastGuard::new(Device::Cpu).unwrap();
        let _cuda = AutocastGuard::new(gpu).unwrap();
        drop(both([Kind::Float, Kind::Half]).apply(&inputs).unwrap());
        let cast = both([Kind::Float, Kind::Float]).cast_inputs_on(gpu, Kind::Float);
        drop(cast.apply(&inputs).unwrap());
    }
}

#[test]
fn an_input_that_needs_no_cast_is_the_input_itself() {
    for_each_device(|device| {
        let x = Tensor::ones([1], (Kind::Float, device)).set_requires_grad(true);
        let z = &x * 1.0;
        let y = autocast(device, || double_(&z, Some(Kind::Float)));
        assert_eq!(y.unwrap().unwrap().data_ptr(), z.data_ptr());
        z.sum(None).backward();
        assert_eq!(x.grad().double_value(&[0]), 2.0);
    });
}

#[test]
fn functions_mix_with_operations_in_a_region() {
    for_each_device(|device| {
        let leaves = [(); 3].map(|()| random_leaf(device, Kind::Float, &[4, 4]));
        let copies = leaves.each_ref().map(|t| t.detach().set_requires_grad(true));
        let region = Autocast::new(device).dtype(Kind::BFloat16);
        let run = |[x, w, v]: &[Tensor; 3], mm: &dyn Fn(&Tensor, &Tensor) -> Tensor| {
            let y = region.run(|| mm(&mm(x, w).relu(), v)).unwrap();
            y.to_kind(Kind::Float).square().mean(None).backward();
            [x, w, v].map(|t| t.grad())
        };
        let ours = run(&leaves, &|a, b| MyMm::default().apply(&[a, b]).unwrap());
        let builtin = run(&copies, &|a, b| a.mm(b));
        // The backward of the built-in product rounds to bf16 at the same places.
        assert_eq!(ours, builtin, "{device:?}");
    });
}
