//! The same training as a plain loop in f64, without the crate: libtorch's autograd for the gradients, and formulas for
//! all that follows.

use tch::{Kind, Reduction, Tensor, no_grad};
use tch_amp::lean::NormKind;

use crate::pairs::abilities::Ability::*;
use crate::pairs::program::{
    CLASSES, GAMMA, GROWTH_INTERVAL, INIT_SCALE, ITERATIONS, LENGTH, MAX_NORM, MAX_VALUE, MOMENTUM,
    Mask, NORM_EPS, PENALTY, Program, ROWS,
};

const F64: Kind = Kind::Double;

/// What a training has come to.
#[derive(Debug)]
pub struct Outcome {
    /// The parameters in the order of their program, then the weight of the second optimizer.
    pub weights: Vec<Tensor>,
    /// The averages of the parameters.
    pub averages: Vec<Tensor>,
    pub taken: u64,
    pub skipped: u64,
    pub scale: f64,
    pub lr: f64,
    /// The largest gradient before clipping by value, relative to the largest after it.
    pub largest: f64,
}

struct Parameter {
    tensor: Tensor,
    first: Tensor,
    second: Tensor,
    average: Tensor,
}

/// The output for some rows of the batch.
fn forward(program: &Program, p: &[Parameter], x: &Tensor, from: i64, rows: i64) -> Tensor {
    let x = x.narrow(0, from, rows);
    let [up, down, bias] = [0, 1, 2].map(|i| &p[i].tensor);
    let x = match program.attends() {
        false => x,
        true => {
            let (queries, keys) = (x.matmul(&p[3].tensor), x.matmul(&p[4].tensor));
            let scores = queries.matmul(&keys.transpose(-2, -1)) / (program.width() as f64).sqrt();
            let allowed = Tensor::ones([LENGTH, LENGTH], (Kind::Bool, x.device())).tril(0);
            let scores = match (program.mask, program.mask().map(|mask| mask.narrow(0, from, rows)))
            {
                (Mask::Causal, _) => scores.masked_fill(&allowed.logical_not(), f64::NEG_INFINITY),
                (Mask::Boolean, Some(mask)) => {
                    scores.masked_fill(&mask.logical_not(), f64::NEG_INFINITY)
                }
                (_, Some(mask)) => scores + mask.to_kind(F64),
                (_, None) => scores,
            };
            scores.softmax(-1, F64).matmul(&x)
        }
    };
    let hidden = match program.has(LeanLayers) {
        false => x.matmul(up).tanh(),
        true => {
            let (width, none) = (program.width(), None::<&Tensor>);
            let normalized = match program.norm() {
                NormKind::Layer => x.layer_norm([width], none, none, NORM_EPS, false),
                NormKind::Rms => x.rms_norm([width], none, NORM_EPS),
            };
            normalized.matmul(up).silu()
        }
    };
    hidden.matmul(down) + bias
}

/// The gradients of the parameters: the means of those of the parts, each of which has its own penalty.
fn gradients(program: &Program, p: &[Parameter], iteration: usize) -> Vec<Tensor> {
    let (x, t) = (program.input(iteration).to_kind(F64), program.target(iteration).to_kind(F64));
    let (parts, rows) = (program.parts(), ROWS / program.parts());
    let leaves: Vec<_> = p.iter().map(|p| p.tensor.shallow_clone()).collect();
    let none = None::<&Tensor>;
    let part = |part: i64| {
        let y = forward(program, p, &x, part * rows, rows);
        let squares = (&y - t.narrow(0, part * rows, rows)).square();
        let mut loss = squares.mean(F64);
        if program.has(Lean) {
            let logits =
                y.matmul(&p[p.len() - 1].tensor.transpose(0, 1)).view([-1, program.hidden()]);
            let labels = program.labels().narrow(0, part * rows, rows).reshape([-1]);
            let classes = logits.cross_entropy_loss(&labels, none, Reduction::Mean, -100, 0.0);
            loss += classes * CLASSES;
            let kept = labels.not_equal(-100).to_kind(F64);
            let sizes = (logits.logsumexp([-1], false).square() * &kept).sum(F64) / kept.sum(F64);
            loss += sizes * (program.z_loss() * CLASSES);
        }
        let loss = loss * program.factors[iteration];
        if !program.has(Penalty) {
            return Tensor::run_backward(&[loss], &leaves, false, false);
        }
        let first = Tensor::run_backward(&[&loss], &leaves, true, true);
        let penalty: Tensor = first.iter().map(|g| g.square().sum(F64)).sum();
        Tensor::run_backward(&[loss + penalty * PENALTY], &leaves, false, false)
    };
    let sum =
        |sums: Vec<Tensor>, next: Vec<Tensor>| sums.iter().zip(&next).map(|(a, b)| a + b).collect();
    let sums = (0..parts).map(part).reduce(sum).unwrap_or_default();
    sums.into_iter().map(|sum| sum / parts).collect()
}

