//! A generative adversarial network that learns eight Gaussians on a ring: two networks, each with an optimizer, and a
//! scale for each loss.
//!
//! `cargo run --release --example gan -- --amp bf16`
//!
//! `--amp off` trains in f32, and `--amp fp16` needs a GPU to be fast. The example uses the first GPU if there is one,
//! and else the CPU. `--steps N` changes the number of iterations.
//!
//! The generator has two losses that share the graph of the fakes: the verdict of the discriminator, whose gradients
//! pass through two networks, and the distance between the moments of fakes and data. Each is multiplied by a scale of
//! its own.

use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Reduction, Tensor, no_grad};
use tch_amp::optim::Adam;
use tch_amp::scaler::{GradScalerConfig, PerLossScalers, StepCounter};
use tch_amp::{Autocast, autocast};

const USAGE: &str = "usage: gan [--amp off|bf16|fp16] [--steps N]";

const BATCH: i64 = 256;
/// The random numbers from which the generator makes a point.
const NOISE: i64 = 8;
const WIDTH: i64 = 64;
const MODES: i64 = 8;
const RADIUS: f64 = 2.0;
/// The standard deviation of each mode.
const SIGMA: f64 = 0.2;

/// The dtype of the regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amp {
    /// f32, without regions.
    Off,
    /// bf16, without scaling.
    Bf16,
    /// fp16, with a scale for each loss.
    Fp16,
}

impl Amp {
    fn parse(name: &str) -> Result<Self> {
        Ok(match name {
            "off" => Self::Off,
            "bf16" => Self::Bf16,
            "fp16" => Self::Fp16,
            _ => bail!("`{name}` is not one of off, bf16 and fp16\n\n{USAGE}"),
        })
    }

    fn region(self, device: Device) -> Autocast {
        let region = Autocast::new(device);
        match self {
            Self::Off => region.enabled(false),
            Self::Bf16 => region.dtype(Kind::BFloat16),
            Self::Fp16 => region.dtype(Kind::Half),
        }
    }
}

/// What a run has learned.
#[derive(Clone, Copy, Debug)]
pub struct Learned {
    /// The number of modes that the fakes cover.
    pub modes: usize,
    /// The share of the fakes that are close to a mode.
    pub close: f64,
    /// The discriminator's last loss.
    pub discriminator: f64,
    /// The number of steps of the generator that were taken, which excludes those that were skipped.
    pub steps: u64,
}

/// Trains with the options of the command line.
pub fn main() -> Result<()> {
    let (mut amp, mut steps) = (Amp::Bf16, 3000);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().with_context(|| format!("{arg} needs a value\n\n{USAGE}"));
        match arg.as_str() {
            "--amp" => amp = Amp::parse(&value()?)?,
            "--steps" => {
                let text = value()?;
                steps = text.parse().with_context(|| format!("--steps {text}\n\n{USAGE}"))?;
            }
            "-h" | "--help" => {
                println!("{USAGE}");
                return Ok(());
            }
            _ => bail!("unexpected argument `{arg}`\n\n{USAGE}"),
        }
    }
    let device = Device::cuda_if_available();
    // Networks this small gain nothing from several threads, which lose much time to each other on a busy machine.
    tch::set_num_threads(1);
    println!("{}", plain_bce(device)?);
    run(device, amp, steps)?;
    Ok(())
}

/// The centres of the modes, a row each.
fn centres(device: Device) -> Tensor {
    let angles =
        Tensor::arange(MODES, (Kind::Float, device)) * (std::f64::consts::TAU / MODES as f64);
    Tensor::stack(&[angles.cos(), angles.sin()], 1) * RADIUS
}

/// A batch of the data.
fn reals(centres: &Tensor) -> Tensor {
    let mode = Tensor::randint(MODES, [BATCH], (Kind::Int64, centres.device()));
    let noise = Tensor::randn([BATCH, 2], (Kind::Float, centres.device()));
    centres.index_select(0, &mode) + noise * SIGMA
}

