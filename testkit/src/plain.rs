//! Optimizers as the formulas of their papers and of PyTorch's documentation, in f64.

use tch::{Device, Kind, Tensor};
use tch_amp::optim::{
    Adafactor, Adagrad, Adam, AdamW, AdjustLr, Algorithm, Lion, Muon, NAdam, RmsProp, Sgd,
};

const F64: Kind = Kind::Double;

/// A parameter and its state.
#[derive(Debug)]
pub struct Plain {
    /// The parameter.
    pub value: Tensor,
    /// The average of the gradients, the buffer of momentum, or what an algorithm keeps instead.
    pub first: Tensor,
    second: Tensor,
    third: Tensor,
    step: i32,
    /// The epsilon of the parameter's dtype.
    epsilon: f64,
}

fn rms(numbers: &Tensor) -> f64 {
    numbers.square().mean(F64).sqrt().double_value(&[])
}

/// The iteration of Muon's paper, without turning tall matrices.
fn orthogonalized(momentum: &Tensor, muon: &Muon) -> Tensor {
    let mut x = momentum / momentum.norm().clamp_min(muon.eps);
    let (a, b, c) = muon.ns_coefficients;
    for _ in 0..muon.ns_steps {
        let gram = x.matmul(&x.tr());
        x = &x * a + (&gram * b + gram.matmul(&gram) * c).matmul(&x);
    }
    x
}

impl Plain {
    /// A copy of a parameter, without a state.
    pub fn new(parameter: &Tensor) -> Self {
        let value = parameter.detach().to_device(Device::Cpu).to_kind(F64).contiguous().copy();
        let [first, second, third] = [(); 3].map(|()| value.zeros_like());
        let epsilon = match parameter.kind() {
            Kind::Double => f64::EPSILON,
            _ => f32::EPSILON.into(),
        };
        Self { value, first, second, third, step: 0, epsilon }
    }

    /// Takes a step with a gradient in f64.
    pub fn step(&mut self, algorithm: impl Into<Algorithm>, lr: f64, gradient: &Tensor) {
        self.step += 1;
        let step = f64::from(self.step);
        let signed = |maximize: bool| if maximize { -gradient } else { gradient.shallow_clone() };
        match algorithm.into() {
            Algorithm::AdamW(AdamW { betas, eps, weight_decay, amsgrad, maximize, .. }) => {
                self.value *= 1.0 - lr * weight_decay;
                self.adam(&signed(maximize), lr, betas, eps, amsgrad);
            }
            Algorithm::Adam(Adam { betas, eps, weight_decay, amsgrad, maximize, .. }) => {
                let gradient = signed(maximize) + &self.value * weight_decay;
                self.adam(&gradient, lr, betas, eps, amsgrad);
            }
            Algorithm::Sgd(Sgd {
                momentum, dampening, weight_decay, nesterov, maximize, ..
            }) => {
                let gradient = signed(maximize) + &self.value * weight_decay;
                self.first = match self.step {
                    1 => gradient.copy(),
                    _ => &self.first * momentum + &gradient * (1.0 - dampening),
                };
                let along = match (momentum == 0.0, nesterov) {
                    (true, _) => gradient,
                    (_, true) => gradient + &self.first * momentum,
                    (_, false) => self.first.shallow_clone(),
                };
                self.value -= along * lr;
            }
            Algorithm::Adagrad(config) => {
                let Adagrad { lr_decay, weight_decay, eps, maximize, .. } = config;
                let gradient = signed(maximize) + &self.value * weight_decay;
                if self.step == 1 {
                    self.first += config.initial_accumulator_value;
                }
                self.first += gradient.square();
                let lr = lr / (1.0 + (step - 1.0) * lr_decay);
                self.value -= gradient * lr / (self.first.sqrt() + eps);
            }
            Algorithm::RmsProp(config) => {
                let RmsProp { alpha, eps, weight_decay, momentum, centered, maximize, .. } = config;
                let gradient = signed(maximize) + &self.value * weight_decay;
                self.second = &self.second * alpha + gradient.square() * (1.0 - alpha);
                self.third = &self.third * alpha + &gradient * (1.0 - alpha);
                let mean = if centered { self.third.copy() } else { self.third.zeros_like() };
                let along = gradient / ((&self.second - mean.square()).sqrt() + eps);
                self.first = &self.first * momentum + along;
                self.value -= &self.first * lr;
            }
            Algorithm::Lion(Lion { betas, weight_decay, maximize, .. }) => {
                let gradient = signed(maximize);
                let along = &self.first * betas.0 + &gradient * (1.0 - betas.0);
                self.value -= (along.sign() + &self.value * weight_decay) * lr;
                self.first = &self.first * betas.1 + gradient * (1.0 - betas.1);
            }
            Algorithm::NAdam(config) => self.nadam(&config, lr, gradient),
            Algorithm::Adafactor(config) => self.adafactor(&config, lr, gradient),
            Algorithm::Muon(muon) if muon.use_muon && gradient.dim() == 2 => {
                self.muon(&muon, lr, gradient);
            }
            Algorithm::Muon(Muon { adamw, adamw_lr_factor, .. }) => {
                self.step -= 1;
                self.step(adamw, lr * adamw_lr_factor, gradient);
            }
            other => panic!("the tests know no {other:?}"),
        }
    }

