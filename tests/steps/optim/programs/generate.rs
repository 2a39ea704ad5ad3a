//! Generates random programs: an algorithm with options, parameters in groups, and the gradients of each step.

use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tch_amp::optim::{
    Adafactor, Adagrad, Adam, AdamW, AdjustLr, Algorithm, Lion, Muon, NAdam, ParamGroup, RmsProp,
    Sgd,
};

use testkit::bits::hex;
use testkit::rng::Rng;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    Contiguous,
    Transposed,
    ChannelsLast,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Without a scaler.
    Plain,
    /// `step`.
    Scaler,
    /// `unscale_`, then `step`.
    Unscale,
    /// `step_clip_norm`.
    Clip,
    /// A transaction that clips.
    Transaction,
}

#[derive(Debug)]
pub struct Parameter {
    pub kind: Kind,
    pub shape: Vec<i64>,
    pub layout: Layout,
    pub group: usize,
    pub values: Tensor,
}

#[derive(Debug)]
pub struct Step {
    pub grads: Vec<Option<Tensor>>,
    pub overflow: bool,
    pub lr: Option<f64>,
    pub max_norm: f64,
    /// Saves the state and loads it into a new optimizer before this step.
    pub reload: bool,
}

#[derive(Debug)]
pub struct Program {
    pub groups: Vec<ParamGroup>,
    pub params: Vec<Parameter>,
    pub mode: Mode,
    pub scale: f64,
    pub steps: Vec<Step>,
}

pub fn program(seed: u64) -> Program {
    let rng = &mut Rng::new(seed);
    let mode =
        *rng.pick(&[Mode::Plain, Mode::Scaler, Mode::Unscale, Mode::Clip, Mode::Transaction]);
    let which = rng.below(ALGORITHMS);
    let initial = *rng.pick(&[0.0, 0.5]);
    let mut groups: Vec<_> = (0..=rng.below(3))
        .map(|_| ParamGroup::new(magnitude(rng, -1.0), algorithm(which, initial, rng)))
        .collect();
    let scale = *rng.pick(&[1.0, 2.0, 65536.0, 1000.0, 3.7, 0.4]);
    let params: Vec<_> =
        (0..1 + rng.below(6)).map(|i| parameter(rng, groups.len(), which, mode, i == 0)).collect();
    for group in &mut groups {
        // PyTorch takes the epsilon of the first parameter's dtype for all of a group.
        if let Algorithm::Adafactor(config) = &mut group.algorithm
            && params.iter().any(|p| p.kind == Kind::Double)
        {
            config.eps.0.get_or_insert(1e-3);
        }
    }
    let steps = (0..1 + rng.below(6)).map(|_| step(rng, &params, mode, scale, which)).collect();
    Program { groups, params, mode, scale, steps }
}

/// How many algorithms there are.
pub const ALGORITHMS: usize = 9;

/// Those that PyTorch has no fused version of, and unscales for in a separate pass, which rounds.
fn is_composed(which: usize) -> bool {
    [4, 5, 7, 8].contains(&which)
}

/// A positive number of at most 10 to the power of `highest`.
pub fn magnitude(rng: &mut Rng, highest: f64) -> f64 {
    10f64.powf(highest - rng.below(40) as f64 / 10.0)
}

