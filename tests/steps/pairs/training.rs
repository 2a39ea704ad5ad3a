//! A program with the crate.

use std::sync::atomic::{AtomicU64, Ordering};

use tch::nn::{self, ModuleT, OptimizerConfig, VarStore};
use tch::{Kind, Tensor, no_grad};
use tch_amp::accumulation::Accumulation;
use tch_amp::autocast::{Plan, Rule, RunAs};
use tch_amp::average::{AveragedWeights, Swa};
use tch_amp::checkpoint::{Checkpoint, CheckpointFolder, Stateful};
use tch_amp::distributed::{DistributedDataParallel, ProcessGroup};
use tch_amp::function::{FunctionResult, GradConfig, grad};
use tch_amp::gradients::clip_grad_norm;
use tch_amp::graph::Captured;
use tch_amp::lean::{
    Activation, LinearCrossEntropyConfig, NormConfig, NormKind, activation_linear,
    linear_cross_entropy, norm_linear,
};
use tch_amp::memory::SavedTensors;
use tch_amp::optim::{AdamW, Algorithm, AmpOptimizer, MasterWeights, MomentDtype, Optimizer, Sgd};
use tch_amp::recompute::checkpointed;
use tch_amp::scaler::{
    GradScalerConfig, PerLossScalers, SpikeConfig, SpikeDetector, StepCounter, StepOutcome,
};
use tch_amp::schedule::{ExponentialLr, Scheduler};
use tch_amp::{Autocast, GradScaler, Result, function};

use crate::pairs::abilities::Ability::*;
use crate::pairs::plain::{EPS, Outcome, SECOND_LR};
use crate::pairs::program::{
    CLASSES, GAMMA, GROWTH_INTERVAL, INIT_SCALE, ITERATIONS, MAX_NORM, MAX_VALUE, MOMENTUM, Mask,
    NORM_EPS, PENALTY, Program, ROWS,
};

const ATTENTION: &str = "scaled_dot_product_attention";

enum Scaling {
    One(GradScaler),
    PerLoss(PerLossScalers),
}

enum Optim {
    Fused(Box<Optimizer>),
    Host(nn::Optimizer),
}

impl Optim {
    fn as_dyn(&mut self) -> &mut dyn AmpOptimizer {
        match self {
            Self::Fused(fused) => &mut **fused,
            Self::Host(host) => host,
        }
    }

    fn zero_grad(&mut self) -> Result<()> {
        match self {
            Self::Fused(fused) => fused.zero_grad(),
            Self::Host(host) => {
                host.zero_grad();
                Ok(())
            }
        }
    }
}

/// The forward pass, which a part of the graph may own.
struct Model {
    region_inside: Option<Autocast>,
    p: Vec<Tensor>,
    causal: bool,
    mask: Option<Tensor>,
    attends: bool,
    custom: bool,
    lean: Option<NormKind>,
}

impl Clone for Model {
    fn clone(&self) -> Self {
        Self {
            p: self.p.iter().map(Tensor::shallow_clone).collect(),
            mask: self.mask.as_ref().map(Tensor::shallow_clone),
            ..*self
        }
    }
}

impl Model {
    fn rows(&self, from: i64, count: i64) -> Self {
        let mask = self.mask.as_ref().map(|mask| mask.narrow(0, from, count));
        Self { mask, ..self.clone() }
    }

    fn activation(&self, x: &Tensor) -> FunctionResult<Tensor> {
        if !self.custom {
            return Ok(x.f_tanh()?);
        }
        let tanh = function(
            |ctx, x| {
                let y = x[0].f_tanh()?;
                ctx.save_for_backward(&[&y]);
                Ok(y)
            },
            |ctx, g| {
                let [y] = ctx.saved_tensors()?;
                Ok(&g[0] * (1 - y.square()))
            },
        );
        Ok(tch_amp::function::Function::apply(tanh, &[x])?)
    }

