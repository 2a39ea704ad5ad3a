//! `cargo xtask bench`: times this crate, Python and plain tch, all but those of parallel work on one core.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::args::Args;
use crate::workspace::Workspace;
use crate::{paths, process, transformers};

/// The one that compares with transformers, too.
const TOOLS: &str = "insight_tools";

/// Those that need several cores.
const PARALLEL: [&str; 2] = ["distributed", "threads"];

/// `cargo xtask bench`.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let pair = args.tch()?;
    // Words that begin with a dash are for the benchmarks.
    let (options, filters): (Vec<_>, Vec<_>) =
        args.rest().into_iter().partition(|word| word.starts_with('-'));
    let chosen = choose(&names(&paths::root())?, &filters)?;
    let workspace = Workspace::announced(pair)?;
    workspace.warn_without_python();
    // Only for those who ask for this benchmark, because it is a large download.
    let python = workspace.libtorch.python.as_deref().filter(|_| chosen == [TOOLS]);
    let transformers = python.and_then(transformers::provide);
    // Builds on every core, because only the timing needs a single one.
    process::run(benches(&workspace, &chosen).arg("--no-run"))?;
    let (parallel, single): (Vec<_>, Vec<_>) =
        chosen.into_iter().partition(|name| PARALLEL.contains(&name.as_str()));
    if !single.is_empty() {
        let mut bench = benches(&workspace, &single);
        bench.arg("--").args(&options);
        for name in ["OMP_NUM_THREADS", "MKL_NUM_THREADS"] {
            bench.env(name, "1");
        }
        if let Some(dir) = &transformers {
            bench.env("PYTHONPATH", dir);
        }
        process::run(&mut pinned(bench))?;
    }
    if !parallel.is_empty() {
        process::run(benches(&workspace, &parallel).arg("--").args(&options))?;
    }
    Ok(())
}

/// The names of the benchmarks, each of which is a file.
fn names(root: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(root.join("benches"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "rs") {
            names.extend(path.file_stem().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    Ok(names)
}

/// The benchmarks whose names contain one of the filters, or all if there are no filters.
fn choose(names: &[String], filters: &[String]) -> Result<Vec<String>> {
    let fits = |name: &&String| filters.iter().any(|filter| name.contains(filter.as_str()));
    let chosen: Vec<_> = names.iter().filter(fits).cloned().collect();
    let known = names.join(", ");
    for filter in filters {
        let found = names.iter().any(|name| name.contains(filter.as_str()));
        ensure!(found, "there is no benchmark `{filter}`; there are {known}");
    }
    Ok(if filters.is_empty() { names.to_vec() } else { chosen })
}

fn benches(workspace: &Workspace, names: &[String]) -> Command {
    let mut bench = workspace.cargo_full("bench");
    bench.args(names.iter().flat_map(|name| ["--bench", name]));
    bench
}

/// `command` on one core, if taskset is installed. The processes that it starts stay on that core, too.
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

/// The last core that the text of /proc/self/status allows. The first cores handle interrupts.
fn last_core(status: &str) -> Option<String> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    list.trim().rsplit([',', '-']).next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_allowed_core_is_used() {
        for (list, core) in [("0-1", "1"), ("3", "3"), ("0,2-5,9-11", "11"), ("0-3,8", "8")] {
            let status = format!("Threads:\t1\nCpus_allowed_list:\t{list}\nMems_allowed:\t1\n");
            assert_eq!(last_core(&status).as_deref(), Some(core));
        }
        assert_eq!(last_core("Threads:\t1\n"), None);
    }

    #[test]
    fn a_filter_chooses_benchmarks() {
        let names = names(&paths::root()).unwrap();
        assert!(names.len() > 3 && names.iter().any(|name| name == "function"), "{names:?}");
        let choose = |words: &[&str]| {
            choose(&names, &words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(choose(&[]).unwrap(), names);
        assert_eq!(choose(&["function"]).unwrap(), ["function"]);
        assert_eq!(choose(&["func", "check"]).unwrap(), ["checkpoint", "function"]);
        let error = choose(&["function", "nothing"]).unwrap_err().to_string();
        assert!(
            error.contains("`nothing`") && error.contains("checkpoint, distributed, function"),
            "{error}"
        );
    }

    #[test]
    fn pinning_keeps_the_environment_and_the_folder() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $MARK; pwd"]).env("MARK", "kept").current_dir("/");
        assert_eq!(process::read(&mut pinned(command)).unwrap(), "kept\n/");
    }
}
