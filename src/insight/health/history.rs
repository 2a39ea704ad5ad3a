//! The scale, the skips and the norms of the last steps.

use std::fmt;

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::report::{Verdict, power_of_two};
use crate::GradScaler;
use crate::capture::{self, IterationTensor, OwnLink};
use crate::checkpoint::{Prepared, SaveState, SavedState, Stateful};
use crate::error::{Error, Result, ensure_defined};
use crate::ffi::exponents::{self, ReadNumbers, StepNumber, StepNumbers};
use crate::ffi::{self, Counted};
use crate::insight::numbers;
use crate::scaler::{StepOutcome, StepResult};

/// The most steps that a history can remember.
const MOST_STEPS: usize = 1 << 20;

/// The names of the columns in a checkpoint: tensors, because a file holds far more of their elements than of values. A
/// taken step has the number 0 in `skipped`, one that overflowed 1 and a spike 2; an unknown norm or loss is NaN.
const COLUMNS: [&str; 5] = ["scale", "skipped", "norm", "loss", "learning_rate"];

/// Remembers the scale, the skips with their causes, the gradient norms and the learning rates of the last steps.
///
/// Call [`record`](Self::record) once per step. What only the device knows stays there until [`report`](Self::report)
/// reads it, so that recording never synchronizes. A checkpoint saves the history with
/// [`Checkpoint::add`](crate::checkpoint::Checkpoint::add). PyTorch has no counterpart.
///
/// # Examples
///
/// ```
/// use tch::{Device, Tensor};
/// use tch_amp::insight::{ScaleHistory, SkipCause};
/// use tch_amp::{GradScaler, optim::Sgd};
///
/// let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
/// let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.1)?;
/// let mut scaler = GradScaler::new(Device::Cpu)?;
/// let mut history = ScaleHistory::new(100)?;
/// for gradient in [1.0, f64::INFINITY, 1.0] {
///     opt.zero_grad()?;
///     scaler.backward(&(&w * gradient).sum(None))?;
///     let outcome = scaler.step_clip_norm(&mut opt, 1.0)?;
///     history.record(&scaler, &outcome, 0.1)?;
///     scaler.update()?;
/// }
/// let report = history.report()?;
/// assert_eq!(report.skips(SkipCause::Overflow), 1);
/// assert_eq!(report.to_string(), "3 steps, 1 skipped (1 overflow), scale 2^16 → 2^15");
///
/// let steps = serde_json::to_value(&report).expect("a report is plain data")["steps"].take();
/// assert_eq!(steps[1]["skipped"], "Overflow");
/// assert_eq!([&steps[1]["scale"], &steps[2]["scale"]], [65536.0, 32768.0]);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Debug)]
pub struct ScaleHistory {
    capacity: usize,
    /// How many steps were ever recorded. From the first iteration of a graph on, the device counts.
    total: Counted<u64>,
    /// Loaded steps, the oldest first.
    loaded: Vec<StepRecord>,
    /// Where the ring begins: the number of all steps before.
    begun: u64,
    /// The row of a step is its number, counted from 0, modulo the capacity.
    ring: Option<Tensor>,
    /// The loss of the step that is recorded next.
    loss: Option<IterationTensor>,
    /// Shared with the graphs that add to it in their replays.
    link: OwnLink,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::insight) struct StepRecord {
    pub(in crate::insight) step: u64,
    pub(in crate::insight) scale: f64,
    pub(in crate::insight) skipped: Option<SkipCause>,
    pub(in crate::insight) norm: Option<f64>,
    pub(in crate::insight) loss: Option<f64>,
    #[serde(with = "numbers")]
    pub(in crate::insight) learning_rate: f64,
}

/// Why a step was skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SkipCause {
    /// A gradient, the gradient norm or the watched loss was infinite or NaN.
    Overflow,
    /// The gradient norm or the watched loss was far above its history; see
    /// [`step_unless_spike`](GradScaler::step_unless_spike).
    Spike,
}

/// The last steps. Its text, by `Display`, is one line.
///
/// A program that wants the steps themselves serializes the report, which has this list beside the field below:
///
/// - `steps`: the last steps, the oldest first. A row has `step` (its number, counted from 1), `scale` (the loss scale;
///   1 for a disabled scaler), `skipped` (why it was skipped, a [`SkipCause`]; null if it was taken, or if there were
///   no gradients), `norm` (that of the unscaled gradients before clipping, if the step computed it and it is finite),
///   `loss` (if a [`SpikeDetector`](crate::scaler::SpikeDetector) watched it or [`set_loss`](ScaleHistory::set_loss)
///   gave it, and it is finite) and `learning_rate`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct HistoryReport {
    /// How many steps were ever recorded.
    pub total: u64,
    pub(in crate::insight) steps: Vec<StepRecord>,
}

