//! The gradients of a list of parameters.

use std::ops::Deref;
use std::ptr;

use tch::{Kind, Tensor};

use super::dtype_code;
use super::{OutsideRegions, call, given, pointers};
use crate::error::{Error, GradientError, Result};
use crate::sys;

/// The type and the index of a device, as numbered by libtorch.
pub(crate) type DeviceCode = (i8, i8);

/// The description of a parameter and its gradient.
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub(crate) struct Gradient(sys::Gradient);

/// The number of `c10::DeviceType` for the CPU.
const CPU: i8 = 0;

/// The numbers of `c10::ScalarType` for complex dtypes.
const COMPLEX_HALF: i8 = 8;
const COMPLEX: [i8; 2] = [9, 10];

impl Gradient {
    /// Returns the identity of the parameter, which is the same number for every handle of a tensor, as long as one of
    /// them is alive. Zero for an undefined tensor.
    pub(crate) fn parameter(&self) -> usize {
        self.0.parameter
    }

    /// Returns whether the parameter has a gradient.
    pub(crate) fn exists(&self) -> bool {
        self.0.gradient != 0
    }

    /// Returns whether the parameter has a gradient and is not frozen.
    pub(crate) fn is_used(&self) -> bool {
        self.exists() && !self.is_frozen()
    }

    /// Returns whether the parameter does not require a gradient.
    pub(crate) fn is_frozen(&self) -> bool {
        !self.has(sys::GRADIENT_REQUIRES_GRAD)
    }

    /// Returns the identities of the gradient and of its memory.
    pub(crate) fn identity(&self) -> (usize, usize) {
        (self.0.gradient, self.0.memory)
    }

    /// Returns how often the gradient was changed in place.
    pub(crate) fn version(&self) -> u32 {
        self.0.version
    }

    /// Returns whether the gradient is in host memory.
    pub(crate) fn is_on_cpu(&self) -> bool {
        self.0.device_type == CPU
    }

    /// Returns the device of the gradient.
    pub(crate) fn device(&self) -> DeviceCode {
        (self.0.device_type, self.0.device_index)
    }

    pub(crate) fn is_strided(&self) -> bool {
        self.has(sys::GRADIENT_STRIDED)
    }

    /// Returns whether the gradient is COO sparse.
    pub(crate) fn is_sparse(&self) -> bool {
        self.has(sys::GRADIENT_SPARSE)
    }

    /// Returns whether another tensor may use the memory of the gradient, or its own elements share some.
    pub(crate) fn is_shared(&self) -> bool {
        self.has(sys::GRADIENT_SHARED)
    }

    /// Returns whether the shape or the device of the gradient differs from the parameter's.
    pub(crate) fn has_other_shape(&self) -> bool {
        self.has(sys::GRADIENT_OTHER_SHAPE)
    }

    /// Returns whether the dtype of the gradient differs from the parameter's.
    pub(crate) fn has_other_dtype(&self) -> bool {
        self.has(sys::GRADIENT_OTHER_DTYPE)
    }

    pub(crate) fn is(&self, kind: Kind) -> bool {
        dtype_code(kind) == Some(self.0.dtype)
    }

    /// Returns whether the elements of the gradient are fp16, or complex numbers of two fp16.
    pub(crate) fn is_fp16(&self) -> bool {
        self.is(Kind::Half) || self.0.dtype == COMPLEX_HALF
    }

    pub(crate) fn is_complex(&self) -> bool {
        self.0.dtype == COMPLEX_HALF || COMPLEX.contains(&self.0.dtype)
    }

    pub(crate) fn is_floating_or_complex(&self) -> bool {
        let floating = [Kind::Half, Kind::Float, Kind::Double, Kind::BFloat16];
        floating.into_iter().any(|kind| self.is(kind)) || self.is_complex()
    }

    fn has(&self, flag: u8) -> bool {
        self.0.flags & flag != 0
    }
}

/// Describes the gradients of the parameters, in the order of the parameters.
pub(crate) fn gradients_inspect(parameters: &[Tensor]) -> Result<Vec<Gradient>> {
    inspect(parameters, false)
}

fn inspect(parameters: &[Tensor], hold: bool) -> Result<Vec<Gradient>> {
    let tensors = pointers(parameters);
    let mut gradients = vec![Gradient::default(); tensors.len()];
    let (array, count) = (tensors.as_ptr(), tensors.len());
    let out = gradients.as_mut_ptr().cast::<sys::Gradient>();
    // SAFETY: both arrays have `count` elements, a `Gradient` is laid out like the struct inside, and `parameters`
    // keeps the tensors alive.
    call(|err| unsafe { sys::tamp_gradients_inspect(array, count, hold.into(), out, err) })?;
    Ok(gradients)
}

