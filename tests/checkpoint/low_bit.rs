//! Low-bit moments in files: the bytes for this crate, f32 for Python.

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::optim::{AdamW, MasterWeights, Optimizer, States};

use crate::common::bits::bits;
use crate::common::files::Folder;
use crate::common::python::Oracle;

const MODES: [States; 3] = [States::F32, States::BFloat16, States::EightBit];

struct Run {
    vs: VarStore,
    net: nn::Linear,
    opt: Optimizer,
}

impl Run {
    fn new(states: States, kind: Kind) -> Self {
        let mut vs = VarStore::new(Device::Cpu);
        let net = nn::linear(vs.root(), 100, 70, Default::default());
        let places = Tensor::arange(7000, (Kind::Float, Device::Cpu));
        tch::no_grad(|| {
            let weights = ((places * 0.3).sin() * 0.1).view([70, 100]);
            net.ws.shallow_clone().copy_(&weights);
            let _zeros = net.bs.as_ref().unwrap().shallow_clone().zero_();
        });
        vs.set_kind(kind);
        let adamw = AdamW { betas: (0.9, 0.99), weight_decay: 0.1, ..AdamW::default() };
        let masters = match kind {
            Kind::Float => MasterWeights::None,
            _ => MasterWeights::Remainder,
        };
        // In Python's order.
        let list = [("weight", &net.ws), ("bias", net.bs.as_ref().unwrap())];
        let list: Vec<_> = list.map(|(name, tensor)| (name, tensor.shallow_clone())).into();
        let opt = adamw.states(states).master_weights(masters).build(list, 1e-3).unwrap();
        Self { vs, net, opt }
    }

    /// The same gradients in each run.
    fn train(&mut self, steps: std::ops::Range<i64>) {
        for step in steps {
            let places = Tensor::arange(800, (Kind::Float, Device::Cpu));
            let xs: Tensor = ((places + 800 * step) * 0.7).sin();
            let xs = xs.view([8, 100]).to_kind(self.net.ws.kind());
            let loss = self.net.forward(&xs).square().mean(Kind::Float);
            self.opt.backward_step(&loss).unwrap();
        }
    }

    fn save(&mut self, path: &std::path::Path) {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add("model", &self.vs).unwrap();
        checkpoint.add("optimizer", &mut self.opt).unwrap();
        checkpoint.save(path).unwrap();
    }

    fn load(&mut self, path: &std::path::Path) {
        let checkpoint = Checkpoint::load(path).unwrap();
        let restore = checkpoint.restore().add("model", &self.vs);
        restore.add("optimizer", &mut self.opt).apply().unwrap();
    }

    fn bits(&mut self) -> Vec<Vec<u8>> {
        let state = self.opt.state_dict().unwrap().state;
        let tensors = state.values().flat_map(|tensors| tensors.values());
        self.vs.trainable_variables().iter().chain(tensors).map(bits).collect()
    }
}

#[test]
fn a_resumed_run_has_the_bits_of_one_that_was_not_interrupted() {
    let folder = Folder::new();
    let path = folder.file("run.safetensors");
    for states in MODES {
        for kind in [Kind::Float, Kind::BFloat16] {
            let mut uninterrupted = Run::new(states, kind);
            uninterrupted.train(0..20);
            let mut first = Run::new(states, kind);
            first.train(0..11);
            first.save(&path);
            let mut resumed = Run::new(states, kind);
            resumed.load(&path);
            resumed.train(11..20);
            assert!(resumed.bits() == uninterrupted.bits(), "{states:?} {kind:?}");
        }
    }
}

/// Python's 60 steps, 5 here and another one in Python.
#[test]
fn python_and_this_crate_exchange_f32_moments() {
    let Some(python) = Oracle::find("low_bit.py") else { return };
    let folder = Folder::new();
    let [from, to, back] = ["from.pt", "to.pt", "back.pt"].map(|name| folder.file(name));
    python.run(&["save", from.to_str().unwrap()], "");
    for states in MODES {
        let mut run = Run::new(states, Kind::Float);
        run.load(&from);
        let state = run.opt.state_dict().unwrap().state;
        assert_eq!(state["weight"]["step"].double_value(&[]), 60.0);
        run.train(0..5);
        run.save(&to);
        python.run(&["resume", to.to_str().unwrap(), back.to_str().unwrap()], "");
        run.load(&back);
        assert_eq!(run.opt.state_dict().unwrap().state["weight"]["step"].double_value(&[]), 66.0);
        // The moments in the file are the numbers that the codes stand for: loaded again, they have the same codes.
        let mut again = Run::new(states, Kind::Float);
        again.load(&to);
        let mut other = Run::new(States::F32, Kind::Float);
        other.load(&to);
        let saved = folder.file("again.pt");
        again.save(&saved);
        let mut third = Run::new(States::F32, Kind::Float);
        third.load(&saved);
        assert!(third.bits() == other.bits(), "{states:?}");
    }
}
