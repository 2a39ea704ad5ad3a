//! What the GPT and the BERT of the training benchmark keep for their backward pass on the CPU, as autograd saves it
//! and in the forms of `SavedTensors`. For each form: the bytes that are freed with the graph, the peak of an
//! iteration, the error of the gradient beside f32 at steps 1 and 60, and the time of a forward and a backward pass.
//! The forms are timed in turns. The errors are measured for weights as PyTorch draws them, and for those that tch
//! draws for linear layers, which are 2.4 times as large; all else for the former.
//!
//! Then the GPT beside Python's, with the same weights and batch: as it is, with `SavedTensors::on_host` beside
//! `torch.autograd.graph.save_on_cpu`, which both have nothing to move on a CPU, and with its blocks recomputed beside
//! `torch.utils.checkpoint` without reentry. The gradients have the same bits on both sides; the memory of each is
//! measured in a process of its own.
//!
//! With `TCH_AMP_BENCH_LOSSES=gpt,bert` it only trains these models in each form, for 150 steps with 3 seeds, and
//! compares the losses with those of autocast alone on the same batches.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

mod common;
#[path = "common/folder.rs"]
mod folder;
#[path = "common/memory.rs"]
mod memory;
#[allow(dead_code, reason = "it takes three of the models")]
#[path = "training/models.rs"]
mod models;

use common::{Python, Rounds, is_quick, median, nanoseconds, print_ratio, print_table, rounds};
use folder::Folder;
use memory::{GIVES_BACK, in_new_process, mib, peaks};
use models::{Batch, Model, model};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::memory::{SavedTensors, peak_during};
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::{Autocast, insight};

/// How activations are kept; without a form, autograd keeps them as they are.
type Form = Option<fn() -> SavedTensors>;

const FORMS: [(&str, Form); 3] = [
    ("autocast", None),
    ("half", Some(SavedTensors::half)),
    ("fp8_rows", Some(SavedTensors::fp8_rows)),
];

/// Who draws the weights of linear layers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Drawn {
    ByPyTorch,
    ByTch,
}

/// How this crate and Python keep what the GPT of both saves.
const WAYS: [&str; 3] = ["plain", "on_host", "checkpoint"];

fn main() {
    tch::set_num_threads(1);
    if let Some(way) = memory::request() {
        let run = Run::of_way(&way);
        let pass = || run.forward(form_of(&way), true).backward();
        // The first one makes what the process keeps.
        pass();
        return peaks(pass).print();
    }
    if let Ok(names) = std::env::var("TCH_AMP_BENCH_LOSSES") {
        return names.split(',').for_each(losses);
    }
    engines();
    beside_python();
    for name in ["gpt", "bert"] {
        println!("{}", Run::new(name, 0).report());
        for drawn in [Drawn::ByPyTorch, Drawn::ByTch] {
            for step in [1, if is_quick() { 3 } else { 60 }] {
                errors(name, drawn, step);
            }
        }
        times(name);
    }
}

fn form_of(way: &str) -> Form {
    (way == "on_host").then_some(SavedTensors::on_host)
}

/// Compares gradients, memory and time with Python's.
fn beside_python() {
    let Some(mut python) = Python::start("saved_tensors.py") else { return };
    let folder = Folder::new();
    let file = folder.text("weights.pt");
    python.ask(&format!("model {file}"));
    let weights = Checkpoint::load(&file).unwrap();
    let runs = WAYS.map(|way| {
        let mut run = Run::of_way(way);
        weights.restore().add("model", &run.vs).apply().unwrap();
        tch::manual_seed(1);
        run.next_batch();
        let gradient = run.gradient(form_of(way), true);
        let bits = gradient.to_kind(Kind::Float).view_dtype(Kind::Int).to_kind(Kind::Int64);
        let theirs = python.ask(&format!("bits {way}"));
        let ours = (&bits * (Tensor::arange(bits.size()[0], (Kind::Int64, Device::Cpu)) + 1))
            .sum(Kind::Int64);
        assert_eq!(ours.int64_value(&[]).to_string(), theirs, "{way}: the gradients differ");
        run
    });
    println!("gpt: the gradients have the bits of Python's, {}", WAYS.join(", "));
    for way in WAYS {
        let ours = in_new_process(way);
        let mut python = Python::start_with("saved_tensors.py", &[GIVES_BACK]).unwrap();
        let theirs = python.time(&format!("memory {way}"))[0];
        println!("gpt {way:10}: {ours}, {:7.1} MiB resident in Python", mib(theirs));
        println!("ratio saved_memory_{way} {:.3}", ours.resident / theirs);
    }
    let times = Rounds::run(
        rounds(10),
        || {
            let time =
                |(run, way): (&Run, _)| nanoseconds(|| run.forward(form_of(way), true).backward());
            runs.iter().zip(WAYS).map(time).collect()
        },
        || WAYS.iter().flat_map(|way| python.time(&format!("time {way}"))).collect(),
    );
    let rows: Vec<_> = WAYS.iter().enumerate().map(|(i, way)| times.row(way, i)).collect();
    print_table("gpt, forward and backward", &rows);
    for (way, row) in WAYS.iter().zip(rows) {
        print_ratio(&format!("saved_time_{way}"), row);
    }
}

