//! The C ABI of what a training run needs besides the scaler and the optimizers: every declaration of
//! `csrc/shim_training.h`, in the same order.

use std::ffi::c_char;

use super::Tensor;

pub(crate) const AVERAGE_EMA: u8 = 0;
pub(crate) const AVERAGE_SWA: u8 = 1;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AverageOptions {
    pub(crate) decay: f64,
    pub(crate) kind: u8,
    pub(crate) warmup: u8,
    pub(crate) debias: u8,
}

/// A pass that averages running statistics.
#[repr(C)]
pub(crate) struct Statistics {
    _opaque: [u8; 0],
}

pub(crate) const STATISTICS_NEVER_MET: i64 = -1;
pub(crate) const STATISTICS_KEPT: i64 = -2;

#[allow(dead_code, reason = "only csrc/spikes.cpp reads it")]
pub(crate) const SPIKES_TAKEN: u8 = 0;
#[allow(dead_code, reason = "only csrc/spikes.cpp reads it")]
pub(crate) const SPIKES_IN_A_ROW: u8 = 1;
pub(crate) const SPIKES_FOUND: u8 = 2;
pub(crate) const SPIKES_NON_FINITE: u8 = 3;
#[allow(dead_code, reason = "only csrc/spikes.cpp reads it")]
pub(crate) const SPIKES_SKIPPED: u8 = 4;
pub(crate) const SPIKES_WINDOW: u8 = 5;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpikeOptions {
    pub(crate) deviations: f64,
    pub(crate) window: i64,
    pub(crate) warmup: i64,
    pub(crate) max_in_a_row: i64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeviceMemory {
    pub(crate) allocated: i64,
    pub(crate) max_allocated: i64,
    pub(crate) reserved: i64,
    pub(crate) max_reserved: i64,
}

unsafe extern "C" {
    pub(crate) fn tamp_average_count(
        count: *const Tensor,
        updates: f64,
        rest: f64,
        skips: *const Tensor,
        options: *const AverageOptions,
        err: *mut *mut c_char,
    ) -> *mut Tensor;
    pub(crate) fn tamp_average_update(
        averages: *const *mut Tensor,
        parameters: *const *mut Tensor,
        count: usize,
        weight: f64,
        counted: *const Tensor,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_statistics_begin(
        running: *const *mut Tensor,
        own: *const *mut Tensor,
        variances: *const u8,
        count: usize,
        err: *mut *mut c_char,
    ) -> *mut Statistics;
    pub(crate) fn tamp_statistics_calls(pass: *const Statistics, index: usize) -> i64;
    pub(crate) fn tamp_statistics_end(pass: *mut Statistics);
    #[cfg(feature = "distributed")]
    pub(crate) fn tamp_statistics_momentum(
        mean: *const Tensor,
        variance: *const Tensor,
        trains: u8,
        momentum: f64,
        err: *mut *mut c_char,
    ) -> f64;
    pub(crate) fn tamp_spikes_judge(
        history: *const Tensor,
        value: *const Tensor,
        other: *const Tensor,
        options: *const SpikeOptions,
        err: *mut *mut c_char,
    ) -> *mut Tensor;
    pub(crate) fn tamp_spikes_flag(history: *const Tensor, err: *mut *mut c_char) -> *mut Tensor;

    pub(crate) fn tamp_device_memory_read(
        device_type: i8,
        index: i8,
        out: *mut DeviceMemory,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_device_memory_reset(device_type: i8, index: i8, err: *mut *mut c_char);
}
