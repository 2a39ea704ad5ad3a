//! What `Device::Cuda` is in this process, its counters, and the failures that can be planted: on the simulated GPUs of
//! `testbench/simulated_cuda/`, on `testbench/null_cuda/`, and in part on real GPUs.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::fmt::Debug;
use std::fs::OpenOptions;
use std::io::Write;
use std::panic::Location;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The simulated GPUs. One test at a time holds them, because the counters are those of the whole process.
#[derive(Debug)]
pub struct Simulation {
    counter: extern "C" fn(i32, i32) -> i64,
    reset: extern "C" fn(),
    fail_allocation: extern "C" fn(i64) -> i64,
    _alone: MutexGuard<'static, ()>,
}

/// What the devices did between two points.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Kernel launches, including copies between devices.
    pub launches: i64,
    /// Synchronizations: how often the host waited for a device.
    pub host_syncs: i64,
    /// Allocations of device memory.
    pub allocations: i64,
    /// The peak of the allocated bytes, minus those that were allocated at the start.
    pub peak_bytes: i64,
}

impl Counts {
    /// Adds a line of JSON: the test, the place that counts and how often it had before, and the counts. A test counts
    /// the same parts in the same order on all devices, so the lines of two runs can be compared.
    fn record(self, file: &Path, place: &Location<'_>) {
        thread_local! {
            static BEFORE: RefCell<BTreeMap<String, usize>> = RefCell::default();
        }
        let place = format!("{}:{}", place.file(), place.line());
        let nth = BEFORE.with_borrow_mut(|before| {
            let times = before.entry(place.clone()).or_default();
            *times += 1;
            *times
        });
        let test = std::thread::current().name().unwrap_or_default().to_owned();
        let Self { launches, host_syncs, allocations, peak_bytes } = self;
        let numbers = [launches, host_syncs, allocations, peak_bytes];
        let line = format!("{}\n", serde_json::json!([test, place, nth, numbers]));
        let mut file = OpenOptions::new().append(true).create(true).open(file).expect("a file");
        file.write_all(line.as_bytes()).expect("the counts can be written");
    }
}

const LAUNCHES: i32 = 0;
const HOST_SYNCS: i32 = 1;
const ALLOCATIONS: i32 = 2;
const BYTES: i32 = 3;
const PEAK_BYTES: i32 = 4;

/// Stands for all devices together.
const ALL: i32 = -1;

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, symbol: *const c_char) -> *mut c_void;
}

/// The address of a function of `simulated_cuda.h`; null if nothing is counted.
fn symbol(name: &CStr) -> *mut c_void {
    // SAFETY: the name ends with a NUL, and a null handle, RTLD_DEFAULT, searches all loaded libraries.
    unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) }
}

/// Whether a library of this process defines the function.
pub fn is_defined(name: &CStr) -> bool {
    !symbol(name).is_null()
}

/// What `Device::Cuda` is in this process, as `simulated_cuda.h` numbers it; `None` if its devices are not counted.
fn kind() -> Option<i32> {
    if !cfg!(target_os = "linux") {
        return None;
    }
    let kind = symbol(c"simulated_cuda_kind");
    if kind.is_null() {
        return None;
    }
    // SAFETY: the symbol is that of testbench/simulated_cuda/simulated_cuda.h, which declares it with this type.
    let kind = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> i32>(kind) };
    Some(kind())
}

const MODEL: i32 = 0;
const REAL_HOST_CODE: i32 = 1;

/// Whether launches, synchronizations and memory are counted: on simulated GPUs, on null CUDA, and on a real GPU with
/// `testbench/real_cuda/`.
pub fn is_counted() -> bool {
    kind().is_some()
}

/// Whether the results on a GPU are the bits of the CPU's kernels: on simulated GPUs and on null CUDA.
pub fn rounds_as_the_cpu() -> bool {
    matches!(kind(), Some(MODEL | REAL_HOST_CODE))
}

/// Whether work goes on after its launch has returned: on real GPUs.
pub fn takes_time() -> bool {
    !rounds_as_the_cpu()
}