/// Times a small iteration before the first region of the process replaces the autograd engine, and after it. The
/// engine is replaced only once in a process, so the two cannot be timed in turns.
fn engines() {
    let run = Run::new("mlp_6x32", 0);
    let measure = || {
        let time = || nanoseconds(|| run.forward(None, true).backward()) / 1e3;
        for _ in 0..100 {
            let _warm = time();
        }
        median((0..rounds(3000)).map(|_| time()).collect())
    };
    let before = [measure(), measure()];
    SavedTensors::half().run(|| ()).unwrap();
    let after = [measure(), measure()];
    println!(
        "mlp_6x32 forward and backward: {before:.1?} us with libtorch's engine, {after:.1?} us with ours"
    );
}

/// A training of a model.
struct Run {
    vs: VarStore,
    model: Model,
    batch: Batch,
    optimizer: Optimizer,
}

impl Run {
    fn new(name: &str, seed: i64) -> Self {
        Self::drawn(name, seed, Drawn::ByPyTorch)
    }

    /// The GPT of one of [`WAYS`].
    fn of_way(way: &str) -> Self {
        Self::new(if way == "checkpoint" { "gpt_recomputed" } else { "gpt" }, 0)
    }

    fn drawn(name: &str, seed: i64, drawn: Drawn) -> Self {
        tch::manual_seed(seed);
        let vs = VarStore::new(Device::Cpu);
        let model = model(name, &vs.root());
        if drawn == Drawn::ByPyTorch {
            draw_as_pytorch(&vs);
        }
        let optimizer = AdamW::default().build(&vs, 3e-4).unwrap();
        let batch = model.batch.batch(Device::Cpu);
        Self { vs, model, batch, optimizer }
    }

    fn next_batch(&mut self) {
        self.batch = self.model.batch.batch(Device::Cpu);
    }

    fn forward(&self, form: Form, amp: bool) -> Tensor {
        let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16).enabled(amp);
        let loss = || region.run(|| (self.model.loss)(&self.batch));
        match form {
            Some(form) => form().try_run(loss),
            None => loss(),
        }
        .unwrap()
    }

    /// The gradients of a batch, in f64 and in one vector.
    fn gradient(&mut self, form: Form, amp: bool) -> Tensor {
        self.optimizer.zero_grad().unwrap();
        self.forward(form, amp).backward();
        let mut variables: Vec<_> = self.vs.variables().into_iter().collect();
        variables.sort_by(|a, b| a.0.cmp(&b.0));
        let flat = |w: &Tensor| w.grad().to_kind(Kind::Double).view(-1);
        no_grad(|| Tensor::cat(&variables.iter().map(|(_, w)| flat(w)).collect::<Vec<_>>(), 0))
    }

    fn step(&mut self, form: Form) -> f64 {
        self.next_batch();
        self.optimizer.zero_grad().unwrap();
        let loss = self.forward(form, true);
        loss.backward();
        self.optimizer.step().unwrap();
        loss.double_value(&[])
    }

    fn report(&self) -> insight::SavedReport {
        insight::saved_tensors(&self.vs, || Ok(self.forward(None, true))).unwrap()
    }

    /// The bytes that are freed with the graph, and the peak of a forward and a backward pass.
    fn memory(&self, form: Form) -> [u64; 2] {
        // Nothing writes to it, so that it takes no memory.
        const LARGE: i64 = 1 << 34;
        let alive = |with_graph: bool| {
            let run = || {
                let loss = self.forward(form, true);
                let kept = if with_graph { loss } else { without_graph(loss) };
                drop(Tensor::empty([LARGE], (Kind::Uint8, Device::Cpu)));
                drop(kept);
            };
            peak_during(run).unwrap().1
        };
        let pass = peak_during(|| self.forward(form, true).backward()).unwrap().1;
        [alive(true) - alive(false), pass]
    }
}

