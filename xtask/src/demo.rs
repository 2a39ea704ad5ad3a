//! `cargo xtask demo`: trains a small GPT and a network for handwritten digits, and compares precisions.

use anyhow::Result;

use crate::args::Args;
use crate::process;
use crate::workspace::Workspace;

/// `cargo xtask demo`.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let workspace = Workspace::announced(args.tch()?)?;
    process::run(workspace.cargo("run --features full --example demo --").args(args.rest()))
}
