//! The steps of a long run, with headings, and what runs beside them.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::workspace;

/// Prints a heading for each step, with the time that the previous step took.
///
/// Nothing is printed after the last step, so a run ends with the output of that step.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    current: Option<(String, Instant)>,
}

/// A command that runs beside the steps, and whose output is shown when it has ended.
#[derive(Debug)]
pub(crate) struct Beside {
    name: String,
    child: Child,
    output: PathBuf,
}

impl Beside {
    /// Starts the command, which writes to a file below `target`.
    pub(crate) fn start(name: &str, command: &mut Command) -> Result<Self> {
        let words: Vec<_> = name.split([' ', ',']).filter(|word| !word.is_empty()).collect();
        let folder = workspace::target();
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let output = folder.join(format!("{}.log", words.join("-")));
        let cannot = || format!("{} cannot be written", output.display());
        let out = File::create(&output).with_context(cannot)?;
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        println!("\n-- {name} begins, and is shown when it has ended");
        let child = command.spawn().with_context(|| format!("{name} cannot be started"))?;
        Ok(Self { name: name.to_owned(), child, output })
    }

    /// Waits for the end, shows what was printed, and fails if the command has failed.
    pub(crate) fn finish(mut self) -> Result<()> {
        let status = self.child.wait().with_context(|| self.name.clone())?;
        let printed = fs::read(&self.output).with_context(|| self.output.display().to_string())?;
        println!("{}", String::from_utf8_lossy(&printed));
        ensure!(status.success(), "{} failed ({status})", self.name);
        Ok(())
    }
}

impl Steps {
    /// Runs one step and adds its name to errors.
    pub(crate) fn run<T>(&mut self, name: &str, step: impl FnOnce() -> Result<T>) -> Result<T> {
        match self.current.replace((name.to_owned(), Instant::now())) {
            Some((before, start)) => {
                println!("\n== {name}  ({before} took {:.1} s)", start.elapsed().as_secs_f64());
            }
            None => println!("== {name}"),
        }
        step().with_context(|| name.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn what_runs_beside_fails_where_it_is_finished() {
        let beside = |word: &str| {
            let mut command = Command::new("sh");
            Beside::start(word, command.args(["-c", word]))
        };
        beside("true").unwrap().finish().unwrap();
        let error = beside("exit 3").unwrap().finish().unwrap_err();
        assert!(error.to_string().starts_with("exit 3 failed"), "{error}");
    }

    #[test]
    fn the_error_of_a_step_names_the_step() {
        let mut steps = Steps::default();
        assert_eq!(steps.run("first", || Ok(1)).unwrap(), 1);
        let error = steps.run("second", || Err::<(), _>(anyhow!("it broke"))).unwrap_err();
        assert_eq!(format!("{error:#}"), "second: it broke");
    }
}
