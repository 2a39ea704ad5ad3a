//! Schedules that a graph follows, beside a host that asks for every outcome.

use std::ops::Range;

use tch::{Device, Tensor};
use tch_amp::checkpoint::{Checkpoint, Stateful};
use tch_amp::graph::Captured;
use tch_amp::optim::Lion;
use tch_amp::schedule::{LinearWithWarmup, MultiStepLr, OneCycleLr, Schedule};

use crate::graph::training::{
    Program, Training, adamw, first_difference, overflows, take, take_fed, warm_up_and_cosine,
};
use crate::graph::{assert_refuses, gpu};
use testkit::files::Folder;

fn weights(training: &Training) -> Vec<Tensor> {
    let mut all: Vec<_> = training.vs.variables().into_iter().collect();
    all.sort_by(|(one, _), (other, _)| one.cmp(other));
    all.into_iter().map(|(_, weight)| weight.detach().to_device(Device::Cpu)).collect()
}

/// The weights after each iteration, with the schedule in the iterations of a graph.
fn on_device(
    program: Program,
    schedule: Schedule,
    iterations: usize,
    device: Device,
) -> (Training, Vec<Vec<Tensor>>) {
    let (mut training, mut graph) = Training::by_graph(program, device, 0);
    training.scheduler = Some(schedule.build(&mut training.opt).unwrap());
    let out = run(&mut training, &mut graph, 0..iterations);
    assert!(graph.is_captured());
    (training, out)
}

/// The same, with iterations that all run, and a host that waits for the outcome of each step.
fn on_host(
    program: Program,
    schedule: Schedule,
    iterations: usize,
    device: Device,
) -> (Training, Vec<Vec<Tensor>>) {
    let (mut training, mut graph) = Training::by_graph(program, device, 0);
    let mut scheduler = schedule.build(&mut training.opt).unwrap();
    let mut out = Vec::new();
    for i in 0..iterations {
        let lr = training.opt.lr(0).unwrap();
        training.lr = Some(lr);
        training.feed(i);
        graph.recapture();
        let replay = graph.replay(|| training.iteration()).unwrap();
        let outcome = replay.outcomes().unwrap().remove(0);
        assert_eq!(outcome.is_stepped().unwrap(), !overflows(i));
        scheduler.step(&mut training.opt, &outcome).unwrap();
        out.push(weights(&training));
    }
    training.scheduler = Some(scheduler);
    (training, out)
}

/// The steps that a schedule has followed and that were skipped, and its rates.
fn end(training: &mut Training) -> (u64, u64, Vec<f64>) {
    let scheduler = training.scheduler.as_mut().unwrap();
    scheduler.catch_up().unwrap();
    (scheduler.steps(), scheduler.skipped(), scheduler.lrs().to_vec())
}

fn same_for(program: Program, schedule: Schedule, iterations: usize) {
    let Some(gpu) = gpu() else { return };
    let (mut captured, there) = on_device(program, schedule.clone(), iterations, gpu.device);
    let (mut eager, here) = on_host(program, schedule.clone(), iterations, gpu.device);
    assert_eq!(first_difference(&there, &here), None, "{schedule:?}");
    let [one, other] = [&mut captured, &mut eager].map(|training| {
        let end = end(training);
        let groups = training.opt.state_dict().unwrap().param_groups;
        (end, groups.iter().map(|group| group.options.lr).collect::<Vec<_>>())
    });
    assert_eq!(one, other, "{schedule:?}");
    assert_eq!(one.0.1, (0..iterations).filter(|&i| overflows(i)).count() as u64);
}

/// More steps than the device's table has.
#[test]
fn a_schedule_follows_the_steps_that_were_taken() {
    same_for(adamw(), warm_up_and_cosine(), 1500);
}

/// Nothing reads from the device, so that the host may learn how far it has come when the table has ended.
#[test]
fn a_schedule_follows_a_device_of_which_nothing_is_read() {
    let Some(gpu) = gpu() else { return };
    let (program, iterations) = (adamw(), 2300);
    let scheduled = Program { is_scheduled: true, ..program };
    let (mut training, mut graph) = Training::by_graph(scheduled, gpu.device, 0);
    for i in 0..iterations {
        if i == 1500 {
            graph.recapture();
        }
        take(&mut training, &mut graph, i).unwrap();
    }
    let (mut eager, there) = on_host(program, warm_up_and_cosine(), iterations, gpu.device);
    assert_eq!(first_difference(&[weights(&training)], &there[iterations - 1..]), None);
    assert_eq!(end(&mut training), end(&mut eager));
}

