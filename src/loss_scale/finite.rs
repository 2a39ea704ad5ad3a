//! Checking gradients, and choosing parameters by the result.

use tch::{Kind, Tensor};

#[cfg(doc)]
use crate::error::PolicyError;
use crate::error::{Error, Result};
use crate::ffi::{self, OutsideRegions};
use crate::tree::{Tree, floating_kind, kind, leaves, mismatch};

/// A tensor's kind, if its elements can be infinite.
pub(super) fn number_kind(tensor: &Tensor) -> Option<Kind> {
    floating_kind(tensor).or_else(|| {
        let kind = kind(tensor)?;
        let complex = [Kind::ComplexHalf, Kind::ComplexFloat, Kind::ComplexDouble];
        complex.contains(&kind).then_some(kind)
    })
}

/// Returns whether all elements of all floating-point and complex tensors of a tree are finite, as a 0-dim bool tensor
/// on the device of the first of these tensors, or on the CPU (and true) if there are none. Other tensors and undefined
/// ones are ignored. The counterpart of `jmp.all_finite`.
///
/// Reads each tensor once, in one call for all, and changes nothing. A sparse tensor is coalesced, since its duplicates
/// can add up to infinity. Synchronizes only where the first tensor is on the CPU and others are on a GPU, and to
/// coalesce on a GPU.
///
/// # Errors
///
/// [`Error::Torch`] for a tensor whose elements libtorch cannot read, such as one with the MKLDNN layout.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::loss_scale::all_finite;
///
/// let (fine, broken) = (Tensor::from(1f32), Tensor::from(f32::NAN));
/// assert!(bool::try_from(all_finite(&[&fine, &fine])?)?);
/// assert!(!bool::try_from(all_finite(&(&fine, vec![&broken]))?)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn all_finite<T: Tree + ?Sized>(tree: &T) -> Result<Tensor> {
    let mut numbers = leaves(tree);
    numbers.retain(|tensor| number_kind(tensor).is_some());
    ffi::all_finite(&numbers)
}

/// Chooses between two trees: returns `new` if `pred`, a tensor with one element, is true (not zero), and otherwise
/// `old`. The counterpart of `jmp.select_tree`.
///
/// The choice is made on the device of each tensor. Synchronizes only where `pred` is on a GPU and a tensor on the
/// CPU. Tensors of all kinds are supported. The choice is differentiable; the tree that is not chosen gets gradients of
/// zeros.
///
/// # Errors
///
/// [`PolicyError::TreeMismatch`] if the trees differ in structure, or two tensors in shape, kind or device;
/// [`Error::InvalidArgument`] if `pred` does not have exactly one element.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::loss_scale::{all_finite, select_tree};
///
/// let (old, new) = (Tensor::from(1f32), Tensor::from(f32::INFINITY));
/// let chosen = select_tree(&all_finite(&new)?, &new, &old)?;
/// assert_eq!(f64::try_from(chosen)?, 1.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn select_tree<T: Tree + ?Sized>(pred: &Tensor, new: &T, old: &T) -> Result<T::Output> {
    // One copy of the flag for each device.
    let mut preds = vec![flag("the number of elements of pred", pred)?];
    new.try_zip(old, &mut |new, old| {
        if !new.defined() && !old.defined() {
            return Ok(new.shallow_clone());
        }
        check_alike(new, old)?;
        let device = new.device();
        let place = match preds.iter().position(|pred| pred.device() == device) {
            Some(place) => place,
            None => {
                preds.push(ffi::number_on(&preds[0], device, Kind::Bool)?);
                preds.len() - 1
            }
        };
        let _own = OutsideRegions::enter();
        Ok(new.f_where_self(&preds[place], old)?)
    })
}

pub(super) const GRADS_FINITE: &str = "the number of elements of grads_finite";

/// Converts a one-element tensor to a 0-dim bool tensor. `field` names the number of its elements in errors.
pub(super) fn flag(field: &'static str, tensor: &Tensor) -> Result<Tensor> {
    let _own = OutsideRegions::enter();
    let elements = ffi::numel(tensor);
    if elements != 1 {
        return Err(Error::out_of_range(field, elements as f64, "1"));
    }
    let tensor = tensor.f_detach()?.f_reshape([0i64; 0])?;
    Ok(tensor.f_to_kind(Kind::Bool)?)
}

fn check_alike(new: &Tensor, old: &Tensor) -> Result<()> {
    let describe = |tensor: &Tensor| match tensor.f_kind() {
        _ if !tensor.defined() => "an undefined tensor".to_owned(),
        Ok(kind) => format!(
            "{kind:?} {:?} on {:?}",
            ffi::sizes(tensor).unwrap_or_default(),
            tensor.device()
        ),
        Err(error) => format!("a tensor of unknown kind ({error})"),
    };
    let alike = new.defined()
        && old.defined()
        && new.f_kind()? == old.f_kind()?
        && ffi::sizes(new)? == ffi::sizes(old)?
        && new.device() == old.device();
    if alike {
        return Ok(());
    }
    let advice = match (kind(new), kind(old)) {
        (Some(new), Some(old)) if new != old => {
            "; cast one of them, for instance with Policy::cast_to_param"
        }
        _ => "",
    };
    let (new, old) = (describe(new), describe(old));
    Err(mismatch(format!("{new} in the first and {old} in the second{advice}")))
}
