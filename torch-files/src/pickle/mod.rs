//! The pickle in a file in PyTorch's format: a small machine that reads it, and a writer.
//!
//! Reading executes nothing: the pickle can only build a [`Value`](crate::Value), and its size is
//! bounded by [`Limits`](crate::Limits).
//!
//! Protocols 2 to 5 of Python's `pickle` are read, and protocol 2 is written. `read` executes the opcodes on the
//! `machine`, with stand-ins for the classes and functions that `globals` lists. `tree` converts the result to a value,
//! of which `write` makes a pickle again. `numpy` makes tensors of numpy's arrays. `index` writes the index of a folder
//! of `torch.distributed.checkpoint`, of which the objects become dicts of their attributes when it is read.

// Why not a crate: serde-pickle 1.2.0 has no persistent ids, drops the names of all classes but a few builtins, and
// fails on an `OrderedDict` with items, so it reads no state dict. It limits neither depth nor the values that a memo
// multiplies, sorts dicts, and writes no classes, memo or persistent ids. candle-core 0.11.1 reads protocol 2 only and
// has no limits. pytorch-reader 0.22.1, which burn-store uses, has limits, but loses the order and the types of keys,
// makes no tensors of numpy's arrays, refuses files with sparse tensors, and does not write.

mod index;
mod machine;
mod numpy;
mod read;
mod write;

use crate::dtype::Dtype;

pub(crate) use index::{Entry, Kind, PathItem, write_index};
pub(crate) use machine::{Bytes, Declared};
pub(crate) use read::{First, read, read_first, read_index};
pub(crate) use write::{write, write_counted};

/// The opcodes that Python writes in protocols 2 to 5. Those of protocols 3 to 5 are only read.
mod op {
    pub(super) const MARK: u8 = b'(';
    pub(super) const STOP: u8 = b'.';
    pub(super) const NONE: u8 = b'N';
    pub(super) const BININT: u8 = b'J';
    pub(super) const BININT1: u8 = b'K';
    pub(super) const BININT2: u8 = b'M';
    pub(super) const BINFLOAT: u8 = b'G';
    pub(super) const BINUNICODE: u8 = b'X';
    pub(super) const EMPTY_LIST: u8 = b']';
    pub(super) const APPEND: u8 = b'a';
    pub(super) const APPENDS: u8 = b'e';
    pub(super) const EMPTY_TUPLE: u8 = b')';
    pub(super) const TUPLE: u8 = b't';
    pub(super) const EMPTY_DICT: u8 = b'}';
    pub(super) const SETITEM: u8 = b's';
    pub(super) const SETITEMS: u8 = b'u';
    pub(super) const GLOBAL: u8 = b'c';
    pub(super) const REDUCE: u8 = b'R';
    pub(super) const BUILD: u8 = b'b';
    pub(super) const BINPUT: u8 = b'q';
    pub(super) const LONG_BINPUT: u8 = b'r';
    pub(super) const BINGET: u8 = b'h';
    pub(super) const LONG_BINGET: u8 = b'j';
    pub(super) const BINPERSID: u8 = b'Q';
    pub(super) const POP: u8 = b'0';
    pub(super) const POP_MARK: u8 = b'1';
    pub(super) const BINSTRING: u8 = b'T';
    pub(super) const SHORT_BINSTRING: u8 = b'U';

    // Protocol 2.
    pub(super) const PROTO: u8 = 0x80;
    pub(super) const NEWOBJ: u8 = 0x81;
    pub(super) const TUPLE1: u8 = 0x85;
    pub(super) const TUPLE2: u8 = 0x86;
    pub(super) const TUPLE3: u8 = 0x87;
    pub(super) const NEWTRUE: u8 = 0x88;
    pub(super) const NEWFALSE: u8 = 0x89;
    pub(super) const LONG1: u8 = 0x8a;
    pub(super) const LONG4: u8 = 0x8b;

    // Protocol 3.
    pub(super) const BINBYTES: u8 = b'B';
    pub(super) const SHORT_BINBYTES: u8 = b'C';

    // Protocol 4.
    pub(super) const BINUNICODE8: u8 = 0x8d;
    pub(super) const BINBYTES8: u8 = 0x8e;
    pub(super) const EMPTY_SET: u8 = 0x8f;
    pub(super) const ADDITEMS: u8 = 0x90;
    pub(super) const FROZENSET: u8 = 0x91;
    pub(super) const NEWOBJ_EX: u8 = 0x92;
    pub(super) const SHORT_BINUNICODE: u8 = 0x8c;
    pub(super) const STACK_GLOBAL: u8 = 0x93;
    pub(super) const MEMOIZE: u8 = 0x94;
    pub(super) const FRAME: u8 = 0x95;

    // Protocol 5.
    pub(super) const BYTEARRAY8: u8 = 0x96;
}