/// Draws the weights of linear layers as PyTorch's `nn.Linear` does. tch draws the others and the biases like it.
fn draw_as_pytorch(vs: &VarStore) {
    let mut variables: Vec<_> = vs.variables().into_iter().collect();
    variables.sort_by(|a, b| a.0.cmp(&b.0));
    for (name, mut weight) in variables {
        let is_embedding = ["embedding.weight", "places.weight"].contains(&name.as_str());
        if let ([_, width], false) = (&weight.size()[..], is_embedding) {
            let bound = (*width as f64).powf(-0.5);
            let _drawn = no_grad(|| weight.uniform_(-bound, bound));
        }
    }
}

fn without_graph(loss: Tensor) -> Tensor {
    loss.detach().copy()
}

fn errors(name: &str, drawn: Drawn, step: usize) {
    let mut run = Run::drawn(name, 1, drawn);
    // Autocast's cache holds them for the forward pass anyway.
    let weights = run.report().weight_bytes as f64;
    for _ in 1..step {
        let _loss = run.step(None);
    }
    run.next_batch();
    let exact = run.gradient(None, false);
    // Without a form: what the other forms add to its error.
    let of_autocast = run.gradient(None, true);
    let mut first = None;
    for (label, form) in FORMS {
        let gradient = run.gradient(form, true);
        let apart = |from: &Tensor| ((&gradient - from).norm() / exact.norm()).double_value(&[]);
        let (error, added) = (apart(&exact), apart(&of_autocast));
        let [kept, peak] = run.memory(form).map(|bytes| bytes as f64);
        let kept = kept - weights;
        let of = kept / *first.get_or_insert(kept);
        println!(
            "{name} {drawn:?} step {step:2} {label:9} kept {:6.1} MiB ({of:.3} ×), peak {:6.1} MiB, error {error:.5}, \
             {added:.5} of it beside autocast",
            mib(kept),
            mib(peak)
        );
        if drawn == Drawn::ByPyTorch {
            println!("ratio saved_{name}_{label}_{step} {of:.3}");
        }
    }
}

fn times(name: &str) {
    let run = Run::new(name, 2);
    let mut times = FORMS.map(|_| Vec::new());
    for round in 0..=rounds(10) {
        for ((_, form), times) in FORMS.iter().zip(&mut times) {
            let time = nanoseconds(|| run.forward(*form, true).backward());
            if round > 0 {
                times.push(time / 1e6);
            }
        }
    }
    let mut first = None;
    for ((label, _), times) in FORMS.iter().zip(times) {
        let time = median(times);
        let of = time / *first.get_or_insert(time);
        println!("{name} {label:9} forward and backward {time:8.1} ms ({of:.3} ×)");
        println!("ratio saved_time_{name}_{label} {of:.3}");
    }
}

/// The mean losses of the last steps, and their distance from those of autocast, with the same batches.
fn losses(name: &str) {
    let (steps, last) = if is_quick() { (10, 5) } else { (150, 50) };
    let mut sums = FORMS.map(|_| 0.0);
    for seed in 0..3 {
        let means = FORMS.map(|(_, form)| {
            let mut run = Run::new(name, seed);
            tch::manual_seed(100 + seed);
            let losses: Vec<f64> = (0..steps).map(|_| run.step(form)).collect();
            losses[steps - last..].iter().sum::<f64>() / last as f64
        });
        println!("{name} seed {seed}: {means:.5?}");
        sums.iter_mut().zip(means).for_each(|(sum, mean)| *sum += mean / 3.0);
    }
    for ((label, _), sum) in FORMS.iter().zip(sums) {
        println!(
            "{name} {label:9} loss of the last {last} of {steps} steps {sum:.4} ({:+.4})",
            sum - sums[0]
        );
    }
}
