//! What happens between replays: eager iterations, loads, options that are set, schedules that end.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::{Device, Kind, Tensor};
use tch_amp::accumulation::Accumulation;
use tch_amp::average::Swa;
use tch_amp::graph::Captured;
use tch_amp::optim::{AdamW, Lion, MasterWeights, Optimizer, Sgd};
use tch_amp::scaler::{GradScalerConfig, PerLossScalers};
use tch_amp::schedule::{ConstantLr, LinearLr};
use tch_amp::{Error, GradScaler, Result};

use crate::graph::training::{Program, Training, Way, adamw};
use crate::graph::{assert_refuses, assert_refuses_capture, gpu};

/// A weight of one, whose gradient is one in each iteration: SGD moves it by the learning rate.
struct Weight {
    w: Tensor,
    opt: Optimizer,
}

impl Weight {
    fn new(device: Device, lr: f64) -> Self {
        let w = Tensor::ones([1], (Kind::Float, device)).set_requires_grad(true);
        let opt = Sgd::default().build(vec![w.shallow_clone()], lr).unwrap();
        Self { w, opt }
    }

    fn iterate(&mut self) -> Result<()> {
        self.opt.backward_step(&self.w.sum(Kind::Float))
    }

    /// How far `f` moves the weight down.
    fn moved(&mut self, f: impl FnOnce(&mut Self)) -> f64 {
        let before = self.w.double_value(&[0]);
        f(self);
        before - self.w.double_value(&[0])
    }
}

fn near(one: f64, other: f64) -> bool {
    (one - other).abs() < 1e-6
}

fn replay(graph: &mut Captured<()>, weight: &mut Weight) -> Result<()> {
    graph.replay(|| weight.iterate()).map(drop)
}

#[test]
fn a_loaded_rate_is_the_rate_of_later_steps() {
    let Some(gpu) = gpu() else { return };
    let mut weight = Weight::new(gpu.device, 0.25);
    let mut graph = Captured::new(gpu.device).unwrap();
    let saved = weight.opt.state_dict().unwrap();
    weight.opt.set_lr(0.5).unwrap();
    for _ in 0..5 {
        assert!(near(weight.moved(|w| replay(&mut graph, w).unwrap()), 0.5));
    }
    weight.opt.load_state_dict(&saved).unwrap();
    assert_refuses(replay(&mut graph, &mut weight), "the state of the optimizer");
    graph.recapture();
    for _ in 0..3 {
        assert!(near(weight.moved(|w| replay(&mut graph, w).unwrap()), 0.25));
    }
    assert!(near(weight.moved(|w| w.iterate().unwrap()), 0.25));
}

#[test]
fn eager_iterations_between_replays_are_counted_with_them() {
    let Some(gpu) = gpu() else { return };
    for way in [Way::Step, Way::UnlessSpike] {
        let averaging = Some(Swa::default().into());
        let program = Program { averaging, way, ..adamw() };
        let (mut training, mut graph) = Training::by_graph(program, gpu.device, 0);
        let mut count = 0;
        for i in 0..12 {
            training.feed(i);
            // Each third iteration after the capture is one of its own.
            if i > 4 && i % 3 == 0 {
                drop(training.iteration().unwrap());
            } else {
                graph.replay(|| training.iteration()).unwrap();
            }
            count += 1;
        }
        let spikes = training.spikes.counts().unwrap();
        let skipped = spikes.loss_spikes + spikes.norm_spikes + u64::from(spikes.non_finite > 0);
        let overflowed = if way == Way::Step { 1 } else { skipped };
        let updates = training.average.as_ref().unwrap().updates().unwrap();
        assert_eq!(updates + overflowed, count, "{way:?}");
    }
}

