//! State per thread, captured states on other threads, and enough guards for a leak to show.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use tch::{Device, Kind};
use tch_amp::Autocast;
use tch_amp::autocast::{AutocastGuard, AutocastState};

use crate::autocast::{OUTSIDE, seen};
use testkit::resident_bytes;
use testkit::rng::Rng;

#[test]
fn a_new_thread_is_outside_of_all_regions() {
    let _guard = AutocastGuard::new(Device::Cpu).unwrap();
    assert_eq!(std::thread::spawn(seen).join().unwrap(), OUTSIDE);
}

#[test]
fn a_captured_state_applies_on_another_thread_and_ends_there() {
    let region = Autocast::new(Device::Cpu).dtype(Kind::Half).cache(false);
    let (state, here) = region.run(|| (AutocastState::current().unwrap(), seen())).unwrap();
    let worker = std::thread::spawn(move || {
        let inside = state.run(seen).unwrap();
        let guard = state.enter().unwrap();
        let guarded = seen();
        drop(guard);
        (inside, guarded, seen())
    });
    assert_eq!(worker.join().unwrap(), (here, here, OUTSIDE));
}

#[test]
fn a_state_captured_outside_of_regions_disables_autocast() {
    let outside = AutocastState::current().unwrap();
    let _guard = AutocastGuard::new(Device::Cpu).unwrap();
    assert_eq!(outside.run(seen).unwrap(), OUTSIDE);
    assert_eq!(seen(), (true, Kind::BFloat16, true));
}

#[test]
fn a_captured_state_can_be_inspected() {
    let region = Autocast::new(Device::Cpu).dtype(Kind::Half).cache(false);
    let state = region.run(AutocastState::current).unwrap().unwrap();
    assert!(state.is_enabled(Device::Cpu) && !state.is_enabled(Device::Cuda(3)));
    assert!(!state.is_enabled(Device::Vulkan) && state.dtype(Device::Vulkan).is_err());
    assert_eq!(state.dtype(Device::Cpu).unwrap(), Kind::Half);
    assert_eq!(state.dtype(Device::Cuda(3)).unwrap(), Kind::Half);
    assert!(!state.is_cache_enabled() && AutocastState::current().unwrap().is_cache_enabled());
}

#[test]
fn a_million_guards_leak_no_memory() {
    let cycle = |n| (0..n).for_each(|_| drop(AutocastGuard::new(Device::Cpu).unwrap()));
    cycle(10_000);
    let before = resident_bytes();
    cycle(1_000_000);
    assert_eq!(seen(), OUTSIDE);
    if let Some((before, after)) = before.zip(resident_bytes()) {
        let grown = after.saturating_sub(before);
        assert!(grown < 1 << 20, "a million guards leaked {grown} bytes");
    }
}

/// Opens nested regions to a random depth, half of them as guards, and sometimes panics.
fn nest(rng: &mut Rng, depth: usize) {
    if depth == 0 {
        if rng.one_in(50) {
            // Without the hook, whose messages would fill the terminal.
            resume_unwind(Box::new("a planted panic"));
        }
        return;
    }
    let region = Autocast::new(Device::Cpu)
        .dtype(*rng.pick(&[Kind::BFloat16, Kind::Half]))
        .enabled(!rng.one_in(3))
        .cache(rng.one_in(2));
    if rng.one_in(2) {
        let _guard = region.enter().unwrap();
        nest(rng, depth - 1);
    } else {
        region.run(|| nest(rng, depth - 1)).unwrap();
    }
}

#[test]
fn sixty_four_threads_with_random_panics_restore_their_states() {
    let threads: Vec<_> = (0..64)
        .map(|seed| {
            std::thread::spawn(move || {
                let mut rng = Rng::new(seed);
                let mut panics = 0;
                for _ in 0..10_000 {
                    let depth = rng.below(17);
                    let nested = catch_unwind(AssertUnwindSafe(|| nest(&mut rng, depth)));
                    panics += usize::from(nested.is_err());
                    if seen() != OUTSIDE {
                        return Err(format!("seed {seed} ended with {:?}", seen()));
                    }
                }
                Ok(panics)
            })
        })
        .collect();
    let ended: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
    for result in ended {
        let panics = result.expect("no other panic").unwrap();
        assert!(panics > 50, "only {panics} of 10,000 programs panicked: one in 50 should");
    }
}
