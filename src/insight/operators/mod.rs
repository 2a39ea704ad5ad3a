//! The operators of a program: times, dtypes, casts, and the sizes of matrix products.

mod autocast_lists;
mod casts;
mod report;
mod work;

use std::collections::{BTreeMap, HashSet};
use std::time::Instant;

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use work::Work;

use self::autocast_lists::{LINKED, VERSIONS, list_in};
use self::casts::CastRows;
use self::report::{ListedOperator, MovedOperator, OperatorRow, ProductRow, seconds};
use self::work::{Product, is_written};
use super::recording::{RecordedModel, Recording};
use crate::capture;
use crate::error::{Error, Result};
use crate::ffi::insight::{RecordedEvent, RecordedTensor, RecordingMode, Usage};
use crate::insight::dtype::Dtype;
use crate::insight::recording::Pass;
use crate::precision::synchronize;
use crate::variables::listed;

pub use autocast_lists::AutocastList;
pub use report::OperatorReport;
pub(super) use report::percent;

/// Runs a part of a program and reports what its operators cost, and why half precision does not make it faster.
///
/// It records with libtorch's RecordFunction. Outside of [`run`](Self::run) nothing is recorded and nothing is slower.
/// PyTorch's counterpart for the times is `torch.profiler`.
///
/// # Examples
///
/// ```
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::Autocast;
/// use tch_amp::insight::Profiler;
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let layer = nn::linear(vs.root() / "layer", 64, 10, Default::default());
/// let x = Tensor::ones([32, 64], (Kind::Float, Device::Cpu));
/// let region = Autocast::new(Device::Cpu);
/// let report = Profiler::new(&vs).run(|| {
///     let loss = region.run(|| layer.forward(&x).square().mean(Kind::Float))?;
///     Ok(loss.f_backward()?)
/// })?;
/// println!("{report}");
/// assert_eq!(report.half_share(None), Some(1.0));
/// // Forward, and the gradient of the weight.
/// assert_eq!(report.flops(), 2 * (2 * 32 * 64 * 10));
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Debug)]
pub struct Profiler {
    model: RecordedModel,
    device: Device,
    warm_up: usize,
    runs: usize,
    estimates_gains: bool,
}

impl Profiler {
    /// Creates a profiler for the model of `vs`, whose variables, as they are now, give the parts of the model their
    /// names. It runs a closure twice to warm up, and then records one run.
    pub fn new(vs: &VarStore) -> Self {
        let model = RecordedModel::new(listed(vs));
        Self { model, device: vs.device(), warm_up: 2, runs: 1, estimates_gains: false }
    }

    /// Sets how many runs come before the recorded ones. The first run of a program is slower, because it also
    /// allocates memory and chooses algorithms.
    #[must_use]
    pub fn warm_up(self, warm_up: usize) -> Self {
        Self { warm_up, ..self }
    }

    /// Sets how many runs are recorded, at least one. The report adds them up.
    #[must_use]
    pub fn runs(self, runs: usize) -> Self {
        Self { runs, ..self }
    }

    /// Lets the report estimate what half precision would gain, from the speed of square products of several sizes on
    /// the device. They are measured once in a process, before the first run, which takes a few seconds; fp16 on a CPU
    /// is left out, because it takes long. While it measures on a GPU, libtorch's setting of TensorFloat-32, which is
    /// the process's, changes back and forth.
    #[must_use]
    pub fn estimate_gains(self) -> Self {
        Self { estimates_gains: true, ..self }
    }

    /// Runs `f`, such as the forward and backward pass of one batch, and reports its operators. What `f` changes, such
    /// as gradients, stays changed; a run that fails or panics ends the recording.
    ///
    /// Recorded are the operators of the calling thread, and those of the backward passes that it starts, also on the
    /// threads of devices.
    ///
    /// Synchronizes with the device where each operator begins and ends, because the host cannot time a kernel
    /// otherwise. So times on a GPU are upper bounds: they include the launch of each kernel, which otherwise overlaps
    /// with the kernels before it. On the CPU they include the dispatcher, but not the work of recording.
    ///
    /// Keeps about 3 kB for each operator of a run until the run is over, of which there may be a million.
    ///
    /// # Errors
    ///
    /// The error of `f`, [`Error::InvalidArgument`] for no runs, and [`Error::Torch`] if the operators cannot be
    /// recorded, or the speeds that a gain is estimated from cannot be measured.
    pub fn run<T>(&self, mut f: impl FnMut() -> Result<T>) -> Result<OperatorReport> {
        capture::refuse("a report of iterations", "make it of iterations without a graph")?;
        if self.runs == 0 {
            let problem = "is 0, but something must be recorded".to_owned();
            return Err(Error::InvalidArgument { name: "runs", problem });
        }
        let speeds = match self.estimates_gains {
            true => casts::speeds(self.device)?,
            false => Vec::new(),
        };
        let mut unrecorded_seconds = None;
        for _ in 0..self.warm_up {
            let start = Instant::now();
            drop(f()?);
            synchronize(self.device);
            unrecorded_seconds = Some(start.elapsed().as_secs_f64());
        }
        let (mut rows, mut seconds) = (Rows::default(), 0.0);
        for _ in 0..self.runs {
            let recorded = || {
                let start = Instant::now();
                drop(f()?);
                synchronize(self.device);
                Ok(start.elapsed().as_secs_f64())
            };
            let (recording, time) = Recording::of(&self.model, RecordingMode::Times, recorded)?;
            seconds += time;
            rows.add(&Work::new(&recording), self.model.parameters());
        }
        let mut report = rows.report();
        report.runs = self.runs as u64;
        report.seconds = seconds;
        report.unrecorded_seconds = unrecorded_seconds;
        report.padding = casts::padding(&report);
        report.gains = casts::gains(&report, &speeds);
        Ok(report)
    }
}

