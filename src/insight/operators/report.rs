//! What a profiler found out.

use serde::{Deserialize, Serialize};

use super::lists::AutocastList;
use crate::insight::dtype::Dtype;
use crate::insight::numbers::total;
use crate::insight::recording::Pass;

/// What a stretch of a program computed, operator by operator: made by a [`Profiler`](super::Profiler). Its text, by
/// `Display`, is meant for a terminal; its fields for programs. All numbers are sums over the recorded runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OperatorReport {
    /// How many runs were recorded.
    pub runs: u64,
    /// The time of the recorded runs in seconds, which includes the work of recording.
    pub seconds: f64,
    /// The time in seconds of one run that was not recorded, the last of the warm-up; `None` without a warm-up.
    pub unrecorded_seconds: Option<f64>,
    /// The operators that compute, by own time.
    pub operators: Vec<OperatorRow>,
    /// How often operators were called that only call others, allocate memory or make views, in all recorded runs.
    pub wrapper_calls: u64,
    /// Their own time in seconds, in all recorded runs.
    pub wrapper_seconds: f64,
    /// The matrix products, convolutions and attentions, by FLOPs. These are among `operators`, too.
    pub products: Vec<ProductRow>,
    /// The casts between floating dtypes, by time. These are among `operators`, too.
    pub casts: Vec<CastRow>,
    /// The operators with half-precision inputs that autocast ran in f32, by time.
    pub moved_to_f32: Vec<MovedOperator>,
    /// The sizes of matrix products in half precision that tensor cores cannot use well, by FLOPs.
    pub padding: Vec<Padding>,
    /// The operators that were called inside of a region, and their lists.
    pub lists: Vec<ListedOperator>,
    /// What half precision would gain, if the [`Profiler`](super::Profiler) was given measured speeds. Estimates.
    pub gains: Vec<Gain>,
}

/// Calls of one operator in one dtype on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OperatorRow {
    /// libtorch's name of the operator, such as `aten::addmm`.
    pub operator: String,
    /// The dtype of its first result, or of its first input if it has none.
    pub dtype: Dtype,
    /// The device of that tensor, such as `cpu` or `cuda:0`.
    pub device: String,
    /// The pass in which it ran.
    pub pass: Pass,
    /// How often it was called, in all recorded runs.
    pub calls: u64,
    /// Its own time in seconds, in all recorded runs: without that of operators that it called.
    pub seconds: f64,
    /// The size in bytes of the tensors that it read, each counted once per call.
    pub bytes_read: u64,
    /// The size in bytes of the tensors that it wrote, each counted once per call.
    pub bytes_written: u64,
    /// The floating-point operations of matrix products: two for each multiplication and addition.
    pub flops: u64,
}

/// What kind of operator computes a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ProductKind {
    /// A product of matrices, or of a matrix and a vector.
    Matrix,
    /// A convolution, or the backward of one.
    Convolution,
    /// A fused scaled-dot-product attention, or the backward of one.
    Attention,
}

/// Products of the same sizes in the same part of the model: `batch` times `m`×`k` by `k`×`n`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProductRow {
    /// libtorch's name of the operator.
    pub operator: String,
    /// What it is.
    pub kind: ProductKind,
    /// The part of the model: the module of a parameter, or a name given by [`named`](crate::insight::named).
    pub path: Option<String>,
    /// The pass in which it ran.
    pub pass: Pass,
    /// The dtype in which it was computed.
    pub dtype: Dtype,
    /// The number of products in one call: the batch, the groups of a convolution, or the batch times the heads.
    pub batch: u64,
    /// Rows: those of the first matrix, the pixels of a convolution, or the length of the queries.
    pub m: u64,
    /// Columns: those of the second matrix, the output channels of a group, or the length of the keys.
    pub n: u64,
    /// What is summed over: columns of the first matrix, input channels times kernel, or the size of a head.
    pub k: u64,
    /// How often it was called, in all recorded runs.
    pub calls: u64,
    /// The own time in seconds, in all recorded runs.
    pub seconds: f64,
    /// The floating-point operations, in all recorded runs.
    pub flops: u64,
}

/// Why numbers were cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CastReason {
    /// Autocast cast an input of the operator.
    Autocast,
    /// The operator itself copied one of its inputs into another dtype.
    Operator,
    /// The derivative of a cast in the forward pass.
    Derivative,
    /// The program asked for it, for example by `to_kind`.
    Program,
}