fn clipped(program: &Program, gradients: Vec<Tensor>) -> Vec<Tensor> {
    if program.has(ClipValue) {
        return gradients.iter().map(|g| g.clamp(-MAX_VALUE, MAX_VALUE)).collect();
    }
    if !program.has_any(&[ClipNorm, UnlessSpike, UnscaleAndClip]) {
        return gradients;
    }
    let norm = gradients.iter().map(|g| g.square().sum(F64).double_value(&[])).sum::<f64>().sqrt();
    let factor = (MAX_NORM / (norm + 1e-6)).min(1.0);
    gradients.iter().map(|g| g * factor).collect()
}

/// The nearest matrix whose columns or rows are orthonormal, as Muon's five iterations approximate it.
fn orthogonal(matrix: &Tensor) -> Tensor {
    let [rows, columns] = [matrix.size()[0], matrix.size()[1]];
    let mut x = if rows > columns { matrix.transpose(0, 1) } else { matrix.shallow_clone() };
    x /= x.norm().clamp_min(1e-7);
    for _ in 0..5 {
        let gram = x.matmul(&x.transpose(0, 1));
        x = &x * 3.4445 + (&gram * -4.775 + gram.matmul(&gram) * 2.0315).matmul(&x);
    }
    if rows > columns { x.transpose(0, 1) } else { x }
}

fn adamw(p: &mut Parameter, g: &Tensor, lr: f64, step: i32, weight_decay: f64) -> Tensor {
    p.first = &p.first * 0.9 + g * 0.1;
    p.second = &p.second * 0.999 + g.square() * 0.001;
    let (first, second) = (1.0 - 0.9f64.powi(step), 1.0 - 0.999f64.powi(step));
    &p.tensor * (1.0 - lr * weight_decay)
        - &p.first * (lr / first) / ((&p.second / second).sqrt() + EPS)
}

fn nadam(p: &mut Parameter, g: &Tensor, lr: f64, step: i32) -> Tensor {
    p.first = &p.first * 0.9 + g * 0.1;
    p.second = &p.second * 0.999 + g.square() * 0.001;
    let momentum = |step: i32| 0.9 * (1.0 - 0.5 * 0.96f64.powf(f64::from(step) * 4e-3));
    let product: f64 = (1..=step).map(momentum).product();
    let (now, next) = (momentum(step), momentum(step + 1));
    let along = g * ((1.0 - now) / (1.0 - product)) + &p.first * (next / (1.0 - product * next));
    &p.tensor - along * lr / ((&p.second / (1.0 - 0.999f64.powi(step))).sqrt() + EPS)
}

fn adafactor(p: &mut Parameter, g: &Tensor, lr: f64, step: i32) -> Tensor {
    let weight = f64::from(step).powf(-0.8);
    let rms = |t: &Tensor| t.square().mean(F64).sqrt().double_value(&[]);
    let squares = if g.dim() < 2 {
        p.first = &p.first * (1.0 - weight) + g.square() * weight;
        p.first.shallow_clone()
    } else {
        let mean = |dim: i64| g.square().mean_dim([dim].as_slice(), true, F64);
        p.first = &p.first * (1.0 - weight) + mean(-1) * weight;
        p.second = &p.second * (1.0 - weight) + mean(-2) * weight;
        &p.first * &p.second / p.first.mean_dim([-2i64].as_slice(), true, F64).clamp_min(EPS)
    };
    let update = g / squares.clamp_min(EPS * EPS).sqrt();
    let rate = rms(&p.tensor).max(1e-3) * lr.min(f64::from(step).powf(-0.5));
    &p.tensor - &update * (rate / rms(&update).max(1.0))
}

