//! Stores and process groups of c10d.

use std::ffi::{CStr, CString};
use std::os::fd::{IntoRawFd, OwnedFd};
use std::ptr;
use std::time::Duration;

use tch::{Device, Tensor};

use super::{call, given, place, pointer, pointers};
use crate::error::{Error, Result, VariableChange};
use crate::sys::distributed as sys;

/// A `c10d::Store`.
#[derive(Debug)]
pub(crate) struct Store(*mut sys::Store);

// SAFETY: c10d's stores are not bound to a thread.
unsafe impl Send for Store {}
// SAFETY: TCPStore and HashStore lock a mutex of their own in every call.
unsafe impl Sync for Store {}

impl Store {
    /// Connects to the store at this address.
    pub(crate) fn connect(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        Self::tcp(host, port, None, false, timeout)
    }

    /// Serves a store on this port of all interfaces.
    pub(crate) fn serve(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        Self::tcp(host, port, None, true, timeout)
    }

    /// Serves a store on a listening socket, whose address is given.
    pub(crate) fn serve_on(
        listener: OwnedFd,
        host: &str,
        port: u16,
        timeout: Duration,
    ) -> Result<Self> {
        Self::tcp(host, port, Some(listener), true, timeout)
    }

    fn tcp(
        host: &str,
        port: u16,
        listener: Option<OwnedFd>,
        serve: bool,
        timeout: Duration,
    ) -> Result<Self> {
        let (host, timeout) = (text("host", host)?, milliseconds(timeout));
        let listener = listener.map_or(-1, |listener| i64::from(listener.into_raw_fd()));
        // SAFETY: `host` is a C string that outlives the call, the shim takes ownership of the socket, which nothing
        // else owns any more, and `err` is valid for a write.
        let new = |err| unsafe {
            sys::tamp_store_tcp(host.as_ptr(), port.into(), serve.into(), listener, timeout, err)
        };
        call(new).map(Self)
    }

    /// A store for the threads of this process.
    pub(crate) fn in_process(timeout: Duration) -> Result<Self> {
        // SAFETY: `err` is valid for a write.
        call(|err| unsafe { sys::tamp_store_in_process(milliseconds(timeout), err) }).map(Self)
    }

    /// Sets a key to a text.
    pub(crate) fn set(&self, key: &str, value: &str) -> Result<()> {
        let (key, value) = (text("key", key)?, text("value", value)?);
        // SAFETY: the store is alive, `key` and `value` are C strings, and `err` is valid for a write.
        call(|err| unsafe { sys::tamp_store_set(self.0, key.as_ptr(), value.as_ptr(), err) })
    }

    /// Waits for a key, and returns its text.
    pub(crate) fn get(&self, key: &str, timeout: Duration) -> Result<String> {
        let key = text("key", key)?;
        // SAFETY: the store is alive, `key` is a C string, and `err` is valid for a write.
        let value = call(|err| unsafe {
            sys::tamp_store_get(self.0, key.as_ptr(), milliseconds(timeout), err)
        })?;
        // SAFETY: without an error, the shim returns a NUL-terminated string.
        let text = unsafe { CStr::from_ptr(value) }.to_string_lossy().into_owned();
        // SAFETY: the string came from malloc, and is not used any more.
        unsafe { crate::sys::tamp_string_free(value) };
        Ok(text)
    }

    /// Adds 1 to the number of a key, which begins with 0, and returns the sum.
    pub(crate) fn count(&self, key: &str) -> Result<i64> {
        let key = text("key", key)?;
        // SAFETY: the store is alive, `key` is a C string, and `err` is valid for a write.
        call(|err| unsafe { sys::tamp_store_count(self.0, key.as_ptr(), err) })
    }

    /// Returns whether a key is set.
    pub(crate) fn has(&self, key: &str) -> Result<bool> {
        let key = text("key", key)?;
        // SAFETY: the store is alive, `key` is a C string, and `err` is valid for a write.
        call(|err| unsafe { sys::tamp_store_has(self.0, key.as_ptr(), err) }).map(|has| has != 0)
    }

    /// Waits for all of these keys.
    pub(crate) fn wait(&self, keys: &[String], timeout: Duration) -> Result<()> {
        let owned: Vec<_> = keys.iter().map(|key| text("key", key)).collect::<Result<_>>()?;
        let keys: Vec<_> = owned.iter().map(|key| key.as_ptr()).collect();
        // SAFETY: the store is alive, `keys` has as many C strings as is said, and `err` is valid for a write.
        call(|err| unsafe {
            let (keys, count) = (keys.as_ptr(), keys.len());
            sys::tamp_store_wait(self.0, keys, count, milliseconds(timeout), err)
        })
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: the shim made the store, and it is not used any more.
        unsafe { sys::tamp_store_free(self.0) };
    }
}