#[test]
fn every_kind_of_schedule_and_rate_is_followed() {
    let schedules: [Schedule; 3] = [
        LinearWithWarmup { warmup_steps: 10, total_steps: 60 }.into(),
        MultiStepLr { milestones: vec![10, 20], gamma: 0.5 }.into(),
        warm_up_and_cosine(),
    ];
    for schedule in schedules {
        // Lion has the weight decay of each learning rate on the device, too.
        same_for(Program::new(Lion { weight_decay: 0.1, ..Lion::default() }), schedule, 50);
    }
}

#[test]
fn a_schedule_of_the_momentum_is_refused() {
    let Some(gpu) = gpu() else { return };
    let (mut training, mut graph) = Training::by_graph(adamw(), gpu.device, 0);
    training.scheduler = Some(OneCycleLr::new(0.1, 100).build(&mut training.opt).unwrap());
    assert_refuses(graph.replay(|| training.iteration()), "momentum");
}

#[test]
fn a_schedule_that_a_graph_takes_is_taken_by_nobody_else() {
    let Some(gpu) = gpu() else { return };
    let program = Program { is_scheduled: true, ..adamw() };
    let (mut training, mut graph) = Training::by_graph(program, gpu.device, 0);
    let take = |training: &mut Training, graph: &mut Captured<Tensor>, i: usize| {
        training.feed(i);
        let replay = graph.replay(|| training.iteration())?;
        Ok(replay.outcomes()?.remove(0))
    };
    for i in 0..8 {
        drop(take(&mut training, &mut graph, i).unwrap());
    }
    let outcome = take(&mut training, &mut graph, 8).unwrap();
    let mut scheduler = training.scheduler.take().unwrap();
    assert_refuses(scheduler.step(&mut training.opt, &outcome), "that a graph takes");
    scheduler.catch_up().unwrap();
    assert_eq!((scheduler.steps(), scheduler.skipped()), (8, 1));
    training.scheduler = Some(scheduler);
    // A rate that the program sets would be lost.
    training.opt.set_lr(0.5).unwrap();
    assert_refuses(take(&mut training, &mut graph, 9), "a schedule in the iteration");
    drop(graph);
    // Without the graph the schedule goes on from where it has come to.
    let mut scheduler = training.scheduler.take().unwrap();
    scheduler.step(&mut training.opt, &outcome).unwrap();
    assert_eq!(scheduler.steps(), 9);
    assert_eq!(training.opt.lr(0).unwrap(), scheduler.lrs()[0]);
}

#[test]
fn a_schedule_that_was_dropped_is_noticed() {
    let Some(gpu) = gpu() else { return };
    let program = Program { is_scheduled: true, ..adamw() };
    let (mut training, mut graph) = Training::by_graph(program, gpu.device, 5);
    training.scheduler = None;
    assert_refuses(take_fed(&mut training, &mut graph), "the schedule, which was dropped");
}

/// Takes iterations by a graph, and returns the weights after each.
fn run(
    training: &mut Training,
    graph: &mut Captured<Tensor>,
    iterations: Range<usize>,
) -> Vec<Vec<Tensor>> {
    let take = |i| {
        take(training, graph, i).unwrap();
        weights(training)
    };
    iterations.map(take).collect()
}

fn parts(training: &mut Training) -> [(&str, &mut dyn Stateful); 4] {
    let Training { vs, opt, scaler, scheduler, .. } = training;
    let scheduler = scheduler.as_mut().unwrap();
    [("model", vs), ("opt", opt), ("scaler", scaler), ("scheduler", scheduler)]
}

/// Iterations 5 and 22 skip their steps.
#[test]
fn a_schedule_that_is_resumed_after_a_skip_has_the_rates_of_an_uninterrupted_run() {
    let Some(gpu) = gpu() else { return };
    let program = Program { is_scheduled: true, ..adamw() };
    let run = |training: &mut Training, iterations: Range<usize>| {
        run(training, &mut Captured::new(gpu.device).unwrap(), iterations)
    };
    let whole = run(&mut Training::new(program, gpu.device), 0..40);
    for at in [1, 5, 6, 7, 12, 22, 23, 24] {
        let mut first = Training::new(program, gpu.device);
        run(&mut first, 0..at);
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_all(parts(&mut first)).unwrap();
        let (folder, name) = (Folder::new(), "run.safetensors");
        checkpoint.save(folder.file(name)).unwrap();
        let checkpoint = Checkpoint::load(folder.file(name)).unwrap();
        // In another process, and in the same one, which has gone on.
        run(&mut first, at..at + 9);
        for mut resumed in [Training::new(program, gpu.device), first] {
            checkpoint.restore().add_all(parts(&mut resumed)).apply().unwrap();
            let rest = run(&mut resumed, at..40);
            let different = first_difference(&rest, &whole[at..]);
            assert_eq!(different, None, "resumed at {at}");
        }
    }
}
