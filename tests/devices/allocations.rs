//! Iterations in which an allocation fails: each call has taken effect completely or not at all, and training can
//! continue.

use tch::nn::{self, OptimizerConfig as _, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::gradients::ClipNorm;
use tch_amp::optim::{AdamW, Algorithm, AmpOptimizer, MasterWeights, Optimizer, OptimizerError};
use tch_amp::scaler::{GradScalerConfig, GradScalerState, PerLossScalers, ScalerError};
use tch_amp::{Error, GradScaler, Result, optim};

use crate::iteration::{ONE, TWO, losses, parameters};
use crate::training::build;
use testkit::Case;
use testkit::bits::bits;
use testkit::descent::Descent;
use testkit::simulation::Simulation;

enum Opt {
    Fused(Optimizer),
    Own(Descent),
    Tch(nn::Optimizer, #[expect(dead_code, reason = "it owns the variables")] VarStore),
}

impl Opt {
    fn amp(&mut self) -> &mut dyn AmpOptimizer {
        match self {
            Self::Fused(opt) => opt,
            Self::Own(opt) => opt,
            Self::Tch(opt, _) => opt,
        }
    }

    fn parameters(&mut self) -> Vec<Tensor> {
        self.amp().parameters().as_slice().iter().map(Tensor::shallow_clone).collect()
    }

    fn zero_grad(&mut self) {
        match self {
            Self::Fused(opt) => opt.zero_grad().unwrap(),
            Self::Own(opt) => opt.0.iter().for_each(drop_gradient),
            Self::Tch(opt, _) => opt.zero_grad(),
        }
    }
}

/// Removes the gradient of a tensor through an optimizer, because tch has no function for it.
fn drop_gradient(w: &Tensor) {
    let list = vec![w.shallow_clone()];
    optim::Sgd::default().build(list, 1.0).unwrap().zero_grad().unwrap();
}

/// The optimizers, and what they train.
#[derive(Clone, Copy, Debug)]
enum Model {
    Fused {
        algorithm: Algorithm,
        kind: Kind,
        devices: &'static [Device],
    },
    /// One optimizer that the test defines.
    Own {
        kind: Kind,
        devices: &'static [Device],
    },
    /// An optimizer of tch for each device.
    Tch {
        adam: bool,
        devices: &'static [Device],
    },
}

impl Model {
    fn devices(self) -> &'static [Device] {
        match self {
            Self::Fused { devices, .. } | Self::Own { devices, .. } | Self::Tch { devices, .. } => {
                devices
            }
        }
    }

    fn build(self) -> Vec<Opt> {
        match self {
            Self::Fused { algorithm, kind, devices } => {
                let all = parameters(devices, kind, 2);
                vec![Opt::Fused(build(algorithm, &all, MasterWeights::None))]
            }
            Self::Own { kind, devices } => vec![Opt::Own(Descent(parameters(devices, kind, 2)))],
            Self::Tch { adam, devices } => {
                devices.iter().map(|on| tch_optimizer(adam, *on)).collect()
            }
        }
    }

    /// Whether a step of the optimizer is all or nothing. tch's own Adam can stop midway.
    fn steps_whole(self) -> bool {
        match self {
            Self::Fused { .. } | Self::Own { .. } => true,
            Self::Tch { adam, .. } => !adam,
        }
    }
}

fn tch_optimizer(adam: bool, device: Device) -> Opt {
    let vs = VarStore::new(device);
    let _w = vs.root().ones("w", &[3, 5]);
    let opt = match adam {
        true => nn::AdamW::default().build(&vs, 0.01),
        false => nn::Sgd::default().build(&vs, 0.01),
    };
    Opt::Tch(opt.unwrap(), vs)
}

/// The calls between backward and update.
const WAYS: [&str; 8] = [
    "step",
    "unscale_",
    "clip norm",
    "clip powers",
    "clip value",
    "transaction",
    "step_clip_norm",
    "two looks",
];

struct Training<'a> {
    opts: Vec<Opt>,
    scaler: GradScaler,
    devices: &'static [Device],
    /// If set, no allocation of a backward pass fails.
    sheltered: Option<&'a Simulation>,
}

/// Makes a call that may fail, and possibly makes it again after a failure.
type Attempt<'a> = &'a mut dyn FnMut(&mut dyn FnMut() -> Result<()>) -> Result<()>;