/// How a reduction combines the numbers of the ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reduction {
    Sum,
    Min,
    Max,
}

impl Reduction {
    fn code(self) -> u8 {
        match self {
            Self::Sum => sys::REDUCE_SUM,
            Self::Min => sys::REDUCE_MIN,
            Self::Max => sys::REDUCE_MAX,
        }
    }
}

/// A member of a group, and where it listens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member<'a> {
    pub(crate) prefix: &'a str,
    pub(crate) interface: Option<&'a str>,
    pub(crate) host: Option<&'a str>,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) timeout: Duration,
    /// Whether the group communicates CUDA tensors, too.
    pub(crate) cuda: bool,
}

/// Returns an error if groups cannot use the interface or, without one, the address of the host.
pub(crate) fn check_interface(interface: Option<&str>, host: Option<&str>) -> Result<()> {
    let interface = interface.map(|name| text("interface", name)).transpose()?;
    let host = host.map(|host| text("host", host)).transpose()?;
    let pointer = |text: &Option<CString>| text.as_deref().map_or(ptr::null(), CStr::as_ptr);
    // SAFETY: both are C strings that outlive the call, or null, and `err` is valid for a write.
    call(|err| unsafe { sys::tamp_group_check_interface(pointer(&interface), pointer(&host), err) })
}

/// A `c10d::ProcessGroup`.
#[derive(Debug)]
pub(crate) struct Group(*mut sys::Group);

// SAFETY: process groups are not bound to a thread.
unsafe impl Send for Group {}
// SAFETY: `ProcessGroup::begin` lets one thread at a time call the collectives of a group. The group of a distributed
// model is used by its passes alone, which have an exclusive borrow of the model. Threads of libtorch begin its
// all-reduces, and may still do so while a pass that has failed closes the group: the shim locks a mutex in both.
unsafe impl Sync for Group {}

impl Group {
    /// Forms a group with the other ranks.
    pub(crate) fn new(store: &Store, member: &Member<'_>) -> Result<Self> {
        let prefix = text("name", member.prefix)?;
        let interface = member.interface.map(|name| text("interface", name)).transpose()?;
        let host = member.host.map(|host| text("host", host)).transpose()?;
        let options = sys::GroupOptions {
            prefix: prefix.as_ptr(),
            interface: interface.as_deref().map_or(ptr::null(), CStr::as_ptr),
            host: host.as_deref().map_or(ptr::null(), CStr::as_ptr),
            rank: member.rank as i64,
            size: member.size as i64,
            timeout_ms: milliseconds(member.timeout),
            cuda: member.cuda.into(),
        };
        // SAFETY: the store is alive, the options' strings outlive the call, and `err` is valid for a write.
        call(|err| unsafe { sys::tamp_group_new(store.0, &options, err) }).map(Self)
    }

    /// Begins to gather the bytes of all ranks, of which there are `size`.
    pub(crate) fn gather(&self, bytes: &[u8], size: usize) -> Result<Gathering> {
        // SAFETY: the group is alive, `bytes` has as many elements as is said, and `err` is valid for a write.
        let begun = call(|err| unsafe {
            sys::tamp_gathering_begin(self.0, bytes.as_ptr(), bytes.len(), err)
        });
        begun.map(|handle| Gathering { handle, bytes: bytes.len() * size })
    }

    pub(crate) fn all_reduce(&self, tensor: &Tensor, reduction: Reduction) -> Result<()> {
        // SAFETY: the group and the tensor are alive, and `err` is valid for a write.
        call(|err| unsafe {
            sys::tamp_group_all_reduce(self.0, pointer(tensor), reduction.code(), err)
        })
    }

    pub(crate) fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<()> {
        // SAFETY: the group and the tensor are alive, and `err` is valid for a write.
        call(|err| unsafe { sys::tamp_group_broadcast(self.0, pointer(tensor), root as i64, err) })
    }

    pub(crate) fn all_gather(&self, all: &Tensor, tensor: &Tensor) -> Result<()> {
        // SAFETY: the group and both tensors are alive, and `err` is valid for a write.
        call(|err| unsafe {
            sys::tamp_group_all_gather(self.0, pointer(all), pointer(tensor), err)
        })
    }

