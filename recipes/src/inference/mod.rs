//! The recipe `inference`: the ways to evaluate a model, and their comparison.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::options::below_target;
use crate::report;
use crate::{computer, print};
use anyhow::{Context, Result, ensure};
use run_report::{Document, Table};
use tch::nn::{self, ModuleT, VarStore};
use tch::{CModule, Cuda, Device, Kind, Tensor, no_grad};
use tch_amp::policy::{KeepF32, run_in_f32};
use tch_amp::{Autocast, Policy, jit};

const INPUTS: i64 = 64;
const WIDTH: i64 = 1024;
/// The number of matrix products, one after another.
const LAYERS: i32 = 4;

/// The parameters in bf16, except for the norm's, and the outputs in f32 for metrics.
const POLICY: &str = "p=bf16,c=bf16,o=f32";

/// A classifier with a norm, and with a dropout that evaluation must switch off.
fn model(vs: &VarStore) -> nn::SequentialT {
    let root = vs.root();
    let layer = |name: &str, from, to| nn::linear(&root / name, from, to, Default::default());
    nn::seq_t()
        .add(layer("first", INPUTS, WIDTH))
        .add_fn(Tensor::relu)
        .add(run_in_f32(nn::layer_norm(&root / "norm", vec![WIDTH], Default::default())))
        .add(layer("second", WIDTH, WIDTH))
        .add_fn(Tensor::relu)
        .add_fn_t(|xs, train| xs.dropout(0.5, train))
        .add(layer("third", WIDTH, WIDTH))
        .add_fn(Tensor::relu)
        .add(layer("out", WIDTH, 10))
}

/// A region in bf16 that keeps no casts.
fn region(device: Device) -> Autocast {
    Autocast::new(device).dtype(Kind::BFloat16).cache(false)
}

/// Traces what `forward` computes in bf16 into a TorchScript module whose weights are constants.
fn trace(xs: &Tensor, mut forward: impl FnMut(&Tensor) -> Tensor) -> Result<CModule> {
    let mut traced = |inputs: &[Tensor]| vec![forward(&inputs[0])];
    let inputs = [xs.shallow_clone()];
    let run =
        || anyhow::Ok(CModule::create_by_tracing("Classifier", "forward", &inputs, &mut traced)?);
    let module = no_grad(|| region(xs.device()).try_run(run))?;
    ensure!(module.named_parameters()?.is_empty(), "the weights are constants");
    Ok(module)
}

/// Saves a module frozen, and loads the file.
fn freeze(module: &CModule, file: &Path, device: Device) -> Result<CModule> {
    let name = file.display();
    module.save(file).with_context(|| format!("{name} cannot be written"))?;
    let saved = fs::read(file).with_context(|| format!("{name} cannot be read"))?;
    fs::write(file, jit::freeze(&saved)?).with_context(|| format!("{name} cannot be written"))?;
    CModule::load_on_device(file, device).with_context(|| format!("{name} cannot be loaded"))
}

/// Fails unless the outputs differ from those in f32 by no more than their roundings explain.
///
/// Each of the layers rounds its inputs, its weights and its outputs to bf16, by at most 2^-8 of their size. The
/// roundings add up to at most this share of the outputs, as long as no layer amplifies an error more than its input.
fn check(name: &str, outputs: &Tensor, expected: &Tensor) -> Result<f64> {
    let norm = |x: &Tensor| x.to_kind(Kind::Double).square().sum(Kind::Double).sqrt();
    let error = (norm(&(outputs - expected)) / norm(expected)).double_value(&[]);
    let bound = bound();
    ensure!(error < bound, "{name} has a relative error of {error}, above {bound}");
    Ok(error)
}

/// The largest relative error of the outputs that [`check`] accepts.
fn bound() -> f64 {
    3.0 * f64::from(LAYERS) * 2f64.powi(-8)
}

/// What a comparison has found.
#[derive(Debug)]
pub struct Compared {
    pub inputs: Tensor,
    /// The outputs of the file.
    pub outputs: Tensor,
    /// The error and the speed of each way.
    pub table: Table<4>,
    /// The variables that the policy keeps in f32.
    kept: Vec<String>,
}

/// One way to compute the outputs.
type Way<'a> = (&'a str, Box<dyn Fn() -> Result<Tensor> + 'a>);

