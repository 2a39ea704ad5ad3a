//! Counts of what several steps did.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::{Device, Kind, Tensor};

use crate::capture::{self, GraphLink};
use crate::error::{Error, Result};
use crate::ffi::{self, Arrival, OutsideRegions};
use crate::scaler::outcome::{Answer, StepOutcome};

/// Counts the steps that were taken and those that were skipped, without ever synchronizing. Meant for learning-rate
/// schedules: in PyTorch a loop has to compare the scale before and after `update` to notice a skipped step, which
/// synchronizes.
///
/// On a GPU the counts lag by the steps still in flight; each is counted eventually. On a CPU they are exact. In an
/// iteration that a graph captures, the device counts what is recorded, also in replays. `Display`
/// prints a report such as `998 steps taken, 2 skipped (at most 1 in a row)`.
///
/// # Examples
///
/// ```no_run
/// # use tch_amp::GradScaler;
/// # use tch_amp::optim::Optimizer;
/// # use tch_amp::scaler::StepCounter;
/// # fn train(scaler: &mut GradScaler, opt: &mut Optimizer) -> tch_amp::Result<()> {
/// let mut taken = StepCounter::default();
/// for _ in 0..1000 {
///     // forward, backward …
///     taken.record(&scaler.step(opt)?);
///     scaler.update()?;
///     opt.set_lr(1e-3 * 0.999f64.powi(taken.count()? as i32))?;
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Default)]
pub struct StepCounter {
    counts: Counts,
    open: VecDeque<Answer>,
    /// From the first iteration of a graph on, a device counts.
    device: Option<DeviceCounts>,
    /// Why a step could not be counted.
    failure: Option<Error>,
}

/// The counts that the host knows.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    taken: u64,
    skipped: u64,
    /// Steps skipped since the last one that was taken.
    in_a_row: u64,
    longest_row: u64,
}

impl StepCounter {
    /// Makes a counter that continues from a saved [`count`](Self::count).
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::GradScaler;
    /// use tch_amp::optim::Sgd;
    /// use tch_amp::scaler::StepCounter;
    ///
    /// # let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
    /// # let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.1)?;
    /// # let mut scaler = GradScaler::new(Device::Cpu)?;
    /// let mut steps = StepCounter::starting_at(998);
    /// for gradient in [1.0, f64::INFINITY, 1.0] {
    ///     opt.zero_grad()?;
    ///     scaler.backward(&(&w * gradient).sum(None))?;
    ///     steps.record(&scaler.step(&mut opt)?);
    ///     scaler.update()?;
    /// }
    /// assert_eq!(steps.to_string(), "1000 steps taken, 1 skipped (at most 1 in a row)");
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn starting_at(taken: u64) -> Self {
        Self { counts: Counts { taken, ..Counts::default() }, ..Self::default() }
    }

    /// Records the outcome of a step. A step without gradients counts neither as taken nor as skipped.
    ///
    /// If it cannot be recorded, the next count returns the error; in an iteration of a graph,
    /// `graph::Captured::replay` does.
    pub fn record(&mut self, outcome: &StepOutcome) {
        if self.device.is_some() || capture::device().is_some() {
            if let Some(error) =
                self.record_on_device(outcome.answer()).err().and_then(capture::note_failure)
            {
                self.failure.get_or_insert(error);
            }
            return;
        }
        // Starts the transfer of the answer; an error will occur again when the step is counted.
        drop(outcome.poll());
        self.open.push_back(outcome.answer().clone());
        drop(self.settle());
    }

    /// Returns how many of the recorded steps are known to have been taken. Never synchronizes.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if an answer on a device cannot be read, [`Error::Capture`] in an iteration of a graph, and the
    /// error of a step that could not be recorded, once.
    pub fn count(&mut self) -> Result<u64> {
        self.poll()?;
        Ok(self.counts.taken)
    }

    /// Returns how many of the recorded steps are known to have been skipped. Never synchronizes.
    ///
    /// # Errors
    ///
    /// The same as [`count`](Self::count).
    pub fn skipped(&mut self) -> Result<u64> {
        self.poll()?;
        Ok(self.counts.skipped)
    }

