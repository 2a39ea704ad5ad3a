//! libtorch's dtypes as those of files, and their ranges.

use tch::{Device, Kind, Tensor};
use torch_files::Dtype;

use crate::error::Result;
use crate::ffi::{self, OutsideRegions};

/// The dtypes that both tch and files have.
const KINDS: [(Kind, Dtype); 17] = [
    (Kind::Bool, Dtype::Bool),
    (Kind::Uint8, Dtype::Uint8),
    (Kind::Int8, Dtype::Int8),
    (Kind::Int16, Dtype::Int16),
    (Kind::Int, Dtype::Int32),
    (Kind::Int64, Dtype::Int64),
    (Kind::Half, Dtype::Float16),
    (Kind::BFloat16, Dtype::BFloat16),
    (Kind::Float, Dtype::Float32),
    (Kind::Double, Dtype::Float64),
    (Kind::ComplexHalf, Dtype::Complex32),
    (Kind::ComplexFloat, Dtype::Complex64),
    (Kind::ComplexDouble, Dtype::Complex128),
    (Kind::Float8e5m2, Dtype::Float8E5m2),
    (Kind::Float8e4m3fn, Dtype::Float8E4m3fn),
    (Kind::Float8e5m2fnuz, Dtype::Float8E5m2fnuz),
    (Kind::Float8e4m3fnuz, Dtype::Float8E4m3fnuz),
];

/// Returns the dtype in files; `None` for quantized ones, which files do not have.
pub(crate) fn dtype_of(kind: Kind) -> Option<Dtype> {
    KINDS.iter().find(|(other, _)| *other == kind).map(|(_, dtype)| *dtype)
}

/// Returns the dtype of tch; `None` for the unsigned ones that it does not have.
pub(crate) fn kind_of(dtype: Dtype) -> Option<Kind> {
    KINDS.iter().find(|(_, other)| *other == dtype).map(|(kind, _)| *kind)
}

/// The largest finite number of a dtype, and infinity for integers, which have no infinite numbers.
pub(crate) fn largest(kind: Kind) -> f64 {
    match kind {
        Kind::Half | Kind::ComplexHalf => 65504.0,
        Kind::BFloat16 => (2.0 - 2f64.powi(-7)) * 2f64.powi(127),
        Kind::Float | Kind::ComplexFloat => f64::from(f32::MAX),
        Kind::Float8e5m2 | Kind::Float8e5m2fnuz => 57344.0,
        Kind::Float8e4m3fn => 448.0,
        Kind::Float8e4m3fnuz => 240.0,
        Kind::Double | Kind::ComplexDouble => f64::MAX,
        _ => f64::INFINITY,
    }
}

/// The smallest number that rounds to infinity in a dtype, or that fp8 cuts off: half a step beyond the largest.
fn limit(kind: Kind) -> f64 {
    match kind {
        Kind::Half | Kind::ComplexHalf => 65520.0,
        Kind::BFloat16 => (2.0 - 2f64.powi(-8)) * 2f64.powi(127),
        Kind::Float | Kind::ComplexFloat => (2.0 - 2f64.powi(-24)) * 2f64.powi(127),
        Kind::Float8e5m2 | Kind::Float8e5m2fnuz => 61440.0,
        Kind::Float8e4m3fn => 464.0,
        Kind::Float8e4m3fnuz => 248.0,
        _ => f64::INFINITY,
    }
}

fn is_complex(kind: Kind) -> bool {
    matches!(kind, Kind::ComplexHalf | Kind::ComplexFloat | Kind::ComplexDouble)
}

/// The smallest and the largest number of a dtype of integers.
fn integers(kind: Kind) -> Option<[f64; 2]> {
    let signed = |bits| [-2f64.powi(bits - 1), 2f64.powi(bits - 1) - 1.0];
    Some(match kind {
        Kind::Bool => [0.0, 1.0],
        Kind::Uint8 => [0.0, 255.0],
        Kind::Int8 => signed(8),
        Kind::Int16 => signed(16),
        Kind::Int => signed(32),
        // The largest that is an f64.
        Kind::Int64 => [-2f64.powi(63), 2f64.powi(63) - 1024.0],
        _ => return None,
    })
}

/// Returns whether a dtype can hold all numbers of another, rounded where it has fewer digits.
pub(crate) fn holds(kind: Kind, other: Kind) -> bool {
    match (integers(kind), integers(other)) {
        (Some([least, most]), Some([from, to])) => least <= from && to <= most,
        (Some(_), None) => false,
        (None, Some([from, to])) => largest(kind) >= to.max(-from),
        (None, None) => (is_complex(kind) || !is_complex(other)) && largest(kind) >= largest(other),
    }
}

/// Returns how many numbers of a tensor another dtype cannot hold: those beyond its range, those with a fraction or that
/// are not finite where it has integers, and those with an imaginary part where it is real.
pub(crate) fn count_beyond(tensor: &Tensor, kind: Kind) -> Result<usize> {
    let _own = OutsideRegions::enter();
    let mut count = 0;
    for part in tensor.f_resolve_conj()?.f_reshape([-1i64])?.f_split(AT_ONCE, 0)? {
        count += beyond(&part, kind)?.f_sum(Kind::Int64)?.f_int64_value(&[])? as usize;
    }
    Ok(count)
}

/// How many elements are compared at a time.
const AT_ONCE: i64 = 1 << 20;

fn beyond(numbers: &Tensor, kind: Kind) -> Result<Tensor> {
    if numbers.is_complex() {
        let parts = numbers.f_to_kind(Kind::ComplexDouble)?.f_view_as_real()?;
        let (real, imaginary) = (parts.f_select(-1, 0)?, parts.f_select(-1, 1)?);
        let of_imaginary = match is_complex(kind) {
            true => beyond(&imaginary, kind)?,
            false => imaginary.f_to_kind(Kind::Bool)?,
        };
        return Ok(beyond(&real, kind)?.f_logical_or(&of_imaginary)?);
    }
    let wide = numbers.f_to_kind(Kind::Double)?;
    let number = |x| ffi::number_new(x, Kind::Double, Device::Cpu);
    Ok(match integers(kind) {
        Some([least, most]) => {
            let (least, most) =
                (wide.f_ge_tensor(&number(least)?)?, wide.f_le_tensor(&number(most)?)?);
            let is_whole = wide.f_trunc()?.f_eq_tensor(&wide)?;
            least.f_logical_and(&most)?.f_logical_and(&is_whole)?.f_logical_not()?
        }
        None => {
            let is_beyond = wide.f_abs()?.f_ge_tensor(&number(limit(kind))?)?;
            is_beyond.f_logical_and(&wide.f_isfinite()?)?
        }
    })
}
