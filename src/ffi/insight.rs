//! Recordings of operators, and names for what a thread runs.

use std::ffi::{CStr, CString};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use tch::{Kind, Tensor};

use super::{SavedTensors, call, dtype_code, kind_of, pointers, saved_tensors};
use crate::error::{Error, Result};
use crate::sys::insight as sys;

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventKind {
    Operator,
    /// The work of the autograd engine for a backward node: it runs it, and adds up or casts its results.
    Engine,
    /// A backward node.
    Node,
    /// A stretch that the program named.
    Name,
}

/// How an operator used a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Usage {
    Read,
    Write,
    /// It returned a view of memory that it only read.
    View,
    /// It wrote to an input whose former numbers do not matter.
    Overwrite,
}

/// The numbers in a tensor, where they were counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Numbers {
    pub(crate) positive_infinite: i64,
    pub(crate) negative_infinite: i64,
    pub(crate) nan: i64,
    /// The largest finite absolute value.
    pub(crate) largest: f64,
}

/// A tensor of an event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordedTensor {
    /// The number of its memory within the recording.
    pub(crate) memory: Option<u64>,
    /// Its place among the parameters.
    pub(crate) parameter: Option<usize>,
    /// The place of its first number in the memory.
    pub(crate) offset: i64,
    /// How often it was written, as autograd counts.
    pub(crate) version: i64,
    pub(crate) elements: i64,
    pub(crate) kind: Option<Kind>,
    pub(crate) numbers: Option<Numbers>,
    pub(crate) usage: Usage,
    /// The first sizes.
    pub(crate) sizes: [i64; sys::MOST_SIZES],
    pub(crate) dims: usize,
    /// The number of its dtype in libtorch.
    pub(crate) dtype: i8,
    pub(crate) element_bytes: i64,
    /// The number of its device's type in libtorch, and the index.
    pub(crate) device: (i8, i8),
}

impl RecordedTensor {
    /// The sizes, of which there are at most eight.
    pub(crate) fn sizes(&self) -> &[i64] {
        &self.sizes[..self.dims.min(sys::MOST_SIZES)]
    }

    pub(crate) fn bytes(&self) -> i64 {
        self.elements.saturating_mul(self.element_bytes)
    }
}

/// An operator, a backward node, or a named stretch.
#[derive(Clone, Debug)]
pub(crate) struct RecordedEvent {
    pub(crate) kind: EventKind,
    pub(crate) name: String,
    pub(crate) inputs: Vec<RecordedTensor>,
    pub(crate) outputs: Vec<RecordedTensor>,
    /// The event in which it ran.
    pub(crate) parent: Option<usize>,
    /// Its place in the order in which events ended.
    pub(crate) ended: Option<u64>,
    pub(crate) sequence: i64,
    pub(crate) forward_thread: u64,
    /// The largest absolute value of the same operator in f32, if its results overflowed and it could be repeated.
    pub(crate) repeated: Option<f64>,
    /// Whether its results are those of the reference or have a place beside them.
    pub(crate) is_counted: bool,
    /// Its results beside those of the reference.
    pub(crate) compared: Option<Compared>,
    /// The dtype of the region in which it was called; `None` in the call that autocast itself makes.
    pub(crate) autocast: Option<Kind>,
    /// Whether it has no kernel of its own and calls other operators.
    pub(crate) composite: bool,
    /// The size by which rules tell the calls of an operator apart.
    pub(crate) size: u64,
    /// The booleans among the arguments.
    pub(crate) flags: u32,
    pub(crate) times: Times,
}

/// The results of an operator beside those of the reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Compared {
    /// The norm of the difference. NaN if the results are not finite.
    pub(crate) difference: f64,
    /// The norm of the reference.
    pub(crate) norm: f64,
    pub(crate) cosine: f64,
}

