//! Whole programs of other kinds: optimizers, master weights, accumulation, regions of their own.

use tch::nn::{self, Module, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::function::{GradConfig, grad};
use tch_amp::insight::{Budget, BudgetProblem, BudgetReport, BudgetRun};
use tch_amp::optim::{
    AdamW, Algorithm, AmpOptimizer, Lion, MasterWeights, MomentDtype, Muon, Optimizer,
    OptimizerBuilder, RmsProp, Sgd,
};
use tch_amp::recompute::checkpointed;
use tch_amp::scaler::SpikeConfig;
use tch_amp::{Autocast, Result};

use crate::budget::{DTYPES, alone};

struct Net {
    vs: VarStore,
    layers: Vec<nn::Linear>,
    batches: Vec<(Tensor, Tensor)>,
}

/// How a program differentiates and steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Plain,
    Clipped,
    UnlessSpike,
    /// With a penalty on the gradients, which is differentiated, too.
    Penalty,
    Recomputed,
}

impl Net {
    fn new() -> Self {
        tch::manual_seed(4);
        let vs = VarStore::new(Device::Cpu);
        let layer = |i: i64, a, b| nn::linear(vs.root() / i, a, b, Default::default());
        let layers = vec![layer(0, 32, 64), layer(1, 64, 64), layer(2, 64, 10)];
        let batch = || {
            let xs = Tensor::randn([48, 32], (Kind::Float, Device::Cpu));
            (xs, Tensor::randint(10, [48], (Kind::Int64, Device::Cpu)))
        };
        Self { batches: vec![batch(), batch()], vs, layers }
    }

    fn loss(&self, run: &BudgetRun, batch: usize) -> Tensor {
        let (xs, ys) = &self.batches[batch];
        let x = self.layers[1].forward(&self.layers[0].forward(xs).tanh()).relu();
        run.output("logits", &self.layers[2].forward(&x)).cross_entropy_for_logits(ys)
    }

    fn budget(&self, dtype: Kind) -> Budget<'_> {
        Budget::new(&self.vs, Autocast::new(Device::Cpu).dtype(dtype))
    }

    fn measure<O: AmpOptimizer + 'static>(
        &self,
        dtype: Kind,
        mut optimizer: impl FnMut() -> O,
    ) -> BudgetReport {
        let make = || Ok::<_, tch_amp::Error>(optimizer());
        self.budget(dtype).measure(make, |run, optimizer| self.step(run, optimizer)).unwrap()
    }

    /// Measures an iteration whose parameters AdamW steps.
    fn measured(
        &self,
        dtype: Kind,
        iteration: impl FnMut(&mut BudgetRun, &mut Optimizer) -> Result<Tensor>,
    ) -> BudgetReport {
        let optimizer = || AdamW::default().build(&self.vs, 1e-3);
        self.budget(dtype).measure(optimizer, iteration).unwrap()
    }

    /// The same loss, with the hidden layers computed again in the backward pass.
    fn recomputed_loss(&self, run: &BudgetRun) -> Result<Tensor> {
        let (xs, ys) = &self.batches[0];
        let [w0, w1] = [0, 1].map(|i| self.layers[i].ws.shallow_clone());
        let [b0, b1] = [0, 1].map(|i| self.layers[i].bs.as_ref().unwrap().shallow_clone());
        let hidden = checkpointed(&[xs], move |xs| {
            Ok(xs[0].linear(&w0, Some(&b0)).tanh().linear(&w1, Some(&b1)).relu())
        })?;
        let logits = run.output("logits", &self.layers[2].forward(&hidden));
        Ok(logits.cross_entropy_for_logits(ys))
    }

    /// The square of the norm of the gradients of the unscaled loss.
    fn penalty(&self, run: &mut BudgetRun, loss: &Tensor) -> Result<Tensor> {
        let weights: Vec<&Tensor> = self.layers.iter().map(|layer| &layer.ws).collect();
        let scaled = run.scaler().scale(loss)?;
        let config = GradConfig { create_graph: true, ..GradConfig::default() };
        let inverse = 1.0 / run.scaler().get_scale()?;
        let gradients = grad(&[&scaled], &weights, &config)?;
        let squares = gradients.iter().flatten().map(|g| (g * inverse).square().sum(Kind::Float));
        Ok(squares.sum())
    }

    fn step_in_a_way(
        &self,
        run: &mut BudgetRun,
        optimizer: &mut Optimizer,
        way: Way,
    ) -> Result<Tensor> {
        optimizer.zero_grad()?;
        let mut loss = run.region(|| match way {
            Way::Recomputed => self.recomputed_loss(run),
            _ => Ok(self.loss(run, 0)),
        })??;
        if way == Way::Penalty {
            loss = &loss + self.penalty(run, &loss)?;
        }
        run.scaler().backward(&loss)?;
        let _outcome = match way {
            Way::Clipped => run.scaler().step_clip_norm(optimizer, 0.1)?,
            Way::UnlessSpike => {
                let mut spikes = SpikeConfig::default().build()?;
                run.scaler().step_unless_spike(optimizer, 1.0, &mut spikes)?
            }
            _ => run.scaler().step(optimizer)?,
        };
        run.scaler().update()?;
        Ok(loss.detach())
    }

    fn step(&self, run: &mut BudgetRun, optimizer: &mut dyn AmpOptimizer) -> Result<Tensor> {
        for parameter in optimizer.parameters().as_slice() {
            parameter.shallow_clone().zero_grad();
        }
        let loss = run.region(|| self.loss(run, 0))?;
        run.scaler().backward(&loss)?;
        let _outcome = run.scaler().step(optimizer)?;
        run.scaler().update()?;
        Ok(loss)
    }
}