    /// Returns the number of consecutive skips up to the latest step whose outcome is known. Never synchronizes, so a
    /// loop can stop at a limit of its own without the synchronization that
    /// [`max_consecutive_skips`](crate::scaler::GradScalerConfig::max_consecutive_skips) needs.
    ///
    /// # Errors
    ///
    /// The same as [`count`](Self::count).
    pub fn consecutive_skips(&mut self) -> Result<u64> {
        self.poll()?;
        Ok(self.counts.in_a_row)
    }

    /// Returns how many recorded steps were still unknown at the last count.
    pub fn pending(&self) -> usize {
        if let Some(device) = &self.device {
            return device.pending();
        }
        self.open.len()
    }

    fn poll(&mut self) -> Result<()> {
        capture::refuse("a count of steps", "read it after `replay`")?;
        self.failure.take().map_or(Ok(()), Err)?;
        self.settle()
    }

    /// Counts the steps whose outcomes have arrived. Does not synchronize.
    fn settle(&mut self) -> Result<()> {
        if let Some(device) = &mut self.device {
            self.counts = device.poll()?.unwrap_or(self.counts);
            return Ok(());
        }
        while let Some(answer) = self.open.front() {
            let Some(taken) = answer.poll()? else {
                break;
            };
            if taken {
                self.counts.take();
            } else if !answer.has_no_gradients() {
                self.counts.skip();
            }
            self.open.pop_front();
        }
        Ok(())
    }
}

impl Counts {
    fn take(&mut self) {
        // A loaded count may be any number.
        self.taken = self.taken.saturating_add(1);
        self.in_a_row = 0;
    }

    fn skip(&mut self) {
        self.skipped += 1;
        self.in_a_row += 1;
        self.longest_row = self.longest_row.max(self.in_a_row);
    }
}

impl StepCounter {
    /// Counts a step on the device, and in an iteration of a graph in its replays. Does not synchronize.
    fn record_on_device(&mut self, answer: &Answer) -> Result<()> {
        if answer.has_no_gradients() {
            return Ok(());
        }
        let device = match &mut self.device {
            Some(device) => device,
            None => {
                let begun = DeviceCounts::begin(self.counts, &self.open)?;
                self.open.clear();
                self.device.insert(begun)
            }
        };
        device.record(answer)?;
        if !capture::is_inside() {
            // Starts a transfer, whose error will occur again when the steps are counted.
            drop(self.settle());
        }
        Ok(())
    }
}

/// Counts that replays of graphs go on with.
#[derive(Debug)]
struct DeviceCounts {
    /// The host's counts when the device began.
    base: Counts,
    /// As f64: the steps that were taken and skipped since then, those skipped in a row, and the longest row.
    numbers: Tensor,
    /// The sum of the first two when they last arrived.
    known: u64,
    arrival: Option<Arrival<4>>,
    /// The steps that were recorded, those of each launch of a graph included.
    recorded: Arc<AtomicU64>,
    link: Arc<GraphLink>,
}

impl Drop for DeviceCounts {
    fn drop(&mut self) {
        self.link.note_change("a counter in the iteration, which was dropped");
    }
}

impl DeviceCounts {
    /// Begins with the counts of the host, and the steps of which it does not know.
    fn begin(base: Counts, open: &VecDeque<Answer>) -> Result<Self> {
        let device = capture::device().unwrap_or(Device::Cpu);
        if capture::is_capturing() {
            let remedy = "record a step in the warm-up, too";
            return Err(capture::refusal("the first step of a counter", remedy));
        }
        let rows = [0, 0, base.in_a_row, base.longest_row].map(|count| count as f64);
        let numbers = Tensor::f_zeros([4], (Kind::Double, device))?;
        for (place, count) in (0..).zip(rows).filter(|(_, count)| *count > 0.0) {
            ffi::number_set(&numbers.f_narrow(0, place, 1)?, count)?;
        }
        let (recorded, link) = (Arc::default(), Arc::default());
        let mut begun = Self { base, numbers, known: 0, arrival: None, recorded, link };
        open.iter()
            .filter(|answer| !answer.has_no_gradients())
            .try_for_each(|answer| begun.record(answer))?;
        Ok(begun)
    }

    /// Counts a step. If memory runs out, nothing is counted.
    fn record(&mut self, answer: &Answer) -> Result<()> {
        self.add(answer)?;
        if capture::is_capturing() {
            self.link.register([&self.numbers]);
        }
        capture::count(&self.recorded);
        Ok(())
    }

