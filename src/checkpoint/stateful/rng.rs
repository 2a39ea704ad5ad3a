//! The states of libtorch's random number generators.

use tch::{Device, Tensor};

use crate::checkpoint::part::Part;
use crate::checkpoint::stateful::save::entry;
use crate::checkpoint::stateful::{Prepared, SaveState, SavedState, Stateful};
use crate::device::check_usable;
use crate::error::Result;
use crate::ffi;

/// Returns the state of a device's default random number generator, which dropout, `randn` and `randperm` use: uint8,
/// on the CPU. Waits for the device. PyTorch's counterparts are `torch.get_rng_state()` and
/// `torch.cuda.get_rng_state()`.
///
/// # Errors
///
/// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable).
#[doc(alias = "get_rng_state")]
pub fn rng_state(device: Device) -> Result<Tensor> {
    check_usable(device)?;
    ffi::rng_state(device)
}

/// Makes a device's default random number generator go on from a state. PyTorch's counterparts are
/// `torch.set_rng_state()` and `torch.cuda.set_rng_state()`.
///
/// # Errors
///
/// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable), and [`Error::Torch`](crate::Error::Torch) if `state`
/// is not a state of that device's generator.
pub fn set_rng_state(device: Device, state: &Tensor) -> Result<()> {
    check_usable(device)?;
    ffi::rng_set_state(device, state)
}

/// The default random number generator of a device, which dropout, `randn` and `randperm` use, as something that a
/// checkpoint holds. The counterpart of `torch.default_generator`.
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
        let numbers = rng_state(self.0)?;
        state.whole(Part::Tensor(entry("rng", &numbers)?));
        Ok(())
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        saved.take_whole();
        let state = saved.checkpoint.tensor(saved.name)?;
        let device = self.0;
        // Whether a generator takes a state shows only when it does.
        let before = rng_state(device)?;
        let taken = set_rng_state(device, &state);
        set_rng_state(device, &before)?;
        taken?;
        Ok(Prepared::step(move || set_rng_state(device, &state)))
    }
}
