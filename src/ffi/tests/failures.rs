//! Tests in which every function of the shim fails once, with every kind of C++ exception.

use tch::nn::{self, OptimizerConfig as _, VarStore};
use tch::{Device, Kind, Tensor};

use crate::autocast::{AutocastState, autocast_dtype};
use crate::error::ScalerError;
#[cfg(feature = "insight")]
use crate::ffi::exponents::{CountedGradient, StepNumber, StepNumbers};
use crate::function::{Function, GradConfig, grad};
use crate::gradients::ClipNorm;
use crate::recompute::checkpointed;
use crate::scaler::{GradScalerConfig, PerLossScalers};
use crate::{Autocast, Error, GradScaler, Result, autocast, ffi, function, optim, sys};

const KINDS: [(u8, &str); 3] = [
    (sys::TESTING_TORCH_ERROR, "a planted failure"),
    (sys::TESTING_BAD_ALLOC, "std::bad_alloc"),
    (sys::TESTING_INT, "unknown C++ exception"),
];

/// The state of a training program, one of whose calls fails.
struct Program {
    vs: VarStore,
    net: nn::Linear,
    optimizer: nn::Optimizer,
    fused: optim::Optimizer,
    scaler: GradScaler,
}

impl Program {
    fn new() -> Self {
        let vs = VarStore::new(Device::Cpu);
        let net = nn::linear(vs.root(), 3, 2, Default::default());
        let optimizer = nn::Sgd::default().build(&vs, 0.1).unwrap();
        let fused = optim::AdamW::default().build(&vs, 0.1).unwrap();
        let config = GradScalerConfig { hysteresis: 2, ..Default::default() };
        Self { vs, net, optimizer, fused, scaler: config.build(Device::Cpu).unwrap() }
    }

