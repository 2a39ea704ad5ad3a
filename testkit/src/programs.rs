//! Which random programs run, and where; and this program again, as another process.

use std::ffi::OsStr;
use std::ops::Range;
use std::process::Command;

use super::{cuda_or_skip, simulation, skipped};

/// The number in an environment variable, if it is set.
pub fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {value:?}")))
}

/// The seeds of random programs: the one in `TCH_AMP_SEED` alone, or as many as the variable `count` says.
pub fn seeds(count: &str, usual: u64) -> Range<u64> {
    match number("TCH_AMP_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number(count).unwrap_or(usual),
    }
}

/// Whether Python can have the GPU of this process, too; prints a message if it cannot.
pub fn python_can_have_the_gpu() -> bool {
    if !cuda_or_skip() {
        return false;
    }
    if simulation::is_model() {
        skipped("Python has no simulated GPU");
    }
    !simulation::is_model()
}

/// Whether a test of this program passes in a process of its own, with these environment variables. What it printed is
/// printed again, for the case that the caller fails.
pub fn passes(test: &str, variables: &[(&str, &str)]) -> bool {
    let mut command = Command::new(std::env::current_exe().expect("a test has a program"));
    command.args([test, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"]);
    let output = command.envs(variables.iter().copied()).output().expect("it can be started");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("running 1 test\n"), "there is no test {test}");
    println!("{said}{}", String::from_utf8_lossy(&output.stderr));
    output.status.success()
}

/// One ignored test of this program, to be run as a process of its own.
pub fn this_test(name: &str) -> Command {
    this_test_by(&[], name)
}

/// The same by other words, such as those of a shell, which get the program and its arguments as their last ones.
pub fn this_test_by(words: &[&str], name: &str) -> Command {
    let program = std::env::current_exe().expect("a test has a program");
    let mut all = words.iter().map(OsStr::new).chain([program.as_os_str()]);
    let mut command = Command::new(all.next().expect("there is the program"));
    command.args(all).args(["--exact", name, "--ignored", "--nocapture"]);
    command
}
