//! Linear layers whose input is the result of an activation or of a normalization.

use tch::{Device, Kind, Tensor};

use super::{Linear, check_device, check_floating, invalid, other_dtype, width_of};
use crate::autocast::is_autocast_enabled;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::ffi;

/// The activation in front of a linear layer, for [`activation_linear`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * Phi(x)`, as [`Tensor::gelu`] with `"none"` computes it.
    Gelu,
    /// The approximation of GELU by a hyperbolic tangent, as [`Tensor::gelu`] with `"tanh"` computes it.
    GeluTanh,
    /// `x * sigmoid(x)`, as [`Tensor::silu`] computes it.
    Silu,
    /// `silu(a) * b` of the halves `a` and `b` of the last dimension: the gate comes first.
    ///
    /// Source: Shazeer, *GLU Variants Improve Transformer*, <https://arxiv.org/abs/2002.05202>.
    SwiGlu,
}

/// Which normalization a [`NormConfig`] describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Layer normalization: the mean is subtracted, and the result divided by the standard deviation.
    Layer,
    /// RMSNorm, which divides by the root of the mean square and has no bias.
    ///
    /// Source: Zhang and Sennrich, *Root Mean Square Layer Normalization*, <https://arxiv.org/abs/1910.07467>.
    Rms,
}

/// The normalization in front of a linear layer, for [`norm_linear`].
///
/// tch does not let other crates read the `eps` of an `nn::LayerNorm`: it has to be given again.
/// [`nn::LayerNormConfig`] has 1e-5 unless the program sets another one.
///
/// [`nn::LayerNormConfig`]: tch::nn::LayerNormConfig
#[derive(Clone, Debug, PartialEq)]
pub struct NormConfig {
    /// Which normalization it is.
    pub kind: NormKind,
    /// The sizes of the last dimensions, over which the statistics are taken.
    pub normalized_shape: Vec<i64>,
    /// What is added to the variance, or to the mean square, before its root is taken: finite and at least 0.
    pub eps: f64,
}

impl NormConfig {
    /// Layer normalization with an `eps` of 1e-5, as tch's and PyTorch's.
    pub fn layer(normalized_shape: &[i64]) -> Self {
        Self { kind: NormKind::Layer, normalized_shape: normalized_shape.to_vec(), eps: 1e-5 }
    }

    /// RMSNorm.
    pub fn rms(normalized_shape: &[i64], eps: f64) -> Self {
        Self { kind: NormKind::Rms, normalized_shape: normalized_shape.to_vec(), eps }
    }
}

/// Applies a linear layer to an activation of `xs`, and keeps only `xs` for the backward pass, which computes the
/// activation again. The counterpart of `linear(gelu(xs), weight, bias)` in `torch.nn.functional`.
///
/// `xs` has the shape `[…, width]`, or `[…, 2 * width]` for [`Activation::SwiGlu`], `weight` `[outputs, width]`, and
/// `bias` `[outputs]`. The result has the shape `[…, outputs]`.
///
/// In an autocast region, each of the two operators has the dtype in which the region computes it, on any device. The
/// backward pass uses the same dtypes. For a contiguous `xs`, outputs and gradients have the bits of the two operators.
/// Overrides and plans hold as for these. Gradients can be differentiated again. Never synchronizes.
///
/// # Errors
///
/// [`Error::InvalidArgument`] for shapes, dtypes or devices that do not fit. The `backward()` fails if an operand was
/// changed in place after the forward pass.
///
/// # Examples
///
/// ```
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::autocast;
/// use tch_amp::lean::{Activation, activation_linear};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let up = nn::linear(vs.root() / "up", 8, 32, Default::default());
/// let down = nn::linear(vs.root() / "down", 32, 8, Default::default());
/// let xs = Tensor::randn([16, 8], (Kind::Float, Device::Cpu));
/// let ys = autocast(Device::Cpu, || {
///     // Instead of `down.forward(&up.forward(&xs).gelu("none"))`.
///     activation_linear(&up.forward(&xs), Activation::Gelu, &down.ws, down.bs.as_ref())
/// })??;
/// assert_eq!(ys.kind(), Kind::BFloat16);
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn activation_linear(
    xs: &Tensor,
    activation: Activation,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    check_floating("xs", xs)?;
    let width = width_of("xs", xs)?;
    let is_halved = activation == Activation::SwiGlu;
    if is_halved && width % 2 != 0 {
        let problem = format!("must have an even last dimension for SwiGlu, not {width}");
        return Err(invalid("xs", problem));
    }
    Linear { input: ("xs", xs), weight, bias }.check(if is_halved { width / 2 } else { width })?;
    let activation = match activation {
        Activation::Gelu => ffi::GELU,
        Activation::GeluTanh => ffi::GELU_TANH,
        Activation::Silu => ffi::SILU,
        Activation::SwiGlu => ffi::SWIGLU,
    };
    ffi::activation_linear(xs, activation, weight, bias)
}

