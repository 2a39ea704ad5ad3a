//! What a program may do while what autograd saves is kept otherwise.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};

use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::function::{Function, GradConfig, grad};
use tch_amp::graph::Captured;
use tch_amp::memory::SavedTensors;
use tch_amp::recompute::checkpointed;
use tch_amp::{Error, autocast, function};

use testkit::bits::bits;
use testkit::simulation::is_model;
use testkit::{assert_says, for_each_device, resident_bytes, skipped};

use super::{activation, alive, forms, random, taken};

const SIZE: [i64; 2] = [128, 64];

/// The gradient of `sum(sin(x))` at an activation, which says how it was kept.
fn gradient(run: impl FnOnce(&Tensor) -> Tensor) -> Vec<u8> {
    let (leaf, x) = activation(Device::Cpu, Kind::Float, SIZE);
    run(&x).sum(Kind::Float).backward();
    bits(&taken(&leaf))
}

/// That of each form, and without one.
fn expected(form: SavedTensors) -> Vec<u8> {
    gradient(|x| form.run(|| x.sin()).unwrap())
}

fn without() -> Vec<u8> {
    gradient(Tensor::sin)
}

#[test]
fn forms_differ_and_the_innermost_alone_applies() {
    let [(_, half), (_, fp8), (_, on_host)] = forms();
    let all = [expected(half), expected(fp8), without()];
    assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2]);
    assert_eq!(expected(on_host), without());
    let nested = gradient(|x| half.run(|| fp8.run(|| x.sin()).unwrap()).unwrap());
    assert_eq!(nested, expected(fp8));
    let around = gradient(|x| {
        half.run(|| {
            fp8.run(|| ()).unwrap();
            x.sin()
        })
        .unwrap()
    });
    assert_eq!(around, expected(half));
    let outside = gradient(|x| {
        half.run(|| ()).unwrap();
        x.sin()
    });
    assert_eq!(outside, without());
    assert_eq!(gradient(|x| half.run(|| on_host.run(|| x.sin()).unwrap()).unwrap()), without());
}

#[test]
fn a_panic_and_an_error_end_the_region() {
    for (_, form) in forms() {
        let panicked = catch_unwind(AssertUnwindSafe(|| form.run(|| panic!("in the region"))));
        assert!(panicked.is_err());
        let failed: Result<(), Error> =
            form.try_run(|| Err(Error::Torch("of the closure".to_owned())));
        assert_says(failed, "of the closure");
        assert_eq!(gradient(Tensor::sin), without());
    }
}

#[test]
fn regions_are_of_the_thread_and_backward_is_of_any() {
    for (name, form) in forms() {
        let other = form.run(|| std::thread::spawn(without).join().unwrap()).unwrap();
        assert_eq!(other, without(), "{name}");
        let (leaf, x) = activation(Device::Cpu, Kind::Float, SIZE);
        let y = form.run(|| x.sin()).unwrap();
        std::thread::spawn(move || y.sum(Kind::Float).backward()).join().unwrap();
        assert_eq!(bits(&taken(&leaf)), expected(form), "{name}");
    }
}

