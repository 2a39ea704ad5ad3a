//! The engine that runs backward passes: when it is replaced, and when it is not.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use tch::{Cuda, Device, Kind, Tensor};

use crate::error::Error;
use crate::ffi::{self, SavedForm};
use crate::function;
use crate::function::Function;
use crate::memory::SavedTensors;
use crate::recompute::checkpointed;
use crate::sys;

fn device() -> Device {
    if Cuda::is_available() { Device::Cuda(0) } else { Device::Cpu }
}

/// The gradient of the sum of a function of 4096 threes, which have a history.
fn gradient(f: impl FnOnce(&Tensor) -> Tensor) -> f64 {
    let leaf = Tensor::full([64, 64], 3.0, (Kind::Float, device())).set_requires_grad(true);
    f(&(&leaf * 1)).sum(Kind::Float).backward();
    leaf.grad().get(0).double_value(&[7])
}

const COSINE: f64 = -0.989_992_5;

#[test]
fn an_engine_of_others_is_refused_and_left_alone() {
    for before in [false, true] {
        if before {
            SavedTensors::half().run(|| ()).unwrap();
        }
        ffi::testing_engine(sys::TESTING_ENGINE_OF_OTHERS);
        let mut has_run = false;
        let error = SavedTensors::half().run(|| has_run = true).unwrap_err();
        assert!(matches!(error, Error::OtherEngine { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("OtherEngine") && text.contains("saved_tensors_hooks"), "{text}");
        assert!(!has_run);
        let (x, runs) = (Tensor::from(2f32).set_requires_grad(true), Arc::new(AtomicUsize::new(0)));
        let part = || {
            let runs = Arc::clone(&runs);
            checkpointed(&[&x], move |x| {
                runs.fetch_add(1, Ordering::Relaxed);
                Ok(x[0].square())
            })
        };
        assert!(matches!(part(), Err(Error::OtherEngine { .. })));
        // Without gradients nothing is to be recomputed.
        assert_eq!(tch::no_grad(part).unwrap(), Tensor::from(4f32));
        assert_eq!(runs.load(Ordering::Relaxed), 1);
        // It goes on to run backward passes.
        assert!((gradient(Tensor::sin) - COSINE).abs() < 1e-6);
        ffi::testing_engine(sys::TESTING_ENGINE_OF_LIBTORCH);
        SavedTensors::half().run(|| has_run = true).unwrap();
        assert!(has_run);
    }
}

/// The sine, whose backward tells that it runs and goes on when it may. Then it runs a pass of its own.
fn waiting(here: mpsc::Sender<()>, go: mpsc::Receiver<()>) -> impl Function<Outputs = Tensor> {
    let go = Mutex::new(go);
    function(
        |ctx, x| {
            ctx.save_for_backward(x);
            Ok(x[0].f_sin()?)
        },
        move |ctx, g| {
            let [x] = ctx.saved_tensors()?;
            here.send(())?;
            go.lock().unwrap_or_else(PoisonError::into_inner).recv()?;
            // On the threads of an engine, and on that of a device.
            let inner = x.detach().set_requires_grad(true);
            tch::with_grad(|| SavedTensors::on_host().run(|| (&inner * 2).sin().sum(Kind::Float)))?
                .f_backward()?;
            assert!((inner.grad().double_value(&[0, 0]) - 2.0 * 6f64.cos()).abs() < 1e-5);
            Ok([&g[0] * x.cos()])
        },
    )
}

#[test]
fn passes_that_run_end_in_the_old_engine_and_later_ones_are_of_the_new() {
    for _ in 0..20 {
        ffi::testing_engine(sys::TESTING_ENGINE_OF_LIBTORCH);
        let ((here, is_here), (go, may_go)) = (mpsc::channel(), mpsc::channel());
        let old = thread::spawn(move || {
            gradient(|x| waiting(here, may_go).apply(&[x]).unwrap().sin().asin())
        });
        is_here.recv().unwrap();
        // The old pass runs. A new one begins, in whose middle the old one ends.
        let ((new_here, new_is_here), (new_go, new_may_go)) = (mpsc::channel(), mpsc::channel());
        let new = thread::spawn(move || {
            gradient(|x| {
                let form = SavedTensors::half();
                form.run(|| waiting(new_here, new_may_go).apply(&[x])).unwrap().unwrap()
            })
        });
        new_is_here.recv().unwrap();
        go.send(()).unwrap();
        let of_old = old.join().unwrap();
        new_go.send(()).unwrap();
        let of_new = new.join().unwrap();
        assert!((of_old - COSINE).abs() < 1e-3, "{of_old}");
        assert!((of_new - COSINE).abs() < 1e-6, "{of_new}");
    }
}

/// Deeper than libtorch nests passes on one thread.
#[test]
fn passes_may_be_nested_deeply() {
    fn nested(depth: u32, x: &Tensor) -> Tensor {
        let inner = function(
            |_, x| Ok(x[0].f_mul_scalar(1)?),
            move |_, g| {
                if depth > 0 {
                    let leaf = Tensor::ones_like(&g[0]).set_requires_grad(true);
                    let inner = || nested(depth - 1, &leaf).sum(Kind::Float);
                    tch::with_grad(inner).f_backward()?;
                }
                Ok([g[0].shallow_clone()])
            },
        );
        inner.apply(&[x]).unwrap()
    }
    // libtorch starts the threads of one engine in a process, that of the first pass.
    ffi::testing_engine(sys::TESTING_ENGINE_OF_LIBTORCH);
    assert!((gradient(Tensor::sin) - COSINE).abs() < 1e-6);
    let form = SavedTensors::half();
    let run = move || gradient(|x| form.run(|| nested(100, x)).unwrap());
    // A test's own stack has 2 MiB.
    let thread = thread::Builder::new().stack_size(64 << 20).spawn(run).unwrap();
    assert_eq!(thread.join().unwrap(), 1.0);
}

/// Hooks that keep tensors as they are change no bit, and end with their region.
#[test]
fn tensors_may_be_kept_as_they_are() {
    let saved = ffi::SavedTensors::new(SavedForm::AsGiven).unwrap();
    assert!(ffi::SavedTensors::current().unwrap().is_none());
    let is_inside = saved.during(|| ffi::SavedTensors::current().unwrap().is_some()).unwrap();
    assert!(is_inside);
    let run = |x: &Tensor| saved.during(|| x.sin().exp()).unwrap();
    assert_eq!(gradient(run), gradient(|x| x.sin().exp()));
}
