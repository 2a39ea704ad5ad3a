//! The overflows that leave the scale unchanged. `csrc/scale.cpp` counts in the same way on the device.
//!
//! An overflow is tolerated while the hysteresis, as in Megatron-LM and DeepSpeed, is not used up, or while the share
//! of overflows since the last change is below `tolerance`, as in fairseq.

use crate::ffi::{OverflowCounts, ScaleRule};
use crate::scale::GradScalerConfig;

impl OverflowCounts {
    /// The counts of a new scale.
    pub(crate) fn new(config: &GradScalerConfig) -> Self {
        Self { hysteresis: config.hysteresis.into(), ..Self::default() }
    }

    /// Whether an overflow that has been counted leaves the scale unchanged.
    pub(crate) fn tolerate(&self, rule: &ScaleRule) -> bool {
        let share = self.overflows as f64 / self.iterations as f64;
        self.hysteresis > 0 || share < rule.tolerance
    }

    /// Counts an iteration.
    pub(crate) fn count(self, overflow: bool) -> Self {
        let overflow = i64::from(overflow);
        Self {
            hysteresis: (self.hysteresis - overflow).max(0),
            iterations: self.iterations + 1,
            overflows: self.overflows + overflow,
        }
    }

    /// The counts after an iteration without overflow that does not let the scale grow.
    pub(crate) fn carry_on(self, rule: &ScaleRule) -> Self {
        let restored = rule.consecutive;
        Self { hysteresis: if restored { rule.hysteresis } else { self.hysteresis }, ..self }
    }

    /// The counts after the scale has backed off, or could grow.
    pub(crate) fn restart(self, grown: bool, rule: &ScaleRule) -> Self {
        let hysteresis = if grown { rule.hysteresis } else { self.hysteresis };
        Self { hysteresis, ..Self::default() }
    }
}