/// Gradients as they were at one time. While the snapshot is alive, no other memory gets the same identity, and so a
/// gradient with the same memory is the same gradient.
#[derive(Debug, Default)]
pub(crate) struct Snapshot(Vec<Gradient>);

impl Snapshot {
    /// Takes a snapshot of the gradients, in the order of the parameters.
    pub(crate) fn of(parameters: &[Tensor]) -> Result<Self> {
        inspect(parameters, true).map(Self)
    }

    /// Forgets all but the first gradients.
    pub(crate) fn truncate(&mut self, len: usize) {
        drop(Self(self.0.split_off(len.min(self.0.len()))));
    }

    /// A snapshot of each gradient alone.
    pub(crate) fn each(mut self) -> impl Iterator<Item = Self> {
        std::mem::take(&mut self.0).into_iter().map(|gradient| Self(vec![gradient]))
    }

    /// Swaps the gradients at one index of two snapshots.
    pub(crate) fn exchange(&mut self, other: &mut Self, index: usize) {
        std::mem::swap(&mut self.0[index], &mut other.0[index]);
    }
}

impl Deref for Snapshot {
    type Target = [Gradient];

    fn deref(&self) -> &[Gradient] {
        &self.0
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        let (gradients, count) = (self.0.as_ptr().cast::<sys::Gradient>(), self.0.len());
        // SAFETY: the array has `count` elements, a `Gradient` is laid out like the struct inside, and `inspect` has
        // taken hold of each of them, which are released only here.
        unsafe { sys::tamp_gradients_release(gradients, count) }
    }
}

/// Returns the identities of tensors: the same number for every handle of a tensor, as long as one of them is alive.
pub(crate) fn identities(tensors: &[Tensor]) -> Result<Vec<usize>> {
    let known = gradients_inspect(tensors)?;
    Ok(known.iter().map(|gradient| gradient.parameter()).collect())
}

/// Gives gradients that share memory copies of their own. On failure nothing is replaced.
pub(crate) fn gradients_separate(parameters: &[Tensor]) -> Result<()> {
    let tensors = pointers(parameters);
    // SAFETY: the array has `tensors.len()` elements, and the borrow keeps the tensors alive.
    call(|err| unsafe { sys::tamp_gradients_separate(tensors.as_ptr(), tensors.len(), err) })
}

/// Does the same with the gradients that the backward pass of `loss` will add to.
pub(crate) fn gradients_separate_leaves(loss: &Tensor) -> Result<()> {
    // SAFETY: `loss` is a live tensor, and gradients are replaced through libtorch's own handles, which alias freely.
    call(|err| unsafe { sys::tamp_gradients_separate_leaves(loss.as_ptr(), err) })
}

/// The leaves to which the backward pass of `loss` adds gradients, except these parameters.
pub(crate) fn other_leaves(loss: &Tensor, parameters: &[Tensor]) -> Result<Vec<Tensor>> {
    let tensors = pointers(parameters);
    let mut leaves = Vec::new();
    loop {
        let room = leaves.len();
        let (loss, array, count, to) =
            (loss.as_ptr(), tensors.as_ptr(), tensors.len(), leaves.as_mut_ptr());
        // SAFETY: the arrays have `count` and `room` elements, the latter all null, the borrows keep every tensor
        // alive, and the tensors that the shim writes to `leaves` are owned by the caller, even after a failure.
        let found = call(|err| unsafe { sys::tamp_leaves(loss, array, count, to, room, err) });
        let written = leaves.iter().copied().filter(|leaf| !leaf.is_null());
        let owned = written.map(given).collect::<Result<Vec<Tensor>>>()?;
        let found = found?;
        if found <= room {
            return Ok(owned);
        }
        leaves = vec![ptr::null_mut(); found];
    }
}

/// Counts on the CPU how often backward passes through the graph that exists now add to the gradient of a leaf.
pub(crate) fn count_additions(leaf: &Tensor) -> Result<Tensor> {
    // SAFETY: the borrow keeps the tensor alive.
    given(call(|err| unsafe { sys::tamp_leaf_count_additions(leaf.as_ptr(), err) })?)
}

