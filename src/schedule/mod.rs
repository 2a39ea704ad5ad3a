//! Learning-rate schedules with PyTorch's numbers, which advance only when a step was taken.
//!
//! A schedule is a struct of options, such as [`CosineAnnealingLr`]. Its `build` makes a [`Scheduler`] for a fused
//! [`Optimizer`], which is stepped with the outcome of the scaler's step. A skipped step does not advance it, and it
//! never synchronizes: a step on a GPU counts as taken until its outcome has arrived, and is taken back if it was
//! skipped. PyTorch's schedulers advance on skipped steps, too, unless the loop compares the scale before and after
//! `update`, which synchronizes. [`ReduceLrOnPlateau`] is stepped with a metric instead.
//!
//! The numbers are those of `torch.optim.lr_scheduler`, to the last bit. Each learning rate is computed from the
//! previous one where PyTorch does so, so the schedule continues from a learning rate that the program sets between two
//! steps. There are four differences:
//!
//! - A learning rate that would be negative is 0. In PyTorch rounding makes the last one of a `LinearLR` with the end
//!   factor 0 negative, and the optimizer then climbs.
//! - The last advance of a [`OneCycleLr`] keeps its learning rate and momentum.
//! - Each [`OneCycleLr`] of a sequence or a chain has options of its own; in PyTorch the last one's replace the
//!   others'.
//! - A scheduler begins with the optimizer's present learning rates. In PyTorch a second scheduler of an optimizer
//!   begins with those before the first one; use a [`ChainedScheduler`] here.
//!
//! # Examples
//!
//! A linear warm-up over 100 steps, and then cosine annealing over 900:
//!
//! ```
//! use tch::{Device, Tensor};
//! use tch_amp::GradScaler;
//! use tch_amp::optim::AdamW;
//! use tch_amp::schedule::{CosineAnnealingLr, LinearLr, SequentialLr};
//!
//! let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
//! let mut opt = AdamW::default().build(&[w.shallow_clone()], 1e-3)?;
//! let mut scaler = GradScaler::new(Device::Cpu)?;
//!
//! let warmup = LinearLr { start_factor: 0.01, total_iters: 100, ..Default::default() };
//! let cosine = CosineAnnealingLr { t_max: 900, eta_min: 0.0 };
//! let mut scheduler = SequentialLr::new(warmup).then_at(100, cosine).build(&mut opt)?;
//! for gradient in [1.0, f64::INFINITY, 1.0] {
//!     opt.zero_grad()?;
//!     scaler.backward(&(&w * gradient).sum(None))?;
//!     let outcome = scaler.step(&mut opt)?;
//!     scaler.update()?;
//!     scheduler.step(&mut opt, &outcome)?;
//! }
//! // The step with the infinite gradient was skipped.
//! assert_eq!(scheduler.steps(), 2);
//! assert!((opt.lr(0)? - 1e-3 * (0.01 + 0.99 * 0.02)).abs() < 1e-12);
//! # Ok::<(), tch_amp::Error>(())
//! ```

mod combined;
mod decay;
mod on_device;
mod one_cycle;
mod plateau;
mod progress;
mod scheduler;

use serde::{Deserialize, Deserializer, Serialize};

use crate::error::{Error, Result, ensure};
use crate::optim::Optimizer;
use crate::tagged;

pub use combined::{ChainedScheduler, SequentialLr};
pub use decay::{
    ConstantLr, CosineAnnealingLr, CosineAnnealingWarmRestarts, ExponentialLr, InverseSqrtLr,
    LinearLr, LinearWithWarmup, MultiStepLr, PolynomialLr, StepLr,
};
pub use one_cycle::{Annealing, OneCycleLr};
pub use plateau::{PlateauScheduler, ReduceLrOnPlateau, Threshold};
pub use scheduler::Scheduler;

/// Any schedule that is driven by steps.
///
/// # Examples
///
/// ```
/// use tch_amp::schedule::{OneCycleLr, Schedule};
///
/// let schedule: Schedule = serde_json::from_str(
///     r#"{"schedule": "OneCycleLr", "max_lr": [0.1], "total_steps": 1000}"#,
/// )?;
/// assert_eq!(schedule, OneCycleLr::new(0.1, 1000).into());
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "schedule")]
#[non_exhaustive]
pub enum Schedule {
    /// [`StepLr`].
    StepLr(StepLr),
    /// [`MultiStepLr`].
    MultiStepLr(MultiStepLr),
    /// [`ConstantLr`].
    ConstantLr(ConstantLr),
    /// [`LinearLr`].
    LinearLr(LinearLr),
    /// [`ExponentialLr`].
    ExponentialLr(ExponentialLr),
    /// [`PolynomialLr`].
    PolynomialLr(PolynomialLr),
    /// [`CosineAnnealingLr`].
    CosineAnnealingLr(CosineAnnealingLr),
    /// [`CosineAnnealingWarmRestarts`].
    CosineAnnealingWarmRestarts(CosineAnnealingWarmRestarts),
    /// [`OneCycleLr`].
    OneCycleLr(OneCycleLr),
    /// [`InverseSqrtLr`].
    InverseSqrtLr(InverseSqrtLr),
    /// [`LinearWithWarmup`].
    LinearWithWarmup(LinearWithWarmup),
    /// [`SequentialLr`].
    SequentialLr(SequentialLr),
    /// [`ChainedScheduler`].
    ChainedScheduler(ChainedScheduler),
}

impl<'de> Deserialize<'de> for Schedule {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let variants = tagged::variants!(
            StepLr MultiStepLr ConstantLr LinearLr ExponentialLr PolynomialLr CosineAnnealingLr
            CosineAnnealingWarmRestarts OneCycleLr InverseSqrtLr LinearWithWarmup SequentialLr ChainedScheduler
        );
        tagged::read(from, "schedule", variants)
    }
}

