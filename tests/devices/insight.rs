//! The tracer on devices, whose backward pass runs on threads of its own.

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{Cause, Pass, Tracer, audit, named};
use tch_amp::optim::AdamW;
use tch_amp::recompute::checkpointed;
use tch_amp::{Autocast, GradScaler, Result};

use testkit::rows::rows;
use testkit::simulation::Simulation;

struct Model {
    vs: VarStore,
    layers: nn::Sequential,
}

impl Model {
    fn new(device: Device) -> Self {
        let vs = VarStore::new(device);
        let mut layers = nn::seq();
        for i in 0..2 {
            layers = layers.add(nn::linear(vs.root() / "layers" / i, 8, 8, Default::default()));
        }
        Self { vs, layers }
    }

    fn loss(&self, factor: f64, part: impl Fn(&Tensor) -> Tensor) -> Result<Tensor> {
        let x = Tensor::ones([4, 8], (Kind::Float, self.vs.device())) * factor;
        let region = Autocast::new(self.vs.device()).dtype(Kind::Half);
        region.run(|| named("loss", || part(&self.layers.forward(&x))).mean(Kind::Float))
    }
}

fn zero(x: &Tensor) -> Tensor {
    x * 0.0
}

#[test]
fn culprits_on_each_device_are_named() {
    let Some(_simulation) = Simulation::find() else { return };
    for device in [Device::Cuda(0), Device::Cuda(1)] {
        let model = Model::new(device);
        let scaler = GradScaler::new(device).unwrap();
        let mut tracer = Tracer::new(&model.vs).unwrap();
        let mut explain = |factor: f64, part: fn(&Tensor) -> Tensor| {
            tracer.begin(&scaler).unwrap();
            let explanation = tracer.explain(&scaler, || model.loss(factor, part));
            explanation.unwrap().unwrap()
        };
        let forward = explain(1e6, Tensor::shallow_clone);
        assert_eq!(forward.cause, Cause::Values, "{forward}");
        let culprit = forward.culprit.as_ref().unwrap();
        assert_eq!((culprit.pass, culprit.dtype.as_str()), (Pass::Forward, "fp16"), "{forward}");
        assert_eq!(culprit.path.as_deref(), Some("layers.0"), "{forward}");

        let recomputed: fn(&Tensor) -> Tensor = |x| {
            checkpointed(&[x], |x| Ok(named("part", || zero(x[0]).to_kind(Kind::Float).sqrt())))
                .unwrap()
        };
        for (path, part) in
            [("loss", (|x| zero(x).sqrt()) as fn(&Tensor) -> Tensor), ("part", recomputed)]
        {
            let backward = explain(1.0, part);
            assert_eq!(backward.cause, Cause::Values, "{backward}");
            let culprit = backward.culprit.as_ref().unwrap();
            assert_eq!(culprit.forward_operator.as_deref(), Some("aten::sqrt"), "{backward}");
            assert!(culprit.path.as_ref().unwrap().ends_with(path), "{backward}");
        }
    }
}

/// A program that does not explain synchronizes as often as one without a tracer, and launches two kernels more.
#[test]
fn an_iteration_that_is_not_explained_does_not_synchronize() {
    let Some(simulation) = Simulation::find() else { return };
    let model = Model::new(Device::Cuda(0));
    let mut optimizer = AdamW::default().build(&model.vs, 1e-3).unwrap();
    let mut scaler = GradScaler::new(Device::Cuda(0)).unwrap();
    let mut tracer = Tracer::new(&model.vs).unwrap();
    let mut iterate = |traced: bool| {
        if traced {
            tracer.begin(&scaler).unwrap();
        }
        optimizer.zero_grad().unwrap();
        scaler.backward(&model.loss(1.0, Tensor::shallow_clone).unwrap()).unwrap();
        scaler.step(&mut optimizer).unwrap();
        scaler.update().unwrap();
    };
    for _ in 0..3 {
        iterate(true);
    }
    let [without, with] = [false, true].map(|traced| simulation.count(|| iterate(traced)).1);
    assert_eq!((without.host_syncs, with.host_syncs), (0, 0));
    assert!(with.launches <= without.launches + 2, "{with:?}, and {without:?} without");
}

/// A part that magnifies the rounding of its inputs is found on each device, and the weights and gradients are left as
/// they were.
#[test]
fn audits_on_each_device_find_the_same() {
    let Some(_simulation) = Simulation::find() else { return };
    for device in [Device::Cuda(0), Device::Cuda(1)] {
        let model = Model::new(device);
        let region = Autocast::new(device).dtype(Kind::BFloat16);
        let x = Tensor::randn([16, 8], (Kind::Float, device));
        let audited = |mean: f64| {
            let loss = |region: Autocast| {
                region.run(|| {
                    let hidden = model.layers.forward(&x) + mean;
                    let none = None::<&Tensor>;
                    named("planted", || hidden.layer_norm([8], none, none, 1e-5, false))
                        .square()
                        .sum(Kind::Float)
                })
            };
            audit(&model.vs, &region, &GradScaler::disabled(), loss).unwrap()
        };
        let clean = audited(0.0);
        assert!(clean.suspicious().is_empty() && clean.dtype == "bf16", "{clean}");
        let planted = audited(1000.0);
        let parts = rows::<serde_json::Value>(&planted, "parts");
        let part = parts.iter().find(|part| part["path"] == "planted").unwrap();
        let suspicions = part["suspicions"].as_array().unwrap();
        assert!(suspicions.contains(&"MagnifiesRounding".into()), "{planted}");
        assert!(model.vs.trainable_variables().iter().all(|weight| !weight.grad().defined()));
    }
}
