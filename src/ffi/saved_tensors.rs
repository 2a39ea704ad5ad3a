//! How the tensors are kept that autograd saves on a thread.

use std::ffi::{CStr, c_char, c_void};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;

use tch::Tensor;

use super::callbacks::string_new;
use super::{call, pointers};
use crate::error::{Error, Result};
use crate::{panics, sys};

/// A form in which saved tensors are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SavedForm {
    /// As autograd gives them, through hooks that change nothing.
    AsGiven,
    Half,
    Fp8Rows,
    OnHost,
}

/// Makes autograd ask this crate how it keeps what it saves.
pub(super) fn prepare() -> Result<()> {
    // SAFETY: `err` is valid for a write.
    let other = call(|err| unsafe { sys::tamp_saved_tensors_prepare(err) })?;
    if other.is_null() {
        return Ok(());
    }
    // SAFETY: a string that is not null is NUL-terminated.
    let engine = unsafe { CStr::from_ptr(other) }.to_string_lossy().into_owned();
    // SAFETY: the shim has made the string for its caller, and it is not used any more.
    unsafe { sys::tamp_string_free(other) };
    Err(Error::OtherEngine { engine })
}

/// A way in which saved tensors are kept, which threads may share.
#[derive(Debug)]
pub(crate) struct SavedTensors(*mut sys::SavedTensors);

// SAFETY: it holds a `std::shared_ptr` to a `Keeper`, which is shared by threads and locks what it changes.
unsafe impl Send for SavedTensors {}
// SAFETY: as above. Only `Drop` changes the pointer itself.
unsafe impl Sync for SavedTensors {}

impl SavedTensors {
    pub(crate) fn new(form: SavedForm) -> Result<Self> {
        prepare()?;
        let how = match form {
            SavedForm::AsGiven => sys::SAVED_AS_GIVEN,
            SavedForm::Half => sys::SAVED_HALF,
            SavedForm::Fp8Rows => sys::SAVED_FP8_ROWS,
            SavedForm::OnHost => sys::SAVED_ON_HOST,
        };
        // SAFETY: takes a number, and `err` is valid for a write.
        Ok(Self(call(|err| unsafe { sys::tamp_saved_tensors_new(how, err) })?))
    }

    /// Returns the way for the first run of a part of a model: nothing is kept but the inputs. Returns `None` if
    /// gradients are off.
    pub(crate) fn recomputed<P: RunsAgain>(
        part: &Arc<P>,
        inputs: &[&Tensor],
    ) -> Result<Option<Self>> {
        let tensors = pointers(inputs.iter().copied());
        let state = Arc::into_raw(Arc::clone(part)).cast_mut().cast();
        let new = |err| {
            let (run, free) = (run_again::<P>, part_drop::<P>);
            // SAFETY: the array has the length beside it, and the borrows keep its tensors alive. The shim owns the
            // count of references in `state` even if it fails, and passes it only to the callbacks, which have its type.
            unsafe {
                let (inputs, count) = (tensors.as_ptr(), tensors.len());
                sys::tamp_saved_tensors_recomputed(inputs, count, state, run, free, err)
            }
        };
        let saved = call(new)?;
        if saved.is_null() {
            return Ok(None);
        }
        let saved = Self(saved);
        prepare()?;
        Ok(Some(saved))
    }

    /// Takes ownership of one that the shim returned.
    #[cfg(feature = "insight")]
    pub(super) fn given(raw: *mut sys::SavedTensors) -> Self {
        Self(raw)
    }

    /// Returns that of the innermost region of the calling thread.
    pub(crate) fn current() -> Result<Option<Self>> {
        // SAFETY: `err` is valid for a write.
        let current = call(|err| unsafe { sys::tamp_saved_tensors_current(err) })?;
        Ok((!current.is_null()).then_some(Self(current)))
    }

    /// Runs `f` in a region of the calling thread.
    pub(crate) fn during<T>(&self, f: impl FnOnce() -> T) -> Result<T> {
        let _region = Region::open(self.0)?;
        Ok(f())
    }

    /// Runs `f` so that autograd keeps every bit of what it saves.
    pub(crate) fn exactly<T>(f: impl FnOnce() -> T) -> Result<T> {
        // SAFETY: the borrow keeps it alive.
        let is_exact = |saved: &Self| unsafe { sys::tamp_saved_tensors_is_exact(saved.0) } != 0;
        let is_inexact = Self::current()?.is_some_and(|saved| !is_exact(&saved));
        let _region = if is_inexact { Some(Region::open(ptr::null())?) } else { None };
        Ok(f())
    }
}

impl Drop for SavedTensors {
    fn drop(&mut self) {
        // SAFETY: the shim has made it for this object alone.
        unsafe { sys::tamp_saved_tensors_free(self.0) }
    }
}

/// A part of a model that runs again in a backward pass, on whichever thread that runs.
pub(crate) trait RunsAgain: Send + Sync + 'static {
    /// Runs again, while autograd keeps what it saves in the way `how`. Returns the message of a failure.
    fn run_again(
        &self,
        inputs: &[ManuallyDrop<Tensor>],
        how: &SavedTensors,
    ) -> std::result::Result<(), String>;

    /// Drops a reference to the part. Its destructor is code of the user, and may do anything.
    fn free(self: Arc<Self>);
}

unsafe extern "C" fn run_again<P: RunsAgain>(
    state: *mut c_void,
    inputs: *const *mut sys::Tensor,
    count: usize,
    how: *const sys::SavedTensors,
    err: *mut *mut c_char,
) {
    // SAFETY: `SavedTensors::recomputed::<P>` made the state, which the shim keeps during the call.
    let part: &P = unsafe { &*state.cast() };
    let how = ManuallyDrop::new(SavedTensors(how.cast_mut()));
    let run = || {
        let lend = |index| {
            // SAFETY: `inputs` has `count` tensors that outlive the callback; they are never dropped here.
            ManuallyDrop::new(unsafe { Tensor::from_ptr(*inputs.add(index)) })
        };
        part.run_again(&(0..count).map(lend).collect::<Vec<_>>(), &how)
    };
    let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        Err(format!("the second run panicked: {}", panics::into_message(panic)))
    });
    if let Err(message) = result {
        // SAFETY: `err` is valid for a write, as every `err` of the shim.
        unsafe { *err = string_new(&message) }
    }
}

unsafe extern "C" fn part_drop<P: RunsAgain>(state: *mut c_void) {
    // SAFETY: `SavedTensors::recomputed::<P>` made the state from an `Arc`, and the shim gives it back once.
    let part: Arc<P> = unsafe { Arc::from_raw(state.cast()) };
    panics::swallow(|| P::free(part));
}

/// Closes the region when dropped. It stays on its thread, because the pointer is not `Send`, and within a function
/// that runs a closure, so that regions end in the reverse order of their beginning.
struct Region(*mut sys::SavedTensorsRegion);

impl Region {
    fn open(saved: *const sys::SavedTensors) -> Result<Self> {
        // SAFETY: `saved` is null or alive, and `err` is valid for a write.
        Ok(Self(call(|err| unsafe { sys::tamp_saved_tensors_enter(saved, err) })?))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the region was opened last on this thread, and is closed once.
        unsafe { sys::tamp_saved_tensors_leave(self.0) }
    }
}
