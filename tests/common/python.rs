//! Python's torch of the linked version, run as an oracle.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The folder that holds the crate's files: the repository, or `TCH_AMP_ROOT` where the tests were carried elsewhere.
pub fn root() -> PathBuf {
    std::env::var_os("TCH_AMP_ROOT")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from)
}

/// A script of `tests/oracle/` and the Python that runs it.
#[derive(Debug)]
pub struct Oracle {
    python: PathBuf,
    script: PathBuf,
}

impl Oracle {
    /// The oracle `tests/oracle/<name>`, or `None`, with a printed reason, where no Python is set.
    ///
    /// `cargo xtask test` sets `TCH_AMP_PYTHON`, and `TCH_AMP_REQUIRE_PYTHON=1`, which turns the skip into a failure.
    pub fn find(name: &str) -> Option<Self> {
        let Some(python) = std::env::var_os("TCH_AMP_PYTHON") else {
            assert!(
                !super::is_set("TCH_AMP_REQUIRE_PYTHON"),
                "TCH_AMP_REQUIRE_PYTHON is set, but TCH_AMP_PYTHON names no Python"
            );
            super::skipped("set TCH_AMP_PYTHON to a Python with torch, or run `cargo xtask test`");
            return None;
        };
        Some(Self { python: python.into(), script: root().join("tests/oracle").join(name) })
    }

    /// Runs the script with `args`, gives it `input`, and returns what it printed.
    pub fn run(&self, args: &[&str], input: &str) -> String {
        let mut child = self
            .command()
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("TCH_AMP_PYTHON starts");
        let mut stdin = child.stdin.take().expect("stdin is piped");
        let input = input.to_owned();
        // A thread of its own: a script that answers while it reads would fill the pipe and wait for us.
        let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
        let output = child.wait_with_output().expect("the oracle ends");
        assert!(output.status.success(), "the oracle {} failed", self.script.display());
        writer.join().expect("the writer ends").expect("the oracle reads its input");
        String::from_utf8(output.stdout).expect("the oracle prints UTF-8")
    }

    /// The command that runs the script, for a test that talks with it while it runs.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.python);
        command.arg("-B").arg(&self.script).env_remove("LD_LIBRARY_PATH");
        // torch warns about every missing optional package, and no oracle needs one.
        command.env("PYTHONWARNINGS", "ignore:Failed to initialize NumPy");
        command
    }

    /// Where the script stands.
    pub fn script(&self) -> &Path {
        &self.script
    }
}
