//! Skipping the steps whose loss or gradient norm is far above its recent history.

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::capture::{self, IterationTensor, OwnLink};
use crate::checkpoint::{Prepared, SaveState, SavedState, Stateful};
use crate::error::{Error, Number, Result, ensure, ensure_defined};
use crate::ffi::{self, OutsideRegions, SpikeOptions};
use crate::optim::{AmpOptimizer, Step, take_step};
#[cfg(doc)]
use crate::scaler::GradScaler;
use crate::scaler::StepOutcome;
#[cfg(feature = "insight")]
use crate::scaler::outcome::Judged;
use crate::scaler::outcome::StepResult;

/// When a gradient norm or a loss counts as a spike.
///
/// # Examples
///
/// ```
/// use tch::{Device, Tensor};
/// use tch_amp::GradScaler;
/// use tch_amp::optim::Sgd;
/// use tch_amp::scaler::SpikeConfig;
///
/// let w = Tensor::from_slice(&[0f32]).set_requires_grad(true);
/// let mut opt = Sgd::default().build(&[w.shallow_clone()], 1.0)?;
/// let mut scaler = GradScaler::new(Device::Cpu)?;
/// let mut spikes = SpikeConfig { window: 16, warmup: 4, ..Default::default() }.build()?;
/// for gradient in [1.0, 1.1, 0.9, 1.0, 50.0, 1.0, f64::NAN] {
///     opt.zero_grad()?;
///     scaler.backward(&(&w * gradient).sum(None))?;
///     scaler.step_unless_spike(&mut opt, f64::INFINITY, &mut spikes)?;
///     scaler.update()?;
/// }
/// let counts = spikes.counts()?;
/// assert_eq!((counts.norm_spikes, counts.non_finite), (1, 1));
/// assert!((w.double_value(&[0]) + 5.0).abs() < 1e-6);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SpikeConfig {
    /// By how many standard deviations of the window a number must exceed its mean to be a spike; more than 0. The
    /// standard deviation counts as at least 1 % of the mean. Defaults to 6.
    pub deviations: f64,
    /// How many numbers of steps that were taken form the history; from 2 to 65536. Defaults to 128.
    pub window: u32,
    /// How many steps must have been taken before one can be a spike; at least 2. Defaults to 32.
    pub warmup: u32,
    /// How many spikes in a row are skipped at most. The next one is taken and enters the history, so that a training
    /// whose loss has risen for good goes on. Defaults to 8.
    pub max_in_a_row: u32,
}

impl Default for SpikeConfig {
    fn default() -> Self {
        Self { deviations: 6.0, window: 128, warmup: 32, max_in_a_row: 8 }
    }
}

impl SpikeConfig {
    /// Makes a detector without a history.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for an option outside its range.
    pub fn build(self) -> Result<SpikeDetector> {
        let Self { deviations, window, warmup, .. } = self;
        let holds = deviations > 0.0 && deviations.is_finite();
        ensure("deviations", deviations, holds, "more than 0 and finite")?;
        ensure("window", window.into(), (2..=65536).contains(&window), "from 2 to 65536")?;
        ensure("warmup", warmup.into(), warmup >= 2, "at least 2")?;
        let link = OwnLink::default();
        Ok(SpikeDetector { config: self, norm: None, loss: None, watched: None, link })
    }
}

/// f64 counts exactly up to this number.
const MOST_STEPS: f64 = 9_007_199_254_740_992.0;

/// Skips steps whose gradient norm, or watched loss, is far above its recent history. Used by
/// [`GradScaler::step_unless_spike`]. PyTorch has no counterpart.
///
/// The history is on the device of the gradients, and so is the decision: nothing synchronizes. A checkpoint saves it
/// with [`Checkpoint::add`](crate::checkpoint::Checkpoint::add).
#[derive(Debug)]
pub struct SpikeDetector {
    config: SpikeConfig,
    norm: Option<Tensor>,
    loss: Option<Tensor>,
    /// The loss of the next step, detached.
    watched: Option<IterationTensor>,
    /// Shared with the graphs that add to its histories in their replays.
    link: OwnLink,
}

const HISTORY: &str = "the first step that a detector of spikes judges";

/// How many steps were skipped, by their reason. See [`SpikeDetector::counts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SpikeCounts {
    /// Steps whose gradients or whose watched loss were infinite or NaN.
    pub non_finite: u64,
    /// Steps whose watched loss was a spike.
    pub loss_spikes: u64,
    /// Steps whose gradient norm was a spike and whose watched loss was not.
    pub norm_spikes: u64,
}

impl SpikeDetector {
    /// Judges the next step by this loss as well, which has one element on any device. The step is skipped if the loss
    /// or the norm is a spike.
    /// On several ranks give all of them the same loss, such as the mean.
    pub fn watch_loss(&mut self, loss: &Tensor) {
        // Without its graph, which would be kept until the next step. An undefined tensor is refused there.
        let loss = loss.f_detach().unwrap_or_else(|_| loss.shallow_clone());
        self.watched = Some(IterationTensor::new(loss));
    }

