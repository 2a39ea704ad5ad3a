//! A rank of a short training run, which prints how it has ended.

use std::process::{Command, Stdio, exit};
use std::time::Duration;

use tch::nn::{self, Module};
use tch::{Device, Kind};
use tch_amp::distributed::{DistributedDataParallel, DistributedError, GroupConfig, ProcessGroup};
use tch_amp::optim::Sgd;
use tch_amp::{Error, GradScaler, Result, autocast};

use super::super::{numbers, system::children};
use testkit::bits::hex;
use testkit::programs::{number, this_test};

/// The number of ranks that a process starts, or 0 if it is a rank itself.
const SPAWN: &str = "TCH_AMP_TEST_SPAWN";
/// The timeout of the group, in milliseconds.
const TIMEOUT: &str = "TCH_AMP_TEST_TIMEOUT";
/// The exit status of a rank that ends in a typed error.
pub const FAILED: i32 = 7;

const STEPS: i64 = 250;

/// A process that starts this many ranks, or that is one.
pub fn command(timeout: Duration, spawns: usize) -> Command {
    let mut command = this_test("distributed::kills::rank::process");
    command.env(TIMEOUT, timeout.as_millis().to_string()).env(SPAWN, spawns.to_string());
    command.env("OMP_NUM_THREADS", "1").stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
#[ignore = "a process of the other tests"]
fn process() {
    let Some(timeout) = number(TIMEOUT) else { return };
    tch::set_num_threads(1);
    let options = GroupConfig { timeout: Duration::from_millis(timeout), ..Default::default() };
    let spawned = match number(SPAWN).unwrap() {
        0 => options.from_env().map(Some),
        size => options.spawn(size as usize),
    };
    match (spawned, std::env::var("RANK")) {
        (Ok(Some(group)), Ok(rank)) => end(&rank, train(&group)),
        (Err(error), Ok(rank)) => end(&rank, Err(error)),
        (Ok(group), _) => println!("parent: {}", group.map_or("finished", |_| "a rank")),
        (Err(error), _) => println!("parent: {error}"),
    }
    println!("left: {}", children(std::process::id()).len());
    exit(0);
}

/// Prints how a rank has ended, and ends it.
fn end(rank: &str, result: Result<String>) -> ! {
    match result {
        Ok(weights) => println!("rank {rank}: weights {weights}"),
        Err(error) => {
            println!("rank {rank}: {} {error}", kind(&error));
            exit(FAILED);
        }
    }
    exit(0)
}

/// The only errors that the end of another rank may cause.
fn kind(error: &Error) -> &'static str {
    match error {
        Error::Distributed(DistributedError::Communication { .. }) => "Communication",
        Error::Distributed(DistributedError::Store { .. }) => "Store",
        _ => "unexpected",
    }
}

/// Trains a tiny model, and returns the bits of its weights.
fn train(group: &ProcessGroup) -> Result<String> {
    let vs = nn::VarStore::new(Device::Cpu);
    let hidden = nn::linear(vs.root() / "hidden", 6, 8, Default::default());
    let out = nn::linear(vs.root() / "out", 8, 3, Default::default());
    for (i, variable) in vs.trainable_variables().iter_mut().enumerate() {
        tch::no_grad(|| variable.copy_(&numbers(&variable.size(), i as i64)));
    }
    let mut ddp = DistributedDataParallel::new(group, &vs)?;
    let mut opt = Sgd { momentum: 0.5, ..Default::default() }.build(&vs, 0.01)?;
    let mut scaler = GradScaler::new(Device::Cpu)?;
    for step in 0..STEPS {
        opt.zero_grad()?;
        let xs = numbers(&[4, 6], 100 * step + group.rank() as i64);
        let loss = ddp.forward(|| {
            autocast(Device::Cpu, || out.forward(&hidden.forward(&xs).tanh()))
                .map(|out| out.square().mean(Kind::Float))
        })??;
        ddp.backward_scaled(&mut scaler, &loss)?;
        drop(scaler.step(&mut opt)?);
        scaler.update()?;
    }
    group.barrier()?;
    Ok(vs.trainable_variables().iter().map(hex).collect())
}
