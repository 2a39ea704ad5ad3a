//! Names of dtypes and devices, by libtorch's numbers.

use crate::ffi::insight::RecordedTensor;

/// The name of a dtype, as explanations call it.
pub(super) fn dtype(tensor: &RecordedTensor) -> &'static str {
    match tensor.dtype {
        0 => "uint8",
        1 => "int8",
        2 => "int16",
        3 => "int32",
        4 => "int64",
        5 => "fp16",
        6 => "fp32",
        7 => "fp64",
        8 => "complex32",
        9 => "complex64",
        10 => "complex128",
        11 => "bool",
        15 => "bf16",
        _ => "other",
    }
}

/// The name of a device, such as `cuda:0`.
pub(super) fn device(tensor: &RecordedTensor) -> String {
    let (kind, index) = tensor.device;
    match kind {
        0 => "cpu".to_owned(),
        1 => format!("cuda:{}", index.max(0)),
        13 => format!("mps:{}", index.max(0)),
        _ => format!("device {kind}:{}", index.max(0)),
    }
}
