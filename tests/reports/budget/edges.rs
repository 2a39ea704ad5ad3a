//! Programs at the edges of what a budget compares.

use std::sync::MutexGuard;

use serde::Deserialize;
use tch::nn::{self, Module, ModuleT, VarStore};
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::autocast::{Plan, Rule, RunAs};
use tch_amp::insight::{
    Budget, BudgetFile, BudgetProblem, BudgetReport, BudgetRun, Dtype, ScaleFault, audit,
};
use tch_amp::optim::{AdamW, AmpOptimizer, MasterWeights, Optimizer, Sgd};
use tch_amp::{Amp, Autocast, Error, GradScaler, Result};

use crate::budget::alone;
use testkit::assert_refused;
use testkit::rows::rows;

/// A row of a budget's report.
#[derive(Debug, Deserialize)]
struct Row {
    quantity: String,
    name: String,
    limit: f64,
    lost: Option<f64>,
}

/// A store whose weights will be those of one seed, and what keeps other tests from the generator.
fn store() -> (VarStore, MutexGuard<'static, ()>) {
    let alone = alone();
    tch::manual_seed(0);
    (VarStore::new(Device::Cpu), alone)
}

fn floats(sizes: &[i64]) -> Tensor {
    Tensor::randn(sizes, (Kind::Float, Device::Cpu))
}

fn region(dtype: Kind) -> Autocast {
    Autocast::new(Device::Cpu).dtype(dtype)
}

/// Measures iterations whose parameters AdamW steps.
fn measured(
    vs: &VarStore,
    region: Autocast,
    iteration: impl FnMut(&mut BudgetRun, &mut Optimizer) -> Result<Tensor>,
) -> BudgetReport {
    Budget::new(vs, region).measure(|| AdamW::default().build(vs, 1e-3), iteration).unwrap()
}

/// The same of a loss.
fn measured_loss(
    vs: &VarStore,
    region: Autocast,
    loss: impl Fn(&BudgetRun) -> Tensor,
) -> BudgetReport {
    measured(vs, region, |run, optimizer| step(run, optimizer, &loss))
}

/// A whole iteration.
fn step(
    run: &mut BudgetRun,
    optimizer: &mut Optimizer,
    loss: &dyn Fn(&BudgetRun) -> Tensor,
) -> Result<Tensor> {
    let loss = run.region(|| loss(run))?;
    let _outcome = run.scaler().backward_step(optimizer, &loss)?;
    Ok(loss)
}

/// A product that libtorch expands.
#[test]
fn operands_are_broadcast() {
    let (vs, _alone) = store();
    let layer = nn::linear(vs.root() / "layer", 16, 16, Default::default());
    let query = vs.root().var("query", &[1, 8, 16], nn::Init::Randn { mean: 0.0, stdev: 1.0 });
    let (edges, xs) = (floats(&[12, 12]), floats(&[4, 12, 16]));
    let forward = || {
        let mixed = edges.matmul(&layer.forward(&xs));
        query.matmul(&mixed.transpose(1, 2)).to_kind(Kind::Float).square().mean(Kind::Float)
    };
    for dtype in [Kind::BFloat16, Kind::Half] {
        measured_loss(&vs, region(dtype), |_| forward()).assert();
        audit(&vs, &region(dtype), &GradScaler::disabled(), |region| region.run(forward)).unwrap();
    }
}

#[test]
fn a_loss_that_overflows_is_over_budget() {
    let (vs, _alone) = store();
    let layer = nn::linear(vs.root() / "layer", 16, 64, Default::default());
    let xs = floats(&[64, 16]) * 10.0;
    let loss = |_: &BudgetRun| layer.forward(&xs).square().sum(None::<Kind>);
    let report = measured_loss(&vs, region(Kind::Half), loss);
    let is_named = |problem: &BudgetProblem| matches!(problem, BudgetProblem::NotFinite(names) if names.contains(&"the loss".to_owned()));
    assert!(report.problems.iter().any(is_named), "{report}");
}

/// Everything is in half precision, and nothing is left to a region. Running statistics in half precision are not
/// rounding alone.
#[test]
fn a_program_can_be_all_in_half_precision() {
    let _alone = alone();
    for statistics in [false, true] {
        let report = all_in_half_precision(statistics);
        assert_eq!(report.is_within(), !statistics, "{report}");
        assert!(report.over().iter().all(|name| name.starts_with("buffer ")), "{report}");
    }
}

