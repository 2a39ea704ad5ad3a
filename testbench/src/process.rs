//! Runs other programs, with errors that contain the command.

use std::env;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::paths;

/// The cargo that runs xtask, in a folder, with these words as its arguments.
pub fn cargo(dir: &Path, words: &str) -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(words.split(' ')).current_dir(dir);
    cargo
}

/// Runs `command` and shows its output.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().map_err(|error| not_started(command, &error))?;
    check(command, status)
}

/// Runs tests and writes what they print to `shown`. The error names those that have failed, whose own output may be
/// far above the end.
pub fn run_tests(command: &mut Command, shown: impl Write + Send + 'static) -> Result<()> {
    let mut child = start(command.stdout(Stdio::piped()))?;
    let printed = child.stdout.take().context("the tests have no output")?;
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(copy_and_find_failed(printed, shown)));
    let status = child.wait()?;
    // A process that a test has left behind may hold the output open.
    let failed = receiver.recv_timeout(Duration::from_secs(10)).unwrap_or_default();
    match failed.is_empty() {
        true => check(command, status),
        false => check(command, status).context(format!("failed: {}", failed.join(", "))),
    }
}

/// Copies the output of tests and returns the names in its lists of failures.
fn copy_and_find_failed(printed: impl Read, mut shown: impl Write) -> Vec<String> {
    let (mut printed, mut line) = (BufReader::new(printed), Vec::new());
    let (mut failed, mut is_listed) = (Vec::new(), false);
    while printed.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
        // Who no longer reads has seen enough.
        let _shown = shown.write_all(&line).and_then(|()| shown.flush());
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        match text.strip_prefix("    ").filter(|_| is_listed) {
            Some(name) if !name.contains(char::is_whitespace) => failed.push(name.to_owned()),
            _ => is_listed = text == "failures:",
        }
        line.clear();
    }
    failed
}

/// Starts `command` and shows its output.
pub fn start(command: &mut Command) -> Result<Child> {
    command.spawn().map_err(|error| not_started(command, &error))
}

/// Fails if `command` has not ended with success.
pub fn check(command: &Command, status: ExitStatus) -> Result<()> {
    ensure!(status.success(), "`{}` failed ({status})", line(command));
    Ok(())
}

/// Runs `command`, shows its output, and returns its exit code. A signal that ended it is an error.
pub fn exit_code(command: &mut Command) -> Result<ExitCode> {
    let status = command.status().map_err(|error| not_started(command, &error))?;
    match status.code().and_then(|code| u8::try_from(code).ok()) {
        Some(code) => Ok(ExitCode::from(code)),
        None => bail!("`{}` failed ({status})", line(command)),
    }
}

/// Runs `command` silently and returns its output.
pub fn read(command: &mut Command) -> Result<String> {
    let output =
        command.stdin(Stdio::null()).output().map_err(|error| not_started(command, &error))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed ({}):\n{}", line(command), output.status, stderr.trim_end());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Runs `command`, shows its errors and progress, and returns its output.
pub fn read_showing_errors(command: &mut Command) -> Result<String> {
    let child = command.stdout(Stdio::piped()).spawn();
    let output = child
        .and_then(std::process::Child::wait_with_output)
        .map_err(|error| not_started(command, &error))?;
    ensure!(output.status.success(), "`{}` failed ({})", line(command), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Writes a program of the shell and returns its path.
pub fn script(path: &Path, text: &str) -> Result<PathBuf> {
    paths::write(path, &format!("#!/bin/sh\n{text}"))?;
    fs::set_permissions(path, Permissions::from_mode(0o755))?;
    Ok(path.to_owned())
}

/// The first line of output of `command`, or `None` if it cannot run.
pub fn first_line(command: &mut Command) -> Option<String> {
    let printed = read(command).ok()?;
    printed.lines().next().map(str::to_owned)
}

fn not_started(command: &Command, error: &std::io::Error) -> anyhow::Error {
    let program = command.get_program().display();
    match error.kind() {
        ErrorKind::NotFound => anyhow!("`{program}` is not installed"),
        _ => anyhow!("`{program}` does not start: {error}"),
    }
}

/// The command as a user would type it: without the folder of the program, and with long arguments cut.
fn line(command: &Command) -> String {
    let program = command.get_program();
    let program = Path::new(program).file_name().unwrap_or(program);
    let words = std::iter::once(program).chain(command.get_args());
    let words = words.map(|word| shorten(&word.to_string_lossy()));
    words.collect::<Vec<_>>().join(" ")
}

fn shorten(word: &str) -> String {
    match word.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &word[..end]),
        None => word.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named() {
        let error = run(&mut Command::new("no-such-program-as-this")).unwrap_err().to_string();
        assert_eq!(error, "`no-such-program-as-this` is not installed");
    }

    #[test]
    fn a_failure_shows_the_command_and_its_errors() {
        let mut command = Command::new("sh");
        let error = read(command.args(["-c", "echo went wrong >&2; exit 3"])).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("sh -c") && error.contains("went wrong"), "{error}");
    }

    #[test]
    fn tests_that_have_failed_are_named() {
        let printed = "\nrunning 3 tests\ntest a::one ... FAILED\ntest b ... ok\n\nfailures:\n\n\
                       ---- a::one stdout ----\n    of its message\n\nfailures:\n    a::one\n    a::two\n\n\
                       test result: FAILED. 1 passed; 2 failed\n";
        let mut shown = Vec::new();
        assert_eq!(copy_and_find_failed(printed.as_bytes(), &mut shown), ["a::one", "a::two"]);
        assert_eq!(shown, printed.as_bytes());
        let script = format!("printf '{printed}'; exit 101");
        let run =
            |script: &str| run_tests(Command::new("sh").args(["-c", script]), std::io::sink());
        let error = format!("{:#}", run(&script).unwrap_err());
        assert!(error.starts_with("failed: a::one, a::two: `sh -c"), "{error}");
        assert!(error.ends_with("(exit status: 101)"), "{error}");
        let error = run("exit 3").unwrap_err().to_string();
        assert!(error.starts_with("`sh -c"), "{error}");
        run("echo fine").unwrap();
    }

    #[test]
    fn long_arguments_are_cut_between_characters() {
        assert_eq!(shorten("short"), "short");
        assert_eq!(shorten(&"é".repeat(100)), "é".repeat(80) + "…");
    }
}
