//! The casts of a report, what autocast moved to f32, and the lists.

use std::sync::MutexGuard;

use serde::Deserialize;
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::Autocast;
use tch_amp::insight::{AutocastList, Dtype, OperatorReport, Pass, Profiler, named};
use tch_amp::optim::AdamW;
use tch_amp::scaler::GradScalerConfig;

use crate::insight::alone;
use testkit::rows::rows;

#[derive(Deserialize)]
struct Cast {
    from: Dtype,
    to: Dtype,
    reason: String,
    operator: Option<String>,
    path: Option<String>,
    parameter: Option<String>,
    pass: Pass,
    calls: u64,
    bytes: u64,
    repeats: u64,
    cacheable: u64,
}

#[derive(Deserialize)]
struct Moved {
    operator: String,
    path: Option<String>,
    list: AutocastList,
    calls: u64,
}

#[derive(Deserialize)]
struct Listed {
    operator: String,
    list: AutocastList,
    calls: u64,
}

struct Model {
    vs: VarStore,
    layer: nn::Linear,
    x: Tensor,
    // The cache is that of all threads, and empty as soon as a region of any thread ends.
    _alone: MutexGuard<'static, ()>,
}

impl Model {
    fn new() -> Self {
        let alone = alone();
        let vs = VarStore::new(Device::Cpu);
        let layer = nn::linear(vs.root() / "layer", 8, 16, Default::default());
        Self { vs, layer, x: Tensor::ones([4, 8], (Kind::Float, Device::Cpu)), _alone: alone }
    }

    fn profiled(&self, f: impl FnMut() -> tch_amp::Result<()>) -> OperatorReport {
        Profiler::new(&self.vs).run(f).unwrap()
    }
}

fn casts(report: &OperatorReport) -> Vec<Cast> {
    rows(report, "casts")
}

fn sum(report: &OperatorReport, of: impl Fn(&Cast) -> u64) -> u64 {
    casts(report).iter().map(of).sum()
}

fn calls(report: &OperatorReport, reason: &str) -> u64 {
    sum(report, |row| if row.reason == reason { row.calls } else { 0 })
}

/// The weight and the bias are cast once with the cache and three times without; the input each time.
#[test]
fn casts_are_counted_with_and_without_the_cache() {
    let model = Model::new();
    let run = |cache: bool| {
        let region = Autocast::new(Device::Cpu).cache(cache);
        let forward = || (0..3).map(|_| model.layer.forward(&model.x)).collect::<Vec<_>>();
        model.profiled(|| region.run(forward).map(drop))
    };
    let with = run(true);
    assert_eq!((calls(&with, "Autocast"), casts(&with).len()), (2 + 3, 3), "{with}");
    assert_eq!(sum(&with, |row| row.cacheable), 0, "{with}");
    assert_eq!(sum(&with, |row| row.repeats), 2, "the input is cast three times: {with}");
    let without = run(false);
    assert_eq!(calls(&without, "Autocast"), 9, "{without}");
    assert_eq!(sum(&without, |row| row.cacheable), 4, "{without}");
    assert_eq!(sum(&without, |row| row.repeats), 6, "{without}");
    for row in casts(&without) {
        assert_eq!((row.from.as_str(), row.to.as_str()), ("fp32", "bf16"), "{without}");
        assert_eq!(row.operator.as_deref(), Some("aten::linear"), "{without}");
        assert_eq!(row.path.as_deref(), Some("layer"), "{without}");
        assert_eq!((row.pass, row.calls), (Pass::Forward, 3), "{without}");
        let elements = match row.parameter.as_deref() {
            Some("layer.weight") => 8 * 16,
            Some("layer.bias") => 16,
            _ => 4 * 8,
        };
        assert_eq!(row.bytes, 3 * elements * (4 + 2), "{without}");
    }
}

/// Each outermost region begins with an empty cache.
#[test]
fn a_region_for_each_layer_casts_a_shared_weight_again() {
    let model = Model::new();
    let region = Autocast::new(Device::Cpu);
    let report = model.profiled(|| {
        for _ in 0..2 {
            let _y = region.run(|| model.layer.forward(&model.x))?;
        }
        Ok(())
    });
    assert_eq!(calls(&report, "Autocast"), 6, "{report}");
    assert_eq!(sum(&report, |row| row.cacheable), 2, "{report}");
}

#[test]
fn a_tensor_that_was_written_is_not_cast_again() {
    let model = Model::new();
    let mut x = Tensor::ones([4], (Kind::Float, Device::Cpu));
    let report = model.profiled(|| {
        let _first = x.to_kind(Kind::BFloat16);
        let _second = x.to_kind(Kind::BFloat16);
        drop(x.fill_(2));
        let _third = x.to_kind(Kind::BFloat16);
        let _other = x.to_kind(Kind::Half);
        Ok(())
    });
    assert_eq!((calls(&report, "Program"), casts(&report).len()), (4, 2), "{report}");
    assert_eq!((sum(&report, |row| row.repeats), sum(&report, |row| row.cacheable)), (1, 0));
}