impl ScaleHistory {
    /// Creates a history of the last `capacity` steps.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless the capacity is from 1 to 1,048,576.
    pub fn new(capacity: usize) -> Result<Self> {
        if !(1..=MOST_STEPS).contains(&capacity) {
            return Err(Error::out_of_range("capacity", capacity as f64, "from 1 to 1048576"));
        }
        Ok(Self {
            capacity,
            total: Counted::Host(0),
            loaded: Vec::new(),
            begun: 0,
            ring: None,
            loss: None,
            link: OwnLink::default(),
        })
    }

    /// Sets the loss of the step that is recorded next: the unscaled loss, a tensor with one element on any device.
    /// Never synchronizes.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless `loss` has one element.
    pub fn set_loss(&mut self, loss: &Tensor) -> Result<()> {
        ensure_defined("loss", loss)?;
        let elements = ffi::numel(loss);
        if elements != 1 {
            let problem = format!("has {elements} elements: pass the mean or sum, which has one");
            return Err(Error::InvalidArgument { name: "loss", problem });
        }
        self.loss = Some(IterationTensor::new(loss.f_detach()?));
        Ok(())
    }

    /// Records a step, between the step and [`GradScaler::update`], which changes the scale. The norm is that of
    /// [`step_clip_norm`](GradScaler::step_clip_norm) or [`step_unless_spike`](GradScaler::step_unless_spike); the loss
    /// is the one that a spike detector watched, or that of [`set_loss`](Self::set_loss). Never synchronizes.
    ///
    /// In an iteration that a graph captures, every replay records its step. The learning rate is then
    /// the present one on the device, an f32, of the optimizer's first group, in place of `learning_rate`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the scaler was updated already, [`Error::Capture`] if the first record in an
    /// iteration of a graph is in the capture, or if the outcome, the loss or the learning rate is not of the
    /// iteration, and [`Error::Torch`] if memory runs out. The history is then as before.
    pub fn record(
        &mut self,
        scaler: &GradScaler,
        outcome: &StepOutcome,
        learning_rate: f64,
    ) -> Result<()> {
        let scale = scaler.scale_number();
        if scale.is_some() && !scaler.is_between_step_and_update() && !outcome.has_no_gradients() {
            let problem = "is recorded between step and update, which changes the scale";
            return Err(Error::InvalidArgument { name: "history", problem: problem.to_owned() });
        }
        let begun = self.begin_on_device(outcome)?;
        let judged = outcome.judged();
        let is_skipped = outcome.known_taken() == Some(StepResult::Skipped);
        let given = self.loss.as_ref();
        let given = given.map(|loss| loss.get("the loss of another iteration")).transpose()?;
        let numbers = StepNumbers {
            scale: scale.map_or(StepNumber::Host(1.0), StepNumber::Device),
            flag: outcome
                .flag()?
                .map_or(StepNumber::Host(f64::from(u8::from(is_skipped))), StepNumber::Device),
            norm: outcome.total_norm().or_else(|| judged.map(|judged| &judged.norm)),
            loss: judged.and_then(|judged| judged.loss.as_ref()).or(given),
            learning_rate: outcome
                .learning_rate()?
                .map_or(StepNumber::Host(learning_rate), StepNumber::Device),
            is_judged: judged.is_some(),
        };
        let total = begun.as_ref().unwrap_or(&self.total);
        let next = total.map(|total| self.row(*total));
        let ring = exponents::history_record(self.ring.as_ref(), self.capacity, next, numbers)?;
        self.link.register(std::iter::once(&ring).chain(total.tensor()));
        (self.ring, self.loss) = (Some(ring), None);
        if let Some(begun) = begun {
            self.total = begun;
        }
        if let Counted::Host(total) = &mut self.total {
            *total += 1;
            if *total - self.begun >= self.capacity as u64 {
                self.loaded = Vec::new();
            }
        }
        Ok(())
    }

