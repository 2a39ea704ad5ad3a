//! The schedule that is driven by a metric.

use serde::{Deserialize, Serialize};

use crate::capture;
use crate::checkpoint::{MetricGoal, Prepared, SaveState, SavedState, Stateful};
use crate::error::{Error, Result, ensure};
use crate::optim::Optimizer;
use crate::schedule::Rates;
use crate::schedule::progress::refuse_mmengine;

/// Multiplies the learning rate by `factor` when a metric has stopped improving. The counterpart of
/// `torch.optim.lr_scheduler.ReduceLROnPlateau`, with its defaults.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::optim::Sgd;
/// use tch_amp::schedule::ReduceLrOnPlateau;
///
/// let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
/// let mut opt = Sgd::default().build(&[w], 1.0)?;
/// let mut scheduler = ReduceLrOnPlateau { patience: 1, ..Default::default() }.build(&opt)?;
/// for loss in [3.0, 2.0, 2.5, 2.0] {
///     scheduler.step(&mut opt, loss)?;
/// }
/// assert_eq!(opt.lr(0)?, 0.1);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReduceLrOnPlateau {
    /// Whether the metric should fall or rise. Defaults to falling.
    pub mode: MetricGoal,
    /// The factor by which the learning rate is reduced; at least 0 and less than 1. Defaults to 0.1.
    pub factor: f64,
    /// The number of evaluations without improvement that are allowed; the next one reduces the learning rate. Defaults
    /// to 10.
    pub patience: u64,
    /// By how much the metric must improve to count; at least 0. Defaults to 1e-4.
    pub threshold: f64,
    /// Whether the threshold is a share of the best metric, or a difference. Defaults to the share.
    pub threshold_mode: Threshold,
    /// The number of evaluations after a reduction that are not counted as bad. Defaults to 0.
    pub cooldown: u64,
    /// The smallest learning rate; at least 0. Defaults to 0.
    pub min_lr: f64,
    /// A reduction by no more than this is ignored; at least 0. Defaults to 1e-8.
    pub eps: f64,
}

/// The kind of difference that is compared with a threshold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Threshold {
    /// The relative change: for a falling metric, it must be less than best * (1 - threshold).
    #[default]
    Rel,
    /// The difference: for a falling metric, it must be less than best - threshold.
    Abs,
}

impl Default for ReduceLrOnPlateau {
    fn default() -> Self {
        Self {
            mode: MetricGoal::Min,
            factor: 0.1,
            patience: 10,
            threshold: 1e-4,
            threshold_mode: Threshold::Rel,
            cooldown: 0,
            min_lr: 0.0,
            eps: 1e-8,
        }
    }
}

impl ReduceLrOnPlateau {
    /// Makes a scheduler. The learning rates of the optimizer are changed by its steps only.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for an option outside its range.
    pub fn build(self, _optimizer: &Optimizer) -> Result<PlateauScheduler> {
        let factor = self.factor;
        ensure("factor", factor, (0.0..1.0).contains(&factor), "from 0 to below 1")?;
        for (name, value) in
            [("threshold", self.threshold), ("min_lr", self.min_lr), ("eps", self.eps)]
        {
            ensure(name, value, value >= 0.0 && value.is_finite(), "finite and at least 0")?;
        }
        Ok(PlateauScheduler { options: self, state: PlateauState::new(self.mode) })
    }

    fn is_better(&self, metric: f64, best: f64) -> bool {
        let threshold = self.threshold;
        match (self.mode, self.threshold_mode) {
            (MetricGoal::Min, Threshold::Rel) => metric < best * (1.0 - threshold),
            (MetricGoal::Min, Threshold::Abs) => metric < best - threshold,
            (MetricGoal::Max, Threshold::Rel) => metric > best * (threshold + 1.0),
            (MetricGoal::Max, Threshold::Abs) => metric > best + threshold,
        }
    }
}

/// Reduces the learning rates of an optimizer when a metric has stopped improving. [`ReduceLrOnPlateau`] makes it.
///
/// A checkpoint saves it with [`Checkpoint::add`](crate::checkpoint::Checkpoint::add).
#[derive(Debug)]
pub struct PlateauScheduler {
    options: ReduceLrOnPlateau,
    state: PlateauState,
}

/// The state of a [`PlateauScheduler`], with PyTorch's names.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PlateauState {
    last_epoch: u64,
    best: f64,
    num_bad_epochs: u64,
    cooldown_counter: u64,
}

