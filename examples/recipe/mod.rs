//! What the larger examples share: their common options, their progress, logs, checkpoints and reports.
#![allow(dead_code, unused_imports, reason = "each example uses a part of it")]

#[path = "../../src/insight/html/axis.rs"]
pub mod axis;
pub mod computer;
pub mod confusion;
pub mod crates;
#[path = "../../src/insight/html/escape.rs"]
pub mod escape;
pub mod events;
#[path = "../../src/insight/html/heat_map.rs"]
pub mod heat_map;
pub mod interrupt;
pub mod log;
pub mod memory;
pub mod options;
pub mod order;
#[path = "../../src/insight/html/page.rs"]
pub mod page;
#[path = "../../src/insight/html/plot.rs"]
pub mod plot;
pub mod precision;
pub mod progress;
#[cfg_attr(not(feature = "distributed"), path = "alone.rs")]
pub mod ranks;
pub mod saves;
#[path = "../../src/insight/html/table.rs"]
pub mod table;
pub mod writable;

pub use confusion::Confusion;
pub use interrupt::{Ended, Interrupt};
pub use log::Log;
pub use options::Options;
pub use page::Page;
pub use precision::Precision;
pub use progress::{Progress, print, tell};
pub use ranks::Ranks;
pub use saves::Saves;
pub use table::Table;