    /// The two layers, of a normalization and of an activation.
    fn lean_layers(&self, x: &Tensor, kind: NormKind) -> Result<Tensor> {
        let [up, down] = [0, 1].map(|i| self.p[i].tr());
        let norm = NormConfig { kind, normalized_shape: vec![up.size()[1]], eps: NORM_EPS };
        let hidden = norm_linear(x, &norm, None, None, &up, None)?;
        activation_linear(&hidden, Activation::Silu, &down, Some(&self.p[2]))
    }

    fn forward(&self, x: &Tensor) -> FunctionResult<Tensor> {
        let forward = || {
            let x = x.to_kind(self.p[0].kind());
            let x = match self.attends {
                false => x,
                true => Tensor::f_scaled_dot_product_attention(
                    &x.f_matmul(&self.p[3])?,
                    &x.f_matmul(&self.p[4])?,
                    &x,
                    self.mask.as_ref(),
                    0.0,
                    self.causal,
                    None,
                    false,
                )?
                .to_kind(x.kind()),
            };
            if let Some(kind) = self.lean {
                return Ok(self.lean_layers(&x, kind)?);
            }
            let hidden = self.activation(&x.f_matmul(&self.p[0])?)?;
            Ok(hidden.to_kind(x.kind()).f_matmul(&self.p[1])? + &self.p[2])
        };
        match self.region_inside {
            Some(region) => region.run(forward)?,
            None => forward(),
        }
    }
}

/// How the forward pass computes a product, as seen from outside.
pub fn region(program: &Program) -> Result<Autocast> {
    let device = program.device;
    let mut region = Autocast::new(device).dtype(program.dtype).cache(!program.has(CacheOff));
    region = region.enabled(program.is_on() && !program.has(OffBefore));
    if program.has(Kept) {
        region = region.keep_in_f32(["matmul", "linear", "tanh"]);
        if !program.attends() {
            region = region.keep_in_f32([ATTENTION]);
        }
    }
    let plan = |rules| {
        Ok::<_, tch_amp::Error>(Plan { dtype: Some(program.dtype), rules, ..Plan::new(device)? })
    };
    if program.has(PlanInF32) {
        let products = ["matmul", "linear", ATTENTION].map(|name| Rule::new(name, RunAs::F32));
        let off: Plan = Plan::new(device)?;
        // The last of several plans holds.
        region = region.plan(&off)?.plan(&plan(products.to_vec())?)?;
    }
    if program.has(Composed) {
        let composed = Rule::new(ATTENTION, RunAs::Composed { most_bytes: 1 << 20 });
        region = region.plan(&plan(vec![composed])?)?;
    }
    Ok(region)
}

/// The dtype of a product in the region, as the program means it.
fn wanted_kind(program: &Program) -> Kind {
    match program.is_on() {
        false if program.is_in_bf16() => Kind::BFloat16,
        false => Kind::Float,
        true if program.has_any(&[PlanInF32, Kept]) => Kind::Float,
        true => program.dtype,
    }
}

pub struct Training<'a> {
    program: &'a Program,
    group: Option<&'a ProcessGroup>,
    region: Autocast,
    vs: VarStore,
    model: Model,
    x: Tensor,
    t: Tensor,
    labels: Tensor,
    factor: Tensor,
    optim: Optim,
    scaling: Scaling,
    spikes: SpikeDetector,
    scheduler: Option<Scheduler>,
    average: Option<AveragedWeights>,
    counter: StepCounter,
    counts: [u64; 2],
    ddp: Option<DistributedDataParallel>,
    second: (VarStore, Optimizer),
    norm: nn::BatchNorm,
    norm_vs: VarStore,
    is_early: bool,
}

