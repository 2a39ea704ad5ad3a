//! Parameters of every dtype, trained by every fused optimizer.

use std::cell::Cell;

use tch::{Device, Kind, Tensor};
use tch_amp::optim::{Algorithm, MasterWeights, Optimizer, Step};

use testkit::bits::bits;

/// The two simulated GPUs.
pub const GPUS: [Device; 2] = [Device::Cuda(0), Device::Cuda(1)];

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

/// Whether an algorithm has numbers of each parameter's own, so that it launches for each of them.
pub fn has_numbers_of_each_parameter(algorithm: &Algorithm) -> bool {
    matches!(algorithm, Algorithm::NAdam(_) | Algorithm::Adafactor(_))
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

/// The scale, the clipping factor and the overflow flag that a scaler may pass, on the first GPU.
pub fn scaler_numbers() -> [Tensor; 3] {
    [1.0f32, 0.5, 0.0].map(|number| Tensor::from(number).to_device(GPUS[0]))
}

/// A step with the numbers of a scaler.
pub fn scaled([scale, clip, found_inf]: &[Tensor; 3]) -> Step<'_> {
    Step::default().with_grad_scale(scale).with_clip_factor(clip).with_found_inf(found_inf)
}

/// Asserts that three steps, with gradients in the dtype of the parameters and in f32, leave the bits of the CPU.
pub fn assert_computes_as_the_cpu(
    algorithm: Algorithm,
    mode: (Kind, MasterWeights),
    sizes: &[Vec<i64>],
) {
    for wide in [false, true] {
        let [mut here, mut there] = [&[Device::Cpu][..], &GPUS].map(|devices| {
            let mut training = Training::new(algorithm, mode, devices, sizes);
            if wide && mode.1 != MasterWeights::None {
                training.opt.accumulate_in_f32().unwrap();
            }
            (0..3).for_each(|_| training.step());
            training
        });
        let context = format!("{algorithm:?} {mode:?}");
        assert!(here.values() == there.values(), "{context}");
        assert!(here.state() == there.state(), "{context}");
    }
}

/// Numbers between -1 and 1 that do not depend on other tests.
fn random(drawn: &Cell<f64>, size: &[i64]) -> Tensor {
    drawn.set(drawn.get() + 1.0);
    let places = Tensor::arange(size.iter().product::<i64>(), (Kind::Float, Device::Cpu));
    (places * 12.9898 + drawn.get() * 78.233).sin().reshape(size)
}
