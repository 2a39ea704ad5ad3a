//! Regions and guards in code that libtorch calls: custom backwards, and destructors of what a graph holds. After each
//! node of a backward, libtorch restores a part of the state itself, without regard to guards.

use std::cell::RefCell;
use std::panic::resume_unwind;
use std::sync::mpsc::{Sender, channel};

use rstest::rstest;
use tch::{Device, Kind, Tensor, no_grad, with_grad};
use tch_amp::autocast::AutocastGuard;
use tch_amp::function::{BackwardContext, ForwardContext, GradOutputs};
use tch_amp::{Autocast, function};

use crate::OnDrop;
use crate::autocast::guards::{Model, region};
use crate::autocast::{OUTSIDE, add_one, product, seen, sum_of_product, weight};
use testkit::for_each_device;
use testkit::rng::Rng;

thread_local! {
    /// Guards that both a callback and the code around it can reach.
    static KEPT: RefCell<Vec<AutocastGuard>> = const { RefCell::new(Vec::new()) };
}

fn keep(region: Autocast) {
    let guard = region.enter().unwrap();
    KEPT.with_borrow_mut(|kept| kept.push(guard));
}

/// Drops the guard that was stored last.
fn drop_kept() {
    drop(KEPT.with_borrow_mut(Vec::pop).expect("a guard was kept"));
}

fn fp16() -> Autocast {
    Autocast::new(Device::Cpu).dtype(Kind::Half)
}

/// A tensor whose backward runs `inside`.
fn calls(device: Device, inside: impl Fn() + Send + 'static) -> Tensor {
    let backward = move |_: &BackwardContext<'_>, g: &GradOutputs<'_>| {
        inside();
        Ok(g[0].expand([2, 2], false))
    };
    // Inside of another backward, where gradients are disabled, the function must be recorded as well.
    with_grad(|| function(|_, x| Ok(x[0].sum(None)), backward).apply(&[weight(device)])).unwrap()
}

#[derive(Clone, Copy, Debug)]
enum End {
    Returns,
    Panics,
}

impl End {
    fn end(self) {
        match self {
            Self::Returns => (),
            Self::Panics => resume_unwind(Box::new("a planted panic")),
        }
    }
}

#[rstest]
fn a_guard_from_outside_that_a_backward_drops_ends_with_the_backward(
    #[values(false, true)] forward_inside: bool,
    #[values(End::Returns, End::Panics)] end: End,
) {
    let drops = || {
        calls(Device::Cpu, move || {
            drop_kept();
            end.end();
        })
    };
    let before = (!forward_inside).then(drops);
    keep(fp16());
    let y = before.unwrap_or_else(drops);
    assert_eq!(y.f_backward().is_err(), matches!(end, End::Panics));
    assert_eq!(product(Device::Cpu), Kind::Float, "no region is open");
    assert_eq!(seen(), OUTSIDE);
}

#[rstest]
fn a_region_that_a_backward_leaks_ends_with_it(
    #[values(End::Returns, End::Panics)] end: End,
    #[values(false, true)] forget: bool,
) {
    for_each_device(|device| {
        let leaks = move || {
            let guard = Autocast::new(device).enter().unwrap();
            if forget {
                std::mem::forget(guard)
            } else {
                KEPT.with_borrow_mut(|kept| kept.push(guard))
            }
            end.end();
        };
        assert_eq!(calls(device, leaks).f_backward().is_err(), matches!(end, End::Panics));
        assert_eq!((product(device), seen()), (Kind::Float, OUTSIDE));
        // Each of the next regions is an outermost one again, and uses the current weight.
        let mut w = weight(device);
        for round in 1..4 {
            let region = || Autocast::new(device).run(|| sum_of_product(&w)).unwrap();
            assert_eq!(region(), 8.0 * f64::from(round));
            add_one(&mut w);
        }
        // The same holds on the thread that ran the backward.
        let (send, receive) = channel();
        let inside = move || {
            let mut w = weight(device);
            for _ in 0..2 {
                let region = Autocast::new(device).run(|| sum_of_product(&w));
                send.send(region.unwrap()).unwrap();
                add_one(&mut w);
            }
        };
        calls(device, inside).backward();
        assert_eq!(receive.iter().collect::<Vec<_>>(), [8.0, 16.0]);
    });
    // The stored guards' regions have ended, so dropping the guards ends no other region.
    let _later = fp16().enter().unwrap();
    KEPT.with_borrow_mut(Vec::clear);
    assert_eq!(seen(), (true, Kind::Half, true));
}

