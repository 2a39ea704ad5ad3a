//! The recipe `gpt` as a process of its own, which can be killed.

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio, exit};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::files::Folder;
use crate::gpt;
use crate::recipe::log::CSV;

/// Has the arguments of the program, one a line.
const ARGUMENTS: &str = "TCH_AMP_TEST_ARGUMENTS";

/// A small model, whose steps take a few milliseconds. It learns the text of [`prepare`].
const SMALL: &str = "--device cpu --width 64 --layers 2 --length 32 --rows 4 --steps 40 --log-every 1 --eval-every 10 \
                     --save-every 4 --sample 20";

/// Longer than any of these runs takes.
const PATIENCE: Duration = Duration::from_secs(120);

#[test]
#[ignore = "a program that other tests start"]
fn gpt_program() {
    let Ok(arguments) = env::var(ARGUMENTS) else { return };
    // A small model is faster with one thread, above all on a busy machine.
    tch::set_num_threads(1);
    match gpt::main(arguments.lines().map(str::to_owned)) {
        // `ExitCode` cannot be taken apart, and a test cannot return one.
        Ok(crate::recipe::Ended::Finished) => {}
        Ok(crate::recipe::Ended::Interrupted { .. }) => exit(130),
        Err(error) => {
            eprintln!("{error:#}");
            exit(1);
        }
    }
}

/// Starts the program in a folder, with further arguments.
pub fn start(folder: &Folder, more: &str) -> Running {
    fs::write(folder.file("text"), "    pub fn learn(&mut self) { self.read() }\n".repeat(300))
        .unwrap();
    let paths = ["text", "checkpoints", "logs", "out"]
        .map(|name| format!("--{name}\n{}", folder.file(name).display()));
    let words: Vec<&str> = SMALL.split_whitespace().chain(more.split_whitespace()).collect();
    let child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "program::gpt_program", "--ignored", "--nocapture"])
        .env(ARGUMENTS, format!("{}\n{}", paths.join("\n"), words.join("\n")))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    Running(child)
}

/// Starts the program and sends it a signal once its log has this step. On a busy machine it may have finished by then,
/// and is tried again.
pub fn start_and_signal(folder: &Folder, more: &str, step: u64, signal: &str) -> Output {
    for _ in 0..10 {
        let mut run = start(folder, more);
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

/// A process of the program, which does not outlive its test.
#[derive(Debug)]
pub struct Running(Child);

impl Running {
    /// Waits for its end.
    pub fn output(mut self) -> Output {
        let (stdout, stderr) = (self.0.stdout.take().unwrap(), self.0.stderr.take().unwrap());
        let read = |mut pipe: Box<dyn std::io::Read + Send>| {
            std::thread::spawn(move || {
                let mut all = Vec::new();
                pipe.read_to_end(&mut all).unwrap();
                all
            })
        };
        let pipes = [read(Box::new(stdout)), read(Box::new(stderr))];
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

    /// Waits until the log has a line of this step, or the run has ended.
    fn wait_for(&mut self, step: u64, folder: &Folder) {
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
    fn signal(&mut self, name: &str) {
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
