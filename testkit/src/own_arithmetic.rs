//! Jobs of the crate's own arithmetic, which obeys no region: each gives the same bits outside of all regions and inside
//! of one that overrides common operators. It knows memory and not only tensors: each job also gives the same bits where
//! two gradients are in one memory. `tests/abi.rs` looks for the name of every function of the shim that computes among
//! the jobs of `autocast`, `insight` and `distributed`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::Autocast;

use super::bits;

/// Operators that the arithmetic of this crate is made of, or could be.
const COMMON: &str = "
    abs add all amax any argmax bitwise_and cat clamp clamp_max clamp_min clone cumsum detach_copy div empty_like eq exp
    _foreach_norm ge gt index_select isfinite isinf isnan item linalg_vector_norm _local_scalar_dense log logical_and
    logical_not logical_or lt masked_fill matmul maximum mean minimum mm mul ne neg norm nonzero ones_like pow
    reciprocal rsqrt sign sqrt square stack sub sum _to_copy var where zeros_like copy
";

/// Runs code in the region under test, or outside of all.
pub type Within<'a> = &'a (dyn Fn(&mut dyn FnMut()) + Sync);

/// What `f` gives where `within` runs it.
pub fn inside<T>(within: Within<'_>, f: impl FnOnce() -> T) -> T {
    let (mut f, mut result) = (Some(f), None);
    within(&mut || result = f.take().map(|f| f()));
    result.expect("it runs once")
}

/// What a job has computed. It may be told so inside of the region, and is read outside.
#[derive(Debug, Default)]
pub struct Results(Vec<Computed>);

#[derive(Debug)]
enum Computed {
    Tensor(Tensor),
    Value(String),
}

impl Results {
    /// Adds the numbers that a tensor has now.
    pub fn tensor(&mut self, tensor: &Tensor) {
        if !tensor.defined() {
            return self.value("undefined");
        }
        // A region does not change what writes to its input.
        let mut copy = Tensor::empty(tensor.size(), (tensor.kind(), tensor.device()));
        no_grad(|| copy.copy_(tensor));
        self.0.push(Computed::Tensor(copy));
    }

    /// Adds the numbers of several tensors.
    pub fn tensors(&mut self, tensors: &[Tensor]) {
        tensors.iter().for_each(|tensor| self.tensor(tensor));
    }

    /// Adds a value, which is compared by its `Debug`.
    pub fn value(&mut self, value: impl std::fmt::Debug) {
        self.0.push(Computed::Value(format!("{value:?}")));
    }

    /// The results of several ranks.
    pub fn all(&mut self, ranks: Vec<Self>) {
        self.0.extend(ranks.into_iter().flat_map(|results| results.0));
    }

    fn read(self) -> Vec<String> {
        let read = |computed| match computed {
            Computed::Value(value) => value,
            Computed::Tensor(tensor) => {
                let bits = bits::hex(&tensor.to_device(Device::Cpu));
                format!("{:?} {:?} {bits}", tensor.kind(), tensor.size())
            }
        };
        self.0.into_iter().map(read).collect()
    }
}