/// A tensor whose graph runs `destructor` when it is freed or, if it `saves`, when backward frees what was saved.
fn drops(saves: bool, destructor: impl FnMut() + Send + 'static) -> Tensor {
    let value = std::sync::Mutex::new(Some(OnDrop(destructor)));
    let forward = move |ctx: &mut ForwardContext, x: &[&Tensor]| {
        if saves {
            ctx.save_value(value.lock().unwrap().take());
        }
        Ok(x[0].sum(None))
    };
    let backward = |_: &BackwardContext<'_>, g: &GradOutputs<'_>| Ok(g[0].expand([2, 2], false));
    with_grad(|| function(forward, backward).apply(&[weight(Device::Cpu)])).unwrap()
}

#[rstest]
fn a_destructor_may_drop_a_guard_from_outside(#[values(false, true)] saves: bool) {
    keep(fp16());
    drop(drops(saves, drop_kept));
    assert_eq!(product(Device::Cpu), Kind::Float, "it ends immediately: no backward is running");
    assert_eq!(seen(), OUTSIDE);
    keep(fp16());
    let y = drops(saves, drop_kept);
    y.backward();
    drop(y);
    assert_eq!(product(Device::Cpu), Kind::Float);
    assert_eq!(seen(), OUTSIDE);
    // Inside of a backward, with no other one in between.
    calls(Device::Cpu, move || {
        keep(fp16());
        drop(drops(saves, drop_kept));
        assert_eq!(product(Device::Cpu), Kind::Float);
    })
    .f_backward()
    .unwrap();
}

#[rstest]
fn a_region_that_a_destructor_leaks_ends_with_it(#[values(false, true)] saves: bool) {
    let leaks = || std::mem::forget(fp16().enter().unwrap());
    drop(drops(saves, leaks));
    assert_eq!((product(Device::Cpu), seen()), (Kind::Float, OUTSIDE));
    drops(saves, leaks).backward();
    assert_eq!((product(Device::Cpu), seen()), (Kind::Float, OUTSIDE));
}

/// A program whose backwards open, drop and forget guards and run further backwards, all at random.
struct Machine {
    rng: Rng,
    model: Model,
    guards: Vec<(usize, AutocastGuard)>,
}

thread_local! {
    static MACHINE: RefCell<Option<Machine>> = const { RefCell::new(None) };
}

fn machine<T>(f: impl FnOnce(&mut Machine) -> T) -> T {
    MACHINE.with_borrow_mut(|machine| f(machine.as_mut().expect("a program runs")))
}

fn check(wrong: &Sender<String>, when: &str) {
    let want = machine(|machine| machine.model.now());
    if seen() != want {
        wrong.send(format!("{when}: {:?}, not {want:?}", seen())).unwrap();
    }
}

