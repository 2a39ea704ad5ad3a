//! Programs that train with `tch-amp`, to be copied: each recipe is a module, and a program in `examples/` starts it.
//!
//! The modules at the root are what the recipes share: the loop in [`training`], options, several processes, progress,
//! logs, checkpoints and reports. Whoever needs one recipe copies the folder and removes the others with their
//! programs.

pub mod ahead;
pub mod computer;
pub mod confusion;
pub mod crates;
pub mod demo;
pub mod events;
pub mod gan;
pub mod gpt;
pub mod images;
pub mod inference;
pub mod interrupt;
pub mod log;
pub mod measure;
pub mod memory;
pub mod options;
pub mod order;
pub mod progress;
pub mod ranks;
pub mod region;
pub mod report;
pub mod saves;
pub mod session;
pub mod text_classifier;
pub mod training;
pub mod writable;

pub use confusion::Confusion;
pub use interrupt::{Ended, Interrupt};
pub use log::Log;
pub use options::{Options, PRECISIONS, precision_name};
pub use progress::{Progress, print, tell};
pub use ranks::Ranks;
pub use region::Region;
pub use saves::Saves;
pub use session::Session;
pub use training::Training;

use std::env;
use std::path::PathBuf;

/// The folder of the recipes: in a bundle below `$TCH_AMP_ROOT`, otherwise where they were built.
pub fn root() -> PathBuf {
    env::var_os("TCH_AMP_ROOT").map_or_else(
        || env!("CARGO_MANIFEST_DIR").into(),
        |root| PathBuf::from(root).join("recipes"),
    )
}