#[test]
fn fused_optimizers_are_within_their_budgets() {
    let _alone = alone();
    let algorithms: [Algorithm; 5] = [
        AdamW::default().into(),
        Sgd { momentum: 0.9, nesterov: true, ..Default::default() }.into(),
        RmsProp::default().into(),
        Lion::default().into(),
        Muon::default().into(),
    ];
    for algorithm in algorithms {
        for dtype in DTYPES {
            let net = Net::new();
            net.measure(dtype, || algorithm.build(&net.vs, 1e-3).unwrap()).assert();
        }
    }
}

/// What a correct program does with its gradients, losses and steps, each of which has to keep every bit under a scale of
/// a power of two, so that no run is needed to find out why one has moved.
#[test]
fn what_meets_a_scale_in_a_correct_program_changes_no_bit() {
    let _alone = alone();
    let optimizers: [OptimizerBuilder; 3] =
        [MomentDtype::F32, MomentDtype::BFloat16, MomentDtype::EightBit]
            .map(|states| AdamW::default().moments(states));
    let steps = [Way::Plain, Way::Clipped, Way::UnlessSpike, Way::Penalty, Way::Recomputed];
    for builder in optimizers {
        for way in steps {
            let net = Net::new();
            let optimizer = || builder.build(&net.vs, 1e-3);
            let budget = net.budget(Kind::BFloat16);
            let report =
                budget.measure(optimizer, |run, optimizer| net.step_in_a_way(run, optimizer, way));
            let report = report.unwrap();
            report.assert();
            // Eight, or with the eight that decide. A bit that moved would take three more, or seven.
            let is_exact = matches!(report.iterations, 8 | 16);
            assert!(is_exact, "{builder:?}, {way:?}: {report}");
        }
    }
}

#[test]
fn optimizers_of_tch_are_within_their_budgets() {
    let _alone = alone();
    for dtype in DTYPES {
        let net = Net::new();
        net.measure(dtype, || nn::Adam::default().build(&net.vs, 1e-3).unwrap()).assert();
        net.measure(dtype, || nn::Sgd::default().build(&net.vs, 1e-2).unwrap()).assert();
    }
}

