//! Counters, histories and counts of gradients that iterations of a graph record.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::{Device, Kind, Tensor};
use tch_amp::average::Swa;
use tch_amp::checkpoint::Checkpoint;
use tch_amp::graph::Captured;
use tch_amp::insight::{HealthReport, HistoryReport, ScaleHealth, ScaleHistory};
use tch_amp::optim::{AdamW, Lion, Sgd};
use tch_amp::scaler::{GradScalerConfig, SpikeConfig, SpikeDetector, StepCounter, StepOutcome};
use tch_amp::{Error, GradScaler, Result};

use crate::graph::training::{
    Program, Records, Training, Way, adamw, lr, overflows, take, take_all, take_fed,
    warm_up_and_cosine,
};
use crate::graph::{assert_refuses, assert_refuses_capture, gpu};
use testkit::assert_refused;
use testkit::rows::steps_of;
use testkit::simulation::Simulation;

/// The steps that a history of these tests remembers.
const CAPACITY: usize = 16;

/// Which of the steps were skipped.
fn skips_of(history: &HistoryReport) -> Vec<bool> {
    steps_of(history).iter().map(|step| step.skipped.is_some()).collect()
}

fn rates_of(history: &HistoryReport) -> Vec<f64> {
    steps_of(history).iter().map(|step| step.learning_rate).collect()
}

/// What was counted and recorded, as a host reads it.
#[derive(Debug, PartialEq)]
struct Read {
    steps: String,
    in_a_row: u64,
    history: HistoryReport,
    health: HealthReport,
}

fn records(training: &Training) -> Records {
    Records {
        steps: StepCounter::starting_at(100),
        history: ScaleHistory::new(CAPACITY).unwrap(),
        health: ScaleHealth::new(&training.vs),
    }
}

/// A recorded training, and a graph that has taken so many of its iterations.
fn recorded_by_graph(
    program: Program,
    device: Device,
    iterations: usize,
) -> (Training, Captured<Tensor>) {
    let (mut training, mut graph) = Training::by_graph(program, device, 0);
    training.records = Some(records(&training));
    take_all(&mut training, &mut graph, 0..iterations);
    (training, graph)
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
    let (mut training, mut graph) = recorded_by_graph(program, device, 0);
    let mut take = |i| {
        if !captures {
            graph.recapture();
        }
        take(&mut training, &mut graph, i).unwrap();
        read(&mut training)
    };
    let out = (0..iterations).map(&mut take).collect();
    assert_eq!(graph.is_captured(), captures);
    out
}

fn same_records(way: Way, iterations: usize) -> Vec<Read> {
    let Some(gpu) = gpu() else { return Vec::new() };
    let program = Program { way, ..adamw() };
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
        let recorded = steps_of(&last.history);
        assert_eq!((last.history.total, recorded.len()), (60, CAPACITY), "{way:?}");
        assert_eq!(last.health.observed, 60, "{way:?}");
        let has_norms = recorded.iter().any(|step| step.norm.is_some());
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
    let (mut training, mut graph) = recorded_by_graph(adamw(), gpu.device, 0);
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
        for step in steps_of(&history) {
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
    let program = Program { is_scheduled: true, ..Program::new(Lion::default()) };
    let (mut training, mut graph) = recorded_by_graph(program, gpu.device, 0);
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
    assert!(graph.is_captured());
    assert_eq!(rates_of(&read(&mut training).history), lrs);
}

/// Iterations without the graph, captures anew, and two graphs in turns.
#[test]
fn whoever_takes_an_iteration_it_is_recorded_once() {
    let Some(gpu) = gpu() else { return };
    let program = Program { way: Way::ClipNorm, ..adamw() };
    let (mut training, mut one) = recorded_by_graph(program, gpu.device, 0);
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
        let counts = format!("{} steps taken, {skips} skipped", 101 + i - skips);
        assert!(steps.starts_with(&counts), "{steps}");
        assert_eq!(in_a_row, u64::from(overflows(i)));
        assert_eq!((history.total, health.observed), (i as u64 + 1, i as u64 + 1));
        let first = (i + 1).saturating_sub(CAPACITY);
        assert_eq!(skips_of(&history), (first..=i).map(overflows).collect::<Vec<_>>());
    }
    assert!(one.is_captured() && other.is_captured());
}

