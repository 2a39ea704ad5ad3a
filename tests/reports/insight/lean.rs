//! What reports say of a loss and of layers that keep less than the operators they take the place of.

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Reduction, Tensor, no_grad};
use tch_amp::Result;
use tch_amp::insight::Budget;
use tch_amp::lean::{
    Activation, LinearCrossEntropyConfig, NormConfig, activation_linear, linear_cross_entropy,
    norm_linear,
};
use tch_amp::optim::AdamW;

use crate::insight::{alone, explain, region};

/// A layer, and the head whose products are the logits.
struct Head {
    vs: VarStore,
    body: nn::Linear,
    head: nn::Linear,
    xs: Tensor,
    targets: Tensor,
}

impl Head {
    fn new() -> Self {
        tch::manual_seed(3);
        let vs = VarStore::new(Device::Cpu);
        let body = nn::linear(vs.root() / "body", 8, 16, Default::default());
        let head = nn::linear(vs.root() / "head", 16, 40, Default::default());
        let xs = Tensor::randn([32, 8], (Kind::Float, Device::Cpu));
        let targets = Tensor::arange(32, (Kind::Int64, Device::Cpu));
        Self { vs, body, head, xs, targets }
    }

    fn loss(&self, size: f64, max_bytes: Option<usize>) -> Result<Tensor> {
        let hidden = self.body.forward(&self.xs).to_kind(Kind::Float) * size;
        let config = LinearCrossEntropyConfig {
            max_bytes,
            reduction: Reduction::Mean,
            ..Default::default()
        };
        let bias = self.head.bs.as_ref();
        linear_cross_entropy(&hidden, &self.head.ws, bias, &self.targets, &config)
    }
}

/// A feed-forward network whose linear layers keep the inputs of a norm and of an activation.
struct Feed {
    vs: VarStore,
    norm: nn::LayerNorm,
    up: nn::Linear,
    down: nn::Linear,
    xs: Tensor,
}

impl Feed {
    fn new() -> Self {
        tch::manual_seed(4);
        let vs = VarStore::new(Device::Cpu);
        let norm = nn::layer_norm(vs.root() / "norm", vec![8], Default::default());
        let up = nn::linear(vs.root() / "up", 8, 32, Default::default());
        let down = nn::linear(vs.root() / "down", 32, 8, Default::default());
        let xs = Tensor::randn([32, 8], (Kind::Float, Device::Cpu));
        Self { vs, norm, up, down, xs }
    }

    fn loss(&self) -> Result<Tensor> {
        let (config, Self { norm, up, down, .. }) = (NormConfig::layer(&[8]), self);
        let (ws, bs) = (norm.ws.as_ref(), norm.bs.as_ref());
        let hidden = norm_linear(&self.xs, &config, ws, bs, &up.ws, up.bs.as_ref())?;
        let ys = activation_linear(&hidden, Activation::Silu, &down.ws, down.bs.as_ref())?;
        Ok(ys.to_kind(Kind::Float).square().mean(Kind::Float))
    }
}

/// An infinite product is explained by its layer, behind a norm as behind an activation.
#[test]
fn an_overflow_of_a_layer_is_explained_by_its_place() {
    let _alone = alone();
    for name in ["up", "down"] {
        let mut model = Feed::new();
        no_grad(|| match name {
            "up" => model.up.ws *= 1e6,
            _ => model.down.ws *= 1e6,
        });
        let explanation = explain(&model.vs, Kind::Half, 1.0, || model.loss().unwrap()).to_string();
        assert!(explanation.contains(&format!("Culprit: {name}  aten::")), "{explanation}");
    }
}

#[track_caller]
fn assert_is_within_budget(vs: &VarStore, dtype: Kind, loss: impl Fn() -> Result<Tensor>) {
    let optimizer = || AdamW::default().build(vs, 1e-3);
    let budget = Budget::new(vs, region(dtype)).scale(1024.0);
    let report = budget.measure(optimizer, |run, optimizer| {
        let loss = run.region(&loss)??;
        let _outcome = run.scaler().backward_step(optimizer, &loss)?;
        Ok(loss)
    });
    report.unwrap().assert();
}

/// Half precision differs from f32 by rounding alone.
#[test]
fn layers_of_a_correct_program_are_within_their_budget() {
    let _alone = alone();
    for dtype in [Kind::BFloat16, Kind::Half] {
        let model = Feed::new();
        assert_is_within_budget(&model.vs, dtype, || model.loss());
    }
}

const BLOCKS: [Option<usize>; 2] = [None, Some(400)];

/// The logits exceed fp16's largest number.
#[test]
fn an_infinite_logit_is_explained_by_the_product() {
    let _alone = alone();
    for max_bytes in BLOCKS {
        let mut model = Head::new();
        no_grad(|| model.head.ws *= 50.0);
        let loss = || model.loss(3e3, max_bytes).unwrap();
        let text = explain(&model.vs, Kind::Half, 1.0, loss).to_string();
        assert!(text.contains("Culprit: head  aten::addmm in aten::linear"), "{text}");
        assert!(text.contains("advice: keep head in f32, or use bf16"), "{text}");
    }
}

/// Half precision differs from f32 by rounding alone, as with the operators themselves.
#[test]
fn a_correct_program_is_within_its_budget() {
    let _alone = alone();
    for dtype in [Kind::BFloat16, Kind::Half] {
        for max_bytes in BLOCKS {
            let model = Head::new();
            assert_is_within_budget(&model.vs, dtype, || model.loss(1.0, max_bytes));
        }
    }
}
