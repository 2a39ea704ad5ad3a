//! libtorch's dtypes as those of files, and their ranges.

use tch::Kind;
use torch_files::Dtype;

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
