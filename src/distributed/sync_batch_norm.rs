//! Batch normalization over the batches of all ranks.

use std::borrow::Borrow;

use tch::nn::{self, BatchNormConfig, ModuleT, Path};
use tch::{Kind, Tensor, no_grad};

use crate::distributed::{ProcessGroup, ReduceOp};
use crate::error::{Error, Result, ensure_defined};
use crate::ffi::{self, OutsideRegions};
use crate::function::{BackwardContext, ForwardContext, Function, FunctionResult, GradOutputs};

/// Batch normalization by the mean and variance of the batches of all ranks together, for training with small batches.
/// Corresponds to `torch.nn.SyncBatchNorm`, which runs on GPUs only; this one runs on the CPU as well.
///
/// It replaces `tch::nn::batch_norm1d`, [`batch_norm2d`](tch::nn::batch_norm2d) and
/// [`batch_norm3d`](tch::nn::batch_norm3d), and its variables have the same names. The input has the shape
/// `[N, C, ..]`, and the output has the same shape and dtype. The ranks may have batches of different sizes, even empty
/// ones. Statistics are computed in f32, or in f64 for f64 inputs. In evaluation the running statistics are used, and
/// nothing is communicated. In training each layer communicates once in the forward and once in the backward pass, so
/// all ranks have to run the same layers in the same order. It cannot be differentiated twice.
///
/// # Examples
///
/// ```
/// use tch::nn::{self, ModuleT};
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::distributed::{ProcessGroup, Store, SyncBatchNorm};
///
/// let store = Store::in_process()?;
/// std::thread::scope(|scope| {
///     for rank in 0..2 {
///         let store = &store;
///         scope.spawn(move || {
///             let group = ProcessGroup::new(store, rank, 2).unwrap();
///             let vs = nn::VarStore::new(Device::Cpu);
///             let config = nn::BatchNormConfig { affine: false, ..Default::default() };
///             let bn = SyncBatchNorm::new(vs.root(), 1, config, &group);
///             // One row on each rank: alone, each would be normalized to zero.
///             let ys = bn.forward_t(&Tensor::from_slice(&[rank as f32]).view([1, 1]), true);
///             let expected = if rank == 0 { -1.0 } else { 1.0 };
///             assert!((ys.double_value(&[0, 0]) - expected).abs() < 1e-4);
///         });
///     }
/// });
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Debug)]
pub struct SyncBatchNorm {
    /// The variables: the running statistics, and the weight and bias unless `affine` is off in the configuration.
    pub bn: nn::BatchNorm,
    eps: f64,
    momentum: f64,
    group: ProcessGroup,
}

impl SyncBatchNorm {
    /// Makes the layer for `out_dim` channels, with the options of tch's batch normalization.
    pub fn new<'a>(
        vs: impl Borrow<Path<'a>>,
        out_dim: i64,
        config: BatchNormConfig,
        group: &ProcessGroup,
    ) -> Self {
        let (eps, momentum) = (config.eps, config.momentum);
        // The number of dimensions only matters for tch's own forward pass.
        let bn = nn::batch_norm1d(vs, out_dim, config);
        Self { bn, eps, momentum, group: group.clone() }
    }

    /// Normalizes the input. With `train`, it uses the statistics of the batches of all ranks and updates the running
    /// statistics. Otherwise it uses the running statistics.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the input is undefined or its second dimension is not the layer's number of
    /// channels, and in training if all ranks together have fewer than two values per channel; the errors of
    /// [`ProcessGroup::all_gather`].
    pub fn f_forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        let (mean, var) = (&self.bn.running_mean, &self.bn.running_var);
        let size = match self.size_of(xs) {
            Err(error) if train => return Err(refuse(&self.group, error)),
            checked => checked?,
        };
        let (weight, bias) = (self.bn.ws.as_ref(), self.bn.bs.as_ref());
        if !train {
            let (momentum, eps) = (self.momentum, self.eps);
            let _of_no_call = ffi::statistics_momentum(mean, var, false, momentum)?;
            let running = (Some(mean), Some(var));
            // As in training, no region changes the dtype.
            let _own = OutsideRegions::enter();
            let ys =
                xs.f_batch_norm(weight, bias, running.0, running.1, false, momentum, eps, false)?;
            return Ok(ys);
        }
        let dims: Vec<_> = (0..size.len() as i64).filter(|dim| *dim != 1).collect();
        let normalize = Normalize { dims, eps: self.eps, group: self.group.clone() };
        let nothing = Tensor::new();
        let (weight, bias) = (weight.unwrap_or(&nothing), bias.unwrap_or(&nothing));
        let [ys, mean, var] = normalize.apply(&[xs, weight, bias])?;
        self.update(&mean, &var)?;
        Ok(ys)
    }

    /// Returns the size of an input, or an error if it does not fit the layer.
    fn size_of(&self, xs: &Tensor) -> Result<Vec<i64>> {
        ensure_defined("xs", xs)?;
        let size = ffi::sizes(xs)?;
        let (channels, kind) = (self.bn.running_mean.size(), xs.f_kind()?);
        let is_floating = matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16);
        if size.get(1) != channels.first() || !is_floating {
            let channels = channels.first().unwrap_or(&0);
            let rule = format!("but must be floating-point, and its second dimension {channels}");
            let problem = format!("is {kind:?} {size:?}, {rule}");
            return Err(Error::InvalidArgument { name: "xs", problem });
        }
        Ok(size)
    }

    fn update(&self, mean: &Tensor, var: &Tensor) -> Result<()> {
        let _own = OutsideRegions::enter();
        let (running_mean, running_var) = (&self.bn.running_mean, &self.bn.running_var);
        let momentum = ffi::statistics_momentum(running_mean, running_var, true, self.momentum)?;
        for (running, new) in [(running_mean, mean), (running_var, var)] {
            let new = new.f_to_kind(running.f_kind()?)?;
            let step = new.f_sub(running)?.f_mul(&number(momentum, running)?)?;
            drop(no_grad(|| running.shallow_clone().f_add_(&step))?);
        }
        Ok(())
    }
}

