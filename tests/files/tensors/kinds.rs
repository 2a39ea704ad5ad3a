//! One tensor of every kind that tch can create.

use tch::{Device, Kind, Tensor, no_grad};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// A kind of tensor: its name, and how to create one. `None` if this libtorch cannot create it.
pub struct TensorKind {
    pub name: &'static str,
    make: fn() -> Option<Tensor>,
}

impl TensorKind {
    /// Creates a tensor of this kind.
    pub fn make(&self) -> Option<Tensor> {
        (self.make)()
    }
}

fn numbers() -> Tensor {
    Tensor::from_slice(&[1f32, -2.0, 3.0, 4.0, 5.0, -6.0]).view([2, 3])
}

fn of(kind: Kind) -> Option<Tensor> {
    Some(numbers().to_kind(kind))
}

fn nested() -> Option<Tensor> {
    let sizes = Tensor::from_slice(&[1i64, 3, 2, 3]).view([2, 2]);
    let strides = Tensor::from_slice(&[3i64, 1, 3, 1]).view([2, 2]);
    let buffer = Tensor::arange(9, F32);
    buffer
        .f_internal_nested_view_from_buffer(&sizes, &strides, &Tensor::from_slice(&[0i64, 3]))
        .ok()
}

fn sparse() -> Tensor {
    let places = Tensor::from_slice(&[0i64, 1, 1, 0, 2, 2]).view([2, 3]);
    let values = Tensor::from_slice(&[1f32, 2.0, 3.0]);
    Tensor::sparse_coo_tensor_indices_size(&places, &values, [2, 3], F32, false)
}

/// All of them.
pub const KINDS: &[TensorKind] = &[
    TensorKind { name: "f32", make: || of(Kind::Float) },
    TensorKind { name: "f64", make: || of(Kind::Double) },
    TensorKind { name: "bf16", make: || of(Kind::BFloat16) },
    TensorKind { name: "f16", make: || of(Kind::Half) },
    TensorKind { name: "i64", make: || of(Kind::Int64) },
    TensorKind { name: "i16", make: || of(Kind::Int16) },
    TensorKind { name: "u8", make: || of(Kind::Uint8) },
    TensorKind { name: "bool", make: || of(Kind::Bool) },
    TensorKind { name: "complex64", make: || of(Kind::ComplexFloat) },
    TensorKind { name: "complex128", make: || of(Kind::ComplexDouble) },
    TensorKind { name: "complex32", make: || numbers().f_to_kind(Kind::ComplexHalf).ok() },
    TensorKind { name: "f8e4m3", make: || numbers().f_to_kind(Kind::Float8e4m3fn).ok() },
    TensorKind { name: "f8e5m2", make: || numbers().f_to_kind(Kind::Float8e5m2).ok() },
    TensorKind { name: "undefined", make: || Some(Tensor::new()) },
    TensorKind { name: "of no dimensions", make: || Some(Tensor::from(2f32)) },
    TensorKind { name: "empty", make: || Some(Tensor::zeros([0], F32)) },
    TensorKind { name: "empty in one dimension", make: || Some(Tensor::zeros([2, 0], F32)) },
    TensorKind {
        name: "empty, with sizes whose product overflows",
        make: || Tensor::f_zeros([1i64 << 61, 4, 0], F32).ok(),
    },
    TensorKind { name: "without storage", make: || Some(no_grad(|| numbers().set_())) },
    TensorKind { name: "of many dimensions", make: || Some(Tensor::ones([1i64; 12], F32)) },
    TensorKind { name: "transposed", make: || Some(numbers().tr()) },
    TensorKind { name: "with gaps", make: || Some(numbers().repeat([1, 2]).slice(1, 0, 6, 2)) },
    TensorKind { name: "with an offset", make: || Some(numbers().view(-1).narrow(0, 2, 3)) },
    TensorKind {
        name: "with huge strides",
        make: || Some(numbers().as_strided([1, 3], [1 << 40, 1], 0)),
    },
    TensorKind { name: "expanded", make: || Some(Tensor::ones([1, 3], F32).expand([2, 3], false)) },
    TensorKind {
        name: "overlapping",
        make: || Some(numbers().view(-1).as_strided([2, 3], [2, 1], 0)),
    },
    TensorKind { name: "sparse COO", make: || Some(sparse()) },
    TensorKind { name: "coalesced", make: || Some(sparse().coalesce()) },
    TensorKind { name: "sparse CSR", make: || numbers().f_to_sparse_csr(None::<i64>).ok() },
    TensorKind { name: "MKL-DNN", make: || numbers().f_to_mkldnn(None).ok() },
    TensorKind {
        name: "quantized",
        make: || numbers().f_quantize_per_tensor(0.1, 10, Kind::QInt8).ok(),
    },
    TensorKind { name: "negative", make: || Some(numbers().internal_neg_view()) },
    TensorKind { name: "conjugate", make: || Some(of(Kind::ComplexFloat)?.conj()) },
    TensorKind {
        name: "imaginary part of a conjugate",
        make: || of(Kind::ComplexFloat)?.conj().f_imag().ok(),
    },
    TensorKind {
        name: "zero without memory",
        make: || Tensor::f_internal_efficientzerotensor([2, 3], F32).ok(),
    },
    TensorKind { name: "copy-on-write", make: || numbers().f_internal_lazy_clone().ok() },
    TensorKind { name: "nested", make: nested },
    TensorKind { name: "a leaf", make: || Some(numbers().set_requires_grad(true)) },
    TensorKind { name: "recorded", make: || Some(numbers().set_requires_grad(true) * 2.0) },
    TensorKind { name: "infinite", make: || Some(Tensor::from_slice(&[1f32, f32::INFINITY])) },
    TensorKind { name: "NaN", make: || Some(Tensor::from_slice(&[f32::NAN, 1.0])) },
];
