//! Facts about a run and its computer, for the report.

use super::options::Options;
use crate::computer;
use anyhow::Result;

/// Facts about the run.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The device, in words.
    pub device: String,
    /// The number of CPU threads that libtorch uses.
    pub threads: i32,
    /// The seed of the command line.
    pub seed: i64,
    /// The value of the command line.
    pub epochs: usize,
}

impl Facts {
    /// Collects the facts.
    pub fn gather(options: &Options) -> Result<Self> {
        let device = computer::device(options.device()?);
        let device = match options.ranks {
            Some(ranks) => format!("{device}, {ranks} ranks"),
            None => device,
        };
        let threads = tch::get_num_threads();
        Ok(Self { device, threads, seed: options.seed, epochs: options.epochs })
    }
}
