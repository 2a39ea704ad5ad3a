//! Autocast regions: inside one, libtorch runs the operations that are safe in low precision in bf16 or fp16.
//!
//! The state is the thread's. Every region that this module opens stands on a per-thread stack (`regions.rs`), so that
//! guards may be dropped in any order and a panic leaves nothing behind.

#![forbid(unsafe_code)]

use std::marker::PhantomData;

use tch::{Device, Kind};

use crate::device::{check_usable, device_type, dtype_code, dtype_kind};
use crate::error::{Error, Result};
use crate::regions;
use crate::{ffi, sys};

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
    /// [`Error::AutocastDtype`] for a dtype that autocast does not have. Where PyTorch warns and goes on in full
    /// precision, this fails.
    pub fn enter(self) -> Result<AutocastGuard> {
        let (previous, next) = self.states()?;
        let id = regions::open(previous, next)?;
        Ok(AutocastGuard { id, _not_send: PhantomData })
    }

    /// Runs `f` inside the region; the state from before is back when it returns or panics. As a function decorated with
    /// `torch.autocast`.
    ///
    /// Guards that `f` opened and leaked are closed, too.
    ///
    /// # Errors
    ///
    /// As [`enter`](Self::enter); then `f` is not run.
    pub fn run<T>(self, f: impl FnOnce() -> T) -> Result<T> {
        let (previous, next) = self.states()?;
        regions::within(previous, next, f)
    }

    /// The thread's state before the region and inside of it.
    fn states(self) -> Result<(sys::AutocastState, sys::AutocastState)> {
        if self.enabled {
            check_usable(self.device)?;
        }
        let previous = read(self.device)?;
        let mut next = previous;
        if let Some(cache) = self.cache {
            next.cache_enabled = cache.into();
        }
        let device = &mut next.devices[0];
        device.enabled = self.enabled.into();
        device.dtype = self.allowed_dtype(device.dtype)?;
        Ok((previous, next))
    }

    /// The dtype that was asked for, else the one that the thread has, if autocast can run in it.
    fn allowed_dtype(self, inherited: i8) -> Result<i8> {
        let dtype = self.dtype.map_or_else(|| dtype_kind(inherited), Ok)?;
        let allowed = match dtype {
            Kind::BFloat16 | Kind::Half => true,
            // The dtype of a region that is off is never used, and PyTorch takes any; an integer is a mistake.
            _ => !self.enabled,
        };
        let refused = Error::AutocastDtype { device: self.device, dtype };
        dtype_code(dtype).filter(|_| allowed).ok_or(refused)
    }
}

/// Closes its autocast region when it is dropped. The twin of the `with` statement around `torch.autocast`.
///
/// Guards may be dropped in any order: a region that others were opened inside of closes with the last of them, and
/// then the thread is as it was before the first. A guard that is forgotten (`std::mem::forget`) leaves its region
/// open until the closure form around it ends; one that is returned from a closure form is closed with it.
///
/// The guard stays on its thread, as the state does:
///
/// ```compile_fail,E0277
/// fn assert_send<T: Send>() {}
/// assert_send::<tch_amp::AutocastGuard>();
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
}

impl Drop for AutocastGuard {
    fn drop(&mut self) {
        regions::close(self.id);
    }
}

/// Runs `f` under autocast on `device` with PyTorch's defaults; the state from before is back when it returns or
/// panics. [`Autocast`] has the options. The twin of `with torch.autocast(device_type):`.
///
/// # Errors
///
/// As [`Autocast::enter`]; then `f` is not run.
pub fn autocast<T>(device: Device, f: impl FnOnce() -> T) -> Result<T> {
    Autocast::new(device).run(f)
}

/// Tells whether a region on `device` can be enabled in this process.
///
/// `torch.amp.is_autocast_available` asks only whether PyTorch knows the device type; this is also `false` for CUDA
/// where it is not linked or has no usable device.
pub fn is_autocast_available(device: Device) -> bool {
    check_usable(device).is_ok()
}

/// Tells whether the calling thread is in an enabled region on `device`, as `torch.is_autocast_enabled`.
pub fn is_autocast_enabled(device: Device) -> bool {
    read(device).is_ok_and(|state| state.devices[0].enabled != 0)
}

/// Returns the dtype of the calling thread's regions on `device`, as `torch.get_autocast_dtype`; outside of a region,
/// the dtype that one would have by default.
///
/// # Errors
///
/// [`Error::DeviceUnavailable`] for a device without autocast.
pub fn autocast_dtype(device: Device) -> Result<Kind> {
    dtype_kind(read(device)?.devices[0].dtype)
}

/// The calling thread's state for one device, and its cache flag.
fn read(device: Device) -> Result<sys::AutocastState> {
    let mut state = sys::AutocastState { count: 1, ..Default::default() };
    state.devices[0].device_type = device_type(device)?;
    ffi::autocast_read(&mut state)?;
    Ok(state)
}