/// Does a job on a device, with what is compared within the region that it is given.
type Run = fn(Device, Within<'_>, &mut Results);

/// A job, with its name in messages.
pub struct Job {
    name: &'static str,
    run: Run,
}

/// A job, and the functions of the shim that it calls. `tests/abi.rs` reads them in the source.
pub const fn job(name: &'static str, _entries: &[&str], run: Run) -> Job {
    Job { name, run }
}

/// Asserts that jobs give the same bits in every region, and where gradients are in one memory.
pub fn assert_obeys_no_region(device: Device, jobs: &[Job]) {
    let region = Autocast::new(device).dtype(Kind::Half);
    let bf16 = Autocast::new(device).dtype(Kind::BFloat16);
    let common = || COMMON.split_whitespace();
    let regions = [
        ("a plain region", region),
        ("a region that prefers half precision", region.prefer_half(common())),
        ("a region that keeps f32", region.keep_in_f32(common())),
        ("a bf16 region", bf16.prefer_half(common())),
    ];
    let mut wrong = Vec::new();
    for job in jobs {
        let mut expected = Results::default();
        (job.run)(device, &|f| f(), &mut expected);
        let expected = expected.read();
        for (what, region) in regions {
            let within = |f: &mut dyn FnMut()| region.run(f).unwrap();
            wrong.extend(difference(job, device, what, &within, &expected));
        }
        let shared = InOneMemory::begin();
        wrong.extend(difference(job, device, "one memory", &|f| f(), &expected));
        drop(shared);
    }
    assert!(wrong.is_empty(), "{} of {} jobs: {wrong:#?}", wrong.len(), jobs.len());
}

/// How the results of a job differ from those that are expected.
fn difference(
    job: &Job,
    device: Device,
    what: &str,
    within: Within<'_>,
    expected: &[String],
) -> Option<String> {
    let mut found = Results::default();
    let run = catch_unwind(AssertUnwindSafe(|| (job.run)(device, within, &mut found)));
    if run.is_err() {
        return Some(format!("{} fails in {what}", job.name));
    }
    let found = found.read();
    let first = expected.iter().zip(&found).find(|(a, b)| a != b);
    let differs = first.is_some() || expected.len() != found.len();
    differs.then(|| format!("{} differs in {what}: {first:?}", job.name))
}

/// Whether the backward pass of a loss of `loss_of` leaves both gradients in one memory.
static IN_ONE_MEMORY: AtomicBool = AtomicBool::new(false);

struct InOneMemory;

impl InOneMemory {
    fn begin() -> Self {
        IN_ONE_MEMORY.store(true, Ordering::SeqCst);
        Self
    }
}

impl Drop for InOneMemory {
    fn drop(&mut self) {
        IN_ONE_MEMORY.store(false, Ordering::SeqCst);
    }
}

/// The sum of the numbers of two leaves that have as many. Its backward pass computes nothing, and hands the gradient of
/// a sum to both inputs.
pub fn sum_of([a, b]: [&Tensor; 2]) -> Tensor {
    let [a, b] = [a, b].map(|w| w.reshape([1, -1]));
    match IN_ONE_MEMORY.load(Ordering::SeqCst) {
        true => (a + b).sum(None),
        false => a.sum(None) + b.sum(None),
    }
}

/// A loss of two leaves with as many numbers, whose gradients are `numbers`.
pub fn loss_of([a, b]: [&Tensor; 2], numbers: &Tensor) -> Tensor {
    let [a, b] = [a, b].map(|w| w.reshape([1, -1]));
    let numbers = numbers.reshape([1, -1]);
    match IN_ONE_MEMORY.load(Ordering::SeqCst) {
        true => ((a + b) * numbers).sum(None),
        false => (a * &numbers).sum(None) + (b * &numbers).sum(None),
    }
}

/// Runs the backward pass of a loss of `loss_of`, and asserts that it left the gradients as the present test wants them.
pub fn backward_of(list: [&Tensor; 2], numbers: &Tensor) {
    loss_of(list, numbers).backward();
    let [a, b] = list.map(|w| w.grad().data_ptr());
    assert_eq!(a == b, IN_ONE_MEMORY.load(Ordering::SeqCst), "libtorch shares otherwise by now");
}

/// Two leaves with gradients, those of the first finite but large.
pub fn leaves(device: Device, kind: Kind) -> Vec<Tensor> {
    let list = [large(device, kind) * 1e-3, large(device, kind).view(-1) * 1e-2];
    let list = list.map(|w| w.detach().to_kind(kind).set_requires_grad(true));
    backward_of(list.each_ref(), &large(device, kind));
    list.into()
}

/// Numbers that half precision can neither hold nor tell apart.
pub fn large(device: Device, kind: Kind) -> Tensor {
    let numbers = [70000.25f64, -3.000001, 1e-6, 123456.7, 0.1, 99999.0];
    Tensor::from_slice(&numbers).to_kind(kind).view([2, 3]).to_device(device)
}
