//! Tuning: what it chooses where an operator is slow in one precision, and that it leaves nothing behind.

use std::cell::Cell;
use std::thread::sleep;
use std::time::Duration;

use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::autocast::RunAs;
use tch_amp::insight::{Tuner, Tuning};
use tch_amp::precision::bf16_is_native;
use tch_amp::{Autocast, Error, GradScaler};

use crate::insight::alone;
use testkit::rows::rows;
use testkit::tensors::variables;
use testkit::{skipped, to_f64};

fn region() -> Autocast {
    Autocast::new(Device::Cpu).dtype(Kind::BFloat16)
}

/// Attention between two linear layers, a normalization with statistics, and a dropout.
struct Model {
    vs: VarStore,
    first: nn::Linear,
    norm: nn::BatchNorm,
    last: nn::Linear,
    x: Tensor,
}

impl Model {
    fn new() -> Self {
        tch::manual_seed(3);
        let vs = VarStore::new(Device::Cpu);
        let first = nn::linear(vs.root() / "first", 16, 16, Default::default());
        let norm = nn::batch_norm1d(vs.root() / "norm", 8, Default::default());
        let last = nn::linear(vs.root() / "last", 16, 16, Default::default());
        let x = Tensor::randn([4, 8, 16], (Kind::Float, Device::Cpu));
        Self { vs, first, norm, last, x }
    }

    fn loss(&self) -> Tensor {
        let hidden = self.norm.forward_t(&self.x.apply(&self.first), true).dropout(0.1, true);
        let none = None::<&Tensor>;
        let mixed = Tensor::scaled_dot_product_attention(
            &hidden, &hidden, &hidden, none, 0.0, true, None, false,
        );
        mixed.apply(&self.last).to_kind(Kind::Float).square().mean(None)
    }

    /// Everything that an iteration could change, as numbers.
    fn state(&self) -> Vec<Vec<f64>> {
        let numbers = |t: &Tensor| if t.defined() { to_f64(t) } else { Vec::new() };
        let variables = variables(&self.vs).into_values();
        variables.flat_map(|variable| [numbers(&variable), numbers(&variable.grad())]).collect()
    }
}

#[test]
fn nothing_is_left_behind() {
    let _alone = alone();
    let model = Model::new();
    model.loss().backward();
    let run = |with_tuning: bool| {
        tch::manual_seed(5);
        let calls = Cell::new(0);
        let loss = |region: Autocast| {
            calls.set(calls.get() + 1);
            region.run(|| model.loss())
        };
        let tuning = with_tuning.then(|| {
            Tuner::default().tune(&model.vs, &region(), &GradScaler::disabled(), loss).unwrap()
        });
        let next = to_f64(&Tensor::randn([4], (Kind::Float, Device::Cpu)));
        (model.state(), next, tuning, calls.get())
    };
    let (before, numbers, ..) = run(false);
    let (after, drawn, tuning, calls) = run(true);
    assert_eq!((after, drawn), (before, numbers));
    let tuning = tuning.unwrap();
    assert_eq!(tuning.iterations, calls);
    assert!(calls <= 40, "{tuning}");

    let text = serde_json::to_string(&tuning).unwrap();
    assert_eq!(serde_json::from_str::<Tuning>(&text).unwrap(), tuning, "{text}");
    let kinds = [None, Some(Kind::BFloat16)];
    assert!(kinds.contains(&tuning.plan.dtype), "{tuning}");
    let planned = region().plan(&tuning.plan).unwrap();
    assert!(planned.run(|| model.loss()).unwrap().double_value(&[]).is_finite());
    let text = tuning.to_string();
    assert!(
        text.contains(&tuning.reason) && text.ends_with(&format!("{calls} were run")),
        "{text}"
    );
}

