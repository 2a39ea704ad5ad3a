//! `cargo xtask planted`: plants faults in a copy of the sources, one by one, each of which a test has to catch.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};
use testbench::null_cuda::{NullCuda, Numbers};
use testbench::simulated_cuda::Simulation;

use crate::args::Args;
use crate::workspace::{self, Workspace};
use crate::{paths, process, simulation};

/// The folder of the faults: patches for `git apply`, each with a text before it that names the test.
const FAULTS: &str = "tests/planted";

/// What stands before the arguments for `cargo test`.
const CAUGHT_BY: &str = "Caught by: ";

/// The folders in which faults are planted.
const SOURCES: [&str; 2] = ["src", "csrc"];

/// The folder below that of cargo's outputs in which they are planted.
const SHADOW: &str = "planted";

/// Changes the crate's profile, so that cargo writes these builds to other files than those without faults.
const OWN_FILES: &str = "profile.dev.package.tch-amp.codegen-units=15";

/// What stands for a GPU where a test runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Runtime {
    Nothing,
    Simulated,
    NullCuda,
}

/// A test that catches a fault.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Test {
    runtime: Runtime,
    /// Settings of the runtime, such as `SIMULATED_CUDA_LAG=never`.
    variables: Vec<(String, String)>,
    /// Those of `cargo test`.
    arguments: Vec<String>,
}

#[derive(Debug)]
struct Fault {
    name: String,
    patch: PathBuf,
    test: Test,
}

/// `cargo xtask planted`.
pub(crate) fn run(args: Args) -> Result<()> {
    let words = args.rest();
    let mut faults = faults()?;
    faults.retain(|fault| words.is_empty() || words.iter().any(|word| fault.name.contains(word)));
    ensure!(!faults.is_empty(), "{FAULTS} has no fault with such a name");
    let field = Field::new(&faults)?;
    let mut tests = BTreeMap::new();
    for fault in &faults {
        tests.entry(&fault.test).or_insert_with(|| field.passes_without_faults(&fault.test));
    }
    let mut failures = Vec::new();
    for fault in &faults {
        let start = Instant::now();
        let unsound = tests.get(&fault.test).and_then(|passes| passes.as_ref().err());
        let caught =
            unsound.map_or_else(|| field.catches(fault), |error| Err(anyhow!("{error:#}")));
        let seconds = start.elapsed().as_secs_f64();
        match caught {
            Ok(()) => println!("caught: {} ({seconds:.0} s)", fault.name),
            Err(error) => {
                println!("NOT CAUGHT: {} ({seconds:.0} s): {error:#}", fault.name);
                failures.push(fault.name.as_str());
            }
        }
    }
    println!("{} of {} planted faults are caught", faults.len() - failures.len(), faults.len());
    ensure!(failures.is_empty(), "not caught: {}", failures.join(", "));
    Ok(())
}

/// Fails if a patch does not apply any more, or does not say which test catches it.
pub(crate) fn check() -> Result<()> {
    let faults = faults()?;
    for fault in &faults {
        apply(&paths::root(), &fault.patch, &["--check"])
            .with_context(|| format!("correct {FAULTS}/{}.patch", fault.name))?;
    }
    println!("{} patches apply", faults.len());
    Ok(())
}

/// The faults, sorted by their names.
fn faults() -> Result<Vec<Fault>> {
    let faults = paths::files(FAULTS, "")?.into_iter().map(|patch| {
        let name = paths::relative(&patch);
        ensure!(name.ends_with(".patch"), "{name} is not a patch");
        let test = Test::of_patch(&paths::read(&patch)?).context(name)?;
        Ok(Fault { name: paths::stem(&patch), patch, test })
    });
    faults.collect()
}

impl Test {
    /// The test that the text before a patch names.
    fn of_patch(text: &str) -> Result<Self> {
        let words = text.lines().take_while(|line| !line.starts_with("diff "));
        let mut named = words.filter_map(|line| line.strip_prefix(CAUGHT_BY));
        let (Some(line), None) = (named.next(), named.next()) else {
            bail!("a line `{CAUGHT_BY}--test NAME FILTER` is needed, once and before the patch");
        };
        let mut words: Vec<_> = line.split_whitespace().map(str::to_owned).collect();
        let runtime = match words.first().map(String::as_str) {
            Some("simulate") => Runtime::Simulated,
            Some("null-cuda") => Runtime::NullCuda,
            _ => Runtime::Nothing,
        };
        words.drain(..usize::from(runtime != Runtime::Nothing));
        let (mut variables, mut arguments) = (Vec::new(), Vec::new());
        for word in words {
            match word.split_once('=').filter(|_| arguments.is_empty()) {
                Some((name, value)) => variables.push((name.to_owned(), value.to_owned())),
                None => arguments.push(word),
            }
        }
        ensure!(arguments.len() > 1, "`{line}` names no test");
        Ok(Self { runtime, variables, arguments })
    }
}

/// Where faults are planted.
struct Field {
    workspace: Workspace,
    simulation: Option<Simulation>,
    null_cuda: Option<NullCuda>,
}

