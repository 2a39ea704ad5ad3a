//! Counters, histories and counts of gradients that iterations of a graph record.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::{Device, Tensor};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::graph::Captured;
use tch_amp::insight::{HealthReport, HistoryReport, ScaleHealth, ScaleHistory};
use tch_amp::optim::{AdamW, Lion};
use tch_amp::scaler::StepCounter;
use tch_amp::{Error, Result};

use crate::common::simulation::Simulation;
use crate::training::{Program, Records, Training, Way, lr, overflows, warm_up_and_cosine};
use crate::{gpu, refusal};

/// The steps that a history of these tests remembers.
const CAPACITY: usize = 16;

/// What was counted and recorded, as a host reads it.
#[derive(Debug, PartialEq)]
struct Read {
    steps: String,
    in_a_row: u64,
    history: HistoryReport,
    health: HealthReport,
}

fn recorded(program: Program, device: Device) -> Training {
    let mut training = Training::new(program, device);
    training.records = Some(Records {
        steps: StepCounter::starting_at(100),
        history: ScaleHistory::new(CAPACITY).unwrap(),
        health: ScaleHealth::new(&training.vs),
    });
    training
}

fn take(training: &mut Training, graph: &mut Captured<Tensor>, i: usize) -> Result<()> {
    training.feed(i);
    graph.replay(|| training.iteration()).map(drop)
}

/// Polls the counts until they have arrived: the first call may only send for them.
fn count(steps: &mut StepCounter) -> (u64, u64, u64) {
    let mut read =
        || (steps.count().unwrap(), steps.skipped().unwrap(), steps.consecutive_skips().unwrap());
    for _ in 0..2 {
        let _sent = read();
        if tch::Cuda::is_available() {
            tch::Cuda::synchronize(0);
        }
    }
    let counts = read();
    assert_eq!(steps.pending(), 0);
    counts
}

fn read(training: &mut Training) -> Read {
    let Records { steps, history, health } = training.records.as_mut().unwrap();
    let (_, _, in_a_row) = count(steps);
    let (history, health) = (history.report().unwrap(), health.report().unwrap());
    Read { steps: steps.to_string(), in_a_row, history, health }
}

/// The records after each iteration of a graph that is captured or, if not `captures`, runs each time.
fn train(program: Program, device: Device, iterations: usize, captures: bool) -> Vec<Read> {
    let mut training = recorded(program, device);
    let mut graph = Captured::new(device).unwrap();
    let take = |i| {
        if !captures {
            graph.recapture();
        }
        take(&mut training, &mut graph, i).unwrap();
        read(&mut training)
    };
    (0..iterations).map(take).collect()
}

fn same_records(way: Way, iterations: usize) -> Vec<Read> {
    let Some(gpu) = gpu() else { return Vec::new() };
    let program = Program { way, ..Program::new(AdamW::default()) };
    let [eager, replayed] =
        [false, true].map(|captures| train(program, gpu.device, iterations, captures));
    for (i, (one, other)) in eager.iter().zip(&replayed).enumerate() {
        assert_eq!(one, other, "{way:?}, iteration {i}");
    }
    replayed
}

#[test]
fn every_way_of_stepping_is_recorded() {
    for way in [Way::ClipNorm, Way::UnscaleAndClip, Way::UnlessSpike] {
        let Some(last) = same_records(way, 60).pop() else { return };
        assert_eq!((last.history.total, last.history.steps.len()), (60, CAPACITY), "{way:?}");
        assert_eq!(last.health.observed, 60, "{way:?}");
        let has_norms = last.history.steps.iter().any(|step| step.norm.is_some());
        assert_eq!(has_norms, way != Way::UnscaleAndClip, "{way:?}");
    }
}

#[test]
fn a_thousand_replays_record_what_iterations_record() {
    let Some(last) = same_records(Way::Step, 1000).pop() else { return };
    assert_eq!(last.steps, "1041 steps taken, 59 skipped (at most 1 in a row)");
    assert_eq!((last.history.total, last.health.observed), (1000, 1000));
}

