//! Panics in a forward, a backward or a destructor, on every thread and with every payload.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor, with_grad};
use tch_amp::Autocast;
use tch_amp::autocast::{AutocastState, autocast_dtype, is_autocast_enabled};
use tch_amp::function::{BackwardContext, ForwardContext, Function, FunctionResult, GradOutputs};

use crate::OnDrop;
use crate::function::{Counted, Owning, apply, for_each_leaf, message, to_f64};
use testkit::tensors::leaf;
use testkit::{assert_says, for_each_device};

/// libtorch runs backwards that are nested more deeply than this on threads of a pool.
const SAME_THREAD: usize = 60;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Payload {
    Str,
    String,
    Any,
    /// Panics again when it is dropped.
    Bomb,
}

const PAYLOADS: [Payload; 4] = [Payload::Str, Payload::String, Payload::Any, Payload::Bomb];

struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            resume_unwind(Box::new("a payload that panics"));
        }
    }
}

/// Panics without calling the panic hook, whose messages would fill the terminal.
fn blow(payload: Payload) -> ! {
    match payload {
        Payload::Str => resume_unwind(Box::new("a planted panic")),
        Payload::String => resume_unwind(Box::new(String::from("a planted panic"))),
        Payload::Any => resume_unwind(Box::new(42)),
        Payload::Bomb => resume_unwind(Box::new(Bomb)),
    }
}

/// A backward that runs another one, and so on, until the innermost panics.
struct Nest {
    depth: usize,
    payload: Payload,
    count: Arc<AtomicUsize>,
    _counted: Counted,
    threads: Arc<AtomicUsize>,
    thread: std::thread::ThreadId,
}

impl Nest {
    fn new(
        depth: usize,
        payload: Payload,
        count: &Arc<AtomicUsize>,
        threads: &Arc<AtomicUsize>,
    ) -> Self {
        Self {
            depth,
            payload,
            count: Arc::clone(count),
            _counted: Counted::new(count),
            threads: Arc::clone(threads),
            thread: std::thread::current().id(),
        }
    }
}

impl Function for Nest {
    type Outputs = Tensor;
    type Gradients = Tensor;

    fn forward(&self, ctx: &mut ForwardContext, x: &[&Tensor]) -> FunctionResult<Tensor> {
        ctx.save_value(Counted::new(&self.count));
        ctx.save_for_backward(x);
        Ok(x[0] * 2.0)
    }

    fn backward(&self, _: &BackwardContext<'_>, g: &GradOutputs<'_>) -> FunctionResult<Tensor> {
        if std::thread::current().id() != self.thread {
            self.threads.fetch_add(1, Ordering::SeqCst);
        }
        if self.depth == 0 {
            // The panic leaves gradients enabled, which were disabled before.
            with_grad(|| blow(self.payload));
        }
        let device = g[0].device();
        let x = leaf(&[1.0], Kind::Double, device);
        let inner = Nest::new(self.depth - 1, self.payload, &self.count, &self.threads);
        let _region = Autocast::new(device).dtype(Kind::Half).cache(false).enter()?;
        let y = with_grad(|| inner.apply(&[&x]))?;
        y.f_backward()?;
        Ok(g[0].shallow_clone())
    }
}

fn state(device: Device) -> (bool, bool, Kind, bool) {
    let x = leaf(&[1.0], Kind::Double, device);
    let grad_mode = (&x * 2.0).requires_grad();
    let cache = AutocastState::current().unwrap().is_cache_enabled();
    (grad_mode, is_autocast_enabled(device), autocast_dtype(device).unwrap(), cache)
}

/// Every depth, so that both sides of the border between the caller's or the device's thread and those of the pool are
/// covered. On a GPU, where each depth takes longer, only the smallest depths, those around the border and a large one.
fn depths(device: Device) -> Vec<usize> {
    let near = |depth: &usize| *depth < 4 || depth.abs_diff(SAME_THREAD) < 3 || *depth == 130;
    (0..=130).filter(|depth| device == Device::Cpu || near(depth)).collect()
}

fn sweep(device: Device, first_payload: usize) {
    let count = Arc::new(AtomicUsize::new(0));
    for depth in depths(device) {
        let payload = PAYLOADS[(first_payload + depth) % PAYLOADS.len()];
        let threads = Arc::new(AtomicUsize::new(0));
        let before = state(device);
        let x = leaf(&[1.0], Kind::Double, device);
        let y = Nest::new(depth, payload, &count, &threads).apply(&[&x]).unwrap();
        let error = message(y.f_backward());
        assert!(error.contains("Nest: backward panicked: "), "{error}");
        let says = matches!(payload, Payload::Str | Payload::String);
        assert_eq!(error.contains("a planted panic"), says, "{payload:?}: {error}");
        assert_eq!(error.contains("a panic without a message"), !says, "{payload:?}: {error}");
        let crossed = threads.load(Ordering::SeqCst) > 0;
        // A GPU's backward never runs on the caller's thread.
        assert_eq!(crossed, device.is_cuda() || depth > SAME_THREAD, "depth {depth}");
        assert_eq!(state(device), before, "depth {depth}");
        // Training can continue.
        (&x * 3.0).backward();
        assert_eq!(to_f64(&x.grad()), [3.0]);
    }
    // A thread of the pool may drop its part only after the caller has received the error.
    let start = Instant::now();
    while count.load(Ordering::SeqCst) > 0 && start.elapsed() < Duration::from_secs(20) {
        std::thread::yield_now();
    }
    assert_eq!(count.load(Ordering::SeqCst), 0, "everything is dropped");
}