impl Field {
    fn new(faults: &[Fault]) -> Result<Self> {
        let workspace = Workspace::announced(None)?.moved(sown(None)?);
        let libtorch = &workspace.libtorch;
        let needs = |runtime| faults.iter().any(|fault| fault.test.runtime == runtime);
        let simulation = needs(Runtime::Simulated).then(|| Simulation::provide(libtorch));
        let null_cuda = needs(Runtime::NullCuda).then(|| NullCuda::provide(libtorch));
        let (simulation, null_cuda) = (simulation.transpose()?, null_cuda.transpose()?);
        Ok(Self { workspace, simulation, null_cuda })
    }

    /// Fails unless the test is there and passes.
    fn passes_without_faults(&self, test: &Test) -> Result<()> {
        sown(None)?;
        let words = test.arguments.join(" ");
        println!("without a fault: {words}");
        let output = self.run(test)?;
        ensure!(output.status.success(), "`{words}` fails without a fault:\n{}", end(&output));
        let printed = String::from_utf8_lossy(&output.stdout);
        ensure!(passed(&printed) > 0, "`{words}` runs no test");
        Ok(())
    }

    /// Fails unless the fault can be compiled and the test then fails.
    fn catches(&self, fault: &Fault) -> Result<()> {
        sown(Some(&fault.patch))?;
        let output = self.run(&fault.test)?;
        let words = fault.test.arguments.join(" ");
        ensure!(!output.status.success(), "`{words}` passes with it");
        Ok(())
    }

    /// Compiles the test, which has to succeed, and runs it.
    fn run(&self, test: &Test) -> Result<Output> {
        // The arguments for cargo, without those for the test program.
        let before = test.arguments.iter().take_while(|word| *word != "--");
        process::read(self.cargo_test(test).args(["--no-run", "--quiet"]).args(before))?;
        self.cargo_test(test).args(&test.arguments).output().context("cargo cannot be run")
    }

    fn cargo_test(&self, test: &Test) -> Command {
        let mut tests = self.workspace.test(&format!("--config {OWN_FILES}"));
        tests.envs(test.variables.iter().cloned());
        match (test.runtime, &self.simulation, &self.null_cuda) {
            (Runtime::Simulated, Some(simulation), _) => simulation.apply(&mut tests),
            (Runtime::NullCuda, _, Some(null_cuda)) => null_cuda.apply(Numbers::Cpu, &mut tests),
            _ => return tests,
        }
        tests.envs(simulation::REQUIRED);
        tests
    }
}

/// The shadow with the sources of the repository, and at most one fault.
fn sown(patch: Option<&Path>) -> Result<PathBuf> {
    let dir = workspace::make_with_copies(SHADOW, &SOURCES)?;
    patch.map_or(Ok(()), |patch| apply(&dir, patch, &[]))?;
    Ok(dir)
}

fn apply(dir: &Path, patch: &Path, options: &[&str]) -> Result<()> {
    let mut git = Command::new("git");
    // In a folder of a repository, git would leave out what is in other folders.
    git.args(["apply"]).args(options).arg(patch).current_dir(dir);
    git.env("GIT_CEILING_DIRECTORIES", dir.parent().unwrap_or(dir));
    process::read(&mut git).map(drop)
}

/// How many tests have passed, by what cargo prints.
fn passed(printed: &str) -> u32 {
    let counts = printed.lines().filter_map(|line| line.strip_prefix("test result: ok. "));
    counts.filter_map(|line| line.split(' ').next()?.parse::<u32>().ok()).sum()
}

/// The last lines of what a program has printed.
fn end(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_names_its_test_before_it() {
        let of = |line: &str| Test::of_patch(&format!("A fault.\n\n{line}\n\ndiff --git a b\n"));
        let test = of("Caught by: --test optim low_bit::a_step").unwrap();
        assert_eq!(test.arguments, ["--test", "optim", "low_bit::a_step"]);
        assert_eq!(test.runtime, Runtime::Nothing);
        for (word, runtime) in [("simulate", Runtime::Simulated), ("null-cuda", Runtime::NullCuda)]
        {
            let test = of(&format!("Caught by: {word} LAG=never --test a --format=json")).unwrap();
            assert_eq!((test.runtime, test.arguments.len()), (runtime, 3));
            assert_eq!(test.variables, [("LAG".to_owned(), "never".to_owned())]);
        }
        for line in
            ["", "Caught by: ", "Caught by: simulate --lib", "\ndiff --git a b\nCaught by: --lib a"]
        {
            assert!(of(line).is_err(), "{line}");
        }
    }

    #[test]
    fn tests_that_have_run_are_counted() {
        let printed = "test result: ok. 2 passed; 0 failed\ntest result: FAILED. 1 passed; 1 failed\n\
                       test result: ok. 0 passed; 0 failed; 9 filtered out\n";
        assert_eq!(passed(printed), 2);
        assert_eq!(passed("running 0 tests\n"), 0);
    }
}
