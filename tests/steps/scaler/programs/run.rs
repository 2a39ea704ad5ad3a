//! Runs programs with tch-amp and answers in the oracle's form.

use std::fmt::Write as _;

use tch::{Device, Tensor, no_grad};
use tch_amp::scaler::{GradScalerConfig, GradScalerState, Unscaled};
use tch_amp::{GradScaler, Result};

use crate::scaler::programs::answer::{told, word, write_bits, write_hex};
use crate::scaler::programs::optimizer::{Optimizer, drop_gradient};
use crate::scaler::programs::program::{Clip, Config, How, Op, Program, Term, from_eighths};

/// A model, its optimizers and a scaler, which is on `device`.
#[derive(Debug)]
pub struct Machine {
    enabled: bool,
    device: Device,
    scaler: GradScaler,
    params: Vec<Tensor>,
    optimizers: Vec<Optimizer>,
    before: String,
}

impl Machine {
    /// Assigns the optimizers with their parameters to the devices in turn. The scaler is on the first device.
    pub fn new(program: &Program, devices: &[Device]) -> Self {
        // A shared parameter and all that is stepped with it are on one device.
        let devices = if program.shares() { &devices[..1] } else { devices };
        let placed = program.optimizers.iter().zip(devices.iter().cycle());
        let mut params = Vec::new();
        let optimizers = placed.map(|(spec, device)| Optimizer::new(spec, *device, &mut params));
        let optimizers = optimizers.collect();
        Self {
            enabled: program.enabled,
            device: devices[0],
            scaler: scaler(program.config, program.enabled, devices[0]),
            params,
            optimizers,
            before: String::new(),
        }
    }

    /// Performs `op`, if any, and returns the outcome, and the state if it has changed.
    pub fn answer(&mut self, op: Option<&Op>) -> String {
        let outcome = match op.map_or(Ok(None), |op| self.run(op)) {
            Ok(outcome) => outcome.unwrap_or_else(|| "ok".to_owned()),
            Err(error) => word(&error),
        };
        let state = self.state();
        if state == self.before {
            return format!("{outcome} =");
        }
        let answer = format!("{outcome} {state}");
        self.before = state;
        answer
    }

    fn state(&self) -> String {
        let mut out = String::new();
        let scaler = &self.scaler;
        let scale = scaler.get_scale().unwrap();
        assert_eq!(f64::from(scale as f32), scale, "the scale is an f32");
        out.push_str("scale:");
        write_hex(&mut out, &(scale as f32).to_le_bytes());
        write!(out, " tracker:{} ", scaler.get_growth_tracker().unwrap()).unwrap();
        if self.enabled {
            write_hex(&mut out, &scaler.get_growth_factor().to_le_bytes());
            out.push('/');
            write_hex(&mut out, &scaler.get_backoff_factor().to_le_bytes());
            write!(out, "/{}", scaler.get_growth_interval()).unwrap();
        }
        let calls = self.optimizers.iter().map(|optimizer| optimizer.calls.to_string());
        write!(out, " steps:{} ", calls.collect::<Vec<_>>().join("/")).unwrap();
        for param in &self.params {
            write_bits(&mut out, param);
            out.push('/');
        }
        out.push_str(" grads:");
        for param in &self.params {
            write_bits(&mut out, &param.grad());
            out.push('/');
        }
        out
    }

    fn run(&mut self, op: &Op) -> Result<Option<String>> {
        match op {
            Op::Backward { how, terms } => self.backward(*how, terms)?,
            Op::Plant { param, element, value } => plant(&self.params[*param], *element, value.0),
            Op::Drop { param } => drop_gradient(&self.params[*param]),
            Op::ZeroGrad { optimizer } => self.optimizers[*optimizer].zero_grad(),
            Op::Zeros { optimizer } => self.optimizers[*optimizer].zero_in_place(),
            Op::Unscale { optimizer } => self.scaler.unscale_(&mut self.optimizers[*optimizer])?,
            Op::ClipNorm { optimizer, max_norm } => {
                self.optimizers[*optimizer].clip_grad_norm(*max_norm)
            }
            Op::ClipValue { optimizer, max } => self.optimizers[*optimizer].clip_grad_value(*max),
            Op::Step { optimizer } => {
                let outcome = self.scaler.step(&mut self.optimizers[*optimizer])?;
                return Ok(Some(told(&outcome)?));
            }
            Op::Transaction { parts } => return self.transaction(parts).map(Some),
            Op::Move => self.move_optimizers(),
            Op::Update => self.scaler.update()?,
            Op::UpdateWith { scale } => self.scaler.update_with(*scale)?,
            Op::UpdateWithTensor { scale } => {
                self.scaler.update_with_tensor(&Tensor::from(*scale as f32))?
            }
            Op::SetGrowthFactor { factor } => self.scaler.set_growth_factor(*factor)?,
            Op::SetBackoffFactor { factor } => self.scaler.set_backoff_factor(*factor)?,
            Op::SetGrowthInterval { interval } => self.scaler.set_growth_interval(*interval)?,
            Op::Reload { config } => self.reload(*config)?,
        }
        Ok(None)
    }