/// A training whose schedule a graph takes.
fn scheduled(device: Device, iterations: usize) -> (Training, Captured<Tensor>) {
    let (mut training, mut graph) = Training::by_graph(Program::new(Lion::default()), device, 0);
    let line = LinearLr { start_factor: 0.1, end_factor: 1.0, total_iters: 20 };
    training.scheduler = Some(line.build(&mut training.opt).unwrap());
    (0..iterations).for_each(|_| take(&mut training, &mut graph).unwrap());
    (training, graph)
}

fn take(training: &mut Training, graph: &mut Captured<Tensor>) -> Result<()> {
    training.feed(0);
    graph.replay(|| training.iteration()).map(drop)
}

/// The largest move of a weight by an iteration: with Lion, the learning rate.
fn rate(training: &mut Training, f: impl FnOnce(&mut Training)) -> f64 {
    let weight = |training: &Training| training.vs.variables()["a.weight"].detach().copy();
    let before = weight(training);
    f(training);
    (weight(training) - before).abs().max().double_value(&[])
}

#[test]
fn a_rate_that_is_set_beside_a_schedule_is_used() {
    let Some(gpu) = gpu() else { return };
    for captured in [false, true] {
        let (mut training, mut graph) = scheduled(gpu.device, if captured { 6 } else { 2 });
        training.opt.set_lr(0.5).unwrap();
        if captured {
            assert_refuses(take(&mut training, &mut graph), "a schedule in the iteration");
            graph.recapture();
        }
        let used = rate(&mut training, |t| take(t, &mut graph).unwrap());
        assert!((used - 0.5).abs() < 1e-3, "{captured}: {used}");
        // The schedule continues from there.
        let next = rate(&mut training, |t| take(t, &mut graph).unwrap());
        assert!(next > 0.5 && next < 0.9, "{captured}: {next}");
    }
}

/// The host's last rate is not the one that the device has meanwhile.
#[test]
fn the_last_rate_of_the_host_can_be_set_beside_a_schedule() {
    let Some(gpu) = gpu() else { return };
    for captured in [false, true] {
        for (way, before) in [
            ("a rate", 0),
            ("a state", 0),
            ("a state", 2),
            ("a schedule that is dropped", 0),
            ("another schedule", 0),
        ] {
            let (mut training, mut graph) = scheduled(gpu.device, before);
            let saved = training.opt.state_dict().unwrap();
            let first = saved.param_groups[0].options.lr;
            for _ in 0..if captured { 8 } else { 2 } {
                take(&mut training, &mut graph).unwrap();
            }
            graph.recapture();
            match way {
                "a rate" => training.opt.set_lr(first).unwrap(),
                "a state" => training.opt.load_state_dict(&saved).unwrap(),
                _ => {
                    training.scheduler = None;
                    training.opt.set_lr(first).unwrap();
                }
            }
            if way == "another schedule" {
                let constant = ConstantLr { factor: 1.0, total_iters: 50 };
                training.scheduler = Some(constant.build(&mut training.opt).unwrap());
            }
            let used = match way {
                // `feed` sets a rate where there is no schedule.
                "a schedule that is dropped" => {
                    rate(&mut training, |t| drop(t.iteration().unwrap()))
                }
                _ => rate(&mut training, |t| take(t, &mut graph).unwrap()),
            };
            assert!((used - first).abs() < 1e-5, "{captured}, {way}: {used}, not {first}");
        }
    }
}

#[test]
fn an_option_that_is_set_beside_a_schedule_is_used() {
    let Some(gpu) = gpu() else { return };
    let (mut training, mut graph) =
        Training::by_graph(Program::new(Lion::default()), gpu.device, 0);
    let constant = ConstantLr { factor: 1.0, total_iters: 5 };
    training.scheduler = Some(constant.build(&mut training.opt).unwrap());
    (0..6).for_each(|_| take(&mut training, &mut graph).unwrap());
    training.opt.set_weight_decay(50.0).unwrap();
    assert_refuses(take(&mut training, &mut graph), "the options of the optimizer");
    graph.recapture();
    for _ in 0..3 {
        // 1 - 0.01 * 50
        let before = training.vs.variables()["a.weight"].abs().max().double_value(&[]);
        take(&mut training, &mut graph).unwrap();
        let after = training.vs.variables()["a.weight"].abs().max().double_value(&[]);
        assert!(after < 0.6 * before + 0.02, "{before} {after}");
    }
}