    pub(crate) fn reduce_scatter(&self, part: &Tensor, all: &Tensor) -> Result<()> {
        // SAFETY: the group and both tensors are alive, and `err` is valid for a write.
        call(|err| unsafe {
            sys::tamp_group_reduce_scatter(self.0, pointer(part), pointer(all), err)
        })
    }

    /// Overwrites all tensors by those of one rank.
    pub(crate) fn broadcast_all(&self, tensors: &[Tensor], root: usize) -> Result<()> {
        let tensors = pointers(tensors);
        // SAFETY: the group and the tensors are alive, and `err` is valid for a write.
        call(|err| unsafe {
            let (tensors, count) = (tensors.as_ptr(), tensors.len());
            sys::tamp_group_broadcast_all(self.0, tensors, count, root as i64, err)
        })
    }

    /// Closes the connections, whatever else uses the group.
    pub(crate) fn close(&self) {
        // SAFETY: the group is alive.
        unsafe { sys::tamp_group_close(self.0) };
    }

    pub(crate) fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        // SAFETY: the group is alive, and `err` is valid for a write.
        call(|err| unsafe { sys::tamp_group_monitored_barrier(self.0, milliseconds(timeout), err) })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: the shim made the group, and it is not used any more.
        unsafe { sys::tamp_group_free(self.0) };
    }
}

/// Returns the index of the first of these strided tensors of which elements share memory, so that a result cannot be
/// written to it.
pub(crate) fn unwritable(tensors: &[Tensor]) -> Result<Option<usize>> {
    let tensors = pointers(tensors);
    // SAFETY: the tensors are alive, there are as many as is said, and `err` is valid for a write.
    let index =
        call(|err| unsafe { sys::tamp_group_unwritable(tensors.as_ptr(), tensors.len(), err) })?;
    Ok(usize::try_from(index).ok())
}

/// Bytes that the ranks of a group are gathering.
#[derive(Debug)]
pub(crate) struct Gathering {
    handle: *mut sys::Gathering,
    /// The number of bytes of all ranks.
    bytes: usize,
}

impl Gathering {
    /// Blocks until all ranks have given their bytes, and returns them, one rank's after the other's.
    pub(crate) fn finish(&self) -> Result<Vec<u8>> {
        let mut all = vec![0; self.bytes];
        // SAFETY: the gathering is alive, `all` has room for the bytes of all ranks, and `err` is valid for a write.
        call(|err| unsafe { sys::tamp_gathering_finish(self.handle, all.as_mut_ptr(), err) })?;
        Ok(all)
    }
}

impl Drop for Gathering {
    fn drop(&mut self) {
        // SAFETY: the shim made the gathering, and it is not used any more. The reducer and libtorch's threads own what
        // they use of it.
        unsafe { sys::tamp_gathering_free(self.handle) };
    }
}

/// The dtype in which gradients are communicated instead of their own.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Compression {
    None,
    Fp16,
    Bf16,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct ReducerOptions {
    /// PyTorch's default if it is zero.
    pub(crate) bucket_bytes: i64,
    pub(crate) compression: Compression,
    pub(crate) divide_first: bool,
    pub(crate) find_unused_parameters: bool,
    pub(crate) gradient_as_bucket_view: bool,
}

/// A `c10d::Reducer`.
#[derive(Debug)]
pub(crate) struct Reducer(*mut sys::Reducer);

// SAFETY: c10d's reducer is not bound to a thread, and locks a mutex of its own where autograd's threads call it.
unsafe impl Send for Reducer {}

impl Reducer {
    /// Averages the gradients of the parameters over a group.
    pub(crate) fn new(
        group: &Group,
        parameters: &[(String, Tensor)],
        options: &ReducerOptions,
    ) -> Result<Self> {
        let names: Vec<_> =
            parameters.iter().map(|(name, _)| text("name", name)).collect::<Result<_>>()?;
        let names: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        let tensors = pointers(parameters.iter().map(|(_, tensor)| tensor));
        let options = sys::ReducerOptions {
            bucket_bytes: options.bucket_bytes,
            compression: match options.compression {
                Compression::None => sys::COMPRESS_NONE,
                Compression::Fp16 => sys::COMPRESS_FP16,
                Compression::Bf16 => sys::COMPRESS_BF16,
            },
            divide_first: options.divide_first.into(),
            find_unused_parameters: options.find_unused_parameters.into(),
            gradient_as_bucket_view: options.gradient_as_bucket_view.into(),
        };
        // SAFETY: the group, the tensors and the names are alive, both arrays have as many elements as is said, and
        // `err` is valid for a write.
        call(|err| unsafe {
            let (tensors, count) = (tensors.as_ptr(), tensors.len());
            sys::tamp_reducer_new(group.0, tensors, names.as_ptr(), count, &options, err)
        })
        .map(Self)
    }