    /// Trains with each way to step once.
    fn run(&mut self) -> Result<()> {
        for way in 0..6 {
            self.optimizer.zero_grad();
            let x = Tensor::ones([4, 3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
            let output = autocast(Device::Cpu, || {
                let hidden = checkpointed(&[&x], |x| Ok(x[0].f_sin()?.f_cos()?))?;
                self.function().apply(&[&hidden, &self.net.ws])
            })??;
            // The gradients of this loss do not depend on the weights, so that every iteration makes the same calls:
            // clipping writes only if it must, and gradients that were written are checked again.
            let loss = output.mean(Kind::Float);
            self.scaler.scale(&loss)?.f_backward()?;
            match way {
                0 => drop(self.scaler.step(&mut self.optimizer)?),
                3 => drop(self.scaler.step(&mut self.fused)?),
                4 => drop(self.scaler.step_clip_norm(&mut self.fused, 0.1)?),
                5 => {
                    self.scaler.unscale_(&mut self.fused)?;
                    let clip = ClipNorm { error_if_nonfinite: true, ..ClipNorm::from(0.1) };
                    let _norm = self.fused.clip_grad_norm(clip)?;
                    drop(self.scaler.step(&mut self.fused)?);
                    self.fused.zero_grad()?;
                }
                1 => {
                    self.scaler.unscale_(&mut self.optimizer)?;
                    drop(self.scaler.step(&mut self.optimizer)?);
                }
                _ => {
                    let mut unscaled = self.scaler.unscale(&mut self.optimizer)?;
                    drop(unscaled.clip_grad_norm(0.1)?);
                    unscaled.clip_grad_value(0.1)?;
                    drop(unscaled.step()?);
                }
            }
            self.scaler.update()?;
        }
        Ok(())
    }

    /// A product that uses every method of its context.
    fn function(&self) -> impl Function<Outputs = Tensor> + use<> {
        function(
            |ctx, x| {
                ctx.save_for_backward(x);
                Ok(x[0].matmul(&x[1].tr()))
            },
            |ctx, g| {
                let [a, b] = ctx.saved_tensors()?;
                let da = ctx.needs_input_grad(0)?.then(|| g[0].matmul(&b));
                let db = ctx.needs_input_grad(1)?.then(|| g[0].tr().matmul(&a));
                Ok([da, db])
            },
        )
    }
}

/// Returns the state that must be unchanged: the autocast state and the grad mode.
fn state() -> (AutocastState, bool) {
    let x = Tensor::from(1.0).set_requires_grad(true);
    (AutocastState::current().unwrap(), (x * 2.0).requires_grad())
}

#[test]
fn every_function_of_the_shim_fails_once_and_nothing_is_left_behind() {
    for (kind, text) in KINDS {
        let (mut failed, mut swallowed) = (0, 0);
        loop {
            let mut program = Program::new();
            let before = state();
            ffi::testing_fail_at(failed + 1, kind);
            let result = program.run();
            if ffi::testing_fail_at(0, kind) > 0 {
                result.unwrap();
                break;
            }
            failed += 1;
            match result {
                Err(error) => assert!(error.to_string().contains(text), "{failed}: {error}"),
                Ok(()) => swallowed += 1,
            }
            assert_eq!(state(), before, "after failure {failed}");
            // The same program continues once the failed iteration is abandoned.
            program.optimizer.zero_grad();
            program.scaler.abandon(&mut program.optimizer).ok();
            drop(program.scaler.update());
            program.run().unwrap();
            assert!(
                program.vs.trainable_variables().iter().all(|w| w
                    .isfinite()
                    .all()
                    .int64_value(&[])
                    == 1)
            );
        }
        assert!(failed > 40, "only {failed} calls were reached");
        // Six steps succeed even if the cache cannot be cleared after them, and four calls unscale even if the
        // gradients cannot be inspected after that.
        assert_eq!(swallowed, 10, "calls whose failure is not reported");
    }
}

/// Tests the functions that the program above does not reach on a CPU.
#[test]
fn so_do_the_functions_that_a_cpu_program_does_not_reach() {
    let w = Tensor::from(1.0).set_requires_grad(true);
    let found = Tensor::from(0f32);
    for (kind, text) in KINDS {
        let fails = |call: &dyn Fn() -> Result<()>| {
            ffi::testing_fail_at(1, kind);
            let error = call().unwrap_err().to_string();
            assert_eq!(ffi::testing_fail_at(0, kind), 0);
            assert!(error.contains(text), "{error}");
        };
        fails(&|| ffi::cuda_initialize());
        fails(&|| grad(&[&w], &[&w], &GradConfig::default()).map(drop));
        fails(&|| ffi::gradients_drop([&w]));
        fails(&|| ffi::gradients_separate(std::slice::from_ref(&w)));
        fails(&|| ffi::gradients_separate_leaves(&w));
        fails(&|| ffi::other_leaves(&w, &[]).map(drop));
        fails(&|| ffi::count_additions(&w).map(drop));
        let watched = ffi::Watched::new(&w);
        fails(&|| watched.get().map(drop));
        fails(&|| ffi::overlapping(std::slice::from_ref(&w)).map(drop));
        fails(&|| ffi::gradients_widen(&[w.shallow_clone()]).map(drop));
        fails(&|| ffi::gradient_rest(&w, None).map(drop));
        let widened = ffi::gradients_widen(&[w.shallow_clone()]).unwrap();
        fails(&|| widened.undo(&[w.shallow_clone()]));
        fails(&|| ffi::gradients_drop_narrow([&w]));
        fails(&|| ffi::gradients_narrow(std::slice::from_ref(&w)));
        fails(&|| ffi::master_numbers(&w, &w).map(drop));
        fails(&|| ffi::all_finite(&[&w]).map(drop));
        fails(&|| ffi::any_nonzero(&[&found]).map(drop));
        let parameters = [w.shallow_clone()];
        fails(&|| ffi::clip_by_norm(&parameters, &found, 1.0));
        let (running, own) = (found.shallow_clone(), found.copy());
        fails(&|| {
            let (running, own) = ([running.shallow_clone()], [own.shallow_clone()]);
            ffi::StatisticsPass::begin(&running, &own, &[false]).map(drop)
        });
        let random = ffi::rng_state(Device::Cpu).unwrap();
        fails(&|| ffi::rng_check_state(Device::Cpu, &random));
        fails(&|| ffi::SavedTensors::new(ffi::SavedForm::Half).map(drop));
        fails(&|| ffi::SavedTensors::current().map(drop));
        let saved = ffi::SavedTensors::new(ffi::SavedForm::Half).unwrap();
        fails(&|| saved.during(|| ()));
        fails(&|| ffi::jit_set_autocast_mode(false).map(drop));
        fails(&|| ffi::jit_freeze(b"file").map(drop));
        assert!(!ffi::any_nonzero(&[&found]).unwrap());
        #[cfg(feature = "insight")]
        {
            let counted = CountedGradient { parameter: &w, row: 0, unscaled: false };
            fails(&|| ffi::exponents::exponents_count(None, &[counted], 1, None).map(drop));
            let one = StepNumber::Host(1.0);
            let numbers = StepNumbers {
                scale: one,
                flag: one,
                norm: Some(&w),
                loss: None,
                learning_rate: one,
                is_judged: false,
            };
            let next = ffi::Counted::Host(0);
            fails(&|| ffi::exponents::history_record(None, 1, next, numbers).map(drop));
        }
        #[cfg(feature = "distributed")]
        {
            fails(&|| ffi::distributed::random_permutation(3, 1).map(drop));
            fails(&|| ffi::distributed::seed(Device::Cpu, 1));
            let second = std::time::Duration::from_secs(1);
            let store = ffi::distributed::Store::in_process(second).unwrap();
            fails(&|| ffi::distributed::check_interface(None, Some("127.0.0.1")));
            fails(&|| store.set("key", "value"));
            fails(&|| store.get("key", second).map(drop));
            fails(&|| store.count("count").map(drop));
            fails(&|| store.has("key").map(drop));
            fails(&|| store.wait(&["key".to_owned()], second));
            fails(&|| ffi::distributed::unwritable(std::slice::from_ref(&w)).map(drop));
            fails(&|| ffi::statistics_momentum(&found, &found, true, 0.1).map(drop));
        }
    }
}

/// Returns an iteration in which unscaling failed midway, so that its gradients may be partly unscaled. The scale is 8.
fn half_unscaled(kind: u8) -> (Tensor, optim::Optimizer, GradScaler) {
    let w = Tensor::from(2f32).set_requires_grad(true);
    let mut opt = optim::Sgd::default().build(vec![w.shallow_clone()], 1.0).unwrap();
    let config = GradScalerConfig { init_scale: 8.0, ..Default::default() };
    let mut scaler = config.build(Device::Cpu).unwrap();
    scaler.backward(&(&w * 3.0)).unwrap();
    // Calls that fail before the gradients change can be repeated. The loop ends with the first failure after they have
    // changed.
    for call in 1.. {
        ffi::testing_fail_at(call, kind);
        let error = scaler.unscale_(&mut opt).unwrap_err();
        assert_eq!(ffi::testing_fail_at(0, kind), 0, "it has failed");
        assert!(matches!(error, Error::Torch(_)), "{call}: {error}");
        if w.grad().double_value(&[]) != 24.0 {
            assert!(call > 2, "it inspects and allocates first");
            break;
        }
    }
    (w, opt, scaler)
}

#[test]
fn a_failed_unscale_goes_on_as_its_error_says() {
    for (kind, _) in KINDS {
        for advice in ["zero_grad and abandon", "zero_grad and update", "zeros and update"] {
            let (mut w, mut opt, mut scaler) = half_unscaled(kind);
            for refused in [
                scaler.unscale_(&mut opt),
                scaler.step(&mut opt).map(drop),
                scaler.step_clip_norm(&mut opt, 1.0).map(drop),
                scaler.update(),
                scaler.update_with(8.0),
                scaler.update_with_tensor(&Tensor::from(8f32)),
                scaler.abandon(&mut opt),
            ] {
                assert!(
                    matches!(refused, Err(Error::Scaler(ScalerError::UnscaleFailed))),
                    "{refused:?}"
                );
            }
            match advice {
                "zeros and update" => w.zero_grad(),
                _ => opt.zero_grad().unwrap(),
            }
            match advice {
                "zero_grad and abandon" => scaler.abandon(&mut opt).unwrap(),
                _ => scaler.update().unwrap(),
            }
            assert_eq!(scaler.get_scale().unwrap(), 8.0, "{advice}");
            scaler.backward(&(&w * 3.0)).unwrap();
            assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap(), "{advice}");
            scaler.update().unwrap();
            assert_eq!(w.double_value(&[]), -1.0, "{advice}");
            assert_eq!(scaler.get_growth_tracker().unwrap(), 1, "{advice}");
        }
    }
}

/// An overflow of another optimizer still counts.
#[test]
fn an_update_after_a_failed_unscale_counts_what_was_found_elsewhere() {
    let (_w, mut opt, mut scaler) = half_unscaled(sys::TESTING_TORCH_ERROR);
    let other = Tensor::from(1f32).set_requires_grad(true);
    let mut stepped = optim::Sgd::default().build(vec![other.shallow_clone()], 1.0).unwrap();
    scaler.backward(&(&other * f64::INFINITY)).unwrap();
    assert!(scaler.step(&mut stepped).unwrap().is_skipped().unwrap());
    assert!(matches!(scaler.update(), Err(Error::Scaler(ScalerError::UnscaleFailed))));
    opt.zero_grad().unwrap();
    scaler.update().unwrap();
    assert_eq!(scaler.get_scale().unwrap(), 4.0);
}

#[test]
fn a_backward_of_one_of_several_losses_that_fails_loses_no_gradient() {
    for (kind, text) in KINDS {
        for call in 1.. {
            let w = Tensor::from(2.0).set_requires_grad(true);
            let mut opt = optim::Sgd::default().build(vec![w.shallow_clone()], 1.0).unwrap();
            let mut scalers = PerLossScalers::new(Device::Cpu, 2).unwrap();
            scalers.backward(0, &(&w * 3.0), &mut opt).unwrap();
            ffi::testing_fail_at(call, kind);
            let result = scalers.backward(1, &(&w * 4.0), &mut opt);
            let done = ffi::testing_fail_at(0, kind) > 0;
            let Err(error) = result else {
                assert!(done && call > 5, "call {call} was swallowed");
                assert_eq!(w.grad().double_value(&[]), 7.0);
                break;
            };
            assert!(error.to_string().contains(text), "{call}: {error}");
            assert_eq!(w.grad().double_value(&[]), 3.0, "call {call}");
            scalers.backward(1, &(&w * 4.0), &mut opt).unwrap();
            assert!(scalers.step(&mut opt).unwrap().is_stepped().unwrap());
            assert_eq!(w.double_value(&[]), -5.0);
            scalers.update().unwrap();
        }
    }
}

#[test]
fn a_region_that_cannot_open_changes_nothing() {
    for (kind, _) in KINDS {
        for call in 1..=2 {
            let before = state();
            ffi::testing_fail_at(call, kind);
            let region = Autocast::new(Device::Cpu).dtype(Kind::Half).enter();
            assert_eq!(ffi::testing_fail_at(0, kind), 0, "it has failed");
            assert!(region.is_err());
            assert_eq!(state(), before);
            assert_eq!(autocast_dtype(Device::Cpu).unwrap(), Kind::BFloat16);
        }
    }
}

/// An optimizer with master weights of parameters in half precision, with gradients of 8.
fn halves() -> (Tensor, optim::Optimizer) {
    let w = Tensor::ones([2], (Kind::BFloat16, Device::Cpu)).set_requires_grad(true);
    let sgd = optim::Sgd::default().master_weights(optim::MasterWeights::Float);
    let opt = sgd.build(vec![w.shallow_clone()], 1.0).unwrap();
    (&w * 8.0).sum(None).backward();
    (w, opt)
}

/// Each call of the shim fails once. Unless a gradient was changed midway, which has an error of its own, all have the
/// dtypes and numbers from before, also those of the next backward.
#[test]
fn a_failed_unscale_leaves_the_dtypes_of_gradients() {
    type Way =
        fn(&mut GradScaler, &mut PerLossScalers, &Tensor, &mut optim::Optimizer) -> Result<()>;
    let ways: [Way; 4] = [
        |scaler, _, _, opt| scaler.unscale_(opt),
        |scaler, _, _, opt| scaler.unscale(opt).map(drop),
        |scaler, _, _, opt| scaler.step_clip_norm(opt, 1.0).map(drop),
        |_, scalers, w, opt| scalers.backward(0, &(w * 2.0).sum(Kind::Float), opt),
    ];
    for (kind, _) in KINDS {
        for (which, way) in ways.iter().enumerate() {
            let mut failed = 0;
            for call in 1.. {
                let (w, mut opt) = halves();
                let config = GradScalerConfig { init_scale: 8.0, ..Default::default() };
                let mut scaler = config.build(Device::Cpu).unwrap();
                let mut scalers = PerLossScalers::with_configs(Device::Cpu, &[config]).unwrap();
                ffi::testing_fail_at(call, kind);
                let outcome = way(&mut scaler, &mut scalers, &w, &mut opt);
                let reached = ffi::testing_fail_at(0, kind) == 0;
                if !reached {
                    outcome.unwrap();
                    break;
                }
                let Err(error) = outcome else { continue };
                failed += 1;
                let after = (w.grad().kind(), w.grad().double_value(&[0]));
                if matches!(scaler.update(), Err(Error::Scaler(ScalerError::UnscaleFailed))) {
                    continue;
                }
                let text = format!("call {call} of way {which}: {error}");
                assert_eq!(after, (Kind::BFloat16, 8.0), "{text}");
                opt.zero_grad().unwrap();
                (&w * 8.0).sum(None).backward();
                assert_eq!(w.grad().kind(), Kind::BFloat16, "the next one, {text}");
            }
            assert!(failed > 4, "way {which} failed {failed} times");
        }
    }
}
