//! Losses and layers that keep less for the backward pass.

use std::ptr;

use tch::{Reduction, Tensor};

use super::{call, given};
use crate::error::Result;
use crate::sys;

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
        class_weights: options.class_weights.map_or(ptr::null(), |weights| weights.as_ptr()),
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
    let bias = bias.map_or(ptr::null(), |bias| bias.as_ptr());
    // SAFETY: the tensors are live, or null where they may be, and `raw` and `err` are valid.
    given(call(|err| unsafe {
        sys::tamp_linear_cross_entropy(hidden, weight, bias, targets, &raw, err)
    })?)
}
