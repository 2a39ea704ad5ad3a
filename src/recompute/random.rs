//! The states of the random number generators that a part of a model may use.

use tch::{Device, Tensor};

use crate::error::Result;
use crate::ffi;

/// The states of the generators of the CPU and of some other devices.
#[derive(Debug)]
pub(crate) struct RandomStates(Vec<(Device, Tensor)>);

impl RandomStates {
    /// Reads the states of the generators of the CPU and of the tensors' devices. They are on the host; nothing waits.
    pub(super) fn read(tensors: &[&Tensor]) -> Result<Self> {
        let mut devices = vec![Device::Cpu];
        for tensor in tensors.iter().filter(|tensor| tensor.defined()) {
            let device = tensor.device();
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
        Self::of(&devices)
    }

    pub(crate) fn of(devices: &[Device]) -> Result<Self> {
        let state = |&device| Ok((device, ffi::rng_state(device)?));
        Ok(Self(devices.iter().map(state).collect::<Result<_>>()?))
    }

    fn set(&self) -> Result<()> {
        self.0.iter().try_for_each(|(device, state)| ffi::rng_set_state(*device, state))
    }

    /// Runs `f` with these states, and sets the present ones back when it returns or panics.
    pub(crate) fn during<T>(&self, f: impl FnOnce() -> T) -> Result<T> {
        let devices: Vec<_> = self.0.iter().map(|(device, _)| *device).collect();
        let back = SetOnDrop(Self::of(&devices)?);
        self.set()?;
        let result = f();
        drop(back);
        Ok(result)
    }
}

struct SetOnDrop(RandomStates);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        // A generator takes its own state; if it fails, so will the next use of the generator.
        drop(self.0.set());
    }
}