#[test]
fn threads_keep_and_free_the_same_tensors_at_once() {
    for (_, form) in forms() {
        let want = expected(form);
        let (_leaf, x) = activation(Device::Cpu, Kind::Float, SIZE);
        let x = Arc::new(Mutex::new(x));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let (x, want) = (Arc::clone(&x), want.clone());
                std::thread::spawn(move || {
                    for _ in 0..50 {
                        let shared = x.lock().unwrap().shallow_clone();
                        let loss = form.run(|| shared.sin().sum(Kind::Float)).unwrap();
                        let gradients = Tensor::run_backward(&[loss], &[&shared], false, false);
                        assert_eq!(bits(&gradients[0]), want);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

#[test]
fn without_gradients_nothing_is_kept() {
    for (name, form) in forms() {
        let (_leaf, x) = activation(Device::Cpu, Kind::Float, SIZE);
        let (y, kept) = alive(|| form.run(|| no_grad(|| x.sin().sum(Kind::Float))).unwrap());
        assert!(kept < 1024 && !y.requires_grad(), "{name}: {kept}");
    }
}

/// A sine by hand, which saves its argument and its result.
fn sine() -> impl Function<Outputs = Tensor> {
    function(
        |ctx, x| {
            let y = x[0].f_sin()?;
            ctx.save_for_backward(&[x[0], &y]);
            Ok(y)
        },
        |ctx, g| {
            let [x, _] = ctx.saved_tensors()?;
            Ok(&g[0] * x.cos())
        },
    )
}

#[test]
fn custom_functions_have_their_tensors_kept() {
    for (name, form) in forms() {
        let got = gradient(|x| form.run(|| sine().apply(&[x])).unwrap().unwrap());
        assert_eq!(got, expected(form), "{name}");
    }
}

/// What a part saves is computed again, and is not kept in the form of the region around it.
#[test]
fn recomputed_parts_have_exact_gradients_in_every_region() {
    for (name, form) in forms() {
        for region in [false, true] {
            let part = |x: &Tensor, w: &Tensor, recomputed: bool| -> Tensor {
                let w = w.shallow_clone();
                let f = move |x: &[&Tensor]| {
                    let hidden = x[0].matmul(&w).sin();
                    Ok(hidden.cos().to_kind(Kind::Float))
                };
                if recomputed { checkpointed(&[x], f).unwrap() } else { f(&[x]).unwrap() }
            };
            let run = |recomputed| {
                let x = random(Device::Cpu, Kind::Float, SIZE);
                let w = random(Device::Cpu, Kind::Float, [64, 64]).set_requires_grad(true);
                let forward = || match region {
                    true => autocast(Device::Cpu, || part(&x, &w, recomputed)).unwrap(),
                    false => part(&x, &w, recomputed),
                };
                let form = if recomputed { form } else { SavedTensors::unchanged() };
                let loss = form.run(|| forward().sum(Kind::Float)).unwrap();
                loss.backward();
                bits(&taken(&w))
            };
            assert_eq!(run(true), run(false), "{name}, in a region: {region}");
        }
    }
}

/// The input of a second recomputed part is an activation, and its second run still has every bit of it.
#[test]
fn a_second_run_has_the_inputs_of_the_first() {
    for (name, form) in forms() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let w = random(Device::Cpu, Kind::Float, [64, 64]).set_requires_grad(true);
        let part = |x: &Tensor| -> Tensor {
            let (w, seen) = (w.shallow_clone(), Arc::clone(&seen));
            let f = move |x: &[&Tensor]| {
                seen.lock().unwrap().push(bits(x[0]));
                Ok(x[0].matmul(&w).sin())
            };
            checkpointed(&[x], f).unwrap()
        };
        let x = random(Device::Cpu, Kind::Float, SIZE);
        let loss = form.run(|| part(&part(&x)).sum(Kind::Float)).unwrap();
        loss.backward();
        let seen = seen.lock().unwrap();
        assert_eq!(seen.len(), 4, "{name}");
        assert!(seen[0] == seen[3] && seen[1] == seen[2], "{name}");
    }
}

/// The second derivative of a cube of an activation is that of what was kept.
#[test]
fn gradients_can_be_differentiated() {
    for (name, form) in forms() {
        for (create_inside, label) in [(true, "inside"), (false, "outside")] {
            let derivative = |keep: bool| {
                let leaf = random(Device::Cpu, Kind::Float, SIZE).set_requires_grad(true);
                let one = Tensor::ones([64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
                let cube = || {
                    let x = &leaf * &one;
                    (&x * &x * &x).sum(Kind::Float)
                };
                let config = GradConfig { create_graph: true, ..Default::default() };
                let first = |loss: &Tensor| grad(&[loss], &[&leaf], &config).unwrap();
                let gradients = match (keep, create_inside) {
                    (false, _) => first(&cube()),
                    (true, true) => form.run(|| first(&cube())).unwrap(),
                    (true, false) => first(&form.run(cube).unwrap()),
                };
                gradients.iter().flatten().map(|g| g.sum(Kind::Float)).sum::<Tensor>().backward();
                leaf.grad().copy()
            };
            let (want, got) = (derivative(false), derivative(true));
            let error = ((&got - &want).norm() / want.norm()).double_value(&[]);
            let bound = if name == "fp8_rows" { 0.05 } else { 0.005 };
            assert!(error < bound, "{name} {label}: {error}");
            assert_eq!(error == 0.0, name == "on_host", "{name} {label}: {error}");
        }
    }
}

#[test]
fn a_graph_can_be_used_twice() {
    for (name, form) in forms() {
        let (leaf, x) = activation(Device::Cpu, Kind::Float, SIZE);
        let loss = form.run(|| x.sin().sum(Kind::Float)).unwrap();
        let gradients = |retain| Tensor::run_backward(&[&loss], &[&leaf], retain, false);
        let (first, second) = (bits(&gradients(true)[0]), bits(&gradients(false)[0]));
        assert_eq!(first, second, "{name}");
        assert_eq!(first, expected(form), "{name}");
        let third = Tensor::f_run_backward(&[&loss], &[&leaf], false, false);
        assert_says(third.map(drop), "second time");
    }
}

#[test]
fn a_graph_of_cuda_takes_copies_that_stay_on_the_device() {
    for_each_device(|device| {
        if device.is_cuda() && is_model() {
            skipped("simulated GPUs have no graphs");
            return;
        }
        let w = random(device, Kind::Float, SIZE).set_requires_grad(true);
        let iteration = |form: SavedTensors| {
            let mut graph = Captured::new(device).unwrap();
            let mut run = || {
                graph
                    .replay(|| {
                        let loss = form.run(|| (&w * &w).sin().sum(Kind::Float))?;
                        loss.backward();
                        let loss = loss.detach();
                        let _zero = no_grad(|| w.grad().zero_());
                        Ok(loss)
                    })
                    .map(drop)
            };
            (0..5).try_for_each(|_| run())
        };
        let [(_, half), (_, fp8), (_, on_host)] = forms();
        assert_says(iteration(on_host), "use `SavedTensors::half` or `fp8_rows`");
        iteration(half).unwrap();
        iteration(fp8).unwrap();
    });
}

/// Each iteration keeps tensors, in 10 000 regions of each form, and gives all back.
#[test]
fn ten_thousand_iterations_keep_memory_flat() {
    if resident_bytes().is_none() {
        return;
    }
    for (name, form) in forms() {
        let leaf = random(Device::Cpu, Kind::Float, SIZE).set_requires_grad(true);
        let one = Tensor::ones([64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let run = |count: usize| {
            for i in 0..count {
                let x = &leaf * &one;
                let loss = form.run(|| (x.sin() + x.cos().tanh()).sum(Kind::Float)).unwrap();
                // Some graphs are dropped without a pass.
                if i % 4 != 0 {
                    drop(Tensor::run_backward(&[loss], &[&leaf], false, false));
                }
            }
        };
        run(1000);
        let before = resident_bytes().unwrap();
        run(10_000);
        let grown = resident_bytes().unwrap().saturating_sub(before);
        assert!(grown < 1 << 20, "{name}: 10 000 iterations left {grown} bytes");
    }
}

/// One region around a whole training keeps nothing of its past.
#[test]
fn a_region_may_be_around_many_iterations() {
    let (sender, receiver) = mpsc::channel();
    for (_, form) in forms() {
        let leaf = random(Device::Cpu, Kind::Float, SIZE).set_requires_grad(true);
        let one = Tensor::ones([64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        form.run(|| {
            for _ in 0..3 {
                let ((), left) = alive(|| (&leaf * &one).sin().sum(Kind::Float).backward());
                sender.send(left).unwrap();
            }
        })
        .unwrap();
    }
    drop(sender);
    let left: Vec<u64> = receiver.iter().collect();
    // The first has made the gradients.
    for of_form in left.chunks(3) {
        assert!(of_form[1..].iter().all(|bytes| *bytes < 1024), "{left:?}");
    }
}
