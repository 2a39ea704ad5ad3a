//! The steps of a long run, with headings, and what runs beside them.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use anyhow::{Context, Result, anyhow};

use crate::{paths, process};

/// Prints a heading for each step, with the time that the previous step took.
///
/// Nothing is printed after the last step, so a run ends with the output of that step.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    current: Option<(String, Instant)>,
}

/// Commands that run beside the steps, one after the other, and whose output is shown when they have ended.
#[derive(Debug)]
pub(crate) struct Beside {
    name: String,
    running: JoinHandle<Result<()>>,
    output: PathBuf,
}

impl Beside {
    /// Starts the commands, which write to a file below `target`. All of them run, also if one fails.
    pub(crate) fn start(name: &str, commands: impl IntoIterator<Item = Command>) -> Result<Self> {
        let words: Vec<_> = name.split([' ', ',']).filter(|word| !word.is_empty()).collect();
        let folder = paths::target();
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let output = folder.join(format!("{}.log", words.join("-")));
        let cannot = || format!("{} cannot be written", output.display());
        let out = File::create(&output).with_context(cannot)?;
        let mut commands: Vec<_> = commands.into_iter().collect();
        for command in &mut commands {
            command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out.try_clone()?);
        }
        println!("\n-- {name} begins, and is shown when it has ended");
        let running = thread::spawn(move || {
            let ended = commands.into_iter().map(|mut command| process::run(&mut command));
            ended.collect::<Vec<_>>().into_iter().collect()
        });
        Ok(Self { name: name.to_owned(), running, output })
    }

    /// Waits for the end, shows what was printed, and fails if a command has failed.
    pub(crate) fn finish(self) -> Result<()> {
        let ended = self.running.join().unwrap_or_else(|_| Err(anyhow!("the run has panicked")));
        let printed = fs::read(&self.output).with_context(|| self.output.display().to_string())?;
        println!("{}", String::from_utf8_lossy(&printed));
        ended.context(self.name)
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

    #[test]
    fn what_runs_beside_runs_to_the_end_and_fails_where_it_is_finished() {
        let begin = |name: &str, words: &[&str]| {
            let commands = words.iter().map(|word| {
                let mut command = Command::new("sh");
                command.args(["-c", word]);
                command
            });
            Beside::start(name, commands.collect::<Vec<_>>()).unwrap()
        };
        begin("beside 1", &["true", "true"]).finish().unwrap();
        let beside = begin("beside 2", &["exit 3", "echo the second"]);
        let output = beside.output.clone();
        let error = format!("{:#}", beside.finish().unwrap_err());
        assert!(error.starts_with("beside 2: `sh -c"), "{error}");
        assert!(error.contains("exit status: 3"), "{error}");
        assert_eq!(fs::read_to_string(output).unwrap(), "the second\n");
    }

    #[test]
    fn the_error_of_a_step_names_the_step() {
        let mut steps = Steps::default();
        assert_eq!(steps.run("first", || Ok(1)).unwrap(), 1);
        let error = steps.run("second", || Err::<(), _>(anyhow!("it broke"))).unwrap_err();
        assert_eq!(format!("{error:#}"), "second: it broke");
    }
}