fn all_in_half_precision(statistics: bool) -> BudgetReport {
    tch::manual_seed(0);
    let mut vs = VarStore::new(Device::Cpu);
    let norm: Box<dyn ModuleT> = match statistics {
        true => Box::new(nn::batch_norm1d(vs.root() / 1, 32, Default::default())),
        false => Box::new(nn::layer_norm(vs.root() / 1, vec![32], Default::default())),
    };
    let (first, last) = (
        nn::linear(vs.root() / 0, 16, 32, Default::default()),
        nn::linear(vs.root() / 2, 32, 4, Default::default()),
    );
    vs.bfloat16();
    let xs = floats(&[32, 16]);
    let adamw = AdamW::default().master_weights(MasterWeights::Float);
    // The optimizer does not know the names.
    let optimizer = || adamw.build(vs.trainable_variables(), 1e-3);
    let report = Budget::new(&vs, region(Kind::BFloat16)).measure(optimizer, |run, optimizer| {
        let hidden = norm.forward_t(&first.forward(&xs.to_kind(run.dtype())), true).tanh();
        let loss = run.output("ys", &last.forward(&hidden)).square().mean(Kind::Float);
        let _outcome = run.scaler().backward_step(optimizer, &loss)?;
        Ok(loss)
    });
    assert!(vs.variables().values().all(|variable| variable.kind() == Kind::BFloat16));
    report.unwrap()
}

/// Adapters in f32 beside frozen weights in bf16.
#[test]
fn frozen_weights_can_be_in_half_precision() {
    let (vs, _alone) = store();
    let frozen = vs.root().var_copy("frozen", &floats(&[16, 16]));
    let frozen = {
        let mut frozen = frozen.set_requires_grad(false);
        frozen.set_data(&frozen.to_kind(Kind::BFloat16));
        frozen
    };
    let down = nn::linear(vs.root() / "down", 16, 4, Default::default());
    let up = nn::linear(vs.root() / "up", 4, 16, Default::default());
    let xs = floats(&[32, 16]);
    let report = measured_loss(&vs, region(Kind::BFloat16), |run| {
        let ys = xs.matmul(&frozen) + up.forward(&down.forward(&xs));
        run.output("ys", &ys).square().mean(Kind::Float)
    });
    report.assert();
    assert_eq!(frozen.kind(), Kind::BFloat16);
}

/// The scale of a scaler without `update` never changes.
#[test]
fn an_iteration_that_does_not_update_its_scaler_is_over_budget() {
    let (vs, _alone) = store();
    let layer = nn::linear(vs.root(), 16, 16, Default::default());
    let xs = floats(&[32, 16]);
    let loss = || layer.forward(&xs).tanh().square().mean(Kind::Float);
    type Ways = fn(&mut BudgetRun, &mut Optimizer) -> Result<()>;
    let ways: [(&str, bool, Ways); 6] = [
        ("an update", true, |run, optimizer| {
            let _outcome = run.scaler().step(optimizer)?;
            run.scaler().update()
        }),
        ("a scale that the program sets", true, |run, optimizer| {
            let _outcome = run.scaler().step(optimizer)?;
            run.scaler().update_with(512.0)
        }),
        ("no update after a step", false, |run, optimizer| run.scaler().step(optimizer).map(drop)),
        ("no update after a step that clips", false, |run, optimizer| {
            run.scaler().step_clip_norm(optimizer, 1.0).map(drop)
        }),
        ("no update after steps of the program's own", false, |run, optimizer| {
            let scale = run.scaler().get_scale()?;
            for parameter in optimizer.parameters().as_slice() {
                no_grad(|| parameter.grad().f_div_scalar_(scale).map(drop))?;
            }
            optimizer.step()
        }),
        ("no update in half precision", false, |run, optimizer| {
            let _outcome = run.scaler().step(optimizer)?;
            if run.is_half() { Ok(()) } else { run.scaler().update() }
        }),
    ];
    for (what, is_right, end) in ways {
        for dtype in [Kind::BFloat16, Kind::Half] {
            let optimizer = || AdamW::default().build(&vs, 1e-3);
            let budget = Budget::new(&vs, region(dtype));
            let mut iteration = |run: &mut BudgetRun, optimizer: &mut Optimizer| {
                optimizer.zero_grad()?;
                let loss = run.region(loss)?;
                run.scaler().backward(&loss)?;
                end(run, optimizer)?;
                Ok(loss)
            };
            let report = budget.measure(optimizer, &mut iteration).unwrap();
            let expected = if is_right { vec![] } else { vec![BudgetProblem::NotUpdated] };
            assert_eq!(report.problems, expected, "{what}, {dtype:?}: {report}");
            let checked = budget.check(&report.file(), optimizer, &mut iteration).unwrap();
            assert_eq!(checked.problems, expected, "{what}, {dtype:?}: {checked}");
        }
    }
}