    fn adam(&mut self, gradient: &Tensor, lr: f64, betas: (f64, f64), eps: f64, amsgrad: bool) {
        self.first = &self.first * betas.0 + gradient * (1.0 - betas.0);
        self.second = &self.second * betas.1 + gradient.square() * (1.0 - betas.1);
        self.third = self.third.maximum(&self.second);
        let square = if amsgrad { &self.third } else { &self.second };
        let correction1 = 1.0 - betas.0.powi(self.step);
        let correction2 = 1.0 - betas.1.powi(self.step);
        self.value -= &self.first * (lr / correction1) / ((square / correction2).sqrt() + eps);
    }

    fn nadam(&mut self, config: &NAdam, lr: f64, gradient: &Tensor) {
        let step = f64::from(self.step);
        let NAdam { betas, eps, weight_decay, momentum_decay, .. } = *config;
        let gradient = if config.maximize { -gradient } else { gradient.shallow_clone() };
        let gradient = if config.decoupled_weight_decay {
            self.value *= 1.0 - lr * weight_decay;
            gradient
        } else {
            gradient + &self.value * weight_decay
        };
        self.first = &self.first * betas.0 + &gradient * (1.0 - betas.0);
        self.second = &self.second * betas.1 + gradient.square() * (1.0 - betas.1);
        let momentum = |t: f64| betas.0 * (1.0 - 0.5 * 0.96f64.powf(t * momentum_decay));
        // An f32, as in PyTorch.
        let product: f32 = (1..=self.step).map(|t| momentum(t.into()) as f32).product();
        let product = f64::from(product);
        let (now, next) = (momentum(step), momentum(step + 1.0));
        let along = gradient * ((1.0 - now) / (1.0 - product))
            + &self.first * (next / (1.0 - product * next));
        let correction = 1.0 - betas.1.powf(step);
        self.value -= along * lr / ((&self.second / correction).sqrt() + eps);
    }

    fn muon(&mut self, muon: &Muon, lr: f64, gradient: &Tensor) {
        let momentum = muon.momentum;
        self.first = &self.first * momentum + gradient * (1.0 - momentum);
        let ahead = &self.first * momentum + gradient * (1.0 - momentum);
        let along = if muon.nesterov { &ahead } else { &self.first };
        let [rows, columns] = [0, 1].map(|dim| gradient.size()[dim] as f64);
        let rate = match muon.adjust_lr_fn {
            AdjustLr::MatchRmsAdamW => 0.2 * lr * rows.max(columns).sqrt(),
            _ => lr * (rows / columns).max(1.0).sqrt(),
        };
        let decayed = &self.value * (1.0 - lr * muon.weight_decay);
        self.value = decayed - orthogonalized(along, muon) * rate;
    }

    /// Of a matrix, or of each of several, the estimates of the squares are products of the means of rows and columns.
    fn adafactor(&mut self, config: &Adafactor, lr: f64, gradient: &Tensor) {
        let step = f64::from(self.step);
        let weight = step.powf(config.beta2_decay);
        let eps = config.eps.0.unwrap_or(self.epsilon);
        let squares = gradient.square();
        let estimates = if gradient.dim() < 2 {
            self.first = &self.first * (1.0 - weight) + squares * weight;
            self.first.shallow_clone()
        } else {
            let mean = |of: &Tensor, dim: i64| of.mean_dim([dim].as_slice(), true, F64);
            self.first = &self.first * (1.0 - weight) + mean(&squares, -1) * weight;
            self.second = &self.second * (1.0 - weight) + mean(&squares, -2) * weight;
            &self.first * &self.second / mean(&self.first, -2).clamp_min(eps)
        };
        let sign = if config.maximize { -1.0 } else { 1.0 };
        let updates = gradient * sign / estimates.clamp_min(eps * eps).sqrt();
        let rate = rms(&self.value).max(config.eps.1) * lr.min(step.powf(-0.5))
            / (rms(&updates) / config.d).max(1.0);
        self.value = &self.value * (1.0 - lr * config.weight_decay) - updates * rate;
    }
}
