//! The autocast state of a thread: asked for, and captured to be entered elsewhere.

use tch::{Device, Kind};

use crate::device::check_usable;
#[cfg(doc)]
use crate::error::AutocastError;
use crate::error::Result;
use crate::ffi::{self, AUTOCAST_DEVICES};

use crate::autocast::{AutocastGuard, stack};

/// Tells whether a region on `device` can be enabled in this process.
///
/// `torch.amp.is_autocast_available` asks only whether PyTorch knows the device type; this is also `false` for CUDA
/// where it is not linked or has no usable device.
pub fn is_autocast_available(device: Device) -> bool {
    check_usable(device).is_ok()
}

/// Tells whether the calling thread is in an enabled region on `device`, as `torch.is_autocast_enabled`.
pub fn is_autocast_enabled(device: Device) -> bool {
    read(&[device]).is_ok_and(|state| state.is_enabled(device))
}

/// Returns the dtype of the calling thread's regions on `device`, as `torch.get_autocast_dtype`; outside of a region,
/// the dtype that one would have by default.
///
/// # Errors
///
/// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable) for a device without autocast.
pub fn autocast_dtype(device: Device) -> Result<Kind> {
    read(&[device])?.dtype(device)
}

/// The calling thread's state for some devices, and its cache flag.
pub(super) fn read(devices: &[Device]) -> Result<ffi::AutocastState> {
    stack::settle();
    ffi::AutocastState::read(devices)
}

/// Tells whether the calling thread keeps casts of weights, as `torch.is_autocast_cache_enabled`.
pub fn is_cache_enabled() -> bool {
    // Reading the flag of no device cannot fail; libtorch's default stands in for the impossible.
    read(&[]).map_or(true, |state| state.is_cache_enabled())
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

/// Runs `f`, which changes weights, and forgets their casts when it returns or panics: inside a region the cache would
/// go on serving the old ones.
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

/// The autocast state of a thread, to be re-entered on the same or another one. PyTorch has no public twin; its
/// checkpointing does the same inside.
///
/// It holds whether autocast is enabled and in which dtype, for the CPU, CUDA and MPS, and the cache flag. A new
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
pub struct AutocastState(ffi::AutocastState);

impl AutocastState {
    /// Captures the state of the calling thread.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`](crate::Error::Torch) if libtorch cannot read it, which a supported version can.
    pub fn current() -> Result<Self> {
        read(&AUTOCAST_DEVICES).map(Self)
    }

    /// Opens a region in which the calling thread has this state.
    ///
    /// # Errors
    ///
    /// [`AutocastError::ThreadEnding`] inside a destructor of a thread-local value.
    pub fn enter(&self) -> Result<AutocastGuard> {
        AutocastGuard::open(self.here()?, self.0)
    }

    /// Runs `f` in this state; the thread's own is back when it returns or panics.
    ///
    /// # Errors
    ///
    /// As [`enter`](Self::enter); then `f` is not run.
    pub fn run<T>(&self, f: impl FnOnce() -> T) -> Result<T> {
        stack::within(self.here()?, self.0, f)
    }

    /// Tells whether autocast is enabled on the device, as [`is_autocast_enabled`] does of the calling thread.
    pub fn is_enabled(&self, device: Device) -> bool {
        self.0.is_enabled(device)
    }

    /// Returns the dtype of regions on the device, as [`autocast_dtype`] does of the calling thread.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable) for a device without autocast.
    pub fn dtype(&self, device: Device) -> Result<Kind> {
        self.0.dtype(device)
    }

    /// Tells whether casts of weights are kept, as [`is_cache_enabled`] does of the calling thread.
    pub fn is_cache_enabled(&self) -> bool {
        self.0.is_cache_enabled()
    }

    /// The types of devices on which autocast is enabled.
    pub(crate) fn enabled_devices(&self) -> impl Iterator<Item = Device> + use<> {
        let state = *self;
        AUTOCAST_DEVICES.into_iter().filter(move |device| state.is_enabled(*device))
    }

    /// Switches autocast off on the device.
    pub(crate) fn disable(&mut self, device: Device) {
        self.0.set_enabled(device, false);
    }

    /// Runs `f` in this state: in a region, or as things are where the thread is in it already.
    pub(crate) fn restore<T>(&self, f: impl FnOnce() -> T) -> Result<T> {
        let here = self.here()?;
        if here == self.0 { Ok(f()) } else { stack::within(here, self.0, f) }
    }

    /// The calling thread's state of the same devices.
    fn here(&self) -> Result<ffi::AutocastState> {
        stack::settle();
        self.0.here()
    }
}
