//! Generates random programs, determined by a seed.

use crate::scaler::programs::program::{
    Config, Dtype, How, Op, OptimizerSpec, ParamSpec, Program, Rule, Term,
};
use crate::scaler::programs::writer::Writer;
use testkit::rng::Rng;

pub const OPS: usize = 50;

/// The program of `seed`.
pub fn program(seed: u64) -> Program {
    let mut rng = Rng::new(seed);
    if rng.one_in(10) {
        return turns(&mut rng);
    }
    let optimizers = optimizers(&mut rng);
    let enabled = !rng.one_in(24);
    let config = config(&mut rng);
    let mut writer = Writer::new(rng, &optimizers, enabled);
    let ops = (0..OPS).map(|_| writer.op()).collect();
    Program { enabled, config, optimizers, ops }
}

/// Two optimizers, of which the second steps every few iterations with the gradients of all of them, while the scale
/// stands still.
fn turns(rng: &mut Rng) -> Program {
    let optimizers: Vec<_> = (0..2)
        .map(|_| OptimizerSpec { rule: rule(rng), params: vec![param(rng, false)] })
        .collect();
    let (init_scale, growth_interval) = (*rng.pick(&[8.0, 1024.0, 65536.0]), 2000);
    let config = Config { init_scale, growth_interval, ..config(rng) };
    let mut ops = Vec::new();
    let (every, mut iteration) = (2 + rng.below(3), 0);
    while ops.len() < OPS {
        ops.push(Op::ZeroGrad { optimizer: 0 });
        let terms = optimizers.iter().enumerate().map(|(param, optimizer)| {
            let length = match &optimizer.params[0] {
                ParamSpec::New { eighths, .. } => eighths.len(),
                ParamSpec::Shared(_) => unreachable!("no parameter is shared"),
            };
            Term { param, eighths: eighths(rng, length) }
        });
        let terms = terms.collect();
        ops.push(Op::Backward { how: *rng.pick(&[How::Backward, How::Scale, How::Each]), terms });
        ops.push(Op::Step { optimizer: 0 });
        iteration += 1;
        if iteration % every == 0 {
            if rng.one_in(2) {
                ops.push(Op::Unscale { optimizer: 1 });
            }
            ops.push(Op::Step { optimizer: 1 });
            ops.push(Op::ZeroGrad { optimizer: 1 });
        }
        ops.push(Op::Update);
    }
    ops.truncate(OPS);
    Program { enabled: true, config, optimizers, ops }
}

pub fn config(rng: &mut Rng) -> Config {
    Config {
        init_scale: scale(rng),
        growth_factor: *rng.pick(&[2.0, 2.0, 4.0, 1.5, 1.0001, 1e30]),
        backoff_factor: *rng.pick(&[0.5, 0.5, 0.25, 0.9, 0.1, 1e-30]),
        growth_interval: *rng.pick(&[1, 1, 2, 3, 5, 2000]),
    }
}

/// Usual scales, scales for which multiplication rounds, and the largest and smallest with which f32 can scale.
pub fn scale(rng: &mut Rng) -> f64 {
    const USUAL: [f64; 6] = [65536.0, 65536.0, 1.0, 8.0, 1024.0, 16_777_216.0];
    const ODD: [f64; 6] = [3.0, 1000.7, 0.1, 12_345.678, 1e20, 7e-10];
    match rng.below(8) {
        0 => *rng.pick(&ODD),
        1 => 2f64.powi(rng.below(40) as i32 - 126),
        2 => 2f64.powi(rng.below(20) as i32 + 108),
        3 => 2f64.powi(rng.below(60) as i32 - 30),
        _ => *rng.pick(&USUAL),
    }
}

fn optimizers(rng: &mut Rng) -> Vec<OptimizerSpec> {
    if rng.one_in(3) {
        return sharing(rng);
    }
    let count = if rng.one_in(3) { 2 } else { 1 };
    (0..count)
        .map(|_| {
            let rule = rule(rng);
            // AdamW is compared only in f32 and f64: see adamw.rs.
            let narrow = matches!(rule, Rule::Sgd { .. });
            let params = (0..1 + rng.below(3 - count + 1)).map(|_| param(rng, narrow)).collect();
            OptimizerSpec { rule, params }
        })
        .collect()
}

/// Two or three optimizers: with one list, with lists that overlap, and with lists of their own.
fn sharing(rng: &mut Rng) -> Vec<OptimizerSpec> {
    let mut known = 1 + rng.below(3);
    let first = (0..known).map(|_| param(rng, false)).collect();
    let mut optimizers = vec![OptimizerSpec { rule: rule(rng), params: first }];
    for _ in 0..1 + rng.below(2) {
        let mut shared: Vec<_> = (0..known).map(ParamSpec::Shared).collect();
        match rng.below(8) {
            0..4 => shared.truncate(optimizers[0].params.len()),
            4 => shared.reverse(),
            5 => drop(shared.remove(rng.below(known))),
            6 => shared.clear(),
            _ => {}
        }
        if shared.is_empty() || rng.one_in(4) {
            shared.push(param(rng, false));
            known += 1;
        }
        optimizers.push(OptimizerSpec { rule: rule(rng), params: shared });
    }
    optimizers
}

fn rule(rng: &mut Rng) -> Rule {
    let lr = *rng.pick(&[0.125, 0.01, 1.0]);
    if rng.one_in(5) {
        return Rule::AdamW { lr, beta1: 0.9, beta2: 0.999, weight_decay: *rng.pick(&[0.0, 0.01]) };
    }
    // Exact in bf16, because the C++ optimizer rounds the momentum to bf16 and Python's does not.
    let momentum = *rng.pick(&[0.0, 0.0, 0.875, 0.5]);
    let nesterov = momentum > 0.0 && rng.one_in(3);
    let dampening = if nesterov { 0.0 } else { *rng.pick(&[0.0, 0.0, 0.25]) };
    Rule::Sgd { lr, momentum, dampening, weight_decay: *rng.pick(&[0.0, 0.0, 0.1]), nesterov }
}

fn param(rng: &mut Rng, narrow: bool) -> ParamSpec {
    let dtype = match rng.below(8) {
        0 => Dtype::Double,
        1 if narrow => Dtype::BFloat16,
        _ => Dtype::Float,
    };
    let length = 1 + rng.below(5);
    ParamSpec::New { dtype, eighths: eighths(rng, length) }
}

pub fn eighths(rng: &mut Rng, length: usize) -> Vec<i32> {
    (0..length).map(|_| (rng.eighth() * 8.0) as i32).collect()
}