/// An operator, its dtype, its device and its pass.
type OperatorKey = (String, Dtype, String, Pass);

/// An operator, the part of the model, its pass, its dtype and the sizes.
type ProductKey = (String, Option<String>, Pass, Dtype, Product);

/// An operator, the part of the model, the module before, and the list.
type MovedKey = (String, Option<String>, Option<String>, AutocastList);

/// The rows of all recorded runs. Their seconds are nanoseconds as yet, whose sums are exact.
#[derive(Debug, Default)]
pub(super) struct Rows {
    operators: BTreeMap<OperatorKey, OperatorRow>,
    products: BTreeMap<ProductKey, ProductRow>,
    wrapper_calls: u64,
    wrapper_nanoseconds: i64,
    casts: CastRows,
    /// The calls and the nanoseconds.
    moved: BTreeMap<MovedKey, (u64, i64)>,
    lists: BTreeMap<(String, bool), u64>,
}

impl Rows {
    /// Adds a recorded run.
    fn add(&mut self, work: &Work<'_>, parameters: &[(String, Tensor)]) {
        for (index, event) in work.operators() {
            self.add_to_lists(event, work.computes[index]);
            if work.computes[index] {
                self.add_operator(work, index, event);
            } else {
                self.wrapper_calls += 1;
                self.wrapper_nanoseconds += work.own[index];
            }
        }
        casts::add(work, parameters, &mut self.casts);
        self.add_moved(work);
    }

    fn add_operator(&mut self, work: &Work<'_>, index: usize, event: &RecordedEvent) {
        let (pass, path) = work.place(index);
        let tensor = event.outputs.first().or(event.inputs.first());
        let dtype = tensor.map_or(Dtype::Other, Dtype::of);
        let device = tensor.map_or_else(|| "cpu".to_owned(), device);
        let (read, written) = bytes(event);
        let (product, nanoseconds) = (work.products[index], work.own[index] as f64);
        let key = (event.name.clone(), dtype, device, pass);
        let row =
            self.operators.entry(key).or_insert_with_key(|(operator, _, device, _)| OperatorRow {
                operator: operator.clone(),
                dtype,
                device: device.clone(),
                pass,
                calls: 0,
                seconds: 0.0,
                bytes_read: 0,
                bytes_written: 0,
                flops: 0,
            });
        row.calls += 1;
        row.seconds += nanoseconds;
        row.bytes_read += read;
        row.bytes_written += written;
        row.flops = row.flops.saturating_add(product.map_or(0, |product| product.flops));
        let Some(product) = product else { return };
        let key = (event.name.clone(), path, pass, dtype, product);
        let row = self.products.entry(key).or_insert_with_key(|(operator, path, ..)| ProductRow {
            operator: operator.clone(),
            kind: product.kind,
            path: path.clone(),
            pass,
            dtype,
            batch: product.batch,
            m: product.m,
            n: product.n,
            k: product.k,
            calls: 0,
            seconds: 0.0,
            flops: 0,
        });
        row.calls += 1;
        row.seconds += nanoseconds;
        row.flops = row.flops.saturating_add(product.flops);
    }

    fn add_to_lists(&mut self, event: &RecordedEvent, computes: bool) {
        if event.autocast.is_none() {
            return;
        }
        let on_cuda = event.inputs.iter().any(|tensor| tensor.device.0 == 1);
        let is_listed = list_in(LINKED, on_cuda, &event.name) != AutocastList::Untouched;
        if is_listed || computes {
            *self.lists.entry((event.name.clone(), on_cuda)).or_default() += 1;
        }
    }