/// Applies a linear layer to a normalization of `xs`, and keeps only `xs` for the backward pass, which computes the
/// normalization again. The counterpart of `linear(layer_norm(xs, …), weight, bias)` or of
/// `linear(rms_norm(xs, …), weight, bias)` in `torch.nn.functional`.
///
/// `xs` has the shape `[…, width]` and ends with the sizes of [`normalized_shape`], which `norm_weight` and `norm_bias`
/// have; `weight` has `[outputs, width]`, and `bias` `[outputs]`. The result has the shape `[…, outputs]`.
///
/// In an autocast region, each of the two operators has the dtype in which the region computes it, on any device. The
/// backward pass uses the same dtypes. For a contiguous `xs`, outputs have the bits of the two operators, and so have
/// the gradients with a layer normalization. With an RMSNorm the gradients differ by rounding: in the tests their
/// errors are at most 1.05 times autograd's. Overrides and plans hold as for the two operators. Gradients can be
/// differentiated again. Never synchronizes.
///
/// # Errors
///
/// [`Error::InvalidArgument`] for shapes, dtypes, devices or options that do not fit, and for the bias of an RMSNorm.
/// The `backward()` fails if an operand was changed in place after the forward pass.
///
/// # Examples
///
/// ```
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::autocast;
/// use tch_amp::lean::{NormConfig, norm_linear};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let norm = nn::layer_norm(vs.root() / "norm", vec![8], Default::default());
/// let up = nn::linear(vs.root() / "up", 8, 32, Default::default());
/// let xs = Tensor::randn([16, 8], (Kind::Float, Device::Cpu));
/// let ys = autocast(Device::Cpu, || {
///     // Instead of `up.forward(&norm.forward(&xs))`. If the norm has another `eps` than 1e-5, set `eps` here.
///     let config = NormConfig::layer(&[8]);
///     norm_linear(&xs, &config, norm.ws.as_ref(), norm.bs.as_ref(), &up.ws, up.bs.as_ref())
/// })??;
/// assert_eq!(ys.size(), [16, 32]);
/// # Ok::<(), tch_amp::Error>(())
/// ```
///
/// [`normalized_shape`]: NormConfig::normalized_shape
pub fn norm_linear(
    xs: &Tensor,
    config: &NormConfig,
    norm_weight: Option<&Tensor>,
    norm_bias: Option<&Tensor>,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    check_floating("xs", xs)?;
    Linear { input: ("xs", xs), weight, bias }.check(width_of("xs", xs)?)?;
    check_norm(xs, config, norm_weight, norm_bias)?;
    let norm = ffi::Norm {
        shape: &config.normalized_shape,
        weight: norm_weight,
        bias: norm_bias,
        eps: config.eps,
        is_rms: config.kind == NormKind::Rms,
    };
    ffi::norm_linear(xs, &norm, weight, bias)
}

fn check_norm(
    xs: &Tensor,
    config: &NormConfig,
    norm_weight: Option<&Tensor>,
    norm_bias: Option<&Tensor>,
) -> Result<()> {
    let shape = &config.normalized_shape;
    if shape.is_empty() || !xs.size().ends_with(shape) {
        let problem = format!("must be the last dimensions of xs, {:?}, not {shape:?}", xs.size());
        return Err(invalid("normalized_shape", problem));
    }
    if !(0.0..=f64::MAX).contains(&config.eps) {
        let problem = format!("must be finite and at least 0, not {}", config.eps);
        return Err(invalid("eps", problem));
    }
    if config.kind == NormKind::Rms && norm_bias.is_some() {
        return Err(invalid("norm_bias", "must be None: an RMSNorm has no bias".to_owned()));
    }
    for (name, tensor) in [("norm_weight", norm_weight), ("norm_bias", norm_bias)] {
        let Some(tensor) = tensor else { continue };
        check_floating(name, tensor)?;
        check_device(name, tensor, ("xs", xs))?;
        check_norm_dtype(name, tensor, xs)?;
        if tensor.size() != *shape {
            let problem = format!("must have the shape {shape:?}, not {:?}", tensor.size());
            return Err(invalid(name, problem));
        }
    }
    Ok(())
}

/// Fails unless libtorch's normalizations take a weight or a bias of this dtype: outside of a region they do so on the
/// CPU in f32 beside half precision, and otherwise in the dtype of the input.
fn check_norm_dtype(name: &'static str, tensor: &Tensor, xs: &Tensor) -> Result<()> {
    let (kind, own) = (xs.f_kind()?, tensor.f_kind()?);
    let is_cast = is_autocast_enabled(xs.device());
    let is_f32_on_cpu = own == Kind::Float && kind != Kind::Double && xs.device() == Device::Cpu;
    let is_wide = |kind| kind == Kind::Double;
    if own == kind || is_f32_on_cpu || (is_cast && !is_wide(own) && !is_wide(kind)) {
        return Ok(());
    }
    Err(other_dtype(name, own, ("xs", kind)))
}
