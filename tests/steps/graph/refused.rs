//! What a graph cannot hold is refused before libtorch is called, and what has changed since the capture is noticed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::nn::OptimizerConfig;
use tch::{Device, Kind, Tensor, nn};
use tch_amp::accumulation::Accumulation;
use tch_amp::average::Ema;
use tch_amp::checkpoint::{Checkpoint, CheckpointFolder, save_weights};
use tch_amp::gradients::{ClipNorm, clip_grad_norm};
use tch_amp::graph::Captured;
use tch_amp::insight::{ScaleHealth, ScaleHistory, Tracer, Tuner, audit, saved_tensors};
use tch_amp::loss_scale::{DynamicLossScale, LossScale};
use tch_amp::optim::{AdamW, MasterWeights, MomentDtype, Muon, ParamGroup, Sgd};
use tch_amp::scaler::{GradScalerConfig, StepCounter};
use tch_amp::schedule::ReduceLrOnPlateau;
use tch_amp::{Amp, Autocast, Error, GradScaler, Result, autocast};

use crate::graph::training::{
    Program, Training, Way, adamw, first_difference, overflows, take, take_all,
};
use crate::graph::{Gpu, assert_refuses, assert_refuses_capture, gpu};
use testkit::files::Folder;
use testkit::simulation::Simulation;

/// The CPU, and a device that has graphs.
fn devices() -> Vec<(Device, Option<Gpu>)> {
    std::iter::once((Device::Cpu, None)).chain(gpu().map(|gpu| (gpu.device, Some(gpu)))).collect()
}

/// Asserts that `call` is refused in an iteration of a graph on each device, in the first one already, and with this
/// text.
fn refused(text: &str, call: impl Fn(&mut Training) -> Result<()>) {
    for (device, _alone) in devices() {
        let (mut training, mut graph) = Training::by_graph(adamw(), device, 0);
        let inside = graph.replay(|| {
            let loss = training.iteration()?;
            call(&mut training).map(|()| loss)
        });
        assert_refuses(inside, text);
        // The iteration can be begun anew.
        training.feed(0);
        graph.replay(|| training.iteration()).unwrap();
    }
}

#[test]
fn what_reads_the_scale_is_refused() {
    refused("reading the scale", |t| t.scaler.get_scale().map(drop));
    refused("reading the scale", |t| t.scaler.get_growth_tracker().map(drop));
    refused("reading the scale", |t| t.scaler.state_dict().map(drop));
    refused("state_dict", |t| t.opt.state_dict().map(drop));
    refused("non_finite_gradients", |t| t.scaler.non_finite_gradients(&t.opt).map(drop));
    refused("counts of spikes", |t| t.spikes.counts().map(drop));
    refused("a count of steps", |_| StepCounter::default().count().map(drop));
    refused("a report of a history", |_| ScaleHistory::new(4)?.report().map(drop));
    refused("a report of gradients", |t| ScaleHealth::new(&t.vs).report().map(drop));
}

#[test]
fn what_keeps_a_number_of_the_host_is_refused() {
    refused("the optimizer's options", |t| t.opt.set_lr(0.1));
    refused("the optimizer's options", |t| t.opt.set_momentum(0.5));
    refused("the scaler's options", |t| t.scaler.set_growth_interval(7));
    refused("update_with", |t| t.scaler.update_with(8.0));
    refused("update_with_tensor", |t| t.scaler.update_with_tensor(&Tensor::from(8f32)));
    let state = GradScaler::new(Device::Cpu).unwrap().state_dict().unwrap();
    refused("load_state_dict", |t| t.scaler.load_state_dict(&state));
    refused("a schedule by a metric", |t| {
        let mut plateau = ReduceLrOnPlateau::default().build(&t.opt)?;
        plateau.step(&mut t.opt, 1.0)
    });
    refused("loss scale", |t| {
        let mut scale = DynamicLossScale::new(t.vs.device())?;
        scale.adjust(&Tensor::from(true).to_device(t.vs.device()))
    });
}

