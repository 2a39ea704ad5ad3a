//! Losses and layers that keep less for the backward pass.

use std::ptr;

use tch::{Reduction, Tensor};

use super::{call, given};
use crate::error::Result;
use crate::sys;

pub(crate) use sys::{GELU, GELU_TANH, SILU, SWIGLU};

/// The options of a loss, which have been checked.
#[derive(Debug)]
pub(crate) struct CrossEntropy<'a> {
    pub(crate) reduction: Reduction,
    pub(crate) ignore_index: i64,
    pub(crate) class_weights: Option<&'a Tensor>,
    pub(crate) label_smoothing: f64,
    /// 0 for none.
    pub(crate) soft_cap: f64,
    pub(crate) z_loss: f64,
    /// 0 for all logits.
    pub(crate) max_bytes: usize,
}

/// A normalization, which has been checked.
#[derive(Debug)]
pub(crate) struct Norm<'a> {
    pub(crate) shape: &'a [i64],
    pub(crate) weight: Option<&'a Tensor>,
    pub(crate) bias: Option<&'a Tensor>,
    pub(crate) eps: f64,
    pub(crate) is_rms: bool,
}

/// Returns the place of the first target that is no class and not the ignored number. On devices none is looked at.
pub(crate) fn target_out_of_range(
    targets: &Tensor,
    classes: i64,
    ignored: i64,
) -> Result<Option<i64>> {
    // SAFETY: the borrow keeps the tensor alive, which has int64 elements.
    call(|err| unsafe { sys::tamp_targets_check(targets.as_ptr(), classes, ignored, err) })
        .map(|place| (place >= 0).then_some(place))
}

/// Returns the loss of a linear layer's outputs; see `tamp_linear_cross_entropy`. Shapes and dtypes have been checked.
/// Does not synchronize.
pub(crate) fn linear_cross_entropy(
    hidden: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
    options: &CrossEntropy<'_>,
) -> Result<Tensor> {
    let raw = sys::CrossEntropy {
        class_weights: or_null(options.class_weights),
        ignore_index: options.ignore_index,
        label_smoothing: options.label_smoothing,
        soft_cap: options.soft_cap,
        z_loss: options.z_loss,
        max_bytes: options.max_bytes as u64,
        reduction: match options.reduction {
            Reduction::None => sys::LOSS_NONE,
            Reduction::Sum => sys::LOSS_SUM,
            _ => sys::LOSS_MEAN,
        },
    };
    let (hidden, weight, targets) = (hidden.as_ptr(), weight.as_ptr(), targets.as_ptr());
    let bias = or_null(bias);
    // SAFETY: the tensors are live, or null where they may be, and `raw` and `err` are valid.
    given(call(|err| unsafe {
        sys::tamp_linear_cross_entropy(hidden, weight, bias, targets, &raw, err)
    })?)
}

/// Returns a linear layer of an activation, one of [`GELU`] and the others; see `tamp_activation_linear`. Shapes and
/// dtypes have been checked. Does not synchronize.
pub(crate) fn activation_linear(
    xs: &Tensor,
    activation: u8,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let (xs, weight, bias) = (xs.as_ptr(), weight.as_ptr(), or_null(bias));
    // SAFETY: the borrows keep the tensors alive, and the bias may be null.
    given(call(|err| unsafe { sys::tamp_activation_linear(xs, activation, weight, bias, err) })?)
}

/// Returns a linear layer of a normalization; see `tamp_norm_linear`. Shapes, dtypes and options have been checked.
/// Does not synchronize.
pub(crate) fn norm_linear(
    xs: &Tensor,
    norm: &Norm<'_>,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let norm = sys::Norm {
        shape: norm.shape.as_ptr(),
        weight: or_null(norm.weight),
        bias: or_null(norm.bias),
        eps: norm.eps,
        dims: norm.shape.len(),
        is_rms: u8::from(norm.is_rms),
    };
    let (xs, weight, bias) = (xs.as_ptr(), weight.as_ptr(), or_null(bias));
    // SAFETY: the borrows keep the tensors and the shape, which has `dims` sizes, alive; the weight and the bias of the
    // normalization and `bias` may be null.
    given(call(|err| unsafe { sys::tamp_norm_linear(xs, &norm, weight, bias, err) })?)
}

fn or_null(tensor: Option<&Tensor>) -> *const sys::Tensor {
    tensor.map_or(ptr::null(), |tensor| tensor.as_ptr())
}
