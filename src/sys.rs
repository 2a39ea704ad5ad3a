//! The C ABI of the shim: one declaration for each in `csrc/shim.h`, in the same order. `tests/abi.rs` compares the two.

use std::ffi::c_char;

/// A tensor behind the pointers that tch hands out.
pub(crate) use torch_sys::C_tensor as Tensor;

pub(crate) const AUTOCAST_DEVICES: usize = 3;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AutocastDevice {
    pub(crate) device_type: i8,
    pub(crate) dtype: i8,
    pub(crate) enabled: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AutocastState {
    pub(crate) devices: [AutocastDevice; AUTOCAST_DEVICES],
    pub(crate) count: u8,
    pub(crate) cache_enabled: u8,
}

pub(crate) const GRADIENT_REQUIRES_GRAD: u8 = 1;
pub(crate) const GRADIENT_STRIDED: u8 = 2;
pub(crate) const GRADIENT_SPARSE: u8 = 4;
pub(crate) const GRADIENT_OVERLAPS: u8 = 8;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Gradient {
    pub(crate) parameter: usize,
    pub(crate) gradient: usize,
    pub(crate) version: u32,
    pub(crate) device_type: i8,
    pub(crate) device_index: i8,
    pub(crate) dtype: i8,
    pub(crate) flags: u8,
}

pub(crate) const UNSCALE_RECHECK: u8 = 1;
pub(crate) const UNSCALE_CHECK_ONLY: u8 = 2;
#[cfg(test)]
pub(crate) const UNSCALE_GENERIC: u8 = 4;

pub(crate) const FINITE: u8 = 0;
pub(crate) const NON_FINITE: u8 = 1;
pub(crate) const ON_DEVICE: u8 = 2;

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ScaleRule {
    pub(crate) growth_factor: f64,
    pub(crate) backoff_factor: f64,
    pub(crate) growth_interval: i64,
    pub(crate) min_scale: f64,
    pub(crate) max_scale: f64,
}

unsafe extern "C" {
    pub(crate) fn tamp_string_free(text: *mut c_char);

    pub(crate) fn tamp_cuda_is_linked() -> u8;
    pub(crate) fn tamp_cuda_initialize(err: *mut *mut c_char);

    pub(crate) fn tamp_autocast_read(state: *mut AutocastState, err: *mut *mut c_char);
    pub(crate) fn tamp_autocast_enter(
        next: *const AutocastState,
        outermost: u8,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_autocast_exit(previous: *const AutocastState, outermost: u8);
    pub(crate) fn tamp_autocast_clear_cache(err: *mut *mut c_char);

    pub(crate) fn tamp_gradients_inspect(
        parameters: *const *mut Tensor,
        count: usize,
        gradients: *mut Gradient,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_gradient_drop(parameter: *mut Tensor, err: *mut *mut c_char);
    pub(crate) fn tamp_gradients_unscale(
        parameters: *const *mut Tensor,
        count: usize,
        scale: *const Tensor,
        found_inf: *mut Tensor,
        options: u8,
        err: *mut *mut c_char,
    ) -> u8;
    pub(crate) fn tamp_any_nonzero(
        tensors: *const *mut Tensor,
        count: usize,
        err: *mut *mut c_char,
    ) -> u8;
    pub(crate) fn tamp_scale_update(
        scale: *mut Tensor,
        tracker: *mut Tensor,
        found_infs: *const *mut Tensor,
        count: usize,
        rule: *const ScaleRule,
        err: *mut *mut c_char,
    );

    pub(crate) fn tamp_clip_grad_norm(
        parameters: *const *mut Tensor,
        count: usize,
        max_norm: f64,
        err: *mut *mut c_char,
    ) -> *mut Tensor;
    pub(crate) fn tamp_clip_grad_value(
        parameters: *const *mut Tensor,
        count: usize,
        max: f64,
        err: *mut *mut c_char,
    );
}
