//! A linear layer and the cross entropy of its outputs.

use tch::{Kind, Reduction, Tensor};

use super::{Linear, check_dense, check_device, check_floating, invalid, width_of};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::ffi::{self, CrossEntropy, OutsideRegions};

/// The options of [`linear_cross_entropy`]: those of `torch.nn.functional.cross_entropy`, by their names there, and
/// those that trainers of large models add.
///
/// # Examples
///
/// ```
/// use tch_amp::lean::LinearCrossEntropyConfig;
///
/// let config = LinearCrossEntropyConfig { z_loss: 1e-4, ..Default::default() };
/// assert_eq!(config.ignore_index, -100);
/// ```
#[derive(Debug)]
pub struct LinearCrossEntropyConfig {
    /// Whether the losses of all targets are averaged, added up or returned. By default [`Reduction::Mean`]: over the
    /// targets that are not ignored, by their class weights, as in PyTorch.
    pub reduction: Reduction,
    /// The target that has no loss; -100 by default, as in PyTorch.
    pub ignore_index: i64,
    /// A weight for each class: a floating-point tensor of one dimension on the device of the weight. `None` by
    /// default.
    pub class_weights: Option<Tensor>,
    /// The part of each target that all classes share, from 0, the default, to 1.
    pub label_smoothing: f64,
    /// The limit `c` of the logits, which become `c * tanh(logit / c)`; a positive number. `None` by default.
    ///
    /// Source: Gemma Team, *Gemma 2*, <https://arxiv.org/abs/2408.00118>.
    pub soft_cap: Option<f64>,
    /// The factor of the square of `log(sum(exp(logits)))`, which is added to the loss of each target that is not
    /// ignored. [`Reduction::Mean`] averages it over these targets, whatever their class weights. 0, the default, adds
    /// nothing.
    ///
    /// Source: Chowdhery et al., *PaLM*, <https://arxiv.org/abs/2204.02311>, section 5.
    pub z_loss: f64,
    /// The most bytes that logits may take at a time. The forward pass then computes the gradients of one block of
    /// targets after the other, without the loss scale, and adds up the gradient of the weight in f32. It keeps these
    /// gradients, which have the sizes of `hidden` and `weight`, instead of logits. A block has at least one target.
    ///
    /// With [`Reduction::None`] the backward pass computes the logits a second time. By default `None`: all logits are
    /// kept, in the dtype of the product.
    pub max_bytes: Option<usize>,
}

impl Default for LinearCrossEntropyConfig {
    fn default() -> Self {
        Self {
            reduction: Reduction::Mean,
            ignore_index: -100,
            class_weights: None,
            label_smoothing: 0.0,
            soft_cap: None,
            z_loss: 0.0,
            max_bytes: None,
        }
    }
}

/// Returns the cross entropy of the logits `hidden * weight^T + bias`, which it keeps once at most, in the dtype of the
/// product. The counterpart of `torch.nn.functional.linear` and `cross_entropy`.
///
/// `hidden` has the shape `[…, width]`, `weight` `[classes, width]`, `bias` `[classes]`, and `targets`, of
/// [`Kind::Int64`], the shape of `hidden` without its last dimension. The loss is f32, or f64 if the operands are: a
/// number, or with [`Reduction::None`] one for each target, in the shape of `targets`.
///
/// In an autocast region the products are computed in its dtype, on any device, and the gradients are those of autocast
/// but for the rounding of some last digits: logits in half precision, the loss and the softmax in f32. Outside of a
/// region they have the dtype of the operands. Overrides and plans hold as for `linear`. Where an
/// [`insight::Budget`](crate::insight::Budget) emulates half precision, the two operators are called.
///
/// The logits become their own gradient in the backward pass. A second one through the same graph (`retain_graph`)
/// computes them again. On other devices than the CPU, parts of the logits are converted to f32, which takes up to
/// 64 MiB more, or 96 MiB with smoothed class weights. Never synchronizes.
///
/// # Errors
///
/// [`Error::InvalidArgument`] for shapes, dtypes, devices or options that do not fit, and for a target that is neither
/// a class nor [`ignore_index`](LinearCrossEntropyConfig::ignore_index); nothing has been computed then. On a GPU
/// targets are not checked, because the host would have to wait for them: the loss of a target out of range is NaN.
///
/// The `backward()` fails if an operand was changed in place after the forward pass. The gradients cannot be
/// differentiated again, which fails with a message.
pub fn linear_cross_entropy(
    hidden: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
    config: &LinearCrossEntropyConfig,
) -> Result<Tensor> {
    let options = config.checked(hidden, weight, bias, targets)?;
    ffi::linear_cross_entropy(hidden, weight, bias, targets, &options)
}