/// Beside a loop of the host: overflows, rates, the growth and the backoff of the scale.
#[test]
fn replays_record_overflows_scales_and_rates() {
    let Some(gpu) = gpu() else { return };
    let mut training = recorded(Program::new(AdamW::default()), gpu.device);
    let mut graph = Captured::new(gpu.device).unwrap();
    let (mut scale, mut tracker, mut scales) = (1024.0, 0, Vec::new());
    for i in 0..60 {
        take(&mut training, &mut graph, i).unwrap();
        scales.push(scale);
        tracker = if overflows(i) { 0 } else { tracker + 1 };
        if overflows(i) {
            scale /= 2.0;
        } else if tracker == 11 {
            (scale, tracker) = (scale * 2.0, 0);
        }
        let Read { steps, in_a_row, history, .. } = read(&mut training);
        let skips = (0..=i).filter(|&i| overflows(i)).count();
        let in_all = if skips == 0 { String::new() } else { " (at most 1 in a row)".to_owned() };
        assert_eq!(steps, format!("{} steps taken, {skips} skipped{in_all}", 101 + i - skips));
        assert_eq!(in_a_row, u64::from(overflows(i)));
        assert_eq!(history.total, i as u64 + 1);
        for step in history.steps {
            let at = step.step as usize - 1;
            assert_eq!(step.skipped.is_some(), overflows(at), "step {at} of {i}");
            assert_eq!(step.scale, scales[at]);
            assert_eq!(step.learning_rate, f64::from(lr(at) as f32));
            assert_eq!(step.loss.is_some(), !overflows(at));
        }
    }
    assert!(graph.is_captured());
}

#[test]
fn the_rates_of_a_schedule_are_recorded() {
    let Some(gpu) = gpu() else { return };
    let mut training = recorded(Program::new(Lion::default()), gpu.device);
    training.scheduler = Some(warm_up_and_cosine().build(&mut training.opt).unwrap());
    let mut graph = Captured::new(gpu.device).unwrap();
    let mut plain = Training::new(Program::new(Lion::default()), gpu.device);
    let mut scheduler = warm_up_and_cosine().build(&mut plain.opt).unwrap();
    let mut lrs = Vec::new();
    for i in 0..CAPACITY {
        take(&mut training, &mut graph, i).unwrap();
        lrs.push(f64::from(scheduler.lrs()[0] as f32));
        if !overflows(i) {
            scheduler.advance(&mut plain.opt).unwrap();
        }
    }
    let recorded: Vec<_> =
        read(&mut training).history.steps.iter().map(|step| step.learning_rate).collect();
    assert_eq!(recorded, lrs);
}

/// Iterations without the graph, captures anew, and two graphs in turns.
#[test]
fn whoever_takes_an_iteration_it_is_recorded_once() {
    let Some(gpu) = gpu() else { return };
    let program = Program { way: Way::ClipNorm, ..Program::new(AdamW::default()) };
    let mut training = recorded(program, gpu.device);
    let mut one = Captured::new(gpu.device).unwrap();
    let mut other = Captured::new(gpu.device).unwrap();
    for i in 0..60 {
        training.feed(i);
        match i % 5 {
            0 if i > 8 => drop(training.iteration().unwrap()),
            1 | 2 => drop(one.replay(|| training.iteration()).unwrap()),
            _ => drop(other.replay(|| training.iteration()).unwrap()),
        }
        if i == 30 {
            one.recapture();
        }
        let Read { steps, in_a_row, history, health } = read(&mut training);
        let skips = (0..=i).filter(|&i| overflows(i)).count();
        assert!(
            steps.starts_with(&format!("{} steps taken, {skips} skipped", 101 + i - skips)),
            "{steps}"
        );
        assert_eq!(in_a_row, u64::from(overflows(i)));
        assert_eq!((history.total, health.observed), (i as u64 + 1, i as u64 + 1));
        let skipped: Vec<_> = history.steps.iter().map(|step| step.skipped.is_some()).collect();
        let first = (i + 1).saturating_sub(CAPACITY);
        assert_eq!(skipped, (first..=i).map(overflows).collect::<Vec<_>>());
    }
    assert!(one.is_captured() && other.is_captured());
}

