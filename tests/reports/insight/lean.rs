//! What reports say of a loss that keeps less than the operators it takes the place of.

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Reduction, Tensor, no_grad};
use tch_amp::Autocast;
use tch_amp::insight::Budget;
use tch_amp::lean::{LinearCrossEntropyConfig, linear_cross_entropy};
use tch_amp::optim::AdamW;

use crate::insight::{alone, explain};

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

    fn loss(&self, size: f64, max_bytes: Option<usize>) -> tch_amp::Result<Tensor> {
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

const BLOCKS: [Option<usize>; 2] = [None, Some(400)];

/// The logits exceed fp16's largest number.
#[test]
fn an_infinite_logit_is_explained_by_the_product() {
    let _alone = alone();
    for max_bytes in BLOCKS {
        let mut model = Head::new();
        no_grad(|| model.head.ws *= 50.0);
        let explanation =
            explain(&model.vs, Kind::Half, 1.0, || model.loss(3e3, max_bytes).unwrap()).unwrap();
        let text = explanation.to_string();
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
            let region = Autocast::new(Device::Cpu).dtype(dtype);
            let report = Budget::new(&model.vs, region)
                .scale(1024.0)
                .measure(
                    || AdamW::default().build(&model.vs, 1e-3),
                    |run, optimizer| {
                        optimizer.zero_grad()?;
                        let loss = run.region(|| model.loss(1.0, max_bytes))??;
                        run.scaler().backward(&loss)?;
                        let _outcome = run.scaler().step(optimizer)?;
                        run.scaler().update()?;
                        Ok(loss)
                    },
                )
                .unwrap();
            assert!(report.is_within(), "{dtype:?}, {max_bytes:?}: {report}");
        }
    }
}