pub fn algorithm(which: usize, initial_accumulator_value: f64, rng: &mut Rng) -> Algorithm {
    let betas = (*rng.pick(&[0.9, 0.5, 0.3, 0.0, 0.95]), *rng.pick(&[0.999, 0.99, 0.5, 0.0]));
    let eps = *rng.pick(&[1e-8, 1e-3, 1e-10]);
    let weight_decay = if rng.one_in(2) { 0.0 } else { magnitude(rng, 0.0) };
    let (amsgrad, maximize) = (rng.one_in(3), rng.one_in(4));
    let momentum = *rng.pick(&[0.0, 0.9, 0.5]);
    let nesterov = momentum > 0.0 && rng.one_in(2);
    let dampening = if nesterov { 0.0 } else { *rng.pick(&[0.0, 0.3]) };
    let lr_decay = *rng.pick(&[0.0, 0.1]);
    match which {
        0 => AdamW { betas, eps, weight_decay, amsgrad, maximize }.into(),
        1 => Adam { betas, eps, weight_decay, amsgrad, maximize }.into(),
        2 => Sgd { momentum, dampening, weight_decay, nesterov, maximize }.into(),
        3 => Adagrad { lr_decay, weight_decay, initial_accumulator_value, eps, maximize }.into(),
        4 => {
            // With 0, a centered one divides by nothing but `eps`, and the sign of a zero depends on its place.
            let alpha = if amsgrad { betas.1.max(0.5) } else { betas.1 };
            RmsProp { alpha, eps, weight_decay, momentum, centered: amsgrad, maximize }.into()
        }
        5 => Lion { betas, weight_decay, maximize }.into(),
        7 => {
            let (momentum_decay, decoupled_weight_decay) = (*rng.pick(&[4e-3, 0.0, 0.5]), amsgrad);
            // With 0, the sign of a zero in the average depends on its place.
            let betas = (betas.0.max(0.3), betas.1);
            let own = NAdam { betas, eps, weight_decay, momentum_decay, ..Default::default() };
            NAdam { decoupled_weight_decay, maximize, ..own }.into()
        }
        8 => {
            let (beta2_decay, d) = (*rng.pick(&[-0.8, -0.5, 0.0]), *rng.pick(&[1.0, 1.5]));
            let eps = (*rng.pick(&[None, Some(1e-3)]), *rng.pick(&[1e-3, 0.5]));
            Adafactor { beta2_decay, eps, d, weight_decay, maximize }.into()
        }
        _ => {
            let adamw = AdamW { betas, eps, weight_decay, amsgrad, ..Default::default() };
            muon(rng, adamw).into()
        }
    }
}

fn muon(rng: &mut Rng, adamw: AdamW) -> Muon {
    Muon {
        // With 0, the sign of a zero in the buffer depends on its place.
        momentum: *rng.pick(&[0.95, 0.3, 0.7]),
        nesterov: rng.one_in(2),
        weight_decay: if rng.one_in(2) { 0.0 } else { magnitude(rng, 0.0) },
        ns_coefficients: *rng.pick(&[(3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)]),
        ns_steps: *rng.pick(&[5, 3, 1, 0]),
        eps: *rng.pick(&[1e-7, 0.5]),
        adjust_lr_fn: *rng.pick(&[AdjustLr::Original, AdjustLr::MatchRmsAdamW]),
        use_muon: !rng.one_in(4),
        adamw,
        adamw_lr_factor: *rng.pick(&[1.0, 0.1, 0.015]),
    }
}

fn parameter(rng: &mut Rng, groups: usize, which: usize, mode: Mode, first: bool) -> Parameter {
    // libtorch's fused SGD and Adagrad round options to bf16 and fp16, or skip elements; this crate's do neither. This
    // crate does not round the gradient between unscaling and clipping either.
    let kinds = [Kind::Float, Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];
    let allowed = match mode {
        // An f64 norm depends on the order of its sum. A single f32 gradient makes it f32.
        Mode::Clip | Mode::Transaction if first => 2,
        _ if which == 2 || which == 3 => 3,
        Mode::Clip => 3,
        Mode::Scaler if is_composed(which) => 3,
        // PyTorch's `unscale_` refuses fp16 gradients.
        Mode::Unscale | Mode::Transaction => 4,
        Mode::Plain | Mode::Scaler => 5,
    };
    let kind = kinds[rng.below(allowed)];
    let (shape, layout) = match rng.below(8) {
        0 => (vec![], Layout::Contiguous),
        // PyTorch's Adafactor divides by the number of elements.
        1 if which != 8 => (vec![0, 3], Layout::Contiguous),
        2 => (vec![5, 7], Layout::Transposed),
        3 => (vec![2, 3, 4, 5], Layout::ChannelsLast),
        4 => (vec![40 + rng.below(30) as i64], Layout::Contiguous),
        // Large enough for the products that libtorch leaves to oneDNN.
        5 if which == 6 => {
            (vec![16 + rng.below(30) as i64, 16 + rng.below(30) as i64], any_order(rng))
        }
        _ => (vec![1 + rng.below(6) as i64, 1 + rng.below(20) as i64], Layout::Contiguous),
    };
    let values = numbers(rng, &shape, kind, 1.0);
    Parameter { kind, shape, layout, group: rng.below(groups), values }
}

fn any_order(rng: &mut Rng) -> Layout {
    *rng.pick(&[Layout::Contiguous, Layout::Transposed])
}