/// What makes the gradients of a loss too small for fp16.
const SMALL: f64 = 2e-5;

/// Gradients that are too small for fp16 become zero, and noise is as large as they are.
#[test]
fn a_loss_that_is_too_small_for_fp16_is_over_budget_with_the_share_that_is_lost() {
    let (vs, _alone) = store();
    let layer = |i: i64| nn::linear(vs.root() / i, 32, 32, Default::default());
    let (first, last) = (layer(0), layer(1));
    let forward = |xs: &Tensor| last.forward(&first.forward(xs).tanh());
    let xs = floats(&[16, 32]);
    let optimizer = || AdamW::default().build(&vs, 1e-3);
    let iteration = |scaled: bool, small: f64| {
        let (forward, xs) = (&forward, &xs);
        move |run: &mut BudgetRun, optimizer: &mut Optimizer| {
            let loss = run.region(|| forward(xs).square().mean(Kind::Float) * small)?;
            if scaled {
                let _outcome = run.scaler().backward_step(optimizer, &loss)?;
            } else {
                optimizer.backward_step(&loss)?;
            }
            Ok(loss)
        }
    };
    let measure = |dtype, scaled, small| {
        Budget::new(&vs, region(dtype)).measure(optimizer, iteration(scaled, small)).unwrap()
    };
    let lost = measure(Kind::Half, false, SMALL);
    assert!(!lost.is_within(), "{lost}");
    let of = |report: &BudgetReport, name: &str| {
        let mut rows = rows::<Row>(report, "rows").into_iter();
        rows.find(|row| row.name == name && row.quantity == "Gradient").unwrap().lost
    };
    // The gradient of the last layer by hand, with fp16's smallest numbers 2^-24 apart.
    let hidden = first.forward(&xs).tanh();
    let wide = |t: &Tensor| t.detach().to_kind(Kind::Double);
    let in_fp16 = |t: Tensor| (t * 2f64.powi(24)).round() * 2f64.powi(-24);
    let of_squares = in_fp16(Tensor::from(SMALL / 512.0));
    let of_outputs = in_fp16(wide(&forward(&xs)) * (of_squares * 2.0));
    let gradient = in_fp16(of_outputs.transpose(0, 1).matmul(&wide(&hidden)));
    let expected = gradient.eq(0.0).to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
    let share = of(&lost, "1.weight").unwrap();
    assert!((share - expected).abs() < 0.01 && (0.01..0.9).contains(&share), "{share}, {expected}");
    let text = format!(
        "nothing can be told here: {:.0} % of the numbers are below fp16's range",
        100.0 * share
    );
    assert!(lost.to_string().contains(&text), "{lost}");
    // A scale, a loss that is large enough, or the range of bf16.
    for (dtype, scaled, small) in
        [(Kind::Half, true, SMALL), (Kind::Half, false, 1.0), (Kind::BFloat16, false, SMALL)]
    {
        measure(dtype, scaled, small).assert();
    }
    // What the program allows, and what a file knows.
    let budget = Budget::new(&vs, region(Kind::Half));
    let allowed = budget.allow_underflow("*");
    let report = allowed.measure(optimizer, iteration(false, SMALL)).unwrap();
    assert!(rows::<Row>(&report, "rows").iter().all(|row| row.lost.is_none()), "{report}");
    report.assert();
    let budget = Budget::new(&vs, region(Kind::Half));
    let checked = budget.check(&lost.file(), optimizer, iteration(false, SMALL)).unwrap();
    assert_eq!(of(&checked, "1.weight"), Some(share));
    allowed.check(&lost.file(), optimizer, iteration(false, SMALL)).unwrap().assert();
}

/// The noise that a budget's file keeps.
#[derive(Debug, Deserialize)]
struct Kept {
    quantity: String,
    name: String,
    noise: Vec<Noise>,
}

