//! Batch normalization over ranks, beside libtorch's over the whole batch.

use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::average::Swa;
use tch_amp::distributed::SyncBatchNorm;
use tch_amp::{Autocast, Error};

use super::ranks;

const CHANNELS: i64 = 3;

/// Numbers that differ for each seed, far from zero, so that sums of squares alone would lose the variance.
fn numbers(shape: &[i64], seed: i64, kind: Kind) -> Tensor {
    let places = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    let numbers: Tensor = (places * 0.37 + seed as f64).sin() + 30.0;
    numbers.view(shape).to_kind(kind)
}

fn shape(rows: i64, dims: usize) -> Vec<i64> {
    [&[rows, CHANNELS], &[4, 2, 3][..dims - 2]].concat()
}

fn set(vs: &VarStore, kind: Kind) {
    let variables = vs.variables();
    for (name, seed) in [("weight", 1), ("bias", 2), ("running_mean", 3), ("running_var", 4)] {
        if let Some(variable) = variables.get(name) {
            tch::no_grad(|| {
                variable.shallow_clone().copy_(&(numbers(&[CHANNELS], seed, kind) - 28.5))
            });
        }
    }
}

fn check(kind: Kind, dims: usize, affine: bool, rows: &[i64], tolerance: f64) {
    let config = nn::BatchNormConfig { affine, momentum: 0.3, ..Default::default() };
    let xs = |rank: usize| numbers(&shape(rows[rank], dims), 7 * rank as i64, kind);
    let results = ranks(rows.len(), |group| {
        let mut vs = VarStore::new(Device::Cpu);
        let layer = SyncBatchNorm::new(vs.root(), CHANNELS, config, &group);
        if kind == Kind::Double {
            vs.double();
        }
        set(&vs, kind);
        run(&vs, &layer, &xs(group.rank()), rows, group.rank())
    });
    let mut vs = VarStore::new(Device::Cpu);
    let layer = match dims {
        2 | 3 => nn::batch_norm1d(vs.root(), CHANNELS, config),
        4 => nn::batch_norm2d(vs.root(), CHANNELS, config),
        _ => nn::batch_norm3d(vs.root(), CHANNELS, config),
    };
    if kind == Kind::Double {
        vs.double();
    }
    set(&vs, kind);
    let whole = Tensor::cat(&(0..rows.len()).map(xs).collect::<Vec<_>>(), 0);
    let expected = run(&vs, &layer, &whole, &[rows.iter().sum()], 0);
    for (i, expected) in expected.iter().enumerate() {
        let parts: Vec<_> = results.iter().map(|result| result[i].shallow_clone()).collect();
        let statistics = i >= expected_statistics(affine);
        let found = match i {
            0 | 1 => Tensor::cat(&parts, 0),
            // The gradients of the ranks add up, and the statistics are the same.
            _ if statistics => parts[0].shallow_clone(),
            _ => Tensor::stack(&parts, 0).sum_dim_intlist([0i64].as_slice(), false, None),
        };
        let apart = (found - expected).abs().max().double_value(&[]);
        let size = expected.abs().max().double_value(&[]);
        assert!(apart <= tolerance * size, "{i}: {apart} of {size}, {kind:?} {dims} {rows:?}");
        if statistics {
            assert!(parts.iter().all(|part| part == &parts[0]));
        }
    }
}

fn expected_statistics(affine: bool) -> usize {
    if affine { 4 } else { 2 }
}

/// Returns the output, the gradients of the input, the weight and the bias, and the running statistics, for the rows of
/// one rank.
fn run(vs: &VarStore, layer: &dyn ModuleT, xs: &Tensor, rows: &[i64], rank: usize) -> Vec<Tensor> {
    let before: i64 = rows[..rank].iter().sum();
    let xs = xs.copy().set_requires_grad(true);
    let ys = layer.forward_t(&xs, true);
    assert_eq!((ys.kind(), ys.size()), (xs.kind(), xs.size()));
    // The factors of the loss belong to the rows of the whole batch.
    let whole = [&[rows.iter().sum::<i64>()], &ys.size()[1..]].concat();
    let factors = numbers(&whole, 5, ys.kind()).narrow(0, before, rows[rank]) - 30.0 + &ys * 0.5;
    (&ys * factors.detach()).sum(Kind::Double).backward();
    let mut results = vec![ys.detach(), xs.grad()];
    if let Some(weight) = vs.variables().get("weight") {
        results.extend([weight.grad(), vs.variables()["bias"].grad()]);
    }
    results
        .extend(["running_mean", "running_var"].map(|name| vs.variables()[name].shallow_clone()));
    results
}