/// Steps of which the host did not know when the device began to count.
#[test]
fn steps_before_the_graph_are_counted_with_those_of_replays() {
    let Some(gpu) = gpu() else { return };
    let (mut training, mut graph) = recorded_by_graph(adamw(), gpu.device, 0);
    for i in 4..8 {
        training.feed(i);
        drop(training.iteration().unwrap());
        // A step without gradients counts neither way, also while the outcome before it is unknown.
        training.opt.zero_grad().unwrap();
        let empty = training.scaler.step(&mut training.opt).unwrap();
        assert!(empty.has_no_gradients());
        training.records.as_mut().unwrap().steps.record(&empty);
    }
    take_all(&mut training, &mut graph, 22..28);
    let read = read(&mut training);
    assert_eq!(read.steps, "108 steps taken, 2 skipped (at most 1 in a row)");
    assert_eq!((read.history.total, read.health.observed), (10, 10));
    assert_eq!(skips_of(&read.history), [4, 5, 6, 7, 22, 23, 24, 25, 26, 27].map(overflows));
}

#[test]
fn a_capture_that_fails_records_nothing() {
    let Some(gpu) = gpu() else { return };
    for panics in [false, true] {
        let (mut training, mut graph) = recorded_by_graph(adamw(), gpu.device, 0);
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
        assert_eq!((history.total, steps_of(&history).len(), health.observed), (3, 3, 3));
        graph.recapture();
        take_all(&mut training, &mut graph, 4..10);
        let Read { steps, history, health, .. } = read(&mut training);
        assert_eq!(steps, "108 steps taken, 1 skipped (at most 1 in a row)");
        assert_eq!((history.total, steps_of(&history).len(), health.observed), (9, 9, 9));
    }
}

#[test]
fn records_that_begin_with_the_capture_are_refused() {
    let Some(gpu) = gpu() else { return };
    let refused =
        ["the first step of a counter", "the first step of a history", "the first observation"];
    for (case, text) in refused.into_iter().enumerate() {
        let (mut training, mut graph) = recorded_by_graph(adamw(), gpu.device, 3);
        let (old, new) = (training.records.take().unwrap(), records(&training));
        // What is left of the old ones lives on: if it was dropped, another iteration would be run.
        training.records = Some(match case {
            0 => Records { steps: new.steps, ..old },
            1 => Records { history: new.history, ..old },
            _ => Records { health: new.health, ..old },
        });
        assert_refuses(take(&mut training, &mut graph, 3), text);
        let (taken, skipped, _) = count(&mut training.records.as_mut().unwrap().steps);
        assert_eq!((taken, skipped), (if case == 0 { 100 } else { 103 }, 0));
        graph.recapture();
        take_all(&mut training, &mut graph, 4..8);
        assert!(graph.is_captured());
    }
}

#[test]
fn a_loaded_history_is_noticed_and_cleared_counts_go_on() {
    let Some(gpu) = gpu() else { return };
    let (mut training, mut graph) = recorded_by_graph(adamw(), gpu.device, 6);
    let records = training.records.as_mut().unwrap();
    let mut checkpoint = Checkpoint::new();
    checkpoint.add("history", &mut records.history).unwrap();
    records.health.clear();
    assert_eq!(records.health.report().unwrap().observed, 0);
    take_all(&mut training, &mut graph, 6..9);
    let records = training.records.as_mut().unwrap();
    assert_eq!(records.health.report().unwrap().observed, 3);
    checkpoint.restore().add("history", &mut records.history).apply().unwrap();
    assert_refuses(take(&mut training, &mut graph, 9), "a history");
    graph.recapture();
    take_all(&mut training, &mut graph, 9..14);
    let history = read(&mut training).history;
    assert_eq!(history.total, 11);
    assert_eq!(skips_of(&history), [0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13].map(overflows));
}

#[test]
fn records_make_the_host_neither_wait_nor_allocate() {
    let (Some(gpu), Some(simulation)) = (gpu(), Simulation::find()) else { return };
    let (mut training, mut graph) = recorded_by_graph(adamw(), gpu.device, 0);
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
    assert!(graph.is_captured());
}

/// Without memory for the record, `replay` fails in an iteration, and the next count after one.
#[test]
fn a_count_that_fails_is_told_and_changes_nothing() {
    let (Some(gpu), Some(simulation)) = (gpu(), Simulation::find()) else { return };
    let (mut training, mut graph) = Training::by_graph(adamw(), gpu.device, 0);
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
    assert_refused!(inside(&mut steps, true), Error::Torch(_));
    inside(&mut steps, false).unwrap();
    assert_eq!(count(&mut steps), (2, 0, 0));
    training.feed(5);
    drop(training.iteration().unwrap());
    simulation.fail_allocation(1);
    steps.record(training.last.as_ref().unwrap());
    simulation.fail_allocation(0);
    assert_refused!(steps.count(), Error::Torch(_));
    assert_eq!(count(&mut steps), (2, 0, 0));
    steps.record(training.last.as_ref().unwrap());
    assert_eq!(count(&mut steps), (2, 1, 1));
}

