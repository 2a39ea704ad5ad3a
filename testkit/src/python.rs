//! Python's torch, of the version that is linked, as an oracle.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use serde_json::{Value, json};

use crate::files::Folder;

/// The folder with the crate's files: the repository, or `TCH_AMP_ROOT` if the tests were copied to another machine.
pub fn root() -> PathBuf {
    // Not `..`: in a copy of the repository this folder may be a link to the original.
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("testkit is in the repository");
    std::env::var_os("TCH_AMP_ROOT").map_or_else(|| folder.to_owned(), PathBuf::from)
}

/// A script of `tests/oracle/` and the Python interpreter that runs it.
#[derive(Debug)]
pub struct Oracle {
    python: PathBuf,
    script: PathBuf,
}

impl Oracle {
    /// The oracle `tests/oracle/<name>`. If no Python is set, returns `None` and prints the reason.
    ///
    /// `cargo xtask test` sets `TCH_AMP_PYTHON`, and also `TCH_AMP_REQUIRE_PYTHON=1`, which turns the skip into a
    /// failure.
    pub fn find(name: &str) -> Option<Self> {
        let Some(python) = std::env::var_os("TCH_AMP_PYTHON") else {
            assert!(
                !super::is_set("TCH_AMP_REQUIRE_PYTHON"),
                "TCH_AMP_REQUIRE_PYTHON is set, but TCH_AMP_PYTHON is not"
            );
            super::skipped("set TCH_AMP_PYTHON to a Python with torch, or run `cargo xtask test`");
            return None;
        };
        Some(Self { python: python.into(), script: root().join("tests/oracle").join(name) })
    }

    /// Runs the script with `args`, gives it `input`, and returns what it printed.
    pub fn run(&self, args: &[&str], input: &str) -> String {
        let folder = Folder::new();
        let (read, written) = (folder.file("input"), folder.file("output"));
        fs::write(&read, input).expect("the folder is writable");
        let request =
            json!({ "script": &self.script, "args": args, "input": &read, "output": &written });
        let status = Server::answer(&self.python, &request);
        assert_eq!(status, "0", "the oracle {} failed", self.script.display());
        fs::read_to_string(written).expect("the oracle prints UTF-8")
    }

    /// The command that runs the script, for a test that exchanges data with it while it runs.
    pub fn command(&self) -> Command {
        command(&self.python, &self.script)
    }

    /// The path of the script.
    pub fn script(&self) -> &Path {
        &self.script
    }
}

fn command(python: &Path, script: &Path) -> Command {
    let mut command = Command::new(python);
    command.arg("-B").arg(script).env_remove("LD_LIBRARY_PATH");
    // torch warns about missing optional packages, which no oracle needs.
    command.env("PYTHONWARNINGS", "ignore:Failed to initialize NumPy");
    command
}

/// `tests/oracle/server.py`, which ends with this process.
struct Server {
    process: Child,
    answers: BufReader<ChildStdout>,
}

/// The one of this process, from its first request on. It is taken while it works, so that none is left that has
/// failed.
static SERVER: Mutex<Option<Server>> = Mutex::new(None);

impl Server {
    fn start(python: &Path) -> Self {
        let mut command = command(python, &root().join("tests/oracle/server.py"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("TCH_AMP_PYTHON starts");
        let answers = BufReader::new(process.stdout.take().expect("stdout is piped"));
        Self { process, answers }
    }

    /// Runs one script, and returns its exit status.
    fn answer(python: &Path, request: &Value) -> String {
        let mut one = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
        let mut server = one.take().unwrap_or_else(|| Self::start(python));
        let requests = server.process.stdin.as_mut().expect("stdin is piped");
        writeln!(requests, "{request}").expect("the server of the oracles reads");
        let mut status = String::new();
        let read =
            server.answers.read_line(&mut status).expect("the server of the oracles answers");
        assert_ne!(read, 0, "the server of the oracles has ended: {:?}", server.process.wait());
        *one = Some(server);
        status.trim_end().to_owned()
    }
}
