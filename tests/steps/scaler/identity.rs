//! Gradients, parameters and optimizers that are freed and whose memory is reused.

use std::cell::RefCell;
use std::rc::Rc;

use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::gradients::GradientChange::Appeared;
use tch_amp::gradients::GradientError::{self, Changed};
use tch_amp::optim::{AdamW, AmpOptimizer, Parameters, Step};
use tch_amp::scaler::PerLossScalers;
use tch_amp::{Error, GradScaler};

use crate::scaler::{Descent, INF, after_unscaled, drop_gradients, loss, model, ones, scaler};
use testkit::{assert_refused, assert_says, for_each_device, to_f64};

fn scalers(device: Device) -> [GradScaler; 2] {
    [GradScaler::skip_only(device).unwrap(), scaler(device)]
}

/// Runs `attack` between `unscale_` and `step`, often enough for freed memory to be reused.
fn replaced(attack: impl Fn(&Tensor)) {
    for_each_device(|device| {
        for run in 0..100 {
            for mut scaler in scalers(device) {
                let (_vs, w, mut opt) = model(device);
                scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
                scaler.unscale_(&mut opt).unwrap();
                attack(&w);
                let error = scaler.step(&mut opt).unwrap_err();
                let how = matches!(error, Error::Gradient(Changed { .. }));
                assert!(how, "run {run} on {device:?}: {error}");
            }
        }
    });
}

fn drop_gradient(w: &Tensor) {
    drop_gradients(&[w.shallow_clone()]);
}

#[test]
fn a_recreated_gradient_does_not_count_as_unscaled() {
    replaced(|w| {
        drop_gradient(w);
        loss(w, &[1.0, INF, 1.0]).backward();
        // The multiplication in place gives the new gradient the version of the one that was unscaled.
        let _same = no_grad(|| w.grad().g_mul_scalar_(1.0));
    });
}

#[test]
fn gradients_of_two_later_backwards_do_not_count_as_unscaled() {
    replaced(|w| {
        drop_gradient(w);
        loss(w, &[1.0; 3]).backward();
        loss(w, &[1.0, INF, 1.0]).backward();
    });
}

#[test]
fn a_gradient_with_new_data_does_not_count_as_unscaled() {
    replaced(|w| {
        let new = Tensor::from_slice(&[1.0f32, f32::INFINITY, 1.0]).to_device(w.device());
        no_grad(|| w.grad().set_data(&new));
    });
}

/// If an address is reused, `update` must neither take the new gradients for unscaled ones nor a second optimizer's
/// parameter for the first one's.
#[test]
fn optimizers_may_be_created_and_dropped_within_an_iteration() {
    for_each_device(|device| {
        for run in 0..200 {
            let (mut scaler, steps) = (scaler(device), run % 2 == 0);
            for value in [1.0, 2.0, 3.0] {
                let (_vs, w, mut opt) = model(device);
                scaler.backward(&loss(&w, &[value; 3])).unwrap();
                scaler.unscale_(&mut opt).unwrap();
                assert_eq!(to_f64(&w.grad()), [value; 3]);
                if steps {
                    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
                    assert_eq!(to_f64(&w), [1.0 - value; 3]);
                }
            }
            scaler.update().unwrap();
        }
    });
}

#[test]
fn an_overflow_is_not_attributed_to_another_optimizer_at_the_same_address() {
    for_each_device(|device| {
        for run in 0..100 {
            let mut scalers = PerLossScalers::new(device, 1).unwrap();
            let made = |value: f64| {
                let w = ones(Kind::Float, device);
                (loss(&w, &[value; 3]), Descent(vec![w]))
            };
            let (loss, mut opt) = made(INF);
            scalers.backward(0, &loss, &mut opt).unwrap();
            drop((loss, opt));
            let (loss, mut opt) = made(1e-6);
            scalers.backward(0, &loss, &mut opt).unwrap();
            assert!(scalers.step(&mut opt).unwrap().is_stepped().unwrap(), "run {run}");
        }
    });
}

/// A gradient that was removed and then computed again has not been unscaled.
#[test]
fn a_gradient_that_is_removed_and_recomputed_counts_as_new() {
    for_each_device(|device| {
        for losses in [1, 2] {
            let (_vs, w, mut opt, mut scaler) = after_unscaled(device, &[1.0; 3]);
            drop_gradient(&w);
            for _ in 0..losses {
                // Scaling a loss records which gradients exist.
                scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
            }
            assert_refused!(
                scaler.step(&mut opt),
                Error::Gradient(Changed { how, .. }) if losses == 2 || how == Appeared
            );
            assert_eq!(to_f64(&w), [1.0; 3]);
        }
    });
}

