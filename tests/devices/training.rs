//! Parameters of every dtype, trained by every fused optimizer.

use std::cell::Cell;

use tch::{Device, Kind, Tensor};
use tch_amp::optim::{
    Adagrad, Adam, AdamW, Algorithm, Lion, MasterWeights, Muon, Optimizer, RmsProp, Sgd,
};

use testkit::bits::bits;

/// The two simulated GPUs.
pub const GPUS: [Device; 2] = [Device::Cuda(0), Device::Cuda(1)];

pub fn algorithms() -> Vec<Algorithm> {
    let sgd = Sgd { momentum: 0.9, weight_decay: 0.1, ..Default::default() };
    vec![
        Adam { weight_decay: 0.1, ..Default::default() }.into(),
        Adam { amsgrad: true, ..Default::default() }.into(),
        AdamW::default().into(),
        AdamW { amsgrad: true, ..Default::default() }.into(),
        Sgd::default().into(),
        sgd.into(),
        Sgd { nesterov: true, ..sgd }.into(),
        Adagrad::default().into(),
        rmsprop().into(),
        Lion { weight_decay: 0.1, ..Default::default() }.into(),
        Muon::default().into(),
    ]
}

/// With everything that makes it take more operations.
pub fn rmsprop() -> RmsProp {
    RmsProp {
        momentum: 0.9,
        centered: true,
        weight_decay: 0.1,
        maximize: true,
        ..Default::default()
    }
}

/// A dtype, and the values from which it is updated.
pub const MODES: [(Kind, MasterWeights); 6] = [
    (Kind::Float, MasterWeights::None),
    (Kind::BFloat16, MasterWeights::None),
    (Kind::BFloat16, MasterWeights::Float),
    (Kind::Half, MasterWeights::Float),
    (Kind::BFloat16, MasterWeights::Remainder),
    (Kind::BFloat16, MasterWeights::StochasticRounding { seed: 7 }),
];

pub struct Training {
    pub parameters: Vec<Tensor>,
    pub opt: Optimizer,
    kind: Kind,
    drawn: Cell<f64>,
}

/// A fused optimizer with a learning rate of 0.01.
pub fn build(algorithm: Algorithm, list: &[Tensor], masters: MasterWeights) -> Optimizer {
    algorithm.master_weights(masters).build(list, 0.01).unwrap()
}

impl Training {
    /// Parameters of these sizes, assigned to the devices in turn.
    pub fn new(
        algorithm: Algorithm,
        (kind, masters): (Kind, MasterWeights),
        devices: &[Device],
        sizes: &[Vec<i64>],
    ) -> Self {
        let drawn = Cell::new(0.0);
        let parameters: Vec<_> = sizes
            .iter()
            .zip(devices.iter().cycle())
            .map(|(size, device)| random(&drawn, size).to_kind(kind).to_device(*device))
            .map(|t| t.set_requires_grad(true))
            .collect();
        let opt = build(algorithm, &parameters, masters);
        Self { parameters, opt, kind, drawn }
    }

    /// Gives every parameter a gradient.
    pub fn backward(&mut self) {
        self.opt.zero_grad().unwrap();
        for parameter in &self.parameters {
            let factor = random(&self.drawn, &parameter.size()).to_kind(self.kind);
            (parameter * factor.to_device(parameter.device())).sum(self.kind).backward();
        }
    }

    pub fn step(&mut self) {
        self.backward();
        self.opt.step().unwrap();
    }

    pub fn numbers(&self) -> i64 {
        self.parameters.iter().map(|parameter| parameter.numel() as i64).sum()
    }

    /// The bits of the parameters, and of their gradients converted to f32.
    pub fn values(&self) -> Vec<Vec<u8>> {
        let gradients = self.parameters.iter().map(Tensor::grad).filter(Tensor::defined);
        let wide = gradients.map(|gradient| bits(&gradient.to_kind(Kind::Float)));
        self.parameters.iter().map(bits).chain(wide).collect()
    }

    /// The bits of the state, with their names.
    pub fn state(&mut self) -> Vec<(String, Vec<u8>)> {
        let state = self.opt.state_dict().unwrap().state;
        let named = state.iter().flat_map(|(parameter, tensors)| {
            tensors.iter().map(move |(key, tensor)| (format!("{parameter}.{key}"), bits(tensor)))
        });
        named.collect()
    }
}

/// Numbers between -1 and 1 that do not depend on other tests.
fn random(drawn: &Cell<f64>, size: &[i64]) -> Tensor {
    drawn.set(drawn.get() + 1.0);
    let places = Tensor::arange(size.iter().product::<i64>(), (Kind::Float, Device::Cpu));
    (places * 12.9898 + drawn.get() * 78.233).sin().reshape(size)
}
