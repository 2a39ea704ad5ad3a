//! The scale itself: tensors on a device, with a copy of their values on the host while those are known, and otherwise
//! with a lower bound.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use crate::capture::{self, GraphLink};
use crate::error::{Error, Result};
use crate::ffi::{
    self, Arrival, OutsideRegions, OverflowCounts, ScaleRule, ScaleUpdate, Unscaling,
};
use crate::scale::GradScalerConfig;
use crate::scale::config::{HostScale, clamp_tracker, lowest_next, next};

/// The scale, the growth tracker, and the counts of overflows if the scale tolerates some.
#[derive(Debug)]
pub(crate) struct ScaleTensor {
    tensor: Tensor,
    tracker: Tensor,
    counts: Option<Tensor>,
    /// The scale is fixed at 1.
    is_one: bool,
    mirror: Cell<Option<HostScale>>,
    bound: RefCell<Bound>,
    given: RefCell<Option<Given>>,
    /// Shared with the graphs that change it in their replays.
    link: Arc<GraphLink>,
    /// The replays up to which `mirror` and `bound` hold.
    followed: Cell<u64>,
}

/// A scale that a program has given on the device, which the host has not seen, and the options with their bounds. If
/// there were several, the first that is out of bounds.
#[derive(Debug)]
struct Given {
    scale: Tensor,
    config: GradScalerConfig,
}

/// The least that a scale can be while only its device has its value.
#[derive(Debug, Default)]
struct Bound {
    at_least: f32,
    /// An earlier value on its way to the host, and the least that a scale of that value can be now.
    arrival: Option<(Arrival, Vec<ScaleRule>)>,
}

impl Bound {
    /// Below this bound the scale is asked for. It can still be halved eight times before the bound matters.
    const LOW: f32 = 256.0;

    fn new(at_least: f32) -> Self {
        Self { at_least, arrival: None }
    }

    /// Follows an update of the scale that the host does not know.
    fn follow(&mut self, scale: &Tensor, rule: &ScaleRule) {
        self.at_least = lowest_next(self.at_least, rule);
        match &mut self.arrival {
            Some((_, rules)) => rules.push(*rule),
            None => self.ask(scale, rule.min_scale),
        }
    }

    /// Asks for the scale if it may be small.
    fn ask(&mut self, scale: &Tensor, min_scale: f64) {
        if self.at_least < Self::LOW && min_scale < 1.0 && !capture::is_inside() {
            // If the transfer cannot be started, the bound stays as low as it is.
            self.arrival = Arrival::new(scale).ok().map(|arrival| (arrival, Vec::new()));
        }
    }

    /// Returns the bound, which is higher after a value has arrived. Never synchronizes.
    fn at_least(&mut self) -> f32 {
        if let Some((arrival, rules)) = &self.arrival {
            match arrival.poll() {
                Ok(None) => {}
                Ok(Some(value)) => {
                    let now = rules.iter().fold(value as f32, lowest_next);
                    *self = Self::new(self.at_least.max(now));
                }
                Err(_) => *self = Self::new(self.at_least),
            }
        }
        self.at_least
    }
}