#[test]
fn operators_of_f32_are_tried_in_half_precision_if_asked() {
    let _alone = alone();
    let model = Model::new();
    let calls = Cell::new(0);
    let loss = |region: Autocast| {
        calls.set(calls.get() + 1);
        region.run(|| model.loss().mse_loss(&Tensor::from(0.5f32), tch::Reduction::Mean))
    };
    let before = model.state();
    let tuner = Tuner { allow_half: true };
    let tuning = tuner.tune(&model.vs, &region(), &GradScaler::disabled(), loss).unwrap();
    assert_eq!((tuning.iterations, model.state()), (calls.get(), before), "{tuning}");
    assert!(tuning.iterations <= 40, "{tuning}");
    let in_half = tuning.plan.rules.iter().any(|rule| rule.run_as == RunAs::Half);
    assert!(!in_half || tuning.suspicious.is_some(), "{tuning}");
    assert_eq!(tuning.summary().lines().count(), 1, "{tuning}");
    // The weights are in f32.
    assert_eq!(tuning.weight_casts > 0.0, tuning.plan.dtype.is_some(), "{tuning}");
}

/// A network whose linear layers wait if they are in one precision, and its products if they are in the other: longer
/// than anything else here can take.
fn tuned(slow_linear: Kind, slow_product: Kind) -> Tuning {
    tch::manual_seed(3);
    let vs = VarStore::new(Device::Cpu);
    let layer = nn::linear(vs.root() / "layer", 64, 64, Default::default());
    let weight = vs.root().randn_standard("weight", &[64, 64]);
    let x = Tensor::randn([64, 64], (Kind::Float, Device::Cpu));
    let wait = |slow: Kind, milliseconds: u64, result: Tensor| {
        if result.kind() == slow {
            sleep(Duration::from_millis(milliseconds));
        }
        result
    };
    let loss = || {
        let hidden = wait(slow_linear, 150, x.apply(&layer));
        let product = wait(slow_product, 300, hidden.matmul(&weight));
        product.to_kind(Kind::Float).square().mean(None)
    };
    Tuner::default()
        .tune(&vs, &region(), &GradScaler::disabled(), |region| region.run(loss))
        .unwrap()
}

#[test]
#[ignore = "times decide: run it alone, on a machine that does nothing else"]
fn whole_iterations_decide() {
    let _alone = alone();
    if bf16_is_native(Device::Cpu).unwrap() {
        skipped("which operators are faster in f32 is known where bf16 is emulated");
        return;
    }
    // Each operator alone is faster in f32.
    let half = tuned(Kind::Float, Kind::Float);
    assert_eq!((half.plan.dtype, half.plan.rules.len()), (Some(Kind::BFloat16), 0), "{half}");
    let tried = rows::<serde_json::Value>(&half, "operators");
    assert!(tried.iter().all(|tried| tried["is_in_plan"] == false), "{half}");
    let mixed = tuned(Kind::BFloat16, Kind::Float);
    assert_eq!(mixed.plan.dtype, Some(Kind::BFloat16), "{mixed}");
    let [rule] = &mixed.plan.rules[..] else { panic!("{mixed}") };
    let found = (rule.operator.as_str(), rule.run_as, rule.at_least, rule.below);
    assert_eq!(found, ("linear", RunAs::F32, 0, Some(2 * 64 * 64 * 64)), "{mixed}");
    let [f32, without, with] = mixed.seconds;
    assert!(with < without && with < f32, "{mixed}");
}

#[test]
fn where_bf16_is_emulated_everything_stays_in_f32() {
    let _alone = alone();
    if bf16_is_native(Device::Cpu).unwrap() {
        skipped("bf16 is not emulated here");
        return;
    }
    let tuning = tuned(Kind::BFloat16, Kind::BFloat16);
    assert_eq!((tuning.plan.dtype, tuning.plan.rules.len()), (None, 0), "{tuning}");
    let reason = "everything is in f32: ";
    assert!(tuning.reason.starts_with(reason), "{tuning}");
    assert!(tuning.reason.contains("bf16, which is emulated here"), "{tuning}");
    assert!(tuning.iterations <= 40, "{tuning}");
}

#[test]
fn errors_change_nothing() {
    let _alone = alone();
    let model = Model::new();
    let before = model.state();
    let failing = |_| Err(Error::Torch("on purpose".to_owned()));
    let found = Tuner::default().tune(&model.vs, &region(), &GradScaler::disabled(), failing);
    assert!(found.is_err_and(|error| error.to_string().contains("on purpose")));
    let off = region().enabled(false);
    let refused =
        Tuner::default().tune(&model.vs, &off, &GradScaler::disabled(), |_| Ok(model.loss()));
    assert!(matches!(refused, Err(Error::InvalidArgument { name: "region", .. })), "{refused:?}");
    assert_eq!(model.state(), before);
}
