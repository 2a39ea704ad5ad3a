//! The C ABI of recordings: every declaration of `csrc/insight/shim_insight.h`, in the same order.

use std::ffi::c_char;

use super::{SavedTensors, Tensor};

#[repr(C)]
pub(crate) struct Recording {
    _opaque: [u8; 0],
}

pub(crate) const EVENT_OPERATOR: u8 = 0;
pub(crate) const EVENT_NODE: u8 = 1;
#[allow(dead_code, reason = "the kind that is left")]
pub(crate) const EVENT_NAME: u8 = 2;

pub(crate) const USE_READ: u8 = 0;
pub(crate) const USE_WRITE: u8 = 1;
pub(crate) const USE_VIEW: u8 = 2;
pub(crate) const USE_OVERWRITE: u8 = 3;

pub(crate) const COMPARED_NOT: u8 = 0;
pub(crate) const COMPARED: u8 = 1;
#[allow(dead_code, reason = "the value that is left")]
pub(crate) const COMPARED_ALONE: u8 = 2;

pub(crate) const MOST_SIZES: usize = 8;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordedTensor {
    pub(crate) memory: i64,
    pub(crate) parameter: i64,
    pub(crate) offset: i64,
    pub(crate) version: i64,
    pub(crate) elements: i64,
    pub(crate) positive_infinite: i64,
    pub(crate) negative_infinite: i64,
    pub(crate) nan: i64,
    pub(crate) largest: f64,
    pub(crate) sizes: [i64; MOST_SIZES],
    pub(crate) dtype: i8,
    pub(crate) known: u8,
    pub(crate) usage: u8,
    pub(crate) dims: u8,
    pub(crate) element_bytes: u8,
    pub(crate) device_type: i8,
    pub(crate) device_index: i8,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordedEvent {
    pub(crate) name: *const c_char,
    pub(crate) inputs: *const RecordedTensor,
    pub(crate) outputs: *const RecordedTensor,
    pub(crate) input_count: usize,
    pub(crate) output_count: usize,
    pub(crate) parent: i64,
    pub(crate) ended: i64,
    pub(crate) sequence: i64,
    pub(crate) thread: u64,
    pub(crate) forward_thread: u64,
    pub(crate) repeated_largest: f64,
    pub(crate) difference: f64,
    pub(crate) norm: f64,
    pub(crate) cosine: f64,
    pub(crate) entered: i64,
    pub(crate) started: i64,
    pub(crate) ended_at: i64,
    pub(crate) left: i64,
    pub(crate) size: u64,
    pub(crate) flags: u32,
    pub(crate) kind: u8,
    pub(crate) repeated: u8,
    pub(crate) compared: u8,
    pub(crate) autocast: i8,
    pub(crate) composite: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct SavedTensor {
    pub(crate) tensor: RecordedTensor,
    pub(crate) event: i64,
    pub(crate) storage_bytes: i64,
    pub(crate) is_weight: u8,
    pub(crate) has_history: u8,
    pub(crate) is_activation: u8,
    pub(crate) is_small_part: u8,
    pub(crate) is_free: u8,
}

#[repr(C)]
pub(crate) struct Reference {
    _opaque: [u8; 0],
}

pub(crate) const RECORD_NUMBERS: u8 = 0;
pub(crate) const RECORD_TIMES: u8 = 1;
pub(crate) const RECORD_REFERENCE: u8 = 2;
pub(crate) const RECORD_COMPARED: u8 = 3;
pub(crate) const RECORD_ROUNDED: u8 = 4;

#[repr(C)]
pub(crate) struct Name {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct Emulation {
    _opaque: [u8; 0],
}

pub(crate) const REGIONS_AS_GIVEN: u8 = 0;
pub(crate) const REGIONS_OFF: u8 = 1;
pub(crate) const REGIONS_EMULATED: u8 = 2;
pub(crate) const ROUNDING_RANDOM: u8 = 0;
pub(crate) const ROUNDING_UNBOUNDED: u8 = 1;
pub(crate) const ROUNDING_NONE: u8 = 2;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Emulated {
    pub(crate) lower: *const *const c_char,
    pub(crate) f32: *const *const c_char,
    pub(crate) lower_count: usize,
    pub(crate) f32_count: usize,
    pub(crate) seed: u64,
    pub(crate) dtype: i8,
    pub(crate) device_type: i8,
    pub(crate) regions: u8,
    pub(crate) rounding: u8,
}

pub(crate) const RETURNED_BFLOAT16: u8 = 1;
pub(crate) const RETURNED_HALF: u8 = 2;

pub(crate) const BIN_ZERO: usize = 0;
pub(crate) const BIN_INFINITE: usize = 1;
pub(crate) const BIN_NAN: usize = 2;
pub(crate) const BIN_EXPONENTS: usize = 3;
pub(crate) const BINS: usize = 292;
pub(crate) const EXPONENTS_BELOW_ZERO: i32 = 160;
pub(crate) const COUNTS_OBSERVED: usize = 0;
pub(crate) const COUNTS_NON_FINITE: usize = 1;
pub(crate) const COUNTS_ROWS: usize = 2;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CountedGradient {
    pub(crate) parameter: *const Tensor,
    pub(crate) row: i64,
    pub(crate) unscaled: u8,
}

pub(crate) const STEP_SCALE: usize = 0;
pub(crate) const STEP_FLAG: usize = 1;
pub(crate) const STEP_NORM: usize = 2;
pub(crate) const STEP_LOSS: usize = 3;
pub(crate) const STEP_RATE: usize = 4;
pub(crate) const STEP_KNOWN: usize = 5;
pub(crate) const STEP_NUMBERS: usize = 6;
pub(crate) const STEP_HAS_NORM: u8 = 1;
pub(crate) const STEP_HAS_LOSS: u8 = 2;
pub(crate) const STEP_HAS_VERDICT: u8 = 4;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepNumber {
    pub(crate) on_device: *const Tensor,
    pub(crate) on_host: f64,
}

unsafe extern "C" {
    pub(crate) fn tamp_reference_new(err: *mut *mut c_char) -> *mut Reference;
    pub(crate) fn tamp_reference_free(reference: *mut Reference);
    pub(crate) fn tamp_recording_start(
        parameters: *const *mut Tensor,
        count: usize,
        how: u8,
        reference: *const Reference,
        dtype: i8,
        err: *mut *mut c_char,
    ) -> *mut Recording;
    pub(crate) fn tamp_recording_differs(recording: *const Recording) -> u8;
    pub(crate) fn tamp_recording_stop(recording: *mut Recording, err: *mut *mut c_char);
    pub(crate) fn tamp_recording_count(recording: *const Recording) -> usize;
    pub(crate) fn tamp_recording_event(
        recording: *const Recording,
        index: usize,
        out: *mut RecordedEvent,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_recording_memory(
        recording: *const Recording,
        t: *const Tensor,
        err: *mut *mut c_char,
    ) -> i64;
    pub(crate) fn tamp_recording_saves(
        recording: *mut Recording,
        err: *mut *mut c_char,
    ) -> *mut SavedTensors;
    pub(crate) fn tamp_recording_saved_count(recording: *const Recording) -> usize;
    pub(crate) fn tamp_recording_saved(
        recording: *const Recording,
        index: usize,
        out: *mut SavedTensor,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_recording_free(recording: *mut Recording);

    pub(crate) fn tamp_name_begin(name: *const c_char, err: *mut *mut c_char) -> *mut Name;
    pub(crate) fn tamp_name_end(name: *mut Name);

    pub(crate) fn tamp_emulation_begin(
        how: *const Emulated,
        err: *mut *mut c_char,
    ) -> *mut Emulation;
    pub(crate) fn tamp_emulation_regions() -> u8;
    pub(crate) fn tamp_emulation_mark(
        emulation: *mut Emulation,
        tensors: *const *mut Tensor,
        count: usize,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_emulation_returned(emulation: *const Emulation) -> u8;
    pub(crate) fn tamp_emulation_end(emulation: *mut Emulation);

    pub(crate) fn tamp_exponents_count(
        counts: *const Tensor,
        gradients: *const CountedGradient,
        count: usize,
        rows: i64,
        scale: *const Tensor,
        err: *mut *mut c_char,
    ) -> *mut Tensor;
    pub(crate) fn tamp_history_record(
        history: *const Tensor,
        length: i64,
        row: i64,
        count: *mut Tensor,
        numbers: *const StepNumber,
        err: *mut *mut c_char,
    ) -> *mut Tensor;
}
