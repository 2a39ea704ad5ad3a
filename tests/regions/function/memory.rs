//! Nothing that a function captures or saves keeps its graph alive.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tch::{Device, Kind, Tensor};
use tch_amp::function::{BackwardContext, ForwardContext, FunctionResult, GradOutputs};

use crate::function::{Counted, Owning, apply, for_each_leaf, to_f64};
use testkit::tensors::leaf;
use testkit::{assert_says, for_each_device};

/// How a forward keeps its input and its output, with a value that is counted.
type Keep = fn(&mut ForwardContext, &Tensor, &Tensor, Counted);

/// The number of values left after the forward, and after forward and backward, of a function that keeps tensors with
/// `keep`.
fn left(device: Device, keep: Keep) -> [usize; 2] {
    let count = Arc::new(AtomicUsize::new(0));
    [false, true].map(|backward| {
        let (inner, counted) = (Arc::clone(&count), Owning(Counted::new(&count)));
        let x = leaf(&[0.5], Kind::Double, device);
        let y = apply(
            &[&(&x * 1.0)],
            move |ctx, x| {
                let y = x[0].exp();
                keep(ctx, x[0], &y, Counted::new(&inner));
                counted.hold();
                Ok(y)
            },
            |_, g| Ok(&g[0] * 1.0),
        )
        .unwrap();
        assert_eq!(count.load(Ordering::SeqCst), 2, "the function and its saved value exist");
        if backward {
            y.backward();
        }
        drop(y);
        count.load(Ordering::SeqCst)
    })
}

#[test]
fn a_saved_value_may_hold_anything() {
    let ways: [(&str, Keep); 6] = [
        ("no tensor", |ctx, _, _, c| ctx.save_value(c)),
        ("the input", |ctx, x, _, c| ctx.save_value((c, x.shallow_clone()))),
        ("the output", |ctx, _, y, c| ctx.save_value((c, y.shallow_clone()))),
        ("a view of the output", |ctx, _, y, c| ctx.save_value((c, vec![y.view(-1)]))),
        ("the memory of the output", |ctx, _, y, c| ctx.save_value((c, y.detach()))),
        ("both, saved both ways", |ctx, x, y, c| {
            ctx.save_for_backward(&[x, y]);
            ctx.save_value((c, y.shallow_clone()));
        }),
    ];
    for_each_device(|device| {
        for (what, keep) in ways {
            assert_eq!(left(device, keep), [0, 0], "{what}");
        }
    });
}