/// Another schedule takes its place, also outside of graphs.
#[test]
fn a_schedule_that_is_gone_sets_nothing() {
    let Some(gpu) = gpu() else { return };
    for (next, expected) in [(None, 0.25), (Some(0.5), 0.125)] {
        let (mut training, graph) = scheduled(gpu.device, 6);
        drop(graph);
        training.scheduler = None;
        training.opt.set_lr(0.25).unwrap();
        if let Some(factor) = next {
            let constant = ConstantLr { factor, total_iters: 50 };
            training.scheduler = Some(constant.build(&mut training.opt).unwrap());
        }
        let used = rate(&mut training, |t| drop(t.iteration().unwrap()));
        assert!((used - expected).abs() < 1e-3, "{used}");
    }
}

#[test]
fn one_schedule_is_stepped_once() {
    let Some(gpu) = gpu() else { return };
    let (mut training, mut graph) = scheduled(gpu.device, 2);
    let twice = graph.replay(|| {
        let loss = training.iteration()?;
        let (outcome, mut scheduler) =
            (training.last.clone().unwrap(), training.scheduler.take().unwrap());
        let second = scheduler.step(&mut training.opt, &outcome);
        training.scheduler = Some(scheduler);
        second?;
        Ok(loss)
    });
    assert_refuses(twice, "a second step of one schedule");
}

#[test]
fn weights_that_move_are_noticed_by_every_graph() {
    let Some(gpu) = gpu() else { return };
    let mut weight = Weight::new(gpu.device, 0.25);
    let mut graphs = [(); 2].map(|()| Captured::new(gpu.device).unwrap());
    for _ in 0..5 {
        replay(&mut graphs[0], &mut weight).unwrap();
    }
    let moved = weight.w.detach().copy();
    weight.w.set_data(&moved);
    for _ in 0..5 {
        graphs[1].replay(|| weight.iterate()).unwrap();
    }
    assert_refuses(replay(&mut graphs[0], &mut weight), "the weights");
}

#[test]
fn an_iteration_that_panics_after_its_step_is_forgotten() {
    let Some(gpu) = gpu() else { return };
    let mut weight = Weight::new(gpu.device, 0.25);
    let config = GradScalerConfig { init_scale: 64.0, ..Default::default() };
    let mut scaler = config.build(gpu.device).unwrap();
    let mut graph = Captured::new(gpu.device).unwrap();
    for i in 0..12 {
        let mut iterate = || {
            let replay = graph.replay(|| {
                weight.opt.zero_grad()?;
                scaler.backward(&weight.w.sum(Kind::Float))?;
                drop(scaler.step(&mut weight.opt)?);
                assert!(i != 3, "a planted panic");
                scaler.update()
            });
            replay.map(drop)
        };
        let result = catch_unwind(AssertUnwindSafe(&mut iterate));
        assert_eq!(matches!(result, Ok(Ok(()))), i != 3, "{i}: {result:?}");
    }
    assert!(graph.is_captured());
    assert_eq!(scaler.get_scale().unwrap(), 64.0);
}

#[test]
fn the_rest_of_another_iteration_is_not_captured() {
    let Some(gpu) = gpu() else { return };
    let mut weight = Weight::new(gpu.device, 0.25);
    let mut scaler = GradScaler::new(gpu.device).unwrap();
    let mut graph = Captured::new(gpu.device).unwrap();
    let mut last = Ok(());
    for i in 0..4 {
        if i == 3 {
            scaler.backward(&weight.w.sum(Kind::Float)).unwrap();
            drop(scaler.step(&mut weight.opt).unwrap());
        }
        let iteration = || {
            let loss = weight.w.sum(Kind::Float);
            scaler.backward_step(&mut weight.opt, &loss).map(drop)
        };
        last = graph.replay(iteration).map(drop);
    }
    assert_refuses(last, "`update`");
}

