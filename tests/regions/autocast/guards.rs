//! Guards dropped in any order, panics, recursion and forgotten guards.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};

use rstest::rstest;
use tch::{Device, Kind};
use tch_amp::autocast::{AutocastError, AutocastGuard};
use tch_amp::{Autocast, Error, autocast};

use crate::autocast::{OUTSIDE, Seen, product, seen};
use testkit::rng::Rng;

/// A random region, and the thread's state inside of it if the state before is `before`.
pub fn region(rng: &mut Rng, before: Seen) -> (Autocast, Seen) {
    let (dtype, enabled) = (*rng.pick(&[Kind::BFloat16, Kind::Half]), !rng.one_in(3));
    let mut region = Autocast::new(Device::Cpu).enabled(enabled);
    let mut inside = (enabled, before.1, before.2);
    if rng.one_in(2) {
        (region, inside.1) = (region.dtype(dtype), dtype);
    }
    if rng.one_in(2) {
        inside.2 = rng.one_in(2);
        region = region.cache(inside.2);
    }
    (region, inside)
}

/// The rule in plain Rust: a region ends when its guard and those of all regions inside of it have been dropped. A
/// callback's regions end with it, and a region around the callback cannot end before it.
#[derive(Default)]
pub struct Model {
    next: usize,
    /// For each scope: its number, the thread's state inside of it, and whether its guard was dropped. Callbacks have
    /// numbers, too.
    scopes: Vec<(usize, Seen, bool)>,
}

impl Model {
    pub fn now(&self) -> Seen {
        self.scopes.last().map_or(OUTSIDE, |(_, seen, _)| *seen)
    }

    pub fn open(&mut self, inside: Seen) -> usize {
        self.next += 1;
        self.scopes.push((self.next, inside, false));
        self.next
    }

    pub fn close(&mut self, id: usize) {
        if let Some(scope) = self.scopes.iter_mut().find(|scope| scope.0 == id) {
            scope.2 = true;
        }
        self.settle();
    }

    pub fn end_callback(&mut self, id: usize) {
        self.scopes.retain(|scope| scope.0 < id);
    }

    pub fn settle(&mut self) {
        while self.scopes.last().is_some_and(|scope| scope.2) {
            self.scopes.pop();
        }
    }
}

#[rstest]
fn guards_in_any_order_follow_the_rule(#[values(1, 2, 3, 4, 5, 6, 7, 8)] seed: u64) {
    let mut rng = Rng::new(seed);
    let mut model = Model::default();
    let mut guards: Vec<(usize, AutocastGuard)> = Vec::new();
    for step in 0..4000 {
        if guards.is_empty() || (guards.len() < 12 && rng.one_in(2)) {
            let (region, inside) = region(&mut rng, model.now());
            guards.push((model.open(inside), region.enter().unwrap()));
        } else {
            let (id, guard) = guards.swap_remove(rng.below(guards.len()));
            drop(guard);
            model.close(id);
        }
        assert_eq!(seen(), model.now(), "seed {seed}, step {step}");
    }
    drop(guards);
    assert_eq!(seen(), OUTSIDE);
}

#[test]
fn a_panic_in_a_region_restores_the_state() {
    let outer = Autocast::new(Device::Cpu).dtype(Kind::Half).enter().unwrap();
    let before = seen();
    let panic = catch_unwind(|| {
        autocast(Device::Cpu, || {
            let _guard = Autocast::new(Device::Cpu).enabled(false).cache(false).enter().unwrap();
            panic!("inside");
        })
    });
    assert!(panic.is_err());
    assert_eq!(seen(), before);
    drop(outer);
    assert_eq!(seen(), OUTSIDE);
}

#[test]
fn a_guard_forgotten_inside_a_closure_ends_with_the_closure() {
    autocast(Device::Cpu, || std::mem::forget(AutocastGuard::new(Device::Cpu))).unwrap();
    assert_eq!(seen(), OUTSIDE);
}

#[test]
fn a_guard_that_leaves_its_closure_ends_with_it_and_drops_without_effect() {
    let leaked = autocast(Device::Cpu, || AutocastGuard::new(Device::Cpu)).unwrap().unwrap();
    assert_eq!(seen(), OUTSIDE);
    let _later = Autocast::new(Device::Cpu).dtype(Kind::Half).enter().unwrap();
    drop(leaked);
    assert_eq!(seen(), (true, Kind::Half, true));
}

/// Holds a guard until the thread's values are dropped. Sends the thread's state before and after the guard is dropped,
/// and whether another guard can be created then.
struct Last {
    guard: Option<AutocastGuard>,
    tell: Sender<(Seen, Seen, Result<(), Error>)>,
}

impl Drop for Last {
    fn drop(&mut self) {
        let before = seen();
        self.guard = None;
        let after = seen();
        let _told = self.tell.send((before, after, AutocastGuard::new(Device::Cpu).map(drop)));
    }
}

#[rstest]
fn a_guard_kept_until_the_thread_ends_is_harmless(#[values(false, true)] first: bool) {
    thread_local! { static KEPT: RefCell<Option<Last>> = const { RefCell::new(None) }; }
    let (tell, told) = channel();
    let thread = std::thread::spawn(move || {
        // A thread's values are dropped in the order of their first use or in the reverse order: both are tried.
        let early = first.then(|| AutocastGuard::new(Device::Cpu).unwrap());
        KEPT.with(|kept| {
            let guard = early.unwrap_or_else(|| AutocastGuard::new(Device::Cpu).unwrap());
            *kept.borrow_mut() = Some(Last { guard: Some(guard), tell });
        });
    });
    thread.join().unwrap();
    let inside = (true, Kind::BFloat16, true);
    match told.recv().unwrap() {
        (before, after, Ok(())) => assert_eq!((before, after), (inside, OUTSIDE)),
        // The thread's regions no longer exist, and its state ends with the thread.
        (before, after, Err(Error::Autocast(AutocastError::ThreadEnding))) => {
            assert_eq!((before, after), (inside, inside))
        }
        (_, _, Err(error)) => panic!("{error}"),
    }
    assert_eq!((seen(), std::thread::spawn(seen).join().unwrap()), (OUTSIDE, OUTSIDE));
}

#[test]
fn a_guard_from_outside_that_is_dropped_in_a_closure_ends_with_it() {
    let outer = Autocast::new(Device::Cpu).dtype(Kind::Half).cache(false).enter().unwrap();
    let inside = autocast(Device::Cpu, || {
        drop(outer);
        seen()
    });
    assert_eq!(
        inside.unwrap(),
        (true, Kind::Half, false),
        "the guard's region contains the current one"
    );
    // Without a call to the crate, which could end the region as well.
    assert_eq!(product(Device::Cpu), Kind::Float);
    assert_eq!(seen(), OUTSIDE);
}

#[test]
fn a_refused_region_leaves_the_others_unchanged() {
    let _outer = Autocast::new(Device::Cpu).dtype(Kind::Half).enter().unwrap();
    let before = seen();
    let refused =
        catch_unwind(AssertUnwindSafe(|| Autocast::new(Device::Cpu).dtype(Kind::Int).run(|| ())));
    assert!(refused.unwrap().is_err());
    assert_eq!(seen(), before);
}