impl<'a> Training<'a> {
    /// Runs a first iteration, which creates the states.
    fn new(model: Model, config: GradScalerConfig) -> Self {
        let config = GradScalerConfig { init_scale: 8.0, ..config };
        let scaler = config.build(Device::Cuda(0)).unwrap();
        let (opts, devices) = (model.build(), model.devices());
        let mut training = Self { opts, scaler, devices, sheltered: None };
        let losses = training.losses(0.25);
        training.iteration("step", &losses, &mut |call| call()).unwrap();
        training
    }

    fn losses(&mut self, factor: f64) -> Vec<Tensor> {
        let all: Vec<_> = self.opts.iter_mut().flat_map(Opt::parameters).collect();
        losses(&all, self.devices, factor)
    }

    /// Scales each loss, runs its backward, steps the optimizers and updates the scale. Each call can be retried
    /// separately.
    fn iteration(&mut self, way: &str, losses: &[Tensor], attempt: Attempt<'_>) -> Result<()> {
        self.opts.iter_mut().for_each(Opt::zero_grad);
        for loss in losses {
            let mut scaled = None;
            attempt(&mut || self.scaler.scale(loss).map(|it| scaled = Some(it)))?;
            self.backward(&scaled.unwrap())?;
        }
        for opt in &mut self.opts {
            step(way, opt, &mut self.scaler, attempt)?;
        }
        attempt(&mut || self.scaler.update())
    }

    fn backward(&self, scaled: &Tensor) -> Result<()> {
        let left = self.sheltered.map(|simulation| simulation.fail_allocation(0));
        scaled.f_backward()?;
        if let (Some(simulation), Some(left)) = (self.sheltered, left) {
            simulation.fail_allocation(left);
        }
        Ok(())
    }

    /// The whole state, for comparison.
    fn bits(&mut self) -> (Vec<Vec<u8>>, GradScalerState) {
        let mut all = Vec::new();
        for opt in &mut self.opts {
            for w in opt.parameters() {
                all.push(bits(&w.to_device(Device::Cpu)));
            }
            if let Opt::Fused(opt) = opt {
                let state = opt.state_dict().unwrap().state;
                let tensors = state.values().flat_map(|tensors| tensors.values());
                all.extend(tensors.map(|tensor| bits(&tensor.to_device(Device::Cpu))));
            }
        }
        (all, self.scaler.state_dict().unwrap())
    }
}

fn step(way: &str, opt: &mut Opt, scaler: &mut GradScaler, attempt: Attempt<'_>) -> Result<()> {
    if way == "transaction" {
        let mut unscaled = match scaler.unscale(opt.amp()) {
            Ok(unscaled) => unscaled,
            Err(error) => {
                let mut error = Some(error);
                // The attempt either returns the error or retries.
                attempt(&mut || error.take().map_or(Ok(()), Err))?;
                scaler.unscale(opt.amp())?
            }
        };
        attempt(&mut || unscaled.clip_grad_norm(0.1).map(drop))?;
        attempt(&mut || unscaled.clip_grad_value(0.01))?;
        drop(unscaled);
    } else if way != "step" && way != "step_clip_norm" {
        attempt(&mut || scaler.unscale_(opt.amp()))?;
    }
    let all = opt.parameters();
    match way {
        "clip norm" => attempt(&mut || tch_amp::gradients::clip_grad_norm(&all, 0.1).map(drop))?,
        "clip powers" => {
            let clip = ClipNorm { norm_type: 2.5, ..0.1.into() };
            attempt(&mut || tch_amp::gradients::clip_grad_norm(&all, clip).map(drop))?;
        }
        "clip value" => attempt(&mut || tch_amp::gradients::clip_grad_value(&all, 0.01))?,
        // Gradients that were changed after unscaling are checked again in the step.
        "two looks" => all.iter().for_each(|w| drop(w.grad().neg_())),
        "step_clip_norm" => {
            return attempt(&mut || scaler.step_clip_norm(opt.amp(), 0.1).map(drop));
        }
        _ => {}
    }
    attempt(&mut || scaler.step(opt.amp()).map(drop))
}

