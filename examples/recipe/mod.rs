//! What the larger examples share: their common options, their progress, logs, checkpoints and reports.
#![allow(dead_code, unused_imports, reason = "each example uses a part of it")]

pub mod computer;
pub mod confusion;
pub mod crates;
pub mod events;
pub mod interrupt;
pub mod log;
pub mod memory;
pub mod options;
pub mod order;
pub mod precision;
pub mod progress;
#[cfg_attr(not(feature = "distributed"), path = "alone.rs")]
pub mod ranks;
pub mod report;
pub mod saves;
pub mod writable;

pub use confusion::Confusion;
pub use interrupt::{Ended, Interrupt};
pub use log::Log;
pub use options::Options;
pub use precision::Precision;
pub use progress::{Progress, print, tell};
pub use ranks::Ranks;
pub use saves::Saves;
