//! The loss of the verdicts, which takes logits.

use anyhow::{Result, ensure};
use tch::{Device, Reduction, Tensor};
use tch_amp::autocast;

/// The cross-entropy of logits and one label for all of them. It takes logits because autocast refuses probabilities:
/// see [`plain_bce`].
pub fn bce(logits: &Tensor, label: f64) -> Tensor {
    let labels = logits.full_like(label);
    logits.binary_cross_entropy_with_logits::<Tensor>(&labels, None, None, Reduction::Mean)
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
