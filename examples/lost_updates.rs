//! Weights of 1 that Adam changes by 0.0001 in each step: in fp16 and bf16 they stay at 1, and with master weights they
//! follow f32 weights. Prints a table and draws a plot.
//!
//! `cargo run --features insight --example lost_updates -- lost-updates.svg`

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use run_report::{Plot, Series, Spacing};
use tch::{Device, Kind, Tensor};
use tch_amp::optim::{Adam, MasterWeights};

const STEPS: i64 = 500;
const LR: f64 = 1e-4;
/// Enough weights that the noise of stochastic rounding is small in their mean.
const WEIGHTS: i64 = 256;

const STYLE: &str = "
svg { --ink: #1b1f24; --soft: #59636e; --rule: #d5dae0; background: #ffffff; }
.f32 { --line: #1b1f24; } .fp16 { --line: #d55e00; } .bf16 { --line: #0072b2; }
.copies { --line: #e69f00; } .remainders { --line: #009e73; } .random { --line: #b0569a; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6e9ed; --soft: #9aa4af; --rule: #343b44; background: #14171b; }
  .f32 { --line: #e6e9ed; } .fp16 { --line: #ff8a3d; } .bf16 { --line: #56b4e9; }
  .copies { --line: #f0c04a; } .remainders { --line: #2fc99a; } .random { --line: #f08ac6; }
}
text { fill: var(--soft); font: 12px system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif; }
.label, .legend { fill: var(--ink); }
.tick.y { text-anchor: end; } .tick.x, .label { text-anchor: middle; }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); fill: none; }
.curve { stroke: var(--line); fill: none; stroke-width: 2; }
.raw { stroke: var(--line); fill: none; stroke-width: 1; opacity: .4; }
/* These lines coincide: each is wider than the one drawn over it. */
.curve.f32 { stroke-width: 7; stroke-opacity: .3; }
.curve.fp16 { stroke-width: 6; } .curve.bf16 { stroke-width: 3; stroke-dasharray: 9 7; }
";

/// One training run.
struct Run {
    name: &'static str,
    label: &'static str,
    kind: Kind,
    masters: MasterWeights,
}

const RUNS: [Run; 6] = [
    Run::new("f32", "f32", Kind::Float, MasterWeights::None),
    Run::new("fp16", "fp16", Kind::Half, MasterWeights::None),
    Run::new("bf16", "bf16", Kind::BFloat16, MasterWeights::None),
    Run::new("random", "bf16, stochastic rounding", Kind::BFloat16, RANDOM),
    Run::new("remainders", "bf16, 16-bit remainders", Kind::BFloat16, MasterWeights::Remainder),
    Run::new("copies", "fp16, f32 copies", Kind::Half, MasterWeights::Float),
];
const RANDOM: MasterWeights = MasterWeights::StochasticRounding { seed: 1 };

impl Run {
    const fn new(
        name: &'static str,
        label: &'static str,
        kind: Kind,
        masters: MasterWeights,
    ) -> Self {
        Self { name, label, kind, masters }
    }

    /// Trains, and returns the weights before the first step and after each one, as f64, and the last masters, if any.
    fn train(&self) -> Result<(Vec<Tensor>, Option<Tensor>)> {
        let w = Tensor::ones([WEIGHTS], (self.kind, Device::Cpu)).set_requires_grad(true);
        let weights = [w.shallow_clone()];
        let mut opt = Adam::default().master_weights(self.masters).build(&weights, LR)?;
        let mut seen = vec![w.detach().to_kind(Kind::Double)];
        for _ in 0..STEPS {
            opt.zero_grad()?;
            // The gradient is always -1, so that each step of Adam adds the learning rate.
            (-&w).sum(self.kind).backward();
            opt.step()?;
            // The cast to f64 makes a copy.
            seen.push(w.detach().to_kind(Kind::Double));
        }
        Ok((seen, opt.master_weight(0)?))
    }
}

/// Writes the plot to the path of the command line, or to `target/` of a checkout.
pub fn main() -> Result<()> {
    let folder = if Path::new("target").is_dir() { "target" } else { "" };
    let path = std::env::args_os().nth(1).map(PathBuf::from);
    run(&path.unwrap_or_else(|| Path::new(folder).join("lost-updates.svg")))
}

/// Trains in every mode and writes the plot.
///
/// # Errors
///
/// If the file cannot be written, or the weights do not have the expected values.
pub fn run(path: &Path) -> Result<()> {
    for kind in [Kind::Half, Kind::BFloat16] {
        let sum = Tensor::from(1.0 + LR).to_kind(kind).double_value(&[]);
        println!("1 + {LR} is {sum} in {kind:?}");
        ensure!(sum == 1.0, "the update is not lost");
    }
    let trained = RUNS.iter().map(Run::train).collect::<Result<Vec<_>>>()?;
    let (seen, masters): (Vec<_>, Vec<_>) = trained.into_iter().unzip();
    println!("\nafter {STEPS} steps            weight   master");
    for ((run, steps), master) in RUNS.iter().zip(&seen).zip(&masters) {
        let master = master.as_ref().map_or("-".into(), |master| format!("{:.5}", mean(master)));
        println!("{:<26} {:.5}  {master}", run.label, mean(last(steps)?));
    }
    println!(
        "A weight is its master rounded to nearest; the next update is applied to the master."
    );
    check(&seen)?;
    for master in masters.iter().flatten() {
        ensure!(goes_all_the_way(master), "masters follow f32 weights");
    }
    let failed = || format!("cannot write the plot to {}", path.display());
    std::fs::write(path, picture(&seen)).with_context(failed)?;
    println!("\nthe plot is in {}", path.display());
    Ok(())
}

fn last(steps: &[Tensor]) -> Result<&Tensor> {
    steps.last().context("there is a first step")
}

fn mean(weights: &Tensor) -> f64 {
    weights.mean(Kind::Double).double_value(&[])
}

fn goal() -> f64 {
    1.0 + LR * STEPS as f64
}

/// Whether the mean is the sum of all updates, up to rounding. Each step rounds to f32, which below 2 changes a number
/// by at most 2^-24; the rounding inside Adam is a tenth of that.
fn goes_all_the_way(numbers: &Tensor) -> bool {
    (mean(numbers) - goal()).abs() < 1.1 * STEPS as f64 * 2f64.powi(-24)
}

/// Checks what the plot shows.
fn check(seen: &[Vec<Tensor>]) -> Result<()> {
    let [float, half, bfloat, random, remainders, copies] = seen else {
        anyhow::bail!("each run has its place");
    };
    let all = |weights: &Tensor, value: f64| weights.eq(value).all().int64_value(&[]) == 1;
    ensure!(goes_all_the_way(last(float)?), "f32 weights have all updates");
    for steps in [half, bfloat] {
        ensure!(steps.iter().all(|weights| all(weights, 1.0)), "without masters they stay at 1");
    }
    for (weights, float) in copies.iter().zip(float) {
        let rounded = float.to_kind(Kind::Half).to_kind(Kind::Double);
        ensure!(weights.equal(&rounded), "fp16 weights with copies are the f32 ones, rounded");
    }
    for (weights, float) in remainders.iter().zip(float) {
        // Between 1 and 2, neighbouring bf16 numbers are 2^-7 apart.
        let off = (weights - float).abs().max().double_value(&[]);
        ensure!(off <= 2f64.powi(-8), "bf16 weights with remainders are the f32 ones, rounded");
    }
    // A step rounds up with a probability of its length divided by the gap between neighbours. The bound is four
    // standard deviations of the mean.
    let (gap, probability) = (2f64.powi(-7), LR * 128.0);
    let sums = STEPS as f64 / WEIGHTS as f64;
    let deviation = gap * (sums * probability * (1.0 - probability)).sqrt();
    let off = (mean(last(random)?) - goal()).abs();
    ensure!(off < 4.0 * deviation, "the mean of stochastic rounding is off by {off}");
    Ok(())
}

fn series(run: &Run, steps: &[Tensor]) -> Series {
    let points = |value: &dyn Fn(&Tensor) -> f64| {
        steps.iter().enumerate().map(|(step, weights)| (step as f64, value(weights))).collect()
    };
    if run.masters != RANDOM {
        return Series::line(run.name, run.label, points(&mean));
    }
    // With stochastic rounding, a single weight is drawn as well.
    let label = "bf16, stochastic rounding (thin line: one weight)";
    let faint = points(&|w| w.double_value(&[0]));
    Series { faint, ..Series::line(run.name, label, points(&mean)) }
}

/// The SVG file: the plot with a style of its own.
fn picture(seen: &[Vec<Tensor>]) -> String {
    let series: Vec<_> = RUNS.iter().zip(seen).map(|(run, steps)| series(run, steps)).collect();
    let labels = ["step of Adam with a learning rate of 0.0001", "mean of 256 weights"];
    let description =
        "Weights of 1 under small updates: plain fp16 and bf16 stay at 1, the others change";
    let svg = Plot::new(description, labels, Spacing::Linear, series).svg();
    let (opening, rest) = svg.split_once('>').unwrap_or((&svg, ""));
    let namespace = "xmlns=\"http://www.w3.org/2000/svg\"";
    format!("{opening} {namespace} width=\"760\" height=\"340\">\n<style>{STYLE}</style>{rest}")
}