fn configs() -> [GradScalerConfig; 3] {
    let usual = GradScalerConfig::default();
    [
        usual,
        GradScalerConfig { hysteresis: 2, tolerance: 0.25, growth_interval: 2, ..usual },
        GradScalerConfig { max_consecutive_skips: Some(9), error_at_min_scale: true, ..usual },
    ]
}

fn models() -> Vec<Model> {
    let mut out = Vec::new();
    for devices in [ONE, TWO] {
        for kind in [Kind::Float, Kind::BFloat16] {
            out.push(Model::Fused { algorithm: AdamW::default().into(), kind, devices });
            out.push(Model::Own { kind, devices });
        }
        let sgd = optim::Sgd { momentum: 0.9, ..Default::default() };
        out.push(Model::Fused { algorithm: sgd.into(), kind: Kind::Float, devices });
        out.extend([false, true].map(|adam| Model::Tch { adam, devices }));
    }
    out
}

fn for_each_case(test: impl Fn(Model, GradScalerConfig, &str, f64)) {
    for model in models() {
        for way in WAYS {
            // tch's optimizers allocate much and can stop midway.
            if !matches!(model, Model::Tch { .. }) || way == "step" {
                test(model, GradScalerConfig::default(), way, 0.25);
            }
        }
        if !matches!(model, Model::Own { kind: Kind::Float, .. }) {
            continue;
        }
        for config in configs() {
            test(model, config, "step", 0.25);
            test(model, config, "unscale_", f64::INFINITY);
        }
    }
}

/// The call that failed is made again, and the result is as if it had not failed: no gradient is unscaled or clipped
/// twice, no step is taken twice, and no count is lost. A backward pass of autograd cannot be made again.
#[test]
fn calls_that_run_out_of_memory_can_be_retried() {
    let Some(simulation) = Simulation::find() else { return };
    for_each_case(|model, config, way, factor| {
        let mut twin = Training::new(model, config);
        let losses = twin.losses(factor);
        twin.iteration(way, &losses, &mut |call| call()).unwrap();
        let want = twin.bits();
        for n in 1.. {
            let what = format!("{model:?}, {way}, {factor}, {config:?}: allocation {n}");
            let mut training = Training::new(model, config);
            training.sheltered = Some(&simulation);
            let losses = training.losses(factor);
            let mut in_step = false;
            simulation.fail_allocation(n);
            let done = training.iteration(way, &losses, &mut |call| {
                let Err(error) = call() else { return Ok(()) };
                let left = simulation.fail_allocation(0);
                assert_eq!(left, 0, "{what}: {error}");
                match error {
                    Error::Torch(text) => assert!(text.contains("memory"), "{what}: {text}"),
                    Error::Optimizer(OptimizerError::Step(_)) if !model.steps_whole() => {
                        in_step = true
                    }
                    other => panic!("{what}: {other}"),
                }
                let again = call();
                in_step |= !model.steps_whole() && again.is_ok() && way.starts_with("step");
                again
            });
            let left = simulation.fail_allocation(0);
            if let Err(error) = done {
                assert!(in_step, "{what}: {error}");
                continue;
            }
            if !in_step && model.steps_whole() {
                assert_eq!(training.bits(), want, "{what}");
            }
            if left > 0 {
                break;
            }
        }
    });
}

/// The iteration is abandoned where it fails, and the next one is like any other.
#[test]
fn an_abandoned_iteration_can_be_followed_by_another() {
    let Some(simulation) = Simulation::find() else { return };
    for_each_case(|model, config, way, factor| {
        for n in 1.. {
            let abandons = n % 2 == 0;
            let what = format!("{model:?}, {way}, {factor}, {config:?}: allocation {n}");
            let mut training = Training::new(model, config);
            let losses = training.losses(factor);
            simulation.fail_allocation(n);
            let done = training.iteration(way, &losses, &mut |call| call());
            if simulation.fail_allocation(0) > 0 {
                done.unwrap();
                break;
            }
            assert!(
                matches!(done, Err(Error::Torch(_) | Error::Optimizer(OptimizerError::Step(_)))),
                "{what}"
            );
            training.opts.iter_mut().for_each(Opt::zero_grad);
            if abandons {
                for opt in &mut training.opts {
                    let abandoned = training.scaler.abandon(opt.amp());
                    assert!(
                        matches!(
                            abandoned,
                            Ok(()) | Err(Error::Scaler(ScalerError::AlreadyStepped))
                        ),
                        "{what}"
                    );
                }
            }
            let ended = training.scaler.update();
            assert!(
                matches!(ended, Ok(()) | Err(Error::Scaler(ScalerError::NoInfChecks))),
                "{what}: {ended:?}"
            );
            let before = training.bits().0;
            let losses = training.losses(0.25);
            training.iteration(way, &losses, &mut |call| call()).unwrap();
            assert_ne!(training.bits().0, before, "{what}");
        }
    });
}