/// Returns the logarithm of the probability of each target among the logits `hidden * weight^T + bias`, in the shape of
/// `targets`: what reinforcement learning and evaluations ask for. It keeps what [`linear_cross_entropy`] keeps, and
/// its operands are the same.
///
/// Of `config` it takes [`ignore_index`], whose targets have 0, [`soft_cap`] and [`max_bytes`]; the reduction is not
/// used.
///
/// # Errors
///
/// The same as [`linear_cross_entropy`], and [`Error::InvalidArgument`] for class weights, label smoothing or a z-loss:
/// a probability has none.
///
/// [`ignore_index`]: LinearCrossEntropyConfig::ignore_index
/// [`soft_cap`]: LinearCrossEntropyConfig::soft_cap
/// [`max_bytes`]: LinearCrossEntropyConfig::max_bytes
pub fn token_log_probs(
    hidden: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
    config: &LinearCrossEntropyConfig,
) -> Result<Tensor> {
    for (name, is_set) in [
        ("class_weights", config.class_weights.is_some()),
        ("label_smoothing", config.label_smoothing != 0.0),
        ("z_loss", config.z_loss != 0.0),
    ] {
        if is_set {
            let problem = "is an option of a loss, and the probability of a target has none";
            return Err(invalid(name, problem.to_owned()));
        }
    }
    let options = config.checked(hidden, weight, bias, targets)?;
    let options = CrossEntropy { reduction: Reduction::None, ..options };
    let loss = ffi::linear_cross_entropy(hidden, weight, bias, targets, &options)?;
    let _own = OutsideRegions::enter();
    Ok(loss.f_neg()?)
}

impl LinearCrossEntropyConfig {
    /// Checks these options with the operands of a loss, and returns them for the shim.
    fn checked(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        targets: &Tensor,
    ) -> Result<CrossEntropy<'_>> {
        check_operands(hidden, weight, bias, targets)?;
        check_options(weight, self)?;
        check_targets(weight, targets, self.ignore_index)?;
        Ok(CrossEntropy {
            reduction: self.reduction,
            ignore_index: self.ignore_index,
            class_weights: self.class_weights.as_ref(),
            label_smoothing: self.label_smoothing,
            soft_cap: self.soft_cap.unwrap_or(0.0),
            z_loss: self.z_loss,
            max_bytes: self.max_bytes.unwrap_or(0),
        })
    }
}

fn check_operands(
    hidden: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
) -> Result<()> {
    check_floating("hidden", hidden)?;
    let width = width_of("hidden", hidden)?;
    Linear { input: ("hidden", hidden), weight, bias }.check(width)?;
    check_dense("targets", targets)?;
    if targets.f_kind()? != Kind::Int64 {
        return Err(invalid("targets", "must be of Kind::Int64".to_owned()));
    }
    let rows = hidden.size();
    let places = &rows[..rows.len() - 1];
    if targets.size() != places {
        let problem =
            format!("must have the shape {places:?} of hidden's rows, not {:?}", targets.size());
        return Err(invalid("targets", problem));
    }
    check_device("targets", targets, ("hidden", hidden))
}

fn check_options(weight: &Tensor, config: &LinearCrossEntropyConfig) -> Result<()> {
    if let Reduction::Other(code) = config.reduction {
        let problem = format!("must be None, Mean or Sum, not Other({code})");
        return Err(invalid("reduction", problem));
    }
    let numbers = [
        ("label_smoothing", config.label_smoothing, 0.0..=1.0, "from 0 to 1"),
        ("z_loss", config.z_loss, 0.0..=f64::MAX, "finite and at least 0"),
        (
            "soft_cap",
            config.soft_cap.unwrap_or(1.0),
            f64::MIN_POSITIVE..=f64::MAX,
            "positive and finite",
        ),
    ];
    for (name, number, range, allowed) in numbers {
        if !range.contains(&number) {
            return Err(invalid(name, format!("must be {allowed}, not {number}")));
        }
    }
    if config.max_bytes == Some(0) {
        return Err(invalid("max_bytes", "must be at least 1; None keeps all logits".to_owned()));
    }
    let Some(weights) = &config.class_weights else { return Ok(()) };
    check_floating("class_weights", weights)?;
    let classes = weight.size()[0];
    if weights.size() != [classes] || weights.device() != weight.device() {
        let problem = format!(
            "must have the shape [{classes}] on {:?}, and these have {:?} on {:?}",
            weight.device(),
            weights.size(),
            weights.device()
        );
        return Err(invalid("class_weights", problem));
    }
    Ok(())
}

fn check_targets(weight: &Tensor, targets: &Tensor, ignored: i64) -> Result<()> {
    let classes = weight.size()[0];
    let Some(place) = ffi::target_out_of_range(targets, classes, ignored)? else { return Ok(()) };
    let problem = format!(
        "must be classes from 0 to {}, or {ignored}, which is ignored; number {place} of them is not",
        classes - 1
    );
    Err(invalid("targets", problem))
}
