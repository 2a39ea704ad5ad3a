//! One iteration of training, in which a fault or a harmless change is planted.

use std::ops::Range;

use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::gradients::clip_grad_norm;
use tch_amp::insight::{Budget, BudgetReport, BudgetRun};
use tch_amp::optim::{AdamW, AmpOptimizer, Optimizer};
use tch_amp::{Autocast, Result};

use crate::budget::context::{Context, Store};
use crate::budget::models::Model;

/// Multiplies the gradient of a parameter, if there is one.
fn multiply_gradient(parameter: &Tensor, factor: f64) {
    let mut gradient = parameter.grad();
    if gradient.defined() {
        no_grad(|| gradient *= factor);
    }
}

/// The runs in which a change is planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Those in half precision, as if the fault were in a library that they alone call.
    Half,
    /// Those in which the program asks for half precision, noise runs among them: a branch on the dtype.
    Branch,
    /// All, as in a program that simply has it.
    Every,
}

impl Form {
    pub(crate) const ALL: [Self; 3] = [Self::Half, Self::Branch, Self::Every];

    pub(crate) fn has(self, run: &BudgetRun) -> bool {
        match self {
            Self::Half => run.is_half(),
            Self::Branch => run.dtype() != Kind::Float,
            Self::Every => true,
        }
    }
}

/// A model with what its program keeps, and what is planted in it.
pub(crate) struct Program {
    pub(crate) model: Model,
    pub(crate) dtype: Kind,
    pub(crate) change: &'static str,
    pub(crate) form: Form,
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
        let (form, scale, runs) = (Form::Half, 1024.0, 4);
        Self { model, dtype, change, form, seed, scale, runs, store: Store::default() }
    }

    pub(crate) fn form(self, form: Form) -> Self {
        Self { form, ..self }
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
            form: self.form,
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
        let is_changed = self.form.has(run);
        let is = |change: &str| is_changed && self.change == change;
        if !is("zero_grad_is_missing") {
            optimizer.zero_grad()?;
        }
        let scale = run.scaler().get_scale()?;
        if is("accumulated") || is("losses_apart") || is("one_micro_batch_is_not_scaled") {
            let loss = self.backward_in_parts(run)?;
            self.step(run, optimizer, scale)?;
            return Ok(loss);
        }
        let region_does_nothing = is("region_does_nothing");
        let losses =
            if region_does_nothing { self.forward(run) } else { run.region(|| self.forward(run))? };
        let loss =
            losses.iter().map(|loss| loss.to_kind(Kind::Float)).reduce(|a, b| a + b).unwrap();
        if is("loss_is_scaled_twice") || is("loss_is_scaled_twice_and_not_unscaled") {
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
        if is_changed {
            self.after()?;
        }
        Ok(loss)
    }

    /// Scales and differentiates halves of the loss, or each of several losses, one after the other.
    fn backward_in_parts(&self, run: &mut BudgetRun) -> Result<Tensor> {
        let is_apart = self.change == "losses_apart";
        let mut total = Tensor::zeros([], (Kind::Float, self.model.vs.device()));
        let (mut part, mut parts) = (0, 2);
        while part < parts {
            let losses = run.region(|| self.forward(run))?;
            let loss = if is_apart {
                parts = losses.len();
                losses[part].to_kind(Kind::Float)
            } else {
                losses.iter().map(|loss| loss.to_kind(Kind::Float)).sum::<Tensor>() / 2.0
            };
            if part == 1 && self.change == "one_micro_batch_is_not_scaled" {
                loss.backward();
            } else {
                run.scaler().backward(&loss)?;
            }
            total += loss.detach();
            part += 1;
        }
        Ok(total)
    }

    /// The norm of the gradients of some of the losses, for the parameters whose names are given.
    pub(crate) fn norm_of_losses(&self, run: &BudgetRun, losses: Range<usize>, of: &[&str]) -> f64 {
        self.model.parameters().iter_mut().for_each(Tensor::zero_grad);
        let loss: Tensor = self.forward(run)[losses].iter().sum();
        loss.backward();
        let variables = self.model.vs.variables();
        let squares = of.iter().map(|&name| {
            let gradient = variables[name].grad().to_kind(Kind::Double);
            gradient.square().sum(Kind::Double).double_value(&[])
        });
        squares.sum::<f64>().sqrt()
    }

    /// Divides the gradients by a scale.
    fn divide(&self, scale: f64) {
        self.model.parameters().iter().for_each(|p| multiply_gradient(p, 1.0 / scale));
    }

    fn clip(&self) -> Result<()> {
        clip_grad_norm(&self.model.parameters(), self.model.max_norm).map(drop)
    }

    fn step(&self, run: &mut BudgetRun, optimizer: &mut Optimizer, scale: f64) -> Result<()> {
        let is_changed = self.form.has(run);
        let is = |change: &str| is_changed && self.change == change;
        if is("unscaled_by_a_constant") && run.scaler().is_enabled() {
            self.divide(1024.0);
        }
        if is("unscale_is_skipped")
            || is("loss_is_scaled_twice_and_not_unscaled")
            || is("unscaled_by_a_constant")
        {
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
                let rounded = p.grad().to_kind(run.dtype()).to_kind(Kind::Float);
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
        if is("update_is_missing") { Ok(()) } else { run.scaler().update() }
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