/// Steps of which the host did not know when the device began to count.
#[test]
fn steps_before_the_graph_are_counted_with_those_of_replays() {
    let Some(gpu) = gpu() else { return };
    let mut training = recorded(Program::new(AdamW::default()), gpu.device);
    let mut graph = Captured::new(gpu.device).unwrap();
    for i in 4..8 {
        training.feed(i);
        drop(training.iteration().unwrap());
    }
    for i in 22..28 {
        take(&mut training, &mut graph, i).unwrap();
    }
    let read = read(&mut training);
    assert_eq!(read.steps, "108 steps taken, 2 skipped (at most 1 in a row)");
    assert_eq!((read.history.total, read.health.observed), (10, 10));
    let skipped: Vec<_> = read.history.steps.iter().map(|step| step.skipped.is_some()).collect();
    assert_eq!(skipped, [4, 5, 6, 7, 22, 23, 24, 25, 26, 27].map(overflows));
}

#[test]
fn a_capture_that_fails_records_nothing() {
    let Some(gpu) = gpu() else { return };
    for panics in [false, true] {
        let mut training = recorded(Program::new(AdamW::default()), gpu.device);
        let mut graph = Captured::new(gpu.device).unwrap();
        for i in 0..4 {
            training.feed(i);
            let fails = i == 3;
            let result = catch_unwind(AssertUnwindSafe(|| {
                let replay = graph.replay(|| {
                    let loss = training.iteration()?;
                    assert!(!(fails && panics), "a planted panic");
                    if fails {
                        return Err(Error::Torch("a planted error".to_owned()));
                    }
                    Ok(loss)
                });
                replay.map(drop)
            }));
            assert_eq!(matches!(result, Ok(Ok(()))), !fails);
        }
        let Read { steps, history, health, .. } = read(&mut training);
        assert_eq!(steps, "103 steps taken, 0 skipped");
        assert_eq!((history.total, history.steps.len(), health.observed), (3, 3, 3));
        graph.recapture();
        for i in 4..10 {
            take(&mut training, &mut graph, i).unwrap();
        }
        let Read { steps, history, health, .. } = read(&mut training);
        assert_eq!(steps, "108 steps taken, 1 skipped (at most 1 in a row)");
        assert_eq!((history.total, history.steps.len(), health.observed), (9, 9, 9));
    }
}

#[test]
fn records_that_begin_with_the_capture_are_refused() {
    let Some(gpu) = gpu() else { return };
    type Begin = fn(&mut Records, &Training);
    let begins: [(Begin, &str); 3] = [
        (|records, _| records.steps = StepCounter::default(), "the first step of a counter"),
        (
            |records, _| records.history = ScaleHistory::new(4).unwrap(),
            "the first step of a history",
        ),
        (|records, t| records.health = ScaleHealth::new(&t.vs), "the first observation"),
    ];
    for (begin, text) in begins {
        let mut training = recorded(Program::new(AdamW::default()), gpu.device);
        let mut graph = Captured::new(gpu.device).unwrap();
        for i in 0..3 {
            take(&mut training, &mut graph, i).unwrap();
        }
        let mut records = training.records.take().unwrap();
        begin(&mut records, &training);
        training.records = Some(records);
        let said = refusal(take(&mut training, &mut graph, 3));
        assert!(said.contains(text), "{said}");
        let (taken, skipped, _) = count(&mut training.records.as_mut().unwrap().steps);
        assert!(matches!((taken, skipped), (0 | 103, 0)), "{taken} and {skipped}");
        graph.recapture();
        for i in 4..8 {
            take(&mut training, &mut graph, i).unwrap();
        }
        assert!(graph.is_captured());
    }
}