impl ModuleT for SyncBatchNorm {
    /// As [`f_forward_t`](SyncBatchNorm::f_forward_t), but panics where that returns an error, as tch's modules do.
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        match self.f_forward_t(xs, train) {
            Ok(ys) => ys,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Tells the ranks that wait for the statistics of this one that it has none, and returns the reason.
fn refuse(group: &ProcessGroup, error: Error) -> Error {
    let _order = group.begin();
    group.refuse("SyncBatchNorm", error)
}

/// Normalizes by the statistics of all ranks. The outputs are the normalized numbers, the mean and the unbiased
/// variance.
struct Normalize {
    /// All dimensions but that of the channels.
    dims: Vec<i64>,
    eps: f64,
    group: ProcessGroup,
}

/// The mean, the sum of squared deviations and the count of numbers.
struct Moments {
    mean: Tensor,
    squares: Tensor,
    count: f64,
}

impl Normalize {
    /// A view of one number per channel that broadcasts over the input.
    fn spread(&self, channels: &Tensor) -> Result<Tensor> {
        let mut shape = vec![1; self.dims.len() + 1];
        shape[1] = -1;
        Ok(channels.f_view(shape.as_slice())?)
    }

    fn sum(&self, numbers: &Tensor) -> Result<Tensor> {
        Ok(numbers.f_sum_dim_intlist(self.dims.as_slice(), false, numbers.f_kind()?)?)
    }

    /// The moments of this rank's batch, in three rows.
    fn moments_of(&self, xs: &Tensor, channels: i64) -> Result<Tensor> {
        let _own = OutsideRegions::enter();
        let count = ffi::numel(xs) as f64 / channels.max(1) as f64;
        let mean = self.sum(xs)?.f_div(&number(count.max(1.0), xs)?)?;
        let squares = self.sum(&xs.f_sub(&self.spread(&mean)?)?.f_square()?)?;
        let counts = number(count, &mean)?.f_expand_as(&mean)?;
        Ok(Tensor::f_stack(&[mean, squares, counts], 0)?)
    }

    /// The moments of the batches of all ranks.
    ///
    /// Source: Chan, Golub and LeVeque, *Updating Formulae and a Pairwise Algorithm for Computing Sample Variances*,
    /// 1979.
    fn moments(&self, xs: &Tensor) -> Result<Moments> {
        let channels = xs.size()[1];
        let mine = self.moments_of(xs, channels).map_err(|error| refuse(&self.group, error))?;
        let all = Tensor::f_stack(&self.group.all_gather(&mine)?, 0)?;
        let [means, squares, counts] = [0, 1, 2].map(|row| all.f_select(1, row));
        let (means, squares, counts) = (means?, squares?, counts?);
        let total = counts.f_sum_dim_intlist([0i64].as_slice(), false, counts.f_kind()?)?;
        let sum =
            |numbers: Tensor| numbers.f_sum_dim_intlist([0i64].as_slice(), false, None::<Kind>);
        let mean = sum(means.f_mul(&counts)?)?.f_div(&total)?;
        let apart = means.f_sub(&mean)?.f_square()?.f_mul(&counts)?;
        let squares = sum(squares.f_add(&apart)?)?;
        let count = if channels == 0 { 0.0 } else { total.f_double_value(&[0])? };
        Ok(Moments { mean, squares, count })
    }
}

/// A number in the dtype of a tensor.
fn number(value: f64, like: &Tensor) -> Result<Tensor> {
    ffi::number_new(value, like.f_kind()?, like.device())
}

/// The dtype in which statistics are computed.
fn wide(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

impl Function for Normalize {
    type Outputs = [Tensor; 3];
    type Gradients = [Option<Tensor>; 3];

    fn forward(&self, ctx: &mut ForwardContext, inputs: &[&Tensor]) -> FunctionResult<[Tensor; 3]> {
        let _own = OutsideRegions::enter();
        let [input, weight, bias] = inputs else { return Err("three inputs".into()) };
        let kind = input.f_kind()?;
        let xs = input.f_to_kind(wide(kind))?;
        let Moments { mean, squares, count } = self.moments(&xs)?;
        if count < 2.0 {
            let problem = "has fewer than two values per channel on all ranks together".to_owned();
            return Err(Error::InvalidArgument { name: "xs", problem }.into());
        }
        let scale =
            squares.f_div(&number(count, &xs)?)?.f_add(&number(self.eps, &xs)?)?.f_rsqrt()?;
        let mut ys = xs.f_sub(&self.spread(&mean)?)?.f_mul(&self.spread(&scale)?)?;
        if weight.defined() {
            ys = ys.f_mul(&self.spread(&weight.f_to_kind(wide(kind))?)?)?;
        }
        if bias.defined() {
            ys = ys.f_add(&self.spread(&bias.f_to_kind(wide(kind))?)?)?;
        }
        let var = squares.f_div(&number(count - 1.0, &xs)?)?;
        ctx.save_for_backward(&[*input, *weight, &mean, &scale]);
        ctx.save_value(count);
        ctx.mark_non_differentiable(&[&mean, &var]);
        Ok([ys.f_to_kind(kind)?, mean, var])
    }

    fn backward(
        &self,
        ctx: &BackwardContext<'_>,
        grads: &GradOutputs<'_>,
    ) -> FunctionResult<[Option<Tensor>; 3]> {
        let _own = OutsideRegions::enter();
        let [input, weight, mean, scale] = ctx.saved_tensors()?;
        let count = *ctx.saved_value::<f64>()?;
        let kind = wide(input.f_kind()?);
        let dy = grads[0].f_to_kind(kind)?;
        let scale = self.spread(&scale)?;
        let normal = input.f_to_kind(kind)?.f_sub(&self.spread(&mean)?)?.f_mul(&scale)?;
        let (sum, product) = (self.sum(&dy)?, self.sum(&dy.f_mul(&normal)?)?);
        // The gradients of the weight and the bias are this rank's: they are averaged with those of all parameters.
        let of_weight = weight.defined().then(|| product.shallow_clone());
        let of_bias = Some(sum.shallow_clone());
        if !ctx.needs_input_grad(0)? {
            return Ok([None, of_weight, of_bias]);
        }
        let mut sums = Tensor::f_stack(&[sum, product], 0)?;
        self.group.all_reduce(&mut sums, ReduceOp::Sum)?;
        let means = sums.f_div(&number(count, &dy)?)?;
        let (sum, product) = (self.spread(&means.f_get(0)?)?, self.spread(&means.f_get(1)?)?);
        let dx = dy.f_sub(&sum)?.f_sub(&normal.f_mul(&product)?)?.f_mul(&scale)?;
        let dx =
            if weight.defined() { dx.f_mul(&self.spread(&weight.f_to_kind(kind)?)?)? } else { dx };
        Ok([Some(dx), of_weight, of_bias])
    }

    fn once_differentiable(&self) -> bool {
        true
    }

    fn name(&self) -> &'static str {
        "SyncBatchNorm"
    }
}
