//! The steps of a fused optimizer in iterations that a graph captures.

use std::sync::Arc;

use tch::{Device, Tensor};

use crate::capture::{self, Phase};
use crate::error::Result;
use crate::ffi::OptimOptions;
use crate::optim::first_step::FirstStep;
use crate::optim::optimizer::Slot;
use crate::optim::rates::{DeviceRates, DrivesRates};
use crate::optim::update::has_momentum;
use crate::optim::{MasterWeights, Optimizer, ParamGroup};

impl Optimizer {
    /// Has the device's rates follow the groups and, in an iteration of a graph, joins it. In that, steps on other
    /// devices or over ranks are refused.
    pub(super) fn enter_graph(&mut self) -> Result<()> {
        let device = capture::device();
        if let Some(device) = device {
            self.refuse_elsewhere(device)?;
        }
        if device.is_some() || self.rates.is_some() {
            self.make_rates(device)?;
        }
        if let (true, Some(rates)) = (device.is_some(), &self.rates) {
            rates.join(&self.parameters, self.masters != MasterWeights::None);
            self.refuse_first_steps()?;
        }
        let Some(rates) = &self.rates else { return Ok(()) };
        let replays = rates.take_replays();
        for slot in self.slots.iter_mut().filter(|slot| slot.state.most_steps > 0) {
            slot.state.most_steps = slot.state.most_steps.saturating_add(replays);
        }
        rates.write()
    }

    /// Makes room for the rates of all groups on the device.
    fn make_rates(&mut self, device: Option<Device>) -> Result<()> {
        let options = self.step_options();
        let known = self.rates.as_deref();
        if known.is_some_and(|rates| rates.fits(&options)) {
            return Ok(());
        }
        if capture::is_capturing() {
            let remedy = "step the optimizer in the warm-up, too";
            return Err(capture::refusal("the first step of an optimizer", remedy));
        }
        if let Some(device) = known.map(DeviceRates::device).or(device) {
            self.rates = Some(DeviceRates::new(&options, device)?);
        }
        Ok(())
    }

    fn refuse_elsewhere(&self, device: Device) -> Result<()> {
        if self.shards.is_some() {
            return Err(capture::refusal("a sharded optimizer", "train without a graph"));
        }
        let here = |parameter: &Tensor| parameter.device() == device;
        if !self.parameters.iter().all(here) {
            let remedy = "keep the parameters on the device of the graph";
            return Err(capture::refusal("a step of parameters on another device", remedy));
        }
        Ok(())
    }

    /// Refuses to capture a step that starts momentum buffers, since each replay would start them anew.
    fn refuse_first_steps(&self) -> Result<()> {
        let is_ahead = |slot: &Slot| {
            let buffer = slot.state.tensors.iter().any(Option::is_some);
            buffer && matches!(slot.state.first_step, FirstStep::Ahead)
        };
        let momentum = |slot: &Slot| has_momentum(&self.groups[slot.group].algorithm);
        if capture::is_capturing() && self.slots.iter().any(|slot| momentum(slot) && is_ahead(slot))
        {
            let remedy = "have a step taken before, whose gradients are finite";
            return Err(capture::refusal("the first step that starts a momentum buffer", remedy));
        }
        Ok(())
    }

    /// After a step: notes what a graph relies on, and before a capture asks which momentum buffers were started, which
    /// synchronizes.
    pub(super) fn note_in_graph(&mut self) -> Result<()> {
        let Some(rates) = &self.rates else { return Ok(()) };
        #[cfg(feature = "insight")]
        rates.note_learning_rate()?;
        let settles = capture::phase() == Some(Phase::Settling);
        let mut is_ready = true;
        for slot in &mut self.slots {
            if !has_momentum(&self.groups[slot.group].algorithm)
                || slot.state.tensors.iter().all(Option::is_none)
            {
                continue;
            }
            if settles {
                slot.state.first_step.is_ahead()?;
            }
            is_ready &= matches!(slot.state.first_step, FirstStep::Taken);
        }
        rates.note_step(self.slots.iter().map(|slot| &slot.state), is_ready)
    }

    /// The rates of each of the options, two f32 on the device; none if the host's are used.
    pub(super) fn device_rates(&self) -> Result<Vec<Tensor>> {
        self.rates.as_deref().map_or(Ok(Vec::new()), DeviceRates::rows)
    }

    /// The options of all groups, as a step takes them.
    fn step_options(&self) -> Vec<OptimOptions> {
        self.groups.iter().flat_map(ParamGroup::options).collect()
    }

    /// Notes that the groups have changed: replays follow learning rates alone.
    pub(super) fn note_groups(&self, before: &[ParamGroup]) {
        let Some(rates) = &self.rates else { return };
        let at_rate = |group: &ParamGroup| ParamGroup { lr: 0.0, ..*group };
        if !before.iter().map(at_rate).eq(self.groups.iter().map(at_rate)) {
            rates.note_change("the options of the optimizer");
        }
        let options = self.step_options();
        if rates.fits(&options) {
            rates.set(&options);
        }
    }

    /// The numbers on the device that a schedule can write.
    pub(crate) fn rates_block(&self) -> Option<Tensor> {
        self.rates.as_deref().map(DeviceRates::block)
    }

    /// Leaves the learning rates to a schedule on the device, or to the host.
    pub(crate) fn set_driver(&self, driver: Option<Arc<dyn DrivesRates>>) {
        if let Some(rates) = &self.rates {
            rates.set_driver(driver);
        }
    }

    /// Whether this schedule sets the learning rates on the device.
    pub(crate) fn is_driven_by(&self, driver: &Arc<dyn DrivesRates>) -> bool {
        let known = self.rates.as_deref().and_then(DeviceRates::driver);
        known.is_some_and(|known| Arc::ptr_eq(&known, driver))
    }

    /// Has steps read the learning rates of the groups again, as they are.
    pub(super) fn leave_rates_to_host(&self) {
        if let Some(rates) = &self.rates {
            rates.set_driver(None);
            let options = self.step_options();
            if rates.fits(&options) {
                rates.set(&options);
            }
        }
    }

    /// Takes the learning rates back from a schedule on the device before the program changes them. Synchronizes if
    /// there is one.
    pub(super) fn take_rates_back(&mut self) -> Result<()> {
        let Some(driver) = self.rates.as_deref().and_then(DeviceRates::driver) else {
            return Ok(());
        };
        // If nothing else has it, its graph and its schedule are gone, and nothing changes the rates any more.
        if Arc::strong_count(&driver) > 2 {
            self.note_change("a learning rate or option that a schedule in the iteration sets");
        }
        self.take_driven_rates()?;
        self.leave_rates_to_host();
        Ok(())
    }

    /// Sets the learning rates of the groups to those of the schedule that a device follows. Synchronizes.
    pub(super) fn take_driven_rates(&mut self) -> Result<()> {
        let driver = self.rates.as_deref().and_then(DeviceRates::driver);
        let lrs = driver.map_or(Ok(Vec::new()), |driver| driver.lrs())?;
        for (group, lr) in self.groups.iter_mut().zip(lrs) {
            group.lr = lr;
        }
        Ok(())
    }

    /// Notes a change that replays do not follow.
    pub(crate) fn note_change(&self, what: &'static str) {
        if let Some(rates) = &self.rates {
            rates.note_change(what);
        }
    }
}

impl Drop for Optimizer {
    fn drop(&mut self) {
        self.note_change("the optimizer, which was dropped");
    }
}