/// An update changes all scales or none, and a backward that fails leaves the previous gradients.
#[test]
fn per_loss_scalers_end_an_iteration_for_all_losses_or_none() {
    let Some(simulation) = Simulation::find() else { return };
    let patient = GradScalerConfig { init_scale: 8.0, hysteresis: 2, ..Default::default() };
    let usual = GradScalerConfig { hysteresis: 1, ..patient };
    for devices in [ONE, TWO] {
        let run = |n: i64| {
            let all = parameters(devices, Kind::Float, 2);
            let mut opt = Descent(all);
            let mut scalers =
                PerLossScalers::with_configs(Device::Cuda(0), &[usual, patient, usual]);
            let scalers = scalers.as_mut().unwrap();
            let whole: Vec<Vec<Tensor>> =
                (0..3).map(|_| losses(&opt.0, devices, f64::INFINITY)).collect();
            let more: Vec<_> = (0..3).map(|_| losses(&opt.0, devices, f64::INFINITY)).collect();
            simulation.fail_allocation(n);
            for id in 0..3 {
                for (loss, again) in whole[id].iter().zip(&more[id]) {
                    if let Err(error) = scalers.backward(id, loss, &mut opt) {
                        assert_eq!(simulation.fail_allocation(0), 0, "{error}");
                        scalers.backward(id, again, &mut opt).unwrap();
                    }
                }
            }
            if scalers.step(&mut opt).is_err() {
                assert_eq!(simulation.fail_allocation(0), 0);
                drop(scalers.step(&mut opt).unwrap());
            }
            if scalers.update().is_err() {
                assert_eq!(simulation.fail_allocation(0), 0);
                let scale = |id| scalers.get_scale(id).unwrap();
                assert_eq!([0, 1, 2].map(scale), [8.0; 3], "allocation {n}");
                scalers.update().unwrap();
            }
            let left = simulation.fail_allocation(0);
            let weights: Vec<_> = opt.0.iter().map(|w| bits(&w.to_device(Device::Cpu))).collect();
            (left, scalers.state_dict().unwrap(), weights)
        };
        let (_, states, weights) = run(0);
        assert_eq!(states[0].scale, Some(4.0));
        assert_eq!((states[1].scale, states[1].hysteresis_tracker), (Some(8.0), Some(1)));
        for n in 1.. {
            let (left, got, stepped) = run(n);
            assert_eq!((&got, &stepped), (&states, &weights), "allocation {n}");
            if left > 0 {
                break;
            }
        }
    }
}

/// Loading states first allocates what all scalers need.
#[test]
fn either_all_states_of_several_scalers_are_loaded_or_none() {
    let Some(simulation) = Simulation::find() else { return };
    let patient = GradScalerConfig { init_scale: 8.0, hysteresis: 2, ..Default::default() };
    let configs = [patient; 3];
    let other = GradScalerConfig { init_scale: 32.0, ..patient };
    let saved = PerLossScalers::with_configs(Device::Cuda(0), &[other; 3]).unwrap();
    let saved = saved.state_dict().unwrap();
    simulation.fail_each(
        || {
            let scalers = PerLossScalers::with_configs(Device::Cuda(0), &configs).unwrap();
            let before = scalers.state_dict().unwrap();
            (scalers, before)
        },
        |(scalers, _)| scalers.load_state_dict(&saved),
        |n, (scalers, before), error| {
            assert!(matches!(error, Error::Torch(_)), "allocation {n}: {error}");
            assert_eq!(scalers.state_dict().unwrap(), before, "allocation {n}");
        },
    );
}