#[test]
fn what_waits_is_refused() {
    refused("error_if_nonfinite", |t| {
        let clip = ClipNorm { error_if_nonfinite: true, ..ClipNorm::from(1.0) };
        clip_grad_norm(&t.opt.trainable_variables(), clip).map(drop)
    });
    refused("does not take scaled gradients", |t| {
        let mut adam = nn::Adam::default().build(&t.vs, 0.1)?;
        t.scaler.backward(&t.bias().sum(None))?;
        t.scaler.step(&mut adam).map(drop)
    });
    refused("timing products", |t| Amp::advice(t.vs.device()).map(drop));
    refused("timing products", |t| Amp::Auto.on(t.vs.device()).map(drop));
    refused("a report", |t| {
        let region = Autocast::new(t.vs.device());
        Tuner::default().tune(&t.vs, &region, &t.scaler, |_| Ok(Tensor::from(1.0))).map(drop)
    });
    refused("a report", |t| saved_tensors(&t.vs, || Ok(Tensor::from(1.0))).map(drop));
    refused("a report", |t| Tracer::new(&t.vs)?.begin(&t.scaler));
    refused("a report", |t| {
        let region = Autocast::new(t.vs.device());
        audit(&t.vs, &region, &t.scaler, |_| Ok(Tensor::from(1.0))).map(drop)
    });
    refused("swapping averages in", |t| {
        let mut average = Ema::default().build(&t.vs)?;
        average.swap_in().map(drop)
    });
}

#[test]
fn checkpoints_are_refused() {
    let temporary = Folder::new();
    let model = |t: &Training| {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add("model", &t.vs)?;
        Ok::<_, Error>(checkpoint)
    };
    refused("saving a checkpoint", |t| model(t)?.save(temporary.file("at_once.safetensors")));
    refused("saving a checkpoint", |t| {
        let mut folder = CheckpointFolder::new(temporary.file("folder"))?;
        folder.save_async(1, &model(t)?).map(drop)
    });
    refused("restoring a checkpoint", |t| {
        model(t)?.restore().add("model", &t.vs).apply().map(drop)
    });
    refused("saving weights", |t| {
        save_weights(temporary.file("weights.safetensors"), &t.vs.variables())
    });
    assert!(!temporary.file("at_once.safetensors").exists());
}

#[test]
fn limits_that_the_host_counts_are_refused() {
    for (device, _alone) in devices() {
        for config in [
            GradScalerConfig { max_consecutive_skips: Some(3), ..Default::default() },
            GradScalerConfig { error_at_min_scale: true, ..Default::default() },
        ] {
            let mut training = Training::new(adamw(), device);
            training.scaler = config.build(device).unwrap();
            let mut graph = Captured::new(device).unwrap();
            assert_refuses(graph.replay(|| training.iteration()), "max_consecutive_skips");
        }
    }
}

#[test]
fn an_open_region_and_another_graph_are_refused() {
    for (device, _alone) in devices() {
        let mut graph = Captured::new(device).unwrap();
        let open = autocast(device, || graph.replay(|| Ok(())).map(drop));
        assert_refuses(open.unwrap(), "a region of autocast");
        let mut inner = Captured::new(device).unwrap();
        let nested = graph.replay(|| inner.replay(|| Ok(())).map(drop)).map(drop);
        assert_refuses(nested, "another graph");
    }
}

/// A graph that has been captured.
fn captured(program: Program, device: Device) -> (Training, Captured<Tensor>) {
    let (training, graph) = Training::by_graph(program, device, 4);
    assert!(graph.is_captured());
    (training, graph)
}