#[test]
fn what_a_failed_capture_has_unscaled_is_not_due() {
    let Some(gpu) = gpu() else { return };
    let Weight { w, mut opt } = Weight::new(gpu.device, 0.25);
    let mut scaler = GradScaler::new(gpu.device).unwrap();
    let mut graph = Captured::new(gpu.device).unwrap();
    for i in 0..4 {
        let replayed = graph.replay(|| {
            opt.zero_grad()?;
            scaler.backward(&w.sum(Kind::Float))?;
            scaler.unscale_(&mut opt)?;
            if i == 3 {
                return Err(Error::Torch("a planted failure".to_owned()));
            }
            scaler.step(&mut opt)?;
            scaler.update()
        });
        assert_eq!(replayed.is_err(), i == 3);
    }
    let outcome = scaler.backward_step(&mut opt, &w.sum(Kind::Float)).unwrap();
    assert!(outcome.is_stepped().unwrap());
    assert!(near(w.double_value(&[0]), 0.0));
}

#[test]
fn losses_with_scales_of_their_own_forget_a_failed_capture_and_are_noticed_when_dropped() {
    let Some(gpu) = gpu() else { return };
    let mut weight = Weight::new(gpu.device, 0.25);
    let config = GradScalerConfig { init_scale: 64.0, ..Default::default() };
    let mut scalers = PerLossScalers::with_configs(gpu.device, &[config; 2]).unwrap();
    let mut graph = Captured::new(gpu.device).unwrap();
    for i in 0..10 {
        if i == 9 {
            scalers = PerLossScalers::with_configs(gpu.device, &[config; 2]).unwrap();
        }
        let result = graph.replay(|| {
            weight.opt.zero_grad()?;
            for id in 0..2 {
                scalers.backward(id, &weight.w.sum(Kind::Float), &mut weight.opt)?;
            }
            drop(scalers.step(&mut weight.opt)?);
            if i == 3 {
                return Err(Error::Torch("a planted failure".into()));
            }
            scalers.update()
        });
        match i {
            3 => assert!(matches!(result, Err(Error::Torch(_)))),
            9 => assert_refuses(result, "the scaler, which was dropped"),
            _ => drop(result.unwrap()),
        }
        assert_eq!(scalers.get_scale(0).unwrap(), 64.0);
    }
}

/// What a failed capture has begun is forgotten once, for all losses: the iteration after it counts.
#[test]
fn an_overflow_after_a_failed_capture_backs_off_the_scale_of_its_loss() {
    let Some(gpu) = gpu() else { return };
    let config = GradScalerConfig { init_scale: 64.0, ..Default::default() };
    let all =
        [false, true].map(|choice| [0, 1, 2].map(|call| [(choice, call, 0), (choice, call, 1)]));
    for (runs_outside, fails_after, bad) in all.into_iter().flatten().flatten() {
        let mut weight = Weight::new(gpu.device, 0.25);
        let mut scalers = PerLossScalers::with_configs(gpu.device, &[config; 2]).unwrap();
        let mut factors = [(); 2].map(|()| Tensor::ones([1], (Kind::Float, gpu.device)));
        let mut graph = Captured::new(gpu.device).unwrap();
        let (mut scale, mut trackers, mut number) = (64.0, [0; 2], 1.0);
        for i in 0..12 {
            let (fails, overflows) = (i == 3, [3, 4, 10].contains(&i));
            drop(factors[bad].fill_(if overflows { f64::INFINITY } else { 1.0 }));
            let mut iterate = || {
                let fail = |call| match fails && call == fails_after {
                    true => Err(Error::Torch("a planted failure".into())),
                    false => Ok(()),
                };
                weight.opt.zero_grad()?;
                for (id, factor) in factors.iter().enumerate() {
                    let loss = (&weight.w * factor).sum(Kind::Float);
                    scalers.backward(id, &loss, &mut weight.opt)?;
                    fail(id)?;
                }
                drop(scalers.step(&mut weight.opt)?);
                fail(2)?;
                scalers.update()
            };
            let result = match i == 4 && runs_outside {
                true => iterate(),
                false => graph.replay(iterate).map(drop),
            };
            assert_eq!(result.is_err(), fails, "{i}: {result:?}");
            if !fails {
                scale /= if overflows { 2.0 } else { 1.0 };
                number -= if overflows { 0.0 } else { 0.5 };
                trackers = trackers.map(|tracker| tracker + 1);
                trackers[bad] = if overflows { 0 } else { trackers[bad] };
            }
            let mut scales = [64.0; 2];
            scales[bad] = scale;
            let context = format!("{i}, after call {fails_after}, loss {bad}, {runs_outside}");
            assert_eq!([0, 1].map(|id| scalers.get_scale(id).unwrap()), scales, "{context}");
            let told = [0, 1].map(|id| scalers.get_growth_tracker(id).unwrap());
            assert_eq!(told, trackers, "{context}");
            assert_eq!(weight.w.double_value(&[0]), number, "{context}");
        }
        assert!(graph.is_captured());
    }
}

