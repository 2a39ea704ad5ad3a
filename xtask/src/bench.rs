//! `cargo xtask bench`: times this crate beside Python and plain tch, all on one core.

use std::fs;
use std::process::Command;

use anyhow::Result;

use crate::args::Args;
use crate::process;
use crate::workspace::Workspace;

/// `cargo xtask bench`.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let workspace = Workspace::announced(args.tch()?)?;
    workspace.warn_without_python();
    // On every core, as only the timing needs the one.
    process::run(benches(&workspace).arg("--no-run"))?;
    let mut bench = benches(&workspace);
    bench.arg("--").args(args.rest());
    for name in ["OMP_NUM_THREADS", "MKL_NUM_THREADS"] {
        bench.env(name, "1");
    }
    process::run(&mut pinned(bench))
}

fn benches(workspace: &Workspace) -> Command {
    let mut bench = workspace.cargo("bench");
    bench.args(["--bench", "*"]);
    bench
}

/// `command` on one core, where taskset is installed. What it starts stays there too.
fn pinned(command: Command) -> Command {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let core = last_core(&status);
    let taskset = process::first_line(Command::new("taskset").arg("--version"));
    let (Some(core), Some(_)) = (core, taskset) else {
        println!("not pinned to one core: taskset is not installed");
        return command;
    };
    println!("pinned to core {core}");
    let mut pinned = Command::new("taskset");
    pinned.args(["--cpu-list", &core]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => pinned.env(name, value),
            None => pinned.env_remove(name),
        };
    }
    if let Some(dir) = command.get_current_dir() {
        pinned.current_dir(dir);
    }
    pinned
}

/// The last core that the text of /proc/self/status allows: the first ones serve the interrupts.
fn last_core(status: &str) -> Option<String> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    list.trim().rsplit([',', '-']).next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_allowed_core_is_taken() {
        for (list, core) in [("0-1", "1"), ("3", "3"), ("0,2-5,9-11", "11"), ("0-3,8", "8")] {
            let status = format!("Threads:\t1\nCpus_allowed_list:\t{list}\nMems_allowed:\t1\n");
            assert_eq!(last_core(&status).as_deref(), Some(core));
        }
        assert_eq!(last_core("Threads:\t1\n"), None);
    }

    #[test]
    fn pinning_keeps_the_environment_and_the_folder() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $MARK; pwd"]).env("MARK", "kept").current_dir("/");
        assert_eq!(process::read(&mut pinned(command)).unwrap(), "kept\n/");
    }
}
