//! How fast a device computes in each precision, and how precise its matrix products are.
//!
//! Nothing is measured unless a program asks. `cargo xtask doctor` prints the speeds for the CPU of its machine.

mod advice;
mod choice;
mod matmul;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use lazy_static::lazy_static;
use tch::nn::VarStore;
use tch::{Cuda, Device, Kind, Tensor, no_grad};

use crate::device::check_usable;
use crate::error::{Error, Result};
use crate::ffi::{self, OutsideRegions};
use crate::variables::listed;

pub use advice::MatmulSpeed;
use advice::advice_for_layer;
pub(crate) use choice::{Gain, Gains};
pub use matmul::{MatmulPrecision, MatmulPrecisionGuard, ReducedPrecisionReduction};

lazy_static! {
    /// The measurements of this process, by device.
    static ref MEASURED: Mutex<HashMap<String, MatmulSpeeds>> = Mutex::default();
}

/// How fast matrix products are on a device in f32, in TensorFloat-32 where there is such a thing, in bf16 and in fp16.
///
/// Printed, it is the advice that follows from the speeds:
///
/// ```no_run
/// use tch::Device;
/// use tch_amp::precision::MatmulSpeeds;
///
/// let speeds = MatmulSpeeds::measure(Device::Cpu)?;
/// // bf16: 4.3x as fast as f32 at 1024, 1.1x at 64: use it for layers wider than about 128.
/// println!("{speeds}");
///
/// let gains = speeds.speeds.iter().map(|speed| (speed.size, speed.bf16.unwrap_or(0.0) / speed.f32));
/// for (size, gain) in gains {
///     println!("bf16 is {gain:.1} times as fast as f32 for products of size {size}");
/// }
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MatmulSpeeds {
    /// The speed of each size, from small products to large ones.
    pub speeds: Vec<MatmulSpeed>,
}

impl MatmulSpeeds {
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
        let new = Self { speeds: no_grad(|| measured_speeds(device))? };
        measured.insert(key, new.clone());
        Ok(new)
    }
}

/// One sentence for each dtype.
impl fmt::Display for MatmulSpeeds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&advice::advice(&self.speeds))
    }
}

/// Returns whether a device computes in bf16 by instructions of its own: NVIDIA's GPUs from Ampere (compute capability
/// 8.0) on, CPUs with AVX512-BF16 or with the bf16 instructions of ARM. Elsewhere libtorch emulates bf16, without a
/// word and usually slower than f32; on MPS, which libtorch cannot be asked about, the answer is `false`. Corresponds
/// to `torch.cuda.is_bf16_supported(including_emulation=False)`.
///
/// # Errors
///
/// [`Error::DeviceUnavailable`] if the device cannot be used here.
///
/// # Examples
///
/// ```
/// use tch::Device;
/// use tch_amp::precision::bf16_is_native;
///
/// if !bf16_is_native(Device::cuda_if_available())? {
///     println!("bf16 is emulated here: use fp16 on a GPU, and f32 on a CPU");
/// }
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn bf16_is_native(device: Device) -> Result<bool> {
    check_usable(device)?;
    match device {
        Device::Cpu => Ok(cpu_has_bf16()),
        Device::Cuda(index) => ffi::cuda_has_bf16(index),
        Device::Mps | Device::Vulkan => Ok(false),
    }
}

#[cfg(target_arch = "x86_64")]
fn cpu_has_bf16() -> bool {
    std::is_x86_feature_detected!("avx512bf16")
}

#[cfg(target_arch = "aarch64")]
fn cpu_has_bf16() -> bool {
    std::arch::is_aarch64_feature_detected!("bf16")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn cpu_has_bf16() -> bool {
    false
}

/// Names the layers of a model that tensor cores compute less efficiently, and says how to pad each of them.
///
/// Looks at the two-dimensional variables, such as the weights of linear layers, LSTMs and embeddings, which are
/// `[outputs, inputs]`. Convolutions are left out: cuDNN pads their channels itself. The shapes alone decide, on any
/// device, and nothing is measured.
///
/// # Examples
///
/// ```
/// use tch::{Device, nn};
/// use tch_amp::precision::advice_for_model;
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let _hidden = nn::linear(vs.root() / "hidden", 784, 128, Default::default());
/// let _last = nn::linear(vs.root() / "last", 128, 10, Default::default());
/// let advice = advice_for_model(&vs);
/// assert_eq!(advice.len(), 1);
/// assert!(advice[0].starts_with("last.weight: a layer from 128 to 10"));
/// assert!(advice[0].ends_with("pad it to 128 and 16"));
/// ```
pub fn advice_for_model(vs: &VarStore) -> Vec<String> {
    let advice = listed(vs).into_iter().filter_map(|(name, variable)| match variable.size()[..] {
        [outputs, inputs] => {
            advice_for_layer(inputs, outputs).map(|text| format!("{name}: {text}"))
        }
        _ => None,
    });
    advice.collect()
}

/// The sizes on a CPU, and those on a GPU besides.
const SIZES: [i64; 5] = [64, 128, 256, 512, 1024];
const LARGE_SIZES: [i64; 2] = [2048, 4096];

/// A product that takes longer is not repeated, and no larger one is computed in its precision, unless that is f32.
const SLOW: Duration = Duration::from_millis(60);

/// The time for the repetitions of the products of one size, for each precision.
const BUDGET: Duration = Duration::from_millis(60);
/// The most repetitions of a product.
const ROUNDS: usize = 50;

/// A precision to compute a product in.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Candidate {
    F32,
    /// f32 with TensorFloat-32 allowed.
    Tf32,
    BF16,
    F16,
}

