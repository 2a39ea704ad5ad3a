//! Which rank made a step be skipped on all.

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::distributed::DistributedDataParallel;
use tch_amp::insight::{Cause, Tracer, named};
use tch_amp::optim::Sgd;
use tch_amp::{GradScaler, Result};

use super::ranks;

#[test]
fn only_the_rank_with_the_bad_batch_has_a_culprit() {
    let explanations = ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let config = nn::LinearConfig { ws_init: nn::Init::Const(0.5), ..Default::default() };
        let layer = nn::linear(vs.root() / "layer", 4, 4, config);
        let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
        let mut optimizer = Sgd::default().build(&vs, 0.1).unwrap();
        let mut scaler = GradScaler::new(Device::Cpu).unwrap();
        let mut tracer = Tracer::new(&vs).unwrap();
        let x = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
        let x = if group.rank() == 1 { x * 1e30 } else { x };
        let loss = || named("loss", || layer.forward(&x).square().mean(None));
        tracer.begin(&scaler).unwrap();
        let scaled = scaler.scale(&ddp.forward(loss).unwrap()).unwrap();
        ddp.backward(&scaled).unwrap();
        let skipped = scaler.step(&mut optimizer).unwrap().is_skipped().unwrap();
        scaler.update().unwrap();
        assert!(skipped);
        // The model itself, so that no rank waits for the other.
        tracer.explain(&scaler, || -> Result<Tensor> { Ok(loss()) }).unwrap().unwrap()
    });
    assert_eq!(explanations[0].cause, Cause::Finite, "{}", explanations[0]);
    assert_eq!(explanations[1].cause, Cause::Values, "{}", explanations[1]);
    let culprit = explanations[1].culprit.as_ref().unwrap();
    assert_eq!(culprit.operator, "aten::pow", "{}", explanations[1]);
    assert_eq!(culprit.path.as_deref(), Some("loss"), "{}", explanations[1]);
}
