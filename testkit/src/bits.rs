//! Tensors as bits: two tensors whose bits are equal are bitwise equal, whatever the payloads of their NaNs.

use tch::{Device, Kind, Tensor};

/// The elements in row-major order as little-endian bytes, with every NaN replaced by the same one.
pub fn bits(tensor: &Tensor) -> Vec<u8> {
    let plain = tensor.detach().to_device(Device::Cpu).resolve_conj().resolve_neg().contiguous();
    let mut bytes = vec![0; plain.numel() * plain.kind().elt_size_in_bytes()];
    plain.copy_data_u8(&mut bytes, plain.numel());
    // libtorch looks at millions of numbers faster than the loop of a debug build.
    let is_real = matches!(plain.kind(), Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double);
    let has_nans = || plain.isnan().any().int64_value(&[]) != 0;
    if is_real && !has_nans() { bytes } else { canonical(plain.kind(), bytes) }
}

/// `bytes` with every NaN replaced by the same one.
pub fn canonical(kind: Kind, mut bytes: Vec<u8>) -> Vec<u8> {
    let (size, infinity) = match kind {
        Kind::Half | Kind::ComplexHalf => (2, 0x7c00),
        Kind::BFloat16 => (2, 0x7f80),
        Kind::Float | Kind::ComplexFloat => (4, 0x7f80_0000),
        Kind::Double | Kind::ComplexDouble => (8, 0x7ff0_0000_0000_0000),
        _ => return bytes,
    };
    let sign = 1u64 << (size * 8 - 1);
    for element in bytes.chunks_exact_mut(size) {
        let mut word = [0; 8];
        word[..size].copy_from_slice(element);
        if u64::from_le_bytes(word) & !sign > infinity {
            element.fill(0xff);
        }
    }
    bytes
}

/// The bits of a tensor in the form that [`from_hex`] reads.
pub fn hex(tensor: &Tensor) -> String {
    bits(tensor).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes that `hex` spells.
pub fn from_hex(hex: &str) -> Vec<u8> {
    let digit = |c: u8| (c as char).to_digit(16).expect("a hexadecimal digit") as u8;
    let pairs = hex.as_bytes().chunks_exact(2);
    assert!(pairs.remainder().is_empty(), "each hexadecimal byte has two digits");
    pairs.map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

/// The kind that PyTorch calls `name`, such as `bfloat16`.
pub fn kind_named(name: &str) -> Kind {
    match name {
        "bool" => Kind::Bool,
        "uint8" => Kind::Uint8,
        "int32" => Kind::Int,
        "int64" => Kind::Int64,
        "float16" => Kind::Half,
        "bfloat16" => Kind::BFloat16,
        "float32" => Kind::Float,
        "float64" => Kind::Double,
        "complex64" => Kind::ComplexFloat,
        "complex128" => Kind::ComplexDouble,
        _ => panic!("the tests know no dtype {name}"),
    }
}
