//! The autocast state of a thread.

use std::ffi::CString;
use std::marker::PhantomData;

use tch::{Device, Kind};

use super::call;
use super::{device_type, dtype_code, dtype_kind};
use crate::error::Result;
use crate::sys;

/// The types of devices that have autocast.
pub(crate) const AUTOCAST_DEVICES: [Device; sys::AUTOCAST_DEVICES] =
    [Device::Cpu, Device::Cuda(0), Device::Mps];

/// The autocast state of a thread for some types of devices, and whether its cache of casts is enabled.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(transparent)]
pub(crate) struct RawAutocastState(sys::AutocastState);

impl RawAutocastState {
    /// Reads the calling thread's state for devices of different types.
    pub(crate) fn read(devices: &[Device]) -> Result<Self> {
        let mut state = sys::AutocastState::default();
        for (entry, device) in state.devices.iter_mut().zip(devices) {
            entry.device_type = device_type(*device)?;
            state.count += 1;
        }
        Self(state).here()
    }

    /// Reads the calling thread's state for the same devices.
    pub(crate) fn here(&self) -> Result<Self> {
        let mut state = self.0;
        assert!(usize::from(state.count) <= sys::AUTOCAST_DEVICES);
        // SAFETY: `state` is a whole struct of the shim's layout, and `count` stays within its array.
        call(|err| unsafe { sys::tamp_autocast_read(&mut state, err) })?;
        Ok(Self(state))
    }

    /// Opens a region, by making this the calling thread's state.
    pub(crate) fn enter(&self, outermost: bool) -> Result<()> {
        assert!(usize::from(self.0.count) <= sys::AUTOCAST_DEVICES);
        // SAFETY: the state has the shim's layout and outlives the call, and `count` stays within its array.
        call(|err| unsafe { sys::tamp_autocast_enter(&self.0, outermost.into(), err) })
    }

    /// Closes a region, by making this, the state from before the region, the calling thread's state again.
    pub(crate) fn exit_to(&self, outermost: bool) {
        // SAFETY: the state is a whole struct, which the shim filled.
        unsafe { sys::tamp_autocast_exit(&self.0, outermost.into()) }
    }

    /// The number of the overrides of autocast's lists, or 0.
    pub(crate) fn overrides(&self) -> u32 {
        self.0.overrides
    }

    /// Sets the overrides to those of a number that [`overrides_add`] returned, or to none.
    pub(crate) fn set_overrides(&mut self, number: u32) {
        self.0.overrides = number;
    }

    pub(crate) fn is_cache_enabled(&self) -> bool {
        self.0.cache_enabled != 0
    }

    pub(crate) fn set_cache_enabled(&mut self, enabled: bool) {
        self.0.cache_enabled = enabled.into();
    }

    /// Returns whether autocast is enabled on devices of this type.
    pub(crate) fn is_enabled(&self, device: Device) -> bool {
        self.of(device).is_some_and(|state| state.enabled != 0)
    }

    /// The dtype of regions on devices of this type.
    pub(crate) fn dtype(&self, device: Device) -> Result<Kind> {
        device_type(device)?;
        dtype_kind(self.of(device).copied().unwrap_or_default().dtype)
    }

    pub(crate) fn set_enabled(&mut self, device: Device, enabled: bool) {
        if let Some(state) = self.of_mut(device) {
            state.enabled = enabled.into();
        }
    }

    /// Sets the dtype for devices of this type. Returns whether it is a dtype of autocast, which are the floating ones.
    pub(crate) fn set_dtype(&mut self, device: Device, dtype: Kind) -> bool {
        let code = dtype_code(dtype);
        if let (Some(state), Some(code)) = (self.of_mut(device), code) {
            state.dtype = code;
        }
        code.is_some()
    }

    fn of(&self, device: Device) -> Option<&sys::AutocastDevice> {
        let code = device_type(device).ok()?;
        self.0.devices.iter().find(|state| state.device_type == code)
    }

    fn of_mut(&mut self, device: Device) -> Option<&mut sys::AutocastDevice> {
        let code = device_type(device).ok()?;
        self.0.devices.iter_mut().find(|state| state.device_type == code)
    }
}