impl<'a> Training<'a> {
    fn new(program: &'a Program, group: Option<&'a ProcessGroup>) -> Result<Self> {
        let device = program.device;
        let mut vs = VarStore::new(device);
        let parameters = program.parameters();
        for (name, size) in &parameters {
            drop(vs.root().var_copy(name, &program.start(name, size)));
        }
        if program.is_in_bf16() {
            vs.set_kind(Kind::BFloat16);
        }
        let variables = vs.variables();
        let p: Vec<_> =
            parameters.iter().map(|(name, _)| variables[*name].shallow_clone()).collect();
        let inside = Autocast::new(device);
        let model = Model {
            region_inside: match (program.has(OffInside), program.has(OtherDtypeInside)) {
                (true, _) => Some(inside.enabled(false)),
                (_, true) => Some(inside.dtype(program.other_dtype())),
                _ => None,
            },
            p,
            causal: program.mask == Mask::Causal,
            mask: program.mask().filter(|_| program.attends()).map(|mask| mask.to_device(device)),
            attends: program.attends(),
            custom: program.has(CustomFunction),
            lean: program.has(LeanLayers).then(|| program.norm()),
        };
        let ddp = group.map(|group| DistributedDataParallel::new(group, &vs)).transpose()?;
        let mut optim = optim(program, &vs)?;
        if let (true, Optim::Fused(fused)) = (program.is_in_bf16() && program.in_f32, &mut optim) {
            fused.accumulate_in_f32()?;
        }
        if let (true, Optim::Fused(fused), Some(group)) = (program.has(Sharded), &mut optim, group)
        {
            fused.shard_over(group)?;
        }
        let scheduler = match &mut optim {
            Optim::Fused(fused) if program.has(Schedule) => {
                Some(ExponentialLr { gamma: GAMMA }.build(fused)?)
            }
            Optim::Host(_) if program.has(Schedule) => {
                let schedule = tch_amp::schedule::Schedule::from(ExponentialLr { gamma: GAMMA });
                Some(schedule.build_for_lrs(&[program.lr()])?)
            }
            _ => None,
        };
        let average = program
            .has_any(&[Average, BatchNorm])
            .then(|| Swa::default().build(&vs))
            .transpose()?;
        let second_vs = VarStore::new(device);
        drop(second_vs.root().zeros("second", &[3]));
        let second = Sgd::default().build(&second_vs, SECOND_LR)?;
        let norm_vs = VarStore::new(device);
        let norm = nn::batch_norm1d(norm_vs.root(), program.width(), Default::default());
        Ok(Self {
            program,
            group,
            region: region(program)?,
            model,
            x: program.input(0).to_device(device),
            t: program.target(0).to_device(device),
            labels: program.labels().to_device(device),
            factor: Tensor::ones([], (Kind::Float, device)),
            optim,
            scaling: scaling(program)?,
            spikes: SpikeConfig::default().build()?,
            scheduler,
            average,
            counter: StepCounter::default(),
            counts: [0; 2],
            ddp,
            second: (second_vs, second),
            norm,
            norm_vs,
            vs,
            is_early: program.is_early,
        })
    }

    fn feed(&mut self, iteration: usize) {
        self.x.copy_(&self.program.input(iteration));
        self.t.copy_(&self.program.target(iteration));
        drop(self.factor.fill_(self.program.factors[iteration]));
    }

    /// The parts of the batch of this rank: their first rows, and how many.
    fn parts(&self) -> Vec<(i64, i64)> {
        let (ranks, rank) =
            self.group.map_or((1, 0), |group| (group.size() as i64, group.rank() as i64));
        let (rows, own) = (ROWS / self.program.parts(), self.program.parts() / ranks);
        (rank * own..(rank + 1) * own).map(|part| (part * rows, rows)).collect()
    }

    /// The two halves of the loss of some rows.
    fn losses(&self, model: &Model, [x, t, labels]: [&Tensor; 3]) -> Result<[Tensor; 2]> {
        let y: Tensor = match self.program.has(Recompute) {
            true => {
                let model = model.clone();
                checkpointed(&[x], move |x: &[&Tensor]| model.forward(x[0]))?
            }
            false => model.forward(x).map_err(|error| tch_amp::Error::Torch(error.to_string()))?,
        };
        let squares = (y.to_kind(Kind::Float) - t).square() * &self.factor;
        let halves = squares.split(2, -1);
        let [first, second] = [0, 1].map(|i| halves[i].mean(Kind::Float) / 2);
        if !self.program.has(Lean) {
            return Ok([first, second]);
        }
        let weight = &model.p[model.p.len() - 1];
        // Without a region nothing is cast.
        let y = if self.program.is_on() { y } else { y.to_kind(weight.kind()) };
        let Program { max_bytes, .. } = *self.program;
        let z_loss = self.program.z_loss();
        let config = LinearCrossEntropyConfig { max_bytes, z_loss, ..Default::default() };
        let classes = linear_cross_entropy(&y, weight, None, labels, &config)?;
        Ok([first, second + classes * CLASSES * &self.factor])
    }

