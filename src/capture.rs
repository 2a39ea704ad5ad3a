//! What the parts of an iteration and the graph that captures it tell each other.
//!
//! A replay repeats what the device was given to do, and none of the host's part of an iteration. So everything that
//! would wait for the device or keep a number of the host is refused, what belongs to an iteration joins its graph, and
//! the graph tells it of replays and asks whether something has changed that replays do not follow.

#[cfg(feature = "graph")]
pub(crate) use running::*;
#[cfg(not(feature = "graph"))]
pub(crate) use without::*;

#[cfg(feature = "graph")]
mod running {
    use std::cell::RefCell;
    use std::fmt::Debug;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

    use tch::{Device, Tensor};

    use crate::error::{Error, Result};
    use crate::ffi::OutsideRegions;

    /// How an iteration of a graph is run.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Phase {
        /// Like any other, though nothing may be in it that a graph cannot hold.
        Eager,
        /// The same; a capture may follow, so what only the device knows has to be settled.
        Settling,
        Capture,
    }

    /// The iteration of a graph that the thread is in.
    #[derive(Debug)]
    struct Iteration {
        device: Device,
        phase: Phase,
        members: Vec<Arc<dyn Member>>,
        /// The windows of accumulation that were begun, less those that were completed.
        windows: i64,
    }

    thread_local! {
        static ITERATION: RefCell<Option<Iteration>> = const { RefCell::new(None) };
    }

    /// What an iteration that has ended was made of.
    #[derive(Debug)]
    pub(crate) struct Ended {
        pub(crate) members: Vec<Arc<dyn Member>>,
        /// Whether a window of accumulation was left open.
        pub(crate) window_is_open: bool,
    }

    /// Runs an iteration of a graph, also one that panics.
    pub(crate) fn during<T>(device: Device, phase: Phase, f: impl FnOnce() -> T) -> (T, Ended) {
        struct Back(Option<Iteration>);
        impl Drop for Back {
            fn drop(&mut self) {
                ITERATION.set(self.0.take());
            }
        }
        let iteration = Iteration { device, phase, members: Vec::new(), windows: 0 };
        let back = Back(ITERATION.replace(Some(iteration)));
        let out = f();
        let ended = ITERATION.with_borrow_mut(Option::take);
        drop(back);
        let ended = ended.map_or((Vec::new(), 0), |ended| (ended.members, ended.windows));
        (out, Ended { members: ended.0, window_is_open: ended.1 != 0 })
    }

    fn now<T>(ask: impl FnOnce(&Iteration) -> T) -> Option<T> {
        ITERATION.with_borrow(|iteration| iteration.as_ref().map(ask))
    }

    /// Fails in an iteration of a graph, with what to do instead.
    pub(crate) fn refuse(call: &'static str, remedy: &'static str) -> Result<()> {
        match is_inside() {
            true => Err(refusal(call, remedy)),
            false => Ok(()),
        }
    }

    pub(crate) fn refusal(call: &'static str, remedy: &'static str) -> Error {
        Error::Capture { call, remedy: remedy.to_owned() }
    }

    /// The error of a replay after a change that it would not follow.
    pub(crate) fn changed_since(what: &'static str) -> Error {
        let remedy = "it has changed since; call `recapture` on the graph, and replay again";
        refusal(what, remedy)
    }

    /// Whether the thread is in an iteration of a graph.
    pub(crate) fn is_inside() -> bool {
        now(|_| ()).is_some()
    }

    /// Whether what the thread gives a device to do is only recorded.
    pub(crate) fn is_capturing() -> bool {
        phase() == Some(Phase::Capture)
    }

    pub(crate) fn phase() -> Option<Phase> {
        now(|iteration| iteration.phase)
    }

    /// The CUDA device of the graph in whose iteration the thread is.
    pub(crate) fn device() -> Option<Device> {
        now(|iteration| iteration.device).filter(|device| device.is_cuda())
    }

    /// Whether the thread is in an iteration of a graph of this device.
    pub(crate) fn is_on(at: Device) -> bool {
        device() == Some(at)
    }

    /// Adds a part of the iteration to its graph. Does nothing outside of one.
    pub(crate) fn join<M: Member + 'static>(member: &Arc<M>) {
        ITERATION.with_borrow_mut(|iteration| {
            let Some(Iteration { members, .. }) = iteration else { return };
            let same = |known: &Arc<dyn Member>| {
                std::ptr::addr_eq(Arc::as_ptr(known), Arc::as_ptr(member))
            };
            if !members.iter().any(same) {
                members.push(Arc::<M>::clone(member));
            }
        });
    }

    /// Counts a window of accumulation that is begun or completed.
    pub(crate) fn note_window(is_begun: bool, is_completed: bool) {
        ITERATION.with_borrow_mut(|iteration| {
            if let Some(iteration) = iteration {
                iteration.windows += i64::from(is_begun) - i64::from(is_completed);
            }
        });
    }

    /// A part of an iteration, as its graph sees it. The methods never wait for the device.
    pub(crate) trait Member: Debug + Send + Sync {
        fn link(&self) -> &Link;

        /// Whether a capture may follow.
        fn is_ready(&self) -> bool {
            true
        }

        /// Is called before a capture begins.
        fn before_capture(&self) -> Result<()> {
            Ok(())
        }

        /// Checks what was captured.
        fn after_capture(&self) -> Result<()> {
            Ok(())
        }

        /// Gives the device the numbers that the next replay reads.
        fn before_replay(&self) -> Result<()> {
            Ok(())
        }

        /// Undoes what a failed capture has left on the host.
        fn after_failure(&self) {}
    }

    /// What a part of iterations and their graphs know of each other.
    #[derive(Debug, Default)]
    pub(crate) struct Link {
        replays: AtomicU64,
        changes: AtomicU64,
        last_change: Mutex<&'static str>,
        is_lost: AtomicBool,
        kept: Mutex<Vec<Tensor>>,
    }

    impl Member for Link {
        fn link(&self) -> &Link {
            self
        }

        fn after_failure(&self) {
            self.is_lost.store(true, Ordering::Relaxed);
        }
    }

    impl Link {
        /// Joins the graph in whose iteration the thread is. The graph keeps the tensors that it uses.
        pub(crate) fn join<'a>(self: &Arc<Self>, tensors: impl IntoIterator<Item = &'a Tensor>) {
            if is_inside() {
                self.keep(tensors);
                join(self);
            }
        }

        /// Keeps tensors as long as the graphs that have captured them.
        pub(crate) fn keep<'a>(&self, tensors: impl IntoIterator<Item = &'a Tensor>) {
            *lock(&self.kept) = tensors.into_iter().map(Tensor::shallow_clone).collect();
        }

        /// How often iterations were replayed.
        pub(crate) fn replays(&self) -> u64 {
            self.replays.load(Ordering::Relaxed)
        }

        pub(crate) fn note_replay(&self) {
            self.replays.fetch_add(1, Ordering::Relaxed);
        }

        /// Notes that something has changed that captured iterations do not follow.
        pub(crate) fn note_change(&self, what: &'static str) {
            *lock(&self.last_change) = what;
            self.changes.fetch_add(1, Ordering::Relaxed);
        }

        pub(crate) fn changes(&self) -> u64 {
            self.changes.load(Ordering::Relaxed)
        }

        pub(crate) fn last_change(&self) -> &'static str {
            *lock(&self.last_change)
        }

        /// Whether a capture has failed since the last call.
        pub(crate) fn take_loss(&self) -> bool {
            self.is_lost.swap(false, Ordering::Relaxed)
        }
    }

    fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a state on a device its next numbers: in an iteration of a graph in place, where replays find them.
    pub(crate) fn replace(
        state: &mut Option<Tensor>,
        next: Tensor,
        call: &'static str,
    ) -> Result<()> {
        match state {
            Some(state) if device().is_some() && state.size() == next.size() => {
                let _own = OutsideRegions::enter();
                state.f_copy_(&next)?;
                return Ok(());
            }
            _ if is_capturing() => return Err(refusal(call, "call it in the warm-up, too")),
            _ => *state = Some(next),
        }
        Ok(())
    }
}

#[cfg(not(feature = "graph"))]
mod without {
    use std::sync::Arc;

    use tch::{Device, Tensor};

    use crate::error::Result;

    pub(crate) fn refuse(_call: &'static str, _remedy: &'static str) -> Result<()> {
        Ok(())
    }

    pub(crate) fn is_inside() -> bool {
        false
    }

    pub(crate) fn is_capturing() -> bool {
        false
    }

    pub(crate) fn is_on(_at: Device) -> bool {
        false
    }

    pub(crate) fn note_window(_is_begun: bool, _is_completed: bool) {}

    /// Nothing: there are no graphs.
    #[derive(Debug, Default)]
    pub(crate) struct Link;

    impl Link {
        pub(crate) fn join<'a>(self: &Arc<Self>, _tensors: impl IntoIterator<Item = &'a Tensor>) {}

        pub(crate) fn replays(&self) -> u64 {
            0
        }

        pub(crate) fn note_change(&self, _what: &'static str) {}

        pub(crate) fn take_loss(&self) -> bool {
            false
        }
    }

    pub(crate) fn replace(
        state: &mut Option<Tensor>,
        next: Tensor,
        _call: &'static str,
    ) -> Result<()> {
        *state = Some(next);
        Ok(())
    }
}
