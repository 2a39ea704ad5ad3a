//! `cargo xtask demo`: trains on handwritten digits.

use anyhow::Result;

use crate::args::Args;
use crate::process;
use crate::workspace::Workspace;

/// `cargo xtask demo`.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let workspace = Workspace::announced(args.tch()?)?;
    let mut digits = workspace.cargo("run");
    process::run(digits.args(["--example", "digits", "--"]).args(args.rest()))
}