#[test]
fn the_derivative_of_a_cast_names_the_forward_operator() {
    let model = Model::new();
    let region = Autocast::new(Device::Cpu);
    let report = model.profiled(|| {
        let loss = region.run(|| model.layer.forward(&model.x).sum(Kind::Float))?;
        Ok(loss.f_backward()?)
    });
    let casts = casts(&report);
    let derivatives = casts.iter().filter(|row| row.reason == "Derivative");
    let mut found: Vec<_> = derivatives
        .map(|row| {
            assert_eq!(row.pass, Pass::Backward, "{report}");
            let (operator, path) = (row.operator.as_deref(), row.path.as_deref());
            (operator, path, row.from.as_str(), row.to.as_str(), row.calls)
        })
        .collect();
    found.sort_unstable();
    // Those of the weight and the bias, and that of the sum's argument.
    let expected = [
        (Some("aten::linear"), Some("layer"), "bf16", "fp32", 2),
        (Some("aten::sum"), None, "fp32", "bf16", 1),
    ];
    assert_eq!(found, expected, "{report}");
}

#[test]
fn operators_that_autocast_moves_to_f32_are_named_with_their_part() {
    let model = Model::new();
    let region = Autocast::new(Device::Cpu);
    let target = Tensor::zeros([4, 16], (Kind::Float, Device::Cpu));
    let report = model.profiled(|| {
        let loss = region.run(|| {
            let y = model.layer.forward(&model.x);
            let same = Tensor::cat(&[&y, &y], 0).sum(Kind::Float);
            let wide = named("joined", || Tensor::cat(&[&y, &target], 0));
            let f32_only = target.mse_loss(&target, Reduction::Mean);
            let loss = named("loss", || y.mse_loss(&target, Reduction::Mean));
            loss + same + wide.sum(Kind::Float) + f32_only
        })?;
        Ok(loss.f_backward()?)
    });
    let moved: Vec<Moved> = rows(&report, "moved_to_f32");
    let mut found: Vec<_> = moved
        .iter()
        .map(|row| (row.operator.as_str(), row.path.as_deref(), row.list, row.calls))
        .collect();
    found.sort_unstable();
    let expected = [
        ("aten::cat", Some("joined"), AutocastList::Widest, 1),
        ("aten::mse_loss", Some("loss"), AutocastList::F32, 1),
    ];
    assert_eq!(found, expected, "{report}");
    let lists: Vec<Listed> = rows(&report, "lists");
    let list = |name: &str| {
        let listed = lists.iter().find(|listed| listed.operator == name);
        listed.map(|listed| (listed.list, listed.calls))
    };
    assert_eq!(list("aten::linear"), Some((AutocastList::LowerPrecision, 1)), "{report}");
    assert_eq!(list("aten::mse_loss"), Some((AutocastList::F32, 2)), "{report}");
    assert_eq!(list("aten::cat"), Some((AutocastList::Widest, 2)), "{report}");
    assert_eq!(list("aten::add"), Some((AutocastList::Untouched, 3)), "{report}");
    // Autocast's own calls, and backward, are outside of the region.
    assert_eq!(list("aten::addmm"), None, "{report}");
}

#[test]
fn a_report_is_the_same_after_json() {
    let model = Model::new();
    let region = Autocast::new(Device::Cpu).cache(false);
    let report = model.profiled(|| region.run(|| drop(model.layer.forward(&model.x))));
    let text = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<OperatorReport>(&text).unwrap(), report);
}

/// The parts of a tensor share its memory, but are other numbers.
#[test]
fn casts_of_parts_of_a_tensor_are_no_repeats() {
    let model = Model::new();
    let region = Autocast::new(Device::Cpu);
    let report = model.profiled(|| {
        for part in model.x.chunk(2, 0) {
            let _program = part.to_kind(Kind::Half);
            let _autocast = region.run(|| part.mm(&part.tr()))?;
        }
        Ok(())
    });
    assert_eq!(calls(&report, "Program"), 2, "{report}");
    // Each part and its transpose.
    assert_eq!(calls(&report, "Autocast"), 4, "{report}");
    assert_eq!(sum(&report, |row| row.repeats), 0, "{report}");
}

/// Operators on no list cast on their own, also inside of a region.
#[test]
fn a_cast_that_an_operator_makes_itself_is_not_autocasts() {
    let model = Model::new();
    let half = model.x.to_kind(Kind::BFloat16);
    let region = Autocast::new(Device::Cpu);
    let report = model.profiled(|| {
        region.run(|| {
            let _promoted = &half * &model.x;
            let _asked = half.softmax(-1, Kind::Float);
        })
    });
    assert_eq!(calls(&report, "Operator"), 2, "{report}");
    assert_eq!(calls(&report, "Autocast"), 0, "{report}");
}

/// The kernel of an optimizer writes to parameters without an operator.
#[test]
fn a_parameter_that_a_step_changed_is_not_cast_again() {
    let model = Model::new();
    let region = Autocast::new(Device::Cpu);
    let mut opt = AdamW::default().build(&model.vs, 1e-3).unwrap();
    let mut scaler = GradScalerConfig::default().build(Device::Cpu).unwrap();
    let report = model.profiled(|| {
        for _ in 0..2 {
            let loss = region.run(|| model.layer.forward(&model.x).sum(Kind::Float))?;
            scaler.backward(&loss)?;
            scaler.step(&mut opt)?;
            scaler.update()?;
            opt.zero_grad()?;
        }
        Ok(())
    });
    let of_parameters = |row: &Cast| if row.parameter.is_some() { row.calls } else { 0 };
    assert_eq!(sum(&report, of_parameters), 4, "{report}");
    assert_eq!(sum(&report, |row| row.cacheable), 0, "{report}");
}
