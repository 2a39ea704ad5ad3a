//! The C ABI of the shim: every declaration of `csrc/border/shim.h`, in the same order. What the functions and fields
//! mean is documented there. `tests/abi.rs` compares the two files.

use std::ffi::{c_char, c_void};

/// An `at::Tensor`, behind the pointers that tch uses.
pub(crate) use torch_sys::C_tensor as Tensor;

#[cfg(feature = "distributed")]
pub(crate) mod distributed;
#[cfg(feature = "insight")]
pub(crate) mod insight;

/// A count of the CPU memory that a thread allocates.
#[repr(C)]
pub(crate) struct Allocations {
    _opaque: [u8; 0],
}

/// An asynchronous copy of a number from a device to the host.
#[repr(C)]
pub(crate) struct Arrival {
    _opaque: [u8; 0],
}

/// A graph of CUDA.
#[repr(C)]
pub(crate) struct Graph {
    _opaque: [u8; 0],
}

pub(crate) const REDUCTION_FP16: u8 = 1;
pub(crate) const REDUCTION_BF16: u8 = 2;

pub(crate) const MATMUL_HIGHEST: u8 = 0;
pub(crate) const MATMUL_HIGH: u8 = 1;
pub(crate) const MATMUL_MEDIUM: u8 = 2;

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
    pub(crate) overrides: u32,
}

pub(crate) type AutocastSettle = unsafe extern "C" fn();

pub(crate) const OVERRIDE_OK: u8 = 0;
pub(crate) const OVERRIDE_UNKNOWN: u8 = 1;
pub(crate) const OVERRIDE_ALIASES: u8 = 2;
pub(crate) const OVERRIDE_WHOLE: u8 = 3;

pub(crate) const RUN_HALF: u8 = 0;
pub(crate) const RUN_F32: u8 = 1;
pub(crate) const RUN_COMPOSED: u8 = 2;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule {
    pub(crate) name: *const c_char,
    pub(crate) at_least: u64,
    pub(crate) below: u64,
    pub(crate) most_bytes: u64,
    pub(crate) run_as: u8,
}

