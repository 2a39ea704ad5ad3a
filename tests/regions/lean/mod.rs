//! Losses and layers that keep less: their numbers beside autocast's and beside f64, their options beside plain loops,
//! and what a program may do with them.

mod graph;
mod linear_of;
mod memory;
mod numbers;
mod options;
mod refused;

use tch::{Device, Kind, Reduction, Tensor, no_grad};
use tch_amp::lean::{LinearCrossEntropyConfig, linear_cross_entropy};
use tch_amp::optim::AdamW;
use tch_amp::{Autocast, Error, GradScaler};

use testkit::bits::bits;
use testkit::rng::Rng;

/// Operands of a loss, in f32 unless they are cast.
struct Operands {
    hidden: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    targets: Tensor,
}

impl Operands {
    /// Random operands, as of a model that has learned something: most targets are likely.
    fn random(device: Device, [rows, width, classes]: [i64; 3], has_bias: bool) -> Self {
        let mut rng = Rng::new(u64::try_from(rows * 31 + width * 7 + classes).unwrap());
        let mut tensor = |size: &[i64], scale: f64| {
            let count = size.iter().product::<i64>();
            let values: Vec<f32> = (0..count)
                .map(|_| ((rng.below(20_001) as f64 / 10_000.0 - 1.0) * 1.7 * scale) as f32)
                .collect();
            Tensor::from_slice(&values).view(size).to_device(device)
        };
        let weight = tensor(&[classes, width], (width as f64).powf(-0.5));
        let bias = has_bias.then(|| tensor(&[classes], 0.5));
        let hidden = tensor(&[rows, width], 1.0);
        let likely = tensor(&[rows, 1], 0.5).abs() * (width as f64).sqrt();
        let places: Vec<i64> = (0..rows).map(|row| (row * 7919 + 13) % classes).collect();
        let targets = Tensor::from_slice(&places).to_device(device);
        let hidden = hidden + weight.index_select(0, &targets) * likely;
        Self { hidden, weight, bias, targets }.leaves()
    }

    fn leaves(self) -> Self {
        let leaf = |t: Tensor| t.detach().set_requires_grad(true);
        Self {
            hidden: leaf(self.hidden),
            weight: leaf(self.weight),
            bias: self.bias.map(leaf),
            targets: self.targets,
        }
    }

    /// The same numbers in another dtype, as leaves of their own.
    fn to(&self, kind: Kind) -> Self {
        let cast = |t: &Tensor| t.detach().to_kind(kind).copy();
        Self {
            hidden: cast(&self.hidden),
            weight: cast(&self.weight),
            bias: self.bias.as_ref().map(cast),
            targets: self.targets.shallow_clone(),
        }
        .leaves()
    }

    /// The same tensors with another input.
    fn with_hidden(&self, hidden: Tensor) -> Self {
        let [weight, targets] = [&self.weight, &self.targets].map(Tensor::shallow_clone);
        Self { hidden, weight, bias: self.bias.as_ref().map(Tensor::shallow_clone), targets }
    }

    fn loss(&self, config: &LinearCrossEntropyConfig) -> Tensor {
        let bias = self.bias.as_ref();
        linear_cross_entropy(&self.hidden, &self.weight, bias, &self.targets, config).unwrap()
    }

    /// The gradients of the operands, which are f64 then, and 0 where there is none.
    fn gradients(&self) -> Vec<Tensor> {
        [Some(&self.hidden), Some(&self.weight), self.bias.as_ref()]
            .into_iter()
            .flatten()
            .map(|leaf| {
                let grad = leaf.grad();
                let grad = if grad.defined() { grad } else { leaf.zeros_like() };
                no_grad(|| grad.to_kind(Kind::Double))
            })
            .collect()
    }
}

/// The loss as programs compute it: a linear layer, f32 logits, and `cross_entropy`.
fn usual(operands: &Operands, config: &LinearCrossEntropyConfig) -> Tensor {
    let logits = operands.hidden.linear(&operands.weight, operands.bias.as_ref());
    let wide = if logits.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let mut logits = logits.to_kind(wide);
    if let Some(cap) = config.soft_cap {
        logits = (logits / cap).tanh() * cap;
    }
    let flat = [-1, logits.size().last().copied().unwrap()];
    let logits = logits.view(flat);
    let targets = operands.targets.view(-1);
    let weights = config.class_weights.as_ref().map(|weights| weights.to_kind(wide));
    let loss = logits.cross_entropy_loss(
        &targets,
        weights.as_ref(),
        config.reduction,
        config.ignore_index,
        config.label_smoothing,
    );
    if config.z_loss == 0.0 {
        return loss;
    }
    let kept = targets.not_equal(config.ignore_index).to_kind(wide);
    let sizes = logits.logsumexp([1], false).square() * config.z_loss * &kept;
    match config.reduction {
        Reduction::None => loss + sizes,
        Reduction::Sum => loss + sizes.sum(wide),
        _ => loss + sizes.sum(wide) / kept.sum(wide),
    }
}

/// The region of a dtype; none for f32 and f64.
fn region(device: Device, kind: Kind) -> Autocast {
    let is_half = matches!(kind, Kind::Half | Kind::BFloat16);
    let region = Autocast::new(device).enabled(is_half);
    if is_half { region.dtype(kind) } else { region }
}

/// Why a call is refused.
fn refusal(result: Result<Tensor, Error>) -> String {
    match result {
        Err(error @ Error::InvalidArgument { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

fn assert_same_bits(ours: &[Tensor], theirs: &[Tensor], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (place, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        assert_eq!(bits(ours), bits(theirs), "{what}: {place}");
    }
}

/// Asserts that the relative difference of each tensor is less than `most`.
fn assert_near(ours: &[Tensor], theirs: &[Tensor], most: f64, what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (place, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        let apart = relative(ours, theirs);
        assert!(apart < most, "{what}: {place}: {apart}");
    }
}

/// Asserts that a loss makes gradients with which an optimizer of the weight takes no step.
fn assert_skipped(loss: &Tensor, weight: &Tensor, what: &str) {
    let mut scaler = GradScaler::new(weight.device()).unwrap();
    let mut optimizer = AdamW::default().build(&[weight.shallow_clone()], 0.1).unwrap();
    let before = weight.detach().copy();
    scaler.backward(loss).unwrap();
    assert!(scaler.step(&mut optimizer).unwrap().is_skipped().unwrap(), "{what}");
    scaler.update().unwrap();
    assert_eq!(bits(weight), bits(&before), "{what}");
}

/// The relative difference of two tensors in the norm of the second; 0 if both are 0.
fn relative(a: &Tensor, b: &Tensor) -> f64 {
    let [difference, norm] = [&(a.to_kind(Kind::Double) - b), b]
        .map(|t| t.to_kind(Kind::Double).norm().double_value(&[]));
    if difference == 0.0 { 0.0 } else { difference / norm }
}