/// The median time of each way. They take turns, so that other programs disturb all of them alike.
fn medians(device: Device, times: usize, ways: &[Way<'_>]) -> Result<Vec<Duration>> {
    let timed = |call: &dyn Fn() -> Result<Tensor>| -> Result<Duration> {
        let start = Instant::now();
        drop(call()?);
        if let Device::Cuda(index) = device {
            Cuda::synchronize(index as i64);
        }
        Ok(start.elapsed())
    };
    // The first calls optimize a module and allocate memory.
    for (_, call) in ways.iter().cycle().take(3 * ways.len()) {
        timed(call)?;
    }
    let mut all = vec![Vec::new(); ways.len()];
    for _ in 0..times.max(1) {
        for (times, (_, call)) in all.iter_mut().zip(ways) {
            times.push(timed(call)?);
        }
    }
    all.iter_mut().for_each(|times| times.sort());
    Ok(all.iter().map(|times| times[times.len() / 2]).collect())
}

/// Compares the ways on a device. Each is timed `times` times with `rows` rows.
///
/// # Errors
///
/// If the file cannot be written or read, or outputs differ more than bf16 explains.
pub fn run(device: Device, file: &Path, rows: i64, times: usize) -> Result<Compared> {
    tch::manual_seed(1);
    let mut vs = VarStore::new(device);
    let net = model(&vs);
    vs.freeze();
    let xs = Tensor::randn([rows, INPUTS], (Kind::Float, device));

    // Evaluation under autocast. Metrics are computed from f32.
    let in_region = || {
        let outputs = no_grad(|| region(device).run(|| net.forward_t(&xs, false)))?;
        Ok(outputs.to_kind(Kind::Float))
    };

    // The same as a file. TorchScript's own autocast pass is off, so that the file computes the same in any region.
    jit::set_autocast_mode(false)?;
    let traced = trace(&xs, |xs| net.forward_t(xs, false).to_kind(Kind::Float))?;
    let module = freeze(&traced, file, device)?;
    let call = |module: &CModule| no_grad(|| module.forward_ts(&[&xs]));
    ensure!(call(&traced)?.equal(&call(&module)?), "freezing changes the outputs");
    let in_module = || Ok(call(&module)?);

    // With a policy the weights themselves are in bf16, so that no call casts them.
    let policy: Policy = POLICY.parse()?;
    let mut half_vs = VarStore::new(device);
    let half_net = model(&half_vs);
    half_vs.copy(&vs)?;
    half_vs.freeze();
    let kept = policy.cast_variables(&mut half_vs, KeepF32::Norms)?;
    let in_policy =
        || Ok(no_grad(|| policy.run(&xs, |xs: Tensor| half_net.forward_t(&xs, false)))?);

    let ways: [Way<'_>; 4] = [
        ("f32", Box::new(|| Ok(no_grad(|| net.forward_t(&xs, false))))),
        ("bf16 in a region", Box::new(in_region)),
        ("bf16 from the file", Box::new(in_module)),
        ("bf16 with the policy", Box::new(in_policy)),
    ];
    let outputs = ways.iter().map(|(_, call)| call()).collect::<Result<Vec<_>>>()?;
    let errors = ways.iter().zip(&outputs).skip(1);
    let errors = errors.map(|((name, _), of_way)| check(name, of_way, &outputs[0]));
    let errors: Vec<_> = std::iter::once(Ok(0.0)).chain(errors).collect::<Result<_>>()?;
    let medians = medians(device, times, &ways)?;
    let mut table = Table::new(["way", "relative error", "rows a second", "speed, f32 = 1"]);
    for (((name, _), error), time) in ways.iter().zip(errors).zip(&medians) {
        let rate = rows as f64 / time.as_secs_f64();
        let gain = medians[0].as_secs_f64() / time.as_secs_f64();
        let [name, error] = [(*name).to_owned(), format!("{error:.4}")];
        table.rows.push([name, error, format!("{rate:.0}"), format!("{gain:.2}")]);
    }
    let (inputs, outputs) = (xs.shallow_clone(), outputs[2].shallow_clone());
    Ok(Compared { inputs, outputs, table, kept })
}

/// The report.
pub fn page(compared: &Compared, device: Device) -> Document {
    let products = format!("{LAYERS} matrix products, width {WIDTH}, a norm");
    report::document("Inference in bf16")
        .table(&compared.table)
        .note(&format!(
            "Relative error: the distance from the outputs in f32, divided by their norm; roundings to bf16 explain up \
             to {:.4}. Rows a second: from the median time of a call, on one thread of the CPU.",
            bound()
        ))
        .heading("The model")
        .facts([
            ("Layers", products),
            ("Policy", format!("{POLICY}, which keeps in f32: {}", compared.kept.join(", "))),
            ("Device", computer::device(device)),
            ])
}

/// Compares the ways on the first GPU, or on the CPU.
pub fn main() -> Result<()> {
    let mut args = std::env::args_os().skip(1);
    let kept = args.next();
    ensure!(args.next().is_none(), "usage: inference [FILE]");
    let name = format!("tch-amp-inference-{}.pt", std::process::id());
    let file = kept.as_ref().map_or_else(|| std::env::temp_dir().join(name), Into::into);
    // On one thread, other programs on the machine disturb the figures least.
    tch::set_num_threads(1);
    let device = Device::cuda_if_available();
    let result = run(device, &file, 256, 30);
    if kept.is_none() {
        // Nothing is there to be removed if the example failed before it wrote the file.
        let _removed = std::fs::remove_file(&file);
    }
    let compared = result?;
    print(&compared.table);
    let report = below_target("inference-report.html");
    page(&compared, device).write(&report)?;
    print(format_args!("Report: {}", report.display()));
    Ok(())
}