/// Drops the gradients of the parameters.
pub(crate) fn gradients_drop<'a>(parameters: impl IntoIterator<Item = &'a Tensor>) -> Result<()> {
    drop_gradients(&pointers(parameters), false)
}

/// Drops the gradients of the parameters, and has later ones in the parameters' own dtypes.
pub(crate) fn gradients_drop_narrow<'a>(
    parameters: impl IntoIterator<Item = &'a Tensor>,
) -> Result<()> {
    drop_gradients(&pointers(parameters), true)
}

fn drop_gradients(tensors: &[*mut sys::Tensor], narrows: bool) -> Result<()> {
    let (array, count) = (tensors.as_ptr(), tensors.len());
    // SAFETY: the array has `count` elements, and the callers borrow the tensors meanwhile.
    call(|err| unsafe { sys::tamp_gradients_drop(array, count, narrows.into(), err) })
}

/// Takes the gradients from the parameters; `None` for a parameter without one.
pub(crate) fn gradients_take(parameters: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
    let tensors = pointers(parameters);
    let mut out = vec![ptr::null_mut(); tensors.len()];
    let (array, count, to) = (tensors.as_ptr(), tensors.len(), out.as_mut_ptr());
    // SAFETY: both arrays have `count` elements, `out` is all null, the borrow keeps the parameters alive, and the
    // tensors that the shim writes to `out` are owned by the caller, even after a failure.
    let taken = call(|err| unsafe { sys::tamp_gradients_take(array, count, to, err) });
    let owned = |tensor: *mut sys::Tensor| (!tensor.is_null()).then(|| given(tensor)).transpose();
    let gradients: Vec<_> = out.into_iter().map(owned).collect::<Result<_>>()?;
    if let Err(error) = taken {
        // The gradients that were taken before the failure are put back.
        gradients_add(parameters, &gradients)?;
        return Err(error);
    }
    Ok(gradients)
}

/// Adds the gradients that `gradients_take` has taken to the current ones.
pub(crate) fn gradients_add(parameters: &[Tensor], taken: &[Option<Tensor>]) -> Result<()> {
    assert_eq!(parameters.len(), taken.len());
    let both = parameters.iter().zip(taken);
    let some = both.filter_map(|(parameter, taken)| Some((parameter, taken.as_ref()?)));
    let (parameters, taken): (Vec<_>, Vec<_>) = some.unzip();
    let (parameters, taken) = (pointers(parameters), pointers(taken));
    let (array, count) = (parameters.as_ptr(), parameters.len());
    // SAFETY: both arrays have `count` elements, and the borrows keep every tensor alive.
    call(|err| unsafe { sys::tamp_gradients_add(array, taken.as_ptr(), count, err) })
}

/// Which parameters' gradients `gradients_widen` has changed.
#[derive(Debug)]
pub(crate) struct Widened(Vec<u8>);

impl Widened {
    /// Returns whether there are any.
    pub(crate) fn any(&self) -> bool {
        self.0.contains(&1)
    }

    /// Gives the gradients of the same parameters their dtypes back. No number may have changed since.
    pub(crate) fn undo(&self, parameters: &[Tensor]) -> Result<()> {
        assert_eq!(parameters.len(), self.0.len());
        let (tensors, widened) = (pointers(parameters), self.0.as_ptr());
        let (array, count) = (tensors.as_ptr(), tensors.len());
        // SAFETY: both arrays have `count` elements, and `parameters` keeps the tensors alive.
        call(|err| unsafe { sys::tamp_gradients_narrow(array, count, widened, err) })
    }
}

/// Makes the gradients of half-precision parameters f32, and converts those that exist. Changes nothing if it fails.
pub(crate) fn gradients_widen(parameters: &[Tensor]) -> Result<Widened> {
    let tensors = pointers(parameters);
    let mut widened = vec![0; tensors.len()];
    let (array, count, out) = (tensors.as_ptr(), tensors.len(), widened.as_mut_ptr());
    // SAFETY: both arrays have `count` elements, and `parameters` keeps the tensors alive.
    call(|err| unsafe { sys::tamp_gradients_widen(array, count, out, err) })?;
    Ok(Widened(widened))
}

/// Returns a flag on the device of a parameter's gradient, which is zero if the gradient is zero or `before`, an
/// earlier flag, is. Does not synchronize.
pub(crate) fn gradient_rest(parameter: &Tensor, before: Option<&Tensor>) -> Result<Tensor> {
    let before = before.map_or(ptr::null(), Tensor::as_ptr);
    // SAFETY: `parameter` is a live tensor, and `before` is one or null.
    given(call(|err| unsafe { sys::tamp_gradient_rest(parameter.as_ptr(), before.cast(), err) })?)
}

