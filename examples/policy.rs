//! A training loop for any policy and any loss scale, both from the command line, with updates computed by hand, as in
//! programs that use jmp.
//!
//! `cargo run --example policy -- p=f32,c=half,o=f32 dynamic`
//!
//! The policy may be anything that [`Policy`] parses, such as `full`, `O1` or `p=f32,c=bf16`. The loss scale may be
//! anything that [`LossScaleState`] parses: `none`, a number, `dynamic` or `dynamic:65536`.

use anyhow::{Result, bail, ensure};
use tch::{Device, Kind, Reduction, Tensor, no_grad};
use tch_amp::Policy;
use tch_amp::function::{GradConfig, grad};
use tch_amp::loss_scale::{LossScale, LossScaleState, all_finite, select_tree};
use tch_amp::optim::MasterWeights;
use tch_amp::policy::OptLevel;

const USAGE: &str = "usage: policy [POLICY [LOSS_SCALE]]

  POLICY      p=f32,c=half,o=f32 (the default), full, bf16, O1 and so on
  LOSS_SCALE  dynamic (the default), dynamic:65536, 1024 or none";

/// The parameters of two layers.
type Params = Vec<Tensor>;

/// Trains with the policy and the loss scale of the command line.
pub fn main() -> Result<()> {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    if args.iter().any(|arg| ["-h", "--help"].contains(arg)) {
        println!("{USAGE}");
        return Ok(());
    }
    match args[..] {
        [] => run("p=f32,c=half,o=f32", "dynamic"),
        [policy] => run(policy, "dynamic"),
        [policy, loss_scale] => run(policy, loss_scale),
        [_, _, extra, ..] => bail!("unexpected argument `{extra}`\n\n{USAGE}"),
    }
}

/// Trains with a policy and a loss scale, both as text.
///
/// # Errors
///
/// If either cannot be parsed, or the loss did not fall.
pub fn run(policy: &str, loss_scale: &str) -> Result<()> {
    tch::manual_seed(1);
    let device = Device::cuda_if_available();
    if let Some(note) = note(policy) {
        println!("{note}");
    }
    let policy = Policy::parse(policy, device)?;
    let loss_scale: LossScaleState = loss_scale.parse()?;
    train(policy, &mut *loss_scale.build(device)?, device)
}

/// Returns a note on the parts of a level that this loop does not apply.
fn note(policy: &str) -> Option<String> {
    let level: OptLevel = policy.parse().ok()?;
    (level.master_weights() != MasterWeights::None).then(|| {
        format!(
            "note: {level} also keeps norms in f32 (Policy::cast_variables) and f32 master weights (in the \
             optimizer). This loop has neither and applies only the dtypes of {level}."
        )
    })
}

/// Computes two layers in the dtype of the parameters.
fn forward(xs: &Tensor, params: &[Tensor]) -> Tensor {
    xs.matmul(&params[0]).relu().matmul(&params[1])
}

fn train(policy: Policy, loss_scale: &mut dyn LossScale, device: Device) -> Result<()> {
    let kind = (Kind::Float, device);
    let xs = Tensor::randn([256, 8], kind);
    let ys = xs.sum_dim_intlist(1, true, Kind::Float);
    let init = [Tensor::randn([8, 32], kind) * 0.3, Tensor::randn([32, 1], kind) * 0.2];
    let mut params: Params = policy.cast_to_param(init.as_slice())?;

    let (mut first, mut last) = (None, f64::NAN);
    for step in 0..300 {
        let leaves: Params = params.iter().map(|w| w.detach().set_requires_grad(true)).collect();
        let (inputs, weights) = policy.cast_to_compute(&(&xs, &leaves))?;
        let outputs = policy.cast_to_output(&forward(&inputs, &weights))?;
        let loss = outputs.to_kind(Kind::Float).mse_loss(&ys, Reduction::Mean);

        let gradients = grad(&[loss_scale.scale(&loss)?], &leaves, &GradConfig::default())?;
        let gradients: Params = loss_scale.unscale(&gradients)?.into_iter().flatten().collect();
        // Clipping and weight decay go here, after unscaling.
        let finite = all_finite(&gradients)?;
        let new: Params = no_grad(|| {
            let descend = |(w, g): (&Tensor, &Tensor)| w - 0.02 * g;
            params.iter().zip(&gradients).map(descend).collect()
        });
        params = select_tree(&finite, &policy.cast_to_param(&new)?, &params)?;
        loss_scale.adjust(&finite)?;

        if step % 100 == 0 || step == 299 {
            last = f64::try_from(&loss)?;
            first.get_or_insert(last);
            println!("{policy}, step {step}: loss {last:.4}, scale {}", loss_scale.value()?);
        }
    }
    let first = first.unwrap_or(f64::NAN);
    ensure!(last < 0.5 * first, "the loss did not fall: {first} -> {last}");
    Ok(())
}
