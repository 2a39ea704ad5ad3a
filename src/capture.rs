//! The messages between the parts of an iteration and the graph that captures it.
//!
//! A replay repeats what the device was given to do, and none of the host's part of an iteration. So everything that
//! would wait for the device or keep a number of the host is refused, what belongs to an iteration joins its graph, and
//! the graph tells it of replays and asks whether something has changed that replays do not follow.

use std::cell::RefCell;
use std::fmt::Debug;
use std::mem;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tch::{Device, Tensor};

use crate::error::{Error, Result};
use crate::ffi::OutsideRegions;
use crate::panics::{Exchanged, lock};

/// How an iteration of a graph is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Like any other, though nothing may be in it that a graph cannot hold.
    Eager,
    /// The same; a capture may follow, so what only the device knows has to be settled.
    Settling,
    Capture,
}

/// Which capture something was made in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CaptureId(u64);

/// The iteration of a graph that the thread is in.
#[derive(Debug)]
struct Iteration {
    device: Device,
    phase: Phase,
    id: CaptureId,
    members: Vec<Arc<dyn Member>>,
    /// Tensors that the graph uses, and keeps.
    kept: Vec<Tensor>,
    /// What each launch of the graph is counted by, as often as it counts.
    counts: Vec<Arc<AtomicU64>>,
    /// Where the last step has read the learning rate on the device, until an outcome takes it.
    #[cfg(feature = "insight")]
    learning_rate: Option<IterationTensor>,
    /// Whether a window of accumulation is open, and whether a part of one was outside.
    window_is_open: bool,
    window_was_cut: bool,
    /// The error of a part whose function cannot return one.
    failure: Option<Error>,
}

thread_local! {
    static ITERATION: RefCell<Option<Iteration>> = const { RefCell::new(None) };
}

/// The parts of an iteration that has ended.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    pub(crate) members: Vec<Arc<dyn Member>>,
    pub(crate) kept: Vec<Tensor>,
    pub(crate) counts: Vec<Arc<AtomicU64>>,
    /// Whether only a part of a window of accumulation was in it.
    pub(crate) window_was_cut: bool,
    /// The error of a part whose function cannot return one.
    pub(crate) failure: Option<Error>,
}

/// Runs an iteration of a graph. If one that is captured panics, its members forget it.
pub(crate) fn during<T>(device: Device, phase: Phase, f: impl FnOnce() -> T) -> (T, Ended) {
    let iteration = Exchanged::new(&ITERATION, Some(Iteration::new(device, phase)));
    let out = f();
    (out, iteration.end().flatten().map(Iteration::end).unwrap_or_default())
}

impl Iteration {
    fn new(device: Device, phase: Phase) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        Self {
            device,
            phase,
            id: CaptureId(COUNT.fetch_add(1, Ordering::Relaxed)),
            members: Vec::new(),
            kept: Vec::new(),
            counts: Vec::new(),
            #[cfg(feature = "insight")]
            learning_rate: None,
            window_is_open: false,
            window_was_cut: false,
            failure: None,
        }
    }

    fn end(mut self) -> Ended {
        Ended {
            members: mem::take(&mut self.members),
            kept: mem::take(&mut self.kept),
            counts: mem::take(&mut self.counts),
            window_was_cut: self.window_was_cut || self.window_is_open,
            failure: self.failure.take(),
        }
    }
}

impl Drop for Iteration {
    fn drop(&mut self) {
        // One that has ended has no members any more.
        if self.phase == Phase::Capture {
            self.members.iter().for_each(|member| member.after_failure());
        }
    }
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
    Error::ChangedSinceCapture { what }
}

/// Returns whether the thread is in an iteration of a graph.
pub(crate) fn is_inside() -> bool {
    now(|_| ()).is_some()
}

/// Returns whether what the thread gives a device to do is only recorded.
pub(crate) fn is_capturing() -> bool {
    phase() == Some(Phase::Capture)
}

/// The capture that the thread is in.
pub(crate) fn id() -> Option<CaptureId> {
    let captured =
        |iteration: &Iteration| (iteration.phase == Phase::Capture).then_some(iteration.id);
    now(captured).flatten()
}