pub(crate) const GRADIENT_REQUIRES_GRAD: u8 = 1;
pub(crate) const GRADIENT_STRIDED: u8 = 2;
pub(crate) const GRADIENT_SPARSE: u8 = 4;
pub(crate) const GRADIENT_OTHER_SHAPE: u8 = 8;
pub(crate) const GRADIENT_OTHER_DTYPE: u8 = 16;
pub(crate) const GRADIENT_SHARED: u8 = 32;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Gradient {
    pub(crate) parameter: usize,
    pub(crate) gradient: usize,
    pub(crate) memory: usize,
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
#[derive(Debug, Default)]
pub(crate) struct Stamp {
    pub(crate) memory: usize,
    pub(crate) view: u64,
    pub(crate) version: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ScaleRule {
    pub(crate) growth_factor: f64,
    pub(crate) backoff_factor: f64,
    pub(crate) growth_interval: i64,
    pub(crate) min_scale: f64,
    pub(crate) max_scale: f64,
    pub(crate) hysteresis: i64,
    pub(crate) tolerance: f64,
    pub(crate) consecutive: u8,
}

pub(crate) const TOLERANCE_HYSTERESIS: usize = 0;
pub(crate) const TOLERANCE_ITERATIONS: usize = 1;
pub(crate) const TOLERANCE_OVERFLOWS: usize = 2;

#[repr(C)]
pub(crate) struct ScaleUpdate {
    pub(crate) scale: *mut Tensor,
    pub(crate) tracker: *mut Tensor,
    pub(crate) tolerance_counts: *mut Tensor,
    pub(crate) found_infs: *const *mut Tensor,
    pub(crate) count: usize,
    pub(crate) rule: ScaleRule,
}

pub(crate) const LOSS_NONE: u8 = 0;
pub(crate) const LOSS_MEAN: u8 = 1;
pub(crate) const LOSS_SUM: u8 = 2;

#[repr(C)]
pub(crate) struct CrossEntropy {
    pub(crate) class_weights: *const Tensor,
    pub(crate) ignore_index: i64,
    pub(crate) label_smoothing: f64,
    pub(crate) soft_cap: f64,
    pub(crate) z_loss: f64,
    pub(crate) max_bytes: u64,
    pub(crate) reduction: u8,
}

pub(crate) const GELU: u8 = 0;
pub(crate) const GELU_TANH: u8 = 1;
pub(crate) const SILU: u8 = 2;
pub(crate) const SWIGLU: u8 = 3;

#[repr(C)]
pub(crate) struct Norm {
    pub(crate) shape: *const i64,
    pub(crate) weight: *const Tensor,
    pub(crate) bias: *const Tensor,
    pub(crate) eps: f64,
    pub(crate) dims: usize,
    pub(crate) is_rms: u8,
}

pub(crate) const OPTIM_ADAM: u8 = 0;
pub(crate) const OPTIM_ADAMW: u8 = 1;
pub(crate) const OPTIM_SGD: u8 = 2;
pub(crate) const OPTIM_ADAGRAD: u8 = 3;
pub(crate) const OPTIM_RMSPROP: u8 = 4;
pub(crate) const OPTIM_LION: u8 = 5;
pub(crate) const OPTIM_MUON: u8 = 6;
pub(crate) const OPTIM_NADAM: u8 = 7;
pub(crate) const OPTIM_ADAFACTOR: u8 = 8;

pub(crate) const OPTIM_AMSGRAD: u8 = 1;
pub(crate) const OPTIM_NESTEROV: u8 = 2;
pub(crate) const OPTIM_MAXIMIZE: u8 = 4;
pub(crate) const OPTIM_CENTERED: u8 = 8;
pub(crate) const OPTIM_MATCH_RMS_ADAMW: u8 = 16;
pub(crate) const OPTIM_DECOUPLED_WEIGHT_DECAY: u8 = 32;

pub(crate) const OPTIM_STATES: usize = 3;

pub(crate) const MASTER_NONE: u8 = 0;
pub(crate) const MASTER_FLOAT: u8 = 1;
pub(crate) const MASTER_REMAINDER: u8 = 2;
pub(crate) const MASTER_STOCHASTIC: u8 = 3;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct OptimOptions {
    pub(crate) lr: f64,
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) eps: f64,
    pub(crate) weight_decay: f64,
    pub(crate) momentum: f64,
    pub(crate) dampening: f64,
    pub(crate) lr_decay: f64,
    pub(crate) alpha: f64,
    pub(crate) ns_a: f64,
    pub(crate) ns_b: f64,
    pub(crate) ns_c: f64,
    pub(crate) momentum_decay: f64,
    pub(crate) beta2_decay: f64,
    pub(crate) eps2: f64,
    pub(crate) clip_threshold: f64,
    pub(crate) algorithm: u8,
    pub(crate) flags: u8,
    pub(crate) ns_steps: u8,
    pub(crate) rates: *mut Tensor,
}

pub(crate) const STATES_PLAIN: u8 = 0;
pub(crate) const STATES_BFLOAT16: u8 = 1;
pub(crate) const STATES_EIGHT_BIT: u8 = 2;

#[repr(C)]
pub(crate) struct OptimParameter {
    pub(crate) parameter: *mut Tensor,
    pub(crate) step: *mut Tensor,
    pub(crate) states: [*mut Tensor; OPTIM_STATES],
    pub(crate) master: *mut Tensor,
    pub(crate) stamp: *mut Stamp,
    pub(crate) seed: u64,
    pub(crate) options: u32,
    pub(crate) masters: u8,
    pub(crate) first_step: u8,
    pub(crate) complete: u8,
    pub(crate) many_steps: u8,
    pub(crate) kept_as: u8,
    pub(crate) elsewhere: u8,
}

#[repr(C)]
pub(crate) struct OptimScale {
    pub(crate) grad_scale: *mut Tensor,
    pub(crate) clip: *mut Tensor,
    pub(crate) found_inf: *mut Tensor,
}

pub(crate) const STEP_TAKEN: u8 = 0;
pub(crate) const STEP_LEFT_OUT: u8 = 1;
pub(crate) const STEP_REFUSED: u8 = 2;
pub(crate) const STEP_STALE: u8 = 3;
pub(crate) const STEP_INCOMPLETE: u8 = 4;

pub(crate) const STATE_LIKE: u8 = 0;
pub(crate) const STATE_CONTIGUOUS: u8 = 1;
pub(crate) const STATE_OF_BLOCKS: u8 = 2;
pub(crate) const STATE_OF_ROWS: u8 = 3;
pub(crate) const STATE_OF_COLUMNS: u8 = 4;
pub(crate) const STATE_OF_ONE: u8 = 5;

/// The node of a custom function in autograd's graph.
#[repr(C)]
pub(crate) struct Node {
    _opaque: [u8; 0],
}

pub(crate) type FunctionBackward = unsafe extern "C" fn(
    state: *mut c_void,
    node: *const Node,
    grad_outputs: *const *mut Tensor,
    outputs: usize,
    grad_inputs: *mut *mut Tensor,
    inputs: usize,
    err: *mut *mut c_char,
);

pub(crate) type FunctionTake = unsafe extern "C" fn(state: *mut c_void) -> *mut c_void;

pub(crate) type FunctionFree = unsafe extern "C" fn(what: *mut c_void);

pub(crate) const FUNCTION_MATERIALIZE_GRADS: u8 = 1;
pub(crate) const FUNCTION_ONCE_DIFFERENTIABLE: u8 = 2;
pub(crate) const FUNCTION_SAVES_VALUES: u8 = 4;

#[repr(C)]
pub(crate) struct Function {
    pub(crate) state: *mut c_void,
    pub(crate) backward: FunctionBackward,
    pub(crate) take_saved: FunctionTake,
    pub(crate) free_saved: FunctionFree,
    pub(crate) drop: FunctionFree,
    pub(crate) name: *const c_char,
    pub(crate) name_length: usize,
    pub(crate) flags: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FunctionInput {
    pub(crate) uses: usize,
    pub(crate) requires_grad: u8,
}

#[repr(C)]
pub(crate) struct Tensors {
    pub(crate) tensors: *const *mut Tensor,
    pub(crate) count: usize,
}

#[repr(C)]
pub(crate) struct FunctionCall {
    pub(crate) inputs: Tensors,
    pub(crate) infos: *const FunctionInput,
    pub(crate) saved: Tensors,
    pub(crate) dirty: Tensors,
    pub(crate) non_differentiable: Tensors,
    pub(crate) recorded: u8,
}

pub(crate) const GRAD_POSSIBLE: u8 = 0;
pub(crate) const GRAD_OUTPUT_UNDEFINED: u8 = 1;
pub(crate) const GRAD_OUTPUT_WITHOUT_GRAPH: u8 = 2;
pub(crate) const GRAD_OUTPUT_NOT_SCALAR: u8 = 3;
pub(crate) const GRAD_OUTPUT_NOT_REAL: u8 = 4;
pub(crate) const GRAD_GIVEN_UNDEFINED: u8 = 5;
pub(crate) const GRAD_GIVEN_SHAPE: u8 = 6;
pub(crate) const GRAD_GIVEN_DTYPE: u8 = 7;
pub(crate) const GRAD_INPUT_UNDEFINED: u8 = 8;
pub(crate) const GRAD_INPUT_WITHOUT_GRAD: u8 = 9;
pub(crate) const GRAD_INPUT_UNUSED: u8 = 10;

#[repr(C)]
pub(crate) struct GradCall {
    pub(crate) outputs: Tensors,
    pub(crate) grad_outputs: Tensors,
    pub(crate) inputs: Tensors,
    pub(crate) retain_graph: u8,
    pub(crate) create_graph: u8,
    pub(crate) allow_unused: u8,
}

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

#[allow(dead_code, reason = "only csrc/scale/spikes.cpp reads it")]
pub(crate) const SPIKES_TAKEN: u8 = 0;
#[allow(dead_code, reason = "only csrc/scale/spikes.cpp reads it")]
pub(crate) const SPIKES_IN_A_ROW: u8 = 1;
pub(crate) const SPIKES_FOUND: u8 = 2;
pub(crate) const SPIKES_NON_FINITE: u8 = 3;
#[allow(dead_code, reason = "only csrc/scale/spikes.cpp reads it")]
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

pub(crate) const SAVED_AS_GIVEN: u8 = 0;
pub(crate) const SAVED_HALF: u8 = 1;
pub(crate) const SAVED_FP8_ROWS: u8 = 2;
pub(crate) const SAVED_ON_HOST: u8 = 3;

/// A way in which the tensors are kept that autograd saves.
#[repr(C)]
pub(crate) struct SavedTensors {
    _opaque: [u8; 0],
}

/// The part of a thread's run in which they are kept so.
#[repr(C)]
pub(crate) struct SavedTensorsRegion {
    _opaque: [u8; 0],
}

pub(crate) type RunAgain = unsafe extern "C" fn(
    state: *mut c_void,
    inputs: *const *mut Tensor,
    count: usize,
    how: *const SavedTensors,
    err: *mut *mut c_char,
);

#[cfg(all(test, tamp_testing))]
pub(crate) const TESTING_TORCH_ERROR: u8 = 0;
#[cfg(all(test, tamp_testing))]
pub(crate) const TESTING_BAD_ALLOC: u8 = 1;
#[cfg(all(test, tamp_testing))]
pub(crate) const TESTING_INT: u8 = 2;
#[cfg(all(test, tamp_testing))]
pub(crate) const TESTING_OVERFLOW: u8 = 0;
#[cfg(all(test, tamp_testing))]
pub(crate) const TESTING_FREED: u8 = 1;
#[cfg(all(test, tamp_testing))]
pub(crate) const TESTING_UNDEFINED: u8 = 2;
#[cfg(all(test, tamp_testing))]
pub(crate) const TESTING_LEAK: u8 = 3;

#[cfg(all(test, tamp_testing))]
pub(crate) const TESTING_ENGINE_OF_LIBTORCH: u8 = 0;
#[cfg(all(test, tamp_testing))]
pub(crate) const TESTING_ENGINE_OF_OTHERS: u8 = 1;

unsafe extern "C" {
    pub(crate) fn tamp_string_free(text: *mut c_char);
    pub(crate) fn tamp_string_new(text: *const c_char) -> *mut c_char;

    pub(crate) fn tamp_cuda_is_linked() -> u8;
    pub(crate) fn tamp_libtorch_version() -> *const c_char;
    pub(crate) fn tamp_cuda_initialize(err: *mut *mut c_char);
    pub(crate) fn tamp_cuda_has_bf16(device: i8, err: *mut *mut c_char) -> u8;

    pub(crate) fn tamp_matmul_precision(precision: u8, err: *mut *mut c_char) -> u8;
    pub(crate) fn tamp_reduced_precision_reduction(allowed: u8, err: *mut *mut c_char) -> u8;
    pub(crate) fn tamp_arrival_new(source: *const Tensor, err: *mut *mut c_char) -> *mut Arrival;
    pub(crate) fn tamp_arrival_poll(
        arrival: *const Arrival,
        numbers: *mut f64,
        count: usize,
        err: *mut *mut c_char,
    ) -> u8;
    pub(crate) fn tamp_arrival_again(
        arrival: *mut Arrival,
        source: *const Tensor,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_arrival_wait(arrival: *const Arrival, err: *mut *mut c_char);
    pub(crate) fn tamp_arrival_copy(arrival: *const Arrival, err: *mut *mut c_char) -> *mut Tensor;
    pub(crate) fn tamp_arrival_free(arrival: *mut Arrival);

    pub(crate) fn tamp_autocast_read(state: *mut AutocastState, err: *mut *mut c_char);
    pub(crate) fn tamp_autocast_enter(
        next: *const AutocastState,
        outermost: u8,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_autocast_exit(previous: *const AutocastState, outermost: u8);
    pub(crate) fn tamp_autocast_clear_cache(err: *mut *mut c_char);
    pub(crate) fn tamp_regions_leave();
    pub(crate) fn tamp_regions_return();
    pub(crate) fn tamp_autocast_backward() -> i64;
    pub(crate) fn tamp_autocast_after_backward(settle: AutocastSettle);

    pub(crate) fn tamp_overrides_add(
        rules: *const Rule,
        count: usize,
        refused: *mut usize,
        problem: *mut u8,
        err: *mut *mut c_char,
    ) -> u32;

    pub(crate) fn tamp_gradients_inspect(
        parameters: *const *mut Tensor,
        count: usize,
        hold: u8,
        gradients: *mut Gradient,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_gradients_release(gradients: *const Gradient, count: usize);
    pub(crate) fn tamp_gradients_separate(
        parameters: *const *mut Tensor,
        count: usize,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_gradients_separate_leaves(loss: *const Tensor, err: *mut *mut c_char);
    pub(crate) fn tamp_leaves(
        loss: *const Tensor,
        parameters: *const *mut Tensor,
        count: usize,
        leaves: *mut *mut Tensor,
        room: usize,
        err: *mut *mut c_char,
    ) -> usize;
    pub(crate) fn tamp_leaf_count_additions(
        leaf: *const Tensor,
        err: *mut *mut c_char,
    ) -> *mut Tensor;
    pub(crate) fn tamp_gradients_drop(
        parameters: *const *mut Tensor,
        count: usize,
        narrows: u8,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_gradients_take(
        parameters: *const *mut Tensor,
        count: usize,
        gradients: *mut *mut Tensor,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_gradient_rest(
        parameter: *const Tensor,
        before: *const Tensor,
        err: *mut *mut c_char,
    ) -> *mut Tensor;
    pub(crate) fn tamp_backward(loss: *const Tensor, retain_graph: u8, err: *mut *mut c_char);
    pub(crate) fn tamp_gradients_add(
        parameters: *const *mut Tensor,
        gradients: *const *mut Tensor,
        count: usize,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_gradients_widen(
        parameters: *const *mut Tensor,
        count: usize,
        widened: *mut u8,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_gradients_narrow(
        parameters: *const *mut Tensor,
        count: usize,
        widened: *const u8,
        err: *mut *mut c_char,
    );

    pub(crate) fn tamp_sizes(
        tensor: *const Tensor,
        sizes: *mut i64,
        room: usize,
        err: *mut *mut c_char,
    ) -> usize;
    pub(crate) fn tamp_is_dense(tensor: *const Tensor, err: *mut *mut c_char) -> u8;
    pub(crate) fn tamp_overlapping(
        tensors: *const *mut Tensor,
        count: usize,
        one: *mut usize,
        other: *mut usize,
        err: *mut *mut c_char,
    ) -> u8;
    pub(crate) fn tamp_stamps_compare(
        parameters: *const *mut Tensor,
        count: usize,
        stamps: *const Stamp,
        changed: *mut u8,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_stamps_take(
        parameters: *const *mut Tensor,
        count: usize,
        stamps: *mut Stamp,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_stamps_have_moved(
        parameters: *const *mut Tensor,
        count: usize,
        stamps: *const Stamp,
        err: *mut *mut c_char,
    ) -> u8;
    pub(crate) fn tamp_memory_release(memory: usize);
    pub(crate) fn tamp_tensor_watch(watched: *const Tensor) -> usize;
    pub(crate) fn tamp_tensor_watched(watch: usize, err: *mut *mut c_char) -> *mut Tensor;

    pub(crate) fn tamp_gradients_unscale(
        parameters: *const *mut Tensor,
        count: usize,
        scale: *const Tensor,
        found_infs: *mut *mut Tensor,
        answers: *mut u8,
        devices: usize,
        options: u8,
        begun: *mut u8,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_gradients_norm(
        parameters: *const *mut Tensor,
        count: usize,
        norm_type: f64,
        scale: *const Tensor,
        found_inf: *mut *mut Tensor,
        answer: *mut u8,
        err: *mut *mut c_char,
    ) -> *mut Tensor;

    pub(crate) fn tamp_heap_keep() -> u8;

    pub(crate) fn tamp_number_new(
        value: f64,
        dtype: i8,
        device_type: i8,
        device_index: i8,
        err: *mut *mut c_char,
    ) -> *mut Tensor;
    pub(crate) fn tamp_number_set(number: *mut Tensor, value: f64, err: *mut *mut c_char);
    pub(crate) fn tamp_number_limit(number: *mut Tensor, most: f64, err: *mut *mut c_char);
    pub(crate) fn tamp_numbers_read(
        tensors: *const *mut Tensor,
        count: usize,
        values: *mut f64,
        len: usize,
        err: *mut *mut c_char,
    );

    pub(crate) fn tamp_any_nonzero(
        tensors: *const *mut Tensor,
        count: usize,
        err: *mut *mut c_char,
    ) -> u8;
    pub(crate) fn tamp_flags_join(
        flags: *const *mut Tensor,
        count: usize,
        err: *mut *mut c_char,
    ) -> *mut Tensor;
    pub(crate) fn tamp_scales_update(
        updates: *const ScaleUpdate,
        count: usize,
        err: *mut *mut c_char,
    );

    pub(crate) fn tamp_scaled(
        tensor: *const Tensor,
        factor: *const Tensor,
        err: *mut *mut c_char,
    ) -> *mut Tensor;
    pub(crate) fn tamp_all_finite(
        tensors: *const *mut Tensor,
        count: usize,
        err: *mut *mut c_char,
    ) -> *mut Tensor;

    pub(crate) fn tamp_targets_check(
        targets: *const Tensor,
        classes: i64,
        ignored: i64,
        err: *mut *mut c_char,
    ) -> i64;
    pub(crate) fn tamp_linear_cross_entropy(
        hidden: *const Tensor,
        weight: *const Tensor,
        bias: *const Tensor,
        targets: *const Tensor,
        options: *const CrossEntropy,
        err: *mut *mut c_char,
    ) -> *mut Tensor;

    pub(crate) fn tamp_activation_linear(
        xs: *const Tensor,
        activation: u8,
        weight: *const Tensor,
        bias: *const Tensor,
        err: *mut *mut c_char,
    ) -> *mut Tensor;
    pub(crate) fn tamp_norm_linear(
        xs: *const Tensor,
        norm: *const Norm,
        weight: *const Tensor,
        bias: *const Tensor,
        err: *mut *mut c_char,
    ) -> *mut Tensor;

    pub(crate) fn tamp_clip_grad_norm(
        parameters: *const *mut Tensor,
        count: usize,
        max_norm: f64,
        norm_type: f64,
        error_if_nonfinite: u8,
        is_finite: *mut u8,
        err: *mut *mut c_char,
    ) -> *mut Tensor;
    pub(crate) fn tamp_norms_join(
        norms: *const *mut Tensor,
        count: usize,
        norm_type: f64,
        err: *mut *mut c_char,
    ) -> *mut Tensor;
    pub(crate) fn tamp_clip_factor(
        norm: *const Tensor,
        max_norm: f64,
        err: *mut *mut c_char,
    ) -> *mut Tensor;
    pub(crate) fn tamp_clip_by_norm(
        parameters: *const *mut Tensor,
        count: usize,
        norm: *const Tensor,
        max_norm: f64,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_clip_grad_value(
        parameters: *const *mut Tensor,
        count: usize,
        max: f64,
        err: *mut *mut c_char,
    );

    pub(crate) fn tamp_optim_step(
        parameters: *const OptimParameter,
        count: usize,
        options: *const OptimOptions,
        scale: *const OptimScale,
        answers: *mut u8,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_master_join(
        parameter: *const Tensor,
        remainder: *const Tensor,
        err: *mut *mut c_char,
    ) -> *mut Tensor;
    pub(crate) fn tamp_master_remainder_of(
        master: *const Tensor,
        parameter: *const Tensor,
        err: *mut *mut c_char,
    ) -> *mut Tensor;
    pub(crate) fn tamp_master_numbers(
        master: *const Tensor,
        parameter: *const Tensor,
        err: *mut *mut c_char,
    ) -> *mut Tensor;
    pub(crate) fn tamp_masters_renew(
        parameters: *const *mut Tensor,
        masters: *const *mut Tensor,
        count: usize,
        err: *mut *mut c_char,
    );

    pub(crate) fn tamp_optim_states_new(
        parameters: *const *mut Tensor,
        count: usize,
        dtype: i8,
        shape: u8,
        value: f64,
        states: *mut *mut Tensor,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_masters_new(
        parameters: *const *mut Tensor,
        count: usize,
        masters: *mut *mut Tensor,
        err: *mut *mut c_char,
    );

    pub(crate) fn tamp_codes_decode(
        exp_avg: *const Tensor,
        exp_avg_sq: *const Tensor,
        exponents: *const Tensor,
        numbers: *mut *mut Tensor,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_codes_encode(
        exp_avg: *const Tensor,
        exp_avg_sq: *const Tensor,
        beta1: f64,
        beta2: f64,
        codes: *const *mut Tensor,
        err: *mut *mut c_char,
    );

    pub(crate) fn tamp_function_begin(
        inputs: *const *mut Tensor,
        count: usize,
        infos: *mut FunctionInput,
        err: *mut *mut c_char,
    ) -> u8;
    pub(crate) fn tamp_function_record(
        function: *const Function,
        call: *const FunctionCall,
        outputs: *const *mut Tensor,
        count: usize,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_function_saved_tensors(
        node: *const Node,
        saved: *mut *mut Tensor,
        count: usize,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_function_needs_input_grad(
        node: *const Node,
        input: usize,
        err: *mut *mut c_char,
    ) -> u8;
    pub(crate) fn tamp_grad(
        call: *const GradCall,
        gradients: *mut *mut Tensor,
        place: *mut usize,
        err: *mut *mut c_char,
    ) -> u8;

    pub(crate) fn tamp_elements_read(
        from: *const Tensor,
        first: i64,
        to: *mut u8,
        len: usize,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_elements_write(
        to: *mut Tensor,
        first: i64,
        from: *const u8,
        len: usize,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_rng_state(device_type: i8, index: i8, err: *mut *mut c_char) -> *mut Tensor;
    pub(crate) fn tamp_rng_set_state(
        device_type: i8,
        index: i8,
        state: *const Tensor,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_rng_check_state(
        device_type: i8,
        index: i8,
        state: *const Tensor,
        err: *mut *mut c_char,
    );

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
    pub(crate) fn tamp_allocations_count(err: *mut *mut c_char) -> *mut Allocations;
    pub(crate) fn tamp_allocations_end(count: *mut Allocations) -> u64;

    pub(crate) fn tamp_saved_tensors_prepare(err: *mut *mut c_char) -> *mut c_char;
    pub(crate) fn tamp_saved_tensors_new(how: u8, err: *mut *mut c_char) -> *mut SavedTensors;
    pub(crate) fn tamp_saved_tensors_current(err: *mut *mut c_char) -> *mut SavedTensors;
    pub(crate) fn tamp_saved_tensors_free(saved: *mut SavedTensors);
    pub(crate) fn tamp_saved_tensors_is_exact(saved: *const SavedTensors) -> u8;
    pub(crate) fn tamp_saved_tensors_enter(
        saved: *const SavedTensors,
        err: *mut *mut c_char,
    ) -> *mut SavedTensorsRegion;
    pub(crate) fn tamp_saved_tensors_leave(region: *mut SavedTensorsRegion);
    pub(crate) fn tamp_saved_tensors_recomputed(
        inputs: *const *mut Tensor,
        count: usize,
        state: *mut c_void,
        run: RunAgain,
        drop: FunctionFree,
        err: *mut *mut c_char,
    ) -> *mut SavedTensors;

    #[cfg(feature = "jit")]
    pub(crate) fn tamp_jit_set_autocast_mode(enabled: u8, err: *mut *mut c_char) -> u8;
    #[cfg(feature = "jit")]
    pub(crate) fn tamp_jit_freeze(
        file: *const u8,
        count: usize,
        err: *mut *mut c_char,
    ) -> *mut Tensor;

    pub(crate) fn tamp_graph_new(index: i8, err: *mut *mut c_char) -> *mut Graph;
    pub(crate) fn tamp_graph_free(graph: *mut Graph);
    pub(crate) fn tamp_graph_enter(graph: *mut Graph, err: *mut *mut c_char);
    pub(crate) fn tamp_graph_leave(graph: *mut Graph, err: *mut *mut c_char);
    pub(crate) fn tamp_graph_begin(graph: *mut Graph, err: *mut *mut c_char);
    pub(crate) fn tamp_graph_end(graph: *mut Graph, err: *mut *mut c_char);
    pub(crate) fn tamp_graph_replay(graph: *mut Graph, err: *mut *mut c_char);
    pub(crate) fn tamp_graph_write(
        to: *mut Tensor,
        numbers: *const f32,
        count: usize,
        err: *mut *mut c_char,
    );

    #[cfg(all(test, tamp_testing))]
    pub(crate) fn tamp_testing_fail_at(call: i64, kind: u8) -> i64;
    #[cfg(all(test, tamp_testing))]
    pub(crate) fn tamp_testing_fault(kind: u8);
    #[cfg(all(test, tamp_testing))]
    pub(crate) fn tamp_testing_as_other_device(enabled: u8);
    #[cfg(all(test, tamp_testing))]
    pub(crate) fn tamp_testing_engine(kind: u8);
    #[cfg(all(test, tamp_testing))]
    pub(crate) fn tamp_testing_inference_mode(enabled: u8);
}
