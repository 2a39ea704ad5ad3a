//! Regions and their guards.

use std::marker::PhantomData;

use tch::{Device, Kind};

use crate::autocast::stack;
use crate::autocast::state::read;
use crate::device::check_usable;
#[cfg(doc)]
use crate::error::Error;
use crate::error::{AutocastError, Result};
use crate::ffi::AutocastState;

/// An autocast region to be opened: the device it applies to, its dtype and two switches.
///
/// Only operations on tensors of that device's type are affected; the index of a CUDA device does not matter. Regions
/// nest, of the same device or of several. The twin of `torch.autocast(device_type, dtype, enabled, cache_enabled)`.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::Autocast;
///
/// let (a, b) = (Tensor::ones([2, 3], (Kind::Float, Device::Cpu)), Tensor::ones([3, 2], (Kind::Float, Device::Cpu)));
/// let product = Autocast::new(Device::Cpu).dtype(Kind::Half).run(|| a.matmul(&b))?;
/// assert_eq!(product.kind(), Kind::Half);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use = "a region begins with `enter` or `run`"]
pub struct Autocast {
    device: Device,
    dtype: Option<Kind>,
    enabled: bool,
    cache: Option<bool>,
}

impl Autocast {
    /// A region on `device` with PyTorch's defaults: enabled, with the dtype and the weight cache as the thread has
    /// them. Outside of other regions that is bf16 on the CPU, fp16 on CUDA and MPS, and the cache on.
    pub fn new(device: Device) -> Self {
        Self { device, dtype: None, enabled: true, cache: None }
    }

    /// Sets the dtype of the region: [`Kind::BFloat16`] or [`Kind::Half`]. Defaults to that of the region around it.
    ///
    /// On a CPU take bf16. libtorch has few fast kernels for fp16 there, so that a region in fp16 takes 2 to 25 times as
    /// long as one in f32, and an LSTM fails in it.
    pub fn dtype(mut self, dtype: Kind) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Switches autocast on (the default) or off. A region that is off inside one that is on runs in full precision,
    /// and one on a device that cannot be used here is allowed when it is off.
    pub fn enabled(mut self, enabled: bool) -> Self {
        self.enabled = enabled;
        self
    }

    /// Sets whether the cast of a weight is kept for its next use in the region. Defaults to the thread's flag, which
    /// is on at first. Switch it off where two threads use the same weights in regions of different dtypes at once: the
    /// cache is the process's and knows no dtype.
    pub fn cache(mut self, cache: bool) -> Self {
        self.cache = Some(cache);
        self
    }

    /// Opens the region and returns the guard that closes it, as `__enter__` of `torch.autocast`.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`] when the region is enabled and the device cannot be used here, with the reason;
    /// [`AutocastError::Dtype`] for a dtype that autocast does not have. Where PyTorch warns and goes on in full
    /// precision, this fails.
    pub fn enter(self) -> Result<AutocastGuard> {
        let (previous, next) = self.states()?;
        AutocastGuard::open(previous, next)
    }

    /// Runs `f` inside the region; the state from before is back when it returns or panics. As a function decorated
    /// with `torch.autocast`.
    ///
    /// Guards that `f` opened and leaked are closed, too.
    ///
    /// # Errors
    ///
    /// As [`enter`](Self::enter); then `f` is not run.
    pub fn run<T>(self, f: impl FnOnce() -> T) -> Result<T> {
        let (previous, next) = self.states()?;
        stack::within(previous, next, f)
    }

    /// The thread's state before the region and inside of it.
    fn states(self) -> Result<(AutocastState, AutocastState)> {
        let device = self.device;
        if self.enabled {
            check_usable(device)?;
        }
        let previous = read(&[device])?;
        let mut next = previous;
        if let Some(cache) = self.cache {
            next.set_cache_enabled(cache);
        }
        next.set_enabled(device, self.enabled);
        let dtype = self.dtype.map_or_else(|| previous.dtype(device), Ok)?;
        // The dtype of a region that is off is never used, and PyTorch takes any; an integer is a mistake.
        let allowed = !self.enabled || matches!(dtype, Kind::BFloat16 | Kind::Half);
        if allowed && next.set_dtype(device, dtype) {
            Ok((previous, next))
        } else {
            Err(AutocastError::Dtype { device, dtype }.into())
        }
    }
}

/// Closes its autocast region when it is dropped. The twin of the `with` statement around `torch.autocast`.
///
/// Guards may be dropped in any order: a region that others were opened inside of closes with the last of them, and
/// then the thread is as it was before the first. A guard that is forgotten (`std::mem::forget`) leaves its region
/// open until the closure form around it ends; one that is returned from a closure form is closed with it.
///
/// The backward of a [custom function](mod@crate::function) and the destructors of what a graph holds are like closure
/// forms: every region that they open ends with them. A guard from outside that one of them drops closes its region
/// when the `backward()` that runs there returns, because libtorch restores the thread's state until then.
///
/// # A guard around a whole training loop
///
/// Inside a region libtorch casts a weight once, and uses the cast until the region ends. A guard that is opened before
/// the loop therefore needs the casts to be forgotten after every step. [`GradScaler::step`](crate::GradScaler::step)
/// and the [fused optimizers](crate::optim) do that; an optimizer of tch's whose own `step` is called does not, and then
/// **training stops without any error**: the weights change, and the model goes on computing with the first ones. Open
/// the region around the forward pass and the loss of each step, or call
/// [`clear_autocast_cache`](crate::autocast::clear_autocast_cache) after it.
///
/// # Thread pools
///
/// A thread that waits may be given other work: a worker of rayon's that waits inside a region (in `join`, `scope` or a
/// parallel iterator) runs jobs of others meanwhile, and they run inside the region. Open regions inside the jobs, and
/// not around what waits for jobs; [`AutocastState`](crate::autocast::AutocastState) takes the caller's state into them.
///
/// The guard stays on its thread, as the state does:
///
/// ```compile_fail,E0277
/// fn assert_send<T: Send>() {}
/// assert_send::<tch_amp::autocast::AutocastGuard>();
/// ```
#[derive(Debug)]
#[must_use = "the region ends as soon as its guard is dropped; bind it to a variable such as `_guard`"]
pub struct AutocastGuard {
    id: u64,
    _not_send: PhantomData<*mut ()>,
}

impl AutocastGuard {
    /// Opens a region on `device` with the defaults of [`Autocast::new`].
    ///
    /// # Errors
    ///
    /// As [`Autocast::enter`].
    pub fn new(device: Device) -> Result<Self> {
        Autocast::new(device).enter()
    }

    pub(super) fn open(previous: AutocastState, next: AutocastState) -> Result<Self> {
        Ok(Self { id: stack::open(previous, next)?, _not_send: PhantomData })
    }
}

impl Drop for AutocastGuard {
    fn drop(&mut self) {
        stack::close(self.id);
    }
}

/// Runs `f` under autocast on `device` with PyTorch's defaults; the state from before is back when it returns or
/// panics. [`Autocast`] has the options. The twin of `with torch.autocast(device_type):`.
///
/// What [`AutocastGuard`] says of whole training loops and of thread pools holds for closures as well.
///
/// # Errors
///
/// As [`Autocast::enter`]; then `f` is not run.
pub fn autocast<T>(device: Device, f: impl FnOnce() -> T) -> Result<T> {
    Autocast::new(device).run(f)
}
