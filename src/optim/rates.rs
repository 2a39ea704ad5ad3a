//! The numbers that an optimizer shares with the graphs of its iterations: learning rates on the device, and the counts
//! on which replays rely.
//!
//! The kernels of a captured step read the learning rate from an f32 on the device, so that a replay has the rate of
//! its own iteration. An optimizer that was once in such an iteration reads it there in every step, since the f32 of a
//! rate is another number.

use std::fmt::Debug;
use std::mem;
use std::sync::{Arc, Mutex};

use tch::{Device, Kind, Tensor};

use crate::capture::{self, GraphLink, Member};
use crate::error::Result;
use crate::ffi::{self, OptimOptions, OutsideRegions, Snapshot, Stamps};
use crate::optim::ParamGroup;
use crate::optim::state::{MANY_STEPS, ParameterState};
use crate::panics::lock;

/// The numbers that an optimizer and the graphs of its iterations share.
#[derive(Debug)]
pub(crate) struct DeviceRates {
    link: GraphLink,
    numbers: Mutex<Numbers>,
    parameters: Mutex<Captured>,
}

#[derive(Debug)]
struct Numbers {
    /// On the device: for each of the options, the learning rate and 1 - lr * weight_decay.
    block: Tensor,
    wanted: Vec<f32>,
    /// The numbers on the device.
    written: Vec<f32>,
    /// The schedule that writes them on the device.
    driver: Option<Arc<dyn DrivesRates>>,
}

/// A schedule whose learning rates a device looks up.
pub(crate) trait DrivesRates: Debug + Send + Sync {
    /// The present learning rate of each group. Synchronizes.
    fn lrs(&self) -> Result<Vec<f64>>;
}

/// The numbers that steps of these groups read on the device.
pub(crate) fn device_numbers(groups: impl Iterator<Item = ParamGroup>) -> Vec<f32> {
    numbers(&groups.flat_map(|group| group.options()).collect::<Vec<_>>())
}

/// The parameters of a captured step.
#[derive(Debug, Default)]
struct Captured {
    list: Vec<Tensor>,
    stamps: Stamps,
    /// Whether they have master weights, which do not follow what others write to the parameters.
    have_masters: bool,
    /// Which of them require gradients; empty before the first capture.
    trained: Vec<bool>,
    /// Their gradients before the capture.
    gradients: Snapshot,
    /// Whether no step depends on what only the device knows.
    is_ready: bool,
    /// The largest number of steps of a parameter at the capture.
    most_steps: u64,
    /// The replays that the states of the parameters count.
    counted: u64,
}

fn numbers(options: &[OptimOptions]) -> Vec<f32> {
    let of = |o: &OptimOptions| [o.lr as f32, (1.0 - o.lr * o.weight_decay) as f32];
    options.iter().flat_map(of).collect()
}

impl DeviceRates {
    pub(crate) fn new(options: &[OptimOptions], device: Device) -> Result<Arc<Self>> {
        let _own = OutsideRegions::enter();
        let block = Tensor::f_zeros([options.len() as i64, 2], (Kind::Float, device))?;
        let (wanted, written) = (numbers(options), Vec::new());
        let numbers = Mutex::new(Numbers { block, wanted, written, driver: None });
        Ok(Arc::new(Self { link: GraphLink::default(), numbers, parameters: Mutex::default() }))
    }

    /// Returns whether these are as many options as those that the rates are of.
    pub(crate) fn fits(&self, options: &[OptimOptions]) -> bool {
        lock(&self.numbers).block.size2().is_ok_and(|(rows, _)| rows == options.len() as i64)
    }

    /// The rates of each of the options.
    pub(crate) fn rows(&self) -> Result<Vec<Tensor>> {
        let _own = OutsideRegions::enter();
        Ok(lock(&self.numbers).block.f_unbind(0)?)
    }

    /// The rates of all options, which a schedule can write.
    pub(crate) fn block(&self) -> Tensor {
        lock(&self.numbers).block.shallow_clone()
    }

    pub(crate) fn driver(&self) -> Option<Arc<dyn DrivesRates>> {
        lock(&self.numbers).driver.clone()
    }

    /// Leaves the rates to a schedule on the device, or to the host.
    pub(crate) fn set_driver(&self, driver: Option<Arc<dyn DrivesRates>>) {
        let mut numbers = lock(&self.numbers);
        numbers.driver = driver;
        numbers.written.clear();
    }

    /// The device that has the rates.
    pub(crate) fn device(&self) -> Device {
        lock(&self.numbers).block.device()
    }

    /// Sets the rates that the next step or replay is to read, unless these are of another number of options.
    pub(crate) fn set(&self, options: &[OptimOptions]) {
        if self.fits(options) {
            lock(&self.numbers).wanted = numbers(options);
        }
    }

    /// Copies the rates to the device if they have changed. Does not synchronize.
    pub(crate) fn write(&self) -> Result<()> {
        let mut numbers = lock(&self.numbers);
        if numbers.wanted == numbers.written || numbers.driver.is_some() {
            return Ok(());
        }
        if capture::is_capturing() {
            let remedy = "step its optimizer in the warm-up, too";
            return Err(capture::refusal("a new learning rate", remedy));
        }
        ffi::graph_write(&numbers.block, &numbers.wanted)?;
        numbers.written = numbers.wanted.clone();
        Ok(())
    }
}