/// When an event ran, in nanoseconds, in a timed recording.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Times {
    /// From here on, its own work and that of the recording occupied the thread.
    pub(crate) entered: i64,
    pub(crate) started: i64,
    pub(crate) ended: i64,
    pub(crate) left: i64,
}

/// The details of operators that a recording notes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RecordingMode<'a> {
    /// The numbers of every result.
    Numbers,
    /// When they ran.
    Times,
    /// The numbers, and the results of the operators that the program calls in the forward pass become the reference.
    Reference(&'a Reference),
    /// The numbers, and those results beside the reference.
    Compared(&'a Reference),
    /// The same, and then what the last compared run had in half precision is rounded to this dtype, as are the
    /// gradients that belong to it.
    Rounded(&'a Reference, Kind),
}

/// The results of a run.
#[derive(Debug)]
pub(crate) struct Reference(NonNull<sys::Reference>);

impl Reference {
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: `err` is valid for a write.
        let raw = call(|err| unsafe { sys::tamp_reference_new(err) })?;
        Ok(Self(NonNull::new(raw).ok_or_else(|| Error::Torch("no reference".to_owned()))?))
    }
}

impl Drop for Reference {
    fn drop(&mut self) {
        // SAFETY: the reference is alive and is not used again; recordings hold what they need of it.
        unsafe { sys::tamp_reference_free(self.0.as_ptr()) }
    }
}

/// A recording of what the calling thread runs, until it is stopped or dropped.
#[derive(Debug)]
pub(crate) struct RawRecording {
    raw: NonNull<sys::Recording>,
    // libtorch's callbacks belong to the thread.
    thread: PhantomData<*const ()>,
}

impl RawRecording {
    pub(crate) fn start(parameters: &[&Tensor], mode: RecordingMode<'_>) -> Result<Self> {
        let tensors = pointers(parameters.iter().copied());
        let (array, count) = (tensors.as_ptr(), tensors.len());
        let (how, reference, dtype) = match mode {
            RecordingMode::Numbers => (sys::RECORD_NUMBERS, None, Kind::Float),
            RecordingMode::Times => (sys::RECORD_TIMES, None, Kind::Float),
            RecordingMode::Reference(reference) => {
                (sys::RECORD_REFERENCE, Some(reference), Kind::Float)
            }
            RecordingMode::Compared(reference) => {
                (sys::RECORD_COMPARED, Some(reference), Kind::Float)
            }
            RecordingMode::Rounded(reference, dtype) => {
                (sys::RECORD_ROUNDED, Some(reference), dtype)
            }
        };
        let reference =
            reference.map_or(ptr::null(), |reference| reference.0.as_ptr().cast_const());
        let dtype = dtype_code(dtype).unwrap_or_default();
        // SAFETY: the array has `count` live tensors, the reference is alive where one is needed, and `err` is valid
        // for a write.
        let raw = call(|err| unsafe {
            sys::tamp_recording_start(array, count, how, reference, dtype, err)
        })?;
        let raw = NonNull::new(raw).ok_or_else(|| Error::Torch("no recording".to_owned()))?;
        Ok(Self { raw, thread: PhantomData })
    }

    /// Returns whether a compared run called other operators than the reference.
    pub(crate) fn differs(&self) -> bool {
        // SAFETY: the recording is alive.
        unsafe { sys::tamp_recording_differs(self.raw.as_ptr()) != 0 }
    }

    pub(crate) fn stop(&mut self) -> Result<()> {
        // SAFETY: the recording is alive and was started on this thread, which it does not leave.
        call(|err| unsafe { sys::tamp_recording_stop(self.raw.as_ptr(), err) })
    }

    /// The events of a stopped recording.
    pub(crate) fn events(&self) -> Result<Vec<RecordedEvent>> {
        // SAFETY: the recording is alive.
        let count = unsafe { sys::tamp_recording_count(self.raw.as_ptr()) };
        (0..count).map(|index| self.event(index)).collect()
    }

    fn event(&self, index: usize) -> Result<RecordedEvent> {
        let mut raw = std::mem::MaybeUninit::<sys::RecordedEvent>::uninit();
        let (recording, out) = (self.raw.as_ptr(), raw.as_mut_ptr());
        // SAFETY: the recording is alive, and `out` is valid for a write.
        call(|err| unsafe { sys::tamp_recording_event(recording, index, out, err) })?;
        // SAFETY: the call has written the event, or it would have failed.
        let raw = unsafe { raw.assume_init() };
        // SAFETY: the name and the two arrays belong to the recording, which is stopped and outlives this function.
        let (name, inputs, outputs) = unsafe {
            (
                CStr::from_ptr(raw.name),
                array(raw.inputs, raw.input_count),
                array(raw.outputs, raw.output_count),
            )
        };
        Ok(RecordedEvent {
            kind: match raw.kind {
                // libtorch records it like an operator.
                sys::EVENT_OPERATOR if name.to_bytes().starts_with(b"autograd::engine::") => {
                    EventKind::Engine
                }
                sys::EVENT_OPERATOR => EventKind::Operator,
                sys::EVENT_NODE => EventKind::Node,
                _ => EventKind::Name,
            },
            name: name.to_string_lossy().into_owned(),
            inputs: inputs.iter().map(tensor).collect(),
            outputs: outputs.iter().map(tensor).collect(),
            parent: usize::try_from(raw.parent).ok(),
            ended: u64::try_from(raw.ended).ok(),
            sequence: raw.sequence,
            forward_thread: raw.forward_thread,
            repeated: (raw.repeated != 0).then_some(raw.repeated_largest),
            is_counted: raw.compared != sys::COMPARED_NOT,
            compared: (raw.compared == sys::COMPARED).then_some(Compared {
                difference: raw.difference,
                norm: raw.norm,
                cosine: raw.cosine,
            }),
            autocast: kind_of(raw.autocast),
            composite: raw.composite != 0,
            size: raw.size,
            flags: raw.flags,
            times: Times {
                entered: raw.entered,
                started: raw.started,
                ended: raw.ended_at,
                left: raw.left,
            },
        })
    }

    /// The number of a tensor's memory, if it appeared in the recording.
    pub(crate) fn memory(&self, tensor: &Tensor) -> Result<Option<u64>> {
        let (recording, tensor) = (self.raw.as_ptr(), tensor.as_ptr());
        // SAFETY: the recording and the tensor are alive, and `err` is valid for a write.
        let number = call(|err| unsafe { sys::tamp_recording_memory(recording, tensor, err) })?;
        Ok(u64::try_from(number).ok())
    }
}

/// A tensor that autograd has saved in a recording, or that a node of this crate keeps by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SavedTensor {
    pub(crate) tensor: RecordedTensor,
    /// The operator that ran.
    pub(crate) event: Option<usize>,
    /// The size of the whole memory, of which it may be a part.
    pub(crate) storage_bytes: u64,
    /// Whether it is a leaf that is trained, by way of views and casts alone.
    pub(crate) is_weight: bool,
    /// Whether it is computed from a leaf in another way.
    pub(crate) has_history: bool,
    /// Whether other forms keep it in fewer bits.
    pub(crate) is_activation: bool,
    /// Whether it is a part of an activation, of which other forms keep nothing else.
    pub(crate) is_small_part: bool,
    /// Whether nothing holds the memory any more.
    pub(crate) is_free: bool,
}