/// Asserts that a change after the capture is noticed by the next replay, which changes nothing, and that the graph can
/// be captured anew.
fn is_noticed(program: Program, text: &str, change: impl FnOnce(&mut Training)) {
    let Some(gpu) = gpu() else { return };
    let (mut training, mut graph) = captured(program, gpu.device);
    change(&mut training);
    let before = training.state();
    assert_refuses(take(&mut training, &mut graph, 6), text);
    let after = training.state();
    assert!(before.iter().zip(&after).all(|(one, other)| one.equal(other)), "{text}");
    graph.recapture();
    take_all(&mut training, &mut graph, 6..9);
    assert!(graph.is_captured());
}

#[test]
fn changes_after_the_capture_are_noticed() {
    let adamw = adamw();
    is_noticed(adamw, "the options of the optimizer", |t| t.opt.set_weight_decay(0.5).unwrap());
    let group = ParamGroup::new(0.1, AdamW { eps: 1e-3, ..AdamW::default() });
    is_noticed(adamw, "the options of the optimizer", |t| t.opt.set_param_group(0, group).unwrap());
    is_noticed(adamw, "the groups", |t| assert_eq!(t.opt.assign_group(1, &["*bias"]).unwrap(), 2));
    is_noticed(adamw, "the options of the scaler", |t| t.scaler.set_growth_interval(3).unwrap());
    is_noticed(adamw, "the state of the scaler", |t| {
        let state = t.scaler.state_dict().unwrap();
        t.scaler.load_state_dict(&state).unwrap();
    });
    is_noticed(adamw, "the state of the optimizer", |t| {
        let state = t.opt.state_dict().unwrap();
        t.opt.load_state_dict(&state).unwrap();
    });
    is_noticed(adamw, "which parameters are trained", |t| drop(t.bias().set_requires_grad(false)));
    let moves = |t: &mut Training| {
        let mut bias = t.bias();
        let moved = bias.copy();
        bias.set_data(&moved);
    };
    is_noticed(adamw, "the weights", moves);
}

#[test]
fn weights_that_others_write_are_noticed_where_masters_do_not_follow() {
    let write = |t: &mut Training| {
        let mut weights = t.bias();
        tch::no_grad(|| drop(weights.fill_(0.5)));
    };
    for masters in [MasterWeights::Float, MasterWeights::Remainder] {
        let program = Program { kind: Kind::BFloat16, masters, ..adamw() };
        is_noticed(program, "the weights", write);
    }
    // Without masters the replay goes on with what was written.
    let Some(gpu) = gpu() else { return };
    let (mut training, mut graph) = captured(adamw(), gpu.device);
    write(&mut training);
    take(&mut training, &mut graph, 4).unwrap();
}

#[test]
fn a_rate_that_is_set_is_that_of_the_next_replay() {
    let Some(gpu) = gpu() else { return };
    let (mut training, mut graph) = captured(Program::new(Sgd::default()), gpu.device);
    training.feed(4);
    training.opt.set_lr(0.0).unwrap();
    let before = training.vs.variables()["a.weight"].copy();
    // Another place of the program.
    assert_refuses(graph.replay(|| training.iteration()), "another call");
    let mut replay = |training: &mut Training, lr: f64| {
        training.lr = Some(lr);
        take(training, &mut graph, 4).unwrap();
    };
    replay(&mut training, 0.0);
    assert!(training.vs.variables()["a.weight"].equal(&before));
    replay(&mut training, 0.5);
    assert!(!training.vs.variables()["a.weight"].equal(&before));
}

#[test]
fn gradients_of_another_iteration_are_not_added_to() {
    let Some(gpu) = gpu() else { return };
    let w = Tensor::ones([3], (Kind::Float, gpu.device)).set_requires_grad(true);
    let mut opt = AdamW::default().build(vec![w.shallow_clone()], 0.1).unwrap();
    assert_refuses_capture(gpu.device, "zero_grad", |_| {
        w.sum(Kind::Float).f_backward()?;
        opt.step()
    });
}

