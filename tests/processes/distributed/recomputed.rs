//! Parts of a model that are recomputed in the backward pass, on several ranks.

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::Error;
use tch_amp::distributed::{DistributedDataParallel, DistributedError};
use tch_amp::recompute::{Recomputed, checkpointed};

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

#[test]
fn a_parameter_of_several_parts_is_an_error() {
    for parameters in [1, 3] {
        let errors = ranks(2, |group| {
            let vs = VarStore::new(Device::Cpu);
            let all: Vec<_> = (0..parameters).map(|_| vs.root().ones("w", &[4])).collect();
            let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
            let x = Tensor::ones([4], (Kind::Float, Device::Cpu)) * (group.rank() as f64 + 1.0);
            let part = |x: &Tensor, w: &Tensor| -> Tensor {
                let w = w.shallow_clone();
                checkpointed(&[x], move |x| Ok(x[0] * &w)).unwrap()
            };
            // Each parameter, and then the first one again.
            let forward = || {
                let product = all.iter().chain(&all[..1]).fold(x, |x, w| part(&x, w));
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
