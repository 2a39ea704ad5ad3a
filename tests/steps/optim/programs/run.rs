//! Runs a program with this crate.

use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::optim::Optimizer;
use tch_amp::scaler::GradScalerConfig;

use crate::optim::programs::generate::{Layout, Mode, Parameter, Program, Step};
use testkit::bits::hex;

/// What a state may have, in the order of the oracle.
const KEYS: &str = "step exp_avg exp_avg_sq max_exp_avg_sq momentum_buffer sum square_avg grad_avg mu_product \
                    row_var col_var variance";

pub struct Machine<'a> {
    program: &'a Program,
    params: Vec<Tensor>,
    optimizer: Optimizer,
    scaler: GradScaler,
}

/// The values in the layout of the parameter, on a device.
fn laid_out(p: &Parameter, values: &Tensor, device: Device) -> Tensor {
    let values = values.to_device(device);
    match p.layout {
        Layout::Contiguous => values.copy(),
        Layout::Transposed => values.tr().contiguous().tr(),
        Layout::ChannelsLast => values.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]),
    }
}

fn optimizer(program: &Program, params: &[Tensor]) -> Optimizer {
    let named = params.iter().enumerate().map(|(i, t)| (format!("p{i}"), t.shallow_clone()));
    let named: Vec<_> = named.collect();
    let first = program.groups[0];
    let mut optimizer = first.algorithm.build(named, first.lr).unwrap();
    for (index, options) in program.groups.iter().enumerate() {
        let members = program.params.iter().enumerate().filter(|(_, p)| p.group == index);
        let names: Vec<_> = members.map(|(i, _)| format!("p{i}")).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        optimizer.assign_group(index, &names).unwrap();
        optimizer.set_param_group(index, *options).unwrap();
    }
    optimizer
}

impl<'a> Machine<'a> {
    /// Assigns the parameters to the devices in turn. The scaler is on the first device.
    pub fn new(program: &'a Program, devices: &[Device]) -> Self {
        let placed = program.params.iter().zip(devices.iter().cycle());
        let params =
            placed.map(|(p, device)| laid_out(p, &p.values, *device).set_requires_grad(true));
        let params: Vec<_> = params.collect();
        let optimizer = optimizer(program, &params);
        let enabled = program.mode != Mode::Plain;
        let config = GradScalerConfig { init_scale: program.scale, enabled, ..Default::default() };
        let scaler = config.build(devices[0]).unwrap();
        Self { program, params, optimizer, scaler }
    }

    /// Runs a step and returns whether it was taken.
    pub fn step(&mut self, step: &Step) -> bool {
        if step.reload {
            let saved = self.optimizer.state_dict().unwrap();
            let mut fresh = optimizer(self.program, &self.params);
            fresh.load_state_dict(&saved).unwrap();
            self.optimizer = fresh;
        }
        self.optimizer.zero_grad().unwrap();
        for ((param, p), grad) in self.params.iter().zip(&self.program.params).zip(&step.grads) {
            if let Some(grad) = grad {
                (param * laid_out(p, grad, param.device())).sum(p.kind).backward();
            }
        }
        if let Some(lr) = step.lr {
            self.optimizer.set_lr(lr).unwrap();
        }
        let (scaler, optimizer) = (&mut self.scaler, &mut self.optimizer);
        let outcome = match self.program.mode {
            Mode::Plain | Mode::Scaler => scaler.step(optimizer).unwrap(),
            Mode::Unscale => {
                scaler.unscale_(optimizer).unwrap();
                scaler.step(optimizer).unwrap()
            }
            Mode::Clip => scaler.step_clip_norm(optimizer, step.max_norm).unwrap(),
            Mode::Transaction => {
                let mut unscaled = scaler.unscale(optimizer).unwrap();
                let _norm = unscaled.clip_grad_norm(step.max_norm).unwrap();
                unscaled.step().unwrap()
            }
        };
        scaler.update().unwrap();
        outcome.is_stepped().unwrap()
    }

    /// The bits of the parameters and of their state, in the oracle's form.
    pub fn told(&mut self) -> String {
        let saved = self.optimizer.state_dict().unwrap();
        let mut out = Vec::new();
        for (index, param) in self.params.iter().enumerate() {
            let mut parts = vec![hex(param)];
            if let Some(state) = saved.state.get(&format!("p{index}")) {
                parts.extend(KEYS.split(' ').filter_map(|key| state.get(key)).map(hex));
            }
            out.push(parts.join(","));
        }
        let scale = self.scaler.get_scale().unwrap();
        let scale = Tensor::from(scale).to_kind(Kind::Double).double_value(&[]);
        format!("{} {scale:?}", out.join(" "))
    }
}
