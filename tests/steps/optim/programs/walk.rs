//! Random walks through the states of optimizers: steps that are taken and skipped, options that are switched on and
//! off, writes, casts, moves to another device and to another mode of master weights. Whatever state is reached can be
//! saved and loaded, which changes no bit, and training goes on as if it had not been saved.
//!
//! `TCH_AMP_STATE_WALKS` sets the number of walks, and `TCH_AMP_SEED` repeats one.

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::checkpoint::{Checkpoint, Format};
use tch_amp::optim::{Algorithm, MasterWeights, Optimizer, OptimizerState, ParamGroup};
use tch_amp::scaler::GradScalerConfig;

use crate::optim::programs::generate::{ALGORITHMS, algorithm, magnitude, numbers};
use testkit::bits::bits;
use testkit::files::Folder;
use testkit::gpus_that_round_as_the_cpu;
use testkit::optimizers::MASTERS;
use testkit::programs::seeds;
use testkit::rng::Rng;

const WALKS: u64 = 50;
const CALLS: usize = 12;

/// Numbers of steps around those at which f32 has no number for each, and the largest one that is loaded.
const STEPS: [f32; 6] = [0.0, 16_777_215.0, 16_777_216.0, 16_777_218.0, 3e7, 4_611_686e12];

/// A tensor as its dtype and its bits.
type Bits = (Kind, Vec<i64>, Vec<u8>);

fn told(tensor: &Tensor) -> Bits {
    (tensor.kind(), tensor.size(), bits(&tensor.to_device(Device::Cpu)))
}

#[derive(Debug, PartialEq)]
struct Saved {
    state: BTreeMap<String, BTreeMap<String, Bits>>,
    groups: String,
}

impl Saved {
    fn of(state: &OptimizerState) -> Self {
        let told = |tensors: &BTreeMap<String, Tensor>| {
            tensors.iter().map(|(key, tensor)| (key.clone(), told(tensor))).collect()
        };
        let groups = format!("{:?}", state.param_groups);
        let state = state.state.iter().map(|(name, tensors)| (name.clone(), told(tensors)));
        Self { state: state.collect(), groups }
    }

    fn master(&self, name: &str) -> Option<&Bits> {
        self.state.get(name)?.get("master_param")
    }
}

fn copied(mut state: OptimizerState) -> OptimizerState {
    for tensor in state.state.values_mut().flat_map(BTreeMap::values_mut) {
        *tensor = tensor.copy();
    }
    state
}

struct World {
    which: usize,
    initial: f64,
    first: Algorithm,
    masters: MasterWeights,
    devices: Vec<Device>,
    parameters: Vec<Tensor>,
    opt: Optimizer,
    /// Whether gradients are accumulated in f32, which is not saved.
    wide: bool,
}

fn name(index: usize) -> String {
    format!("p{index}")
}

fn build(first: Algorithm, masters: MasterWeights, parameters: &[Tensor]) -> Optimizer {
    let named = parameters.iter().enumerate().map(|(i, w)| (name(i), w.shallow_clone()));
    first.master_weights(masters).build(named.collect::<Vec<_>>(), 0.01).unwrap()
}

fn parameter(rng: &mut Rng, devices: &[Device]) -> Tensor {
    let kinds = [Kind::Float, Kind::BFloat16, Kind::BFloat16, Kind::Half, Kind::Double];
    let kind = *rng.pick(&kinds);
    let sizes: [&[i64]; 6] = [&[], &[3], &[2, 3], &[17], &[0, 3], &[4, 5]];
    let size = *rng.pick(&sizes);
    let values = numbers(rng, size, kind, 1.0).to_device(*rng.pick(devices));
    let turns = size.len() == 2 && rng.one_in(3);
    let values = if turns { values.tr().contiguous().tr() } else { values };
    values.set_requires_grad(true)
}

impl World {
    fn new(rng: &mut Rng, devices: &[Device]) -> Self {
        let (which, initial) = (rng.below(ALGORITHMS), *rng.pick(&[0.0, 0.5]));
        let first = algorithm(which, initial, rng);
        let masters = *rng.pick(&MASTERS);
        let count = 1 + rng.below(4);
        let parameters: Vec<_> = (0..count).map(|_| parameter(rng, devices)).collect();
        let opt = build(first, masters, &parameters);
        let devices = devices.to_vec();
        Self { which, initial, first, masters, devices, parameters, opt, wide: false }
    }