/// A tensor that belongs to the iteration in which it was given or made.
#[derive(Debug)]
pub(crate) struct IterationTensor {
    tensor: Tensor,
    capture: Option<CaptureId>,
}

impl IterationTensor {
    pub(crate) fn new(tensor: Tensor) -> Self {
        Self { tensor, capture: id() }
    }

    /// Fails in a capture for a tensor that is not of it: replays would read the same one.
    pub(crate) fn get(&self, what: &'static str) -> Result<&Tensor> {
        if is_capturing() && self.capture != id() {
            return Err(refusal(what, "give that of the same iteration, inside of it"));
        }
        Ok(&self.tensor)
    }
}

impl Clone for IterationTensor {
    fn clone(&self) -> Self {
        Self { tensor: self.tensor.shallow_clone(), capture: self.capture }
    }
}

pub(crate) fn phase() -> Option<Phase> {
    now(|iteration| iteration.phase)
}

/// The CUDA device of the graph in whose iteration the thread is.
pub(crate) fn device() -> Option<Device> {
    now(|iteration| iteration.device).filter(|device| device.is_cuda())
}

/// Fails in an iteration of a graph of another device than this one, with what to do instead.
pub(crate) fn refuse_elsewhere(at: Device, call: &'static str, remedy: &'static str) -> Result<()> {
    match device() {
        Some(device) if device != at => Err(refusal(call, remedy)),
        _ => Ok(()),
    }
}

/// Returns whether the thread is in an iteration of a graph of this device.
pub(crate) fn is_on(at: Device) -> bool {
    device() == Some(at)
}

/// Adds a part of the iteration to its graph. Does nothing outside of one.
pub(crate) fn register<M: Member + 'static>(member: &Arc<M>) {
    if has_joined(member) {
        return;
    }
    ITERATION.with_borrow_mut(|iteration| {
        if let Some(Iteration { members, .. }) = iteration {
            members.push(Arc::<M>::clone(member));
        }
    });
}

/// Returns whether it belongs to the iteration that the thread is in.
pub(crate) fn has_joined<M: Member + 'static>(member: &Arc<M>) -> bool {
    let same = |known: &Arc<dyn Member>| std::ptr::addr_eq(Arc::as_ptr(known), Arc::as_ptr(member));
    now(|iteration| iteration.members.iter().any(same)).unwrap_or(false)
}

/// Keeps tensors that the replays of the graph use, if an iteration is being captured.
pub(crate) fn keep<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) {
    ITERATION.with_borrow_mut(|iteration| {
        if let Some(Iteration { phase: Phase::Capture, kept, .. }) = iteration {
            kept.extend(tensors.into_iter().map(Tensor::shallow_clone));
        }
    });
}

/// Counts one more: now, or in a capture each time that its graph is launched.
pub(crate) fn count(by: &Arc<AtomicU64>) {
    ITERATION.with_borrow_mut(|iteration| match iteration {
        Some(Iteration { phase: Phase::Capture, counts, .. }) => counts.push(Arc::clone(by)),
        _ => {
            by.fetch_add(1, Ordering::Relaxed);
        }
    });
}

/// Keeps the error of a part of the iteration that returns none, for `replay` to return. Returns it outside of one.
pub(crate) fn note_failure(error: Error) -> Option<Error> {
    ITERATION.with_borrow_mut(|iteration| match iteration {
        Some(iteration) => {
            iteration.failure.get_or_insert(error);
            None
        }
        None => Some(error),
    })
}

/// Notes where a step reads the learning rate on the device.
#[cfg(feature = "insight")]
pub(crate) fn note_learning_rate(lr: Tensor) {
    let lr = IterationTensor::new(lr);
    ITERATION.with_borrow_mut(|iteration| {
        if let Some(iteration) = iteration {
            iteration.learning_rate = Some(lr);
        }
    });
}

