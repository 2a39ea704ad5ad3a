//! A recipe as a process of its own, which can be killed.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, empty};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio, exit};
use std::thread::sleep;
use std::time::{Duration, Instant};

use safetensors::SafeTensors;
use serde_json::Value;
use tch_amp::checkpoint::CheckpointFolder;

use recipes::Ended;
use recipes::log::CSV;
use testkit::files::Folder;
use testkit::programs::this_test_by;

/// Has the arguments of the program, one a line.
const ARGUMENTS: &str = "TCH_AMP_TEST_ARGUMENTS";

/// Longer than any of these runs takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// A recipe with a small model, whose steps take a few milliseconds.
#[derive(Debug)]
pub struct Recipe {
    /// The test that calls [`run`].
    pub test: &'static str,
    /// Makes what it learns from in the file or folder `data` of a folder, which the option of this name gets, if there is
    /// one.
    pub prepare: fn(&Folder),
    pub data: Option<&'static str>,
    pub options: &'static str,
}

/// Runs a recipe in this process with the arguments that [`Recipe::start`] has passed on; does nothing otherwise.
pub fn run(main: fn(Vec<String>) -> anyhow::Result<Ended>) {
    let Ok(arguments) = env::var(ARGUMENTS) else { return };
    // A small model is faster with one thread, above all on a busy machine.
    tch::set_num_threads(1);
    match main(arguments.lines().map(str::to_owned).collect()) {
        // `ExitCode` cannot be taken apart, and a test cannot return one.
        Ok(Ended::Finished) => {}
        Ok(Ended::Interrupted { .. }) => exit(130),
        Err(error) => {
            eprintln!("{error:#}");
            exit(1);
        }
    }
}

impl Recipe {
    /// Starts the program in a folder, with further arguments.
    pub fn start(&self, folder: &Folder, more: &str) -> Running {
        self.start_with(folder, more, Stdio::piped())
    }

    /// Starts the program with this stderr.
    pub fn start_with(&self, folder: &Folder, more: &str, stderr: Stdio) -> Running {
        (self.prepare)(folder);
        let options = self.data.into_iter().map(|option| (option, "data"));
        let options = options.chain(["checkpoints", "logs", "out"].map(|name| (name, name)));
        let paths: Vec<String> = options
            .map(|(option, name)| format!("--{option}\n{}", folder.file(name).display()))
            .collect();
        let words: Vec<&str> =
            self.options.split_whitespace().chain(more.split_whitespace()).collect();
        // A test that a shell runs in the background ignores Ctrl-C, and so would the program.
        let child = this_test_by(&["env", "--default-signal=INT"], self.test)
            // With one thread, the harness prints the name of a test before it runs, and fails if stdout is closed.
            .env("RUST_TEST_THREADS", "2")
            .env(ARGUMENTS, format!("{}\n{}", paths.join("\n"), words.join("\n")))
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .unwrap();
        Running(child)
    }

    /// Starts the program and sends it a signal once its log has this step. On a busy machine it may have finished by
    /// then, and is tried again.
    pub fn start_and_signal(&self, folder: &Folder, more: &str, step: u64, signal: &str) -> Output {
        for _ in 0..10 {
            let mut run = self.start(folder, more);
            run.wait_for(step, folder);
            run.signal(signal);
            let output = run.output();
            if !output.status.success() {
                return output;
            }
            for name in ["checkpoints", "logs"] {
                fs::remove_dir_all(folder.file(name)).unwrap();
            }
            fs::remove_file(folder.file("out")).unwrap();
        }
        panic!("the run always finished before the signal");
    }
}

/// A process of the program, which does not outlive its test.
#[derive(Debug)]
pub struct Running(Child);

impl Running {
    /// Waits for its end.
    pub fn output(mut self) -> Output {
        let read = |mut pipe: Box<dyn std::io::Read + Send>| {
            std::thread::spawn(move || {
                let mut all = Vec::new();
                pipe.read_to_end(&mut all).unwrap();
                all
            })
        };
        // Of those that were taken before, nothing is read.
        let pipes = [
            self.0.stdout.take().map_or_else(|| read(Box::new(empty())), |it| read(Box::new(it))),
            self.0.stderr.take().map_or_else(|| read(Box::new(empty())), |it| read(Box::new(it))),
        ];
        let status = self.0.wait().unwrap();
        let [stdout, stderr] = pipes.map(|pipe| pipe.join().unwrap());
        Output { status, stdout, stderr }
    }

