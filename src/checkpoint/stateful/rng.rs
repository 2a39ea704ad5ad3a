//! The states of libtorch's random number generators.

use tch::{Device, Tensor};

use crate::checkpoint::stateful::{Prepared, SaveState, SavedState, Stateful};
use crate::device::check_usable;
use crate::error::Result;
use crate::ffi;

/// Returns the state of a device's default random number generator, which dropout, `randn` and `randperm` use. The
/// state is a one-dimensional uint8 tensor on the CPU. Does not synchronize, because libtorch keeps the states of all
/// generators on the host. The counterpart of `torch.get_rng_state()` and `torch.cuda.get_rng_state()`.
///
/// # Errors
///
/// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable).
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::checkpoint::{rng_state, set_rng_state};
///
/// let before = rng_state(Device::Cpu)?;
/// let first = Tensor::rand([4], (Kind::Float, Device::Cpu));
/// set_rng_state(Device::Cpu, &before)?;
/// assert_eq!(first, Tensor::rand([4], (Kind::Float, Device::Cpu)));
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[doc(alias = "get_rng_state")]
pub fn rng_state(device: Device) -> Result<Tensor> {
    check_usable(device)?;
    ffi::rng_state(device)
}

/// Sets the state of a device's default random number generator. The counterpart of `torch.set_rng_state()` and
/// `torch.cuda.set_rng_state()`.
///
/// # Errors
///
/// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable), and [`Error::Torch`](crate::Error::Torch) if `state`
/// is not a state of such a generator; the generator keeps its state then.
pub fn set_rng_state(device: Device, state: &Tensor) -> Result<()> {
    check_usable(device)?;
    ffi::rng_set_state(device, state)
}

/// The default random number generator of a device, which dropout, `randn` and `randperm` use, as a part of a
/// checkpoint. The counterpart of `torch.default_generator` and `torch.cuda.default_generators`.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::checkpoint::{Checkpoint, Rng};
///
/// let mut checkpoint = Checkpoint::new();
/// checkpoint.add("rng", &mut Rng(Device::Cpu))?;
/// let first = Tensor::randn([3], (Kind::Float, Device::Cpu));
/// checkpoint.restore().add("rng", &mut Rng(Device::Cpu)).apply()?;
/// assert_eq!(first, Tensor::randn([3], (Kind::Float, Device::Cpu)));
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rng(pub Device);

impl Stateful for Rng {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        state.whole_tensor(&rng_state(self.0)?)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let state = saved.whole_tensor()?;
        let device = self.0;
        check_rng_state(device, &state)?;
        Ok(Prepared::step(move || set_rng_state(device, &state)))
    }
}

/// Returns an error unless the generator of the device accepts the state.
pub(crate) fn check_rng_state(device: Device, state: &Tensor) -> Result<()> {
    check_usable(device)?;
    ffi::rng_check_state(device, state)
}
