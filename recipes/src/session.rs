//! The process of a run.

use super::{Interrupt, Options, Ranks, tell};
use anyhow::Result;
use tch::Device;
use tch_amp::memory::keep_freed_memory;

/// What a run needs of its process: with whom it trains, and where.
#[derive(Debug)]
pub struct Session {
    pub ranks: Ranks,
    /// This rank's device.
    pub device: Device,
    pub interrupt: Interrupt,
}

impl Session {
    /// Starts the ranks that the options want, catches Ctrl-C, and checks that the report can be written. Returns
    /// `None` in the process that has started the ranks, once they have ended. Decides the precision, if it is `auto`.
    pub fn start(options: &mut Options) -> Result<Option<Self>> {
        let Some(ranks) = Ranks::start(options.ranks)? else { return Ok(None) };
        let interrupt = Interrupt::catch()?;
        options.check_out(&ranks)?;
        let device = ranks.device(options.device()?)?;
        if ranks.size() > 1 {
            tell(ranks.describe(device)?);
        }
        options.decide(device, &ranks)?;
        // Each step takes the same memory again.
        keep_freed_memory();
        Ok(Some(Self { ranks, device, interrupt }))
    }

    /// This process alone.
    pub fn alone(device: Device, interrupt: Interrupt) -> Self {
        Self { ranks: Ranks::alone(), device, interrupt }
    }
}
