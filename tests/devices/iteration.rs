//! Whole iterations with a scaler, for parameters on the simulated GPUs.

use tch::{Device, Kind, Tensor};
use tch_amp::optim::{AdamW, Algorithm, AmpOptimizer, MasterWeights, Optimizer, Parameters, Step};
use tch_amp::scaler::StepOutcome;
use tch_amp::{GradScaler, Result, autocast};

use crate::training::build;
use testkit::optimizers;

pub const ONE: &[Device] = &[Device::Cuda(0)];
pub const TWO: &[Device] = &[Device::Cuda(0), Device::Cuda(1)];

/// Parameters of ones, `count` on each of the devices.
pub fn parameters(devices: &[Device], kind: Kind, count: usize) -> Vec<Tensor> {
    let one = |place| {
        let w = Tensor::ones([3, 5], (kind, devices[place % devices.len()]));
        w.set_requires_grad(true)
    };
    (0..count * devices.len()).map(one).collect()
}

/// A scaler with a scale of 8, which causes no rounding.
pub fn scaler() -> GradScaler {
    optimizers::scaler(Device::Cuda(0), 8.0)
}

/// A loss for each device, of the parameters there. Its gradients are about `factor`.
pub fn losses(parameters: &[Tensor], devices: &[Device], factor: f64) -> Vec<Tensor> {
    let on = |device: &Device| {
        let mine = parameters.iter().filter(|w| w.device() == *device);
        let loss = || mine.map(|w| ((w * w + w) * factor).sum(Kind::Float)).sum::<Tensor>();
        autocast(*device, loss).unwrap()
    };
    devices.iter().map(on).collect()
}

/// Scales the losses and runs their backward.
pub fn backward(scaler: &GradScaler, losses: &[Tensor]) -> Result<()> {
    losses.iter().try_for_each(|loss| scaler.backward(loss))
}

/// An optimizer of the host that does nothing.
pub struct Nothing(pub Vec<Tensor>);

impl AmpOptimizer for Nothing {
    fn parameters(&self) -> Parameters<'_> {
        self.0.as_slice().into()
    }

    fn update(&mut self, _step: &Step<'_>) -> Result<()> {
        Ok(())
    }
}

/// Parameters in training.
pub struct Training {
    pub all: Vec<Tensor>,
    devices: &'static [Device],
    pub opt: Optimizer,
    pub scaler: GradScaler,
}

impl Training {
    pub fn new(
        algorithm: Algorithm,
        masters: MasterWeights,
        all: Vec<Tensor>,
        devices: &'static [Device],
    ) -> Self {
        let opt = build(algorithm, &all, masters);
        Self { all, devices, opt, scaler: scaler() }
    }

    /// A few f32 parameters with AdamW.
    pub fn usual(devices: &'static [Device], count: usize) -> Self {
        let all = parameters(devices, Kind::Float, count);
        Self::new(AdamW::default().into(), MasterWeights::None, all, devices)
    }

    /// Replaces the gradients by scaled ones of about `factor`.
    pub fn backward(&mut self, factor: f64) {
        self.opt.zero_grad().unwrap();
        backward(&self.scaler, &losses(&self.all, self.devices, factor)).unwrap();
    }

    pub fn step(&mut self) -> StepOutcome {
        self.scaler.step(&mut self.opt).unwrap()
    }

    /// A whole iteration.
    pub fn iterate(&mut self, factor: f64) -> StepOutcome {
        self.backward(factor);
        let outcome = self.step();
        self.scaler.update().unwrap();
        outcome
    }
}