/// Parameters in half precision are compared by their masters; without these, the step rounds them.
#[test]
fn parameters_in_half_precision_need_master_weights() {
    let _alone = alone();
    for masters in [MasterWeights::Float, MasterWeights::Remainder] {
        for dtype in DTYPES {
            if masters == MasterWeights::Remainder && dtype == Kind::Half {
                continue;
            }
            let mut net = Net::new();
            if dtype == Kind::Half {
                net.vs.half()
            } else {
                net.vs.bfloat16()
            }
            let adamw = AdamW::default().master_weights(masters);
            net.measure(dtype, || adamw.build(&net.vs, 1e-3).unwrap()).assert();
        }
    }
    let mut net = Net::new();
    net.vs.bfloat16();
    let report = net.measure(Kind::BFloat16, || AdamW::default().build(&net.vs, 1e-3).unwrap());
    assert!(!report.is_within(), "{report}");
    assert!(net.vs.trainable_variables().iter().all(|variable| variable.kind() == Kind::BFloat16));
}

#[test]
fn accumulation_and_clipping_are_within_the_budget() {
    let _alone = alone();
    for forgotten in [false, true] {
        let net = Net::new();
        let report = net.measured(Kind::BFloat16, |run, optimizer| {
            optimizer.zero_grad()?;
            let mut total = Tensor::from(0f32);
            for batch in 0..2 {
                if forgotten && run.is_half() && batch == 1 {
                    optimizer.zero_grad()?;
                }
                let loss = run.region(|| net.loss(run, batch) / 2.0)?;
                run.scaler().backward(&loss)?;
                total += loss.detach().to_kind(Kind::Float);
            }
            let _outcome = run.scaler().step_clip_norm(optimizer, 0.1)?;
            run.scaler().update()?;
            Ok(total)
        });
        assert_eq!(report.is_within(), !forgotten, "{report}");
    }
}

/// A program whose model opens a region by itself, and that has no scaler.
#[test]
fn regions_of_the_program_follow_the_run() {
    let _alone = alone();
    let net = Net::new();
    let region = Autocast::new(Device::Cpu);
    let report = net.measured(Kind::BFloat16, |run, optimizer| {
        let loss = region.run(|| net.loss(run, 0))?;
        optimizer.backward_step(&loss)?;
        Ok(loss)
    });
    report.assert();
    assert_eq!((report.iterations, report.scale), (8, 1.0));
}

#[test]
fn operators_that_the_region_keeps_in_f32_are_emulated_so() {
    let _alone = alone();
    let net = Net::new();
    for region in [
        Autocast::new(Device::Cpu)
            .keep_in_f32(["relu", "tanh"])
            .prefer_half(["cross_entropy_loss"]),
        Autocast::new(Device::Cpu).keep_in_f32(["log_softmax"]).cache(false),
    ] {
        let budget = Budget::new(&net.vs, region);
        let optimizer = || AdamW::default().build(&net.vs, 1e-3);
        let report = budget.measure(optimizer, |run, optimizer| net.step(run, optimizer));
        report.unwrap().assert();
    }
}

#[test]
fn unused_parameters_have_to_be_allowed() {
    let _alone = alone();
    let net = Net::new();
    let _spare = nn::linear(net.vs.root() / "spare", 3, 3, Default::default());
    let names = vec!["spare.bias".to_owned(), "spare.weight".to_owned()];
    for (patterns, problems) in [
        (vec![], vec![BudgetProblem::Untrained(names)]),
        (vec!["spare.b*"], vec![BudgetProblem::Untrained(vec!["spare.weight".to_owned()])]),
        (vec!["spare.*"], vec![]),
    ] {
        let budget = net.budget(Kind::BFloat16);
        let budget =
            patterns.into_iter().fold(budget, |budget, pattern| budget.allow_unused(pattern));
        let optimizer = || AdamW::default().build(&net.vs, 1e-3);
        let report = budget.measure(optimizer, |run, optimizer| net.step(run, optimizer)).unwrap();
        assert_eq!(report.problems, problems, "{report}");
    }
}