#[test]
fn the_middle_of_a_window_is_refused() {
    let Some(gpu) = gpu() else { return };
    let mut weight = Weight::new(gpu.device, 0.25);
    let mut scaler = GradScaler::new(gpu.device).unwrap();
    let mut window = Accumulation::of_equal(8).unwrap();
    assert_refuses_capture(gpu.device, "a whole window", |_| {
        weight.opt.zero_grad()?;
        window.backward(&mut scaler, &weight.w.sum(Kind::Float))
    });
}

#[test]
fn a_scaler_of_another_device_is_refused() {
    let Some(gpu) = gpu() else { return };
    let mut weight = Weight::new(gpu.device, 0.25);
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    let mut graph = Captured::new(gpu.device).unwrap();
    let iteration = || scaler.backward_step(&mut weight.opt, &weight.w.sum(Kind::Float)).map(drop);
    assert_refuses(graph.replay(iteration), "another device");
}

#[test]
fn an_optimizer_that_a_graph_has_refused_steps_without_it() {
    let Some(gpu) = gpu() else { return };
    let mut weight = Weight::new(Device::Cpu, 0.25);
    let mut graph = Captured::new(gpu.device).unwrap();
    assert_refuses(replay(&mut graph, &mut weight), "another device");
    assert!(near(weight.moved(|w| w.iterate().unwrap()), 0.25));
}

#[test]
fn a_momentum_that_is_not_started_is_not_captured() {
    let Some(gpu) = gpu() else { return };
    let sgd = Sgd { momentum: 0.9, dampening: 0.5, ..Sgd::default() };
    let (mut training, mut graph) = Training::by_graph(Program::new(sgd), gpu.device, 0);
    // Iteration 5 overflows.
    for _ in 0..4 {
        training.feed(5);
        graph.replay(|| training.iteration()).unwrap();
        assert!(!graph.is_captured());
    }
    training.feed(0);
    drop(training.iteration().unwrap());
    // What a warm-up has begun is captured wherever the call is.
    for i in 0..4 {
        training.feed(i);
        graph.replay(|| training.iteration()).unwrap();
    }
    assert!(graph.is_captured());
}

/// Writes to a weight as a program does that loads or prunes it.
fn write(training: &mut Training) {
    let mut bias = training.bias();
    tch::no_grad(|| drop(bias.fill_(0.5)));
}