    /// Waits for its end, which must be a success.
    pub fn finish(self) -> String {
        let output = self.output();
        let [stdout, stderr] =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(output.status.success(), "{:?}\n{stdout}\n{stderr}", output.status);
        stdout
    }

    /// Closes the program's stdout after the lines that the test harness prints before it starts, as `| head` does.
    pub fn close_stdout(&mut self) {
        let mut lines = BufReader::new(self.0.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().starts_with("running 1 test")));
    }

    /// Closes the program's stderr after its first line.
    pub fn close_stderr(&mut self) {
        let mut lines = BufReader::new(self.0.stderr.take().unwrap()).lines();
        assert!(lines.next().is_some());
    }

    /// Waits until the log has a line of this step, or the run has ended.
    pub fn wait_for(&mut self, step: u64, folder: &Folder) {
        let end = Instant::now() + PATIENCE;
        while last_step(&folder.file("logs").join(CSV)) < step {
            assert!(Instant::now() < end, "step {step} was not reached");
            if self.0.try_wait().unwrap().is_some() {
                return;
            }
            sleep(Duration::from_millis(1));
        }
    }

    /// Sends a signal by its name, unless the process has ended.
    pub fn signal(&mut self, name: &str) {
        if self.0.try_wait().unwrap().is_none() {
            let command = format!("kill -{name} {}", self.0.id());
            assert!(Command::new("sh").args(["-c", &command]).status().unwrap().success());
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop((self.0.kill(), self.0.wait()));
    }
}

/// The last step of a log, or 0.
fn last_step(csv: &Path) -> u64 {
    let text = fs::read_to_string(csv).unwrap_or_default();
    // The last line may not be complete.
    let complete = text.rsplit_once('\n').map_or("", |(complete, _)| complete);
    let last = complete.lines().last().and_then(|line| line.split(',').next()?.parse().ok());
    last.unwrap_or(0)
}

/// The lines of a log, with the columns that do not depend on the time and on the machine.
pub fn losses(folder: &Folder) -> Vec<Vec<String>> {
    let text = fs::read_to_string(folder.file("logs").join(CSV)).unwrap();
    // The step, the losses, the learning rate, the norm and the scale come first.
    text.lines().map(|line| line.split(',').take(6).map(str::to_owned).collect()).collect()
}

/// What the last checkpoint contains: the bytes of each tensor, and the other parts but for those that have times.
pub type State = (BTreeMap<String, Vec<u8>>, Value);

fn last_state(folder: &Folder) -> State {
    let files = CheckpointFolder::new(folder.file("checkpoints")).unwrap().files().unwrap();
    let last = files.last().unwrap();
    assert_eq!(last.step, 40);
    let bytes = fs::read(&last.path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let text = header.metadata().as_ref().unwrap().get("tch_amp").unwrap();
    let mut parts = serde_json::from_str::<Value>(text).unwrap()["parts"].take();
    for name in ["log", "seconds"] {
        parts.as_object_mut().unwrap().remove(name);
    }
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = tensors.iter().filter(|(name, _)| !name.starts_with("log/"));
    let tensors = tensors.map(|(name, tensor)| (name.to_owned(), tensor.data().to_vec()));
    (tensors.collect(), parts)
}

/// Fails unless both runs have the same numbers in all steps and at the end.
pub fn assert_same(run: &Folder, left_alone: &Folder, what: &str) {
    let (tensors, parts) = assert_equal(run, left_alone, what);
    assert!(tensors.len() > 60 && parts.get("schedule").is_some(), "{what}: {parts}");
}

/// Does the work of [`assert_same`] for any recipe. Returns the state at the end.
pub fn assert_equal(run: &Folder, left_alone: &Folder, what: &str) -> State {
    let (losses, expected) = (losses(run), losses(left_alone));
    assert_eq!(expected.len(), 41, "{what}");
    for (line, expected) in losses.iter().zip(&expected) {
        assert_eq!(line, expected, "{what}");
    }
    assert_eq!(losses.len(), expected.len(), "{what}");
    let ((tensors, parts), (expected, others)) = (last_state(run), last_state(left_alone));
    assert_eq!(tensors.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    let different: Vec<_> = tensors.iter().filter(|(name, t)| expected[*name] != **t).collect();
    let names: Vec<_> = different.iter().map(|(name, _)| name).collect();
    assert!(names.is_empty(), "{what}: these tensors differ: {names:?}");
    assert_eq!(parts, others, "{what}");
    (tensors, parts)
}
