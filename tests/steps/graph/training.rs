//! A small training, the same whether its iterations run or are replayed.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::accumulation::Accumulation;
use tch_amp::average::{AveragedWeights, Averaging};
use tch_amp::gradients::clip_grad_norm;
use tch_amp::graph::Captured;
use tch_amp::insight::{ScaleHealth, ScaleHistory};
use tch_amp::lean::{
    Activation, LinearCrossEntropyConfig, NormConfig, activation_linear, linear_cross_entropy,
    norm_linear,
};
use tch_amp::optim::{AdamW, Algorithm, MasterWeights, MomentDtype, Optimizer};
use tch_amp::recompute::RecomputedT;
use tch_amp::scaler::{GradScalerConfig, SpikeConfig, SpikeDetector, StepCounter, StepOutcome};
use tch_amp::schedule::{CosineAnnealingLr, LinearLr, Schedule, Scheduler, SequentialLr};
use tch_amp::{Autocast, GradScaler, Result};

/// How an iteration steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Step,
    ClipNorm,
    UnscaleAndClip,
    UnlessSpike,
}

/// What an iteration is made of.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    pub algorithm: Algorithm,
    pub kind: Kind,
    pub masters: MasterWeights,
    pub way: Way,
    pub dropout: bool,
    pub averaging: Option<Averaging>,
    pub moments: MomentDtype,
    pub scaler: GradScalerConfig,
    /// The micro-batches of a window, if gradients are accumulated.
    pub micro_batches: Option<usize>,
    pub recomputes: bool,
    pub hidden: i64,
    /// Whether the functions of `lean` compute the loss, and the most bytes of a block of logits.
    pub lean: Option<Option<usize>>,
    /// Whether the iteration steps a schedule, in place of the rates of [`lr`].
    pub is_scheduled: bool,
}

impl Program {
    pub fn new(algorithm: impl Into<Algorithm>) -> Self {
        Self {
            algorithm: algorithm.into(),
            kind: Kind::Float,
            masters: MasterWeights::None,
            way: Way::Step,
            dropout: false,
            averaging: None,
            moments: MomentDtype::F32,
            scaler: GradScalerConfig {
                init_scale: 1024.0,
                growth_interval: 11,
                ..GradScalerConfig::default()
            },
            micro_batches: None,
            recomputes: false,
            hidden: 24,
            lean: None,
            is_scheduled: false,
        }
    }
}

/// AdamW, and everything else as usual.
pub fn adamw() -> Program {
    Program::new(AdamW::default())
}

/// What an iteration records.
pub struct Records {
    pub steps: StepCounter,
    pub history: ScaleHistory,
    pub health: ScaleHealth,
}

pub struct Training {
    pub program: Program,
    pub vs: VarStore,
    model: Box<dyn ModuleT>,
    /// The layers behind `xs`, for the functions of `lean`.
    layers: Option<[nn::Linear; 3]>,
    pub xs: Tensor,
    ts: Tensor,
    batches: Vec<Tensor>,
    pub opt: Optimizer,
    pub scaler: GradScaler,
    pub average: Option<AveragedWeights>,
    pub spikes: SpikeDetector,
    pub scheduler: Option<Scheduler>,
    pub records: Option<Records>,
    /// The learning rate of the next iteration, if it is not that of [`lr`].
    pub lr: Option<f64>,
    /// The outcome of the last iteration that was run or captured.
    pub last: Option<StepOutcome>,
}

/// Whether the gradients of iteration `i` overflow.
pub fn overflows(i: usize) -> bool {
    i % 17 == 5
}

/// A warm-up of 20 iterations and a cosine.
pub fn lr(i: usize) -> f64 {
    let warm_up = ((i + 1) as f64 / 20.0).min(1.0);
    0.01 * warm_up * (0.6 + 0.4 * (i as f64 / 50.0).cos())
}

pub fn warm_up_and_cosine() -> Schedule {
    let warm_up = LinearLr { start_factor: 0.1, total_iters: 30, ..LinearLr::default() };
    let cosine = CosineAnnealingLr { t_max: 200, eta_min: 0.0 };
    SequentialLr::new(warm_up).then_at(30, cosine).into()
}

