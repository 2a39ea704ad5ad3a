//! The states of libtorch's random number generators.

use tch::{Device, Tensor};

use crate::checkpoint::stateful::{Prepared, SaveState, SavedState, Stateful};
use crate::device::check_usable;
use crate::error::Result;
use crate::ffi;

/// The default random number generator of a device, which dropout, `randn` and `randperm` use, as a part of a
/// checkpoint. The counterpart of `torch.default_generator` and `torch.cuda.default_generators`.
///
/// When you train on a GPU, save the states of both generators under two names: dropout draws from the GPU's generator,
/// and shuffling on the CPU from the CPU's. Random numbers of other libraries, such as the crate `rand`, and the place in
/// the data are not covered: save them with [`add_value`](crate::checkpoint::Checkpoint::add_value).
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::checkpoint::{Checkpoint, Rng};
///
/// let mut checkpoint = Checkpoint::new();
/// checkpoint.add("rng", Rng(Device::Cpu))?;
/// let first = Tensor::randn([3], (Kind::Float, Device::Cpu));
/// checkpoint.restore().add("rng", Rng(Device::Cpu)).apply()?;
/// assert_eq!(first, Tensor::randn([3], (Kind::Float, Device::Cpu)));
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rng(pub Device);

impl Rng {
    /// Returns the state: a one-dimensional uint8 tensor on the CPU. Does not synchronize, because libtorch keeps the
    /// states of all generators on the host. The counterpart of `torch.get_rng_state()` and
    /// `torch.cuda.get_rng_state()`.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable).
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor};
    /// use tch_amp::checkpoint::Rng;
    ///
    /// let rng = Rng(Device::Cpu);
    /// let before = rng.get_state()?;
    /// let first = Tensor::rand([4], (Kind::Float, Device::Cpu));
    /// rng.set_state(&before)?;
    /// assert_eq!(first, Tensor::rand([4], (Kind::Float, Device::Cpu)));
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    #[doc(alias = "get_rng_state")]
    pub fn get_state(self) -> Result<Tensor> {
        check_usable(self.0)?;
        ffi::rng_state(self.0)
    }

    /// Sets the state. The counterpart of `torch.set_rng_state()` and `torch.cuda.set_rng_state()`.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable), and [`Error::Torch`](crate::Error::Torch) if
    /// `state` is not a state of such a generator; the generator keeps its state then.
    #[doc(alias = "set_rng_state")]
    pub fn set_state(self, state: &Tensor) -> Result<()> {
        check_usable(self.0)?;
        ffi::rng_set_state(self.0, state)
    }
}

impl Stateful for Rng {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        state.whole_tensor(&self.get_state()?)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let (rng, state) = (*self, saved.whole_tensor()?);
        check_rng_state(rng.0, &state)?;
        Ok(Prepared::step(move || rng.set_state(&state)))
    }
}

/// Returns an error unless the generator of the device accepts the state.
pub(crate) fn check_rng_state(device: Device, state: &Tensor) -> Result<()> {
    check_usable(device)?;
    ffi::rng_check_state(device, state)
}
