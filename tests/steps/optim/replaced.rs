//! Random programs that replace, free and reallocate parameters, gradients, states and master weights between any two
//! calls. The results must be those of the same program while all memory is kept, so that nothing new can occupy the
//! address of something old.

use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::optim::{Optimizer, OptimizerState};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{GradScaler, Result};

use crate::optim::to_f64;
use testkit::descent::Descent;
use testkit::optimizers::{MASTERS, algorithms};
use testkit::rng::Rng;

const PROGRAMS: u64 = 400;
const CALLS: usize = 40;

struct World {
    parameters: Vec<Tensor>,
    fused: Optimizer,
    scaler: GradScaler,
    saved: Option<OptimizerState>,
    /// Everything that ever existed, if nothing is freed.
    kept: Option<Vec<Tensor>>,
    /// The present gradients, where the scale changes: the scaler does not carry gradients whose memory is shared.
    shared: Option<Vec<Tensor>>,
    told: Vec<String>,
}

fn build(rng: &mut Rng, list: &[Tensor]) -> Optimizer {
    let (masters, algorithm) = (*rng.pick(&MASTERS), *rng.pick(&algorithms()));
    algorithm.master_weights(masters).build(list, 0.01).unwrap()
}

fn values(rng: &mut Rng, kind: Kind) -> Tensor {
    let numbers: Vec<f64> = (0..4).map(|_| rng.eighth()).collect();
    Tensor::from_slice(&numbers).to_kind(kind).reshape([2, 2])
}

impl World {
    fn new(rng: &mut Rng, keeps: bool) -> Self {
        let kinds = [Kind::BFloat16, Kind::Float, Kind::BFloat16];
        let parameters: Vec<_> =
            kinds.into_iter().map(|kind| values(rng, kind).set_requires_grad(true)).collect();
        let changes = rng.one_in(2);
        let mut config = GradScalerConfig { init_scale: 1.0, ..Default::default() };
        if changes {
            config.init_scale = *rng.pick(&[1.0, 8.0]);
        } else {
            (config.min_scale, config.max_scale) = (1.0, 1.0);
        }
        let scaler = config.build(Device::Cpu).unwrap();
        let fused = build(rng, &parameters);
        let (kept, shared) = (keeps.then(Vec::new), changes.then(Vec::new));
        Self { parameters, fused, scaler, saved: None, kept, shared, told: Vec::new() }
    }

    /// Keeps all memory that is in use, and every tensor that refers to it, or only the present gradients.
    fn keep(&mut self) {
        let gradients = self.parameters.iter().map(Tensor::grad).filter(Tensor::defined);
        let gradients: Vec<_> = gradients.collect();
        if let Some(shared) = &mut self.shared {
            *shared = gradients.iter().flat_map(|g| [g.shallow_clone(), g.detach()]).collect();
        }
        let Some(kept) = &mut self.kept else { return };
        let state = self.fused.state_dict().unwrap().state;
        let state = state.values().flat_map(|tensors| tensors.values());
        for tensor in self.parameters.iter().chain(&gradients).chain(state) {
            kept.push(tensor.shallow_clone());
            kept.push(tensor.detach());
        }
    }

    fn call(&mut self, rng: &mut Rng) {
        // Getting the state creates what it lacks, with and without freeing.
        drop(self.fused.state_dict().unwrap());
        self.keep();
        let index = rng.below(self.parameters.len());
        let (w, kind) = (self.parameters[index].shallow_clone(), self.parameters[index].kind());
        let (what, result): (_, Result<String>) = match rng.below(15) {
            0..=2 => ("backward", self.backward(rng)),
            3 => ("unscale_", self.scaler.unscale_(&mut self.fused).map(|()| String::new())),
            4 | 5 => ("step", self.scaler.step(&mut self.fused).map(|o| format!("{:?}", o.poll()))),
            6 => ("another's step", {
                let mut other = Descent(vec![w]);
                self.scaler.step(&mut other).map(|o| format!("{:?}", o.poll()))
            }),
            7 | 8 => ("update", self.scaler.update().map(|()| String::new())),
            9 => ("zero_grad", self.fused.zero_grad().map(|()| String::new())),
            10 => ("data", {
                let new = values(rng, kind);
                no_grad(|| w.shallow_clone().set_data(&w.to_kind(Kind::Double)));
                no_grad(|| w.shallow_clone().set_data(&new));
                Ok(String::new())
            }),
            11 => ("gradient", {
                let new = if rng.one_in(2) { values(rng, kind) } else { values(rng, kind) / 0.0 };
                let gradient = w.grad();
                if gradient.defined() && gradient.kind() == kind {
                    no_grad(|| {
                        gradient.shallow_clone().set_data(&Tensor::zeros([4], (kind, Device::Cpu)))
                    });
                    no_grad(|| gradient.shallow_clone().set_data(&new));
                }
                Ok(String::new())
            }),
            12 => ("state", self.replace_state(rng)),
            13 => (
                "save",
                self.fused.state_dict().map(|state| {
                    self.saved = Some(copied(state));
                    String::new()
                }),
            ),
            _ => (
                "load",
                match self.saved.take() {
                    Some(saved) => self.fused.load_state_dict(&saved).map(|()| "loaded".to_owned()),
                    None => self.scaler.abandon(&mut self.fused).map(|()| "abandoned".to_owned()),
                },
            ),
        };
        let weights: Vec<_> = self.parameters.iter().map(to_f64).collect();
        let result = result.map_err(|error| error.to_string());
        self.told.push(format!("{what}: {result:?} {weights:?} {:?}", self.scaler.get_scale()));
    }

    fn backward(&mut self, rng: &mut Rng) -> Result<String> {
        let infinite = rng.one_in(6);
        let used: Vec<_> = self.parameters.iter().filter(|_| !rng.one_in(4)).collect();
        for w in used {
            let factors = values(rng, w.kind());
            let factors = if infinite { factors / 0.0 } else { factors };
            self.scaler.backward(&(w * factors).sum(Kind::Float))?;
        }
        Ok(String::new())
    }

    /// Replaces the memory of a tensor of the state, halving its values.
    fn replace_state(&mut self, rng: &mut Rng) -> Result<String> {
        let state = self.fused.state_dict()?.state;
        let tensors: Vec<_> = state.values().flat_map(|tensors| tensors.iter()).collect();
        let tensors: Vec<_> = tensors.into_iter().filter(|(key, _)| *key != "step").collect();
        if tensors.is_empty() {
            return Ok("none".to_owned());
        }
        let (_, tensor) = rng.pick(&tensors);
        let half: Tensor = tensor.detach() * 0.5;
        no_grad(|| tensor.shallow_clone().set_data(&half));
        Ok("halved".to_owned())
    }
}

/// The same values in memory of their own.
fn copied(mut state: OptimizerState) -> OptimizerState {
    for tensors in state.state.values_mut() {
        tensors.values_mut().for_each(|tensor| *tensor = tensor.copy());
    }
    state
}

#[test]
fn reused_memory_is_not_mistaken_for_its_previous_content() {
    for seed in 0..PROGRAMS {
        let run = |keeps: bool| {
            let mut rng = Rng::new(seed);
            let mut world = World::new(&mut rng, keeps);
            for _ in 0..CALLS {
                world.call(&mut rng);
            }
            world.told
        };
        let (freed, kept) = (run(false), run(true));
        for (call, (freed, kept)) in freed.iter().zip(&kept).enumerate() {
            assert_eq!(freed, kept, "program {seed}, call {call}");
        }
    }
}
