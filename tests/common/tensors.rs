//! Small tensors that require gradients.

use tch::{Device, Kind, Tensor};

/// A leaf with these values.
pub fn leaf(values: &[f64], kind: Kind, device: Device) -> Tensor {
    Tensor::from_slice(values).to_kind(kind).to_device(device).set_requires_grad(true)
}

/// A leaf with random values.
pub fn random_leaf(device: Device, kind: Kind, size: &[i64]) -> Tensor {
    Tensor::randn(size, (Kind::Float, device)).to_kind(kind).set_requires_grad(true)
}