/// Two hidden layers.
fn network(vs: &VarStore, inputs: i64, outputs: i64) -> nn::Sequential {
    let root = vs.root();
    nn::seq()
        .add(nn::linear(&root / "first", inputs, WIDTH, Default::default()))
        .add_fn(Tensor::leaky_relu)
        .add(nn::linear(&root / "second", WIDTH, WIDTH, Default::default()))
        .add_fn(Tensor::leaky_relu)
        .add(nn::linear(&root / "out", WIDTH, outputs, Default::default()))
}

/// The cross-entropy of logits and one label for all of them. It takes logits because autocast refuses probabilities:
/// see [`plain_bce`].
fn bce(logits: &Tensor, label: f64) -> Tensor {
    let labels = logits.full_like(label);
    logits.binary_cross_entropy_with_logits::<Tensor>(&labels, None, None, Reduction::Mean)
}

/// The mean and the second moments of points.
fn moments(points: &Tensor) -> Tensor {
    let points = points.to_kind(Kind::Float);
    // A sum of products rather than a matrix product, which the region would round.
    let second = (points.unsqueeze(1) * points.unsqueeze(2)).view([-1, 4]);
    Tensor::cat(&[points, second], 1).mean_dim(0, false, Kind::Float)
}

/// Trains, and prints the losses, the scales and what was learned.
///
/// # Errors
///
/// If libtorch fails, or a loss is not finite at the end.
pub fn run(device: Device, amp: Amp, steps: usize) -> Result<Learned> {
    ensure!(steps > 0, "there must be a step");
    tch::manual_seed(1);
    let (vs_g, vs_d) = (VarStore::new(device), VarStore::new(device));
    let generator = network(&vs_g, NOISE, 2);
    let discriminator = network(&vs_d, 2, 1);
    let adam = Adam::default().betas((0.5, 0.99));
    let (mut opt_g, mut opt_d) = (adam.build(&vs_g, 1e-3)?, adam.build(&vs_d, 1e-3)?);

    // bf16 has the range of f32 and needs no scale; the loop is the same.
    let config = GradScalerConfig::default().enabled(amp == Amp::Fp16);
    let mut scaler_d = config.build(device)?;
    let mut scalers_g = PerLossScalers::with_configs(device, &[config; 2])?;
    let region = || amp.region(device);
    let noise = || Tensor::randn([BATCH, NOISE], (Kind::Float, device));

    let centres = centres(device);
    let bar = progress(steps)?;
    let mut taken = StepCounter::default();
    let mut last = [f64::NAN; 3];
    for step in 1..=steps {
        // One forward pass of the generator serves both networks.
        let reals = reals(&centres);
        let fakes = region().run(|| generator.forward(&noise()))?;

        // The discriminator's loss must not reach the generator, hence `detach`. Zeroing removes the scaled gradients
        // that the generator's losses have left in the discriminator.
        opt_d.zero_grad()?;
        let loss_d = region().run(|| {
            let of_reals = bce(&discriminator.forward(&reals), 1.0);
            of_reals + bce(&discriminator.forward(&fakes.detach()), 0.0)
        })?;
        scaler_d.backward(&loss_d)?;
        let _outcome = scaler_d.step(&mut opt_d)?;
        scaler_d.update()?;

        // A region of its own, because the discriminator's weights have changed since the last.
        let (verdict, distance) = region().run(|| {
            let verdict = bce(&discriminator.forward(&fakes), 1.0);
            (verdict, moments(&fakes).mse_loss(&moments(&reals), Reduction::Mean))
        })?;
        opt_g.zero_grad()?;
        // Both losses have the graph of the fakes in common: keep it for the second.
        scalers_g.backward_retain_graph(0, &verdict, &mut opt_g)?;
        scalers_g.backward(1, &distance, &mut opt_g)?;
        taken.record(scalers_g.step(&mut opt_g)?);
        scalers_g.update()?;

        bar.inc(1);
        if step % (steps / 5).max(1) == 0 || step == steps {
            last = [loss_d, verdict, distance].map(|loss| loss.double_value(&[]));
            let scales = [scaler_d.get_scale()?, scalers_g.get_scale(0)?, scalers_g.get_scale(1)?];
            report(&bar, step, last, (amp == Amp::Fp16).then_some(scales));
        }
    }
    bar.finish_and_clear();
    ensure!(last.iter().all(|loss| loss.is_finite()), "a loss is not finite: {last:?}");

    // For a metric, a region and no scaler, and the points in f32.
    let (modes, close) = coverage(
        &no_grad(|| region().run(|| Tensor::cat(&[0; 8].map(|_| generator.forward(&noise())), 0)))?,
        &centres,
    );
    let learned = Learned { modes, close, discriminator: last[0], steps: taken.count()? };
    println!(
        "{amp:?} on {device:?}: {modes} of {MODES} modes are covered, {:.0} % of the points are within three standard \
         deviations of one, {} of {steps} steps taken",
        100.0 * close,
        learned.steps,
    );
    Ok(learned)
}