    /// Adds a penalty on the gradients of the loss.
    fn penalized(&self, losses: [Tensor; 2]) -> Result<[Tensor; 2]> {
        if !self.program.has(Penalty) {
            return Ok(losses);
        }
        let [first, second] = losses;
        let config = GradConfig { create_graph: true, ..Default::default() };
        let gradients = grad(&[&first + &second], &self.model.p, &config)?;
        let gradients = gradients.iter().flatten();
        let penalty: Tensor =
            gradients.map(|g| g.to_kind(Kind::Float).square().sum(Kind::Float)).sum();
        Ok([first + penalty * PENALTY, second])
    }

    fn backward(
        &mut self,
        ddp: Option<&mut DistributedDataParallel>,
        [first, second]: [Tensor; 2],
        window: &mut Option<Accumulation>,
    ) -> Result<()> {
        let parts = self.parts().len() as f64;
        match &mut self.scaling {
            Scaling::PerLoss(scalers) => {
                scalers.backward_retain_graph(0, &first, self.optim.as_dyn())?;
                scalers.backward(1, &second, self.optim.as_dyn())
            }
            Scaling::One(scaler) => {
                let loss = first + second;
                match (ddp, window) {
                    (None, None) => scaler.backward(&loss),
                    (None, Some(window)) => window.backward(scaler, &loss),
                    (Some(ddp), None) => ddp.backward_scaled(scaler, &(loss / parts)),
                    (Some(ddp), Some(window)) => ddp.backward_scaled(scaler, &window.weigh(&loss)?),
                }
            }
        }
    }

    fn forward(
        &self,
        ddp: Option<&mut DistributedDataParallel>,
        part: (i64, i64),
    ) -> Result<[Tensor; 2]> {
        match self.program.has(Hooks) {
            true => SavedTensors::half().try_run(|| self.forward_of(ddp, part)),
            false => self.forward_of(ddp, part),
        }
    }

    fn forward_of(
        &self,
        ddp: Option<&mut DistributedDataParallel>,
        (from, count): (i64, i64),
    ) -> Result<[Tensor; 2]> {
        let [x, t, labels] = [&self.x, &self.t, &self.labels].map(|t| t.narrow(0, from, count));
        let model = self.model.rows(from, count);
        match ddp {
            None => self.losses(&model, [&x, &t, &labels]),
            Some(ddp) => ddp.forward(|| self.losses(&model, [&x, &t, &labels]))?,
        }
    }

    fn pass(
        &mut self,
        mut ddp: Option<&mut DistributedDataParallel>,
        part: (i64, i64),
        window: &mut Option<Accumulation>,
    ) -> Result<()> {
        let region = self.region;
        if self.program.has(BackwardInside) {
            return region.try_run(|| {
                let losses = self.forward(ddp.as_deref_mut(), part)?;
                let losses = self.penalized(losses)?;
                self.backward(ddp, losses, window)
            });
        }
        let losses = region.try_run(|| self.forward(ddp.as_deref_mut(), part))?;
        let losses = self.penalized(losses)?;
        self.backward(ddp, losses, window)
    }