/// Large enough that a gradient near zero does not decide about a whole step.
pub const EPS: f64 = 1e-2;

fn step(program: &Program, p: &mut Parameter, g: &Tensor, lr: f64, taken: i32) {
    let next = if program.uses_adamw() {
        adamw(p, g, lr, taken, 0.01)
    } else if program.has(Muon) && g.dim() == 2 {
        p.first = &p.first * 0.95 + g * 0.05;
        let momentum = g * 0.05 + &p.first * 0.95;
        let [rows, columns] = [g.size()[0] as f64, g.size()[1] as f64];
        let lr_of_shape = lr * (rows / columns).max(1.0).sqrt();
        &p.tensor * (1.0 - lr * 0.1) - orthogonal(&momentum) * lr_of_shape
    } else if program.has(Muon) {
        adamw(p, g, lr, taken, 0.01)
    } else if program.has(NAdam) {
        nadam(p, g, lr, taken)
    } else if program.has(Adafactor) {
        adafactor(p, g, lr, taken)
    } else {
        p.first = if taken == 1 { g.copy() } else { &p.first * MOMENTUM + g };
        &p.tensor - &p.first * lr
    };
    p.tensor = next.detach().set_requires_grad(true);
    p.average = &p.average + (&p.tensor - &p.average).detach() / f64::from(taken);
}

/// The loss of the second optimizer: its weight moves towards one.
pub const SECOND_LR: f64 = 0.1;

pub fn train(program: &Program) -> Outcome {
    let start = |(name, size): &(&str, Vec<i64>)| {
        let tensor = program.start(name, size).to_kind(F64).set_requires_grad(true);
        let zeros = || tensor.detach().zeros_like();
        Parameter { first: zeros(), second: zeros(), average: zeros(), tensor }
    };
    let mut parameters: Vec<_> = program.parameters().iter().map(start).collect();
    let (mut taken, mut skipped, mut lr) = (0, 0, program.lr());
    let (mut scale, mut tracker, mut largest) = (INIT_SCALE, 0, 1f64);
    let mut second = Tensor::zeros([3], (F64, tch::Device::Cpu));
    for iteration in 0..ITERATIONS {
        if program.has(SecondOptimizer) {
            second = &second - (&second - 1.0) * (2.0 / 3.0 * SECOND_LR);
        }
        if program.overflows(iteration) {
            skipped += 1;
            (scale, tracker) = (scale / 2.0, 0);
            continue;
        }
        let whole = gradients(program, &parameters, iteration);
        let top = |all: &[Tensor]| {
            all.iter().map(|g| g.abs().max().double_value(&[])).fold(0.0, f64::max)
        };
        let top_of_whole = top(&whole);
        let gradients = clipped(program, whole);
        if program.has(ClipValue) {
            largest = largest.max(top_of_whole / top(&gradients));
        }
        taken += 1;
        no_grad(|| {
            let pairs = parameters.iter_mut().zip(&gradients);
            pairs.for_each(|(p, g)| step(program, p, g, lr, taken));
        });
        if program.has(Schedule) {
            lr *= GAMMA;
        }
        tracker += 1;
        if tracker == GROWTH_INTERVAL {
            (scale, tracker) = (scale * 2.0, 0);
        }
    }
    let mut weights: Vec<_> = parameters.iter().map(|p| p.tensor.detach()).collect();
    if program.has(SecondOptimizer) {
        weights.push(second);
    }
    let averages = parameters.into_iter().map(|p| p.average).collect();
    let scale = if program.scales() { scale } else { 1.0 };
    Outcome { weights, averages, taken: taken as u64, skipped, scale, lr, largest }
}
