//! The processes of this machine, in `/proc`.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// The state of a process, such as `T` for a stopped one, and its parent.
fn process(number: u32) -> Option<(char, u32)> {
    let text = fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
    // The name of the program, in parentheses, may contain anything.
    let (_, rest) = text.rsplit_once(") ")?;
    let (state, rest) = rest.split_once(' ')?;
    Some((state.chars().next()?, rest.split(' ').next()?.parse().ok()?))
}

/// Whether a process has not ended. One that nobody has waited for has.
pub fn is_alive(number: u32) -> bool {
    process(number).is_some_and(|(state, _)| state != 'Z')
}

/// Whether a process has been stopped by a signal.
pub fn is_stopped(number: u32) -> bool {
    process(number).is_some_and(|(state, _)| state == 'T')
}

/// The children of a process, with those that have ended and that it has not waited for.
pub fn children(parent: u32) -> Vec<u32> {
    let names = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
    let numbers = names.filter_map(|name| name.to_str()?.parse().ok());
    numbers.filter(|number| process(*number).is_some_and(|(_, of)| of == parent)).collect()
}

/// Sends a signal to a process, which may have ended.
pub fn kill(signal: &str, number: u32) {
    let command = format!("kill -{signal} {number} 2> /dev/null || true");
    assert!(Command::new("sh").args(["-c", &command]).status().unwrap().success());
}

/// A process that prints lines while it runs. It does not outlive its test.
pub struct Running {
    pub child: Child,
    lines: BufReader<ChildStdout>,
}

impl Running {
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// The rest of the next line that has this word.
    pub fn after(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let read = self.lines.read_line(&mut line).unwrap();
            assert!(read > 0, "the process has ended before {word:?}");
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop((self.child.kill(), self.child.wait()));
    }
}

pub fn wait_until(holds: impl Fn() -> bool) {
    let end = Instant::now() + super::TIMEOUT;
    while !holds() {
        assert!(Instant::now() < end, "it took too long");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// An environment variable with which a process was started.
pub fn variable(number: u32, name: &str) -> Option<String> {
    let text = fs::read(format!("/proc/{number}/environ")).ok()?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let start = format!("{name}=");
    text.split('\0').find_map(|entry| entry.strip_prefix(&start).map(str::to_owned))
}

/// Whether a process ignores a signal.
pub fn ignores(process: u32, signal: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (signal - 1) & 1 == 1
}