    /// Returns the first parameter that has changed, by its index.
    pub(crate) fn changed(&self) -> Result<Option<(usize, VariableChange)>> {
        let mut index = 0;
        // SAFETY: the reducer is alive, and `index` and `err` are valid for a write.
        let changed = call(|err| unsafe { sys::tamp_reducer_parameters(self.0, &mut index, err) })?;
        Ok(match changed {
            sys::PARAMETERS_SAME => None,
            sys::PARAMETERS_CAST => Some((index, VariableChange::Cast)),
            sys::PARAMETERS_FROZEN => Some((index, VariableChange::Frozen)),
            sys::PARAMETERS_RESHAPED => Some((index, VariableChange::Reshaped)),
            code => return Err(Error::Torch(format!("the shim returned {code}"))),
        })
    }

    /// Returns whether the next forward pass may communicate.
    pub(crate) fn may_rebuild(&self) -> Result<bool> {
        // SAFETY: the reducer is alive, and `err` is valid for a write.
        call(|err| unsafe { sys::tamp_reducer_may_rebuild(self.0, err) }).map(|may| may != 0)
    }

    /// Returns whether autograd records the forward pass.
    pub(crate) fn before_forward(&self, sync: bool) -> Result<bool> {
        // SAFETY: the reducer is alive, and `err` is valid for a write.
        call(|err| unsafe { sys::tamp_reducer_before_forward(self.0, sync.into(), err) })
            .map(|recorded| recorded != 0)
    }

    /// Returns whether the next backward pass can be undone by removing the gradients of all parameters.
    pub(crate) fn can_undo(&self) -> Result<bool> {
        // SAFETY: the reducer is alive, and `err` is valid for a write.
        call(|err| unsafe { sys::tamp_reducer_can_undo(self.0, err) }).map(|can| can != 0)
    }

    /// If an agreement is given, nothing is averaged before all ranks have given their bytes, and nothing at all if
    /// these differ.
    pub(crate) fn before_backward(
        &self,
        loss: &Tensor,
        agreement: Option<&Gathering>,
    ) -> Result<()> {
        let agreement = agreement.map_or(ptr::null(), |agreement| agreement.handle.cast_const());
        // SAFETY: the reducer, the tensor and the agreement are alive, and `err` is valid for a write.
        call(|err| unsafe {
            sys::tamp_reducer_before_backward(self.0, loss.as_ptr(), agreement, err)
        })
    }

    pub(crate) fn after_backward(&self) -> Result<()> {
        // SAFETY: the reducer is alive, and `err` is valid for a write.
        call(|err| unsafe { sys::tamp_reducer_after_backward(self.0, err) })
    }

    /// A parameter that received several gradients in the backward pass.
    pub(crate) fn repeated(&self) -> Result<Option<usize>> {
        // SAFETY: the reducer is alive, and `err` is valid for a write.
        let index = call(|err| unsafe { sys::tamp_reducer_repeated(self.0, err) })?;
        Ok(usize::try_from(index).ok())
    }
}

impl Drop for Reducer {
    fn drop(&mut self) {
        // SAFETY: the shim made the reducer, and it is not used any more.
        unsafe { sys::tamp_reducer_free(self.0) };
    }
}

fn text(name: &'static str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::InvalidArgument {
        name,
        problem: format!("is {text:?}, but must have no NUL character"),
    })
}

/// c10d takes whole milliseconds, and passes them on as a C `int`.
fn milliseconds(timeout: Duration) -> i64 {
    const LONGEST: i64 = i32::MAX as i64;
    i64::try_from(timeout.as_millis()).map_or(LONGEST, |timeout| timeout.clamp(1, LONGEST))
}

/// Returns the order of `torch.randperm(n)` with a new generator of this seed.
pub(crate) fn random_permutation(n: i64, seed: u64) -> Result<Tensor> {
    // SAFETY: takes two numbers, and `err` is valid for a write.
    given(call(|err| unsafe { sys::tamp_random_permutation(n, seed, err) })?)
}

/// Seeds the default random number generator of one device.
pub(crate) fn seed(device: Device, seed: u64) -> Result<()> {
    let (device_type, index) = place(device)?;
    // SAFETY: takes three numbers, and `err` is valid for a write.
    call(|err| unsafe { sys::tamp_random_seed(device_type, index, seed, err) })
}