#[test]
fn a_captured_cell_may_hold_the_output() {
    for_each_leaf(&[0.5], |_, x| {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Owning(Counted::new(&count));
        let cell: Mutex<Option<Tensor>> = Mutex::new(None);
        let y = apply(
            &[&x],
            move |_, x| {
                counted.hold();
                let y = x[0].exp();
                *cell.lock().unwrap() = Some(y.shallow_clone());
                Ok(y)
            },
            |_, g| Ok(&g[0] * 1.0),
        )
        .unwrap();
        assert_eq!(to_f64(&y), [0.5f64.exp()]);
        drop(y);
        assert_eq!(count.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn a_dirty_input_that_forward_keeps_is_refused() {
    for_each_leaf(&[1.0], |_, x| {
        let keeps = |keep: fn(&mut ForwardContext, &Tensor)| {
            let forward = move |ctx: &mut ForwardContext, x: &[&Tensor]| {
                let y = x[0].shallow_clone().f_mul_scalar_(2.0)?;
                ctx.mark_dirty(x);
                keep(ctx, x[0]);
                Ok(y)
            };
            apply(&[&(&x * 1.0)], forward, |_, g| Ok(&g[0] * 2.0))
        };
        keeps(|_, _| ()).unwrap().backward();
        keeps(|ctx, x| ctx.save_for_backward(&[x])).unwrap().backward();
        keeps(|ctx, x| ctx.save_value(x.detach())).unwrap().backward();
        for kept in [
            keeps(|ctx, x| ctx.save_value(x.shallow_clone())),
            keeps(|ctx, x| ctx.save_value(x.view(-1))),
        ] {
            assert_says(kept, "input 0 is marked dirty and kept by forward");
        }
        assert_eq!(to_f64(&x.grad()), [6.0]);
    });
}

#[test]
fn saved_values_are_freed_by_the_last_backward() {
    for_each_leaf(&[1.0], |_, x| {
        let count = Arc::new(AtomicUsize::new(0));
        let inner = Arc::clone(&count);
        let forward = move |ctx: &mut ForwardContext, x: &[&Tensor]| {
            ctx.save_value(Counted::new(&inner));
            Ok(x[0] * 2.0)
        };
        let y = apply(&[&x], forward, |_, g| Ok(&g[0] * 2.0)).unwrap();
        Tensor::run_backward(&[&y], &[&x], true, false);
        assert_eq!(count.load(Ordering::SeqCst), 1, "the graph is retained");
        y.backward();
        assert_eq!(count.load(Ordering::SeqCst), 0, "freed although the output still exists");
    });
}

#[test]
fn a_failed_backward_frees_everything() {
    for_each_device(|device| {
        let count = Arc::new(AtomicUsize::new(0));
        for _ in 0..100 {
            let counted = Owning(Counted::new(&count));
            let x = leaf(&[1.0], Kind::Double, device);
            let backward =
                move |_: &BackwardContext<'_>, _: &GradOutputs<'_>| -> FunctionResult<Tensor> {
                    counted.hold();
                    Err("no".into())
                };
            let y = apply(&[&x], |_, x| Ok(x[0] * 2.0), backward).unwrap();
            assert!((&y + &y).f_backward().is_err());
        }
        assert_eq!(count.load(Ordering::SeqCst), 0);
    });
}

/// A chain of 100,000 calls. `keep` makes each hold the output of the previous one in some way.
fn long_chain(
    keep: impl Fn(&mut ForwardContext, &Tensor, &Tensor) + Copy + Send + 'static,
) -> Tensor {
    // Only on the CPU: the graph that is dropped is in the host's memory in any case.
    let x = leaf(&[1.0], Kind::Double, Device::Cpu);
    let mut y = &x * 1.0;
    for _ in 0..100_000 {
        let last = Mutex::new(Some(y.shallow_clone()));
        let forward = move |ctx: &mut ForwardContext, x: &[&Tensor]| {
            let last = last.lock().unwrap().take();
            keep(ctx, x[0], &last.unwrap());
            Ok(x[0] * 1.0)
        };
        y = apply(&[&y], forward, |_, g| Ok(g[0].shallow_clone())).unwrap();
    }
    y
}

#[test]
fn a_long_chain_is_dropped_without_recursion() {
    drop(long_chain(|ctx, x, _| ctx.save_for_backward(&[x])));
    drop(long_chain(|ctx, _, last| ctx.save_value(last.shallow_clone())));
    drop(long_chain(|ctx, _, last| ctx.save_value(tch::with_grad(|| last * 2.0))));
    drop(long_chain(|ctx, _, last| ctx.save_for_backward(&[tch::with_grad(|| last * 2.0)])));
}

/// A chain of calls whose closures hold the output of the previous one, with or without an edge to it.
fn chain_of_closures(edges: bool, drop_it: impl FnOnce(Tensor)) {
    let x = leaf(&[1.0], Kind::Double, Device::Cpu);
    let mut y = x.shallow_clone();
    for _ in 0..100_000 {
        let (held, input) = (Owning(y), x.shallow_clone());
        let input = if edges { held.0.shallow_clone() } else { input };
        let backward = move |_: &BackwardContext<'_>, g: &GradOutputs<'_>| {
            held.hold();
            Ok(g[0].shallow_clone())
        };
        y = apply(&[&input], |_, x| Ok(x[0] * 1.0), backward).unwrap();
    }
    drop_it(y);
}

#[test]
fn a_long_chain_of_closures_is_dropped_without_recursion() {
    for edges in [false, true] {
        chain_of_closures(edges, drop);
        chain_of_closures(edges, |y| y.backward());
        chain_of_closures(edges, |y| std::thread::spawn(move || drop(y)).join().unwrap());
    }
}

#[test]
fn values_that_a_destructor_drops_are_freed_before_it_continues() {
    struct Watches {
        number: usize,
        y: Option<Tensor>,
        count: Arc<AtomicUsize>,
        left: Arc<Mutex<Vec<(usize, usize)>>>,
    }

    impl Drop for Watches {
        fn drop(&mut self) {
            self.y = None;
            let count = self.count.load(Ordering::SeqCst);
            self.left.lock().unwrap().push((self.number, count));
        }
    }

    let (count, left) = (Arc::default(), Arc::<Mutex<Vec<_>>>::default());
    let x = leaf(&[1.0], Kind::Double, Device::Cpu);
    let mut y = None;
    for number in 0..4 {
        let counted = Owning(Counted::new(&count));
        let watches =
            Owning(Watches { number, y, count: Arc::clone(&count), left: Arc::clone(&left) });
        let backward = move |_: &BackwardContext<'_>, g: &GradOutputs<'_>| {
            watches.hold();
            counted.hold();
            Ok(g[0].shallow_clone())
        };
        y = Some(apply(&[&x], |_, x| Ok(x[0] * 1.0), backward).unwrap());
    }
    drop(y);
    assert_eq!(
        *left.lock().unwrap(),
        [(0, 4), (1, 3), (2, 2), (3, 1)],
        "each drops after those that it owns"
    );
}
