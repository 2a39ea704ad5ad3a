//! Runs this program under strace, which can kill it at a system call or make the call fail.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::thread;

use super::kills::{LENGTH, MARKER, child};
use super::{Folder, content};
use crate::atomic::place::is_temporary;

/// A `?` marks calls that not every architecture has.
const CALLS: &str = "openat,write,pwrite64,lseek,fsync,fdatasync,fchmod,close,?statx,?rename,renameat,renameat2,?unlink,unlinkat";

/// A system call of the child after its marker.
pub(super) struct Traced {
    thread: String,
    pub(super) name: String,
    /// Its number among the calls of the same name, counted from the start of its thread.
    number: usize,
    pub(super) line: String,
}

/// A folder with the old file, and what a child did to it.
pub(super) struct Run {
    pub(super) folder: Folder,
    pub(super) code: Option<i32>,
    pub(super) calls: Vec<Traced>,
    /// The highest number of calls of one name before the marker.
    before: usize,
    /// Whether the fault was injected, after the marker.
    pub(super) injected: bool,
}

/// Whether strace works here: a sandbox may forbid tracing. Prints the reason if not, unless strace is required.
pub(super) fn available() -> bool {
    let tried = Command::new("strace")
        .args(["-f", "-e", "inject=exit_group:signal=SIGKILL", "true"])
        .output();
    let problem = match tried {
        Ok(output) if output.status.signal() == Some(9) => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    let required = std::env::var("TCH_AMP_REQUIRE_STRACE").is_ok_and(|value| value == "1");
    assert!(!required, "strace is required, but does not work: {problem}");
    skipped(&format!("strace does not work here: {}", problem.trim_end()));
    false
}

/// Prints to the terminal what is not tested. The test runner would capture the output of `println!`.
fn skipped(what: &str) {
    let test = thread::current();
    let line = format!("SKIPPED {}: {what}\n", test.name().unwrap_or_default());
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}

/// Replaces a file in a child process. `inject` is strace's option.
pub(super) fn run(role: &str, before: usize, inject: Option<&str>) -> Run {
    let mut folder = Folder::new(role);
    // The path as strace shows it.
    folder.0 = fs::canonicalize(&folder.0).unwrap();
    let path = folder.join("model.bin");
    fs::write(&path, content(1, LENGTH)).unwrap();
    // Permissions that differ from a new file's, so that they must be set.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let log = Folder::new("strace");
    let mut command = Command::new("strace");
    // With -y, each descriptor is shown with its path. With --seccomp-bpf, no signal would be sent.
    command.args(["-f", "-y", "-s", "8", "-e", &format!("trace={CALLS}")]);
    if let Some(inject) = inject {
        command.args(["-e", &format!("inject={inject}")]);
    }
    command.arg("-o").arg(log.join("log")).arg(std::env::current_exe().unwrap());
    child(role, &folder, before, &mut command);
    let code = command.output().unwrap().status.code();
    let log = fs::read_to_string(log.join("log")).unwrap();
    let (before, calls) = parse(&log, folder.0.to_str().unwrap());
    let after = log.split_once(MARKER).map_or("", |(_, after)| after);
    // Not only in the lines of `calls`: the result of an interrupted call is in another line.
    let injected = ["(INJECTED)", "killed by SIGKILL"].iter().any(|found| after.contains(found));
    Run { folder, code, calls, before, injected }
}

/// The highest number of calls of one name before the marker, and the calls after it that concern files in a folder.
fn parse(log: &str, folder: &str) -> (usize, Vec<Traced>) {
    let mut counts = BTreeMap::new();
    let mut count = |line: &str| {
        let (thread, call) = line.split_once(' ')?;
        let (name, _) = call.trim_start().split_once('(')?;
        // The second half of an interrupted call has no name.
        if !name.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return None;
        }
        let number = counts.entry((thread.to_owned(), name.to_owned())).or_insert(0);
        *number += 1;
        let (thread, name) = (thread.to_owned(), name.to_owned());
        Some(Traced { thread, name, number: *number, line: line.to_owned() })
    };
    let (start, after) = log.split_once(MARKER).unwrap_or((log, ""));
    let start: Vec<_> = start.lines().filter_map(&mut count).collect();
    let before = start.iter().map(|call| call.number).max().unwrap();
    let thread = &start.last().unwrap().thread;
    // A number injected in the second thread also applies to the first, except for fdatasync, which only the second
    // calls.
    let known = |call: &Traced| call.thread == *thread || call.name == "fdatasync";
    let calls = after.lines().skip(1).filter_map(&mut count);
    (before, calls.filter(|call| call.line.contains(folder) && known(call)).collect())
}

impl Run {
    /// Checks that the file is the old or the new one, and returns whether it is the new one.
    pub(super) fn is_new(&self, context: &str) -> bool {
        let found = fs::read(self.folder.join("model.bin")).unwrap();
        let is_new = found == content(2, LENGTH);
        assert!(
            is_new || found == content(1, LENGTH),
            "{context}: the file is neither the old nor the new one"
        );
        is_new
    }

    /// The number of temporary files. There must be no other files.
    pub(super) fn leftovers(&self) -> usize {
        let names = self.folder.names();
        let others = names.iter().filter(|name| *name != "model.bin");
        others.inspect(|name| assert!(is_temporary(name.as_ref()), "{name}")).count()
    }
}

/// Runs a child once for each of its calls and injects a fault there. `check` gets the name of the call and a context
/// for messages.
pub(super) fn at_each_call(role: &str, what: &str, mut check: impl FnMut(&str, &str, Run)) {
    // A call is identified by its number in its thread, and the start of the program is in another thread.
    let before = run(role, 0, None).before;
    let plain = run(role, before, None);
    assert_eq!(plain.code, Some(0));
    assert!(plain.is_new("without injection"));
    for Traced { name, number, .. } in &plain.calls {
        let run = run(role, before, Some(&format!("{name}:{what}:when={number}")));
        let context = format!("{role}: {what} at {name} {number}: exit code {:?}", run.code);
        // The second thread may have received one request less.
        assert!(run.injected || name == "fdatasync", "{context}: not reached");
        check(name, &context, run);
    }
}