/// Gives the gradients of half-precision parameters the dtypes of these again, and converts those that exist.
pub(crate) fn gradients_narrow(parameters: &[Tensor]) -> Result<()> {
    let tensors = pointers(parameters);
    let (array, count) = (tensors.as_ptr(), tensors.len());
    // SAFETY: the array has `count` elements, `parameters` keeps the tensors alive, and null stands for all of them.
    call(|err| unsafe { sys::tamp_gradients_narrow(array, count, ptr::null(), err) })
}

/// Runs the backward pass from a tensor of one element.
pub(crate) fn backward(loss: &Tensor, retain_graph: bool) -> Result<()> {
    // SAFETY: `loss` is a live tensor; gradients are written through libtorch's own handles, which alias freely.
    call(|err| unsafe { sys::tamp_backward(loss.as_ptr(), retain_graph.into(), err) })
}

/// Clips the gradients of the parameters to a total norm, and returns the norm from before; `None` if there are no
/// gradients. Synchronizes only with `error_if_nonfinite`, and then returns an error for a non-finite norm, before
/// anything is clipped.
pub(crate) fn clip_grad_norm(
    parameters: &[Tensor],
    max_norm: f64,
    norm_type: f64,
    error_if_nonfinite: bool,
) -> Result<Option<Tensor>> {
    let _own = OutsideRegions::enter();
    let tensors = pointers(parameters);
    let (array, count) = (tensors.as_ptr(), tensors.len());
    let mut finite = 1;
    // SAFETY: the array has `count` elements, `parameters` keeps the tensors alive, and `finite` is valid for a write.
    let norm = call(|err| unsafe {
        let check = error_if_nonfinite.into();
        sys::tamp_clip_grad_norm(array, count, max_norm, norm_type, check, &mut finite, err)
    })?;
    if norm.is_null() {
        return Ok(None);
    }
    let norm = given(norm)?;
    match finite {
        0 => Err(Error::Gradient(GradientError::NonFiniteNorm { norm: norm.f_double_value(&[])? })),
        _ => Ok(Some(norm)),
    }
}

/// Returns the norm of norms of one type, at least one, on the device of the first.
pub(crate) fn norms_join(norms: &[Tensor], norm_type: f64) -> Result<Tensor> {
    let tensors = pointers(norms);
    let (array, count) = (tensors.as_ptr(), tensors.len());
    // SAFETY: the array has `count` elements, and `norms` keeps the tensors alive.
    given(call(|err| unsafe { sys::tamp_norms_join(array, count, norm_type, err) })?)
}

/// Computes the factor by which gradients with this norm are to be multiplied, on the device of `norm`.
pub(crate) fn clip_factor(norm: &Tensor, max_norm: f64) -> Result<Tensor> {
    // SAFETY: `norm` is a live tensor, and `err` is valid for a write.
    given(call(|err| unsafe { sys::tamp_clip_factor(norm.as_ptr(), max_norm, err) })?)
}

/// Clips the gradients of distinct parameters, whose total norm is `norm` and of which none shares memory.
pub(crate) fn clip_by_norm<'a>(
    parameters: impl IntoIterator<Item = &'a Tensor>,
    norm: &Tensor,
    max_norm: f64,
) -> Result<()> {
    let tensors = pointers(parameters);
    let (array, count, norm) = (tensors.as_ptr(), tensors.len(), norm.as_ptr());
    // SAFETY: the array has `count` elements, and the borrows keep the tensors and the norm alive.
    call(|err| unsafe { sys::tamp_clip_by_norm(array, count, norm, max_norm, err) })
}

/// Clamps every element of the parameters' gradients to `-max..=max`.
pub(crate) fn clip_grad_value(parameters: &[Tensor], max: f64) -> Result<()> {
    let tensors = pointers(parameters);
    // SAFETY: the array has `tensors.len()` elements, and `parameters` keeps the tensors alive.
    call(|err| unsafe { sys::tamp_clip_grad_value(tensors.as_ptr(), tensors.len(), max, err) })
}

/// Why gradients could not be unscaled, and whether some of them may have been.
#[derive(Debug)]
pub(crate) struct Interrupted {
    pub(crate) error: Error,
    pub(crate) begun: bool,
}