/// Casts of the same kind for the same reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CastRow {
    /// The dtype before.
    pub from: Dtype,
    /// The dtype after.
    pub to: Dtype,
    /// Why they were cast.
    pub reason: CastReason,
    /// The operator that needed it, or the operator of the forward pass of whose input it is the derivative.
    pub operator: Option<String>,
    /// The part of the model.
    pub path: Option<String>,
    /// The parameter that was cast, if it was one.
    pub parameter: Option<String>,
    /// The pass in which it ran.
    pub pass: Pass,
    /// How often, in all recorded runs.
    pub calls: u64,
    /// The bytes that were read and written, in all recorded runs.
    pub bytes: u64,
    /// The time in seconds, in all recorded runs.
    pub seconds: f64,
    /// How many of the calls cast the same unchanged tensor to the same dtype as an earlier one of the same run.
    pub repeats: u64,
    /// How many of the repeats autocast's cache would have saved: it keeps the casts of trainable f32 parameters until
    /// the outermost region ends, on any thread. These repeats come from a region without the cache, from several
    /// regions, or from the end of another thread's region.
    pub cacheable: u64,
    /// The time of the repeats in seconds.
    pub repeat_seconds: f64,
}

/// An operator that autocast ran in f32 although it had inputs in half precision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MovedOperator {
    /// libtorch's name of the operator.
    pub operator: String,
    /// The part of the model.
    pub path: Option<String>,
    /// The last module before, in the order of execution, if `path` is unknown.
    pub after: Option<String>,
    /// The list because of which it ran in f32; [`AutocastList::Widest`] if another input was f32.
    pub list: AutocastList,
    /// How often, in all recorded runs.
    pub calls: u64,
    /// The time in seconds with all operators that it called, including casts, in all recorded runs.
    pub seconds: f64,
}

/// A size that is not a multiple of 8, in matrix products in half precision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Padding {
    /// The part of the model.
    pub path: Option<String>,
    /// The operators that compute these products.
    pub operators: Vec<String>,
    /// Each such size, and the next multiple of 8.
    pub sizes: Vec<(u64, u64)>,
    /// The floating-point operations of these products.
    pub flops: u64,
    /// Their share of those of all products, from 0 to 1.
    pub share: f64,
}

/// An operator that was called inside of a region.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ListedOperator {
    /// libtorch's name of the operator.
    pub operator: String,
    /// The list that it is on, for this device and the libtorch that is linked.
    pub list: AutocastList,
    /// How often it was called, in all recorded runs.
    pub calls: u64,
    /// The other versions of libtorch in which it is on another list. Known are those of the guide's page
    /// [operations](crate::guide::operations).
    pub elsewhere: Vec<(String, AutocastList)>,
}

/// An estimate of what a half-precision dtype gains, from the measured speeds of square matrix products (Amdahl's law).
/// It knows neither the casts that would be added nor what fused kernels or the memory's bandwidth change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Gain {
    /// The dtype, bf16 or fp16.
    pub dtype: Dtype,
    /// The time of products in f32, which would be faster.
    pub f32_seconds: f64,
    /// How many times as fast the program would be if these products ran in the dtype.
    pub possible: f64,
    /// How many times as fast it would be if these products took no time.
    pub limit: f64,
    /// How many times as fast it already is because of the products that run in the dtype.
    pub reached: f64,
}

impl OperatorReport {
    /// Adds up the floating-point operations of all matrix products in all recorded runs.
    pub fn flops(&self) -> u64 {
        total(self.operators.iter().map(|row| row.flops))
    }

    /// Adds up the own times of all operators in seconds. At most `seconds`, unless a backward pass runs on the threads
    /// of several devices.
    pub fn own_seconds(&self) -> f64 {
        self.wrapper_seconds + self.operators.iter().map(|row| row.seconds).sum::<f64>()
    }

    /// Returns the share, from 0 to 1, of the floating-point operations of a pass, or of both, that are computed in
    /// half precision. `None` if there are no such operations.
    pub fn half_share(&self, pass: Option<Pass>) -> Option<f64> {
        let rows = || self.operators.iter().filter(|row| pass.is_none_or(|pass| row.pass == pass));
        let all = total(rows().map(|row| row.flops));
        let half = total(rows().filter(|row| row.dtype.is_half()).map(|row| row.flops));
        (all > 0).then(|| half as f64 / all as f64)
    }
}

pub(super) fn seconds(nanoseconds: i64) -> f64 {
    nanoseconds as f64 / 1e9
}
