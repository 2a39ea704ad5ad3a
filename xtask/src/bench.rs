//! `cargo xtask bench`: times this crate, Python and plain tch, all but those of parallel work on one core.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Error, Result, ensure};

use crate::args::Args;
use crate::venv::Venv;
use crate::workspace::Workspace;
use crate::{paths, process};

/// The one that compares with hooks of Hugging Face's transformers, too, and their version.
const TOOLS: &str = "insight_tools";
const TRANSFORMERS: &str = "5.23.0";

/// Those that need several cores.
const PARALLEL: [&str; 2] = ["distributed", "threads"];

/// `cargo xtask bench`.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let pair = args.tch()?;
    // Words that begin with a dash are for the benchmarks.
    let (options, filters): (Vec<_>, Vec<_>) =
        args.rest().into_iter().partition(|word| word.starts_with('-'));
    let chosen = choose(&names()?, &filters)?;
    let workspace = Workspace::announced(pair)?;
    workspace.warn_without_python();
    // Builds on every core, because only the timing needs a single one.
    process::run(benches(&workspace, &chosen).arg("--no-run"))?;
    // Only for those who ask for this benchmark, because it is a large download.
    let python = workspace.libtorch.python.as_deref().filter(|_| chosen == [TOOLS]);
    let transformers = python.and_then(transformers);
    let (parallel, single): (Vec<_>, Vec<_>) =
        chosen.into_iter().partition(|name| PARALLEL.contains(&name.as_str()));
    if !parallel.is_empty() {
        process::run(benches(&workspace, &parallel).arg("--").args(&options))?;
    }
    if !single.is_empty() {
        pin();
        let mut bench = benches(&workspace, &single);
        bench.arg("--").args(&options).env("OMP_NUM_THREADS", "1").env("MKL_NUM_THREADS", "1");
        process::run(bench.envs(transformers.map(|folder| ("PYTHONPATH", folder))))?;
    }
    Ok(())
}

/// The folder with transformers, which is installed if need be. `None` if Python has it anyway, or if it cannot be
/// installed, which is printed.
fn transformers(python: &Path) -> Option<PathBuf> {
    if process::read(Command::new(python).args(["-c", "import transformers"])).is_ok() {
        return None;
    }
    let provided =
        Venv::new("transformers", TRANSFORMERS, 1).and_then(|venv| venv.ensure()?.site());
    let warn = |error: &Error| {
        eprintln!("WARNING: transformers is left out of the comparison: {error:#}");
    };
    provided.inspect_err(warn).ok()
}

/// The names of the benchmarks, each of which is a file.
fn names() -> Result<Vec<String>> {
    Ok(paths::files("benches", ".rs")?.iter().map(|file| paths::stem(file)).collect())
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
    let mut bench = workspace.cargo("bench --features full");
    bench.args(names.iter().flat_map(|name| ["--bench", name]));
    bench
}

/// Keeps this process, and those that it starts from now on, on one core, if taskset is installed.
fn pin() {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let core = last_core(&status).unwrap_or_default();
    let mut taskset = Command::new("taskset");
    taskset.args(["--cpu-list", "--pid", &core, &std::process::id().to_string()]);
    match process::read(&mut taskset) {
        Ok(_) => println!("pinned to core {core}"),
        Err(error) => println!("not pinned to one core: {error:#}"),
    }
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
        let names = names().unwrap();
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
}