    /// In the first iteration of a graph returns the number of steps for the device to count on. Refuses what replays
    /// would not follow.
    fn begin_on_device(&self, outcome: &StepOutcome) -> Result<Option<Counted<u64>>> {
        let Some(device) = capture::device() else { return Ok(None) };
        let is_elsewhere = |tensor: &Tensor| tensor.device() != device;
        let ring = self.ring.as_ref().filter(|ring| ring.device() != Device::Cpu);
        if ring.or(self.total.tensor()).is_some_and(is_elsewhere) {
            let remedy = "make a history for each device";
            return Err(capture::refusal("a history of another device's steps", remedy));
        }
        let is_new = ring.is_none() || self.total.tensor().is_none();
        if capture::is_capturing() && is_new {
            let remedy = "record a step in the warm-up, too";
            return Err(capture::refusal("the first step of a history", remedy));
        }
        if capture::is_capturing() && outcome.has_no_gradients() {
            let remedy = "record iterations that have gradients";
            return Err(capture::refusal("the record of a step without gradients", remedy));
        }
        if outcome.learning_rate()?.is_none() && !outcome.has_no_gradients() {
            let remedy = "record the outcome of a step of one of `tch_amp::optim` in its iteration";
            return Err(capture::refusal("a learning rate of the host in a history", remedy));
        }
        match self.total {
            Counted::Host(total) => {
                let count = ffi::number_new(total as f64, Kind::Double, device)?;
                Ok(Some(Counted::Device(count)))
            }
            Counted::Device(_) => Ok(None),
        }
    }

    /// The row of the step after this many.
    fn row(&self, before: u64) -> usize {
        (before % self.capacity as u64) as usize
    }

    /// Reports the last steps. Synchronizes.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the numbers cannot be read from the device, and [`Error::Capture`] in an iteration of a
    /// graph.
    pub fn report(&mut self) -> Result<HistoryReport> {
        capture::refuse("a report of a history", "make it after `replay`")?;
        let total = match &self.total {
            Counted::Host(total) => *total,
            Counted::Device(total) => ffi::numbers_read(&[total])?[0] as u64,
        };
        let first = self.begun.max(total.saturating_sub(self.capacity as u64));
        let used = total.min(self.capacity as u64) as usize;
        let read = |ring| exponents::history_read(ring, used);
        let rows = self.ring.as_ref().map(read).transpose()?.unwrap_or_default();
        let recorded = (first..total).filter_map(|step| Some((step, rows.get(self.row(step))?)));
        let recorded: Vec<_> = recorded.map(|(step, row)| StepRecord::new(step + 1, row)).collect();
        let room = self.capacity - recorded.len();
        let loaded = &self.loaded[self.loaded.len().saturating_sub(room)..];
        Ok(HistoryReport { total, steps: [loaded, &recorded].concat() })
    }

    /// Continues from a saved history, of which the last steps are kept.
    fn resume(&mut self, saved: HistoryReport) {
        let HistoryReport { total, mut steps } = saved;
        self.link.note_change("a history of the scale");
        (self.total, self.begun) = (Counted::Host(total), total);
        self.loaded = steps.split_off(steps.len().saturating_sub(self.capacity));
        self.ring = None;
    }
}

impl Stateful for ScaleHistory {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        let report = self.report()?;
        state.value("total", &report.total)?;
        for (name, numbers) in COLUMNS.iter().zip(report.columns()) {
            state.tensor(name, &Tensor::f_from_slice(&numbers)?)?;
        }
        Ok(())
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let total = saved.value("total")?;
        // Earlier builds saved a record for each step.
        let loaded = if saved.contains("steps")? {
            HistoryReport::checked(total, saved.value("steps")?)?
        } else {
            let mut columns = [const { Vec::new() }; COLUMNS.len()];
            for (numbers, name) in columns.iter_mut().zip(COLUMNS) {
                *numbers = column(name, &saved.tensor(name)?)?;
            }
            HistoryReport::of_columns(total, columns)?
        };
        Ok(Prepared::new(move || self.resume(loaded)))
    }
}

/// Reads a saved column, which is no longer than a history can be.
fn column(name: &str, saved: &Tensor) -> Result<Vec<f64>> {
    let (size, kind) = (ffi::sizes(saved)?, saved.f_kind()?);
    match size[..] {
        [steps] if steps <= MOST_STEPS as i64 && kind == Kind::Double => Ok(saved.try_into()?),
        _ => {
            let problem = format!("is damaged: its `{name}` is {kind:?} {size:?}");
            Err(Error::InvalidArgument { name: "the saved history of the scale", problem })
        }
    }
}

impl StepRecord {
    fn new(step: u64, numbers: &ReadNumbers) -> Self {
        let ReadNumbers { scale, is_skipped, norm, loss, learning_rate, is_judged } = *numbers;
        let is_finite = [norm, loss].into_iter().flatten().all(f64::is_finite);
        let cause = if is_judged && is_finite { SkipCause::Spike } else { SkipCause::Overflow };
        let finite = |number: Option<f64>| number.filter(|number| number.is_finite());
        Self {
            step,
            scale,
            skipped: is_skipped.then_some(cause),
            norm: finite(norm),
            loss: finite(loss),
            learning_rate,
        }
    }
}