#[derive(Debug, Deserialize)]
struct Noise {
    error: f64,
    median: f64,
}

/// Between gradients that underflow and those that do not, there is none that may be as far from f32 as it is large.
#[test]
fn no_gradient_in_fp16_may_be_wrong_by_as_much_as_it_is_large() {
    let (vs, _alone) = store();
    let layer = |i: i64| nn::linear(vs.root() / i, 32, 32, Default::default());
    let (first, last) = (layer(0), layer(1));
    let xs = floats(&[16, 32]);
    let mut counts = [0, 0];
    for small in [2e-5, 2.4e-5, 2.8e-5, 3.3e-5, 3.8e-5, 4.5e-5, 5.3e-5, 7.4e-5, 1e-4, 1e-3] {
        let optimizer = || AdamW::default().build(&vs, 1e-3);
        let budget = Budget::new(&vs, region(Kind::Half));
        let mut iteration = |run: &mut BudgetRun, optimizer: &mut Optimizer| {
            optimizer.zero_grad()?;
            let loss = run.region(|| {
                let ys = last.forward(&first.forward(&xs).tanh());
                ys.square().mean(Kind::Float) * small
            })?;
            optimizer.backward_step(&loss)?;
            Ok(loss)
        };
        let report = budget.measure(optimizer, &mut iteration).unwrap();
        let checked = budget.check(&report.file(), optimizer, &mut iteration).unwrap();
        let kept = serde_json::to_value(report.file()).unwrap()["measured"]["quantities"].take();
        for Kept { quantity, name, noise } in serde_json::from_value::<Vec<Kept>>(kept).unwrap() {
            if quantity != "Gradient" {
                continue;
            }
            let mean = |of: &dyn Fn(&Noise) -> f64| {
                let squares: f64 = noise.iter().map(|run| of(run) * of(run)).sum();
                (squares / noise.len() as f64).sqrt()
            };
            let (error, median) = (mean(&|run| run.error), mean(&|run| run.median));
            // Either the norm or the median within 3 × noise, and the norm within 12 ×.
            let as_large = f64::max(f64::min(1.0 / error, 1.0 / median), 0.25 / error);
            for (report, allowance) in [(&report, 1.0), (&checked, 1.25)] {
                let mut rows = rows::<Row>(report, "rows").into_iter();
                let row = rows.find(|row| row.quantity == quantity && row.name == name).unwrap();
                assert_eq!(row.lost.is_some(), as_large <= 3.0, "{small}, {name}: {report}");
                let is_over = as_large > row.limit || row.lost.is_some();
                assert!(is_over && row.limit <= 3.0 * allowance, "{small}, {name}: {report}");
                counts[usize::from(row.lost.is_some())] += 1;
            }
        }
    }
    assert!(counts.iter().all(|&count| count >= 20), "{counts:?}");
}

/// None of their numbers becomes zero, but fp16 has few for those that they are computed from.
#[test]
fn gradients_that_come_from_the_end_of_fp16s_range_are_over_budget() {
    let (vs, _alone) = store();
    let first = nn::linear(vs.root() / "first", 16, 32, Default::default());
    let last = nn::linear(vs.root() / "last", 32, 4, Default::default());
    let xs = floats(&[64, 16]);
    for (dtype, small) in [(Kind::Half, 3e-8), (Kind::Half, 1e-3), (Kind::BFloat16, 3e-8)] {
        let report = measured_loss(&vs, region(dtype), |_| {
            let hidden = (first.forward(&xs) * small).to_kind(Kind::Float) / small;
            last.forward(&hidden).square().mean(Kind::Float)
        });
        let is_lost = dtype == Kind::Half && small < 1e-3;
        assert_eq!(report.is_within(), !is_lost, "{report}");
        let text = "gradient first.bias: nothing can be told here: what the numbers are computed from is at the end of \
                    fp16's range; use a larger scale, or `allow_underflow`";
        assert_eq!(report.to_string().contains(text), is_lost, "{report}");
    }
}