/// How gradients are checked and unscaled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unscaling {
    /// The gradients are only checked and stay as they are.
    pub(crate) check_only: bool,
    /// The unscaled gradients are checked as well: unscaling can overflow if the scale is less than one.
    pub(crate) recheck: bool,
    /// libtorch's generic operations are used even where there is a kernel.
    #[cfg(test)]
    pub(crate) generic: bool,
}

impl Unscaling {
    pub(crate) const fn new(check_only: bool, recheck: bool) -> Self {
        Self {
            check_only,
            recheck,
            #[cfg(test)]
            generic: false,
        }
    }

    fn code(self) -> u8 {
        let code = u8::from(self.check_only) * sys::UNSCALE_CHECK_ONLY
            + u8::from(self.recheck) * sys::UNSCALE_RECHECK;
        #[cfg(test)]
        let code = code + u8::from(self.generic) * sys::UNSCALE_GENERIC;
        code
    }
}

/// The flag for non-finite gradients on one device.
#[derive(Debug)]
pub(crate) struct FoundInf {
    /// 1 if some were non-finite and 0 otherwise, on their device.
    pub(crate) tensor: Tensor,
    /// The same, if the host has it.
    pub(crate) host: Option<bool>,
}

impl FoundInf {
    fn new(tensor: *mut sys::Tensor, answer: u8) -> Result<Self> {
        let tensor = given(tensor)?;
        Ok(Self { tensor, host: known(answer)? })
    }

    pub(crate) fn shallow_clone(&self) -> Self {
        Self { tensor: self.tensor.shallow_clone(), host: self.host }
    }
}

/// Unscales the gradients of `parameters`, which are on `devices` devices, and returns for each device, in the order of
/// their first gradients, whether any gradient was non-finite.
pub(crate) fn gradients_unscale<'a>(
    parameters: impl IntoIterator<Item = &'a Tensor>,
    scale: &Tensor,
    devices: usize,
    unscaling: Unscaling,
) -> std::result::Result<Vec<FoundInf>, Interrupted> {
    let tensors = pointers(parameters);
    let (array, count, scale) = (tensors.as_ptr(), tensors.len(), scale.as_ptr());
    let mut flags = vec![ptr::null_mut(); devices];
    let mut answers = vec![sys::ON_DEVICE; devices];
    let (found, out) = (flags.as_mut_ptr(), answers.as_mut_ptr());
    let (options, mut begun) = (unscaling.code(), 0);
    // SAFETY: the arrays have `count` and `devices` elements, the borrows keep every tensor alive, `begun` is valid for
    // a write, and tensors are changed in place only through libtorch's own handles, which alias freely.
    let done = call(|err| unsafe {
        let begun = &mut begun;
        sys::tamp_gradients_unscale(array, count, scale, found, out, devices, options, begun, err)
    });
    let found = done.and_then(|()| {
        flags.into_iter().zip(answers).map(|(flag, answer)| FoundInf::new(flag, answer)).collect()
    });
    found.map_err(|error| Interrupted { error, begun: begun != 0 })
}

/// Returns a norm of the gradients of `parameters`, which are on one device, divided by the scale that they
/// have, if any, and whether that norm is non-finite, as it is if any gradient is. The gradients stay as they are.
pub(crate) fn gradients_norm<'a>(
    parameters: impl IntoIterator<Item = &'a Tensor>,
    norm_type: f64,
    scale: Option<&Tensor>,
) -> Result<(Tensor, FoundInf)> {
    let tensors = pointers(parameters);
    let (array, count) = (tensors.as_ptr(), tensors.len());
    let scale = scale.map_or(ptr::null(), Tensor::as_ptr);
    let (mut flag, mut answer) = (ptr::null_mut(), sys::ON_DEVICE);
    // SAFETY: the array has `count` elements, the borrows keep every tensor alive, the scale may be null, and `flag`
    // and `answer` are valid for a write.
    let norm = call(|err| unsafe {
        sys::tamp_gradients_norm(array, count, norm_type, scale, &mut flag, &mut answer, err)
    })?;
    Ok((given(norm)?, FoundInf::new(flag, answer)?))
}

/// Decodes an answer of the shim, which is `None` if only the device has it.
fn known(answer: u8) -> Result<Option<bool>> {
    match answer {
        sys::FINITE => Ok(Some(false)),
        sys::NON_FINITE => Ok(Some(true)),
        sys::ON_DEVICE => Ok(None),
        other => Err(Error::Torch(format!("the check of gradients answered {other}"))),
    }
}