/// Whether a model takes the place of libtorch_cuda's host code, as on simulated GPUs.
pub fn is_model() -> bool {
    kind() == Some(MODEL)
}

/// Whether the host code is libtorch's own, and its libraries, such as cuDNN, are stand-ins or missing: on null CUDA.
pub fn lacks_libraries() -> bool {
    kind() == Some(REAL_HOST_CODE)
}

/// Synchronizes with the device if copies arrive only then. To be called before a loop that polls for an answer.
pub fn let_answers_come(device: tch::Device) {
    let is_late = std::env::var("SIMULATED_CUDA_LAG").is_ok_and(|lag| lag == "never");
    if let (tch::Device::Cuda(index), true) = (device, is_late) {
        tch::Cuda::synchronize(index as i64);
    }
}

impl Simulation {
    /// The simulated GPUs, for the calling test alone. If there are none, returns `None` and prints the reason.
    pub fn find() -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        if !is_counted() {
            let required = super::is_set("TCH_AMP_REQUIRE_SIMULATION");
            assert!(
                !required,
                "simulated GPUs are required (TCH_AMP_REQUIRE_SIMULATION), but CUDA is not simulated"
            );
            super::skipped(
                "counting needs the simulated GPUs: run `cargo xtask simulate cargo test`",
            );
            return None;
        }
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the symbols are those of testbench/simulated_cuda/simulated_cuda.h, which declares them with these types.
        // All three are defined in one library, which is loaded because the first was found.
        let simulation = unsafe {
            use std::mem::transmute;
            Self {
                counter: transmute::<*mut c_void, extern "C" fn(i32, i32) -> i64>(symbol(
                    c"simulated_cuda_counter",
                )),
                reset: transmute::<*mut c_void, extern "C" fn()>(symbol(c"simulated_cuda_reset")),
                fail_allocation: transmute::<*mut c_void, extern "C" fn(i64) -> i64>(symbol(
                    c"simulated_cuda_fail_allocation",
                )),
                _alone: alone,
            }
        };
        simulation.fail_allocation(0);
        Some(simulation)
    }

    /// Runs `f` and counts what it made all devices do. With `TCH_AMP_COUNTS`, adds a line with the counts to that file.
    #[track_caller]
    pub fn count<T>(&self, f: impl FnOnce() -> T) -> (T, Counts) {
        (self.reset)();
        let read = |counter| (self.counter)(ALL, counter);
        let before = read(BYTES);
        let out = f();
        let counts = Counts {
            launches: read(LAUNCHES),
            host_syncs: read(HOST_SYNCS),
            allocations: read(ALLOCATIONS),
            peak_bytes: read(PEAK_BYTES) - before,
        };
        if let Some(file) = std::env::var_os("TCH_AMP_COUNTS") {
            counts.record(Path::new(&file), Location::caller());
        }
        (out, counts)
    }

    /// Makes each allocation of `call` fail in turn. Each time, `call` gets a new state from `prepare`, and `check` the
    /// number of the allocation, that state and the error. At last no allocation is left, and `call` must succeed.
    /// Returns how many have failed.
    pub fn fail_each<S, T, E: Debug>(
        &self,
        mut prepare: impl FnMut() -> S,
        mut call: impl FnMut(&mut S) -> Result<T, E>,
        mut check: impl FnMut(i64, S, E),
    ) -> i64 {
        let mut n = 1;
        loop {
            let mut state = prepare();
            self.fail_allocation(n);
            let result = call(&mut state);
            if self.fail_allocation(0) > 0 {
                result.unwrap_or_else(|error| panic!("no allocation has failed, but: {error:?}"));
                return n - 1;
            }
            let Err(error) = result else { panic!("allocation {n} has failed, and nothing else") };
            check(n, state, error);
            n += 1;
        }
    }

    /// Makes the `n`-th allocation of device memory from now on fail, on any device and any thread; zero cancels the
    /// planted failure. Returns how many allocations were left before the last planted failure: zero if it has
    /// happened.
    pub fn fail_allocation(&self, n: i64) -> i64 {
        (self.fail_allocation)(n)
    }
}

impl Drop for Simulation {
    fn drop(&mut self) {
        self.fail_allocation(0);
    }
}