/// The gradient of a bias before a normalization is rounding and nothing else.
#[test]
fn gradients_that_are_rounding_alone_are_not_compared_exactly() {
    let (vs, _alone) = store();
    let first = nn::linear(vs.root() / "first", 16, 32, Default::default());
    let norm = nn::batch_norm1d(vs.root() / "norm", 32, Default::default());
    let xs = floats(&[64, 16]);
    let ys = floats(&[64, 32]);
    for lr in [1e-1, 1e-3, 1e-6] {
        let budget = Budget::new(&vs, region(Kind::BFloat16));
        let report = budget.measure(
            || Sgd::default().build(&vs, lr),
            |run, optimizer| {
                step(run, optimizer, &|_| {
                    (first.forward(&xs).apply_t(&norm, true) - &ys).square().mean(Kind::Float)
                })
            },
        );
        report.unwrap().assert();
    }
}

#[test]
fn an_optimizer_of_other_models_is_refused() {
    let _alone = alone();
    let (vs, other) = (VarStore::new(Device::Cpu), VarStore::new(Device::Cpu));
    let layer = nn::linear(vs.root(), 4, 4, Default::default());
    let head = nn::linear(other.root(), 4, 4, Default::default());
    let xs = floats(&[8, 4]);
    let both = || {
        let variables = vs.trainable_variables().into_iter().chain(other.trainable_variables());
        AdamW::default().build(variables.collect::<Vec<_>>(), 1e-3)
    };
    let before = head.ws.copy();
    let measured = Budget::new(&vs, region(Kind::BFloat16)).measure(both, |run, optimizer| {
        step(run, optimizer, &|_| head.forward(&layer.forward(&xs)).square().mean(Kind::Float))
    });
    assert_refused!(measured, Error::InvalidArgument { name: "optimizer", .. });
    assert_eq!(head.ws, before);
}

/// The backbone has gradients that nobody uses or clears.
#[test]
fn parameters_that_the_optimizer_does_not_have_do_not_matter() {
    let (vs, _alone) = store();
    let backbone = nn::linear(vs.root() / "backbone", 16, 32, Default::default());
    let head = nn::linear(vs.root() / "head", 32, 4, Default::default());
    let empty = vs.root().zeros("empty", &[0]);
    let xs = floats(&[32, 16]);
    let optimizer = || {
        let of_head = [&head.ws, head.bs.as_ref().unwrap(), &empty].map(Tensor::shallow_clone);
        AdamW::default().build(Vec::from(of_head), 1e-3)
    };
    let report = Budget::new(&vs, region(Kind::BFloat16)).measure(optimizer, |run, optimizer| {
        step(run, optimizer, &|_| {
            let ys = head.forward(&backbone.forward(&xs).relu()).square().mean(Kind::Float);
            ys + empty.sum(Kind::Float)
        })
    });
    let report = report.unwrap();
    report.assert();
    let rows = rows::<Row>(&report, "rows");
    let of_gradients = rows.iter().filter(|row| row.quantity == "Gradient");
    assert!(of_gradients.clone().all(|row| !row.name.starts_with("backbone")), "{rows:?}");
    assert!(of_gradients.count() >= 2);
}

/// The first of two steps is not unscaled, and Adam's first update does not show it.
#[test]
fn every_step_of_an_iteration_is_compared() {
    let (vs, _alone) = store();
    let layer = nn::linear(vs.root(), 16, 16, Default::default());
    let xs = floats(&[32, 16]);
    for forgotten in [false, true] {
        let report = measured(&vs, region(Kind::BFloat16), |run, optimizer| {
            let loss = |_: &BudgetRun| layer.forward(&xs).tanh().square().mean(Kind::Float);
            if forgotten && run.is_half() {
                optimizer.zero_grad()?;
                let first = run.region(|| loss(run))?;
                run.scaler().backward(&first)?;
                optimizer.step()?;
            } else {
                let _loss = step(run, optimizer, &loss)?;
            }
            step(run, optimizer, &loss)
        });
        assert_eq!(report.is_within(), !forgotten, "{report}");
    }
}

/// A file is compared by names, in whatever order a later program gives them.
#[test]
fn outputs_of_a_file_are_found_by_name() {
    let (vs, _alone) = store();
    let layer = nn::linear(vs.root(), 64, 64, Default::default());
    let xs = floats(&[32, 64]);
    let iterate = |first: &'static str, second: &'static str| {
        let (layer, xs) = (&layer, &xs);
        move |run: &mut BudgetRun, optimizer: &mut Optimizer| {
            step(run, optimizer, &|run| {
                let small = layer.forward(xs);
                let large = no_grad(|| (layer.forward(xs) * 300.0).sin());
                for name in [first, second] {
                    let _output = run.output(name, if name == "small" { &small } else { &large });
                }
                small.square().mean(Kind::Float)
            })
        }
    };
    let optimizer = || AdamW::default().build(&vs, 1e-3);
    let budget = Budget::new(&vs, region(Kind::BFloat16));
    let file = budget.measure(optimizer, iterate("small", "large")).unwrap().file();
    budget.check(&file, optimizer, iterate("large", "small")).unwrap().assert();
}

