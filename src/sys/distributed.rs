//! The C ABI of the feature `distributed`: every declaration of `csrc/distributed/shim_distributed.h`, in the same
//! order.

use std::ffi::c_char;

use super::Tensor;

#[repr(C)]
pub(crate) struct Store {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct Group {
    _opaque: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupOptions {
    pub(crate) prefix: *const c_char,
    pub(crate) interface: *const c_char,
    pub(crate) host: *const c_char,
    pub(crate) rank: i64,
    pub(crate) size: i64,
    pub(crate) timeout_ms: i64,
    pub(crate) cuda: u8,
}

#[repr(C)]
pub(crate) struct Gathering {
    _opaque: [u8; 0],
}

pub(crate) const REDUCE_SUM: u8 = 0;
pub(crate) const REDUCE_MIN: u8 = 1;
pub(crate) const REDUCE_MAX: u8 = 2;

#[repr(C)]
pub(crate) struct Reducer {
    _opaque: [u8; 0],
}

pub(crate) const COMPRESS_NONE: u8 = 0;
pub(crate) const COMPRESS_FP16: u8 = 1;
pub(crate) const COMPRESS_BF16: u8 = 2;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReducerOptions {
    pub(crate) bucket_bytes: i64,
    pub(crate) compression: u8,
    pub(crate) divide_first: u8,
    pub(crate) find_unused_parameters: u8,
    pub(crate) gradient_as_bucket_view: u8,
}

pub(crate) const PARAMETERS_SAME: u8 = 0;
pub(crate) const PARAMETERS_CAST: u8 = 1;
pub(crate) const PARAMETERS_FROZEN: u8 = 2;
pub(crate) const PARAMETERS_RESHAPED: u8 = 3;

unsafe extern "C" {
    pub(crate) fn tamp_random_permutation(n: i64, seed: u64, err: *mut *mut c_char) -> *mut Tensor;
    pub(crate) fn tamp_random_seed(device_type: i8, index: i8, seed: u64, err: *mut *mut c_char);

    pub(crate) fn tamp_store_tcp(
        host: *const c_char,
        port: u32,
        serve: u8,
        listener: i64,
        timeout_ms: i64,
        err: *mut *mut c_char,
    ) -> *mut Store;
    pub(crate) fn tamp_store_in_process(timeout_ms: i64, err: *mut *mut c_char) -> *mut Store;
    pub(crate) fn tamp_store_set(
        store: *const Store,
        key: *const c_char,
        value: *const c_char,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_store_get(
        store: *const Store,
        key: *const c_char,
        timeout_ms: i64,
        err: *mut *mut c_char,
    ) -> *mut c_char;
    pub(crate) fn tamp_store_count(
        store: *const Store,
        key: *const c_char,
        err: *mut *mut c_char,
    ) -> i64;
    pub(crate) fn tamp_store_has(
        store: *const Store,
        key: *const c_char,
        err: *mut *mut c_char,
    ) -> u8;
    pub(crate) fn tamp_store_wait(
        store: *const Store,
        keys: *const *const c_char,
        count: usize,
        timeout_ms: i64,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_store_free(store: *mut Store);

    pub(crate) fn tamp_group_new(
        store: *const Store,
        options: *const GroupOptions,
        err: *mut *mut c_char,
    ) -> *mut Group;
    pub(crate) fn tamp_group_check_interface(
        interface: *const c_char,
        host: *const c_char,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_group_close(group: *const Group);
    pub(crate) fn tamp_group_free(group: *mut Group);
    pub(crate) fn tamp_group_unwritable(
        tensors: *const *mut Tensor,
        count: usize,
        err: *mut *mut c_char,
    ) -> i64;
    pub(crate) fn tamp_gathering_begin(
        group: *const Group,
        bytes: *const u8,
        len: usize,
        err: *mut *mut c_char,
    ) -> *mut Gathering;
    pub(crate) fn tamp_gathering_finish(
        gathering: *const Gathering,
        all: *mut u8,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_gathering_free(gathering: *mut Gathering);
    pub(crate) fn tamp_group_all_reduce(
        group: *const Group,
        t: *mut Tensor,
        op: u8,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_group_broadcast(
        group: *const Group,
        t: *mut Tensor,
        root: i64,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_group_all_gather(
        group: *const Group,
        all: *mut Tensor,
        t: *const Tensor,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_group_reduce_scatter(
        group: *const Group,
        part: *mut Tensor,
        all: *const Tensor,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_group_monitored_barrier(
        group: *const Group,
        timeout_ms: i64,
        err: *mut *mut c_char,
    );

    pub(crate) fn tamp_reducer_new(
        group: *const Group,
        parameters: *const *mut Tensor,
        names: *const *const c_char,
        count: usize,
        options: *const ReducerOptions,
        err: *mut *mut c_char,
    ) -> *mut Reducer;
    pub(crate) fn tamp_reducer_free(reducer: *mut Reducer);
    pub(crate) fn tamp_reducer_parameters(
        reducer: *const Reducer,
        index: *mut usize,
        err: *mut *mut c_char,
    ) -> u8;
    pub(crate) fn tamp_reducer_may_rebuild(reducer: *const Reducer, err: *mut *mut c_char) -> u8;
    pub(crate) fn tamp_reducer_before_forward(
        reducer: *mut Reducer,
        sync: u8,
        err: *mut *mut c_char,
    ) -> u8;
    pub(crate) fn tamp_reducer_can_undo(reducer: *const Reducer, err: *mut *mut c_char) -> u8;
    pub(crate) fn tamp_reducer_before_backward(
        reducer: *mut Reducer,
        loss: *const Tensor,
        agreement: *const Gathering,
        err: *mut *mut c_char,
    );
    pub(crate) fn tamp_reducer_after_backward(reducer: *mut Reducer, err: *mut *mut c_char);
    pub(crate) fn tamp_reducer_repeated(reducer: *const Reducer, err: *mut *mut c_char) -> i64;
    pub(crate) fn tamp_group_broadcast_all(
        group: *const Group,
        tensors: *const *mut Tensor,
        count: usize,
        root: i64,
        err: *mut *mut c_char,
    );

    pub(crate) fn tamp_signals_catch(err: *mut *mut c_char);
    pub(crate) fn tamp_signals_release();
    pub(crate) fn tamp_signals_caught() -> i64;
    pub(crate) fn tamp_process_signal(process: i64, signal: i64, err: *mut *mut c_char);
    pub(crate) fn tamp_process_end_with(parent: i64) -> i64;
}
