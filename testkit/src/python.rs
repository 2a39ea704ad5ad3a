//! Python's torch, of the version that is linked, as an oracle.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

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
        let mut child = self
            .command()
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("TCH_AMP_PYTHON starts");
        let mut stdin = child.stdin.take().expect("stdin is piped");
        let input = input.to_owned();
        // On a thread of its own: otherwise, a script that answers while it reads could fill the pipe and block both
        // processes.
        let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
        let output = child.wait_with_output().expect("the oracle exits");
        assert!(output.status.success(), "the oracle {} failed", self.script.display());
        writer.join().expect("the writer does not panic").expect("the oracle reads its input");
        String::from_utf8(output.stdout).expect("the oracle prints UTF-8")
    }

    /// The command that runs the script, for a test that exchanges data with it while it runs.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.python);
        command.arg("-B").arg(&self.script).env_remove("LD_LIBRARY_PATH");
        // torch warns about missing optional packages, which no oracle needs.
        command.env("PYTHONWARNINGS", "ignore:Failed to initialize NumPy");
        command
    }

    /// The path of the script.
    pub fn script(&self) -> &Path {
        &self.script
    }
}
