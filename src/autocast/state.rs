//! The autocast state of a thread: asked for, and captured to be entered elsewhere.

use tch::{Device, Kind};

use crate::device::{check_usable, device_type, dtype_kind};
#[cfg(doc)]
use crate::error::AutocastError;
use crate::error::Result;
use crate::{ffi, sys};

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
    read(device).is_ok_and(|state| state.devices[0].enabled != 0)
}

/// Returns the dtype of the calling thread's regions on `device`, as `torch.get_autocast_dtype`; outside of a region,
/// the dtype that one would have by default.
///
/// # Errors
///
/// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable) for a device without autocast.
pub fn autocast_dtype(device: Device) -> Result<Kind> {
    dtype_kind(read(device)?.devices[0].dtype)
}

/// The calling thread's state for one device, and its cache flag.
pub(super) fn read(device: Device) -> Result<sys::AutocastState> {
    let mut state = sys::AutocastState { count: 1, ..Default::default() };
    state.devices[0].device_type = device_type(device)?;
    fill(&mut state)?;
    Ok(state)
}

/// Reads the calling thread's state for the devices that `state` names.
fn fill(state: &mut sys::AutocastState) -> Result<()> {
    stack::settle();
    ffi::autocast_read(state)
}

/// Tells whether the calling thread keeps casts of weights, as `torch.is_autocast_cache_enabled`.
pub fn is_cache_enabled() -> bool {
    let mut state = sys::AutocastState::default();
    // Reading the flag of no device cannot fail; libtorch's default stands in for the impossible.
    fill(&mut state).map_or(true, |()| state.cache_enabled != 0)
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
pub struct AutocastState(sys::AutocastState);

/// The types of devices with autocast.
const DEVICES: [Device; sys::AUTOCAST_DEVICES] = [Device::Cpu, Device::Cuda(0), Device::Mps];

impl AutocastState {
    /// Captures the state of the calling thread.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`](crate::Error::Torch) if libtorch cannot read it, which a supported version can.
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
        self.of(device).is_some_and(|state| state.enabled != 0)
    }

    /// Returns the dtype of regions on the device, as [`autocast_dtype`] does of the calling thread.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable) for a device without autocast.
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
        if here == self.0 { Ok(f()) } else { stack::within(here, self.0, f) }
    }

    fn of(&self, device: Device) -> Option<&sys::AutocastDevice> {
        let code = device_type(device).ok()?;
        self.0.devices.iter().find(|state| state.device_type == code)
    }

    /// The calling thread's state of the same devices.
    fn here(&self) -> Result<sys::AutocastState> {
        let mut state = self.0;
        fill(&mut state)?;
        Ok(state)
    }
}