impl DeviceRates {
    /// Joins the graph in whose iteration the thread is, with the parameters that the optimizer has by now.
    pub(crate) fn join(self: &Arc<Self>, parameters: &[Tensor], have_masters: bool) {
        let mut captured = lock(&self.parameters);
        captured.list = parameters.iter().map(Tensor::shallow_clone).collect();
        captured.have_masters = have_masters;
        drop(captured);
        capture::register(self);
    }

    /// Notes a step that was captured or taken: the states that replays change, and whether a capture may follow.
    pub(crate) fn note_step<'a>(
        &self,
        states: impl Iterator<Item = &'a ParameterState>,
        is_ready: bool,
    ) -> Result<()> {
        let mut captured = lock(&self.parameters);
        let Captured { list, stamps, have_masters, trained, .. } = &mut *captured;
        // Once captured, graphs would go on with the memory that has been replaced.
        if !trained.is_empty() && stamps.have_moved(list)? {
            self.link.note_change("the weights");
        }
        if *have_masters {
            stamps.take(list)?;
        }
        (captured.is_ready, captured.most_steps) = (is_ready, 0);
        for state in states {
            captured.most_steps = captured.most_steps.max(state.most_steps);
            capture::keep(state.tensors.iter().chain([&state.step, &state.master]).flatten());
        }
        Ok(())
    }

    /// Notes the learning rate of the first group for what records the step.
    #[cfg(feature = "insight")]
    pub(crate) fn note_learning_rate(&self) -> Result<()> {
        if capture::is_inside() {
            let _own = OutsideRegions::enter();
            capture::note_learning_rate(self.block().f_select(0, 0)?.f_select(0, 0)?);
        }
        Ok(())
    }

    /// The replays since the last call, each of which may have been a step of every parameter.
    pub(crate) fn take_replays(&self) -> u64 {
        let replays = self.link.replays();
        replays - mem::replace(&mut lock(&self.parameters).counted, replays)
    }

    pub(crate) fn note_change(&self, what: &'static str) {
        self.link.note_change(what);
    }
}

impl Member for DeviceRates {
    fn link(&self) -> &GraphLink {
        &self.link
    }

    fn is_ready(&self) -> bool {
        let mut captured = lock(&self.parameters);
        let Captured { list, stamps, have_masters, is_ready, .. } = &mut *captured;
        // A step makes masters anew where others have written to their weights; a capture would have each replay do so.
        let is_fresh =
            !*have_masters || stamps.compare(list).is_ok_and(|changed| !changed.contains(&true));
        is_fresh && *is_ready
    }

    fn before_capture(&self) -> Result<()> {
        let mut captured = lock(&self.parameters);
        captured.gradients = Snapshot::of(&captured.list)?;
        drop(captured);
        self.write()
    }

    fn after_capture(&self) -> Result<()> {
        let mut captured = lock(&self.parameters);
        let Captured { list, stamps, have_masters, trained, gradients, .. } = &mut *captured;
        let now = ffi::gradients_inspect(list)?;
        let mut pairs = gradients.iter().zip(&now);
        if pairs.any(|(before, now)| before.exists() && before.identity() == now.identity()) {
            let remedy = "call the optimizer's `zero_grad` in the iteration";
            return Err(capture::refusal("adding to the gradients of another iteration", remedy));
        }
        *gradients = Snapshot::default();
        if *have_masters {
            let changed = stamps.compare(list)?;
            if changed.contains(&true) {
                let remedy = "the master weights of a replay do not follow; use an optimizer without master weights";
                return Err(capture::refusal("a write to the weights after the step", remedy));
            }
        } else {
            if !trained.is_empty() && stamps.have_moved(list)? {
                self.link.note_change("the weights");
            }
            stamps.take(list)?;
        }
        let now: Vec<_> = list.iter().map(Tensor::requires_grad).collect();
        if !trained.is_empty() && *trained != now {
            self.link.note_change("which parameters are trained");
        }
        *trained = now;
        Ok(())
    }

    fn check(&self) -> Result<()> {
        let mut captured = lock(&self.parameters);
        let Captured { list, stamps, have_masters, trained, .. } = &mut *captured;
        let changed = match have_masters {
            true => stamps.compare(list)?.contains(&true),
            false => stamps.have_moved(list)?,
        };
        if changed {
            return Err(capture::changed_since("the weights"));
        }
        if list.iter().zip(&*trained).any(|(parameter, was)| parameter.requires_grad() != *was) {
            return Err(capture::changed_since("which parameters are trained"));
        }
        let replays = self.link.replays() - captured.counted;
        let most = captured.most_steps;
        if most < MANY_STEPS && most.saturating_add(replays) >= MANY_STEPS {
            return Err(capture::changed_since("the number of steps, which has reached 2^24"));
        }
        Ok(())
    }

    fn before_replay(&self) -> Result<()> {
        self.write()
    }

    fn after_failure(&self) {
        // They are in memory of the graph, in which nothing was computed. An error is ignored: libtorch only releases
        // tensors here.
        drop(ffi::gradients_drop(&lock(&self.parameters).list));
    }
}