    /// Training that resumes from a file, with equal parameters.
    fn resumed(&mut self, rng: &mut Rng, folder: &Folder) -> Self {
        let equal = |w: &Tensor| {
            let copy = w.detach().empty_like();
            no_grad(|| copy.shallow_clone().copy_(w));
            copy.set_requires_grad(w.requires_grad())
        };
        let parameters: Vec<_> = self.parameters.iter().map(equal).collect();
        let mut opt = build(self.first, self.masters, &parameters);
        let format = *rng.pick(&[Format::Safetensors, Format::Torch]);
        let path = folder.file("state");
        let mut checkpoint = Checkpoint::new();
        checkpoint.add("optimizer", &mut self.opt).unwrap();
        checkpoint.save_as(&path, format).unwrap();
        let checkpoint = Checkpoint::load(&path).unwrap();
        checkpoint.restore().add("optimizer", &mut opt).apply().unwrap();
        if self.wide {
            opt.accumulate_in_f32().unwrap();
        }
        let Self { which, initial, first, masters, wide, .. } = *self;
        let devices = self.devices.clone();
        Self { which, initial, first, masters, devices, parameters, opt, wide }
    }

    fn weights(&self) -> Vec<Bits> {
        self.parameters.iter().map(told).collect()
    }

    fn saved(&mut self) -> Saved {
        Saved::of(&self.opt.state_dict().unwrap())
    }

    /// Saves and loads in each way.
    fn check(&mut self, rng: &mut Rng, folder: &Folder) {
        let state = copied(self.opt.state_dict().unwrap());
        let (saved, weights) = (Saved::of(&state), self.weights());
        let mut resumed = self.resumed(rng, folder);
        assert_eq!(resumed.saved(), saved, "from a file");
        assert_eq!(resumed.weights(), weights, "from a file");
        if rng.one_in(2) {
            self.opt.load_state_dict(&state).unwrap();
            assert_eq!(self.saved(), saved, "loaded back");
            assert_eq!(self.weights(), weights, "loaded back");
        }
    }

    fn step(&mut self, rng: &mut Rng) {
        self.opt.zero_grad().unwrap();
        let config =
            GradScalerConfig { init_scale: 8.0, allow_fp16_gradients: true, ..Default::default() };
        let mut scaler = config.build(self.devices[0]).unwrap();
        let (way, overflows) = (rng.below(4), rng.one_in(3));
        let mut has_gradient = false;
        for w in &self.parameters {
            let factors = numbers(rng, &w.size(), w.kind(), 2.0).to_device(w.device());
            let factors = if overflows && way > 0 { factors / 0.0 } else { factors };
            if rng.one_in(5) || !w.requires_grad() {
                continue;
            }
            has_gradient = true;
            (w * factors).sum(w.kind()).backward();
        }
        if way == 0 || !has_gradient {
            self.opt.step().unwrap();
            return;
        }
        drop(scaler.scale(&Tensor::from(1f32).to_device(self.devices[0])).unwrap());
        match way {
            1 => drop(scaler.step(&mut self.opt).unwrap()),
            2 => {
                scaler.unscale_(&mut self.opt).unwrap();
                drop(scaler.step(&mut self.opt).unwrap());
            }
            _ => drop(scaler.step_clip_norm(&mut self.opt, 0.5).unwrap()),
        }
        scaler.update().unwrap();
    }