/// On the CPU the same program records the same.
#[test]
fn on_the_cpu_the_host_records() {
    let (mut training, _graph) = recorded_by_graph(adamw(), Device::Cpu, 8);
    // Exact before anybody counts.
    let steps = &training.records.as_ref().unwrap().steps;
    assert_eq!(steps.to_string(), "107 steps taken, 1 skipped (at most 1 in a row)");
    let Read { history, health, .. } = read(&mut training);
    assert_eq!((history.total, health.observed), (8, 8));
    assert_eq!(rates_of(&history)[3], lr(3));
}

/// A step of one weight, which is recorded.
fn step(
    training: &mut Training,
    record: impl FnOnce(&GradScaler, &StepOutcome) -> Result<()>,
) -> Result<()> {
    let loss = training.bias().sum(Kind::Float);
    training.opt.zero_grad()?;
    training.scaler.backward(&loss)?;
    let outcome = training.scaler.step(&mut training.opt)?;
    let recorded = record(&training.scaler, &outcome);
    training.scaler.update()?;
    recorded
}

fn plain(device: Device) -> (Training, Captured<()>) {
    let training = Training::new(adamw(), device);
    (training, Captured::new(device).unwrap())
}

/// Beside a loop without graphs, whose learning rate is the same f32.
#[test]
fn replays_record_what_a_loop_without_graphs_records() {
    let Some(gpu) = gpu() else { return };
    let program = Program { way: Way::ClipNorm, ..adamw() };
    let train = |captures: bool| {
        let (mut training, mut graph) = recorded_by_graph(program, gpu.device, 0);
        training.lr = Some(0.015625);
        for i in 0..12 {
            training.feed(i);
            match captures {
                true => take_fed(&mut training, &mut graph).unwrap(),
                false => drop(training.iteration().unwrap()),
            }
        }
        assert_eq!(graph.is_captured(), captures);
        read(&mut training)
    };
    assert_eq!(train(false), train(true));
}

#[test]
fn a_history_that_was_in_no_warm_up_is_refused() {
    let Some(gpu) = gpu() else { return };
    let mut training = Training::new(adamw(), gpu.device);
    let mut history = ScaleHistory::new(4).unwrap();
    step(&mut training, |scaler, outcome| history.record(scaler, outcome, 0.1)).unwrap();
    assert_refuses_capture(gpu.device, "the first step of a history", |i| {
        step(&mut training, |scaler, outcome| match i {
            3 => history.record(scaler, outcome, 0.1),
            _ => Ok(()),
        })
    });
    assert_eq!(history.report().unwrap().total, 1);
}

#[test]
fn a_history_of_another_device_is_refused_and_stays_there() {
    let Some(gpu) = gpu() else { return };
    if tch::Cuda::device_count() < 2 {
        return;
    }
    let mut history = ScaleHistory::new(4).unwrap();
    let (mut other, _) = plain(Device::Cuda(1));
    let (mut training, mut graph) = plain(gpu.device);
    let mut record =
        |scaler: &GradScaler, outcome: &StepOutcome| history.record(scaler, outcome, 0.1);
    step(&mut other, &mut record).unwrap();
    assert_refuses(graph.replay(|| step(&mut training, &mut record)), "another device");
    step(&mut other, &mut record).unwrap();
    step(&mut training, &mut record).unwrap();
    assert_eq!(history.report().unwrap().total, 3);
}

/// Nothing of a record remains that fails at any of its allocations, also the first one on the device.
#[test]
fn a_record_that_fails_leaves_the_history_as_it_was() {
    let (Some(gpu), Some(simulation)) = (gpu(), Simulation::find()) else { return };
    for enabled in [false, true] {
        let (mut training, mut graph) = plain(gpu.device);
        let config = GradScalerConfig { enabled, ..Default::default() };
        training.scaler = config.build(gpu.device).unwrap();
        let mut history = ScaleHistory::new(2).unwrap();
        let (mut done, mut failures) = (0, 0);
        for at in 1..20 {
            let result = graph.replay(|| {
                step(&mut training, |scaler, outcome| {
                    simulation.fail_allocation(at);
                    let result = history.record(scaler, outcome, at as f64);
                    simulation.fail_allocation(0);
                    result
                })
            });
            let failed = result.is_err();
            graph.recapture();
            failures += u64::from(failed);
            // One without the graph, which the device counts from the second on.
            step(&mut training, |scaler, outcome| history.record(scaler, outcome, 0.0)).unwrap();
            done += 1 + u64::from(!failed);
            let report = history.report().unwrap();
            assert_eq!((report.total, steps_of(&report).len() as u64), (done, done.min(2)), "{at}");
        }
        assert!(failures > 4, "{failures} allocations were reached");
    }
}