    /// Returns the options.
    pub fn config(&self) -> SpikeConfig {
        self.config
    }

    /// Returns how many steps were skipped, by their reason. Synchronizes on a GPU.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the numbers cannot be read from the device.
    pub fn counts(&self) -> Result<SpikeCounts> {
        capture::refuse("reading the counts of spikes", "read them after `replay`")?;
        let read = |history: &Option<Tensor>| -> Result<[u64; 2]> {
            let Some(history) = history else { return Ok([0; 2]) };
            Ok(ffi::spikes_counts(history)?.map(|count| count as u64))
        };
        let ([norm_spikes, non_finite], [loss_spikes, bad_losses]) =
            (read(&self.norm)?, read(&self.loss)?);
        let non_finite = non_finite.saturating_add(bad_losses);
        Ok(SpikeCounts { non_finite, loss_spikes, norm_spikes })
    }

    /// Steps the optimizer, unless the norm of its gradients or the watched loss is a spike or not finite,
    /// as the norm is if a gradient is not. On the CPU the host looks. The histories change only if the step succeeds.
    pub(super) fn update_unless(
        &mut self,
        optimizer: &mut dyn AmpOptimizer,
        step: &Step<'_>,
        norm: &Tensor,
    ) -> Result<StepOutcome> {
        let SpikeConfig { deviations, window, warmup, max_in_a_row } = self.config;
        let options = SpikeOptions { deviations, window, warmup, max_in_a_row };
        let watched = self.watched.as_ref();
        let watched = watched.map(|loss| loss.get("the loss of another iteration")).transpose()?;
        if let Some(loss) = watched {
            ensure_defined("the watched loss", loss)?;
        }
        let loss = match watched {
            Some(loss) => Some(ffi::spikes_judge(self.loss.as_ref(), loss, None, options)?),
            None => None,
        };
        #[cfg(feature = "insight")]
        let judged =
            Judged { norm: norm.shallow_clone(), loss: watched.map(Tensor::shallow_clone) };
        let norm = ffi::spikes_judge(self.norm.as_ref(), norm, loss.as_ref(), options)?;
        let flag = ffi::spikes_flag(&norm)?;
        let outcome = if flag.device() != Device::Cpu {
            take_step(optimizer, &step.with_found_inf(&flag))?;
            StepOutcome::on_device(flag)
        } else if ffi::any_nonzero(&[&flag])? {
            StepOutcome::known(StepResult::Skipped)
        } else {
            take_step(optimizer, step)?;
            StepOutcome::known(StepResult::Stepped)
        };
        self.link.replace(&mut self.norm, norm, HISTORY)?;
        if let Some(loss) = loss {
            self.link.replace(&mut self.loss, loss, HISTORY)?;
        }
        self.link.register(self.norm.iter().chain(&self.loss));
        self.watched = None;
        #[cfg(feature = "insight")]
        let outcome = outcome.with_judged(judged);
        Ok(outcome)
    }

    /// The histories with their names in a checkpoint.
    fn histories(&self) -> [(&'static str, Option<&Tensor>); 2] {
        [("norm", self.norm.as_ref()), ("loss", self.loss.as_ref())]
    }

    /// Checks that a saved history has this detector's window, and counts that a run can have.
    fn check(&self, history: &Tensor) -> Result<()> {
        let refuse =
            |problem| Err(Error::InvalidArgument { name: "the saved history of spikes", problem });
        let expected = [ffi::spikes_length(self.config.window)];
        if history.size() != expected || history.kind() != Kind::Double {
            return refuse(format!(
                "has {:?} numbers, and the detector {expected:?}; build it with the window that was saved",
                history.size()
            ));
        }
        let is_count = |number: &f64| (0.0..MOST_STEPS).contains(number) && number.fract() == 0.0;
        match ffi::spikes_state(history)?.into_iter().find(|number| !is_count(number)) {
            Some(number) => {
                let number = Number(number);
                refuse(format!("is damaged: {number} is no number of steps"))
            }
            None => Ok(()),
        }
    }
}

impl Stateful for SpikeDetector {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        for (name, history) in self.histories() {
            if let Some(history) = history {
                state.tensor(name, history)?;
            }
        }
        Ok(())
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let _own = OutsideRegions::enter();
        let mut loaded = [None, None];
        for (place, (name, _)) in loaded.iter_mut().zip(self.histories()) {
            if saved.contains(name)? {
                let history = saved.tensor(name)?;
                self.check(&history)?;
                *place = Some(history.f_contiguous()?);
            }
        }
        let [norm, loss] = loaded;
        Ok(Prepared::new(move || {
            self.link.note_change("the histories of a detector of spikes");
            (self.norm, self.loss, self.watched) = (norm, loss, None);
        }))
    }
}