#[test]
fn a_gradient_of_another_shape_or_dtype_is_named() {
    for_each_device(|device| {
        for (new, problem) in [
            (Tensor::ones([4], (Kind::Float, device)), "does not have the shape"),
            (Tensor::ones([3], (Kind::Double, device)), "has another dtype"),
        ] {
            let w = ones(Kind::Float, device);
            let mut opt =
                AdamW::default().build(vec![("layer.w", w.shallow_clone())], 0.1).unwrap();
            let mut scaler = scaler(device);
            scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
            no_grad(|| w.grad().set_data(&new));
            for refused in [scaler.step(&mut opt).map(drop), opt.update(&Step::default())] {
                let error = refused.unwrap_err();
                let text = error.to_string();
                assert!(matches!(error, Error::Gradient(GradientError::Unsupported { .. })));
                assert!(text.contains("`layer.w`") && text.contains(problem), "{text}");
            }
            assert_eq!(to_f64(&w), [1.0; 3]);
            // What the error message advises.
            opt.zero_grad().unwrap();
            scaler.abandon(&mut opt).unwrap();
            scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
            assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
        }
    });
}

#[test]
fn a_retained_graph_can_be_run_again() {
    for_each_device(|device| {
        let (_vs, w, mut opt) = model(device);
        let mut scaler = scaler(device);
        let common = loss(&w, &[1.0; 3]).square();
        scaler.backward_retain_graph(&common).unwrap();
        scaler.backward(&(&common * 2.0)).unwrap();
        scaler.unscale_(&mut opt).unwrap();
        assert_eq!(to_f64(&w.grad()), [18.0; 3]);
        assert!(scaler.backward(&common).is_err(), "its graph was freed");
    });
}

/// An optimizer that uses the scaler whenever it is asked for something.
struct Asking {
    inner: Descent,
    scaler: Rc<GradScaler>,
    answers: RefCell<Vec<tch_amp::Result<Tensor>>>,
}

impl Asking {
    fn of(ws: &[&Tensor], scaler: &Rc<GradScaler>) -> Self {
        let inner = Descent::of(ws.iter().copied());
        Self { inner, scaler: scaler.clone(), answers: RefCell::default() }
    }

    fn ask(&self) {
        let answer = self.scaler.scale(&Tensor::from(1f32));
        self.answers.borrow_mut().push(answer);
        // A state, or an error that says why there is none.
        drop(self.scaler.state_dict());
    }

    /// Fails unless one answer is that the scaler was asked from within itself.
    fn assert_one_is_refused(&mut self) {
        let answers = self.answers.take();
        let refused: Vec<_> = answers.into_iter().filter_map(Result::err).collect();
        let says_why =
            |error: &Error| error.to_string().contains("uses its scaler in `parameter_name`");
        assert!(refused.len() == 1 && refused.iter().all(says_why), "{refused:?}");
    }
}

impl AmpOptimizer for Asking {
    fn parameters(&self) -> Parameters<'_> {
        self.ask();
        self.inner.parameters()
    }

    fn update(&mut self, step: &Step<'_>) -> tch_amp::Result<()> {
        self.ask();
        self.inner.update(step)
    }

    fn wants_f32_gradients(&self) -> bool {
        self.ask();
        true
    }

    fn parameter_name(&self, index: usize) -> Option<String> {
        self.ask();
        Some(format!("weight {index}"))
    }
}

#[test]
fn an_optimizer_may_use_the_scaler_while_it_is_asked() {
    for_each_device(|device| {
        for kind in [Kind::Float, Kind::BFloat16] {
            let w = ones(kind, device);
            let shared = Rc::new(scaler(device));
            let mut opt = Asking::of(&[&w], &shared);
            shared.backward(&loss(&w, &[1.0; 3])).unwrap();
            assert!(shared.unscale(&mut opt).unwrap().step().unwrap().is_stepped().unwrap());
            assert_eq!(to_f64(&w), [0.0; 3]);
            let answers = opt.answers.take();
            assert!(answers.len() > 2 && answers.iter().all(Result::is_ok), "{answers:?}");
        }
    });
}

/// The name is for the message of an error. Whether the scaler answers meanwhile or fails, nothing panics.
#[test]
fn an_optimizer_that_uses_the_scaler_for_a_name_gets_an_answer() {
    let [w, other] = [(); 2].map(|()| ones(Kind::Float, Device::Cpu));
    let shared = Rc::new(scaler(Device::Cpu));
    let mut opt = Asking::of(&[&w, &other], &shared);
    shared.backward(&loss(&w, &[1.0; 3])).unwrap();
    let unscaled = shared.unscale(&mut opt).unwrap();
    shared.backward(&loss(&other, &[1.0; 3])).unwrap();
    let error = unscaled.step().unwrap_err().to_string();
    assert!(error.contains("weight 1") && error.contains("appeared"), "{error}");
    opt.assert_one_is_refused();
}

/// The same where the name is that of a gradient that belongs to another optimizer.
#[test]
fn an_optimizer_that_uses_the_scaler_for_the_name_of_a_shared_gradient_gets_an_answer() {
    let [w, other] = [(); 2].map(|()| ones(Kind::Float, Device::Cpu));
    let shared = Rc::new(scaler(Device::Cpu));
    shared.backward(&(loss(&w, &[1.0; 3]) + loss(&other, &[1.0; 3]))).unwrap();
    let mut first = Descent::of([&w]);
    let _unscaled = shared.unscale(&mut first).unwrap();
    let mut opt = Asking::of(&[&other, &w], &shared);
    assert_says(shared.unscale(&mut opt).map(drop), "weight 1");
    opt.assert_one_is_refused();
}
