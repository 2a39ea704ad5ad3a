//! The stages of a long run, with headings and times, and what runs beside them.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};

use crate::{paths, process};

/// Prints a heading for each stage, and remembers how long it took.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    ended: Vec<Ended>,
    /// The file that keeps the table, also of a run that has failed.
    table: Option<PathBuf>,
}

/// A stage that has ended, and its seconds.
#[derive(Debug)]
struct Ended {
    name: String,
    seconds: f64,
    has_passed: bool,
}

/// Commands, each with the name that headings and errors have.
pub(crate) type Commands = Vec<(String, Command)>;

/// Commands that run beside the stages, one after the other, and whose output is shown when they have ended.
#[derive(Debug)]
pub(crate) struct Lane {
    running: JoinHandle<Vec<(Ended, Result<()>)>>,
    waiting: Arc<Waiting>,
    output: PathBuf,
}

/// The commands that have not begun, each with its name.
type Waiting = Mutex<VecDeque<(String, Command)>>;

/// Takes the next command.
fn next(waiting: &Waiting) -> Option<(String, Command)> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
}

impl Lane {
    /// Starts the commands, each with its name, which write to a file below `target`. All of them run, also if one
    /// fails.
    pub(crate) fn start(name: &str, commands: Commands) -> Result<Self> {
        let words: Vec<_> = name.split([' ', ',']).filter(|word| !word.is_empty()).collect();
        let output = paths::make(paths::target())?.join(format!("{}.log", words.join("-")));
        let out = File::create(&output)
            .with_context(|| format!("{} cannot be written", output.display()))?;
        let waiting = Arc::new(Mutex::new(commands.into()));
        println!("\n-- {name} begins, and is shown when it has ended");
        let queue = Arc::clone(&waiting);
        let running = thread::spawn(move || {
            let run = |(name, mut command): (String, Command)| {
                timed(&name, || {
                    command.stdin(Stdio::null()).stderr(out.try_clone()?);
                    process::run_tests(&mut command, out.try_clone()?)
                })
            };
            std::iter::from_fn(|| next(&queue)).map(run).collect()
        });
        Ok(Self { running, waiting, output })
    }

    /// Runs the commands that have not begun as stages of this thread, so that neither waits for the other.
    pub(crate) fn share(&self, steps: &mut Steps) -> Result<()> {
        let commands = std::iter::from_fn(|| next(&self.waiting));
        let run = |(name, mut command): (String, Command)| steps.run(&name, || show(&mut command));
        all(commands.map(run).collect::<Vec<_>>())
    }

    /// Waits for the end.
    fn join(self, steps: &mut Steps) -> (PathBuf, Result<()>) {
        let joined = self.running.join().map_err(|_| anyhow!("the run has panicked"));
        let result = joined.and_then(|ended| {
            let (stages, results): (Vec<_>, Vec<_>) = ended.into_iter().unzip();
            steps.ended.extend(stages);
            all(results)
        });
        (self.output, result)
    }
}

/// Waits for the end of all lanes, shows the table of all stages and then what the lanes have printed, and fails if a
/// command has failed.
pub(crate) fn finish(lanes: impl IntoIterator<Item = Lane>, steps: &mut Steps) -> Result<()> {
    let (outputs, results): (Vec<_>, Vec<_>) =
        lanes.into_iter().map(|lane| lane.join(steps)).unzip();
    println!("\n{}", steps.table());
    for output in outputs {
        match fs::read(&output) {
            Ok(printed) => println!("{}", String::from_utf8_lossy(&printed)),
            Err(error) => println!("{} cannot be read: {error}", output.display()),
        }
    }
    all(results)
}

/// Runs tests, shows their output, and names in the error those that have failed.
pub(crate) fn show(command: &mut Command) -> Result<()> {
    process::run_tests(command, io::stdout())
}

/// Fails if one of the results is an error, with all of them.
pub(crate) fn all(results: impl IntoIterator<Item = Result<()>>) -> Result<()> {
    let errors = results.into_iter().filter_map(Result::err);
    let errors: Vec<_> = errors.map(|error| format!("{error:#}")).collect();
    ensure!(errors.is_empty(), "{}", errors.join("\n"));
    Ok(())
}

