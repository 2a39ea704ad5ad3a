//! `cargo xtask simulate`: runs any program on simulated GPUs.

use std::env;
use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::args::Args;
use crate::process;
use crate::simulation::Simulation;
use crate::workspace::Workspace;

/// `cargo xtask simulate`.
pub(crate) fn run(mut args: Args) -> Result<ExitCode> {
    let pair = args.leading_tch()?;
    let mut words = args.rest().into_iter();
    let Some(program) = words.next() else {
        bail!(
            "say what to run on the simulated GPUs, for instance \
             `cargo xtask simulate cargo run --example train`"
        );
    };
    let workspace = Workspace::new(pair)?;
    let simulation = Simulation::provide(&workspace)?;
    let mut command = workspace.command(&program);
    command.args(words);
    simulation.apply(&mut command);
    if env::var_os("SIMULATED_CUDA_REPORT").is_none() {
        command.env("SIMULATED_CUDA_REPORT", "1");
    }
    process::exit_code(&mut command)
}