    /// Adds the operators that autocast ran in f32 although they had inputs in half precision.
    ///
    /// Autocast casts the inputs of an operator and calls it again, outside of the region. The dtypes of the second
    /// call show what it did, whatever the list.
    fn add_moved(&mut self, work: &Work<'_>) {
        for (_, inner) in work.operators() {
            let Some(above) = inner.parent else { continue };
            let outer = &work.recording.events[above];
            let called_again =
                outer.autocast.is_some() && inner.autocast.is_none() && outer.name == inner.name;
            let has_half = outer.inputs.iter().any(|tensor| Dtype::of(tensor).is_half());
            if !called_again || !has_half || !is_f32(inner) {
                continue;
            }
            let on_cuda = outer.inputs.iter().any(|tensor| tensor.device.0 == 1);
            let list = list_in(LINKED, on_cuda, &outer.name);
            let (_, path) = work.place(above);
            let after = match path {
                None => work.recording.module_before(above),
                Some(_) => None,
            };
            let key = (outer.name.clone(), path, after, list);
            let (calls, nanoseconds) = self.moved.entry(key).or_default();
            *calls += 1;
            *nanoseconds += work.total[above];
        }
    }

    /// The sums as a report.
    pub(super) fn report(self) -> OperatorReport {
        let mut operators: Vec<_> = self.operators.into_values().collect();
        operators.iter_mut().for_each(|row| row.seconds /= 1e9);
        operators.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        let mut products: Vec<_> = self.products.into_values().collect();
        products.iter_mut().for_each(|row| row.seconds /= 1e9);
        products.sort_by_key(|row| std::cmp::Reverse(row.flops));
        let mut lists: Vec<_> = self.lists.into_iter().map(listed_operator).collect();
        lists.sort_by_key(|listed| (listed.list, std::cmp::Reverse(listed.calls)));
        let mut moved: Vec<_> = self.moved.into_iter().map(moved_operator).collect();
        moved.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        OperatorReport {
            operators,
            products,
            wrapper_calls: self.wrapper_calls,
            wrapper_seconds: seconds(self.wrapper_nanoseconds),
            lists,
            casts: casts::rows(self.casts),
            moved_to_f32: moved,
            ..Default::default()
        }
    }
}

fn listed_operator(((operator, on_cuda), calls): ((String, bool), u64)) -> ListedOperator {
    let list = list_in(LINKED, on_cuda, &operator);
    let elsewhere = VERSIONS
        .iter()
        .map(|version| ((*version).to_owned(), list_in(version, on_cuda, &operator)))
        .filter(|(_, other)| *other != list)
        .collect();
    ListedOperator { operator, list, calls, elsewhere }
}

fn moved_operator(
    ((operator, path, after, list), (calls, nanoseconds)): (MovedKey, (u64, i64)),
) -> MovedOperator {
    MovedOperator { operator, path, after, list, calls, seconds: seconds(nanoseconds) }
}

/// Returns whether all floating results are f32.
fn is_f32(event: &RecordedEvent) -> bool {
    let mut floats = event.outputs.iter().filter_map(|tensor| tensor.kind).peekable();
    floats.peek().is_some() && floats.all(|kind| kind == Kind::Float)
}

/// The name of a device, such as `cuda:0`.
fn device(tensor: &RecordedTensor) -> String {
    let (kind, index) = tensor.device;
    match kind {
        0 => "cpu".to_owned(),
        1 => format!("cuda:{}", index.max(0)),
        13 => format!("mps:{}", index.max(0)),
        _ => format!("device {kind}:{}", index.max(0)),
    }
}

/// The bytes that an operator reads and writes: each tensor once.
fn bytes(event: &RecordedEvent) -> (u64, u64) {
    let size = |tensor: &RecordedTensor| u64::try_from(tensor.bytes()).unwrap_or(0);
    // Parts of one tensor, such as queries and keys, share its memory.
    let place = |tensor: &RecordedTensor| (tensor.memory, tensor.offset, tensor.elements);
    let (mut read, mut written) = (0, 0);
    let (mut seen, mut made) = (HashSet::new(), HashSet::new());
    for tensor in event.inputs.iter().filter(|tensor| tensor.usage != Usage::Overwrite) {
        if tensor.memory.is_none() || seen.insert(place(tensor)) {
            read += size(tensor);
        }
    }
    // A tensor that is written in place can be missing among the results.
    for tensor in event.outputs.iter().chain(&event.inputs) {
        if is_written(tensor) && (tensor.memory.is_none() || made.insert(place(tensor))) {
            written += size(tensor);
        }
    }
    (read, written)
}