#[test]
fn a_part_of_a_window_is_refused() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    let w = Tensor::ones([3], (Kind::Float, device)).set_requires_grad(true);
    let mut opt = AdamW::default().build(vec![w.shallow_clone()], 0.1).unwrap();
    let mut scaler = GradScaler::new(device).unwrap();
    let mut train = |parts: usize| {
        let mut graph = Captured::new(device).unwrap();
        for _ in 0..5 {
            let iteration = || {
                opt.zero_grad()?;
                let mut window = Accumulation::of_equal(2)?;
                for _ in 0..parts {
                    window.backward(&mut scaler, &w.sum(Kind::Float))?;
                }
                scaler.step(&mut opt)?;
                scaler.update()
            };
            graph.replay(iteration).map(drop)?;
        }
        Ok(())
    };
    train(2).unwrap();
    assert_refuses(train(1), "a whole window");
}

#[test]
fn the_outcome_of_the_capture_answers_for_no_replay() {
    let Some(gpu) = gpu() else { return };
    let (mut training, mut graph) = Training::by_graph(adamw(), gpu.device, 0);
    let mut counter = StepCounter::default();
    for i in 0..8 {
        training.feed(i);
        let replay = graph.replay(|| training.iteration()).unwrap();
        counter.record(&replay.outcomes().unwrap()[0]);
        if i == 6 {
            // Iteration 5 has overflowed.
            assert!(replay.outcomes().unwrap()[0].is_stepped().unwrap());
        }
    }
    tch::Cuda::synchronize(0);
    assert_eq!((counter.count().unwrap(), counter.skipped().unwrap()), (7, 1));
    let inside = training.last.take().unwrap();
    assert_refuses(inside.is_stepped(), "Replay::outcomes");
    assert_refuses(inside.poll(), "Replay::outcomes");
}

/// Each replay overwrites the flag of the captured step, from which an outcome has been copied.
#[test]
fn outcomes_that_are_kept_stay_those_of_their_iterations() {
    let Some(gpu) = gpu() else { return };
    for way in [Way::Step, Way::ClipNorm, Way::UnscaleAndClip] {
        let program = Program { way, ..adamw() };
        let (mut training, mut graph) = Training::by_graph(program, gpu.device, 0);
        let mut kept = Vec::new();
        for i in 0..42 {
            training.feed(i);
            if i == 30 {
                graph.recapture();
            }
            let replay = graph.replay(|| training.iteration()).unwrap();
            kept.push(replay.outcomes().unwrap().remove(0));
        }
        assert!(graph.is_captured());
        // Those of a counter were begun to be read at once.
        let mut counter = StepCounter::default();
        kept.iter().for_each(|outcome| counter.record(outcome));
        for (i, outcome) in kept.iter().enumerate().rev() {
            assert_eq!(outcome.clone().is_skipped().unwrap(), overflows(i), "{way:?} {i}");
            assert_eq!(outcome.poll().unwrap(), Some(!overflows(i)), "{way:?} {i}");
        }
        assert_eq!((counter.count().unwrap(), counter.skipped().unwrap()), (39, 3), "{way:?}");
    }
}

/// An iteration that waits breaks its own capture, and nothing else.
#[test]
fn a_capture_that_fails_leaves_a_training_that_goes_on() {
    let Some(gpu) = gpu() else { return };
    for panics in [false, true] {
        let (mut training, mut graph) = Training::by_graph(adamw(), gpu.device, 0);
        for i in 0..4 {
            training.feed(i);
            let waits = i == 3;
            let iteration = || {
                let loss = training.iteration()?;
                assert!(!(waits && panics), "a planted panic");
                if waits {
                    let _read = loss.f_double_value(&[])?;
                }
                Ok(loss)
            };
            let replay = || graph.replay(iteration).map(drop);
            let result = catch_unwind(AssertUnwindSafe(replay));
            assert_eq!(matches!(result, Ok(Ok(()))), !waits, "{result:?}");
        }
        let is_finite = |t: &Tensor| t.isfinite().all().equal(&Tensor::from(true));
        assert!(training.state().iter().all(is_finite));
        // Those that run, then a capture, then replays. The place of the call is another one.
        graph.recapture();
        take_all(&mut training, &mut graph, 4..12);
        assert!(graph.is_captured());
        assert_eq!(training.scaler.get_scale().unwrap(), 512.0);
    }
}

