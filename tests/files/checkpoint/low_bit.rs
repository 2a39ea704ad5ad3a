//! Low-bit moments in files: the bytes for this crate, f32 for Python.

use std::path::Path;

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::{Checkpoint, Format};
use tch_amp::optim::{AdamW, Algorithm, MasterWeights, MomentDtype, Muon, Optimizer};

use crate::checkpoint::{dcp, listed};
use testkit::bits::bits;
use testkit::files::Folder;
use testkit::python::Oracle;

const MODES: [MomentDtype; 3] = [MomentDtype::F32, MomentDtype::BFloat16, MomentDtype::EightBit];

fn adamw() -> AdamW {
    AdamW { betas: (0.9, 0.99), weight_decay: 0.1, ..AdamW::default() }
}

/// Muon steps the weight, and AdamW the bias, which is too small for fewer bits.
fn muon() -> Muon {
    Muon { adamw: adamw(), ..Muon::default() }
}

/// Each algorithm in each of its modes.
fn cases() -> Vec<(Algorithm, MomentDtype)> {
    let by_muon = MODES[..2].iter().map(|states| (muon().into(), *states));
    MODES.map(|states| (adamw().into(), states)).into_iter().chain(by_muon).collect()
}

struct Run {
    vs: VarStore,
    net: nn::Linear,
    opt: Optimizer,
}

impl Run {
    fn new((algorithm, states): (Algorithm, MomentDtype), kind: Kind) -> Self {
        let mut vs = VarStore::new(Device::Cpu);
        let net = nn::linear(vs.root(), 100, 70, Default::default());
        let places = Tensor::arange(7000, (Kind::Float, Device::Cpu));
        tch::no_grad(|| {
            let weights = ((places * 0.3).sin() * 0.1).view([70, 100]);
            net.ws.shallow_clone().copy_(&weights);
            let _zeros = net.bs.as_ref().unwrap().shallow_clone().zero_();
        });
        vs.set_kind(kind);
        let masters = match kind {
            Kind::Float => MasterWeights::None,
            _ => MasterWeights::Remainder,
        };
        // In Python's order.
        let list = listed(&vs, ["weight", "bias"]);
        let opt = algorithm.master_weights(masters).moments(states).build(list, 1e-3).unwrap();
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

    fn save_in(&mut self, mut checkpoint: Checkpoint, path: &Path, format: Format) {
        checkpoint.add("model", &self.vs).unwrap();
        checkpoint.add("optimizer", &mut self.opt).unwrap();
        checkpoint.save_as(path, format).unwrap();
    }

    fn save(&mut self, path: &Path) {
        self.save_in(Checkpoint::new(), path, Format::Torch);
    }

    fn load(&mut self, path: &Path) {
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
    for case in cases() {
        for kind in [Kind::Float, Kind::BFloat16] {
            let mut uninterrupted = Run::new(case, kind);
            uninterrupted.train(0..20);
            let mut first = Run::new(case, kind);
            first.train(0..11);
            // As a file, as a folder of Python's, and as shards.
            let files =
                [Format::Safetensors, Format::Torch].map(|it| (Checkpoint::new(), it, "file"));
            let folders = dcp::KINDS.map(|it| (it.checkpoint(), it.format, it.ending));
            for (checkpoint, format, what) in files.into_iter().chain(folders) {
                let path = folder.file(what);
                first.save_in(checkpoint, &path, format);
                let mut resumed = Run::new(case, kind);
                resumed.load(&path);
                resumed.train(11..20);
                let is_same = resumed.bits() == uninterrupted.bits();
                assert!(is_same, "{case:?} {kind:?} {format:?} {what}");
            }
        }
    }
}

/// Python's 60 steps, 5 here and another one in Python.
#[test]
fn python_and_this_crate_exchange_f32_moments() {
    let Some(python) = Oracle::find("low_bit.py") else { return };
    let folder = Folder::new();
    let from = ["save", "save_muon"].map(|command| {
        let path = folder.file(&format!("{command}.pt"));
        python.run(&[command, path.to_str().unwrap()], "");
        path
    });
    let [to, back] = ["to.pt", "back.pt"].map(|name| folder.file(name));
    for case in cases() {
        let is_muon = matches!(case.0, Algorithm::Muon(_));
        let steps = |run: &mut Run| {
            let state = run.opt.state_dict().unwrap().state;
            let of = |name: &str| Some(state[name].get("step")?.double_value(&[]));
            [of("bias").unwrap(), of("weight").unwrap_or(0.0)]
        };
        // Muon counts its steps here alone, and with fewer bits.
        let by_muon = if case.1 == MomentDtype::F32 { 0.0 } else { 5.0 };
        let mut run = Run::new(case, Kind::Float);
        run.load(&from[usize::from(is_muon)]);
        assert_eq!(steps(&mut run), [60.0, if is_muon { 0.0 } else { 60.0 }]);
        run.train(0..5);
        run.save(&to);
        let resume = if is_muon { "resume_muon" } else { "resume" };
        python.run(&[resume, to.to_str().unwrap(), back.to_str().unwrap()], "");
        run.load(&back);
        assert_eq!(steps(&mut run), [66.0, if is_muon { by_muon } else { 66.0 }]);
        // The moments in the file are the numbers that the codes stand for: loaded again, they have the same codes.
        let mut again = Run::new(case, Kind::Float);
        again.load(&to);
        let mut other = Run::new((case.0, MomentDtype::F32), Kind::Float);
        other.load(&to);
        let saved = folder.file("again.pt");
        again.save(&saved);
        let mut third = Run::new((case.0, MomentDtype::F32), Kind::Float);
        third.load(&saved);
        assert!(third.bits() == other.bits(), "{case:?}");
    }
}