#[test]
fn an_optimizer_of_ones_own_is_compared_by_gradients_and_updates() {
    struct SignSgd(Vec<Tensor>);
    impl AmpOptimizer for SignSgd {
        fn parameters(&self) -> tch_amp::optim::Parameters<'_> {
            self.0.as_slice().into()
        }
        fn update(&mut self, _step: &tch_amp::optim::Step<'_>) -> Result<()> {
            no_grad(|| {
                for w in &mut self.0 {
                    let sign = w.grad().sign() * 1e-3;
                    *w -= sign;
                }
            });
            Ok(())
        }
    }
    let (vs, _alone) = store();
    let layer = nn::linear(vs.root(), 16, 16, Default::default());
    let xs = floats(&[32, 16]);
    let optimizer = || Ok::<_, Error>(SignSgd(vs.trainable_variables()));
    let report = Budget::new(&vs, region(Kind::BFloat16)).measure(optimizer, |run, optimizer| {
        let loss = run.region(|| layer.forward(&xs).tanh().square().mean(Kind::Float))?;
        let _outcome = run.scaler().backward_step(optimizer, &loss)?;
        Ok(loss)
    });
    report.unwrap().assert();
}

/// Regions that are switched off, each in another way.
fn regions_in_f32() -> [(&'static str, Autocast); 5] {
    let plan = Plan::new(Device::Cpu).unwrap();
    let bf16 = region(Kind::BFloat16);
    [
        ("a plan", Autocast::new(Device::Cpu).plan(&plan).unwrap()),
        ("a plan after a dtype", bf16.plan(&plan).unwrap()),
        ("a region that is off", bf16.enabled(false)),
        ("a precision", Amp::Off.on(Device::Cpu).unwrap().region()),
        ("a planned precision", Amp::Bf16.on(Device::Cpu).unwrap().plan(&plan).unwrap().region()),
    ]
}

const IN_F32: &str = "keeps everything in f32, as its plan or `enabled(false)` says, so that there is nothing to compare";

#[test]
fn a_region_in_f32_is_within_budget_and_the_report_says_why() {
    let _alone = alone();
    for (what, region) in regions_in_f32() {
        tch::manual_seed(0);
        let vs = VarStore::new(Device::Cpu);
        let (first, last) = (
            nn::linear(vs.root() / 0, 16, 32, Default::default()),
            nn::linear(vs.root() / 1, 32, 4, Default::default()),
        );
        let xs = floats(&[32, 16]);
        let budget = Budget::new(&vs, region);
        let optimizer = || AdamW::default().build(&vs, 1e-3);
        // The casts of the program follow the region.
        let mut iteration = |run: &mut BudgetRun, optimizer: &mut Optimizer| {
            let dtype = run.dtype();
            step(run, optimizer, &|run| {
                let hidden = first.forward(&xs.to_kind(dtype)).tanh().to_kind(dtype);
                run.output("ys", &last.forward(&hidden)).square().mean(Kind::Float)
            })
        };
        let report = budget.measure(optimizer, &mut iteration).unwrap();
        report.assert();
        assert_eq!((report.dtype, report.iterations), (Dtype::F32, 8), "{what}");
        let text = report.to_string();
        assert!(text.starts_with("fp32 at a scale of 2048: within budget"), "{what}: {text}");
        assert!(text.contains(IN_F32), "{what}: {text}");
        let json = serde_json::to_string(&report.file()).unwrap();
        let file: BudgetFile = serde_json::from_str(&json).unwrap();
        let checked = budget.check(&file, optimizer, &mut iteration).unwrap();
        checked.assert();
        assert!(checked.to_string().contains(IN_F32), "{what}: {checked}");
    }
}

/// What is wrong whatever the dtype, and half precision that comes from elsewhere.
#[test]
fn a_fault_beside_a_region_in_f32_is_over_budget() {
    let _alone = alone();
    for (what, region) in regions_in_f32() {
        tch::manual_seed(0);
        let vs = VarStore::new(Device::Cpu);
        let layer = nn::linear(vs.root(), 16, 16, Default::default());
        let xs = floats(&[32, 16]);
        let loss = |_: &BudgetRun| layer.forward(&xs).tanh().square().mean(Kind::Float);
        measured_loss(&vs, region, loss).assert();
        let forgotten = measured(&vs, region, |run, optimizer| {
            optimizer.zero_grad()?;
            let loss = run.region(|| loss(run))?;
            run.scaler().backward(&loss)?;
            optimizer.step()?;
            Ok(loss)
        });
        let text = forgotten.to_string();
        assert!(!forgotten.is_within() && text.contains("too large: not unscaled"), "{text}");
        assert!(!text.contains(IN_F32), "{text}");
        let inside = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
        let another = measured_loss(&vs, region, |run| inside.run(|| loss(run)).unwrap());
        assert_eq!(another.problems, [BudgetProblem::OtherHalf(Dtype::BF16)], "{what}: {another}");
    }
}

#[test]
fn a_region_that_is_not_opened_or_whose_rules_leave_nothing_is_over_budget() {
    let (vs, _alone) = store();
    let layer = nn::linear(vs.root(), 16, 16, Default::default());
    let xs = floats(&[32, 16]);
    let loss = || layer.forward(&xs).square().mean(Kind::Float);
    let rules = vec![Rule::new("linear", RunAs::F32)];
    let plan = Plan { dtype: Some(Kind::BFloat16), rules, ..Plan::new(Device::Cpu).unwrap() };
    let planned = Autocast::new(Device::Cpu).plan(&plan).unwrap();
    for (region, is_opened) in [(region(Kind::BFloat16), false), (planned, true), (planned, false)]
    {
        let report = measured(&vs, region, |run, optimizer| {
            let loss = if is_opened { run.region(loss)? } else { loss() };
            run.scaler().backward_step(optimizer, &loss)?;
            Ok(loss)
        });
        assert!(report.problems.contains(&BudgetProblem::NothingInHalf), "{report}");
        let advice = "was not opened, it has another device, or its rules keep";
        assert!(report.to_string().contains(advice), "{report}");
    }
}

/// A plan composes attention of other operators in half precision alone.
#[test]
fn a_plan_that_composes_attention_is_within_its_budget() {
    let (vs, _alone) = store();
    let qkv = nn::linear(vs.root() / "qkv", 16, 48, Default::default());
    let head = nn::linear(vs.root() / "head", 16, 4, Default::default());
    let xs = floats(&[4, 24, 16]);
    let composed = RunAs::Composed { most_bytes: u64::MAX };
    let rules = vec![Rule::new("scaled_dot_product_attention", composed)];
    for dtype in [Kind::BFloat16, Kind::Half] {
        let plan =
            Plan { dtype: Some(dtype), rules: rules.clone(), ..Plan::new(Device::Cpu).unwrap() };
        let planned = Autocast::new(Device::Cpu).plan(&plan).unwrap();
        let report = measured_loss(&vs, planned, |run| {
            let parts = qkv.forward(&xs).chunk(3, -1);
            let none = None::<&Tensor>;
            let mixed = Tensor::scaled_dot_product_attention(
                &parts[0], &parts[1], &parts[2], none, 0.0, true, None, false,
            );
            run.output("ys", &head.forward(&mixed)).square().mean(Kind::Float)
        });
        report.assert();
        // In fp16 two more show that the gradient of the keys' bias, zero but for rounding, does not underflow; eight may
        // decide. A bit that moved without rounding would take three more, or seven.
        assert!(matches!(report.iterations, 8 | 10 | 16 | 18), "{report}");
    }
}

/// What noise runs have in common with half precision besides rounding, in programs that ask for it by themselves.
#[test]
fn branches_on_what_noise_runs_share_are_over_budget() {
    let _alone = alone();
    type Wrong = fn(&BudgetRun, bool, &Tensor) -> Tensor;
    let branches: [(&str, Wrong); 3] = [
        ("a region that is on", |_, _, x| {
            let is_on = tch_amp::autocast::is_autocast_enabled(Device::Cpu);
            if is_on { x * 0.9 } else { x.shallow_clone() }
        }),
        ("the dtype of the run", |run, _, x| {
            if run.dtype() == Kind::Float { x.shallow_clone() } else { x.detach() + x * 1e-3 }
        }),
        (
            "an enabled scaler",
            |_, is_enabled, x| {
                if is_enabled { x * 1.5 } else { x.shallow_clone() }
            },
        ),
    ];
    for (what, wrong) in branches {
        for (planted, dtype) in
            [(false, Kind::BFloat16), (true, Kind::BFloat16), (true, Kind::Half)]
        {
            tch::manual_seed(0);
            let vs = VarStore::new(Device::Cpu);
            let layer = nn::linear(vs.root(), 16, 16, Default::default());
            let xs = floats(&[32, 16]);
            let report = measured(&vs, region(dtype), |run, optimizer| {
                let is_enabled = run.scaler().is_enabled();
                step(run, optimizer, &|run| {
                    let ys = layer.forward(&xs).tanh();
                    let ys = if planted { wrong(run, is_enabled, &ys) } else { ys };
                    ys.square().mean(Kind::Float)
                })
            });
            assert_eq!(report.is_within(), !planted, "{what}, {dtype:?}: {report}");
            let is_told =
                |problem: &BudgetProblem| matches!(problem, BudgetProblem::OtherThanRounding(_));
            assert_eq!(report.problems.iter().any(is_told), planted, "{what}, {dtype:?}: {report}");
        }
    }
}

/// In f32, gradients between two factors overflow at the first of the scales that are tried, or at the first two.
#[test]
fn an_overflow_at_some_scales_is_no_fault_and_hides_none() {
    let (vs, _alone) = store();
    let layer = nn::linear(vs.root(), 16, 16, Default::default());
    let xs = floats(&[32, 16]);
    for (powers, is_unscaled, overflows_at, found_at) in [
        ([115, 115], true, &[8192.0][..], None),
        ([115, 115], false, &[8192.0], Some(128.0)),
        // In half precision and with noise they are smaller.
        ([0, 121], false, &[8192.0, 128.0], Some(2.0)),
    ] {
        let mut overflowed = Vec::new();
        let optimizer = || AdamW::default().build(&vs, 1e-3);
        let budget = Budget::new(&vs, region(Kind::BFloat16));
        let report = budget.measure(optimizer, |run, optimizer| {
            optimizer.zero_grad()?;
            let power = powers[usize::from(run.dtype() == Kind::Float)];
            let loss = run.region(|| {
                let ys = layer.forward(&xs).tanh().to_kind(Kind::Float);
                let large = (&ys * 2f64.powi(-power)).sum(Kind::Float) * 2f64.powi(power);
                ys.square().mean(Kind::Float) + large
            })?;
            let scale = run.scaler().get_scale()?;
            run.scaler().backward(&loss)?;
            let is_finite = layer.ws.grad().isfinite().all().int64_value(&[]) == 1;
            overflowed.extend((!is_finite && !overflowed.contains(&scale)).then_some(scale));
            if is_unscaled {
                let _outcome = run.scaler().step(optimizer)?;
            } else {
                optimizer.step()?;
            }
            run.scaler().update_with(2.0 * scale)?;
            Ok(loss)
        });
        let report = report.unwrap();
        assert_eq!(overflowed, overflows_at, "{report}");
        let problem = |scale| {
            let (fault, names) = (ScaleFault::NotUnscaled, vec![]);
            BudgetProblem::Scaling { scale, fault, names }
        };
        assert_eq!(report.problems.first(), found_at.map(problem).as_ref(), "{report}");
        assert_eq!(report.is_within(), is_unscaled, "{report}");
    }
}

/// A model whose weights are in half precision needs no region.
#[test]
fn a_model_in_half_precision_is_compared_without_a_region() {
    let (mut vs, _alone) = store();
    let layer = nn::linear(vs.root(), 16, 16, Default::default());
    vs.bfloat16();
    let xs = floats(&[32, 16]);
    let adamw = AdamW::default().master_weights(MasterWeights::Float);
    let optimizer = || adamw.build(vs.trainable_variables(), 1e-3);
    let off = region(Kind::BFloat16).enabled(false);
    let report = Budget::new(&vs, off).measure(optimizer, |run, optimizer| {
        let xs = xs.to_kind(run.dtype());
        step(run, optimizer, &|run| {
            run.output("ys", &layer.forward(&xs)).square().mean(Kind::Float)
        })
    });
    let report = report.unwrap();
    report.assert();
    assert_eq!(report.dtype, Dtype::BF16);
    assert!(!report.to_string().contains(IN_F32), "{report}");
}