#[test]
fn the_outcome_and_the_loss_of_another_iteration_are_refused() {
    let Some(gpu) = gpu() else { return };
    type Record = fn(&mut Training, &mut Records, &mut SpikeDetector, &StepOutcome) -> Result<()>;
    const OUTCOME: &str = "the outcome of another iteration";
    const LOSS: &str = "the loss of another iteration";
    let records: [(&str, Record); 5] = [
        (OUTCOME, |_, r, _, last| {
            r.steps.record(last);
            Ok(())
        }),
        (OUTCOME, |t, r, _, last| step(t, |scaler, _| r.history.record(scaler, last, 0.1))),
        (OUTCOME, |t, _, _, last| t.average.as_mut().unwrap().update(last)),
        (LOSS, |t, r, _, _| step(t, |scaler, outcome| r.history.record(scaler, outcome, 0.1))),
        (LOSS, |t, _, spikes, _| {
            t.opt.zero_grad()?;
            t.scaler.backward(&t.bias().sum(Kind::Float))?;
            drop(t.scaler.step_unless_spike(&mut t.opt, 1.0, spikes)?);
            t.scaler.update()
        }),
    ];
    for (case, (text, record)) in records.into_iter().enumerate() {
        let averaging = Some(Swa::default().into());
        let program = Program { averaging, ..adamw() };
        let (mut training, mut graph) = recorded_by_graph(program, gpu.device, 0);
        let mut spikes = SpikeConfig::default().build().unwrap();
        take(&mut training, &mut graph, 0).unwrap();
        let mut records = training.records.take().unwrap();
        let loss = Tensor::from(1f32).to_device(gpu.device);
        for i in 1..4 {
            let last = training.last.take().unwrap();
            if case > 2 {
                records.history.set_loss(&loss).unwrap();
                spikes.watch_loss(&loss);
            }
            training.feed(i);
            let result = graph.replay(|| {
                record(&mut training, &mut records, &mut spikes, &last)?;
                training.iteration()
            });
            match i {
                3 => assert_refuses(result, text),
                _ => drop(result.unwrap()),
            }
        }
    }
}

/// A captured outcome has the flag of the latest replay, which is counted already.
#[test]
fn a_captured_outcome_is_counted_by_nobody_outside() {
    let Some(gpu) = gpu() else { return };
    let averaging = Some(Swa::default().into());
    let (mut training, _graph) = recorded_by_graph(Program { averaging, ..adamw() }, gpu.device, 5);
    let outcome = training.last.take().unwrap();
    let steps = &mut training.records.as_mut().unwrap().steps;
    steps.record(&outcome);
    assert_refuses(steps.count(), "Replay::outcomes");
    assert_eq!(count(steps), (105, 0, 0));
    assert_refuses(training.average.as_mut().unwrap().update(&outcome), "outcomes");
    let mut history = ScaleHistory::new(4).unwrap();
    let recorded = step(&mut training, |scaler, _| history.record(scaler, &outcome, 0.1));
    assert_refuses(recorded, "Replay::outcomes");
}

#[test]
fn what_an_iteration_uses_and_the_program_drops_is_noticed() {
    let Some(gpu) = gpu() else { return };
    type Replace = fn(&mut Training);
    let replaced: [Replace; 7] = [
        |t| t.records.as_mut().unwrap().steps = StepCounter::default(),
        |t| t.records.as_mut().unwrap().history = ScaleHistory::new(4).unwrap(),
        |t| t.records.as_mut().unwrap().health = ScaleHealth::new(&t.vs),
        |t| t.average = Some(Swa::default().build(&t.vs).unwrap()),
        |t| t.spikes = SpikeConfig::default().build().unwrap(),
        |t| t.opt = AdamW::default().build(&t.vs, 0.01).unwrap(),
        |t| t.scaler = GradScaler::new(t.vs.device()).unwrap(),
    ];
    for (case, replace) in replaced.into_iter().enumerate() {
        println!("case {case}");
        let averaging = Some(Swa::default().into());
        let program = Program { averaging, way: Way::UnlessSpike, ..adamw() };
        let (mut training, mut graph) = recorded_by_graph(program, gpu.device, 5);
        replace(&mut training);
        assert_refuses(take(&mut training, &mut graph, 6), "was dropped");
        graph.recapture();
        take_all(&mut training, &mut graph, 6..10);
        assert!(graph.is_captured());
    }
}