    fn iteration(&mut self) -> Result<()> {
        self.optim.zero_grad()?;
        let parts = self.parts();
        let mut window = match (self.program.has(Accumulation), self.group) {
            (true, Some(group)) => {
                Some(Accumulation::of_weights_over(group, vec![1.0; parts.len()])?)
            }
            (true, None) => Some(Accumulation::of_equal(parts.len())?),
            (false, _) => None,
        };
        // A pass uses the rest of the training.
        let mut ddp = self.ddp.take();
        for (index, part) in parts.iter().enumerate() {
            let is_last = index + 1 == parts.len();
            match &mut ddp {
                Some(ddp) if !is_last => {
                    ddp.no_sync(|ddp| self.pass(Some(ddp), *part, &mut window))?;
                }
                ddp => self.pass(ddp.as_mut(), *part, &mut window)?,
            }
        }
        self.ddp = ddp;
        let outcome = self.step()?;
        if self.scheduler.is_some() && !self.program.has(Graph) {
            // Until the host knows, a schedule counts a step as taken. The plain loop knows at once.
            let _known = outcome.is_stepped()?;
        }
        if self.program.has(Counter) {
            self.counter.record(&outcome);
        }
        if let Some(average) = &mut self.average {
            average.update(&outcome)?;
        }
        match (&mut self.scheduler, &mut self.optim) {
            (Some(scheduler), Optim::Fused(fused)) => scheduler.step(fused, &outcome)?,
            (Some(scheduler), Optim::Host(host)) => {
                scheduler.record(&outcome)?;
                host.set_lr(scheduler.lrs()[0]);
            }
            _ => {}
        }
        Ok(())
    }

    /// Steps the first optimizer and ends the iteration.
    fn step(&mut self) -> Result<StepOutcome> {
        let program = self.program;
        let optim = self.optim.as_dyn();
        let scaler = match &mut self.scaling {
            Scaling::PerLoss(scalers) => {
                let outcome = if program.has(ClipNorm) {
                    scalers.step_clip_norm(optim, MAX_NORM)
                } else if program.has(ClipValue) {
                    scalers.step_clip_value(optim, MAX_VALUE)
                } else {
                    scalers.step(optim)
                }?;
                scalers.update()?;
                return Ok(outcome);
            }
            Scaling::One(scaler) => scaler,
        };
        let (second_vs, second) = &mut self.second;
        let weight = second_vs.variables()["second"].shallow_clone();
        let second_loss = || (&weight - 1).square().mean(Kind::Float);
        let mut has_ended = false;
        // A step with a detector of spikes unscales by itself.
        let is_early = self.is_early && program.has(SecondOptimizer) && !program.has(UnlessSpike);
        if is_early {
            scaler.unscale_(optim)?;
            // It is refused, or all that follows has to be right.
            has_ended = program.scales() && scaler.backward_step(second, &second_loss()).is_ok();
        }
        let outcome = if program.has(ClipNorm) {
            scaler.step_clip_norm(optim, MAX_NORM)?
        } else if program.has(ClipValue) {
            scaler.step_clip_value(optim, MAX_VALUE)?
        } else if program.has(UnlessSpike) {
            match &mut self.optim {
                Optim::Fused(fused) => {
                    scaler.step_unless_spike(fused, MAX_NORM, &mut self.spikes)?
                }
                Optim::Host(_) => scaler.step(self.optim.as_dyn())?,
            }
        } else if program.has(UnscaleAndClip) {
            if !is_early {
                scaler.unscale_(optim)?;
            }
            let gradients: Vec<_> = self.vs.trainable_variables();
            drop(clip_grad_norm(&gradients, MAX_NORM)?);
            scaler.step(optim)?
        } else {
            scaler.step(optim)?
        };
        if program.has(SecondOptimizer) && !has_ended {
            scaler.backward_step(second, &second_loss())?;
        } else {
            scaler.update()?;
        }
        Ok(outcome)
    }

    /// Saves everything and loads it into new objects.
    fn restored(mut self) -> Result<Self> {
        static FILES: AtomicU64 = AtomicU64::new(0);
        let number = match self.group {
            Some(group) => self.program.seed * 2 + group.size() as u64,
            None => FILES.fetch_add(1, Ordering::Relaxed),
        };
        let name =
            format!("tch-amp-pairs-{}-{number}-{}", std::process::id(), self.group.is_some());
        let path = std::env::temp_dir().join(name);
        let mut checkpoint = Checkpoint::new();
        for (name, part) in &mut self.saved() {
            checkpoint.add(name, &mut **part)?;
        }
        let is_first = self.group.is_none_or(|group| group.rank() == 0);
        let mut folder = CheckpointFolder::new(&path)?.format(self.program.format());
        if is_first && self.program.saves_in_background() {
            let pending = folder.save_async(1, &checkpoint)?;
            // The training is free to change at once.
            for (_, mut variable) in self.vs.variables() {
                let _spoiled = no_grad(|| variable.fill_(f64::NAN));
            }
            let _path = pending.wait()?;
        } else if is_first {
            let _path = folder.save(1, &checkpoint)?;
        }
        self.group.map_or(Ok(()), ProcessGroup::barrier)?;
        let mut new = Self::new(self.program, self.group)?;
        let found = folder.latest()?;
        let missing = || tch_amp::Error::Torch("nothing was saved".to_owned());
        let loaded = found.ok_or_else(missing)?.checkpoint;
        self.group.map_or(Ok(()), ProcessGroup::barrier)?;
        if is_first {
            drop(std::fs::remove_dir_all(&path));
        }
        let mut parts = new.saved();
        let mut restore = loaded.restore();
        for (name, part) in &mut parts {
            restore = restore.add(name, &mut **part);
        }
        drop(restore.apply()?);
        drop(parts);
        if self.program.has(Counter) {
            new.counts = self.counted()?;
        }
        Ok(new)
    }

