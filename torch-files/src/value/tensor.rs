//! Tensors as places in a file.

use std::sync::Arc;

use crate::dtype::Dtype;

/// A tensor in a file: a view of a storage, with its elements in the storage's order by strides, as in PyTorch.
///
/// Expanded tensors have a stride of 0, and then more elements than their storages;
/// [`Limits::max_expanded_bytes`](crate::Limits::max_expanded_bytes) bounds them.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorRef {
    /// The key of its storage. Tensors with the same one share memory in PyTorch.
    pub storage: Arc<str>,
    /// The dtype.
    pub dtype: Dtype,
    /// The offset of the first element, in elements.
    pub offset: u64,
    /// The sizes of the dimensions, none of which is negative. Empty for a tensor of one number without dimensions.
    pub shape: Vec<i64>,
    /// The distance to the next element along each dimension, in elements; none is negative.
    pub strides: Vec<i64>,
    /// Whether Python's tensor requires gradients, as parameters do.
    pub requires_grad: bool,
}

impl TensorRef {
    /// The most dimensions that a tensor has: those that libtorch's kernels support.
    pub const MAX_DIMS: usize = 64;

    /// Makes a tensor whose elements are in row-major order without gaps, at the start of a storage.
    pub fn contiguous(storage: impl Into<Arc<str>>, dtype: Dtype, shape: Vec<i64>) -> Self {
        let mut strides = vec![1; shape.len()];
        for dim in (1..strides.len()).rev() {
            strides[dim - 1] = i64::saturating_mul(strides[dim], shape[dim].max(1));
        }
        Self { storage: storage.into(), dtype, offset: 0, shape, strides, requires_grad: false }
    }

    /// Returns the number of elements.
    pub fn numel(&self) -> u64 {
        let sizes = self.shape.iter().map(|&size| size.unsigned_abs());
        sizes.fold(1, u64::saturating_mul)
    }

    /// Returns the size of the elements in bytes.
    pub fn size_in_bytes(&self) -> u64 {
        self.numel().saturating_mul(self.dtype.size() as u64)
    }

    /// Returns whether the elements are in row-major order without gaps.
    pub fn is_contiguous(&self) -> bool {
        let mut step = 1;
        let dims = self.shape.iter().zip(&self.strides).rev();
        let mut in_order = dims.map(|(&size, &stride)| {
            let fits = size == 1 || stride == step;
            step = step.saturating_mul(size);
            fits
        });
        self.shape.contains(&0) || in_order.all(|fits| fits)
    }

    /// Checks that the tensor stays within a storage of `storage_bytes` bytes. Returns the size of its elements in
    /// bytes if it has more elements than the storage, like an expanded tensor, and zero otherwise.
    pub(crate) fn check(&self, storage_bytes: u64) -> Result<u64, &'static str> {
        let element = self.dtype.size() as u64;
        let available = storage_bytes / element;
        if self.shape.len() != self.strides.len() {
            return Err("has a different number of strides and sizes");
        }
        if self.shape.len() > Self::MAX_DIMS {
            return Err("has more than 64 dimensions");
        }
        let (mut numel, mut last) = (Some(1u64), Some(self.offset));
        for (&size, &stride) in self.shape.iter().zip(&self.strides) {
            let (Ok(size), Ok(stride)) = (u64::try_from(size), u64::try_from(stride)) else {
                return Err("has a negative size or stride");
            };
            // Sizes of zero count as one, so that no product overflows in any order of multiplication.
            numel = numel.and_then(|numel| numel.checked_mul(size.max(1)));
            let reach = size.saturating_sub(1).checked_mul(stride);
            last = last.and_then(|last| last.checked_add(reach?));
        }
        let bytes = numel.and_then(|numel| numel.checked_mul(element));
        let (Some(numel), Some(bytes)) = (numel, bytes.filter(|&n| i64::try_from(n).is_ok()))
        else {
            return Err("has more elements than a tensor can have");
        };
        let empty = self.shape.contains(&0);
        let inside = if empty {
            self.offset <= available
        } else {
            last.is_some_and(|last| last < available)
        };
        if !inside {
            return Err("reaches beyond the end of its storage");
        }
        Ok(if !empty && numel > available { bytes } else { 0 })
    }
}
