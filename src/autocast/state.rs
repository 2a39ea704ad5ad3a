//! The autocast state of a thread: reading it, and capturing it to enter it on another thread.

use tch::{Device, Kind};

use crate::autocast::{AutocastGuard, stack};
use crate::device::check_usable;
#[cfg(doc)]
use crate::error::AutocastError;
use crate::error::Result;
use crate::ffi::{self, AUTOCAST_DEVICES};

/// Returns whether a region on `device` can be enabled in this process.
///
/// Corresponds to `torch.amp.is_autocast_available`, which only checks whether PyTorch supports the device type. This
/// function is also `false` if CUDA is not linked or the device is not usable.
pub fn is_autocast_available(device: Device) -> bool {
    check_usable(device).is_ok()
}

/// Returns whether the calling thread is in an enabled region on `device`. Corresponds to `torch.is_autocast_enabled`.
pub fn is_autocast_enabled(device: Device) -> bool {
    stack::read(&[device]).is_ok_and(|state| state.is_enabled(device))
}

/// Returns the autocast dtype of the calling thread on `device`. Outside of regions this is the default dtype of a
/// region. Corresponds to `torch.get_autocast_dtype`.
///
/// # Errors
///
/// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable) for a device without autocast.
pub fn autocast_dtype(device: Device) -> Result<Kind> {
    stack::read(&[device])?.dtype(device)
}

/// Clears the cached casts of weights, of all threads. Corresponds to `torch.clear_autocast_cache`.
///
/// This happens automatically when a thread's outermost region opens or closes, when a nested region changes the dtype,
/// after a [`GradScaler`](crate::GradScaler) or a [fused optimizer](crate::optim) has stepped, and after a checkpoint
/// was restored. Call it after weights were changed in place inside a region by other means, such as copying an average
/// into them.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor, no_grad};
/// use tch_amp::autocast::{AutocastGuard, clear_autocast_cache};
///
/// let mut w = Tensor::eye(1, (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let _region = AutocastGuard::new(Device::Cpu)?;
/// assert_eq!(w.matmul(&w).double_value(&[0, 0]), 1.0);
/// let _ = no_grad(|| w.fill_(3.0));
/// // The cast of the old weight is still in use.
/// assert_eq!(w.matmul(&w).double_value(&[0, 0]), 1.0);
/// clear_autocast_cache();
/// assert_eq!(w.matmul(&w).double_value(&[0, 0]), 9.0);
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn clear_autocast_cache() {
    // Clearing fails only if libtorch cannot take its lock, which the caller could do nothing about.
    drop(ffi::autocast_clear_cache());
}

/// Runs `f`, which changes weights, and clears their casts when it returns or panics: inside a region the cache would
/// otherwise keep returning the casts of the old weights.
pub(crate) fn forgetting_casts<T>(f: impl FnOnce() -> T) -> T {
    struct ClearOnDrop;
    impl Drop for ClearOnDrop {
        fn drop(&mut self) {
            clear_autocast_cache();
        }
    }
    let _clear = ClearOnDrop;
    f()
}

/// The autocast state of a thread, which can be entered again on the same or on another thread.
///
/// It consists of the enabled flag and the dtype for each of the CPU, CUDA and MPS, and of the cache flag. PyTorch has
/// no public counterpart; its activation checkpointing does the same internally. The cache of casts is not a part of
/// it: all threads share one, and regions that end on one of them empty it, so that the last bits of gradients can
/// differ from run to run while several threads have regions; see [`Autocast::cache`](crate::Autocast::cache). A new
/// thread starts outside of all regions:
///
/// ```
/// use tch::Device;
/// use tch_amp::autocast::{AutocastGuard, AutocastState, is_autocast_enabled};
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
pub struct AutocastState(ffi::RawAutocastState);

impl AutocastState {
    /// Captures the state of the calling thread.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`](crate::Error::Torch) if libtorch cannot read the state. No supported version is known to fail.
    pub fn current() -> Result<Self> {
        stack::read(&AUTOCAST_DEVICES).map(Self)
    }

    /// Opens a region in which the calling thread has this state, and returns the guard that closes it.
    ///
    /// # Errors
    ///
    /// [`AutocastError::ThreadEnding`] inside a destructor of a thread-local value.
    pub fn enter(&self) -> Result<AutocastGuard> {
        AutocastGuard::open(self.here()?, self.0)
    }

    /// Runs `f` in this state and restores the thread's own when `f` returns or panics.
    ///
    /// # Errors
    ///
    /// The same as [`enter`](Self::enter); then `f` is not run.
    pub fn run<T>(&self, f: impl FnOnce() -> T) -> Result<T> {
        stack::within(self.here()?, self.0, f)
    }

    /// Returns whether autocast is enabled on the device, like [`is_autocast_enabled`] for the calling thread.
    pub fn is_enabled(&self, device: Device) -> bool {
        self.0.is_enabled(device)
    }

    /// Returns the autocast dtype on the device, like [`autocast_dtype`] for the calling thread.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable) for a device without autocast.
    pub fn dtype(&self, device: Device) -> Result<Kind> {
        self.0.dtype(device)
    }

    /// Returns whether the casts of weights are cached. Corresponds to `torch.is_autocast_cache_enabled`.
    pub fn is_cache_enabled(&self) -> bool {
        self.0.is_cache_enabled()
    }

    /// Returns the types of devices on which autocast is enabled.
    pub(crate) fn enabled_devices(&self) -> impl Iterator<Item = Device> + use<> {
        let state = *self;
        AUTOCAST_DEVICES.into_iter().filter(move |device| state.is_enabled(*device))
    }

    /// Switches autocast off on the device.
    pub(crate) fn disable(&mut self, device: Device) {
        self.0.set_enabled(device, false);
    }

    /// Runs `f` in this state, without opening a region if the thread has that state already.
    pub(crate) fn restore<T>(&self, f: impl FnOnce() -> T) -> Result<T> {
        let here = self.here()?;
        if here == self.0 { Ok(f()) } else { stack::within(here, self.0, f) }
    }

    /// Reads the calling thread's state for the same devices.
    fn here(&self) -> Result<ffi::RawAutocastState> {
        stack::settle();
        self.0.here()
    }
}