impl Training {
    pub fn new(program: Program, device: Device) -> Self {
        // The generator belongs to the whole process.
        static DRAWS: Mutex<()> = Mutex::new(());
        let draws = DRAWS.lock().unwrap_or_else(PoisonError::into_inner);
        tch::manual_seed(7);
        let mut vs = VarStore::new(device);
        let p = vs.root();
        let rate = if program.dropout { 0.3 } else { 0.0 };
        let model = nn::seq_t()
            .add(nn::linear(&p / "a", 16, program.hidden, Default::default()))
            .add_fn(|x| x.relu())
            .add_fn_t(
                move |x, train| if rate > 0.0 { x.dropout(rate, train) } else { x.shallow_clone() },
            )
            .add(nn::linear(&p / "b", program.hidden, 4, Default::default()));
        let model: Box<dyn ModuleT> = match program.recomputes {
            true => Box::new(RecomputedT::new(model)),
            false => Box::new(model),
        };
        let layers = program.lean.map(|_| {
            let sizes =
                [("first", 16, program.hidden), ("second", program.hidden, 16), ("head", 16, 4)];
            sizes.map(|(name, from, to)| nn::linear(&p / name, from, to, Default::default()))
        });
        vs.set_kind(program.kind);
        let batch = |_| Tensor::randn([8, 16], (Kind::Float, Device::Cpu)).to_device(device);
        let batches: Vec<_> = (0..4).map(batch).collect();
        let ts = Tensor::randint(4, [8], (Kind::Int64, Device::Cpu)).to_device(device);
        drop(draws);
        let mut opt = program
            .algorithm
            .master_weights(program.masters)
            .moments(program.moments)
            .build(&vs, 0.01)
            .unwrap();
        let scheduler = program.is_scheduled.then(|| warm_up_and_cosine().build(&mut opt).unwrap());
        let average = program.averaging.map(|averaging| averaging.build(&vs).unwrap());
        let spikes = SpikeConfig { window: 8, warmup: 4, deviations: 1.0, max_in_a_row: 2 };
        Self {
            program,
            model,
            layers,
            xs: batches[0].copy(),
            ts,
            batches,
            opt,
            scaler: program.scaler.build(device).unwrap(),
            average,
            spikes: spikes.build().unwrap(),
            scheduler,
            records: None,
            lr: None,
            last: None,
            vs,
        }
    }

    /// A training, and a graph that has taken so many of its iterations.
    pub fn by_graph(
        program: Program,
        device: Device,
        iterations: usize,
    ) -> (Self, Captured<Tensor>) {
        let mut training = Self::new(program, device);
        let mut graph = Captured::new(device).unwrap();
        take_all(&mut training, &mut graph, 0..iterations);
        (training, graph)
    }

    /// One of the weights.
    pub fn bias(&self) -> Tensor {
        self.vs.variables()["a.bias"].shallow_clone()
    }

    /// What comes before each iteration.
    pub fn feed(&mut self, i: usize) {
        self.xs.copy_(&self.batches[i % 4]);
        if overflows(i) {
            drop(self.xs.fill_(f64::INFINITY));
        }
        if self.scheduler.is_some() {
            return;
        }
        self.opt.set_lr(self.lr.unwrap_or_else(|| lr(i))).unwrap();
    }

    fn loss(&self) -> Result<Tensor> {
        let (Some([first, second, head]), Some(max_bytes)) = (&self.layers, self.program.lean)
        else {
            let logits = self.model.forward_t(&self.xs, true);
            return Ok(logits.cross_entropy_for_logits(&self.ts));
        };
        // The other layers are trained, too: each optimizer steps all variables.
        let xs = self.xs.to_kind(first.ws.kind());
        let norm = NormConfig::layer(&[16]);
        let ys = norm_linear(&xs, &norm, None, None, &first.ws, first.bs.as_ref())?;
        let ys = activation_linear(&ys, Activation::Silu, &second.ws, second.bs.as_ref())?;
        let config = LinearCrossEntropyConfig { max_bytes, ..Default::default() };
        let loss = linear_cross_entropy(&ys, &head.ws, head.bs.as_ref(), &self.ts, &config)?;
        Ok(loss + self.model.forward_t(&self.xs, true).cross_entropy_for_logits(&self.ts))
    }