    fn saved(&mut self) -> Vec<(&'static str, Box<dyn Stateful + '_>)> {
        let mut all: Vec<(&'static str, Box<dyn Stateful + '_>)> =
            vec![("model", Box::new(&self.vs))];
        if let Optim::Fused(fused) = &mut self.optim {
            all.push(("optimizer", Box::new(&mut **fused)));
        }
        match &mut self.scaling {
            Scaling::One(scaler) => all.push(("scaler", Box::new(scaler))),
            Scaling::PerLoss(scalers) => all.push(("scalers", Box::new(scalers))),
        }
        if self.program.has(UnlessSpike) {
            all.push(("spikes", Box::new(&mut self.spikes)));
        }
        if self.program.has(SecondOptimizer) {
            all.push(("second model", Box::new(&self.second.0)));
            all.push(("second", Box::new(&mut self.second.1)));
        }
        all.extend(
            self.scheduler.as_mut().map(|it| ("schedule", Box::new(it) as Box<dyn Stateful + '_>)),
        );
        all.extend(
            self.average.as_mut().map(|it| ("average", Box::new(it) as Box<dyn Stateful + '_>)),
        );
        all
    }

    /// The steps that were taken and skipped so far.
    fn counted(&mut self) -> Result<[u64; 2]> {
        let [taken, skipped] = self.counts;
        Ok([taken + self.counter.count()?, skipped + self.counter.skipped()?])
    }

    /// The statistics of batch normalization over the inputs of all iterations, by an average of another model.
    fn statistics(&self) -> Result<(Tensor, Tensor)> {
        let mut average = Swa::default().build(&self.norm_vs)?;
        average.advance()?;
        let batch = |i| self.program.random(&format!("norm {i}"), &[16, self.program.width()]);
        let batches: Vec<_> = (0..3).map(|i| batch(i).to_device(self.program.device)).collect();
        let (x, region) = (&self.x, self.region);
        let up = &self.model.p[0];
        let wanted = wanted_kind(self.program);
        let product = || x.to_kind(up.kind()).matmul(up).kind();
        region.try_run(|| {
            average.update_batch_norm(0.1, &batches, |xs| {
                region.run(|| self.norm.forward_t(xs, true))
            })?;
            // The rules of the region hold afterwards.
            assert_eq!(product(), wanted, "{:?}", self.program);
            Ok::<_, tch_amp::Error>(())
        })?;
        let mean = Tensor::cat(&batches, 0).mean_dim(0, false, Kind::Double);
        let _swapped = average.swap_in()?;
        Ok((self.norm_vs.variables()["running_mean"].to_kind(Kind::Double), mean))
    }

    fn outcome(&mut self) -> Result<Outcome> {
        if self.program.has(BatchNorm) {
            let (found, wanted) = self.statistics()?;
            let far = (found - wanted).abs().max().double_value(&[]);
            assert!(far < 1e-2, "{far}: {:?}", self.program);
        }
        let names = self.program.parameters();
        let variables = self.vs.variables();
        let on_cpu =
            |t: &Tensor| t.detach().to_device(tch::Device::Cpu).to_kind(Kind::Double).copy();
        let mut weights: Vec<_> = names.iter().map(|(name, _)| on_cpu(&variables[*name])).collect();
        if self.program.has(SecondOptimizer) {
            weights.push(on_cpu(&self.second.0.variables()["second"]));
        }
        let averages = self.average.iter();
        let averages =
            averages.flat_map(|average| names.iter().filter_map(|(name, _)| average.average(name)));
        let averages = averages.map(|t| on_cpu(&t)).collect();
        let [taken, skipped] = self.counted()?;
        let scale = match &self.scaling {
            Scaling::One(scaler) => scaler.get_scale()?,
            Scaling::PerLoss(scalers) => {
                assert_eq!(scalers.get_scale(0)?, scalers.get_scale(1)?);
                scalers.get_scale(0)?
            }
        };
        let lr = self.scheduler.as_ref().map_or(self.program.lr(), |scheduler| scheduler.lrs()[0]);
        Ok(Outcome { weights, averages, taken, skipped, scale, lr, largest: 1.0 })
    }
}

fn optim(program: &Program, vs: &VarStore) -> Result<Optim> {
    let adamw = AdamW { eps: EPS, ..AdamW::default() };
    let algorithm: Algorithm = if program.has(HostOptimizer) {
        let sgd = nn::Sgd { momentum: MOMENTUM, ..nn::Sgd::default() };
        return Ok(Optim::Host(sgd.build(vs, program.lr())?));
    } else if program.has(Muon) {
        tch_amp::optim::Muon { adamw, ..tch_amp::optim::Muon::default() }.into()
    } else if program.has(NAdam) {
        tch_amp::optim::NAdam { eps: EPS, ..Default::default() }.into()
    } else if program.has(Adafactor) {
        tch_amp::optim::Adafactor { eps: (Some(EPS), 1e-3), ..Default::default() }.into()
    } else if program.uses_adamw() {
        adamw.into()
    } else {
        Sgd { momentum: MOMENTUM, ..Sgd::default() }.into()
    };
    let masters = match (program.has(Masters), program.has(Remainders)) {
        (true, _) => MasterWeights::Float,
        (_, true) => MasterWeights::Remainder,
        _ => MasterWeights::None,
    };
    let states = if program.has(LowBit) { MomentDtype::BFloat16 } else { MomentDtype::F32 };
    let built = algorithm.master_weights(masters).moments(states).build(vs, program.lr())?;
    Ok(Optim::Fused(Box::new(built)))
}

fn scaling(program: &Program) -> Result<Scaling> {
    let device = program.device;
    let config = GradScalerConfig {
        init_scale: INIT_SCALE,
        growth_interval: GROWTH_INTERVAL,
        ..GradScalerConfig::default()
    };
    Ok(match (program.has(Disabled), program.has(SkipOnly), program.has(PerLoss)) {
        (true, _, _) => Scaling::One(GradScaler::disabled()),
        (_, true, _) => Scaling::One(GradScaler::skip_only(device)?),
        (_, _, true) => Scaling::PerLoss(PerLossScalers::with_configs(device, &[config; 2])?),
        _ => Scaling::One(config.build(device)?),
    })
}

/// Trains as the program says.
pub fn train(program: &Program, group: Option<&ProcessGroup>) -> Result<Outcome> {
    let mut training = Training::new(program, group)?;
    let product = |t: &Training<'_>| {
        t.region.run(|| t.x.to_kind(t.model.p[0].kind()).matmul(&t.model.p[0]).kind())
    };
    let mut graph = program.has(Graph).then(|| Captured::new(program.device)).transpose()?;
    for iteration in 0..ITERATIONS {
        if program.has(Restored) && iteration == program.restored_at {
            training = training.restored()?;
            graph.iter_mut().for_each(Captured::recapture);
        }
        training.feed(iteration);
        if iteration == 0 {
            let kind = product(&training)?;
            if kind != wanted_kind(program) {
                return Err(tch_amp::Error::Torch(format!("a product is {kind:?}")));
            }
        }
        match &mut graph {
            Some(graph) => {
                let _replayed = graph.replay(|| training.iteration())?;
            }
            None => training.iteration()?,
        }
    }
    training.outcome()
}