impl RawRecording {
    /// Returns a way in which saved tensors are kept as they are, and noted here.
    pub(crate) fn saves(&self) -> Result<SavedTensors> {
        saved_tensors::prepare()?;
        // SAFETY: the recording is alive, and `err` is valid for a write.
        let saves = call(|err| unsafe { sys::tamp_recording_saves(self.raw.as_ptr(), err) })?;
        Ok(SavedTensors::given(saves))
    }

    /// The tensors that were noted, in a stopped recording.
    pub(crate) fn saved(&self) -> Result<Vec<SavedTensor>> {
        // SAFETY: the recording is alive.
        let count = unsafe { sys::tamp_recording_saved_count(self.raw.as_ptr()) };
        (0..count).map(|index| self.saved_at(index)).collect()
    }

    fn saved_at(&self, index: usize) -> Result<SavedTensor> {
        let mut raw = std::mem::MaybeUninit::<sys::SavedTensor>::uninit();
        let (recording, out) = (self.raw.as_ptr(), raw.as_mut_ptr());
        // SAFETY: the recording is alive, and `out` is valid for a write.
        call(|err| unsafe { sys::tamp_recording_saved(recording, index, out, err) })?;
        // SAFETY: the call has written it, or it would have failed.
        let raw = unsafe { raw.assume_init() };
        Ok(SavedTensor {
            tensor: tensor(&raw.tensor),
            event: usize::try_from(raw.event).ok(),
            storage_bytes: u64::try_from(raw.storage_bytes).unwrap_or(0),
            is_weight: raw.is_weight != 0,
            has_history: raw.has_history != 0,
            is_activation: raw.is_activation != 0,
            is_small_part: raw.is_small_part != 0,
            is_free: raw.is_free != 0,
        })
    }
}

