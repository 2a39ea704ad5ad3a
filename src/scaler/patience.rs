//! Which overflows the scale puts up with, as `csrc/scale.cpp` counts them on the device.

use tch::{Device, Tensor};

use crate::error::Result;
use crate::ffi::ScaleRule;
use crate::scaler::config::GradScalerConfig;
use crate::sys;

/// What is counted, in the order of the shim's tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Patience {
    /// Overflows until the hysteresis is used up.
    pub(crate) hysteresis: i64,
    /// Iterations since the scale last backed off or could grow.
    pub(crate) iterations: i64,
    /// Overflows among them.
    pub(crate) overflows: i64,
}

/// Whether the overflow that has been counted leaves the scale as it is.
pub(crate) fn tolerates(counted: &Patience, rule: &ScaleRule) -> bool {
    let share = counted.overflows as f64 / counted.iterations as f64;
    counted.hysteresis > 0 || share < rule.tolerance
}

impl Patience {
    /// That of a scaler from the start.
    pub(crate) fn full(config: &GradScalerConfig) -> Self {
        Self { hysteresis: config.hysteresis.into(), ..Self::default() }
    }

    pub(crate) fn tensor(self, device: Device) -> Result<Tensor> {
        let mut counts = [0; 3];
        counts[sys::TOLERANCE_HYSTERESIS] = self.hysteresis;
        counts[sys::TOLERANCE_ITERATIONS] = self.iterations;
        counts[sys::TOLERANCE_OVERFLOWS] = self.overflows;
        Ok(Tensor::f_from_slice(&counts)?.f_to_device(device)?)
    }

    /// From the elements of the tensor, which are exact up to 2^53; all zero where there is none.
    pub(crate) fn from_counts(counts: &[f64]) -> Self {
        let at = |place: usize| counts.get(place).map_or(0, |count| *count as i64);
        Self {
            hysteresis: at(sys::TOLERANCE_HYSTERESIS),
            iterations: at(sys::TOLERANCE_ITERATIONS),
            overflows: at(sys::TOLERANCE_OVERFLOWS),
        }
    }

    pub(crate) fn count(self, overflow: bool) -> Self {
        let overflow = i64::from(overflow);
        Self {
            hysteresis: (self.hysteresis - overflow).max(0),
            iterations: self.iterations + 1,
            overflows: self.overflows + overflow,
        }
    }

    /// After an iteration without overflow that does not let the scale grow.
    pub(crate) fn carry_on(self, rule: &ScaleRule) -> Self {
        let restored = rule.consecutive;
        Self { hysteresis: if restored { rule.hysteresis } else { self.hysteresis }, ..self }
    }

    /// After the scale has backed off, or could grow.
    pub(crate) fn begin(self, grown: bool, rule: &ScaleRule) -> Self {
        let hysteresis = if grown { rule.hysteresis } else { self.hysteresis };
        Self { hysteresis, ..Self::default() }
    }
}

impl GradScalerConfig {
    /// Whether the scale may put up with an overflow.
    pub(crate) fn is_patient(&self) -> bool {
        self.hysteresis > 1 || self.tolerance > 0.0
    }
}
