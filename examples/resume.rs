//! A training run that is killed and resumes from its newest checkpoint, with the same losses as an uninterrupted run.
//!
//! `cargo run --example resume`

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, id};
use std::time::Duration;

use anyhow::{Result, ensure};
use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::checkpoint::{Checkpoint, CheckpointFolder, Rng};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{GradScaler, autocast, optim};

const STEPS: u64 = 1000;
/// The number of steps from one checkpoint to the next.
const INTERVAL: u64 = 10;
const KILLED_AFTER: u64 = 50;
/// The environment variable that makes a child of this program train in a folder.
const FOLDER: &str = "TCH_AMP_EXAMPLE_FOLDER";

/// The whole state of a run.
struct Run {
    vs: nn::VarStore,
    net: nn::SequentialT,
    opt: optim::Optimizer,
    scaler: GradScaler,
    losses: Vec<f64>,
}

impl Run {
    fn new(device: Device) -> Result<Self> {
        tch::manual_seed(7);
        let vs = nn::VarStore::new(device);
        let root = vs.root();
        let net = nn::seq_t()
            .add(nn::linear(&root / "hidden", 8, 32, Default::default()))
            .add_fn(Tensor::relu)
            .add_fn_t(|xs, train| xs.dropout(0.1, train))
            .add(nn::linear(&root / "out", 32, 1, Default::default()));
        let opt = optim::AdamW::default().build(&vs, 1e-3)?;
        // A short interval, so that the scale changes during the run.
        let config = GradScalerConfig { growth_interval: 50, ..Default::default() };
        Ok(Self { vs, net, opt, scaler: config.build(device)?, losses: Vec::new() })
    }

    /// Trains on one batch of random numbers.
    fn step(&mut self) -> Result<()> {
        let xs = Tensor::randn([32, 8], (Kind::Float, self.vs.device()));
        let ys = xs.sum_dim_intlist(1, true, Kind::Float).sin();
        self.opt.zero_grad()?;
        let loss = || self.net.forward_t(&xs, true).mse_loss(&ys, Reduction::Mean);
        let loss = autocast(self.vs.device(), loss)?;
        self.scaler.backward(&loss)?;
        drop(self.scaler.step(&mut self.opt)?);
        self.scaler.update()?;
        self.losses.push(loss.double_value(&[]));
        Ok(())
    }

    fn checkpoint(&mut self) -> tch_amp::Result<Checkpoint> {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add("model", &self.vs)?;
        checkpoint.add("optimizer", &mut self.opt)?;
        checkpoint.add("scaler", &mut self.scaler)?;
        checkpoint.add("rng", Rng(self.vs.device()))?;
        checkpoint.add_value("losses", &self.losses)?;
        Ok(checkpoint)
    }

    fn restore(&mut self, checkpoint: &Checkpoint) -> tch_amp::Result<()> {
        let losses = checkpoint.value("losses")?;
        checkpoint
            .restore()
            .add("model", &self.vs)
            .add("optimizer", &mut self.opt)
            .add("scaler", &mut self.scaler)
            .add("rng", Rng(self.vs.device()))
            .apply()?;
        self.losses = losses;
        Ok(())
    }
}

/// The training program. When it is started again, it resumes from its newest checkpoint.
fn train(path: &Path) -> Result<()> {
    let folder = CheckpointFolder::new(path)?.keep_last(2);
    // The network is too small for several threads.
    tch::set_num_threads(1);
    let mut run = Run::new(Device::cuda_if_available())?;
    let start = folder.resume_or_start(|checkpoint| run.restore(checkpoint))?;
    for damaged in &start.damaged {
        eprintln!("{damaged}. The run goes on from an older checkpoint instead.");
    }
    println!("{}: from step {}", path.display(), start.step);
    for step in start.step..STEPS {
        run.step()?;
        let done = step + 1;
        if done % INTERVAL == 0 {
            folder.save(done, &run.checkpoint()?)?;
        }
    }
    Ok(())
}

/// Kills a run once it has saved step `KILLED_AFTER`, and returns the step of its newest checkpoint.
fn kill(mut child: Child, folder: &CheckpointFolder) -> Result<u64> {
    let newest = || -> Result<u64> { Ok(folder.files()?.last().map_or(0, |file| file.step)) };
    while newest()? < KILLED_AFTER && child.try_wait()?.is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    // On Unix this is SIGKILL, so the process cannot clean up.
    child.kill()?;
    ensure!(!child.wait()?.success(), "the run ended before it could be killed");
    newest()
}

fn losses(folder: &CheckpointFolder) -> Result<Vec<f64>> {
    let found = folder.latest()?;
    Ok(found.map_or(Ok(Vec::new()), |found| found.checkpoint.value("losses"))?)
}

/// Runs the training program three times, as children of this program with `arguments`, and compares the losses.
///
/// # Errors
///
/// If a loss differs, or anything fails on the way.
pub fn run(arguments: &[&str]) -> Result<()> {
    if let Some(folder) = env::var_os(FOLDER) {
        return train(Path::new(&folder));
    }
    let temporary = Temporary(env::temp_dir().join(format!("tch-amp-resume-{}", id())));
    let start = |path: &Path| -> Result<Child> {
        let mut command = Command::new(env::current_exe()?);
        Ok(command.args(arguments).env(FOLDER, path).spawn()?)
    };
    let (calm, killed) = (temporary.0.join("left-alone"), temporary.0.join("killed"));
    ensure!(start(&calm)?.wait()?.success(), "the uninterrupted run failed");

    let folder = CheckpointFolder::new(&killed)?;
    let at = kill(start(&killed)?, &folder)?;
    println!("killed after the checkpoint of step {at}");
    ensure!((KILLED_AFTER..STEPS).contains(&at), "killed at step {at} of {STEPS}");
    ensure!(start(&killed)?.wait()?.success(), "the resumed run failed");

    let (expected, got) = (losses(&CheckpointFolder::new(&calm)?)?, losses(&folder)?);
    println!("{:>8} {:>13} {:>12}", "step", "uninterrupted", "resumed");
    for step in [1, at, at + 1, at + 2, STEPS] {
        let index = step as usize - 1;
        println!("{step:>8} {:>13.9} {:>12.9}", expected[index], got[index]);
    }
    ensure!(expected.len() as u64 == STEPS && got == expected, "the losses differ");
    println!("All {STEPS} losses are the same, bit by bit.");
    Ok(())
}

#[allow(dead_code, reason = "a test calls `run`")]
fn main() -> Result<()> {
    run(&[])
}

/// A folder that is removed when this is dropped.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}
