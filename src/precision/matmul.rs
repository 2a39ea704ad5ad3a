//! How precise matrix products are.

use crate::error::Result;
use crate::ffi;

/// How precisely libtorch computes matrix products of f32 tensors, in the whole process. The default is
/// [`Highest`](Self::Highest). The counterpart of `torch.set_float32_matmul_precision`.
///
/// Autocast is not affected: its products are in half precision. What stays in f32 beside it, and a run without
/// autocast, may become several times as fast on NVIDIA's GPUs from Ampere on.
///
/// # Examples
///
/// ```
/// use tch_amp::precision::MatmulPrecision;
///
/// // For the rest of the program.
/// let before = MatmulPrecision::High.set()?;
/// assert_eq!(before, MatmulPrecision::Highest);
/// {
///     // For this block.
///     let _precise = MatmulPrecision::Highest.enter()?;
/// }
/// assert_eq!(MatmulPrecision::Highest.set()?, MatmulPrecision::High);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatmulPrecision {
    /// In f32: 24 bits of precision.
    Highest,
    /// On GPUs that have it, in TensorFloat-32: the inputs are rounded to 11 bits, and sums are f32.
    High,
    /// In addition, where libtorch can, by products of bf16 numbers: the inputs are rounded to 8 bits.
    Medium,
}

impl MatmulPrecision {
    const ALL: [Self; 3] = [Self::Highest, Self::High, Self::Medium];

    /// Sets the precision for the whole process, all its threads included, and returns the one before.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`](crate::Error::Torch) if libtorch fails.
    pub fn set(self) -> Result<Self> {
        Ok(Self::ALL[ffi::set_matmul_precision(self as usize)?])
    }

    /// Sets the precision for the whole process until the guard is dropped, which sets the one before again. Guards of
    /// several threads see each other's precision.
    ///
    /// # Errors
    ///
    /// The same as [`set`](Self::set).
    pub fn enter(self) -> Result<MatmulPrecisionGuard> {
        Ok(MatmulPrecisionGuard(Before::Float(self.set()?)))
    }
}

/// The permission for NVIDIA's GPUs to round the partial sums of fp16 and bf16 matrix products to half precision, in
/// the whole process. The default is [`Allowed`](Self::Allowed), which is faster for some shapes; long sums may lose
/// precision, and in fp16 overflow. It has no effect on the CPU, which sums in f32. The counterpart of
/// `torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction` and of that for bf16, both at once.
///
/// # Examples
///
/// ```
/// use tch_amp::precision::ReducedPrecisionReduction;
///
/// {
///     let _precise = ReducedPrecisionReduction::Disallowed.enter()?;
///     // Products are summed in f32 in this block.
/// }
/// assert_eq!(ReducedPrecisionReduction::Allowed.set()?, ReducedPrecisionReduction::Allowed);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReducedPrecisionReduction {
    /// Partial sums may be rounded.
    Allowed,
    /// Sums are f32.
    Disallowed,
}

impl ReducedPrecisionReduction {
    /// Sets this for the whole process, all its threads included, and returns what was set before: allowed if it was
    /// for either dtype.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`](crate::Error::Torch) if libtorch fails.
    pub fn set(self) -> Result<Self> {
        let before = ffi::set_reduced_precision_reduction(self.of_both())?;
        Ok(if before.contains(&true) { Self::Allowed } else { Self::Disallowed })
    }

    fn of_both(self) -> [bool; 2] {
        [self == Self::Allowed; 2]
    }

    /// Sets this for the whole process until the guard is dropped, as [`MatmulPrecision::enter`] does.
    ///
    /// # Errors
    ///
    /// The same as [`set`](Self::set).
    pub fn enter(self) -> Result<MatmulPrecisionGuard> {
        let before = ffi::set_reduced_precision_reduction(self.of_both())?;
        Ok(MatmulPrecisionGuard(Before::Half(before)))
    }
}

/// Restores the precision of matrix products when it is dropped; made by [`MatmulPrecision::enter`] and
/// [`ReducedPrecisionReduction::enter`].
#[derive(Debug)]
#[must_use = "the precision ends as soon as its guard is dropped; bind it to a variable such as `_guard`"]
pub struct MatmulPrecisionGuard(Before);

/// The setting from before.
#[derive(Debug)]
enum Before {
    Float(MatmulPrecision),
    /// The permission to round partial sums, in fp16 and in bf16.
    Half([bool; 2]),
}

impl Drop for MatmulPrecisionGuard {
    fn drop(&mut self) {
        // It is one that libtorch had, so that it takes it again.
        match self.0 {
            Before::Float(precision) => drop(precision.set()),
            Before::Half(allowed) => drop(ffi::set_reduced_precision_reduction(allowed)),
        }
    }
}
