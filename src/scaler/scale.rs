//! The scale itself: tensors on a device, with a copy of their values on the host where those are known.

use std::cell::Cell;

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::ffi::{self, ScaleRule, ScaleUpdate, Unscaling};
use crate::scaler::config::GradScalerConfig;
use crate::scaler::patience::{Patience, tolerates};
use crate::scaler::state::clamp_tracker;

/// The value on the host. It follows libtorch's kernel step by step and saves a transfer per question.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mirror {
    pub(crate) scale: f32,
    pub(crate) tracker: i32,
    pub(crate) patience: Patience,
}

/// The scale, the growth tracker, and the patience where not every overflow backs the scale off. The first two tensors
/// are made once and then only written to.
#[derive(Debug)]
pub(crate) struct Scale {
    tensor: Tensor,
    tracker: Tensor,
    patience: Option<Tensor>,
    /// The scale stays one.
    is_one: bool,
    mirror: Cell<Option<Mirror>>,
}

impl Scale {
    pub(crate) fn new(device: Device, config: &GradScalerConfig) -> Result<Self> {
        let scale = config.init_scale as f32;
        let patience = Patience::full(config);
        Ok(Self {
            tensor: ffi::number_new(f64::from(scale), Kind::Float, device)?,
            tracker: ffi::number_new(0.0, Kind::Int, device)?,
            patience: config.is_patient().then(|| patience.tensor(device)).transpose()?,
            is_one: config.is_one(),
            mirror: Cell::new(Some(Mirror { scale, tracker: 0, patience })),
        })
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The value on the host. Waits for the device when only the device knows it, in one transfer.
    pub(crate) fn value(&self) -> Result<Mirror> {
        if let Some(mirror) = self.mirror.get() {
            return Ok(mirror);
        }
        let tensors = [&self.tensor, &self.tracker].into_iter().chain(&self.patience);
        let read = ffi::numbers_read(&tensors.collect::<Vec<_>>())?;
        let [scale, tracker, counts @ ..] = read.as_slice() else {
            return Err(Error::Torch(format!("a scale was read as {} numbers", read.len())));
        };
        let patience = Patience::from_counts(counts);
        let mirror = Mirror { scale: *scale as f32, tracker: *tracker as i32, patience };
        self.mirror.set(Some(mirror));
        Ok(mirror)
    }

    /// Whether the reciprocal may be more than 1, so that unscaling can overflow. Never waits.
    fn may_enlarge(&self) -> bool {
        !self.is_one && self.mirror.get().is_none_or(|mirror| mirror.scale < 1.0)
    }

    /// How gradients are unscaled by it.
    pub(crate) fn unscaling(&self) -> Unscaling {
        Unscaling::new(self.is_one, self.may_enlarge())
    }

    /// Whether the host knows that the reciprocal is more than 1. Never waits.
    pub(crate) fn enlarges(&self) -> bool {
        self.mirror.get().is_some_and(|mirror| mirror.scale < 1.0)
    }

    /// Sets the scale alone. Does not wait.
    pub(crate) fn set_scale(&mut self, scale: f32) -> Result<()> {
        let mirror = self.mirror.take();
        ffi::number_set(&self.tensor, f64::from(scale))?;
        self.mirror.set(mirror.map(|mirror| Mirror { scale, ..mirror }));
        Ok(())
    }

    /// All that setting everything takes, for a scaler with `config`: the one part of it that can run out of memory.
    pub(crate) fn prepare(&self, value: Mirror, config: &GradScalerConfig) -> Result<Prepared> {
        let device = self.tensor.device();
        let patience = config.is_patient().then(|| value.patience.tensor(device)).transpose()?;
        Ok(Prepared { value, patience, is_one: config.is_one() })
    }

    /// Sets everything.
    pub(crate) fn set(&mut self, prepared: Prepared) -> Result<()> {
        let Prepared { value, patience, is_one } = prepared;
        // Unknown in between, in case the second write fails.
        self.mirror.set(None);
        (self.patience, self.is_one) = (patience, is_one);
        ffi::number_set(&self.tensor, f64::from(value.scale))?;
        ffi::number_set(&self.tracker, f64::from(value.tracker))?;
        self.mirror.set(Some(value));
        Ok(())
    }

    /// Makes sure that a tracker beyond a new interval still grows the scale. Does not wait.
    pub(crate) fn clamp_tracker(&mut self, growth_interval: i64) -> Result<()> {
        ffi::number_limit(&self.tracker, (growth_interval - 1) as f64)?;
        let clamp = |m: Mirror| Mirror { tracker: clamp_tracker(m.tracker, growth_interval), ..m };
        self.mirror.set(self.mirror.get().map(clamp));
        Ok(())
    }

    /// What the end of an iteration does to the tensors.
    pub(crate) fn change<'a>(
        &'a self,
        found_infs: &'a [&'a Tensor],
        rule: ScaleRule,
    ) -> ScaleUpdate<'a> {
        let (scale, tracker) = (&self.tensor, &self.tracker);
        ScaleUpdate { scale, tracker, tolerance_counts: self.patience.as_ref(), found_infs, rule }
    }

    /// Forgets what the host knows, which is returned: the tensors are about to change.
    pub(crate) fn forget(&self) -> Option<Mirror> {
        self.mirror.take()
    }

    /// Knows what has become of `before`, unless only the devices know whether there was an overflow.
    pub(crate) fn follow(&self, before: Option<Mirror>, overflow: Option<bool>, rule: &ScaleRule) {
        let next = |(before, overflow)| next(before, overflow, rule);
        self.mirror.set(before.zip(overflow).map(next));
    }
}