/// Runs a stage, and adds its name to its error.
fn timed<T>(name: &str, stage: impl FnOnce() -> Result<T>) -> (Ended, Result<T>) {
    let start = Instant::now();
    let result = stage().with_context(|| name.to_owned());
    let (seconds, has_passed) = (start.elapsed().as_secs_f64(), result.is_ok());
    (Ended { name: name.to_owned(), seconds, has_passed }, result)
}

impl Steps {
    /// Creates a run whose table is kept in a file of this name below `target`.
    pub(crate) fn kept_in(name: &str) -> Self {
        Self { ended: Vec::new(), table: Some(paths::target().join(name)) }
    }

    /// Runs one stage and adds its name to errors.
    pub(crate) fn run<T>(&mut self, name: &str, stage: impl FnOnce() -> Result<T>) -> Result<T> {
        println!("\n== {name}");
        let (ended, result) = timed(name, stage);
        println!("-- {name} took {:.1} s", ended.seconds);
        self.ended.push(ended);
        result
    }

    /// A line for each stage so far, with its seconds.
    fn table(&self) -> String {
        let width = self.ended.iter().map(|stage| stage.name.chars().count()).max().unwrap_or(0);
        let mut table = String::new();
        for Ended { name, seconds, has_passed } in &self.ended {
            let failed = if *has_passed { "" } else { "  FAILED" };
            let _infallible = writeln!(table, "{name:<width$} {seconds:>8.1} s{failed}");
        }
        table
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        let Some(file) = &self.table else { return };
        if let Err(error) = fs::write(file, self.table()) {
            eprintln!("{} cannot be written: {error}", file.display());
        }
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
                ((*word).to_owned(), command)
            });
            Lane::start(name, commands.collect()).unwrap()
        };
        finish([begin("beside 1", &["true", "true"])], &mut Steps::default()).unwrap();
        let lanes =
            [begin("beside 2", &["exit 3", "echo the second"]), begin("beside 4", &["true"])];
        let output = lanes[0].output.clone();
        let mut steps = Steps::default();
        let error = format!("{:#}", finish(lanes, &mut steps).unwrap_err());
        assert!(error.starts_with("exit 3: `sh -c"), "{error}");
        assert!(error.contains("exit status: 3"), "{error}");
        assert_eq!(fs::read_to_string(output).unwrap(), "the second\n");
        let table = steps.table();
        let lines: Vec<_> = table.lines().collect();
        assert!(lines[0].starts_with("exit 3") && lines[0].ends_with(" s  FAILED"), "{table}");
        assert!(lines[1].starts_with("echo the second  ") && lines[1].ends_with(" s"), "{table}");
        assert!(lines[2].starts_with("true  "), "{table}");
    }

    #[test]
    fn what_has_not_begun_is_shared() {
        // The first command of the two ends when another one has run, which only this thread can start.
        let folder = std::env::temp_dir().join(format!("xtask-share-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let words = ["until test -e second; do sleep 0.01; done", "touch second; exit 4"];
        let commands = words.map(|word| {
            let mut command = Command::new("sh");
            command.args(["-c", word]).current_dir(&folder);
            (word.to_owned(), command)
        });
        let beside = Lane::start("beside 3", commands.into()).unwrap();
        while beside.waiting.lock().unwrap().len() == 2 {
            thread::yield_now();
        }
        let mut steps = Steps::default();
        let error = format!("{:#}", beside.share(&mut steps).unwrap_err());
        assert!(error.contains("exit status: 4"), "{error}");
        finish([beside], &mut steps).unwrap();
        assert_eq!(steps.table().lines().count(), 2, "{}", steps.table());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn every_error_is_told() {
        let error = all([Err(anyhow!("one")), Ok(()), Err(anyhow!("another"))]).unwrap_err();
        assert_eq!(error.to_string(), "one\nanother");
        all([Ok(())]).unwrap();
    }

    #[test]
    fn the_error_of_a_stage_names_the_stage() {
        let mut steps = Steps::default();
        assert_eq!(steps.run("first", || Ok(1)).unwrap(), 1);
        let error = steps.run("second", || Err::<(), _>(anyhow!("it broke"))).unwrap_err();
        assert_eq!(format!("{error:#}"), "second: it broke");
    }
}