/// A class or a function that a pickle refers to. Any other name, such as that of a program's own class, is an opaque
/// value, and so is what it makes: it stands for itself, and the other parts of the file can still be read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Global {
    OrderedDict,
    TensorV1,
    TensorV2,
    TensorV3,
    Parameter,
    ParameterWithState,
    /// A tensor with attributes of its own, or of a class.
    FromType,
    /// A class of tensors without a meaning of its own.
    TensorClass,
    Storage(Elements),
    UntypedStorage,
    Dtype(Dtype),
    Size,
    Device,
    /// A TorchScript module of any class, or a class of an index.
    Module,
    Counter,
    /// Makes the bytes of a text: protocol 2 has none.
    Encode,
    /// Makes a numpy array, whose content is set afterwards.
    NumpyArray,
    /// Makes a numpy array of its content.
    NumpyFromBuffer,
    NumpyScalar,
    NumpyDtype,
    /// The class of numpy's arrays.
    NumpyClass,
}

/// The elements of a storage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Elements {
    Of(Dtype),
    /// Those of quantized tensors, which take so many bytes each.
    Quantized(usize),
}

impl Elements {
    /// The size of an element in bytes.
    pub(super) fn size(self) -> u64 {
        match self {
            Self::Of(dtype) => dtype.size() as u64,
            Self::Quantized(size) => size as u64,
        }
    }
}

/// Module and name of some others, whose values have a description that says more than the name. In protocol 2
/// `builtins` is called `__builtin__`.
const OTHERS: [(&str, &str, &str); 14] = [
    (
        "torch.storage",
        "_load_from_bytes",
        "a tensor in a plain pickle, which Python reads and `torch.save` saves as one in a file",
    ),
    ("__builtin__", "bytearray", "a bytearray"),
    ("__builtin__", "set", "a set"),
    ("__builtin__", "complex", "a complex number"),
    ("builtins", "bytearray", "a bytearray"),
    ("builtins", "set", "a set"),
    ("builtins", "complex", "a complex number"),
    ("torch._utils", "_rebuild_sparse_tensor", "a sparse tensor"),
    ("torch._utils", "_rebuild_nested_tensor", "a nested tensor"),
    ("torch._utils", "_rebuild_qtensor", "a quantized tensor"),
    ("torch._utils", "_rebuild_meta_tensor_no_storage", "a meta tensor"),
    ("torch.serialization", "_get_layout", "a layout"),
    ("torch", "per_tensor_affine", "a quantization scheme"),
    ("torch", "per_channel_affine", "a quantization scheme"),
];

/// Returns the class or the function of this name, if a checkpoint needs it.
pub(super) fn find(module: &str, name: &str) -> Option<Global> {
    Some(match (module, name) {
        ("collections", "OrderedDict") => Global::OrderedDict,
        ("collections", "Counter") => Global::Counter,
        ("torch._utils", "_rebuild_tensor") => Global::TensorV1,
        ("torch._utils", "_rebuild_tensor_v2") => Global::TensorV2,
        ("torch._utils", "_rebuild_tensor_v3") => Global::TensorV3,
        ("torch._utils", "_rebuild_parameter") => Global::Parameter,
        ("torch._utils", "_rebuild_parameter_with_state") => Global::ParameterWithState,
        ("torch._tensor", "_rebuild_from_type" | "_rebuild_from_type_v2") => Global::FromType,
        ("torch", "Tensor") | ("torch.nn.parameter", "Parameter" | "Buffer") => Global::TensorClass,
        ("torch.storage", "UntypedStorage") => Global::UntypedStorage,
        // Protocol 2 has the second for none.
        ("_codecs", "encode") | ("__builtin__", "bytes") => Global::Encode,
        ("numpy", "dtype") => Global::NumpyDtype,
        ("numpy", "ndarray") => Global::NumpyClass,
        // Before numpy 2 the module had no underscore.
        ("numpy._core.multiarray" | "numpy.core.multiarray", "_reconstruct") => Global::NumpyArray,
        ("numpy._core.multiarray" | "numpy.core.multiarray", "scalar") => Global::NumpyScalar,
        ("numpy._core.numeric" | "numpy.core.numeric", "_frombuffer") => Global::NumpyFromBuffer,
        ("torch", "Size") => Global::Size,
        ("torch", "device") => Global::Device,
        (module, _) if module == "__torch__" || module.starts_with("__torch__.") => Global::Module,
        ("torch", name) => return dtype_or_storage(name),
        _ => return None,
    })
}

/// Describes what a class or a function makes that [`find`] does not have, if that says more than its name.
pub(super) fn description(module: &str, name: &str) -> Option<&'static str> {
    let found = OTHERS.iter().find(|other| (other.0, other.1) == (module, name));
    found.map(|other| other.2)
}

/// The storages of quantized tensors, which are not read, and the sizes of what their number of elements counts in
/// bytes. The first two hold several elements in a byte.
const QUANTIZED: [(&str, usize); 5] = [
    ("QUInt4x2Storage", 1),
    ("QUInt2x4Storage", 1),
    ("QInt8Storage", 1),
    ("QUInt8Storage", 1),
    ("QInt32Storage", 4),
];

fn dtype_or_storage(name: &str) -> Option<Global> {
    if let Some((_, size)) = QUANTIZED.iter().find(|(storage, _)| *storage == name) {
        return Some(Global::Storage(Elements::Quantized(*size)));
    }
    let storage = || Some(Global::Storage(Elements::Of(Dtype::of_storage(name)?)));
    Dtype::named(name).map(Global::Dtype).or_else(storage)
}