/// A value for a scale, with the tensor that it takes.
#[derive(Debug)]
pub(crate) struct Prepared {
    value: Mirror,
    patience: Option<Tensor>,
    is_one: bool,
}

/// The arithmetic of `_amp_update_scale_` with the bounds after it: products in f64, rounded to f32, and growth to
/// infinity left out.
fn next(before: Mirror, overflow: bool, rule: &ScaleRule) -> Mirror {
    let times = |factor: f64| (f64::from(before.scale) * factor) as f32;
    let clamp = |scale: f32| scale.max(rule.min_scale as f32).min(rule.max_scale as f32);
    let counted = before.patience.count(overflow);
    if overflow && tolerates(&counted, rule) {
        return Mirror { tracker: 0, patience: counted, ..before };
    }
    if overflow {
        let scale = clamp(times(rule.backoff_factor));
        return Mirror { scale, tracker: 0, patience: counted.begin(false, rule) };
    }
    let tracker = before.tracker + 1;
    if i64::from(tracker) < rule.growth_interval {
        let patience = counted.carry_on(rule);
        return Mirror { scale: clamp(before.scale), tracker, patience };
    }
    let grown = times(rule.growth_factor);
    let scale = clamp(if grown.is_finite() { grown } else { before.scale });
    Mirror { scale, tracker: 0, patience: counted.begin(true, rule) }
}

impl Mirror {
    /// Whether an overflow finds the scale at its lower bound, so that it cannot back off as it should.
    pub(crate) fn is_stuck(self, rule: &ScaleRule) -> bool {
        self.scale <= rule.min_scale as f32 && !tolerates(&self.patience.count(true), rule)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    /// What the host computes from answers that it has is what the tensors hold.
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
            let [host, device] = [0; 2].map(|_| Scale::new(Device::Cpu, &config).unwrap());
            for step in 0..40 {
                let overflow = below(3) == 0;
                let found = Tensor::from(f32::from(u8::from(overflow)));
                for (scale, overflow) in [(&host, Some(overflow)), (&device, None)] {
                    let before = scale.forget();
                    ffi::scales_update(&[scale.change(&[&found], config.rule())]).unwrap();
                    scale.follow(before, overflow, &config.rule());
                }
                let (mut host, mut device) = (host.value().unwrap(), device.value().unwrap());
                if !config.is_patient() {
                    // Nobody reads it.
                    (host.patience, device.patience) = Default::default();
                }
                assert_eq!(host, device, "step {step} of {config:?}");
            }
        }
    }
}