#[test]
fn it_is_batch_norm_over_the_batches_of_all_ranks() {
    for dims in [2, 3, 4, 5] {
        for affine in [true, false] {
            check(Kind::Double, dims, affine, &[4, 4], 1e-11);
            check(Kind::Double, dims, affine, &[5, 1, 3], 1e-11);
        }
        check(Kind::Float, dims, true, &[3, 6], 1e-4);
    }
    // A rank without rows.
    check(Kind::Double, 4, true, &[0, 2, 3], 1e-11);
}

#[test]
fn half_precision_inputs_keep_their_dtype_and_f32_statistics() {
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let layer = SyncBatchNorm::new(vs.root(), CHANNELS, Default::default(), &group);
        let xs = numbers(&shape(8, 4), group.rank() as i64, Kind::BFloat16).set_requires_grad(true);
        let ys = Autocast::new(Device::Cpu).run(|| layer.forward_t(&xs, true)).unwrap();
        assert_eq!((ys.kind(), layer.bn.running_mean.kind()), (Kind::BFloat16, Kind::Float));
        ys.sum(Kind::Float).backward();
        assert_eq!(xs.grad().kind(), Kind::BFloat16);
        let mean = group.all_gather(&layer.bn.running_mean).unwrap();
        assert!(mean[0] == mean[1] && (mean[0].double_value(&[0]) - 3.0).abs() < 0.1);
    });
}

#[test]
fn evaluation_uses_the_running_statistics_and_wrong_inputs_are_refused() {
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let layer = SyncBatchNorm::new(vs.root(), CHANNELS, Default::default(), &group);
        set(&vs, Kind::Float);
        let xs = numbers(&shape(2, 4), 1, Kind::Float);
        if group.rank() == 0 {
            // Nothing is communicated.
            let bn = &layer.bn;
            let expected = bn.forward_t(&xs.view([2, CHANNELS, -1]), false);
            assert_eq!(layer.forward_t(&xs, false).view([2, CHANNELS, -1]), expected);
        }
        for wrong in [Tensor::from(1f32), xs.narrow(1, 0, 2), xs.to_kind(Kind::Int64)] {
            let error = layer.f_forward_t(&wrong, true).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { name: "xs", .. }), "{error}");
        }
        let rows = i64::from(group.rank() == 0);
        let error =
            layer.f_forward_t(&numbers(&[rows, CHANNELS], 1, Kind::Float), true).unwrap_err();
        assert!(error.to_string().contains("fewer than two values"), "{error}");
    });
}

/// A layer that each batch reaches twice, and one that only evaluates.
#[test]
fn averaged_weights_get_the_statistics_of_every_call() {
    let updated = |make: &dyn Fn(&VarStore, &str) -> Box<dyn ModuleT>, part: [usize; 2]| {
        let mut vs = VarStore::new(Device::Cpu);
        let [twice, frozen] = ["twice", "frozen"].map(|name| make(&vs, name));
        vs.double();
        let mut swa = Swa::default().build(&vs).unwrap();
        let batches = (0..3).map(|seed| numbers(&shape(6, 4), seed, Kind::Double));
        swa.update_batch_norm(0.1, batches, |batch| {
            let [rank, ranks] = part.map(|number| number as i64);
            let xs = batch.slice(0, rank, None, ranks);
            drop((frozen.forward_t(&xs, false), twice.forward_t(&xs, true)));
            Ok(twice.forward_t(&(xs * 2.0), true))
        })
        .unwrap();
        let _swapped = swa.swap_in().unwrap();
        let variables = vs.variables();
        ["twice.running_mean", "twice.running_var", "frozen.running_mean", "frozen.running_var"]
            .map(|name| variables[name].copy())
    };
    let found = ranks(2, |group| {
        let make = |vs: &VarStore, name: &str| -> Box<dyn ModuleT> {
            let config = nn::BatchNormConfig { momentum: 0.3, ..Default::default() };
            Box::new(SyncBatchNorm::new(vs.root() / name, CHANNELS, config, &group))
        };
        updated(&make, [group.rank(), 2])
    });
    let plain = |vs: &VarStore, name: &str| -> Box<dyn ModuleT> {
        Box::new(nn::batch_norm2d(vs.root() / name, CHANNELS, Default::default()))
    };
    let expected = updated(&plain, [0, 1]);
    for found in &found {
        for (found, expected) in found.iter().zip(&expected) {
            let apart = (found - expected).abs().max().double_value(&[]);
            assert!(apart <= 1e-11 * expected.abs().max().double_value(&[]), "{found} {expected}");
        }
    }
}