fn not_the_last(steps: usize, total: u64) -> Error {
    let problem = format!("is damaged: its {steps} steps are not the last of {total}");
    Error::InvalidArgument { name: "the saved history of the scale", problem }
}

impl HistoryReport {
    /// Makes a report of saved steps, which must be the last ones, in their order.
    fn checked(total: u64, steps: Vec<StepRecord>) -> Result<Self> {
        let first = total.checked_sub(steps.len() as u64).filter(|_| total < 1 << 53);
        let numbers = steps.iter().map(|step| step.step);
        if first.is_some_and(|first| numbers.eq((first..total).map(|step| step + 1))) {
            return Ok(Self { total, steps });
        }
        Err(not_the_last(steps.len(), total))
    }

    /// The numbers of the steps, a list for each of [`COLUMNS`].
    fn columns(&self) -> [Vec<f64>; COLUMNS.len()] {
        let column = |number: fn(&StepRecord) -> f64| self.steps.iter().map(number).collect();
        [
            column(|step| step.scale),
            column(|step| match step.skipped {
                None => 0.0,
                Some(SkipCause::Overflow) => 1.0,
                Some(SkipCause::Spike) => 2.0,
            }),
            column(|step| step.norm.unwrap_or(f64::NAN)),
            column(|step| step.loss.unwrap_or(f64::NAN)),
            column(|step| step.learning_rate),
        ]
    }

    /// Makes a report of the columns of the last steps.
    fn of_columns(total: u64, columns: [Vec<f64>; COLUMNS.len()]) -> Result<Self> {
        let steps = columns[0].len();
        let is_whole = columns.iter().all(|column| column.len() == steps)
            && columns[1].iter().all(|skip| [0.0, 1.0, 2.0].contains(skip));
        let first = total.checked_sub(steps as u64).filter(|_| is_whole);
        let first = first.ok_or_else(|| not_the_last(steps, total))?;
        let finite = |number: f64| Some(number).filter(|number| number.is_finite());
        let records = (0..steps).map(|row| {
            let [scale, skip, norm, loss, learning_rate] =
                columns.each_ref().map(|column| column[row]);
            let cause = if skip == 1.0 { SkipCause::Overflow } else { SkipCause::Spike };
            let skipped = (skip != 0.0).then_some(cause);
            let (step, norm, loss) = (first + row as u64 + 1, finite(norm), finite(loss));
            StepRecord { step, scale, skipped, norm, loss, learning_rate }
        });
        Self::checked(total, records.collect())
    }

    /// Counts the steps that were skipped for a cause.
    pub fn skips(&self, cause: SkipCause) -> usize {
        self.steps.iter().filter(|step| step.skipped == Some(cause)).count()
    }

    /// Returns the smallest scale of the steps.
    pub fn lowest_scale(&self) -> Option<f64> {
        self.steps.iter().map(|step| step.scale).reduce(f64::min)
    }
}

/// Prints such as `500 steps, 3 skipped (2 overflows, 1 spike), scale 2^16 → 2^14`, and advice if
/// overflows have driven the scale below 1.
impl fmt::Display for HistoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [overflows, spikes] = [SkipCause::Overflow, SkipCause::Spike].map(|c| self.skips(c));
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        let steps = self.steps.len();
        write!(f, "{steps} step{}, {} skipped", plural(steps), overflows + spikes)?;
        let causes = [(overflows, "overflow"), (spikes, "spike")];
        let causes = causes.iter().filter(|(count, _)| *count > 0);
        let causes: Vec<_> =
            causes.map(|(count, name)| format!("{count} {name}{}", plural(*count))).collect();
        if !causes.is_empty() {
            write!(f, " ({})", causes.join(", "))?;
        }
        let (Some(first), Some(last)) = (self.steps.first(), self.steps.last()) else {
            return Ok(());
        };
        write!(f, ", scale {}", power_of_two(first.scale))?;
        if last.scale != first.scale {
            write!(f, " → {}", power_of_two(last.scale))?;
        }
        match self.lowest_scale() {
            Some(lowest) if lowest < 1.0 && overflows > 0 => {
                write!(f, ", lowest {}: {}", power_of_two(lowest), Verdict::BelowOne)
            }
            Some(lowest) if lowest < first.scale.min(last.scale) => {
                write!(f, ", lowest {}", power_of_two(lowest))
            }
            _ => Ok(()),
        }
    }
}
