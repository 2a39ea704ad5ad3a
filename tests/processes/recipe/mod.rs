//! What the larger examples share: their logs, and what becomes of a run that is killed or interrupted.

mod classifier;
mod competing;
mod files;
mod interrupt;
mod log;
mod options;
mod output;
mod picture_ranks;
mod pictures;
mod program;
mod published;
mod resumed;
pub mod same;
mod trainer;
mod tuned;