/// If an allocation fails, creating scalers and loss scales, and setting their values, returns an error.
#[test]
fn creating_and_setting_scales_succeeds_or_returns_an_error() {
    use tch_amp::loss_scale::{DynamicLossScale, StaticLossScale};
    use tch_amp::loss_scale::{DynamicLossScaleState, LossScale};
    let Some(simulation) = Simulation::find() else { return };
    let cuda = Device::Cuda(0);
    let config = GradScalerConfig { hysteresis: 2, ..Default::default() };
    let calls: [&dyn Fn() -> Result<()>; 4] = [
        &|| GradScaler::new(cuda).map(drop),
        &|| config.build(cuda).map(drop),
        &|| StaticLossScale::new(cuda, 8.0).map(drop),
        &|| {
            let mut scale = DynamicLossScale::new(cuda)?;
            scale.adjust(&Tensor::from(true))?;
            let state = DynamicLossScaleState::default();
            scale.load_state_dict(&tch_amp::loss_scale::LossScaleState::Dynamic(state))
        },
    ];
    for (place, call) in calls.iter().enumerate() {
        let _case = Case(format!("call {place}"));
        let failures = simulation.fail_each(
            || (),
            |()| call(),
            |n, (), error| assert!(matches!(error, Error::Torch(_)), "allocation {n}: {error}"),
        );
        assert!(failures > 0, "it allocates");
    }
}

/// Two optimizers with a weight of one each, and a scaler whose scale of 8 doubles in each iteration, after the
/// backward pass of a loss of both.
fn two(kind: Kind) -> (GradScaler, [Optimizer; 2], Tensor) {
    let device = Device::Cuda(0);
    let [a, b] = [(); 2].map(|()| Tensor::ones([1], (kind, device)).set_requires_grad(true));
    let masters = match kind {
        Kind::Float => MasterWeights::None,
        _ => MasterWeights::Float,
    };
    let opts = [&a, &b].map(|w| {
        let sgd = optim::Sgd::default().master_weights(masters);
        sgd.build(&[w.shallow_clone()], 0.5).unwrap()
    });
    let config = GradScalerConfig { init_scale: 8.0, growth_interval: 1, ..Default::default() };
    let scaler = config.build(device).unwrap();
    scaler.backward(&(a + &b).sum(Kind::Float)).unwrap();
    (scaler, opts, b)
}

/// The second optimizer steps after an `update` that has doubled the scale.
#[test]
fn gradients_from_before_an_update_keep_their_scale_in_calls_that_are_retried() {
    let Some(simulation) = Simulation::find() else { return };
    let cases = [Kind::Float, Kind::BFloat16]
        .map(|kind| [None, Some(false), Some(true)].map(|unscales| (kind, unscales)));
    for (kind, unscales) in cases.into_iter().flatten() {
        for n in 1.. {
            let (mut scaler, [mut of_a, mut of_b], b) = two(kind);
            if unscales == Some(true) {
                scaler.unscale_(&mut of_b).unwrap();
            }
            scaler.step(&mut of_a).unwrap();
            simulation.fail_allocation(n);
            let fails = |result: Result<()>| {
                let Err(error) = result else { return false };
                assert_eq!(simulation.fail_allocation(0), 0, "{kind:?} {unscales:?} {n}: {error}");
                true
            };
            if fails(scaler.update()) {
                scaler.update().unwrap();
            }
            if unscales.is_some() && fails(scaler.unscale_(&mut of_b)) {
                scaler.unscale_(&mut of_b).unwrap();
            }
            if fails(scaler.step(&mut of_b).map(drop)) {
                scaler.step(&mut of_b).unwrap();
            }
            let left = simulation.fail_allocation(0);
            assert_eq!(b.double_value(&[0]), 0.5, "{kind:?} {unscales:?}: allocation {n}");
            if left > 0 {
                break;
            }
        }
    }
}

/// The second optimizer is stepped once more after an `update`.
#[test]
fn gradients_of_a_step_that_was_not_taken_keep_their_scale() {
    let Some(simulation) = Simulation::find() else { return };
    for kind in [Kind::Float, Kind::BFloat16] {
        let _case = Case(format!("{kind:?}"));
        simulation.fail_each(
            || two(kind),
            |(scaler, [_, of_b], _)| scaler.step(of_b),
            |n, (mut scaler, [mut of_a, mut of_b], b), _| {
                scaler.step(&mut of_a).unwrap();
                scaler.update().unwrap();
                scaler.step(&mut of_b).unwrap();
                assert_eq!(b.double_value(&[0]), 0.5, "allocation {n}");
            },
        );
    }
}