    pub fn iteration(&mut self) -> Result<Tensor> {
        let half = if self.program.kind == Kind::Half { Kind::Half } else { Kind::BFloat16 };
        let region = Autocast::new(self.vs.device()).dtype(half);
        self.opt.zero_grad()?;
        let mut window = self.program.micro_batches.map(Accumulation::of_equal).transpose()?;
        let mut loss = Tensor::new();
        for _ in 0..self.program.micro_batches.unwrap_or(1) {
            loss = region.try_run(|| self.loss())?;
            match &mut window {
                Some(window) => window.backward(&mut self.scaler, &loss)?,
                None => self.scaler.backward(&loss)?,
            }
        }
        if let Some(records) = &mut self.records {
            records.health.observe(&self.scaler)?;
        }
        let outcome = match self.program.way {
            Way::Step => self.scaler.step(&mut self.opt)?,
            Way::ClipNorm => self.scaler.step_clip_norm(&mut self.opt, 0.5)?,
            Way::UnscaleAndClip => {
                self.scaler.unscale_(&mut self.opt)?;
                let _norm = clip_grad_norm(&self.opt.trainable_variables(), 0.5)?;
                self.scaler.step(&mut self.opt)?
            }
            Way::UnlessSpike => {
                self.spikes.watch_loss(&loss);
                self.scaler.step_unless_spike(&mut self.opt, 0.5, &mut self.spikes)?
            }
        };
        if let Some(records) = &mut self.records {
            records.history.set_loss(&loss)?;
            records.history.record(&self.scaler, &outcome, self.opt.lr(0)?)?;
            records.steps.record(&outcome);
        }
        self.scaler.update()?;
        if let Some(average) = &mut self.average {
            average.update(&outcome)?;
        }
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.step(&mut self.opt, &outcome)?;
        }
        self.last = Some(outcome);
        Ok(loss.detach())
    }

    /// The parameters, the optimizer's state, the averages and the scale, on the CPU.
    pub fn state(&mut self) -> Vec<Tensor> {
        let mut out: Vec<_> = BTreeMap::from_iter(self.vs.variables()).into_values().collect();
        let state = BTreeMap::from_iter(self.opt.state_dict().unwrap().state);
        out.extend(state.into_values().flat_map(BTreeMap::into_values));
        if let Some(average) = &self.average {
            let names = ["a.weight", "a.bias", "b.weight", "b.bias"];
            out.extend(names.map(|name| average.average(name).unwrap()));
            out.push(Tensor::from(average.updates().unwrap() as i64));
        }
        out.push(Tensor::from(self.scaler.get_scale().unwrap()));
        out.push(Tensor::from(self.scaler.get_growth_tracker().unwrap()));
        let counts = self.spikes.counts().unwrap();
        let counts = [counts.non_finite, counts.loss_spikes, counts.norm_spikes];
        out.push(Tensor::from_slice(&counts.map(|count| count as i64)));
        // A copy: on the CPU the tensors themselves change later.
        out.into_iter().map(|t| t.detach().to_device(Device::Cpu).copy()).collect()
    }
}

/// Takes an iteration by the graph.
pub fn take(training: &mut Training, graph: &mut Captured<Tensor>, i: usize) -> Result<()> {
    training.feed(i);
    take_fed(training, graph)
}

/// Takes an iteration of which everything is there.
pub fn take_fed(training: &mut Training, graph: &mut Captured<Tensor>) -> Result<()> {
    graph.replay(|| training.iteration()).map(drop)
}

/// Takes iterations that succeed.
pub fn take_all(training: &mut Training, graph: &mut Captured<Tensor>, iterations: Range<usize>) {
    iterations.for_each(|i| take(training, graph, i).unwrap());
}

/// Trains, and returns the losses and the state after each iteration. If not `captures`, every iteration runs, with the
/// learning rates on the device.
pub fn train(
    program: Program,
    device: Device,
    iterations: usize,
    captures: bool,
) -> Vec<Vec<Tensor>> {
    let mut training = Training::new(program, device);
    let mut graph = Captured::new(device).unwrap();
    let mut out = Vec::new();
    for i in 0..iterations {
        training.feed(i);
        if !captures {
            graph.recapture();
        }
        let replay = graph.replay(|| training.iteration()).unwrap();
        let loss = replay.output().to_device(Device::Cpu).copy();
        let mut state = training.state();
        state.push(loss);
        out.push(state);
    }
    assert_eq!(graph.is_captured(), captures && device.is_cuda());
    out
}

/// The first iteration after which the bits differ.
pub fn first_difference(one: &[Vec<Tensor>], other: &[Vec<Tensor>]) -> Option<usize> {
    let bits = |t: &Tensor| match t.kind() {
        Kind::Float => t.view_dtype(Kind::Int),
        Kind::Double => t.view_dtype(Kind::Int64),
        Kind::Half | Kind::BFloat16 => t.view_dtype(Kind::Int16),
        _ => t.shallow_clone(),
    };
    let same = |one: &Vec<Tensor>, other: &Vec<Tensor>| {
        one.len() == other.len() && one.iter().zip(other).all(|(a, b)| bits(a).equal(&bits(b)))
    };
    (0..one.len()).find(|&i| !same(&one[i], &other[i]))
}