fn step(rng: &mut Rng, params: &[Parameter], mode: Mode, scale: f64, which: usize) -> Step {
    let factor = if mode == Mode::Plain { 1.0 } else { scale };
    // PyTorch's SGD fails if only some of its momentum buffers exist.
    let missing = which != 2;
    let mut grads: Vec<_> = params
        .iter()
        .map(|p| {
            let there = !(missing && rng.one_in(6));
            let factor = factor * magnitude(rng, 0.5);
            there.then(|| numbers(rng, &p.shape, p.kind, factor))
        })
        .collect();
    let clips = matches!(mode, Mode::Clip | Mode::Transaction);
    if clips || grads.iter().all(Option::is_none) {
        grads[0] = Some(numbers(rng, &params[0].shape, params[0].kind, factor));
    }
    let mut overflow = false;
    if mode != Mode::Plain && rng.one_in(4) {
        let filled = grads.iter_mut().flatten().filter(|grad| grad.numel() > 0);
        let filled: Vec<_> = filled.collect();
        if !filled.is_empty() {
            let grad = rng.below(filled.len());
            let place = rng.below(filled[grad].numel()) as i64;
            let bad = *rng.pick(&[f64::INFINITY, f64::NEG_INFINITY, f64::NAN]);
            let _bad = filled[grad].view(-1).get(place).fill_(bad);
            overflow = true;
        }
    }
    let lr = rng.one_in(4).then(|| magnitude(rng, -1.0));
    let max_norm = *rng.pick(&[0.1, 1.0, 10.0, 1e6]);
    Step { grads, overflow, lr, max_norm, reload: rng.one_in(5) }
}

/// Numbers of both signs, some of them zero.
pub fn numbers(rng: &mut Rng, shape: &[i64], kind: Kind, factor: f64) -> Tensor {
    let count: i64 = shape.iter().product();
    let one = |rng: &mut Rng| {
        let unit = rng.below(1 << 24) as f64 / f64::from(1 << 23) - 1.0;
        if rng.one_in(30) { 0.0 } else { unit }
    };
    // An fp16 number must not overflow by itself.
    let factor = if kind == Kind::Half { factor.min(1e4) } else { factor };
    let values: Vec<f64> = (0..count).map(|_| one(rng) * factor).collect();
    Tensor::from_slice(&values).reshape(shape).to_kind(kind).to_device(Device::Cpu)
}

impl Program {
    pub fn summary(&self) -> String {
        let params: Vec<_> =
            self.params.iter().map(|p| (p.kind, &p.shape, p.layout, p.group)).collect();
        format!("{:?} {:?}\n{params:?} scale {}", self.mode, self.groups, self.scale)
    }

    /// The text for the oracle, where `gpus` GPUs hold the parameters in turn.
    pub fn json(&self, gpus: usize) -> Value {
        let params = self.params.iter().map(|p| {
            let dtype = match p.kind {
                Kind::Double => "f64",
                Kind::BFloat16 => "bf16",
                Kind::Half => "f16",
                _ => "f32",
            };
            let layout = match p.layout {
                Layout::Contiguous => "contiguous",
                Layout::Transposed => "transposed",
                Layout::ChannelsLast => "channels_last",
            };
            let values = hex(&p.values);
            json!({"dtype": dtype, "shape": p.shape, "layout": layout, "group": p.group, "values": values})
        });
        let steps = self.steps.iter().map(|s| {
            let grads: Vec<_> = s.grads.iter().map(|grad| grad.as_ref().map(hex)).collect();
            json!({"grads": grads, "overflow": s.overflow, "lr": s.lr, "max_norm": s.max_norm})
        });
        let mode = match self.mode {
            Mode::Plain => "plain",
            Mode::Scaler => "scaler",
            Mode::Unscale => "unscale",
            Mode::Clip => "clip",
            Mode::Transaction => "transaction",
        };
        let mut groups = json!(self.groups);
        let mut algorithm = Value::Null;
        for group in groups.as_array_mut().unwrap() {
            algorithm = group.as_object_mut().unwrap().remove("algorithm").unwrap();
        }
        json!({
            "algorithm": algorithm,
            "groups": groups,
            "params": params.collect::<Vec<_>>(),
            "mode": mode,
            "gpus": gpus,
            "scale": self.scale,
            "steps": steps.collect::<Vec<_>>(),
        })
    }
}
