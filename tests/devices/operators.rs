//! Reports of operators on devices, whose backward pass runs on threads of its own.

use std::collections::BTreeSet;

use serde::Deserialize;
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{AutocastList, Dtype, OperatorReport, Pass, Profiler, named};
use tch_amp::{Autocast, Result};

use testkit::rows::rows;
use testkit::simulation::Simulation;

const GPUS: [(Device, &str); 2] = [(Device::Cuda(0), "cuda:0"), (Device::Cuda(1), "cuda:1")];

#[derive(Debug, PartialEq, Deserialize)]
struct Operator {
    operator: String,
    device: String,
    pass: Pass,
    calls: u64,
    flops: u64,
}

#[derive(Deserialize)]
struct Product {
    path: Option<String>,
    dtype: Dtype,
    m: u64,
    n: u64,
    k: u64,
}

#[derive(Deserialize)]
struct Moved {
    operator: String,
    path: Option<String>,
    list: AutocastList,
}

#[derive(Deserialize)]
struct Listed {
    operator: String,
    list: AutocastList,
}

#[derive(Deserialize)]
struct Padding {
    path: Option<String>,
    sizes: Vec<(u64, u64)>,
}

fn operators(report: &OperatorReport) -> Vec<Operator> {
    rows(report, "operators")
}

struct Model {
    vs: VarStore,
    first: nn::Linear,
    norm: nn::LayerNorm,
    last: nn::Linear,
}

impl Model {
    fn new(device: Device) -> Self {
        let vs = VarStore::new(device);
        let layers = vs.root() / "layers";
        let first = nn::linear(&layers / 0, 16, 32, Default::default());
        let norm = nn::layer_norm(&layers / 1, vec![32], Default::default());
        let last = nn::linear(&layers / 2, 32, 10, Default::default());
        Self { vs, first, norm, last }
    }

    fn run(&self) -> Result<()> {
        let x = Tensor::ones([8, 16], (Kind::Float, self.vs.device()));
        let region = Autocast::new(self.vs.device()).dtype(Kind::Half);
        let loss = region.run(|| {
            let y = self.last.forward(&self.norm.forward(&self.first.forward(&x)));
            named("loss", || y.softmax(-1, None).square().mean(None))
        })?;
        Ok(loss.f_backward()?)
    }
}

fn flops(report: &OperatorReport, pass: Pass, device: &str) -> u64 {
    let rows = operators(report).into_iter();
    let rows = rows.filter(|row| row.pass == pass && row.device == device);
    rows.map(|row| row.flops).sum()
}

#[test]
fn reports_have_the_operators_of_each_device_forward_and_backward() {
    let Some(_simulation) = Simulation::find() else { return };
    for (device, name) in GPUS {
        let model = Model::new(device);
        let report = Profiler::new(&model.vs).run(|| model.run()).unwrap();
        let (first, last) = (2 * 8 * 16 * 32, 2 * 8 * 32 * 10);
        assert_eq!(flops(&report, Pass::Forward, name), first + last, "{report}");
        // The input needs no gradient.
        assert_eq!(flops(&report, Pass::Backward, name), first + 2 * last, "{report}");
        assert_eq!(report.half_share(None), Some(1.0), "{report}");
        // The simulation computes with kernels of the CPU, some of which run operators there.
        let operators = operators(&report);
        let elsewhere = operators.iter().filter(|row| row.device != name);
        assert!(elsewhere.clone().all(|row| row.device == "cpu" && row.flops == 0), "{report}");
        for operator in ["addmm", "mm", "native_layer_norm", "_softmax", "add_", "mul"] {
            let is_it = |row: &&Operator| row.operator == format!("aten::{operator}");
            assert!(operators.iter().any(|row| is_it(&row)), "{operator}: {report}");
            assert_eq!(elsewhere.clone().find(is_it), None, "{report}");
        }
        assert!(report.own_seconds() <= report.seconds, "{report}");
        for row in rows::<Product>(&report, "products") {
            let expected = if row.n == 10 || row.m == 10 || row.k == 10 { "2" } else { "0" };
            assert_eq!(row.path, Some(format!("layers.{expected}")), "{report}");
            assert_eq!(row.dtype, "fp16", "{report}");
        }
        let moved: Vec<Moved> = rows(&report, "moved_to_f32");
        let moved = moved.iter().map(|row| (row.operator.as_str(), row.path.as_deref(), row.list));
        let moved: BTreeSet<_> = moved.collect();
        // The square is taken of the softmax's f32 result, which is not moved.
        let expected = [
            ("aten::layer_norm", Some("layers.1"), AutocastList::F32),
            ("aten::softmax", Some("loss"), AutocastList::F32UnlessAsked),
        ];
        assert_eq!(moved, BTreeSet::from(expected), "{report}");
        let lists: Vec<Listed> = rows(&report, "lists");
        let list = |name: &str| lists.iter().find(|row| row.operator == name);
        assert_eq!(list("aten::pow").map(|row| row.list), Some(AutocastList::F32), "{report}");
        let padding: Vec<Padding> = rows(&report, "padding");
        let padding: Vec<_> = padding.iter().map(|row| (row.path.as_deref(), &row.sizes)).collect();
        assert_eq!(padding, [(Some("layers.2"), &vec![(10, 16)])], "{report}");
    }
}

/// A backward pass on the threads of two devices at once.
#[test]
fn a_graph_on_two_devices_is_reported_by_device() {
    let Some(_simulation) = Simulation::find() else { return };
    let [vs, other] = GPUS.map(|(device, _)| VarStore::new(device));
    let first = nn::linear(vs.root() / "first", 16, 32, Default::default());
    let second = nn::linear(other.root() / "second", 32, 24, Default::default());
    let x = Tensor::ones([8, 16], (Kind::Float, Device::Cuda(0)));
    let report = Profiler::new(&vs).run(|| {
        let y = second.forward(&first.forward(&x).to_device(Device::Cuda(1)));
        Ok(y.square().mean(None).f_backward()?)
    });
    let report = report.unwrap();
    let (first, second) = (2 * 8 * 16 * 32, 2 * 8 * 32 * 24);
    let of = |pass| GPUS.map(|(_, name)| flops(&report, pass, name));
    assert_eq!(of(Pass::Forward), [first, second], "{report}");
    assert_eq!(of(Pass::Backward), [first, 2 * second], "{report}");
}

/// A recording synchronizes; what runs before and after it does not.
#[test]
fn only_the_recorded_runs_synchronize() {
    let Some(simulation) = Simulation::find() else { return };
    let model = Model::new(Device::Cuda(0));
    let count = || simulation.count(|| model.run().unwrap()).1;
    let _warm = count();
    let before = count();
    let run = || Profiler::new(&model.vs).warm_up(0).run(|| model.run());
    let (report, during) = simulation.count(run);
    let calls: u64 = operators(&report.unwrap()).iter().map(|row| row.calls).sum();
    assert_eq!(before.host_syncs, 0, "{before:?}");
    assert!(during.host_syncs >= 2 * i64::try_from(calls).unwrap(), "{during:?}, {calls} calls");
    assert_eq!(during.launches, before.launches, "{before:?} without a recording, {during:?}");
    let after = count();
    assert_eq!((after.host_syncs, after.launches), (0, before.launches), "{after:?}");
}