/// Tells whether the calling thread keeps casts of weights, as `torch.is_autocast_cache_enabled`.
pub fn is_cache_enabled() -> bool {
    let mut state = sys::AutocastState::default();
    // Reading the flag of no device cannot fail; libtorch's default stands in for the impossible.
    ffi::autocast_read(&mut state).map_or(true, |()| state.cache_enabled != 0)
}

/// Forgets every cached cast of a weight, in all threads, as `torch.clear_autocast_cache`.
///
/// This happens by itself when a thread's outermost region opens or closes, when a nested region changes the dtype,
/// and after a [`GradScaler`](crate::GradScaler) stepped an optimizer. It is needed after weights were changed in
/// place inside a region by other means, such as copying an average of them.
pub fn clear_autocast_cache() {
    // Clearing can fail only when a lock is broken, and then there is nothing better to do than to go on.
    drop(ffi::autocast_clear_cache());
}

/// The autocast state of a thread, to be re-entered on the same or another one. PyTorch has no public twin; its
/// checkpointing does the same inside.
///
/// It holds whether autocast is enabled and in which dtype, for the CPU, CUDA and MPS, and the cache flag. A new
/// thread starts outside of all regions:
///
/// ```
/// use tch::Device;
/// use tch_amp::{AutocastGuard, AutocastState, is_autocast_enabled};
///
/// let _guard = AutocastGuard::new(Device::Cpu)?;
/// let state = AutocastState::current()?;
/// let enabled = std::thread::spawn(move || {
///     (is_autocast_enabled(Device::Cpu), state.run(|| is_autocast_enabled(Device::Cpu)))
/// });
/// assert!(matches!(enabled.join(), Ok((false, Ok(true)))));
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AutocastState(sys::AutocastState);

/// The types of devices with autocast.
const DEVICES: [Device; sys::AUTOCAST_DEVICES] = [Device::Cpu, Device::Cuda(0), Device::Mps];

impl AutocastState {
    /// Captures the state of the calling thread.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if libtorch cannot read it, which a supported version can.
    pub fn current() -> Result<Self> {
        let mut state = sys::AutocastState::default();
        for device in DEVICES {
            state.devices[usize::from(state.count)].device_type = device_type(device)?;
            state.count += 1;
        }
        Self(state).here().map(Self)
    }

    /// Opens a region in which the calling thread has this state.
    ///
    /// # Errors
    ///
    /// [`Error::ThreadEnding`] inside a destructor of a thread-local value.
    pub fn enter(&self) -> Result<AutocastGuard> {
        let id = regions::open(self.here()?, self.0)?;
        Ok(AutocastGuard { id, _not_send: PhantomData })
    }

    /// Runs `f` in this state; the thread's own is back when it returns or panics.
    ///
    /// # Errors
    ///
    /// As [`enter`](Self::enter); then `f` is not run.
    pub fn run<T>(&self, f: impl FnOnce() -> T) -> Result<T> {
        regions::within(self.here()?, self.0, f)
    }

    /// Tells whether autocast is enabled on the device, as [`is_autocast_enabled`] does of the calling thread.
    pub fn is_enabled(&self, device: Device) -> bool {
        self.of(device).is_some_and(|state| state.enabled != 0)
    }

    /// Returns the dtype of regions on the device, as [`autocast_dtype`] does of the calling thread.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`] for a device without autocast.
    pub fn dtype(&self, device: Device) -> Result<Kind> {
        device_type(device)?;
        let state = self.of(device).copied().unwrap_or_default();
        dtype_kind(state.dtype)
    }

    /// Tells whether casts of weights are kept, as [`is_cache_enabled`] does of the calling thread.
    pub fn is_cache_enabled(&self) -> bool {
        self.0.cache_enabled != 0
    }

    /// The types of devices on which autocast is enabled.
    pub(crate) fn enabled_devices(&self) -> impl Iterator<Item = Device> + use<> {
        let state = *self;
        DEVICES.into_iter().filter(move |device| state.is_enabled(*device))
    }

    /// Switches autocast off on the device.
    pub(crate) fn disable(&mut self, device: Device) {
        let code = device_type(device).ok();
        let devices = self.0.devices.iter_mut();
        for state in devices.filter(|state| Some(state.device_type) == code) {
            state.enabled = 0;
        }
    }

    /// Runs `f` in this state: in a region, or as things are where the thread is in it already.
    pub(crate) fn restore<T>(&self, f: impl FnOnce() -> T) -> Result<T> {
        let here = self.here()?;
        if here == self.0 { Ok(f()) } else { regions::within(here, self.0, f) }
    }

    fn of(&self, device: Device) -> Option<&sys::AutocastDevice> {
        let code = device_type(device).ok()?;
        self.0.devices.iter().find(|state| state.device_type == code)
    }

    /// The calling thread's state of the same devices.
    fn here(&self) -> Result<sys::AutocastState> {
        let mut state = self.0;
        ffi::autocast_read(&mut state)?;
        Ok(state)
    }
}
