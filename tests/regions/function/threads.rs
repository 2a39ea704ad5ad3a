//! Functions on several threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

use tch::{Kind, Tensor};
use tch_amp::function::Function;

use crate::function::{Counted, MyMm, apply, for_each_leaf, square, to_f64};
use testkit::for_each_device;
use testkit::tensors::leaf;

#[test]
fn one_function_runs_in_many_threads_at_once() {
    for_each_device(|device| {
        let run = move |seed: f64| {
            for i in 0..200 {
                let factor = seed + f64::from(i);
                let a = leaf(&[factor, 1.0, 0.0, 2.0], Kind::Double, device);
                let square = a.view([2, 2]);
                MyMm::default().apply(&[&square, &square]).unwrap().sum(None).backward();
                let want = a.detach().set_requires_grad(true);
                let square = want.view([2, 2]);
                square.mm(&square).sum(None).backward();
                assert_eq!(to_f64(&a.grad()), to_f64(&want.grad()));
            }
        };
        let threads = [1.0, 2.0, 3.0, 4.0].map(|seed| std::thread::spawn(move || run(seed)));
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

#[test]
fn one_call_never_runs_twice_concurrently() {
    for_each_leaf(&[1.0], |_, x| {
        let running = Arc::new(AtomicBool::new(false));
        let runs = Arc::new(AtomicUsize::new(0));
        let (inside, counted) = (Arc::clone(&running), Arc::clone(&runs));
        let y = apply(
            &[&x],
            |_, x| Ok(x[0] * 2.0),
            move |_, g| {
                assert!(!inside.swap(true, Ordering::SeqCst), "two threads run it at once");
                std::thread::sleep(std::time::Duration::from_millis(2));
                counted.fetch_add(1, Ordering::SeqCst);
                inside.store(false, Ordering::SeqCst);
                Ok(&g[0] * 2.0)
            },
        )
        .unwrap();
        let start = Arc::new(Barrier::new(4));
        let threads = [0; 4].map(|_| {
            let (y, x, start) = (y.shallow_clone(), x.shallow_clone(), Arc::clone(&start));
            std::thread::spawn(move || {
                start.wait();
                for _ in 0..10 {
                    let grad = Tensor::run_backward(&[&y], &[&x], true, false);
                    assert_eq!(to_f64(&grad[0]), [2.0]);
                }
            })
        });
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(runs.load(Ordering::SeqCst), 40);
    });
}

#[test]
fn a_graph_may_be_dropped_on_another_thread() {
    for_each_leaf(&[1.0], |_, x| {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Counted::new(&count);
        let y = apply(
            &[&x],
            move |ctx, x| {
                ctx.save_value(Counted::new(&counted.0));
                Ok(x[0] * 2.0)
            },
            |_, g| Ok(&g[0] * 2.0),
        );
        assert_eq!(count.load(Ordering::SeqCst), 2);
        std::thread::spawn(move || drop(y)).join().unwrap();
        assert_eq!(count.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn a_graph_may_be_run_on_another_thread() {
    for_each_leaf(&[3.0], |_, x| {
        let y = square(&x).unwrap();
        std::thread::spawn(move || y.backward()).join().unwrap();
        assert_eq!(to_f64(&x.grad()), [6.0]);
    });
}