/// Prints the losses, and the scales if there are any, above the bar.
fn report(bar: &ProgressBar, step: usize, losses: [f64; 3], scales: Option<[f64; 3]>) {
    let [d, verdict, distance] = losses;
    let scales = scales.map_or_else(String::new, |scales| format!(", scales {scales:?}"));
    bar.suspend(|| {
        println!(
            "step {step}: discriminator {d:.3}, generator {verdict:.3} and {distance:.4}{scales}"
        );
    });
}

/// How many modes have at least half of their share of the points, and the share of points that are within three
/// standard deviations of a mode.
fn coverage(points: &Tensor, centres: &Tensor) -> (usize, f64) {
    let differences = points.to_kind(Kind::Float).unsqueeze(1) - centres.unsqueeze(0);
    let squares = differences.square().sum_dim_intlist(-1, false, Kind::Float);
    let shares =
        squares.le((3.0 * SIGMA).powi(2)).to_kind(Kind::Float).mean_dim(0, false, Kind::Float);
    let covered = shares.ge(0.5 / MODES as f64).sum(Kind::Int64).int64_value(&[]);
    (covered as usize, shares.sum(Kind::Float).double_value(&[]))
}

/// What becomes of `binary_cross_entropy`, which takes probabilities, in a region.
///
/// CUDA's autocast refuses it. Half precision rounds the probability of a confident mistake to 0 or 1, where the
/// logarithm is infinite (PyTorch bounds it by 100), and the gradient of a probability may be too large for fp16. The
/// CPU's autocast computes the loss in f32, which cannot undo the rounding.
///
/// # Errors
///
/// If CUDA accepts it, or the CPU does not.
pub fn plain_bce(device: Device) -> Result<String> {
    let logits = Tensor::from_slice(&[9.0f32]).to_device(device);
    let result = autocast(device, || {
        let zero = logits.zeros_like();
        let probability = logits.to_kind(tch_amp::policy::half_dtype(device)).sigmoid();
        let plain = probability.f_binary_cross_entropy::<Tensor>(&zero, None, Reduction::Mean);
        plain.map(|loss| (loss.double_value(&[]), bce(&logits, 0.0).double_value(&[])))
    })?;
    match result {
        Err(error) => {
            let message = error.to_string();
            let first = message.lines().next().unwrap_or_default();
            ensure!(first.contains("unsafe to autocast"), "{message}");
            Ok(format!("refused in a region on {device:?}: {first}"))
        }
        Ok((plain, with_logits)) => {
            ensure!(device == Device::Cpu, "{device:?} computed binary_cross_entropy in a region");
            Ok(format!(
                "the loss of a confident mistake is {with_logits:.1} with logits, and {plain:.1} of the rounded \
                 probability, which CUDA's autocast refuses"
            ))
        }
    }
}

/// A bar on a terminal, and nothing in a log.
fn progress(steps: usize) -> Result<ProgressBar> {
    let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template("{bar:32} {pos:>5}/{len} {elapsed:>4}")?);
    Ok(bar)
}
