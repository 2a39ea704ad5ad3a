//! A whole iteration launches no more kernels than the same one in Python.

use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};
use tch_amp::optim::{AdamW, Algorithm, Muon, Optimizer, RmsProp};
use tch_amp::{GradScaler, autocast};

use testkit::simulation::Simulation;

/// Three layers, an optimizer and a scaler.
struct Run {
    net: nn::Sequential,
    opt: Optimizer,
    scaler: GradScaler,
    x: Tensor,
    classes: Tensor,
}

impl Run {
    fn new(algorithm: Algorithm) -> Self {
        let gpu = Device::Cuda(0);
        let vs = nn::VarStore::new(gpu);
        let layer =
            |name: &str, from, to| nn::linear(vs.root() / name, from, to, Default::default());
        let net = nn::seq().add(layer("0", 64, 128)).add_fn(Tensor::relu);
        let net = net.add(layer("2", 128, 128)).add_fn(Tensor::relu).add(layer("4", 128, 10));
        let x = Tensor::randn([32, 64], (Kind::Float, gpu));
        let classes = Tensor::randint(10, [32], (Kind::Int64, gpu));
        let opt = algorithm.build(&vs, 1e-3).unwrap();
        Self { net, opt, scaler: GradScaler::new(gpu).unwrap(), x, classes }
    }

    fn iterate(&mut self) {
        self.opt.zero_grad().unwrap();
        let loss = autocast(self.x.device(), || {
            self.net.forward(&self.x).cross_entropy_for_logits(&self.classes)
        });
        self.scaler.backward(&loss.unwrap()).unwrap();
        drop(self.scaler.step(&mut self.opt).unwrap());
        self.scaler.update().unwrap();
    }
}

/// What each of these launches in Python, which `testbench/null_cuda/iterations.py` confirms.
const OF_PYTHON: &str = include_str!("../../testbench/null_cuda/iterations.tsv");

fn algorithm(name: &str) -> Algorithm {
    let centered = RmsProp { momentum: 0.9, centered: true, ..Default::default() };
    match name {
        "AdamW" => AdamW::default().into(),
        "RMSprop" => RmsProp::default().into(),
        "centered RMSprop with momentum" => centered.into(),
        "Muon" => Muon::default().into(),
        other => panic!("no algorithm for {other}"),
    }
}

#[test]
fn an_iteration_launches_no_more_than_in_python() {
    let Some(simulation) = Simulation::find() else { return };
    for line in OF_PYTHON.lines() {
        let (name, most) = line.split_once('\t').unwrap();
        let mut run = Run::new(algorithm(name));
        (0..3).for_each(|_| run.iterate());
        let ((), counts) = simulation.count(|| run.iterate());
        println!("{name}: {}, and {most} in Python", counts.launches);
        assert!(counts.launches <= most.parse().unwrap(), "{name}: {counts:?}, {most} in Python");
        assert_eq!(counts.host_syncs, 0, "{name}");
    }
}