/// How an operator runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunCode {
    F32,
    Half,
    Composed,
}

/// A rule that overrides autocast's lists.
#[derive(Clone, Debug)]
pub(crate) struct RawRule {
    /// The operator, with its namespace.
    pub(crate) name: CString,
    pub(crate) code: RunCode,
    /// The smallest size to which it applies.
    pub(crate) at_least: u64,
    /// The smallest size to which it does not apply any more.
    pub(crate) below: u64,
    /// The limit on the size of what is composed.
    pub(crate) most_bytes: u64,
}

impl RawRule {
    fn as_sys(&self) -> sys::Rule {
        let &Self { ref name, code, at_least, below, most_bytes } = self;
        let run_as = match code {
            RunCode::F32 => sys::RUN_F32,
            RunCode::Half => sys::RUN_HALF,
            RunCode::Composed => sys::RUN_COMPOSED,
        };
        sys::Rule { name: name.as_ptr(), at_least, below, most_bytes, run_as }
    }
}

/// Why a rule cannot be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Unknown,
    Aliases,
    Whole,
}

/// Adds overrides of autocast's lists. Returns their number, or the place of a rule that cannot be added.
pub(crate) fn overrides_add(
    rules: &[RawRule],
) -> Result<std::result::Result<u32, (usize, Refused)>> {
    let raw: Vec<_> = rules.iter().map(RawRule::as_sys).collect();
    let (mut refused, mut problem) = (0, sys::OVERRIDE_OK);
    // SAFETY: `raw` has as many elements as it says, their names live as long as `rules`, and the others are valid for
    // writes.
    let number = call(|err| unsafe {
        sys::tamp_overrides_add(raw.as_ptr(), raw.len(), &mut refused, &mut problem, err)
    })?;
    Ok(match problem {
        sys::OVERRIDE_UNKNOWN => Err((refused, Refused::Unknown)),
        sys::OVERRIDE_ALIASES => Err((refused, Refused::Aliases)),
        sys::OVERRIDE_WHOLE => Err((refused, Refused::Whole)),
        _ => Ok(number),
    })
}

/// Clears the cache of casts.
pub(crate) fn autocast_clear_cache() -> Result<()> {
    // SAFETY: `err` is valid for a write.
    call(|err| unsafe { sys::tamp_autocast_clear_cache(err) })
}

/// While it exists, this thread computes outside of its autocast regions, as all arithmetic of this crate does: a
/// region must change what the program computes, and not the scale of its losses or a step. Functions of the shim are
/// outside by themselves.
///
/// Code of the program must not run meanwhile, except for destructors, which are in the regions again.
#[derive(Debug)]
#[must_use = "the thread is back in its regions when this is dropped"]
pub(crate) struct OutsideRegions {
    /// The regions are those of the thread.
    _not_send: PhantomData<*const ()>,
}

impl OutsideRegions {
    pub(crate) fn enter() -> Self {
        // SAFETY: changes numbers of the calling thread, and `drop` undoes it on the same thread.
        unsafe { sys::tamp_regions_leave() }
        Self { _not_send: PhantomData }
    }
}

impl Drop for OutsideRegions {
    fn drop(&mut self) {
        // SAFETY: `enter` has left the regions on this thread, which this value cannot have moved away from.
        unsafe { sys::tamp_regions_return() }
    }
}

/// Returns the number of the backward pass that runs on this thread, of the innermost one if several do; -1 if none
/// does.
pub(crate) fn autocast_backward() -> i64 {
    // SAFETY: takes nothing and reads a number of the calling thread.
    unsafe { sys::tamp_autocast_backward() }
}

/// Registers `settle` to be called on this thread once the backward pass that runs here has ended and libtorch has
/// restored the thread's state. `settle` must not unwind.
pub(crate) fn autocast_after_backward(settle: extern "C" fn()) {
    // SAFETY: `settle` is a safe function without parameters, which may be called at any time.
    unsafe { sys::tamp_autocast_after_backward(settle) }
}