    fn backward(&self, how: How, terms: &[Term]) -> Result<()> {
        let losses = terms.iter().map(|term| self.loss(term)).collect::<Vec<_>>();
        let total =
            || losses[1..].iter().fold(losses[0].shallow_clone(), |total, loss| total + loss);
        match how {
            How::Backward => self.scaler.backward(&total())?,
            How::Scale => self.scaler.scale(&total())?.backward(),
            How::Each => {
                let (first, rest) = self.scaler.scale(&(&losses[0], &losses[1..]))?;
                [first].iter().chain(&rest).for_each(Tensor::backward);
            }
        }
        Ok(())
    }

    fn loss(&self, term: &Term) -> Tensor {
        let param = &self.params[term.param];
        let factors = from_eighths(&term.eighths, param.kind()).to_device(param.device());
        // Losses are summed, for which they must be on one device.
        (param * factors).sum(param.kind()).to_device(self.device)
    }

    fn transaction(&mut self, parts: &[(usize, Clip)]) -> Result<String> {
        let mut optimizers = self.optimizers.iter_mut().map(Some).collect::<Vec<_>>();
        let mut open = Vec::new();
        for (optimizer, clip) in parts {
            let optimizer = optimizers[*optimizer].take().expect("an optimizer is in one part");
            open.push((self.scaler.unscale(optimizer)?, *clip));
        }
        let outcomes = open.into_iter().map(|(unscaled, clip)| finish(unscaled, clip));
        Ok(outcomes.collect::<Result<Vec<_>>>()?.join("+"))
    }

    fn move_optimizers(&mut self) {
        // The new vector is allocated before the old one is freed, so that every address changes.
        let mut moved = Vec::with_capacity(self.optimizers.len());
        moved.append(&mut self.optimizers);
        self.optimizers = moved;
    }

    fn reload(&mut self, config: Config) -> Result<()> {
        // Not through text: without `float_roundtrip`, serde_json reads some f64 numbers with another last bit.
        let saved = serde_json::to_value(self.scaler.state_dict()?).unwrap();
        let state: GradScalerState = serde_json::from_value(saved).unwrap();
        let mut scaler = scaler(config, self.enabled, self.device);
        scaler.load_state_dict(&state)?;
        self.scaler = scaler;
        Ok(())
    }
}

fn scaler(config: Config, enabled: bool, device: Device) -> GradScaler {
    let Config { init_scale, growth_factor, backoff_factor, growth_interval } = config;
    let config = GradScalerConfig {
        init_scale,
        growth_factor,
        backoff_factor,
        growth_interval,
        enabled,
        ..Default::default()
    };
    config.build(device).expect("the generator makes valid configurations")
}

fn finish(mut unscaled: Unscaled<'_>, clip: Clip) -> Result<String> {
    let mut norm = String::new();
    match clip {
        Clip::Not => {}
        Clip::Norm(max) => {
            norm.push('/');
            write_bits(&mut norm, &unscaled.clip_grad_norm(max)?);
        }
        Clip::Value(max) => unscaled.clip_grad_value(max)?,
    }
    Ok(told(&unscaled.step()?)? + &norm)
}

fn plant(param: &Tensor, element: usize, value: f64) {
    let grad = param.grad();
    if grad.defined() {
        no_grad(|| drop(grad.get(element as i64).fill_(value)));
    }
}