impl Schedule {
    /// Makes a scheduler for an optimizer's groups and sets their first learning rates. The present learning rates are
    /// the base from which the schedule computes, so make the scheduler before the optimizer is restored.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for an option outside its range, or whose number does not match that of the groups;
    /// for milestones that do not rise, and parts that a sequence or a chain cannot have; and for a schedule that
    /// cycles the momentum of Adagrad. The optimizer is unchanged then.
    pub fn build(self, optimizer: &mut Optimizer) -> Result<Scheduler> {
        Scheduler::for_optimizer(self, optimizer)
    }

    /// Makes a scheduler without an optimizer, for groups with these learning rates. It is stepped with
    /// [`Scheduler::record`], and the program sets the [`Scheduler::lrs`] of its optimizer, such as one of tch's.
    ///
    /// # Errors
    ///
    /// The same as [`build`](Self::build); and for a learning rate outside its range, an empty list, and a schedule
    /// that cycles the momentum, which is not known here.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, nn, nn::OptimizerConfig};
    /// use tch_amp::GradScaler;
    /// use tch_amp::schedule::{ExponentialLr, Schedule};
    ///
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let w = vs.root().ones("w", &[1]);
    /// let mut opt = nn::AdamW::default().build(&vs, 0.1)?;
    /// let mut scaler = GradScaler::new(Device::Cpu)?;
    ///
    /// let mut scheduler = Schedule::from(ExponentialLr { gamma: 0.5 }).build_for_lrs(&[0.1])?;
    /// scaler.backward(&w.sum(None))?;
    /// scheduler.record(&scaler.step(&mut opt)?)?;
    /// scaler.update()?;
    /// opt.set_lr(scheduler.lrs()[0]);
    /// assert_eq!(scheduler.lrs(), [0.05]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn build_for_lrs(self, lrs: &[f64]) -> Result<Scheduler> {
        Scheduler::for_lrs(self, lrs)
    }
}

macro_rules! build {
    ($($config:ident)*) => {$(
        impl $config {
            /// Makes a scheduler for an optimizer, like [`Schedule::build`].
            ///
            /// # Errors
            ///
            /// The same as [`Schedule::build`].
            pub fn build(self, optimizer: &mut Optimizer) -> Result<Scheduler> {
                Schedule::from(self).build(optimizer)
            }
        }

        impl From<$config> for Schedule {
            fn from(config: $config) -> Self {
                Self::$config(config)
            }
        }
    )*};
}

build!(
    StepLr MultiStepLr ConstantLr LinearLr ExponentialLr PolynomialLr CosineAnnealingLr CosineAnnealingWarmRestarts
    OneCycleLr InverseSqrtLr LinearWithWarmup SequentialLr ChainedScheduler
);

/// The numbers that a schedule sets, one of each for every group.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rates {
    pub(super) lrs: Vec<f64>,
    /// `None` for an algorithm that has no momentum, or if it is not known.
    pub(super) momenta: Vec<Option<f64>>,
    /// PyTorch's `initial_lr`: the learning rates before the first schedule changed them.
    pub(super) initial: Vec<f64>,
}

impl Rates {
    pub(super) fn of(optimizer: &Optimizer) -> Self {
        let groups = &optimizer.groups;
        let lrs: Vec<_> = groups.iter().map(|group| group.lr).collect();
        let momenta = groups.iter().map(|group| group.algorithm.momentum()).collect();
        Self { initial: lrs.clone(), lrs, momenta }
    }

    pub(super) fn of_lrs(lrs: &[f64]) -> Result<Self> {
        if lrs.is_empty() {
            let problem = "has no learning rate; there must be one for each group".to_owned();
            return Err(Error::InvalidArgument { name: "lrs", problem });
        }
        for &lr in lrs {
            ensure("lrs", lr, lr >= 0.0 && lr.is_finite(), "finite and at least 0")?;
        }
        Ok(Self { lrs: lrs.to_vec(), momenta: vec![None; lrs.len()], initial: lrs.to_vec() })
    }

    /// Sets them in all groups, or in none.
    pub(super) fn apply(&self, optimizer: &mut Optimizer) -> Result<()> {
        optimizer.set_rates(&self.lrs, &self.momenta)
    }

    /// Returns the differences of an optimizer that was given these rates and has the other ones by now.
    pub(super) fn changes(&self, there: &Self) -> Changes {
        Changes {
            lrs: changed(&self.lrs, &there.lrs),
            momenta: changed(&self.momenta, &there.momenta),
        }
    }

    /// Takes over what the program has changed.
    pub(super) fn take(&mut self, changes: &Changes) {
        overwrite(&mut self.lrs, &changes.lrs);
        overwrite(&mut self.momenta, &changes.momenta);
    }

    /// Multiplies every learning rate.
    pub(super) fn scale(&mut self, factor: f64) {
        self.lrs.iter_mut().for_each(|lr| *lr *= factor);
    }
}

/// The numbers that a program has set in the groups of an optimizer since a schedule has. The other numbers follow the
/// schedule, also when it takes a step back.
#[derive(Clone, Debug, Default)]
pub(super) struct Changes {
    lrs: Vec<Option<f64>>,
    momenta: Vec<Option<Option<f64>>>,
}

fn changed<T: Copy + PartialEq>(before: &[T], now: &[T]) -> Vec<Option<T>> {
    before.iter().zip(now).map(|(before, now)| (before != now).then_some(*now)).collect()
}

fn overwrite<T: Copy>(numbers: &mut [T], changes: &[Option<T>]) {
    for (number, change) in numbers.iter_mut().zip(changes) {
        *number = change.unwrap_or(*number);
    }
}
