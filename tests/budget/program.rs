//! One iteration of training, in which a fault or a harmless change is planted.

use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::gradients::clip_grad_norm;
use tch_amp::insight::{Budget, BudgetReport, BudgetRun};
use tch_amp::optim::{AdamW, AmpOptimizer, Optimizer};
use tch_amp::{Autocast, Result};

use crate::context::{Context, Store};
use crate::models::Model;

/// Multiplies the gradient of a parameter, if there is one.
fn multiply_gradient(parameter: &Tensor, factor: f64) {
    let mut gradient = parameter.grad();
    if gradient.defined() {
        no_grad(|| gradient *= factor);
    }
}

/// A model with what its program keeps, and what is planted in it.
pub(crate) struct Program {
    pub(crate) model: Model,
    pub(crate) dtype: Kind,
    pub(crate) change: &'static str,
    pub(crate) seed: i64,
    pub(crate) scale: f64,
    pub(crate) runs: usize,
    store: Store,
}

impl Program {
    pub(crate) fn new(kind: &'static str, dtype: Kind, change: &'static str, seed: i64) -> Self {
        Self::of(Model::new(kind, seed, 1.0, Device::Cpu), dtype, change, seed)
    }

    pub(crate) fn of(model: Model, dtype: Kind, change: &'static str, seed: i64) -> Self {
        Self { model, dtype, change, seed, scale: 1024.0, runs: 4, store: Store::default() }
    }

    pub(crate) fn budget(&self) -> Budget<'_> {
        let region = Autocast::new(self.model.vs.device()).dtype(self.dtype);
        let region = if self.change == "no_cache" { region.cache(false) } else { region };
        Budget::new(&self.model.vs, region).scale(self.scale).runs(self.runs)
    }

    pub(crate) fn measure(&self) -> Result<BudgetReport> {
        self.budget().measure(|| self.optimizer(), |run, optimizer| self.iterate(run, optimizer))
    }

    pub(crate) fn optimizer(&self) -> Result<Optimizer> {
        AdamW::default().build(&self.model.vs, self.model.lr)
    }

    fn forward(&self, run: &BudgetRun) -> Vec<Tensor> {
        let c = Context {
            run,
            model: &self.model,
            store: &self.store,
            change: self.change,
            seed: self.seed,
        };
        let forward = self.model.forward(&c);
        for (name, output) in &forward.outputs {
            let _output = run.output(name, output);
        }
        forward.losses
    }

    /// A plain iteration, with any optimizer.
    pub(crate) fn iterate_with(
        &self,
        run: &mut BudgetRun,
        optimizer: &mut dyn AmpOptimizer,
    ) -> Result<Tensor> {
        self.model.parameters().iter_mut().for_each(Tensor::zero_grad);
        let losses = run.region(|| self.forward(run))?;
        let loss =
            losses.iter().map(|loss| loss.to_kind(Kind::Float)).reduce(|a, b| a + b).unwrap();
        run.scaler().backward(&loss)?;
        let _outcome = run.scaler().step(optimizer)?;
        run.scaler().update()?;
        Ok(loss)
    }

    pub(crate) fn iterate(&self, run: &mut BudgetRun, optimizer: &mut Optimizer) -> Result<Tensor> {
        let half = run.is_half();
        let is = |change: &str| half && self.change == change;
        if !is("zero_grad_is_missing") {
            optimizer.zero_grad()?;
        }
        let region_does_nothing = is("region_does_nothing");
        let losses =
            if region_does_nothing { self.forward(run) } else { run.region(|| self.forward(run))? };
        let loss =
            losses.iter().map(|loss| loss.to_kind(Kind::Float)).reduce(|a, b| a + b).unwrap();
        let scale = run.scaler().get_scale()?;
        if is("loss_is_scaled_twice") {
            let scaled = run.scaler().scale(&loss)?;
            run.scaler().backward(&scaled)?;
        } else if is("one_loss_of_two_is_not_scaled") {
            let parts: Vec<Tensor> = losses.iter().map(|loss| loss.to_kind(Kind::Float)).collect();
            let scaled = run.scaler().scale(&parts[0])?;
            (scaled + &parts[1]).backward();
        } else {
            run.scaler().backward(&loss)?;
        }
        self.step(run, optimizer, scale)?;
        if half {
            self.after()?;
        }
        Ok(loss)
    }

    /// Divides the gradients by a scale.
    fn divide(&self, scale: f64) {
        self.model.parameters().iter().for_each(|p| multiply_gradient(p, 1.0 / scale));
    }

    fn clip(&self) -> Result<()> {
        clip_grad_norm(&self.model.parameters(), self.model.max_norm).map(drop)
    }

    fn step(&self, run: &mut BudgetRun, optimizer: &mut Optimizer, scale: f64) -> Result<()> {
        let half = run.is_half();
        let is = |change: &str| half && self.change == change;
        if is("unscale_is_skipped") {
            self.clip()?;
            optimizer.step()?;
            return run.scaler().update_with(2.0 * scale);
        }
        if is("unscaled_by_the_last_scale") {
            let last = self.store.scale.replace(Some(scale)).unwrap_or(scale);
            self.divide(last);
            self.clip()?;
            optimizer.step()?;
            return run.scaler().update_with(2.0 * scale);
        }
        if is("gradients_rounded_once_more") {
            for p in self.model.parameters() {
                let rounded = p.grad().to_kind(self.dtype).to_kind(Kind::Float);
                no_grad(|| p.grad().copy_(&rounded));
            }
        }
        if is("clipped_before_unscale") {
            self.clip()?;
            run.scaler().unscale_(optimizer)?;
        } else {
            run.scaler().unscale_(optimizer)?;
            if is("unscaled_twice") {
                self.divide(scale);
            }
            if is("one_parameter_is_not_unscaled") {
                multiply_gradient(&self.model.parameters()[1], scale);
            }
            if is("norm_from_squares_in_half") {
                self.clip_by_norm_in_half();
            } else if !is("clip_is_skipped") {
                self.clip()?;
            }
        }
        if !is("never_steps") {
            let _outcome = run.scaler().step(optimizer)?;
        }
        if is("steps_twice") {
            optimizer.step()?;
        }
        run.scaler().update()
    }

    fn clip_by_norm_in_half(&self) {
        let gradients: Vec<Tensor> =
            self.model.parameters().iter().map(|p| p.grad().flatten(0, -1)).collect();
        let squares = Tensor::cat(&gradients, 0).to_kind(self.dtype).square();
        let mut total = Tensor::zeros([], (self.dtype, squares.device()));
        for part in squares.split(64, 0) {
            total += part.sum(None::<Kind>);
        }
        let norm = total.sqrt().to_kind(Kind::Float).double_value(&[]);
        let factor = (self.model.max_norm / (norm + 1e-6)).min(1.0);
        self.model.parameters().iter().for_each(|p| multiply_gradient(p, factor));
    }

    fn after(&self) -> Result<()> {
        let round = |t: &Tensor| {
            let rounded = t.to_kind(self.dtype).to_kind(Kind::Float);
            no_grad(|| t.shallow_clone().copy_(&rounded));
        };
        if self.change == "no_master_weights" {
            self.model.parameters().iter().for_each(round);
        }
        if self.change == "running_stats_rounded_to_half" {
            self.model.vs.variables().values().filter(|t| !t.requires_grad()).for_each(round);
        }
        Ok(())
    }
}