impl Candidate {
    /// The precisions that are measured on a device.
    fn of(device: Device) -> &'static [Self] {
        match device {
            Device::Cuda(_) => &[Self::F32, Self::Tf32, Self::BF16, Self::F16],
            _ => &[Self::F32, Self::BF16, Self::F16],
        }
    }

    fn kind(self) -> Kind {
        match self {
            Self::F32 | Self::Tf32 => Kind::Float,
            Self::BF16 => Kind::BFloat16,
            Self::F16 => Kind::Half,
        }
    }

    /// Returns whether larger sizes are tried even if it is slow.
    fn is_f32(self) -> bool {
        matches!(self, Self::F32 | Self::Tf32)
    }

    /// Times one product of a matrix by itself.
    fn time(self, matrix: &Tensor) -> Result<Duration> {
        let device = matrix.device();
        let _precision = match device {
            Device::Cuda(_) if self == Self::Tf32 => Some(MatmulPrecision::High.enter()?),
            Device::Cuda(_) => Some(MatmulPrecision::Highest.enter()?),
            _ => None,
        };
        synchronize(device);
        let start = Instant::now();
        let product = matrix.f_mm(matrix)?;
        synchronize(device);
        let time = start.elapsed();
        let (kind, computed) = (self.kind(), product.f_kind()?);
        if computed == kind {
            return Ok(time);
        }
        Err(Error::Torch(format!("a product of {kind:?} matrices was computed in {computed:?}")))
    }
}

/// The speeds of products of all sizes.
fn measured_speeds(device: Device) -> Result<Vec<MatmulSpeed>> {
    let large = LARGE_SIZES.into_iter().filter(|_| device != Device::Cpu);
    let mut candidates = Candidate::of(device).to_vec();
    SIZES
        .into_iter()
        .chain(large)
        .map(|size| measured_speed(device, size, &mut candidates))
        .collect()
}

/// The speeds of products of one size. Candidates that are slow at it are removed.
fn measured_speed(
    device: Device,
    size: i64,
    candidates: &mut Vec<Candidate>,
) -> Result<MatmulSpeed> {
    // A region around the caller would cast every matrix to its own dtype.
    let _own = OutsideRegions::enter();
    let matrices: std::result::Result<Vec<_>, _> = candidates
        .iter()
        .map(|candidate| Tensor::f_ones([size, size], (candidate.kind(), device)))
        .collect();
    let matrices = matrices?;
    let times = shortest(candidates.len(), |i| candidates[i].time(&matrices[i]))?;
    let gflops = |time: Duration| 2.0 * (size as f64).powi(3) / time.as_secs_f64() / 1e9;
    let speed = |wanted| {
        let place = candidates.iter().position(|candidate| *candidate == wanted)?;
        times.get(place).copied().map(gflops)
    };
    let [f32, tf32, bf16, f16] =
        [Candidate::F32, Candidate::Tf32, Candidate::BF16, Candidate::F16].map(speed);
    let mut times = times.iter();
    candidates
        .retain(|candidate| times.next().is_some_and(|time| candidate.is_f32() || *time <= SLOW));
    // f32 is always among the candidates.
    Ok(MatmulSpeed::new(size, f32.unwrap_or(f64::NAN), tf32, bf16, f16))
}

/// The shortest of several times of each of `count` products. They take turns, so that a moment in which the machine is
/// busy with something else meets all of them: their ratios matter more than the times.
fn shortest(
    count: usize,
    mut time: impl FnMut(usize) -> Result<Duration>,
) -> Result<Vec<Duration>> {
    // The first round also makes what later ones use again.
    let mut shortest: Vec<_> =
        (0..count).map(|i| time(i).map(measurable)).collect::<Result<_>>()?;
    let mut spent = Duration::ZERO;
    for round in 0..ROUNDS {
        for (i, shortest) in shortest.iter_mut().enumerate() {
            if round == 0 || *shortest <= SLOW {
                let time = time(i)?;
                spent += time;
                *shortest = measurable(time.min(*shortest));
            }
        }
        if spent > BUDGET * count as u32 {
            break;
        }
    }
    Ok(shortest)
}

/// The resolution of a clock could be too low for a product.
fn measurable(time: Duration) -> Duration {
    time.max(Duration::from_nanos(1))
}

/// Waits for a GPU.
pub(crate) fn synchronize(device: Device) {
    if let Device::Cuda(index) = device {
        Cuda::synchronize(index as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The times that `shortest` finds on a machine that needs these milliseconds for each product, and 40 times as
    /// many in its first `busy` milliseconds. Returns the number of runs as well.
    fn on_busy_machine(products: [u64; 3], busy: u64) -> (Vec<u128>, [usize; 3]) {
        let (mut clock, mut runs) = (0, [0; 3]);
        let times = shortest(3, |i| {
            runs[i] += 1;
            let time = if clock < busy { products[i] * 40 } else { products[i] };
            clock += time;
            Ok(Duration::from_millis(time))
        });
        (times.unwrap_or_default().iter().map(Duration::as_millis).collect(), runs)
    }

    #[test]
    fn a_busy_moment_does_not_change_the_ratios() {
        assert_eq!(on_busy_machine([4, 1, 2], 0).0, [4, 1, 2]);
        // If each product had a budget of its own, that of the first would end with the busy moment.
        assert_eq!(on_busy_machine([1, 1, 1], 110).0, [1, 1, 1]);
    }

    #[test]
    fn a_slow_product_is_not_repeated_and_the_others_are() {
        let (times, runs) = on_busy_machine([1, 2, 500], 0);
        assert_eq!(times, [1, 2, 500]);
        assert_eq!(runs, [2, 2, 2]);
        let (_, runs) = on_busy_machine([1, 2, 100], 0);
        assert_eq!(runs[2], 2);
        assert!(runs[0] > 20 && runs[1] > 20, "{runs:?}");
    }
}
