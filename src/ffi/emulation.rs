//! Half precision emulated in f32 on the calling thread.

use std::ffi::{CString, c_char};
use std::marker::PhantomData;
use std::ptr::NonNull;

use tch::{Device, Kind, Tensor};

use super::{call, pointers};
use super::{device_type, dtype_code};
use crate::error::{Error, Result};
use crate::sys::insight as sys;

/// The treatment of the enabled regions of a thread, so that the same program runs in other precisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Regions {
    AsGiven,
    /// They are switched off.
    Off,
    /// Their dtype is f32, and what half precision rounds is rounded as [`Rounding`] says.
    Emulated,
}

/// How emulated regions round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// At random to one of the two neighbours in half precision.
    Random { seed: u64 },
    /// The same, but with the exponents of f32, so that no number is too small or too large.
    Unbounded { seed: u64 },
    /// Not at all: every number is that of f32.
    None,
}

impl Regions {
    /// Those of the calling thread, which can be one of a backward pass.
    pub(crate) fn here() -> Self {
        // SAFETY: it has no preconditions.
        match unsafe { sys::tamp_emulation_regions() } {
            sys::REGIONS_OFF => Self::Off,
            sys::REGIONS_EMULATED => Self::Emulated,
            _ => Self::AsGiven,
        }
    }
}

/// The rounding that is emulated.
#[derive(Clone, Debug)]
pub(crate) struct Emulated {
    pub(crate) device: Device,
    pub(crate) dtype: Kind,
    /// The operators that autocast runs in half precision, and those that it runs in f32.
    pub(crate) lower: Vec<CString>,
    pub(crate) f32: Vec<CString>,
}

/// An emulation, or an observation of what operators return, until it is dropped.
#[derive(Debug)]
pub(crate) struct Emulation {
    raw: NonNull<sys::Emulation>,
    // Its dispatch keys are those of the thread.
    thread: PhantomData<*const ()>,
}

impl Emulation {
    /// Begins to note the dtypes that operators return, and makes the regions of the thread what is wanted.
    pub(crate) fn begin(how: &Emulated, regions: Regions, rounding: Rounding) -> Result<Self> {
        let names = |list: &[CString]| {
            list.iter().map(|name| name.as_ptr()).collect::<Vec<*const c_char>>()
        };
        let (lower, f32) = (names(&how.lower), names(&how.f32));
        let (rounding, seed) = match rounding {
            Rounding::Random { seed } => (sys::ROUNDING_RANDOM, seed),
            Rounding::Unbounded { seed } => (sys::ROUNDING_UNBOUNDED, seed),
            Rounding::None => (sys::ROUNDING_NONE, 0),
        };
        let raw = sys::Emulated {
            lower: lower.as_ptr(),
            f32: f32.as_ptr(),
            lower_count: lower.len(),
            f32_count: f32.len(),
            seed,
            dtype: dtype_code(how.dtype).unwrap_or_default(),
            device_type: device_type(how.device)?,
            regions: match regions {
                Regions::AsGiven => sys::REGIONS_AS_GIVEN,
                Regions::Off => sys::REGIONS_OFF,
                Regions::Emulated => sys::REGIONS_EMULATED,
            },
            rounding,
        };
        // SAFETY: the struct and the arrays of C strings in it live for the call, which copies them, and `err` is valid
        // for a write.
        let raw = call(|err| unsafe { sys::tamp_emulation_begin(&raw, err) })?;
        let raw = NonNull::new(raw).ok_or_else(|| Error::Torch("no emulation".to_owned()))?;
        Ok(Self { raw, thread: PhantomData })
    }

    /// Says that half precision would have these tensors in half precision.
    pub(crate) fn mark(&self, tensors: &[Tensor]) -> Result<()> {
        let (array, count) = (pointers(tensors), tensors.len());
        // SAFETY: the emulation is alive, the array has `count` elements, and the borrow keeps the tensors alive.
        call(|err| unsafe {
            sys::tamp_emulation_mark(self.raw.as_ptr(), array.as_ptr(), count, err)
        })
    }

    /// The dtypes in half precision that operators have returned.
    pub(crate) fn returned(&self) -> Vec<Kind> {
        // SAFETY: the emulation is alive.
        let bits = unsafe { sys::tamp_emulation_returned(self.raw.as_ptr()) };
        [(sys::RETURNED_BFLOAT16, Kind::BFloat16), (sys::RETURNED_HALF, Kind::Half)]
            .into_iter()
            .filter_map(|(bit, kind)| (bits & bit != 0).then_some(kind))
            .collect()
    }
}

impl Drop for Emulation {
    fn drop(&mut self) {
        // SAFETY: the emulation is alive, began on this thread, and is not used again.
        unsafe { sys::tamp_emulation_end(self.raw.as_ptr()) }
    }
}