/// The iteration runs, and a later one is captured.
#[test]
fn a_change_before_the_capture_loses_no_iteration() {
    let Some(gpu) = gpu() else { return };
    let adamw = adamw();
    let half = |masters| Program { kind: Kind::BFloat16, masters, ..adamw };
    let float = half(MasterWeights::Float);
    let reload: fn(&mut Training) = |t| {
        let state = t.opt.state_dict().unwrap();
        t.opt.load_state_dict(&state).unwrap();
    };
    type Case = (&'static str, Program, fn(&mut Training));
    let cases: [Case; 10] = [
        ("a write beside masters", float, write),
        ("a write beside remainders", half(MasterWeights::Remainder), write),
        ("a write", adamw, write),
        ("a state", adamw, reload),
        ("a state with masters", float, reload),
        ("an option", adamw, |t| t.opt.set_weight_decay(0.5).unwrap()),
        ("a rate", adamw, |t| t.lr = Some(0.5)),
        ("masters that are made anew", float, |t| t.opt.reset_master_weights()),
        ("gradients in f32", float, |t| t.opt.accumulate_in_f32().unwrap()),
        ("a frozen weight", adamw, |t| {
            drop(t.bias().set_requires_grad(false));
        }),
    ];
    for (name, program, change) in cases {
        let train = |captures: bool| {
            let (mut training, mut graph) = Training::by_graph(program, gpu.device, 0);
            for i in 0..9 {
                training.feed(i);
                if i == 3 {
                    change(&mut training);
                }
                if !captures {
                    // Every iteration runs, with the learning rates on the device.
                    graph.recapture();
                }
                graph.replay(|| training.iteration()).unwrap();
            }
            assert_eq!(graph.is_captured(), captures, "{name}");
            training.state()
        };
        let pairs = train(true).into_iter().zip(train(false));
        assert!(pairs.into_iter().all(|(one, other)| one.equal(&other)), "{name}");
    }
}

/// From 2^24 steps on f32 cannot count single steps, and under stochastic rounding other kernels go on to the next f32.
#[test]
fn reaching_2_to_the_24_steps_needs_a_new_capture() {
    let Some(gpu) = gpu() else { return };
    let stochastic = AdamW::default().master_weights(MasterWeights::StochasticRounding { seed: 7 });
    let cases = [
        (Kind::Float, AdamW::default().master_weights(MasterWeights::None), 16_777_216.0),
        // Six steps remain, and every second number is an f32.
        (Kind::BFloat16, stochastic, 16_777_216.0 + 6.0 * 2.0),
    ];
    for (kind, builder, last) in cases {
        let begin = || {
            let w = Tensor::arange(4, (kind, gpu.device)).set_requires_grad(true);
            let mut opt = builder.build(vec![w.shallow_clone()], 0.1).unwrap();
            opt.backward_step(&w.square().sum(Kind::Float)).unwrap();
            let mut state = opt.state_dict().unwrap();
            let step = Tensor::from(16_777_206f32);
            drop(state.state.get_mut("0").unwrap().insert("step".to_owned(), step));
            opt.load_state_dict(&state).unwrap();
            Weight { w, opt }
        };
        let iterate = |weight: &mut Weight| {
            let loss = weight.w.square().sum(Kind::Float);
            weight.opt.backward_step(&loss)
        };
        let (mut weight, mut twin) = (begin(), begin());
        let mut graph = Captured::new(gpu.device).unwrap();
        let mut refused = Vec::new();
        for i in 1..=16 {
            let result = graph.replay(|| iterate(&mut weight)).map(drop);
            if result.is_err() {
                assert_refuses(result, "the number of steps");
                refused.push(i);
                graph.recapture();
                graph.replay(|| iterate(&mut weight)).unwrap();
            }
            iterate(&mut twin).unwrap();
            assert!(weight.w.equal(&twin.w), "{kind:?} {i}");
        }
        assert_eq!(refused, [11], "{kind:?}");
        for each in [&mut weight, &mut twin] {
            let state = each.opt.state_dict().unwrap();
            assert_eq!(state.state["0"]["step"].double_value(&[]), last, "{kind:?}");
        }
    }
}
