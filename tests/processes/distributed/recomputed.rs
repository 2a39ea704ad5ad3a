//! Parts of a model that are recomputed in the backward pass, on several ranks.

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor, with_grad};
use tch_amp::distributed::{DdpConfig, DistributedDataParallel, DistributedError};
use tch_amp::recompute::{Recomputed, checkpointed};
use tch_amp::{Error, function};

use super::ranks;
use testkit::bits::bits;

fn model(vs: &VarStore, recomputed: bool) -> nn::Sequential {
    let config = nn::LinearConfig {
        ws_init: nn::Init::Const(0.125),
        bs_init: Some(nn::Init::Const(0.5)),
        bias: true,
    };
    let mut model = nn::seq();
    for i in 0..3 {
        let layer = nn::linear(vs.root() / i, 8, 8, config);
        let block = nn::seq().add(layer).add_fn(Tensor::tanh);
        model = if recomputed { model.add(Recomputed::new(block)) } else { model.add(block) };
    }
    model
}

#[test]
fn the_gradients_of_recomputed_parts_are_averaged() {
    let run = |recomputed: bool| {
        ranks(2, |group| {
            let vs = VarStore::new(Device::Cpu);
            let model = model(&vs, recomputed);
            let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
            let xs = Tensor::arange(40, (Kind::Float, Device::Cpu)).view([5, 8]) / 40.0;
            let xs = xs * (group.rank() as f64 + 1.0);
            let mut all = Vec::new();
            for _ in 0..2 {
                let forward = || model.forward(&xs).square().mean(Kind::Float);
                let loss = ddp.forward(forward).unwrap();
                ddp.backward(&loss).unwrap();
                all.extend(vs.trainable_variables().iter().map(|w| bits(&w.grad())));
            }
            all
        })
    };
    let [plain, recomputed] = [false, true].map(run);
    assert!(plain[0] == plain[1], "the ranks have different gradients");
    assert!(recomputed == plain, "the gradients of recomputed parts differ");
}

/// The gradients of a parameter that several parts use, and of one that none uses.
#[test]
fn parameters_of_several_parts_and_of_none_are_averaged_and_found() {
    let run = |recomputed: bool| {
        ranks(2, |group| {
            let vs = VarStore::new(Device::Cpu);
            let [w, last, _unused] = ["w", "last", "unused"].map(|name| vs.root().ones(name, &[4]));
            let options = DdpConfig { find_unused_parameters: true, ..Default::default() };
            let mut ddp = options.build(&group, &vs).unwrap();
            let x = Tensor::ones([4], (Kind::Float, Device::Cpu)) * (group.rank() as f64 + 1.0);
            let part = |x: &Tensor, w: &Tensor| -> Tensor {
                let w = w.shallow_clone();
                let f = move |x: &[&Tensor]| Ok((x[0] * &w).sin());
                if recomputed { checkpointed(&[x], f).unwrap() } else { f(&[x]).unwrap() }
            };
            let mut all = Vec::new();
            for _ in 0..2 {
                let forward = || part(&part(&part(&x, &w), &last), &w).sum(Kind::Float);
                let loss = ddp.forward(forward).unwrap();
                ddp.backward(&loss).unwrap();
                all.extend([&w, &last].map(|w| bits(&w.grad())));
            }
            all
        })
    };
    let [plain, recomputed] = [false, true].map(run);
    assert!(plain[0] == plain[1] && recomputed == plain);
}

/// A function whose backward runs a backward pass of its own, through a parameter.
#[test]
fn a_parameter_of_several_passes_within_one_is_an_error() {
    for parameters in [1, 3] {
        let errors = ranks(2, |group| {
            let vs = VarStore::new(Device::Cpu);
            let all: Vec<_> = (0..parameters).map(|_| vs.root().ones("w", &[4])).collect();
            let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
            let x = Tensor::ones([4], (Kind::Float, Device::Cpu)) * (group.rank() as f64 + 1.0);
            let part = |x: &Tensor, w: &Tensor| -> Tensor {
                let w = w.shallow_clone();
                let product = function(
                    |ctx, x| {
                        ctx.save_for_backward(x);
                        Ok(x[0] * 1.0)
                    },
                    move |ctx, g| {
                        let [x] = ctx.saved_tensors()?;
                        let x = x.detach().set_requires_grad(true);
                        with_grad(|| (&x * &w * &g[0]).sum(Kind::Float)).f_backward()?;
                        Ok([x.grad()])
                    },
                );
                product.apply(&[x]).unwrap()
            };
            // Each parameter, and then the first one again.
            let forward = || {
                let product =
                    all.iter().chain(&all[..1]).fold(x.set_requires_grad(true), |x, w| part(&x, w));
                product.sum(Kind::Float)
            };
            let loss = ddp.forward(forward).unwrap();
            ddp.backward(&loss).unwrap_err()
        });
        for error in errors {
            let repeated = Error::Distributed(DistributedError::Repeated { name: "w".to_owned() });
            assert_eq!(error.to_string(), repeated.to_string());
        }
    }
}
