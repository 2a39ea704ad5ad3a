//! Steps whose culprit is known, because it was planted. `benches/oracle/insight_tools.py` has the same ones.

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{Explanation, Tracer, named};
use tch_amp::recompute::checkpointed;
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Autocast, Result, function};

use Culprit::{Backward, Forward, Input, Nothing, Parameter, Scale};

/// The names of an operator, the first of which is printed. It has several if the program calls one operator, which
/// calls another, or if autograd names it differently. Compared by `operator_name` of `verdict.rs`.
type Names = &'static [&'static str];

/// What is to blame: an operator in a part of the model.
#[derive(Clone, Copy, Debug)]
pub enum Culprit {
    Forward(Names, &'static str),
    /// A forward operator whose derivative is to blame.
    Backward(Names, &'static str),
    /// The loss scale alone.
    Scale,
    Parameter(&'static str),
    Input,
    /// Every gradient is finite.
    Nothing,
}

/// A step: two linear layers, `first` and `last`, whose weights are the identity, with what is planted between them.
#[derive(Debug)]
pub struct Case {
    pub name: &'static str,
    pub dtype: Kind,
    pub scale: f64,
    pub culprit: Culprit,
    planted: fn(&Tensor, &nn::Linear) -> Tensor,
}

const fn case(
    name: &'static str,
    dtype: Kind,
    culprit: Culprit,
    planted: fn(&Tensor, &nn::Linear) -> Tensor,
) -> Case {
    Case { name, dtype, scale: 1.0, culprit, planted }
}

const PRODUCT: Names = &["matmul", "mm", "bmm"];
const LINEAR: Names = &["linear", "addmm", "mm"];
const CONVOLUTION: Names = &["conv2d", "convolution", "slow_conv2d_forward", "mkldnn_convolution"];

const F32: Kind = Kind::Float;
const FP16: Kind = Kind::Half;

/// The `-inf` of a mask that excludes the first `count` of four numbers.
fn mask(x: &Tensor, count: i64) -> Tensor {
    let excluded = Tensor::arange(4, (Kind::Int64, Device::Cpu)).lt(count);
    x.masked_fill(&excluded, f64::NEG_INFINITY)
}

pub const CASES: &[Case] = &[
    case("product of large activations", FP16, Forward(PRODUCT, "planted"), |x, _| {
        (x * 300).matmul(&(x * 300).transpose(0, 1)).matmul(x)
    }),
    case("linear layer with large weights", FP16, Forward(LINEAR, "planted"), |x, large| {
        (x * 100).apply(large)
    }),
    case("attention scores in fp16", FP16, Forward(PRODUCT, "planted"), |x, _| {
        let q = (x * 300).view([1, 2, 4]);
        q.bmm(&q.transpose(1, 2)).softmax(-1, None::<Kind>).bmm(&x.view([1, 2, 4])).view([2, 4])
    }),
    case("exponential in fp16", FP16, Forward(&["exp"], "planted"), |x, _| {
        (x * 20).to_kind(FP16).exp()
    }),
    case("square in fp16", FP16, Forward(&["pow"], "planted"), |x, _| {
        (x * 300).to_kind(FP16).pow_tensor_scalar(2)
    }),
    case("long sum in fp16", FP16, Forward(&["sum"], "planted"), |x, _| {
        let many = (x * 2000).to_kind(FP16).expand([100, 2, 4], false);
        many.sum_dim_intlist(0, false, None::<Kind>)
    }),
    case("convolution in fp16", FP16, Forward(CONVOLUTION, "planted"), |x, _| {
        let image = (x * 300).view([1, 1, 2, 4]);
        let kernel = Tensor::full([1, 1, 1, 1], 300.0, (F32, Device::Cpu));
        image.conv2d(&kernel, None::<&Tensor>, 1, 0, 1, 1).view([2, 4])
    }),
    case("logarithm of negative numbers", F32, Forward(&["log"], "planted"), |x, _| (x * -1).log()),
    case("division by zero", F32, Forward(&["div"], "planted"), |x, _| x / x.zeros_like()),
    case(
        "layer norm without variance",
        F32,
        Forward(&["layer_norm", "native_layer_norm"], "planted"),
        |x, _| (x * 0.0).layer_norm([4], None::<&Tensor>, None::<&Tensor>, 0.0, false),
    ),
    case("softmax of a masked row", F32, Forward(&["softmax"], "planted"), |x, _| {
        mask(x, 4).softmax(-1, None::<Kind>)
    }),
    case("square root at zero", F32, Backward(&["sqrt"], "planted"), |x, _| (x * 0.0).sqrt()),
    case("arc cosine at one", F32, Backward(&["acos"], "planted"), |x, _| (x * 0.0 + 1).acos()),
    case("logarithm that `where` excludes", F32, Backward(&["log"], "planted"), |x, _| {
        let zero = x * 0.0;
        zero.zeros_like().where_self(&zero.le(0.0), &zero.log())
    }),
    case("norm of zeros by hand", F32, Backward(&["sqrt"], "planted"), |x, _| {
        let squares = (x * 0.0).square();
        x + squares.sum_dim_intlist(-1, true, None::<Kind>).sqrt()
    }),
    case("large gradient in fp16", FP16, Backward(&["to", "copy"], "planted"), |x, large| {
        // Times 1e7, but in the backward pass only.
        let y = (x * 1e-3).apply(large);
        let scaled = y.to_kind(F32) * 1e7;
        &scaled - (&scaled - y.to_kind(F32)).detach()
    }),
    Case {
        scale: 16777216.0,
        ..case("scale of 2^24", FP16, Scale, |x, large| (x * 1e-3).apply(large))
    },
    case("recomputed exponential", F32, Forward(&["exp"], "planted"), |x, _| {
        let recomputed = |x: &[&Tensor]| Ok(named("planted", || (x[0] * 100).exp()));
        checkpointed(&[x], recomputed).expect("it runs")
    }),
    case("custom function", F32, Forward(&["exp"], "planted"), |x, _| {
        let exponential =
            function(|_, x| Ok((x[0] * 100).exp()), |_, grads| Ok(grads[0].shallow_clone()));
        exponential.apply(&[x]).expect("it runs")
    }),
    case("derivative of a custom function", F32, Backward(&["root"], "planted"), |x, _| {
        let root = function(
            |ctx, x| {
                let y = x[0].sqrt();
                ctx.save_for_backward(&[&y]);
                Ok(y)
            },
            |ctx, grads| {
                let [y] = ctx.saved_tensors()?;
                Ok(&grads[0] / (y * 2))
            },
        );
        root.name("Root").apply(&[&(x * 0.0)]).expect("it runs")
    }),
    case("part of a part", F32, Forward(&["exp"], "planted.inner"), |x, _| {
        named("inner", || (x * 100).exp())
    }),
    case("weight that is infinite", F32, Parameter("last.weight"), |x, _| x.shallow_clone()),
    case("NaN in the batch", F32, Input, |x, _| x.shallow_clone()),
    case("healthy attention mask", F32, Nothing, |x, _| mask(x, 2).softmax(-1, None::<Kind>)),
    case("healthy mask as an input of a part", F32, Nothing, |x, _| {
        let mask = mask(&x.zeros_like(), 2);
        named("inner", || (x + mask).softmax(-1, None::<Kind>))
    }),
];

/// Whether the loss and the gradient of the first layer are finite, and what the tracer says.
pub fn explained(case: &Case) -> Result<([bool; 2], Explanation)> {
    let vs = VarStore::new(Device::Cpu);
    let layer = |name: &str, size: f64| -> Result<nn::Linear> {
        let layer = nn::linear(vs.root() / name, 4, 4, Default::default());
        let weight = Tensor::f_eye(4, (F32, Device::Cpu))? * size;
        tch::no_grad(|| -> Result<()> {
            layer.ws.shallow_clone().f_copy_(&weight)?;
            if let Some(bias) = &layer.bs {
                let _zero = bias.shallow_clone().f_zero_()?;
            }
            Ok(())
        })?;
        Ok(layer)
    };
    let (first, planted, last) =
        (layer("first", 1.0)?, layer("planted", 1e3)?, layer("last", 1.0)?);
    let mut x = Tensor::arange(8, (F32, Device::Cpu)).reshape([2, 4]) / 8 + 0.5;
    match case.culprit {
        Parameter(_) => drop(tch::no_grad(|| last.ws.shallow_clone().fill_(f64::INFINITY))),
        Input => x *= f64::NAN,
        _ => {}
    }
    let region = Autocast::new(Device::Cpu).dtype(FP16).enabled(case.dtype == FP16);
    let loss = || {
        region.run(|| {
            let hidden = first.forward(&x);
            let hidden = match case.name {
                // It names itself, where it is run again.
                "recomputed exponential" => (case.planted)(&hidden, &planted),
                _ => named("planted", || (case.planted)(&hidden, &planted)),
            };
            last.forward(&hidden.to_kind(F32)).to_kind(F32).square().mean(None)
        })
    };
    let scaler =
        GradScalerConfig { init_scale: case.scale, ..Default::default() }.build(Device::Cpu)?;
    let mut tracer = Tracer::new(&vs)?;
    tracer.begin(&scaler)?;
    let value = loss()?;
    scaler.backward(&value)?;
    let finite =
        [&value, &first.ws.grad()].map(|tensor| tensor.isfinite().all().int64_value(&[]) != 0);
    let explanation = tracer.explain(&scaler, loss)?;
    Ok((finite, explanation.expect("the limit is not reached")))
}
