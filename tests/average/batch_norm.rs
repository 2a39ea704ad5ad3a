//! The statistics of batch normalization for averaged weights.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::Error;
use tch_amp::average::Swa;

/// A linear layer before a normalization, so that the statistics depend on the averaged weights.
fn network() -> (VarStore, nn::SequentialT) {
    let vs = VarStore::new(Device::Cpu);
    let net = nn::seq_t()
        .add(nn::linear(vs.root() / "linear", 4, 3, Default::default()))
        .add(nn::batch_norm1d(vs.root() / "norm", 3, Default::default()));
    (vs, net)
}

#[test]
fn the_statistics_are_the_means_of_the_batches() {
    tch::manual_seed(2);
    let (vs, net) = network();
    let mut swa = Swa::default().build(&vs).unwrap();
    let weight = vs.variables()["linear.weight"].shallow_clone();
    for factor in [1.0, 3.0] {
        drop(tch::no_grad(|| weight.shallow_clone().g_mul_(&Tensor::from(factor as f32))));
        swa.advance().unwrap();
    }
    let mean = swa.average("linear.weight").unwrap();
    let bias = vs.variables()["linear.bias"].detach();
    let batches: Vec<_> = (0..5)
        .map(|i| Tensor::randn([16, 4], (Kind::Float, Device::Cpu)) * (1.0 + i as f64))
        .collect();
    swa.update_batch_norm(0.1, &batches, |xs| Ok(net.forward_t(xs, true))).unwrap();

    let outputs: Vec<_> = batches.iter().map(|xs| xs.linear(&mean, Some(&bias))).collect();
    let average = |of: &dyn Fn(&Tensor) -> Tensor| {
        let all: Vec<_> = outputs.iter().map(of).collect();
        Tensor::stack(&all, 0).mean_dim(0, false, Kind::Double)
    };
    let means = average(&|ys| ys.mean_dim(0, false, Kind::Double));
    let variances = average(&|ys| ys.to_kind(Kind::Double).var_dim(0, true, false));
    let near = |name: &str, expected: &Tensor| {
        let ours = vs.variables()[name].to_kind(Kind::Double);
        // f32 statistics of 16 numbers, of which the layer keeps a tenth.
        let distance = (&ours - expected).abs() / (expected.abs() + 1.0);
        assert!(distance.max().double_value(&[]) < 1e-5, "{name}: {ours} is not {expected}");
    };
    let own = vs.variables()["norm.running_mean"].copy();
    {
        let _swapped = swa.swap_in().unwrap();
        near("norm.running_mean", &means);
        near("norm.running_var", &variances);
    }
    assert_eq!(own, Tensor::zeros([3], (Kind::Float, Device::Cpu)));
    assert_eq!(vs.variables()["norm.running_mean"], own);
}

#[test]
fn a_failure_leaves_the_statistics_as_they_were() {
    let (vs, net) = network();
    let mut swa = Swa::default().build(&vs).unwrap();
    let xs = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));
    swa.update_batch_norm(0.1, [&xs], |xs| Ok(net.forward_t(xs, true))).unwrap();
    let statistics = |swa: &mut tch_amp::average::AveragedWeights| {
        let _swapped = swa.swap_in().unwrap();
        vs.variables()["norm.running_var"].copy()
    };
    let before = statistics(&mut swa);
    let others = || [&xs * 2.0, &xs * 3.0];
    let fails = |xs: Tensor| {
        drop(net.forward_t(&xs, true));
        Err(Error::Torch("no".to_owned()))
    };
    swa.update_batch_norm(0.1, others(), fails).unwrap_err();
    assert_eq!(statistics(&mut swa), before);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        swa.update_batch_norm(0.1, others(), |_| panic!("the forward pass fails"))
    }));
    assert!(panicked.is_err());
    assert_eq!(statistics(&mut swa), before);
    assert!(net.forward_t(&xs, true).requires_grad(), "gradients are recorded again");
    let none: [Tensor; 0] = [];
    let error = swa.update_batch_norm(0.1, none, |xs| Ok(net.forward_t(&xs, true))).unwrap_err();
    assert!(error.to_string().contains("no batch"), "{error}");
    assert_eq!(statistics(&mut swa), before);
}
