//! The memory that training holds for each number of the parameters, as the system reports it for this process.
#![allow(dead_code, reason = "each user takes its own part")]
#![allow(clippy::expect_used, reason = "a benchmark and a test fail by panicking")]

use tch::{Device, Kind, Tensor};
use tch_amp::optim::{AdamW, Algorithm, MasterWeights, MomentDtype, Optimizer, Sgd};
use tch_amp::scaler::GradScalerConfig;

use crate::memory::{anonymous, peak};

/// Two tensors, so that processing them one after the other shows. Even in 16 bits each is larger than 32 MiB, and
/// allocators take such memory from the system and return it immediately.
pub const TENSORS: usize = 2;
const NUMBERS: i64 = 17 << 20;

/// A way to train.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub name: &'static str,
    kind: Kind,
    masters: MasterWeights,
    algorithm: Algorithm,
    moments: MomentDtype,
    /// Whether gradients are accumulated in f32.
    wide: bool,
    /// The bytes per number that the documentation of `MasterWeights` states.
    pub stated: f64,
}

/// Bytes per number.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// The memory after two steps.
    pub held: f64,
    /// The additional memory at the peak of a further step.
    pub step: f64,
    /// The additional memory at the peak of `unscale_` and a step.
    pub unscaling: f64,
    /// The memory after a later step with new gradients.
    pub later: f64,
}

/// All rows of the table.
pub fn setups() -> Vec<Setup> {
    let random = MasterWeights::StochasticRounding { seed: 1 };
    let (none, float, remainder) =
        (MasterWeights::None, MasterWeights::Float, MasterWeights::Remainder);
    let adamw = Algorithm::from(AdamW::default());
    let amsgrad = AdamW { amsgrad: true, ..Default::default() }.into();
    let sgd = Sgd { momentum: 0.9, ..Default::default() }.into();
    let setup = |name, kind, masters, algorithm, wide, stated| {
        let moments = MomentDtype::F32;
        Setup { name, kind, masters, algorithm, moments, wide, stated }
    };
    let low_bit = |name, kind, masters, moments, stated| Setup {
        moments,
        ..setup(name, kind, masters, adamw, false, stated)
    };
    let (bf16, fp16) = (Kind::BFloat16, Kind::Half);
    vec![
        setup("f32", Kind::Float, none, adamw, false, 16.0),
        setup("bf16, None", bf16, none, adamw, false, 8.0),
        setup("bf16, Float", bf16, float, adamw, false, 16.0),
        setup("bf16, Float, f32 gradients", bf16, float, adamw, true, 18.0),
        setup("bf16, Remainder", bf16, remainder, adamw, false, 14.0),
        setup("bf16, Remainder, f32 gradients", bf16, remainder, adamw, true, 16.0),
        setup("bf16, StochasticRounding", bf16, random, adamw, false, 12.0),
        setup("bf16, StochasticRounding, f32 gradients", bf16, random, adamw, true, 14.0),
        setup("fp16, Remainder (f32 copies)", fp16, remainder, adamw, false, 16.0),
        setup("bf16, Float, amsgrad", bf16, float, amsgrad, false, 20.0),
        setup("bf16, Float, SGD with momentum", bf16, float, sgd, false, 12.0),
        low_bit("f32, bf16 moments", Kind::Float, none, MomentDtype::BFloat16, 12.0),
        low_bit("f32, 8-bit moments", Kind::Float, none, MomentDtype::EightBit, 10.03),
        low_bit("bf16, Remainder, bf16 moments", bf16, remainder, MomentDtype::BFloat16, 10.0),
        low_bit("bf16, Remainder, 8-bit moments", bf16, remainder, MomentDtype::EightBit, 8.03),
    ]
}

impl Setup {
    /// Whether `unscale_` converts gradients to f32.
    pub fn widens(&self) -> bool {
        self.masters != MasterWeights::None && !self.wide
    }
}

fn build(setup: &Setup, weights: &[Tensor]) -> Optimizer {
    let mut opt = match setup.algorithm {
        Algorithm::AdamW(config) => {
            config.master_weights(setup.masters).moments(setup.moments).build(weights, 1e-3)
        }
        Algorithm::Sgd(config) => config.master_weights(setup.masters).build(weights, 1e-3),
        other => panic!("no measurement covers {other:?}"),
    }
    .expect("the weights can be trained");
    if setup.wide {
        opt.accumulate_in_f32().expect("the optimizer has master weights");
    }
    opt
}

/// Takes a step with new gradients.
fn train(opt: &mut Optimizer, weights: &[Tensor]) {
    opt.zero_grad().expect("gradients can be dropped");
    weights.iter().for_each(|w| w.sum(w.kind()).backward());
    opt.step().expect("a step is taken");
}

/// Trains and measures. Returns `None` if the system does not report the memory. A peak that it does not report is NaN.
pub fn measure(setup: &Setup) -> Option<Held> {
    let each = (TENSORS as i64 * NUMBERS) as f64;
    let before = anonymous()?;
    let weights: Vec<_> = (0..TENSORS)
        .map(|_| Tensor::ones([NUMBERS], (setup.kind, Device::Cpu)).set_requires_grad(true))
        .collect();
    let mut opt = build(setup, &weights);
    train(&mut opt, &weights);
    train(&mut opt, &weights);
    let held = (anonymous()? - before) / each;
    let step = peak(|| opt.step().expect("a step is taken")) / each;
    let config = GradScalerConfig { init_scale: 2.0, ..Default::default() };
    let mut scaler = config.build(Device::Cpu).expect("a scaler can be made");
    drop(scaler.scale(&Tensor::from(1f32)).expect("a loss is scaled"));
    let unscaling = peak(|| {
        scaler.unscale_(&mut opt).expect("gradients are unscaled");
        drop(scaler.step(&mut opt).expect("a step is taken"));
    });
    train(&mut opt, &weights);
    let later = (anonymous()? - before) / each;
    Some(Held { held, step, unscaling: unscaling / each, later })
}