impl ScaleTensor {
    /// Makes the tensors. `counted` if some overflows are tolerated; `is_one` if the scale is fixed at 1.
    pub(crate) fn new(
        device: Device,
        value: HostScale,
        counted: bool,
        is_one: bool,
    ) -> Result<Self> {
        Ok(Self {
            tensor: ffi::number_new(f64::from(value.scale), Kind::Float, device)?,
            tracker: ffi::number_new(f64::from(value.tracker), Kind::Int, device)?,
            counts: counted.then(|| counts_on(value.counts, device)).transpose()?,
            is_one,
            mirror: Cell::new(Some(value)),
            bound: RefCell::default(),
            given: RefCell::default(),
            link: Arc::default(),
            followed: Cell::default(),
        })
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The value on the host. Synchronizes, in one transfer, if only the device has it. Fails, once, if the device has
    /// refused a scale since the last call.
    pub(crate) fn value(&self) -> Result<HostScale> {
        self.forget_replays();
        if let Some(mirror) = self.mirror.get() {
            return Ok(mirror);
        }
        let mut given = self.given.borrow_mut();
        let tensors = [&self.tensor, &self.tracker].into_iter();
        let tensors = tensors.chain(given.as_ref().map(|given| &given.scale)).chain(&self.counts);
        let read = ffi::numbers_read(&tensors.collect::<Vec<_>>())?;
        let [scale, tracker, rest @ ..] = read.as_slice() else {
            return Err(Error::Torch(format!("a scale was read as {} numbers", read.len())));
        };
        let (seen, counts) = rest.split_at(usize::from(given.is_some()));
        let counts = OverflowCounts::from_numbers(counts);
        let mirror = HostScale { scale: *scale as f32, tracker: *tracker as i32, counts };
        self.mirror.set(Some(mirror));
        if let (Some(Given { config, .. }), [seen]) = (given.take(), seen) {
            config.check_scale("new_scale", *seen)?;
        }
        Ok(mirror)
    }

    /// The scale, if the host has it. Never synchronizes.
    pub(crate) fn known(&self) -> Option<f64> {
        self.known_value().map(|mirror| mirror.scale.into())
    }

    fn known_value(&self) -> Option<HostScale> {
        self.forget_replays();
        match self.mirror.get() {
            // Reading host memory does not synchronize.
            None if self.tensor.device() == Device::Cpu => self.value().ok(),
            mirror => mirror,
        }
    }

    /// Returns whether the host knows that the scale is still the same after an iteration with this answer.
    pub(crate) fn stays(&self, overflow: Option<bool>, rule: &ScaleRule) -> bool {
        if rule.min_scale == rule.max_scale {
            return true;
        }
        let known = self.known_value().zip(overflow);
        known.is_some_and(|(now, overflow)| next(now, overflow, rule).scale == now.scale)
    }

    /// Returns whether the reciprocal may be more than 1, so that unscaling can overflow. Never synchronizes.
    pub(crate) fn may_enlarge(&self) -> bool {
        let at_least = self.known().unwrap_or_else(|| self.bound.borrow_mut().at_least().into());
        !self.is_one && at_least < 1.0
    }

    /// How gradients are unscaled by this scale.
    pub(crate) fn unscaling(&self) -> Unscaling {
        Unscaling::new(self.is_one, self.may_enlarge())
    }

    /// Sets the scale and keeps the tracker. Does not synchronize.
    pub(crate) fn set_scale(&mut self, scale: f32) -> Result<()> {
        self.forget_replays();
        let mirror = self.mirror.take();
        self.bound.take();
        ffi::number_set(&self.tensor, f64::from(scale))?;
        self.mirror.set(mirror.map(|mirror| HostScale { scale, ..mirror }));
        self.bound.replace(Bound::new(scale));
        Ok(())
    }

    /// Sets the scale to a number on a device, and keeps the tracker. If the number is out of bounds, the scale stays
    /// as it is, and the next call of [`value`](Self::value) fails. Does not synchronize.
    pub(crate) fn set_scale_on_device(
        &mut self,
        scale: &Tensor,
        config: GradScalerConfig,
    ) -> Result<()> {
        let _own = OutsideRegions::enter();
        let device = self.tensor.device();
        let low = ffi::number_new(config.min_scale, Kind::Float, device)?;
        let high = ffi::number_new(config.max_scale, Kind::Float, device)?;
        let is_valid =
            |scale: &Tensor| scale.f_ge_tensor(&low)?.f_logical_and(&scale.f_le_tensor(&high)?);
        let scale = ffi::number_on(scale, device, Kind::Float)?;
        let next = scale.f_where_self(&is_valid(&scale)?, &self.tensor)?;
        let given = match self.given.get_mut() {
            Some(given) => scale.f_where_self(&is_valid(&given.scale)?, &given.scale)?,
            None => scale.f_detach_copy()?,
        };
        self.mirror.set(None);
        self.bound.take();
        self.tensor.f_copy_(&next)?;
        self.given.replace(Some(Given { scale: given, config }));
        let mut bound = Bound::new(config.min_scale as f32);
        bound.ask(&self.tensor, config.min_scale);
        self.bound.replace(bound);
        Ok(())
    }

    /// Allocates what `set` needs, the only part of it that can run out of memory.
    pub(crate) fn prepare(
        &self,
        value: HostScale,
        counted: bool,
        is_one: bool,
    ) -> Result<Prepared> {
        let device = self.tensor.device();
        let counts = counted.then(|| counts_on(value.counts, device)).transpose()?;
        Ok(Prepared { value, counts, is_one })
    }

    /// Sets the scale, the tracker and the counts.
    pub(crate) fn set(&mut self, prepared: Prepared) -> Result<()> {
        let Prepared { value, counts, is_one } = prepared;
        // Unknown in between, since the second write can fail.
        self.mirror.set(None);
        self.bound.take();
        self.given.take();
        (self.counts, self.is_one) = (counts, is_one);
        ffi::number_set(&self.tensor, f64::from(value.scale))?;
        ffi::number_set(&self.tracker, f64::from(value.tracker))?;
        self.mirror.set(Some(value));
        Ok(())
    }

    /// Clamps the tracker so that it still reaches a new interval. Does not synchronize.
    pub(crate) fn clamp_tracker(&mut self, growth_interval: i64) -> Result<()> {
        self.forget_replays();
        ffi::number_limit(&self.tracker, (growth_interval - 1) as f64)?;
        let clamp =
            |m: HostScale| HostScale { tracker: clamp_tracker(m.tracker, growth_interval), ..m };
        self.mirror.set(self.mirror.get().map(clamp));
        Ok(())
    }

    /// The update of the tensors at the end of an iteration.
    pub(crate) fn change<'a>(
        &'a self,
        found_infs: &'a [&'a Tensor],
        rule: ScaleRule,
    ) -> ScaleUpdate<'a> {
        let (scale, tracker) = (&self.tensor, &self.tracker);
        ScaleUpdate { scale, tracker, counts: self.counts.as_ref(), found_infs, rule }
    }

    /// A new number as the end of an iteration makes it from this one, which stays unchanged.
    pub(crate) fn changed(&self, found_inf: &Tensor, rule: ScaleRule) -> Result<Self> {
        let _own = OutsideRegions::enter();
        let copy = |tensor: &Tensor| tensor.f_detach_copy();
        let next = Self {
            tensor: copy(&self.tensor)?,
            tracker: copy(&self.tracker)?,
            counts: self.counts.as_ref().map(copy).transpose()?,
            is_one: self.is_one,
            mirror: Cell::new(None),
            bound: RefCell::default(),
            given: RefCell::default(),
            link: Arc::default(),
            followed: Cell::default(),
        };
        ffi::scales_update(&[next.change(&[found_inf], rule)])?;
        Ok(next)
    }

    /// Forgets what the host knows if iterations were replayed since, and in iterations of a graph: replays begin with
    /// whatever the device has, and a copy that is on its way would break a capture.
    fn forget_replays(&self) {
        let replays = self.link.replays();
        if self.followed.replace(replays) != replays || capture::is_inside() {
            self.mirror.set(None);
            self.bound.take();
        }
    }

    /// Joins the graph in whose iteration the thread is.
    ///
    /// # Errors
    ///
    /// An error if the scale is on another device.
    pub(crate) fn join_graph(&self) -> Result<()> {
        let remedy = "make the scaler for the device of the graph";
        capture::refuse_elsewhere(self.tensor.device(), "a scaler of another device", remedy)?;
        self.link.register([&self.tensor, &self.tracker].into_iter().chain(&self.counts));
        Ok(())
    }

    /// Returns whether an iteration is being captured in which it was not used so far.
    pub(crate) fn begins_capture(&self) -> bool {
        self.link.begins_capture()
    }

    /// Notes a change that replays do not follow.
    pub(crate) fn note_change(&self, what: &'static str) {
        self.link.note_change(what);
    }

    /// Returns whether the capture of an iteration has failed since the last call.
    pub(crate) fn take_loss(&self) -> bool {
        self.link.take_loss()
    }

    /// Another handle to the same tensors.
    pub(crate) fn shallow_clone(&self) -> Self {
        Self {
            tensor: self.tensor.shallow_clone(),
            tracker: self.tracker.shallow_clone(),
            counts: self.counts.as_ref().map(Tensor::shallow_clone),
            is_one: self.is_one,
            mirror: self.mirror.clone(),
            bound: RefCell::default(),
            given: RefCell::default(),
            link: self.link.clone(),
            followed: self.followed.clone(),
        }
    }

    /// Takes the host's copy out: the tensors are about to change.
    pub(crate) fn forget(&self) -> Option<HostScale> {
        self.forget_replays();
        let mirror = self.mirror.take();
        if mirror.is_some() {
            self.bound.take();
        }
        mirror
    }

    /// Computes the host's new copy from the one of `before`. If the host does not have the overflow flag, it has only
    /// a lower bound.
    pub(crate) fn follow(
        &self,
        before: Option<HostScale>,
        overflow: Option<bool>,
        rule: &ScaleRule,
    ) {
        let next = |(before, overflow)| next(before, overflow, rule);
        // The work that a capture records happens in its replays.
        let overflow = overflow.filter(|_| !capture::is_capturing());
        let known = before.zip(overflow).map(next);
        if known.is_none() {
            let mut bound = self.bound.borrow_mut();
            if let Some(before) = before {
                *bound = Bound::new(before.scale);
            }
            bound.follow(&self.tensor, rule);
        }
        self.mirror.set(known);
    }
}