#[test]
fn a_loaded_history_is_noticed_and_cleared_counts_go_on() {
    let Some(gpu) = gpu() else { return };
    let mut training = recorded(Program::new(AdamW::default()), gpu.device);
    let mut graph = Captured::new(gpu.device).unwrap();
    for i in 0..6 {
        take(&mut training, &mut graph, i).unwrap();
    }
    let records = training.records.as_mut().unwrap();
    let mut checkpoint = Checkpoint::new();
    checkpoint.add("history", &mut records.history).unwrap();
    records.health.clear();
    assert_eq!(records.health.report().unwrap().observed, 0);
    for i in 6..9 {
        take(&mut training, &mut graph, i).unwrap();
    }
    let records = training.records.as_mut().unwrap();
    assert_eq!(records.health.report().unwrap().observed, 3);
    checkpoint.restore().add("history", &mut records.history).apply().unwrap();
    assert!(refusal(take(&mut training, &mut graph, 9)).contains("a history"));
    graph.recapture();
    for i in 9..14 {
        take(&mut training, &mut graph, i).unwrap();
    }
    let history = read(&mut training).history;
    let skipped: Vec<_> = history.steps.iter().map(|step| step.skipped.is_some()).collect();
    assert_eq!(history.total, 11);
    assert_eq!(skipped, [0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13].map(overflows));
}

#[test]
fn records_make_the_host_neither_wait_nor_allocate() {
    let (Some(gpu), Some(simulation)) = (gpu(), Simulation::find()) else { return };
    let mut training = recorded(Program::new(AdamW::default()), gpu.device);
    let mut graph = Captured::new(gpu.device).unwrap();
    for i in 0..20 {
        training.feed(i);
        let is_captured = graph.is_captured();
        let ((), counts) = simulation.count(|| {
            graph.replay(|| training.iteration()).map(drop).unwrap();
        });
        if is_captured {
            assert_eq!((counts.host_syncs, counts.allocations), (0, 0), "iteration {i}");
            assert!(counts.launches <= 1, "iteration {i}: {}", counts.launches);
        }
        let steps = &mut training.records.as_mut().unwrap().steps;
        let (_, counts) = simulation.count(|| steps.count().unwrap());
        assert_eq!(counts.host_syncs, 0, "iteration {i}");
    }
}

/// Without memory for the record, `replay` fails in an iteration, and the next count after one.
#[test]
fn a_count_that_fails_is_told_and_changes_nothing() {
    let (Some(gpu), Some(simulation)) = (gpu(), Simulation::find()) else { return };
    let mut training = Training::new(Program::new(AdamW::default()), gpu.device);
    let mut graph = Captured::new(gpu.device).unwrap();
    let mut steps = StepCounter::default();
    training.feed(0);
    let mut inside = |steps: &mut StepCounter, fails: bool| {
        let iteration = || {
            let loss = training.iteration()?;
            let outcome = training.last.as_ref().unwrap();
            simulation.fail_allocation(if fails { 1 } else { 0 });
            steps.record(outcome);
            simulation.fail_allocation(0);
            Ok(loss)
        };
        let result = graph.replay(iteration).map(drop);
        graph.recapture();
        result
    };
    inside(&mut steps, false).unwrap();
    assert!(matches!(inside(&mut steps, true), Err(Error::Torch(_))));
    inside(&mut steps, false).unwrap();
    assert_eq!(count(&mut steps), (2, 0, 0));
    training.feed(5);
    drop(training.iteration().unwrap());
    simulation.fail_allocation(1);
    steps.record(training.last.as_ref().unwrap());
    simulation.fail_allocation(0);
    assert!(matches!(steps.count(), Err(Error::Torch(_))));
    assert_eq!(count(&mut steps), (2, 0, 0));
    steps.record(training.last.as_ref().unwrap());
    assert_eq!(count(&mut steps), (2, 1, 1));
}

/// On the CPU the same program records the same.
#[test]
fn on_the_cpu_the_host_records() {
    let mut training = recorded(Program::new(AdamW::default()), Device::Cpu);
    let mut graph = Captured::new(Device::Cpu).unwrap();
    for i in 0..8 {
        take(&mut training, &mut graph, i).unwrap();
    }
    let Read { steps, history, health, .. } = read(&mut training);
    assert_eq!(steps, "107 steps taken, 1 skipped (at most 1 in a row)");
    assert_eq!((history.total, health.observed), (8, 8));
    assert_eq!(history.steps[3].learning_rate, lr(3));
}
