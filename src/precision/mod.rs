//! How fast a device computes in each precision.
//!
//! Nothing is measured unless a program asks. `cargo xtask doctor` prints the same for the CPU of its machine.

mod layers;
mod words;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use lazy_static::lazy_static;
use tch::{Cuda, Device, Kind, Tensor, no_grad};

use crate::Autocast;
use crate::device::check_usable;
use crate::error::{Error, Result};
use crate::ffi;

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

/// The sizes on a CPU, and those on a GPU besides.
const SIZES: [i64; 5] = [64, 128, 256, 512, 1024];
const LARGE_SIZES: [i64; 2] = [2048, 4096];

/// How long one product may take for a larger size to be tried as well.
const SLOW: Duration = Duration::from_millis(60);

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
        // A region around the caller would cast every matrix to its own dtype.
        let off = Autocast::new(device).enabled(false).cache(false);
        let new = Self { speeds: off.run(|| no_grad(|| speeds(device)))?? };
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

fn speeds(device: Device) -> Result<Vec<MatmulSpeed>> {
    let large = LARGE_SIZES.into_iter().filter(|_| device != Device::Cpu);
    // A dtype that is slow is not measured at larger sizes.
    let mut slow = [false; 2];
    let mut speeds = Vec::new();
    for size in SIZES.into_iter().chain(large) {
        let gflops = |time: Duration| 2.0 * (size as f64).powi(3) / time.as_secs_f64() / 1e9;
        let (f32, tf32) = match device {
            Device::Cuda(_) => {
                (with_tf32(false, device, size)?, Some(gflops(with_tf32(true, device, size)?)))
            }
            _ => (product(device, Kind::Float, size)?, None),
        };
        let mut half = [None; 2];
        for (i, kind) in [Kind::BFloat16, Kind::Half].into_iter().enumerate() {
            if !slow[i] {
                let time = product(device, kind, size)?;
                slow[i] = time > SLOW;
                half[i] = Some(gflops(time));
            }
        }
        speeds.push(MatmulSpeed::new(size, gflops(f32), tf32, half[0], half[1]));
    }
    Ok(speeds)
}

/// The time of one f32 product that may use TensorFloat-32, or may not.
fn with_tf32(allow: bool, device: Device, size: i64) -> Result<Duration> {
    let _precision = ffi::MatmulPrecision::with_tf32(allow)?;
    product(device, Kind::Float, size)
}

/// The time of one product: the shortest of several.
fn product(device: Device, kind: Kind, size: i64) -> Result<Duration> {
    let matrix = Tensor::f_ones([size, size], (kind, device))?;
    let time = || -> Result<Duration> {
        synchronize(device);
        let start = Instant::now();
        let product = matrix.f_mm(&matrix)?;
        synchronize(device);
        let time = start.elapsed();
        let computed = product.f_kind()?;
        if computed == kind {
            return Ok(time);
        }
        Err(Error::Torch(format!("a product of {kind:?} matrices was computed in {computed:?}")))
    };
    // The first one also makes what later ones use again.
    let mut shortest = time()?;
    let (begin, budget) = (Instant::now(), Duration::from_millis(60));
    for _ in 0..50 {
        if begin.elapsed() > budget {
            break;
        }
        shortest = shortest.min(time()?);
    }
    // A clock of low resolution could have measured nothing.
    Ok(shortest.max(Duration::from_nanos(1)))
}

fn synchronize(device: Device) {
    if let Device::Cuda(index) = device {
        Cuda::synchronize(index as i64);
    }
}