/// Where the step before has read the learning rate on the device.
#[cfg(feature = "insight")]
pub(crate) fn take_learning_rate() -> Option<IterationTensor> {
    let take = |iteration: &mut Option<Iteration>| iteration.as_mut()?.learning_rate.take();
    ITERATION.with_borrow_mut(take)
}

/// Notes a micro-batch, which may begin a window of accumulation or complete it.
pub(crate) fn note_window(is_begun: bool, is_completed: bool) {
    ITERATION.with_borrow_mut(|iteration| {
        if let Some(iteration) = iteration {
            iteration.window_was_cut |= is_begun == iteration.window_is_open;
            iteration.window_is_open = !is_completed;
        }
    });
}

/// A part of an iteration, as its graph sees it. The methods never wait for the device.
pub(crate) trait Member: Debug + Send + Sync {
    fn link(&self) -> &GraphLink;

    /// Returns whether a capture may follow.
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

    /// Fails if a replay would not follow what is there by now. Changes nothing.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Gives the device the numbers that the next replay reads.
    fn before_replay(&self) -> Result<()> {
        Ok(())
    }

    /// Undoes what a failed capture has left on the host.
    fn after_failure(&self) {}
}

/// The connection of a part of iterations with their graphs.
#[derive(Debug, Default)]
pub(crate) struct GraphLink {
    replays: AtomicU64,
    changes: AtomicU64,
    last_change: Mutex<&'static str>,
    is_lost: AtomicBool,
    /// Whether an iteration of a graph has ever used it.
    was_joined: AtomicBool,
}

impl Member for GraphLink {
    fn link(&self) -> &GraphLink {
        self
    }

    fn after_failure(&self) {
        self.is_lost.store(true, Ordering::Relaxed);
    }
}

impl GraphLink {
    /// Joins the graph in whose iteration the thread is. The graph keeps the tensors that it uses.
    pub(crate) fn register<'a>(self: &Arc<Self>, tensors: impl IntoIterator<Item = &'a Tensor>) {
        if is_inside() {
            self.was_joined.store(true, Ordering::Relaxed);
            keep(tensors);
            register(self);
        }
    }

    /// Gives a state on a device its next numbers: in place if a graph may know it, where replays find them.
    pub(crate) fn replace(
        &self,
        state: &mut Option<Tensor>,
        next: Tensor,
        call: &'static str,
    ) -> Result<()> {
        let is_known = self.is_known();
        match state {
            Some(state) if is_known && fits(state, &next) => {
                let _own = OutsideRegions::enter();
                state.f_copy_(&next)?;
                return Ok(());
            }
            _ if is_capturing() => return Err(refusal(call, "call it in the warm-up, too")),
            Some(_) if is_known => self.note_change("the device or the shape of a state"),
            _ => {}
        }
        *state = Some(next);
        Ok(())
    }

    /// Returns whether an iteration is being captured in which it was not used so far.
    pub(crate) fn begins_capture(self: &Arc<Self>) -> bool {
        is_capturing() && !has_joined(self)
    }

    /// How often iterations were replayed.
    pub(crate) fn replays(&self) -> u64 {
        self.replays.load(Ordering::Relaxed)
    }

    pub(crate) fn note_replay(&self) {
        self.replays.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether a graph may know what it belongs to.
    pub(crate) fn is_known(&self) -> bool {
        is_inside() || self.was_joined.load(Ordering::Relaxed)
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

    /// Returns whether a capture has failed since the last call.
    pub(crate) fn take_loss(&self) -> bool {
        self.is_lost.swap(false, Ordering::Relaxed)
    }
}

/// The link of what a program owns. Replays would go on with it after its end.
#[derive(Debug, Default)]
pub(crate) struct OwnLink(Arc<GraphLink>);

impl Deref for OwnLink {
    type Target = Arc<GraphLink>;

    fn deref(&self) -> &Arc<GraphLink> {
        &self.0
    }
}

impl Drop for OwnLink {
    fn drop(&mut self) {
        self.0.note_change("a part of the iteration, which was dropped");
    }
}

fn fits(state: &Tensor, next: &Tensor) -> bool {
    state.size() == next.size() && state.kind() == next.kind() && state.device() == next.device()
}