/// Captures until libtorch refuses the end of a capture that was broken, which no call of the iteration has told.
fn refused_at_its_end(training: &mut Training, graph: &mut Captured<Tensor>) {
    for i in 0..4 {
        training.feed(i);
        let replay = graph.replay(|| {
            let loss = training.iteration()?;
            if i == 3 {
                assert!(loss.f_double_value(&[]).is_err());
            }
            Ok(loss)
        });
        let error = replay.map(drop).err();
        assert_eq!(matches!(error, Some(Error::Torch(_))), i == 3, "{error:?}");
    }
    assert!(!graph.is_captured());
}

/// Low-bit moments and random rounding read host memory, which a graph keeps for its replays.
#[test]
fn steps_go_on_after_a_capture_that_libtorch_refuses_at_its_end() {
    let Some(gpu) = gpu() else { return };
    let (adamw, muon) = (adamw(), Program::new(Muon::default()));
    let random = MasterWeights::StochasticRounding { seed: 3 };
    for program in [
        Program { moments: MomentDtype::EightBit, hidden: 256, ..adamw },
        Program { moments: MomentDtype::BFloat16, hidden: 256, ..muon },
        Program { kind: Kind::BFloat16, masters: random, ..adamw },
    ] {
        let [mut training, mut twin] = [(); 2].map(|()| Training::new(program, gpu.device));
        let [mut graph, mut eager] = [(); 2].map(|()| Captured::new(gpu.device).unwrap());
        refused_at_its_end(&mut training, &mut graph);
        for i in 0..3 {
            take(&mut twin, &mut eager, i).unwrap();
        }
        for i in 4..16 {
            // The graph is gone while an iteration runs without one.
            if i == 10 {
                graph = Captured::new(gpu.device).unwrap();
                for training in [&mut training, &mut twin] {
                    training.feed(i);
                    drop(training.iteration().unwrap());
                }
            }
            take(&mut training, &mut graph, i).unwrap();
            eager.recapture();
            take(&mut twin, &mut eager, i).unwrap();
            let [ours, theirs] = [&mut training, &mut twin].map(Training::state);
            assert_eq!(first_difference(&[ours], &[theirs]), None, "{program:?}, iteration {i}");
        }
        assert!(graph.is_captured());
    }
}

/// What it keeps is read by nothing, so that nothing has to be waited for.
#[test]
fn a_capture_that_libtorch_refuses_keeps_nothing_of_later_steps() {
    let (Some(gpu), Some(simulation)) = (gpu(), Simulation::find()) else { return };
    let mut training = Training::new(adamw(), gpu.device);
    let program = Program { moments: MomentDtype::EightBit, hidden: 256, ..training.program };
    let mut low_bit = Training::new(program, gpu.device);
    let mut graph = Captured::new(gpu.device).unwrap();
    refused_at_its_end(&mut training, &mut graph);
    for i in 0..3 {
        low_bit.feed(i);
        drop(low_bit.iteration().unwrap());
    }
    let ((), counts) = simulation.count(|| drop(graph));
    assert_eq!(counts.host_syncs, 0);
}

#[test]
fn parameters_elsewhere_are_refused() {
    let Some(gpu) = gpu() else { return };
    for device in [Device::Cpu, Device::Cuda(1)] {
        if device == Device::Cuda(1) && tch::Cuda::device_count() < 2 {
            continue;
        }
        let mut training = Training::new(adamw(), device);
        let mut graph = Captured::new(gpu.device).unwrap();
        assert_refuses(graph.replay(|| training.iteration()), "another device");
    }
}
