//! Runs other programs, with errors that contain the command.

use std::env;
use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};

use anyhow::{Result, anyhow, bail, ensure};

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
    fn long_arguments_are_cut_between_characters() {
        assert_eq!(shorten("short"), "short");
        assert_eq!(shorten(&"é".repeat(100)), "é".repeat(80) + "…");
    }
}
