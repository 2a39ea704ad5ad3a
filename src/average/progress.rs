//! How many updates an average has had, and the weight of the next one.

use tch::{Device, Kind, Tensor};

use crate::average::{Averaging, Ema};
use crate::capture::{self, GraphLink};
use crate::error::Result;
use crate::ffi::{self, AverageOptions, Counted, OutsideRegions};

/// How many updates there were, and what is left of the weight that the start would have without the correction of its
/// bias. The weight is that of the last update.
#[derive(Debug)]
pub(super) struct Updates {
    count: u64,
    rest: f64,
    pub(super) weight: f64,
}

/// These three numbers. A device has them from the first outcome on that is on one.
pub(super) type Count = Counted<Updates>;

impl Count {
    pub(super) fn start() -> Self {
        Self::resumed(0, 1.0)
    }

    pub(super) fn resumed(updates: u64, rest: f64) -> Self {
        Self::Host(Updates { count: updates, rest, weight: 0.0 })
    }

    /// Counts an update. With a flag on a device, the update takes place unless that is set, and its weight otherwise
    /// is zero. In an iteration of a graph the device counts. Never synchronizes.
    pub(super) fn next(
        &self,
        averaging: Averaging,
        skips: Option<&Tensor>,
        device: Device,
    ) -> Result<Self> {
        let options = options(averaging);
        let never = match (self, skips) {
            (Self::Host(_), None) if capture::is_on(device) => {
                Some(ffi::number_new(0.0, Kind::Float, device)?)
            }
            _ => None,
        };
        let skips = skips.or(never.as_ref());
        if let (Self::Host(Updates { count, rest, .. }), None) = (self, skips) {
            let (weight, rest) = step(options, *count as f64, *rest);
            return Ok(Self::Host(Updates { count: count.saturating_add(1), rest, weight }));
        }
        let counted = self.map(|updates| (updates.count, updates.rest));
        Ok(Self::Device(ffi::average_count(counted, skips, options)?))
    }

    /// Replaces the count: in place if a graph may know it, where replays find it.
    pub(super) fn replace(&mut self, next: Self, link: &GraphLink) -> Result<()> {
        match (&mut *self, next) {
            (Self::Device(count), Self::Device(next)) => {
                let mut place = Some(count.shallow_clone());
                link.replace(&mut place, next, AVERAGE)?;
                if let Some(next) = place {
                    *count = next;
                }
            }
            (Self::Host(_), Self::Device(_)) if capture::is_capturing() => {
                capture::refuse(AVERAGE, "update the averages in the warm-up, too")?;
            }
            (_, next) => *self = next,
        }
        Ok(())
    }

    /// Returns the number of updates and what is left of the start. Synchronizes if they are on a device.
    pub(super) fn read(&self) -> Result<(u64, f64)> {
        let _own = OutsideRegions::enter();
        match self {
            Self::Host(Updates { count, rest, .. }) => Ok((*count, *rest)),
            Self::Device(count) => {
                let numbers = Vec::<f64>::try_from(count.f_to_device(Device::Cpu)?)?;
                Ok((numbers[0] as u64, numbers[1]))
            }
        }
    }
}

const AVERAGE: &str = "the first update of averages";

fn options(averaging: Averaging) -> AverageOptions {
    match averaging {
        Averaging::Swa(_) => AverageOptions::Swa,
        Averaging::Ema(Ema { decay, warmup, debias, .. }) => {
            AverageOptions::Ema { decay, warmup, debias }
        }
    }
}

/// The weight of the update after this many, and what is left of the start after it. csrc/optim/average.cpp has the
/// same for tensors.
fn step(options: AverageOptions, before: f64, rest: f64) -> (f64, f64) {
    match options {
        AverageOptions::Swa => (1.0 / (before + 1.0), 0.0),
        AverageOptions::Ema { decay, warmup, debias } => {
            let least = (before + 1.0) / (before + 10.0);
            let decay = if warmup { decay.min(least) } else { decay };
            let next = rest * decay;
            let weight = match debias {
                true => (1.0 - decay) / (1.0 - next),
                false if before == 0.0 => 1.0,
                false => 1.0 - decay,
            };
            (weight, next)
        }
    }
}