impl Drop for RawRecording {
    fn drop(&mut self) {
        // SAFETY: the recording is alive, was started on this thread, and is not used again.
        unsafe { sys::tamp_recording_free(self.raw.as_ptr()) }
    }
}

/// # Safety
/// `pointer` must be valid for reads of `count` tensors for `'a`, unless `count` is zero.
unsafe fn array<'a>(
    pointer: *const sys::RecordedTensor,
    count: usize,
) -> &'a [sys::RecordedTensor] {
    if count == 0 {
        return &[];
    }
    // SAFETY: the caller promises it.
    unsafe { std::slice::from_raw_parts(pointer, count) }
}

fn tensor(raw: &sys::RecordedTensor) -> RecordedTensor {
    let numbers = Numbers {
        positive_infinite: raw.positive_infinite,
        negative_infinite: raw.negative_infinite,
        nan: raw.nan,
        largest: raw.largest,
    };
    RecordedTensor {
        memory: u64::try_from(raw.memory).ok(),
        parameter: usize::try_from(raw.parameter).ok(),
        offset: raw.offset,
        version: raw.version,
        elements: raw.elements,
        kind: kind_of(raw.dtype),
        numbers: (raw.known != 0).then_some(numbers),
        usage: match raw.usage {
            sys::USE_READ => Usage::Read,
            sys::USE_WRITE => Usage::Write,
            sys::USE_VIEW => Usage::View,
            sys::USE_OVERWRITE => Usage::Overwrite,
            _ => Usage::Read,
        },
        sizes: raw.sizes,
        dims: usize::from(raw.dims),
        dtype: raw.dtype,
        element_bytes: i64::from(raw.element_bytes),
        device: (raw.device_type, raw.device_index),
    }
}

/// A name for what the calling thread runs until this is dropped.
#[derive(Debug)]
pub(crate) struct Name {
    raw: *mut sys::Name,
}

impl Name {
    pub(crate) fn begin(name: &str) -> Result<Self> {
        // A NUL would end the name.
        let name =
            CString::new(name.replace('\0', " ")).map_err(|e| Error::Torch(e.to_string()))?;
        // SAFETY: the name lives for the call, which copies it, and `err` is valid for a write.
        let raw = call(|err| unsafe { sys::tamp_name_begin(name.as_ptr(), err) })?;
        Ok(Self { raw })
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        // SAFETY: the name was begun on this thread, which a raw pointer keeps it on, and is not used again.
        unsafe { sys::tamp_name_end(self.raw) }
    }
}
