//! The only classes and functions that a pickle may name, and PyTorch's names of the dtypes.

#![forbid(unsafe_code)]

use tch::Kind;

/// What a pickle may name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Global {
    OrderedDict,
    TensorV2,
    TensorV3,
    Parameter,
    ParameterWithState,
    Storage(Kind),
    UntypedStorage,
    Dtype(Kind),
    Size,
    Device,
    /// A TorchScript module, of whatever class.
    Module,
}

/// The dtype's name, and the storage's if it has one: newer dtypes have none, and quantized tensors are not supported.
const NAMES: [(Kind, &str, Option<&str>); 17] = [
    (Kind::Uint8, "uint8", Some("ByteStorage")),
    (Kind::Int8, "int8", Some("CharStorage")),
    (Kind::Int16, "int16", Some("ShortStorage")),
    (Kind::Int, "int32", Some("IntStorage")),
    (Kind::Int64, "int64", Some("LongStorage")),
    (Kind::Half, "float16", Some("HalfStorage")),
    (Kind::Float, "float32", Some("FloatStorage")),
    (Kind::Double, "float64", Some("DoubleStorage")),
    (Kind::ComplexHalf, "complex32", None),
    (Kind::ComplexFloat, "complex64", Some("ComplexFloatStorage")),
    (Kind::ComplexDouble, "complex128", Some("ComplexDoubleStorage")),
    (Kind::Bool, "bool", Some("BoolStorage")),
    (Kind::BFloat16, "bfloat16", Some("BFloat16Storage")),
    (Kind::Float8e5m2, "float8_e5m2", None),
    (Kind::Float8e4m3fn, "float8_e4m3fn", None),
    (Kind::Float8e5m2fnuz, "float8_e5m2fnuz", None),
    (Kind::Float8e4m3fnuz, "float8_e4m3fnuz", None),
];

/// The name of a dtype, and that of its storage if it has one of its own.
pub(super) fn names(kind: Kind) -> Option<(&'static str, Option<&'static str>)> {
    let found = NAMES.iter().find(|(named, ..)| *named == kind);
    found.map(|&(_, dtype, storage)| (dtype, storage))
}

/// What a pickle may mean by a name, if it is one of the allowed.
pub(super) fn find(module: &str, name: &str) -> Option<Global> {
    Some(match (module, name) {
        ("collections", "OrderedDict") => Global::OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2") => Global::TensorV2,
        ("torch._utils", "_rebuild_tensor_v3") => Global::TensorV3,
        ("torch._utils", "_rebuild_parameter") => Global::Parameter,
        ("torch._utils", "_rebuild_parameter_with_state") => Global::ParameterWithState,
        ("torch.storage", "UntypedStorage") => Global::UntypedStorage,
        ("torch", "Size") => Global::Size,
        ("torch", "device") => Global::Device,
        ("torch", name) => return dtype_or_storage(name),
        (module, _) if module == "__torch__" || module.starts_with("__torch__.") => Global::Module,
        _ => return None,
    })
}

fn dtype_or_storage(name: &str) -> Option<Global> {
    NAMES.iter().find_map(|&(kind, dtype, storage)| match name {
        _ if name == dtype => Some(Global::Dtype(kind)),
        _ if Some(name) == storage => Some(Global::Storage(kind)),
        _ => None,
    })
}