/// A value for a scale, with its allocated tensor.
#[derive(Debug)]
pub(crate) struct Prepared {
    value: HostScale,
    counts: Option<Tensor>,
    is_one: bool,
}

fn counts_on(counts: OverflowCounts, device: Device) -> Result<Tensor> {
    let _own = OutsideRegions::enter();
    Ok(Tensor::f_from_slice(&counts.to_numbers())?.f_to_device(device)?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn number(config: &GradScalerConfig) -> ScaleTensor {
        let (value, counted) = (HostScale::new(config), config.tolerates_overflows());
        ScaleTensor::new(Device::Cpu, value, counted, config.is_one()).unwrap()
    }

    /// The host's copy, computed from known flags, equals the tensors.
    #[test]
    fn the_host_follows_the_device() {
        let mut random = 7u64;
        let mut below = |n: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % n
        };
        for _ in 0..200 {
            let config = GradScalerConfig {
                growth_factor: 1.0 + (1 + below(30)) as f64 / 7.0,
                backoff_factor: (1 + below(9)) as f64 / 11.0,
                growth_interval: 1 + below(4) as i64,
                min_scale: 0.25,
                max_scale: 1e9,
                hysteresis: 1 + below(3) as u32,
                consecutive_hysteresis: below(2) == 0,
                tolerance: below(4) as f64 / 5.0,
                ..Default::default()
            };
            let [host, device] = [0; 2].map(|_| number(&config));
            for step in 0..40 {
                let overflow = below(3) == 0;
                let found = Tensor::from(f32::from(u8::from(overflow)));
                for (scale, overflow) in [(&host, Some(overflow)), (&device, None)] {
                    let before = scale.forget();
                    ffi::scales_update(&[scale.change(&[&found], config.rule())]).unwrap();
                    scale.follow(before, overflow, &config.rule());
                }
                let (mut host, mut device) = (host.value().unwrap(), device.value().unwrap());
                if !config.tolerates_overflows() {
                    // The counts are not used.
                    (host.counts, device.counts) = Default::default();
                }
                assert_eq!(host, device, "step {step} of {config:?}");
            }
        }
    }
}
