//! Models that are trained at each level.

use rstest::rstest;
use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::Policy;
use tch_amp::optim::AdamW;
use tch_amp::policy::{KeepF32, OptLevel, run_in_f32, run_in_f32_t};

use testkit::for_each_device;

/// A network with norms, which are wrapped so that they accept half-precision inputs on every device.
fn net(vs: &VarStore) -> nn::SequentialT {
    let root = vs.root();
    let relu = |xs: &Tensor| xs.relu();
    nn::seq_t()
        .add(nn::linear(&root / "in", 4, 8, Default::default()))
        .add(run_in_f32_t(nn::batch_norm1d(&root / "bn", 8, Default::default())))
        .add_fn(relu)
        .add(run_in_f32(nn::layer_norm(&root / "norm", vec![8], Default::default())))
        .add(nn::linear(&root / "out", 8, 2, Default::default()))
}

/// Checks a trained model: norms are f32, the other variables have the dtype of parameters, and so have the gradients.
fn check_kinds(vs: &VarStore, policy: Policy) {
    for (name, variable) in vs.variables() {
        let norm = name.starts_with("bn.") || name.starts_with("norm.");
        let kind = if norm { Kind::Float } else { policy.param };
        assert_eq!(variable.kind(), kind, "{name}");
        if variable.requires_grad() {
            assert_eq!(variable.grad().kind(), kind, "the gradient of {name}");
        }
    }
}

/// Reproducible, unordered numbers between -1 and 1.
fn numbers(size: &[i64], device: Device) -> Tensor {
    let count: i64 = size.iter().product();
    (Tensor::arange(count, (Kind::Float, device)) * 1.7).sin().view(size)
}

/// The loss at each step that was taken, for a small regression that starts from the same values at every level.
fn train(level: OptLevel, device: Device) -> Vec<f64> {
    let mut vs = VarStore::new(device);
    let net = net(&vs);
    for mut variable in vs.trainable_variables() {
        let start = if variable.dim() > 1 {
            numbers(&variable.size(), device)
        } else {
            variable.ones_like()
        };
        tch::no_grad(|| variable.copy_(&start));
    }
    let policy = level.policy(device);
    // The wrapped norms need f32 weights, so they keep them at O3, too.
    let keep = if level == OptLevel::O3 { KeepF32::Norms } else { level.keep_f32() };
    let kept = policy.cast_variables(&mut vs, keep).unwrap();
    assert_eq!(kept.len(), if policy.param == Kind::Float { 0 } else { 6 });
    let net = policy.apply_to_t(net).unwrap();
    let masters = level.master_weights();
    let mut opt = AdamW::default().master_weights(masters).build(&vs, 0.02).unwrap();
    let mut scaler = level.grad_scaler(device).unwrap();

    let xs = numbers(&[64, 4], device);
    let targets = xs.matmul(&numbers(&[4, 2], device)) + 1.0;
    let mut losses = Vec::new();
    for _ in 0..60 {
        opt.zero_grad().unwrap();
        let ys = net.forward_t(&xs, true);
        assert_eq!(ys.kind(), policy.output);
        let loss = ys.to_kind(Kind::Float).mse_loss(&targets, Reduction::Mean);
        scaler.backward(&loss).unwrap();
        // fp16 skips steps until the scale fits, and computes the same loss again.
        if scaler.step(&mut opt).unwrap().is_stepped().unwrap() {
            losses.push(loss.double_value(&[]));
        }
        scaler.update().unwrap();
    }
    check_kinds(&vs, policy);
    losses
}

#[rstest]
fn a_model_trains_at_every_level(
    #[values(OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3)] level: OptLevel,
) {
    for_each_device(|device| {
        let losses = train(level, device);
        let in_f32 = train(OptLevel::O0, device);
        // Outputs have 8 bits or more, and the errors of a model's steps add up: 8 units in the last place.
        for (step, (loss, in_f32)) in losses.iter().zip(&in_f32).enumerate().take(15) {
            assert!((loss / in_f32 - 1.0).abs() < 1.0 / 32.0, "step {step}: {loss}, not {in_f32}");
        }
        let (first, last) = (losses[0], losses[losses.len() - 1]);
        assert!(last < 0.01 * first, "{first} to {last}");
    });
}
