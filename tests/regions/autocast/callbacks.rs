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

use crate::autocast::{OUTSIDE, Seen, alone, for_each_device_alone, seen};
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

fn leaf(device: Device) -> Tensor {
    Tensor::ones([2, 2], (Kind::Float, device)).set_requires_grad(true)
}

/// The dtype that libtorch gives a product, without a call to the crate.
fn product(device: Device) -> Kind {
    let ones = Tensor::ones([2, 2], (Kind::Float, device));
    ones.mm(&ones).kind()
}

/// A tensor whose backward runs `inside`.
fn calls(device: Device, inside: impl Fn() + Send + 'static) -> Tensor {
    let backward = move |_: &BackwardContext<'_>, g: &GradOutputs<'_>| {
        inside();
        Ok(g[0].expand([2, 2], false))
    };
    // Inside of another backward, where gradients are disabled, the function must be recorded as well.
    with_grad(|| function(|_, x| Ok(x[0].sum(None)), backward).apply(&[leaf(device)])).unwrap()
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
    let _alone = alone();
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

#[test]
fn the_innermost_of_several_guards_may_be_dropped_in_a_backward() {
    let _alone = alone();
    let _outer = fp16().cache(false).enter().unwrap();
    keep(Autocast::new(Device::Cpu).enabled(false).dtype(Kind::BFloat16).cache(true));
    calls(Device::Cpu, drop_kept).backward();
    assert_eq!(product(Device::Cpu), Kind::Half);
    assert_eq!(seen(), (true, Kind::Half, false));
}

#[test]
fn a_guard_of_a_backward_that_the_backward_inside_drops_ends_with_that_one() {
    let _alone = alone();
    calls(Device::Cpu, || {
        keep(fp16());
        calls(Device::Cpu, drop_kept).backward();
        assert_eq!(product(Device::Cpu), Kind::Float);
        assert_eq!(seen(), OUTSIDE);
    })
    .f_backward()
    .unwrap();
    assert_eq!(seen(), OUTSIDE);
}

fn sum_of_product(w: &Tensor) -> f64 {
    w.detach().ones_like().mm(w).sum(Kind::Double).double_value(&[])
}

#[rstest]
fn a_region_that_a_backward_leaks_ends_with_it(
    #[values(End::Returns, End::Panics)] end: End,
    #[values(false, true)] forget: bool,
) {
    let _alone = alone();
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
        let mut w = leaf(device);
        for round in 1..4 {
            let region = || Autocast::new(device).run(|| sum_of_product(&w)).unwrap();
            assert_eq!(region(), 8.0 * f64::from(round));
            drop(tch::no_grad(|| w.f_add_scalar_(1.0).unwrap()));
        }
        // The same holds on the thread that ran the backward.
        let (send, receive) = channel();
        let inside = move || {
            let mut w = leaf(device);
            for _ in 0..2 {
                let region = Autocast::new(device).run(|| sum_of_product(&w));
                send.send(region.unwrap()).unwrap();
                drop(tch::no_grad(|| w.f_add_scalar_(1.0).unwrap()));
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

/// Runs a closure when it is dropped.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
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
    with_grad(|| function(forward, backward).apply(&[leaf(Device::Cpu)])).unwrap()
}

#[rstest]
fn a_destructor_may_drop_a_guard_from_outside(#[values(false, true)] saves: bool) {
    let _alone = alone();
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
    let _alone = alone();
    let leaks = || std::mem::forget(fp16().enter().unwrap());
    drop(drops(saves, leaks));
    assert_eq!((product(Device::Cpu), seen()), (Kind::Float, OUTSIDE));
    drops(saves, leaks).backward();
    assert_eq!((product(Device::Cpu), seen()), (Kind::Float, OUTSIDE));
}

/// The rule in plain Rust: a callback's regions end with it, and a region around the callback cannot end before it.
#[derive(Default)]
struct Model {
    next: usize,
    /// For each scope: its number, the thread's state inside of it, and whether its guard was dropped. Callbacks have
    /// numbers, too.
    scopes: Vec<(usize, Seen, bool)>,
}

impl Model {
    fn now(&self) -> Seen {
        self.scopes.last().map_or(OUTSIDE, |(_, seen, _)| *seen)
    }

    fn open(&mut self, inside: Seen) -> usize {
        self.next += 1;
        self.scopes.push((self.next, inside, false));
        self.next
    }

    fn close(&mut self, id: usize) {
        if let Some(scope) = self.scopes.iter_mut().find(|scope| scope.0 == id) {
            scope.2 = true;
        }
        self.settle();
    }

    fn end_callback(&mut self, id: usize) {
        self.scopes.retain(|scope| scope.0 < id);
    }

    fn settle(&mut self) {
        while self.scopes.last().is_some_and(|scope| scope.2) {
            self.scopes.pop();
        }
    }
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

/// A random region, and the thread's state inside of it.
fn region(rng: &mut Rng) -> (Autocast, Seen) {
    let inside = (!rng.one_in(3), *rng.pick(&[Kind::BFloat16, Kind::Half]), rng.one_in(2));
    (Autocast::new(Device::Cpu).enabled(inside.0).dtype(inside.1).cache(inside.2), inside)
}

fn play(depth: usize, steps: usize, wrong: &Sender<String>) {
    for _ in 0..steps {
        match machine(|machine| machine.rng.below(5)) {
            0 | 1 => {
                let (region, inside) = machine(|machine| region(&mut machine.rng));
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
                let enabled = machine(|machine| machine.model.now()).0;
                if (product(Device::Cpu) != Kind::Float) != enabled {
                    wrong
                        .send(format!("libtorch's autocast should be {enabled} after a backward"))
                        .unwrap();
                }
            }
            _ => (),
        }
        check(wrong, "after a step");
    }
}

#[rstest]
fn backwards_and_guards_in_any_order_follow_the_rule(#[values(1, 2, 3, 4, 5, 6, 7, 8)] seed: u64) {
    let _alone = alone();
    let (rng, model) = (Rng::new(seed), Model::default());
    MACHINE.set(Some(Machine { rng, model, guards: Vec::new() }));
    let (wrong, found) = channel();
    play(0, 400, &wrong);
    drop(machine(|machine| std::mem::take(&mut machine.guards)));
    assert_eq!(seen(), OUTSIDE);
    drop(wrong);
    assert_eq!(found.iter().next(), None, "seed {seed}");
}

/// A function that is not recorded is dropped in the middle of a computation of this crate, which is outside of all
/// regions. Its destructor is in those of the thread.
#[rstest]
fn a_destructor_in_the_middle_of_own_arithmetic_is_in_the_regions(
    #[values(false, true)] overrides: bool,
) {
    for_each_device_alone(|device| {
        let region = Autocast::new(device).dtype(Kind::Half);
        let region = if overrides { region.prefer_half(["exp"]) } else { region };
        let guard = region.enter().unwrap();
        KEPT.with_borrow_mut(|kept| kept.push(guard));
        let (send, receive) = channel();
        let exp = move || Tensor::ones([2], (Kind::Float, device)).exp().kind();
        let sender = send.clone();
        let dropped = OnDrop(move || {
            let _sent = sender.send((product(device), exp()));
            let inner = Autocast::new(device).dtype(Kind::BFloat16).run(|| product(device));
            let _sent = send.send((inner.unwrap(), exp()));
        });
        let ignored = |_: &BackwardContext<'_>, _: &GradOutputs<'_>| Ok([None::<Tensor>]);
        let forward = move |_: &mut ForwardContext, x: &[&Tensor]| {
            let _kept = &dropped;
            Ok(x[0].shallow_clone())
        };
        let _result = no_grad(|| function(forward, ignored).apply(&[leaf(device)])).unwrap();
        let exp_inside = if overrides { Kind::Half } else { Kind::Float };
        assert_eq!(receive.try_recv(), Ok((Kind::Half, exp_inside)));
        assert_eq!(receive.try_recv(), Ok((Kind::BFloat16, exp_inside)));
        assert_eq!((product(device), exp()), (Kind::Half, exp_inside), "still inside");
        // A region that such a destructor closes stays closed.
        let closes = OnDrop(drop_kept);
        let forward = move |_: &mut ForwardContext, x: &[&Tensor]| {
            let _kept = &closes;
            Ok(x[0].shallow_clone())
        };
        let _result = no_grad(|| function(forward, ignored).apply(&[leaf(device)])).unwrap();
        assert_eq!((product(device), exp()), (Kind::Float, Kind::Float));
        assert_eq!(seen(), OUTSIDE);
    });
}