fn play(depth: usize, steps: usize, wrong: &Sender<String>) {
    for _ in 0..steps {
        match machine(|machine| machine.rng.below(5)) {
            0 | 1 => {
                let (region, inside) =
                    machine(|machine| region(&mut machine.rng, machine.model.now()));
                let guard = region.enter().unwrap();
                machine(|machine| {
                    let id = machine.model.open(inside);
                    // One guard in five is forgotten; the callback around it ends its region.
                    if depth > 0 && machine.rng.one_in(5) {
                        std::mem::forget(guard);
                    } else {
                        machine.guards.push((id, guard));
                    }
                });
            }
            2 | 3 => {
                let taken = machine(|machine| {
                    let count = machine.guards.len();
                    (count > 0).then(|| machine.guards.swap_remove(machine.rng.below(count)))
                });
                if let Some((id, guard)) = taken {
                    drop(guard);
                    machine(|machine| machine.model.close(id));
                }
            }
            _ if depth < 3 => {
                let fails = machine(|machine| machine.rng.one_in(4));
                let inner = wrong.clone();
                let y = calls(Device::Cpu, move || {
                    let id = machine(|machine| {
                        let now = machine.model.now();
                        machine.model.open(now)
                    });
                    play(depth + 1, 6, &inner);
                    machine(|machine| machine.model.end_callback(id));
                    if fails {
                        End::Panics.end();
                    }
                });
                assert_eq!(y.f_backward().is_err(), fails);
                machine(|machine| machine.model.settle());
                let (enabled, dtype, _) = machine(|machine| machine.model.now());
                let want = if enabled { dtype } else { Kind::Float };
                let found = product(Device::Cpu);
                if found != want {
                    let text =
                        format!("libtorch computes in {found:?} after a backward, not {want:?}");
                    wrong.send(text).unwrap();
                }
            }
            _ => (),
        }
        check(wrong, "after a step");
    }
}

#[rstest]
fn backwards_and_guards_in_any_order_follow_the_rule(#[values(1, 2, 3, 4, 5, 6, 7, 8)] seed: u64) {
    let (rng, model) = (Rng::new(seed), Model::default());
    MACHINE.set(Some(Machine { rng, model, guards: Vec::new() }));
    let (wrong, found) = channel();
    play(0, 400, &wrong);
    drop(machine(|machine| std::mem::take(&mut machine.guards)));
    assert_eq!(seen(), OUTSIDE);
    drop(wrong);
    assert_eq!(found.iter().next(), None, "seed {seed}");
}

/// Calls a function that owns a value and is not recorded.
fn not_recorded(device: Device, value: impl Send + 'static) {
    let forward = move |_: &mut ForwardContext, x: &[&Tensor]| {
        let _kept = &value;
        Ok(x[0].shallow_clone())
    };
    let ignored = |_: &BackwardContext<'_>, _: &GradOutputs<'_>| Ok([None::<Tensor>]);
    let _result = no_grad(|| function(forward, ignored).apply(&[weight(device)])).unwrap();
}

/// A function that is not recorded is dropped in the middle of a computation of this crate, which is outside of all
/// regions. Its destructor is in those of the thread.
#[rstest]
fn a_destructor_in_the_middle_of_own_arithmetic_is_in_the_regions(
    #[values(false, true)] overrides: bool,
) {
    for_each_device(|device| {
        let region = Autocast::new(device).dtype(Kind::Half);
        let region = if overrides { region.prefer_half(["exp"]) } else { region };
        keep(region);
        let (send, receive) = channel();
        let exp = move || Tensor::ones([2], (Kind::Float, device)).exp().kind();
        let sender = send.clone();
        let dropped = OnDrop(move || {
            let _sent = sender.send((product(device), exp()));
            let inner = Autocast::new(device).dtype(Kind::BFloat16).run(|| product(device));
            let _sent = send.send((inner.unwrap(), exp()));
        });
        not_recorded(device, dropped);
        let exp_inside = if overrides { Kind::Half } else { Kind::Float };
        assert_eq!(receive.try_recv(), Ok((Kind::Half, exp_inside)));
        assert_eq!(receive.try_recv(), Ok((Kind::BFloat16, exp_inside)));
        assert_eq!((product(device), exp()), (Kind::Half, exp_inside), "still inside");
        // A region that such a destructor closes stays closed.
        not_recorded(device, OnDrop(drop_kept));
        assert_eq!((product(device), exp()), (Kind::Float, Kind::Float));
        assert_eq!(seen(), OUTSIDE);
    });
}
