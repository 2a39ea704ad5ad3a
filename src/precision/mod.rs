//! How fast a device computes in each precision.
//!
//! Nothing is measured unless a program asks. `cargo xtask doctor` prints the same for the CPU of its machine.

mod layers;
mod measure;
mod words;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use lazy_static::lazy_static;
use tch::{Device, no_grad};

use crate::device::check_usable;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

pub use layers::advice_for_model;
pub use words::{MatmulSpeed, advice_for_layer};

lazy_static! {
    /// What has been measured in this process, by device.
    static ref MEASURED: Mutex<HashMap<String, Precision>> = Mutex::default();
}

/// How fast matrix products are on a device in f32, in TensorFloat-32 where there is such a thing, in bf16 and in fp16.
///
/// Printed, it is the advice that follows from the speeds:
///
/// ```no_run
/// use tch::Device;
/// use tch_amp::precision::Precision;
///
/// let precision = Precision::measure(Device::Cpu)?;
/// // bf16: 4.3x as fast as f32 at 1024, 1.1x at 64: use it for layers wider than about 128.
/// println!("{precision}");
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Precision {
    speeds: Vec<MatmulSpeed>,
}

impl Precision {
    /// Measures matrix products of several sizes on a device, on as many threads as libtorch uses. It takes up to about
    /// five seconds on a CPU; each device is measured once in a process. Synchronizes.
    ///
    /// An autocast region around the call makes no difference. While it measures on a GPU, libtorch's setting of
    /// TensorFloat-32, which is the process's, changes back and forth.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`] if the device cannot be used here;
    /// [`Error::Torch`] if libtorch fails, for instance for lack of memory.
    pub fn measure(device: Device) -> Result<Self> {
        check_usable(device)?;
        let key = format!("{device:?}");
        let mut measured = MEASURED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = measured.get(&key) {
            return Ok(known.clone());
        }
        let new = Self { speeds: no_grad(|| measure::speeds(device))? };
        measured.insert(key, new.clone());
        Ok(new)
    }

    /// Returns the measured speeds, from small products to large ones.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tch::Device;
    /// use tch_amp::precision::Precision;
    ///
    /// let precision = Precision::measure(Device::Cpu)?;
    /// let gains = precision.speeds().iter().map(|speed| (speed.size, speed.bf16.unwrap_or(0.0) / speed.f32));
    /// for (size, gain) in gains {
    ///     println!("bf16 is {gain:.1} times as fast as f32 for products of size {size}");
    /// }
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn speeds(&self) -> &[MatmulSpeed] {
        &self.speeds
    }
}

/// One sentence for each dtype.
impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&words::advice(&self.speeds))
    }
}