/// Two optimizers with learning rates of their own, whose steps are recorded in histories of few rows.
#[test]
fn several_steps_of_an_iteration_are_recorded_in_their_order() {
    let Some(gpu) = gpu() else { return };
    let (mut training, mut graph) = plain(gpu.device);
    let b = Tensor::zeros([4], (Kind::Float, gpu.device)).set_requires_grad(true);
    let mut other = Sgd::default().build(&[b.shallow_clone()], 0.5).unwrap();
    let mut histories = [1, 2, 3, 5].map(|n| ScaleHistory::new(n).unwrap());
    let mut steps = StepCounter::default();
    for i in 0..12 {
        let lr = 1.0 / f64::from(1 << i);
        training.opt.set_lr(lr).unwrap();
        other.set_lr(lr / 4.0).unwrap();
        let iteration = graph.replay(|| {
            let Training { vs, opt, scaler, .. } = &mut training;
            opt.zero_grad()?;
            other.zero_grad()?;
            scaler.backward(&vs.variables()["a.bias"].sum(Kind::Float))?;
            scaler.backward(&b.sum(Kind::Float))?;
            for outcome in [scaler.step(opt)?, scaler.step(&mut other)?] {
                steps.record(&outcome);
                for history in &mut histories {
                    history.record(scaler, &outcome, 0.0)?;
                }
            }
            scaler.update()
        });
        iteration.unwrap();
        let expected: Vec<_> =
            (0..=i).flat_map(|i| [1.0, 0.25].map(|share| share / f64::from(1 << i))).collect();
        for history in &mut histories {
            let report = history.report().unwrap();
            let found = rates_of(&report);
            assert_eq!(report.total, expected.len() as u64);
            assert_eq!(found, expected[expected.len() - found.len()..], "iteration {i}");
        }
    }
    assert!(graph.is_captured());
    assert_eq!(count(&mut steps), (24, 0, 0));
}

/// The first error of several is kept, and told once.
#[test]
fn a_failure_is_told_although_other_steps_follow() {
    let (Some(gpu), Some(simulation)) = (gpu(), Simulation::find()) else { return };
    let (mut training, mut graph) = recorded_by_graph(adamw(), gpu.device, 0);
    take(&mut training, &mut graph, 0).unwrap();
    training.feed(1);
    drop(training.iteration().unwrap());
    let outcome = training.last.take().unwrap();
    let steps = &mut training.records.as_mut().unwrap().steps;
    simulation.fail_allocation(1);
    steps.record(&outcome);
    simulation.fail_allocation(0);
    steps.record(&outcome);
    take(&mut training, &mut graph, 2).unwrap();
    let steps = &mut training.records.as_mut().unwrap().steps;
    assert_refused!(steps.count(), Error::Torch(_));
    assert_eq!(count(steps), (104, 0, 0));
}

#[test]
fn a_disabled_scaler_that_is_observed_does_not_hide_the_scale_of_replays() {
    let Some(gpu) = gpu() else { return };
    let (mut training, mut graph) = recorded_by_graph(adamw(), gpu.device, 5);
    training.opt.zero_grad().unwrap();
    training.bias().sum(Kind::Float).backward();
    let health = &mut training.records.as_mut().unwrap().health;
    health.observe(&GradScaler::disabled()).unwrap();
    assert_eq!(health.report().unwrap().scale, 1.0);
    training.opt.zero_grad().unwrap();
    take(&mut training, &mut graph, 6).unwrap();
    let report = training.records.as_ref().unwrap().health.report().unwrap();
    assert_eq!((report.scale, report.observed), (1024.0, 7));
}

/// A disabled scaler's steps are known to the host, but not the learning rate and the norm.
#[test]
fn a_known_outcome_of_another_iteration_is_refused_by_a_history() {
    let Some(gpu) = gpu() else { return };
    let mut training = Training::new(adamw(), gpu.device);
    training.scaler = GradScaler::disabled();
    let mut history = ScaleHistory::new(4).unwrap();
    let mut last = None;
    assert_refuses_capture(gpu.device, "the outcome of another iteration", |_| {
        step(&mut training, |scaler, outcome| {
            let outcome = last.replace(outcome.clone()).unwrap_or_else(|| outcome.clone());
            history.record(scaler, &outcome, 0.1)
        })
    });
    assert_eq!(history.report().unwrap().total, 3);
}