impl PlateauState {
    fn new(mode: MetricGoal) -> Self {
        let best = match mode {
            MetricGoal::Min => f64::INFINITY,
            MetricGoal::Max => f64::NEG_INFINITY,
        };
        Self { last_epoch: 0, best, num_bad_epochs: 0, cooldown_counter: 0 }
    }

    /// Records a metric and returns whether the learning rate is to be reduced.
    fn record(&mut self, metric: f64, options: &ReduceLrOnPlateau) -> bool {
        self.last_epoch = self.last_epoch.saturating_add(1);
        if options.is_better(metric, self.best) {
            self.best = metric;
            self.num_bad_epochs = 0;
        } else {
            self.num_bad_epochs = self.num_bad_epochs.saturating_add(1);
        }
        if self.cooldown_counter > 0 {
            self.cooldown_counter -= 1;
            self.num_bad_epochs = 0;
        }
        let reduces = self.num_bad_epochs > options.patience;
        if reduces {
            self.cooldown_counter = options.cooldown;
            self.num_bad_epochs = 0;
        }
        reduces
    }
}

impl PlateauScheduler {
    /// Records a metric, such as the loss of an evaluation, and reduces the learning rates if it has stopped improving.
    /// A NaN does not count as an improvement. On several ranks the metric must be the same on all of them; take the
    /// mean.
    ///
    /// # Errors
    ///
    /// Those of [`Optimizer::set_lr`]; nothing is changed then.
    pub fn step(&mut self, optimizer: &mut Optimizer, metric: f64) -> Result<()> {
        capture::refuse("a step of a schedule by a metric", "call it after `replay`")?;
        let mut state = self.state;
        if state.record(metric, &self.options) {
            let mut rates = Rates::of(optimizer);
            let ReduceLrOnPlateau { factor, min_lr, eps, .. } = self.options;
            for lr in &mut rates.lrs {
                let reduced = (*lr * factor).max(min_lr);
                if *lr - reduced > eps {
                    *lr = reduced;
                }
            }
            rates.apply(optimizer)?;
        }
        self.state = state;
        Ok(())
    }

    /// Returns the best metric so far: infinite before the first.
    pub fn best(&self) -> f64 {
        self.state.best
    }

    /// Returns the options.
    pub fn options(&self) -> &ReduceLrOnPlateau {
        &self.options
    }
}

impl PlateauState {
    /// Returns an error for a loaded state that no run can have.
    fn check(&self) -> Result<()> {
        if self.best.is_nan() {
            let problem = "is NaN, which nothing can improve on".to_owned();
            return Err(Error::InvalidArgument { name: "best", problem });
        }
        Ok(())
    }
}

impl ReduceLrOnPlateau {
    /// Compares the options in a state of Python with those here.
    fn compare(&self, saved: &SavedState<'_>) -> Result<()> {
        let Self { mode, factor, patience, threshold, threshold_mode, cooldown, min_lr, eps } =
            self;
        saved.leave_out_unread(&["_last_lr", "default_min_lr", "mode_worse", "verbose"]);
        if !saved.is_strict() {
            return Ok(());
        }
        saved.option("mode", mode)?;
        saved.option("factor", factor)?;
        saved.option("patience", patience)?;
        saved.option("threshold", threshold)?;
        saved.option("threshold_mode", threshold_mode)?;
        saved.option("cooldown", cooldown)?;
        saved.option("eps", eps)?;
        // Python has one for each group.
        let groups = saved.value::<Vec<f64>>("min_lrs")?.len();
        saved.option("min_lrs", &vec![*min_lr; groups])
    }
}

impl Stateful for PlateauScheduler {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        let PlateauState { last_epoch, best, num_bad_epochs, cooldown_counter } = self.state;
        state.value("last_epoch", &last_epoch)?;
        state.value("best", &best)?;
        state.value("num_bad_epochs", &num_bad_epochs)?;
        state.value("cooldown_counter", &cooldown_counter)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        refuse_mmengine(saved)?;
        let loaded = PlateauState {
            last_epoch: saved.value("last_epoch")?,
            best: saved.value("best")?,
            num_bad_epochs: saved.value("num_bad_epochs")?,
            cooldown_counter: saved.value("cooldown_counter")?,
        };
        loaded.check()?;
        if saved.contains("mode")? {
            self.options.compare(saved)?;
        }
        Ok(Prepared::new(move || self.state = loaded))
    }
}