    fn add(&mut self, answer: &Answer) -> Result<()> {
        let _own = OutsideRegions::enter();
        let device = self.numbers.device();
        let remedy = "make a counter for each device";
        capture::refuse_elsewhere(device, "a counter of another device's steps", remedy)?;
        let skipped = match answer.flag()? {
            Some(flag) => ffi::number_on(&flag.f_squeeze()?, device, Kind::Double)?.f_sign()?,
            // The host knows.
            None => {
                let skipped = if answer.is_stepped()? { 0.0 } else { 1.0 };
                ffi::number_new(skipped, Kind::Double, device)?
            }
        };
        let one = skipped.f_ones_like()?;
        let numbers = self.numbers.f_unbind(0)?;
        let taken = numbers[0].f_add(&one.f_sub(&skipped)?)?;
        let skips = numbers[1].f_add(&skipped)?;
        let in_a_row = numbers[2].f_add(&one)?.f_mul(&skipped)?;
        let longest = numbers[3].f_maximum(&in_a_row)?;
        let next = Tensor::f_stack(&[taken, skips, in_a_row, longest], 0)?;
        self.numbers.f_copy_(&next)?;
        Ok(())
    }

    /// Returns the counts if newer ones have arrived. Does not synchronize.
    fn poll(&mut self) -> Result<Option<Counts>> {
        let mut counts = None;
        if let Some(arrival) = &self.arrival {
            let Some(numbers) = arrival.poll_all()? else { return Ok(None) };
            self.arrival = None;
            counts = Some(self.take(numbers));
        }
        if self.pending() == 0 {
            return Ok(counts);
        }
        let arrival = Arrival::new(&self.numbers)?;
        match arrival.poll_all()? {
            Some(numbers) => Ok(Some(self.take(numbers))),
            None => {
                self.arrival = Some(arrival);
                Ok(counts)
            }
        }
    }

    fn take(&mut self, numbers: [f64; 4]) -> Counts {
        let [taken, skipped, in_a_row, longest_row] = numbers.map(|number| number as u64);
        self.known = taken + skipped;
        Counts {
            taken: self.base.taken.saturating_add(taken),
            skipped: self.base.skipped + skipped,
            in_a_row,
            longest_row,
        }
    }

    /// The steps that are recorded and whose counts have not arrived.
    fn pending(&self) -> usize {
        self.recorded.load(Ordering::Relaxed).saturating_sub(self.known) as usize
    }
}

/// Prints the counts as of the last count.
impl std::fmt::Display for StepCounter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Counts { taken, skipped, longest_row, .. } = self.counts;
        write!(f, "{taken} steps taken, {skipped} skipped")?;
        if skipped > 0 {
            write!(f, " (at most {longest_row} in a row)")?;
        }
        match self.pending() {
            0 => Ok(()),
            open => write!(f, ", {open} pending"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::scaler::outcome::{StepOutcome, StepResult};

    /// However many of the steps are open when the device begins, it comes to the counts of a host that knows all.
    #[test]
    fn a_device_goes_on_from_what_the_host_has_counted_and_from_its_open_steps() {
        let on_device = |found_inf: f32| StepOutcome::on_device(Tensor::from(found_inf));
        let known = StepOutcome::known;
        let outcomes = [
            on_device(1.0),
            known(StepResult::NoGradients),
            on_device(1.0),
            known(StepResult::Skipped),
            known(StepResult::NoGradients),
            on_device(0.0),
            known(StepResult::Stepped),
            known(StepResult::Skipped),
            known(StepResult::NoGradients),
        ];
        let base = Counts { taken: 100, skipped: 9, in_a_row: 2, longest_row: 4 };
        let open: VecDeque<_> = outcomes.iter().map(|outcome| outcome.answer().clone()).collect();
        let mut device = DeviceCounts::begin(base, &open).unwrap();
        assert_eq!(device.pending(), 6);
        let numbers = Vec::<f64>::try_from(&device.numbers).unwrap();
        let counts = device.take(numbers.try_into().unwrap());
        let Counts { taken, skipped, in_a_row, longest_row } = counts;
        assert_eq!((taken, skipped, in_a_row, longest_row), (102, 13, 1, 5));
        assert_eq!(device.pending(), 0);
    }
}
