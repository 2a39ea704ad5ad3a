//! Ranks that average over NCCL: one alone, and two as processes that share a real GPU.

use std::process::Child;

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::distributed::{DistributedDataParallel, ProcessGroup};
use tch_amp::optim::AdamW;
use tch_amp::scaler::{GradScalerConfig, StepCounter};

use super::processes::{free_port, spawn_rank};
use super::ranks;
use testkit::simulation::is_model;
use testkit::{gpus, to_f64};

const TASK: &str = "nccl";
const ROWS: i64 = 32;
const ITERATIONS: usize = 20;
/// The iteration in which the loss of one rank is infinite.
const OVERFLOW: usize = 7;

/// What a rank is to print if this is its task.
pub fn run(group: &ProcessGroup, task: &str) -> Option<String> {
    (task == TASK).then(|| format!("{:?}", train(group, Device::Cuda(0))))
}

/// Trains on every second row. Returns the weights, the scale and the number of skipped steps.
fn train(group: &ProcessGroup, device: Device) -> Vec<f64> {
    let vs = VarStore::new(device);
    let net = nn::linear(vs.root(), 4, 1, nn::LinearConfig { bias: false, ..Default::default() });
    let numbers = Tensor::arange(ROWS * 4, (Kind::Float, Device::Cpu)).view([ROWS, 4]);
    drop(tch::no_grad(|| net.ws.shallow_clone().fill_(0.5)));
    let all = (numbers * 0.7).sin();
    let xs = all.slice(0, group.rank() as i64, ROWS, group.size() as i64).to_device(device);
    let ys = xs.sum_dim_intlist([1i64].as_slice(), true, Kind::Float);
    let mut ddp = DistributedDataParallel::new(group, &vs).unwrap();
    let mut optimizer = AdamW::default().build(&vs, 0.05).unwrap();
    let config = GradScalerConfig { init_scale: 1024.0, ..Default::default() };
    let (mut scaler, mut counter) = (config.build(device).unwrap(), StepCounter::default());
    for iteration in 0..ITERATIONS {
        optimizer.zero_grad().unwrap();
        let is_bad = iteration == OVERFLOW && group.rank() + 1 == group.size();
        let factor = if is_bad { f64::INFINITY } else { 1.0 };
        let loss = ddp.forward(|| (xs.apply(&net) - &ys).square().mean(Kind::Float) * factor);
        ddp.backward_scaled(&mut scaler, &loss.unwrap()).unwrap();
        let outcome = scaler.step_clip_norm(&mut optimizer, 1.0).unwrap();
        counter.record(&outcome);
        scaler.update().unwrap();
    }
    let mut numbers = to_f64(&net.ws);
    numbers.push(scaler.get_scale().unwrap());
    numbers.push(counter.skipped().unwrap() as f64);
    numbers
}

/// NCCL refuses two ranks with one GPU of a host, so each says that it is a host of its own.
fn rank(number: usize, size: usize, port: &str, fault: &str) -> Child {
    let (host, fault) = (number.to_string(), ("TCH_AMP_PLANTED_FAULT", fault));
    let own = [("NCCL_HOSTID", &host[..]), ("NCCL_SOCKET_IFNAME", "lo"), fault];
    spawn_rank(TASK, number, size, port, &own)
}

/// Trains over NCCL with a planted fault, on as many ranks, and over Gloo on the CPU.
fn compare(size: usize, fault: &str) {
    if gpus().is_empty() || is_model() {
        return;
    }
    let port = free_port();
    let children: Vec<_> = (0..size).map(|number| rank(number, size, &port, fault)).collect();
    let lines = children.into_iter().map(|child| {
        let output = child.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!errors.contains("destroy_process_group"), "{said}{errors}");
        let line = said.lines().find_map(|line| line.split_once("rank: "));
        line.unwrap_or_else(|| panic!("a rank printed nothing: {errors}")).1.to_owned()
    });
    let lines: Vec<_> = lines.collect();
    assert!(lines.iter().all(|line| *line == lines[0]), "{lines:?}");
    let there: Vec<f64> = serde_json::from_str(&lines[0]).unwrap();
    let here = ranks(size, |group| train(&group, Device::Cpu)).swap_remove(0);
    let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-4;
    assert!(there.iter().zip(&here).all(near), "{there:?} over NCCL and {here:?} over Gloo");
    assert_eq!(here[4..], [512.0, 1.0]);
}

#[test]
fn one_rank_skips_and_steps_over_nccl_as_over_gloo() {
    compare(1, "none");
}

#[test]
fn two_ranks_skip_and_step_over_nccl_as_over_gloo() {
    compare(2, "none");
}

#[test]
fn a_rank_whose_shutdown_fails_ends_without_a_warning() {
    compare(1, "nccl_shutdown");
}

#[test]
fn a_group_that_ends_beside_its_last_callback_ends_without_a_warning() {
    compare(1, "late_callback");
}
