//! The calls and floating-point operations of a report, compared with torch.profiler and torch.utils.flop_counter.

use std::collections::BTreeMap;

use serde_json::Value;
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::insight::{OperatorReport, Profiler};
use tch_amp::{Result, autocast};

use crate::insight::alone;
use crate::insight::report_times::operators;
use testkit::python::Oracle;

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Profiles one program.
type Program = fn() -> Result<OperatorReport>;

fn linear() -> Result<OperatorReport> {
    let vs = VarStore::new(Device::Cpu);
    let first = nn::linear(vs.root() / "first", 16, 32, Default::default());
    let last = nn::linear(vs.root() / "last", 32, 10, Default::default());
    let (x, y) = (Tensor::ones([8, 16], F32), || Tensor::zeros([8, 10], F32));
    Profiler::new(&vs).run(|| {
        let loss = autocast(Device::Cpu, || {
            last.forward(&first.forward(&x).relu()).mse_loss(&y(), Reduction::Mean)
        })?;
        Ok(loss.f_backward()?)
    })
}

fn convolution() -> Result<OperatorReport> {
    let vs = VarStore::new(Device::Cpu);
    let config = nn::ConvConfig { stride: 2, padding: 1, ..Default::default() };
    let layer = nn::conv2d(vs.root(), 3, 8, 3, config);
    let x = Tensor::ones([2, 3, 9, 9], F32);
    Profiler::new(&vs).run(|| {
        let loss =
            autocast(Device::Cpu, || layer.forward(&x).to_kind(Kind::Float).square().mean(None))?;
        Ok(loss.f_backward()?)
    })
}

fn attention() -> Result<OperatorReport> {
    let [q, k, v] = [(); 3].map(|()| Tensor::ones([2, 2, 16, 8], F32).set_requires_grad(true));
    Profiler::new(&VarStore::new(Device::Cpu)).run(|| {
        let none = None::<&Tensor>;
        let y = Tensor::scaled_dot_product_attention(&q, &k, &v, none, 0.0, false, None, false);
        Ok(y.softmax(-1, None).sum(None).f_backward()?)
    })
}

/// Every operator of a report was called as often as in Python. Which of them compute, torch.profiler does not say.
#[test]
fn operators_are_called_as_often_as_in_python() {
    let Some(oracle) = Oracle::find("operator_calls.py") else { return };
    let answers: Value = serde_json::from_str(&oracle.run(&[], "")).unwrap();
    let _alone = alone();
    let programs: [(&str, Program); 3] =
        [("linear", linear), ("convolution", convolution), ("attention", attention)];
    for (name, run) in programs {
        let report = run().unwrap();
        let mut calls: BTreeMap<String, u64> = BTreeMap::new();
        for row in operators(&report) {
            *calls.entry(row.operator).or_default() += row.calls;
        }
        assert!(calls.len() > 4, "{name}: {report}");
        for (operator, count) in &calls {
            let python = answers[name]["calls"][operator].as_u64();
            assert_eq!(python, Some(*count), "{name}, {operator}: {report}");
        }
        assert_eq!(answers[name]["flops"].as_u64(), Some(report.flops()), "{name}: {report}");
    }
}