#[test]
fn a_panic_in_backward_is_an_error_at_every_depth() {
    for_each_device(|device| (0..PAYLOADS.len()).for_each(|first| sweep(device, first)));
}

#[test]
fn a_panic_in_backward_is_an_error_in_two_threads_at_once() {
    for_each_device(|device| {
        let threads = [0, 1].map(|first| std::thread::spawn(move || sweep(device, first)));
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

#[test]
fn a_panic_in_forward_reaches_the_caller() {
    for_each_device(|device| {
        let before = state(device);
        for payload in [Payload::Str, Payload::String, Payload::Any] {
            let count = Arc::new(AtomicUsize::new(0));
            let counted = Counted::new(&count);
            let forward =
                move |ctx: &mut ForwardContext, x: &[&Tensor]| -> FunctionResult<Tensor> {
                    ctx.save_for_backward(x);
                    ctx.save_value(Counted::new(&counted.0));
                    let _region = Autocast::new(device).dtype(Kind::Half).enter()?;
                    blow(payload)
                };
            let x = leaf(&[1.0], Kind::Double, device);
            let apply = || apply(&[&x], forward, |_, g| Ok(g[0].shallow_clone()));
            let panic = catch_unwind(AssertUnwindSafe(apply)).expect_err("it panics");
            match payload {
                Payload::Any => assert_eq!(panic.downcast_ref::<i32>(), Some(&42)),
                Payload::Str => assert_eq!(panic.downcast_ref::<&str>(), Some(&"a planted panic")),
                _ => assert!(panic.is::<String>()),
            }
            assert_eq!(count.load(Ordering::SeqCst), 0);
            assert_eq!(state(device), before);
        }
    });
}

#[test]
fn a_panic_in_a_destructor_is_contained() {
    for_each_device(|device| {
        for payload in PAYLOADS {
            let fragile = move || OnDrop(move || blow(payload));
            // Panics when the function and the value that it saved are dropped.
            let owned = Owning(fragile());
            let x = leaf(&[1.0], Kind::Double, device);
            let y = apply(
                &[&x],
                move |ctx, x| {
                    owned.hold();
                    ctx.save_value(fragile());
                    Ok(x[0] * 2.0)
                },
                |_, g| Ok(&g[0] * 2.0),
            )
            .unwrap();
            y.backward();
            drop(y);
            assert_eq!(to_f64(&x.grad()), [2.0]);
            // Several values at once, if no backward has freed any.
            let owned = Owning(fragile());
            let forward = move |ctx: &mut ForwardContext, x: &[&Tensor]| {
                owned.hold();
                ctx.save_value(fragile());
                ctx.save_value(Some(fragile()));
                Ok(x[0] * 2.0)
            };
            drop(apply(&[&x], forward, |_, g| Ok(&g[0] * 2.0)).unwrap());
            // Immediately, if nothing is recorded.
            let owned = Owning(fragile());
            let forward = move |_: &mut ForwardContext, x: &[&Tensor]| {
                owned.hold();
                Ok(x[0] * 2.0)
            };
            drop(apply(&[&x.detach()], forward, |_, g| Ok(&g[0] * 2.0)).unwrap());
        }
    });
}

#[test]
fn a_panic_of_a_tch_operation_keeps_libtorchs_message() {
    for_each_leaf(&[1.0], |_, x| {
        let y = apply(&[&x], |_, x| Ok(x[0] * 2.0), |_, g| Ok(g[0].reshape([7]))).unwrap();
        let error = message(y.f_backward());
        assert!(error.contains("function: backward panicked: shape '[7]' is invalid"), "{error}");
        assert!(!error.contains("frame #"), "{error}");
    });
}

#[test]
fn an_error_with_a_nul_in_its_message_is_reported_completely() {
    for_each_leaf(&[1.0], |_, x| {
        let backward = |_: &BackwardContext<'_>, _: &GradOutputs<'_>| -> FunctionResult<Tensor> {
            Err("one\0two".into())
        };
        let y = apply(&[&x], |_, x| Ok(x[0] * 2.0), backward).unwrap();
        assert_says(y.f_backward(), "one two");
    });
}