    fn change(&mut self, rng: &mut Rng) -> &'static str {
        let index = rng.below(self.parameters.len());
        let mut w = self.parameters[index].shallow_clone();
        match rng.below(11) {
            0 | 1 => {
                let group = rng.below(self.opt.param_group_count());
                let options = algorithm(self.which, self.initial, rng);
                let lr = magnitude(rng, -1.0);
                self.opt.set_param_group(group, ParamGroup::new(lr, options)).unwrap();
                "options"
            }
            2 => {
                let group = rng.below(self.opt.param_group_count() + 1);
                self.opt.assign_group(group, &[name(index).as_str()]).unwrap();
                "group"
            }
            3 => {
                let new = numbers(rng, &w.size(), w.kind(), 1.0).to_device(w.device());
                no_grad(|| w.copy_(&new));
                "write"
            }
            4 => {
                w = w.set_requires_grad(rng.one_in(2));
                drop(w);
                "freeze"
            }
            5 => {
                self.opt.reset_master_weights();
                "reset"
            }
            6 => {
                let added = parameter(rng, &self.devices);
                let list = vec![(name(self.parameters.len()), added.shallow_clone())];
                self.opt.add_param_group(list).unwrap();
                self.parameters.push(added);
                "add"
            }
            7 => {
                let kind = *rng.pick(&[Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double]);
                self.cast(kind);
                "cast"
            }
            8 => {
                self.opt.zero_grad().unwrap();
                for w in &self.parameters {
                    let there = w.to_device(*rng.pick(&self.devices));
                    no_grad(|| w.shallow_clone().set_data(&there));
                }
                self.reload();
                "move"
            }
            9 => {
                self.change_mode(*rng.pick(&MASTERS));
                "mode"
            }
            _ => {
                let mut state = copied(self.opt.state_dict().unwrap());
                let steps = state.state.values_mut().filter_map(|tensors| tensors.get_mut("step"));
                let step = f64::from(*rng.pick(&STEPS));
                steps.for_each(|kept| drop(kept.fill_(step)));
                self.opt.load_state_dict(&state).unwrap();
                "steps"
            }
        }
    }

    /// Has the optimizer go on after its model was converted or moved.
    fn reload(&mut self) {
        let state = copied(self.opt.state_dict().unwrap());
        self.opt.load_state_dict(&state).unwrap();
    }

    /// Converts the model in place. A master becomes the parameter, bit by bit, if that is no longer half precision.
    fn cast(&mut self, kind: Kind) {
        let _renewed = self.saved();
        self.opt.zero_grad().unwrap();
        for w in &self.parameters {
            let converted = w.to_kind(kind);
            no_grad(|| w.shallow_clone().set_data(&converted));
        }
        let saved = self.saved();
        self.reload();
        for (index, w) in self.parameters.iter().enumerate() {
            let wide = matches!(kind, Kind::Float | Kind::Double);
            if let (true, Some(master)) = (wide, saved.master(&name(index))) {
                assert_eq!(&told(w), master, "the master of {}", name(index));
            }
        }
    }

    /// Goes on with another mode of master weights, which a new optimizer has.
    fn change_mode(&mut self, masters: MasterWeights) {
        let mut state = copied(self.opt.state_dict().unwrap());
        let mut other = build(self.first, masters, &self.parameters);
        if let Err(error) = other.load_state_dict(&state) {
            let needs_masters = error.to_string().contains("with `master_weights`");
            assert!(masters == MasterWeights::None && needs_masters, "{error}");
            for tensors in state.state.values_mut() {
                tensors.remove("master_param");
            }
            other.load_state_dict(&state).unwrap();
        }
        (self.opt, self.masters, self.wide) = (other, masters, false);
    }
}

fn walk(seed: u64, devices: &[Device], folder: &Folder) {
    let rng = &mut Rng::new(seed);
    let mut world = World::new(rng, devices);
    for call in 0..CALLS {
        let on = On { seed, call, text: format!("{:?} {:?}", world.first, world.masters) };
        if rng.one_in(2) {
            let mut resumed = world.resumed(rng, folder);
            let mut again = rng.clone();
            world.step(rng);
            resumed.step(&mut again);
            assert_eq!(resumed.weights(), world.weights(), "after a step");
            assert_eq!(resumed.saved(), world.saved(), "after a step");
        } else if rng.one_in(8) && world.masters != MasterWeights::None {
            world.opt.accumulate_in_f32().unwrap();
            world.wide = true;
        } else {
            let changed = world.change(rng);
            if std::env::var("TCH_AMP_SEED").is_ok() {
                println!("{changed}");
            }
        }
        world.check(rng, folder);
        drop(on);
    }
}

/// Prints where a walk was if it fails.
struct On {
    seed: u64,
    call: usize,
    text: String,
}

impl Drop for On {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("TCH_AMP_SEED={}, call {} of {}", self.seed, self.call, self.text);
        }
    }
}

#[test]
fn whatever_state_is_reached_is_saved_and_loaded_bit_by_bit() {
    let folder = Folder::new();
    let mut devices = vec![Device::Cpu];
    devices.extend(gpus_that_round_as_the_cpu());
    for seed in seeds("TCH_AMP_STATE_WALKS", WALKS) {
        // Every second walk with the GPUs alone, if there are any.
        let some = if seed % 2 == 0 || devices.len() == 1 { &devices[..] } else { &devices[1..] };
        walk(seed, some, &folder);
    }
}
