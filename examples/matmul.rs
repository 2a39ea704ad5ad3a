//! The two custom functions of PyTorch's manual on automatic mixed precision: a matrix product that runs in the dtype
//! of the region, and an extension that is correct in f32 only.
//!
//! `cargo run --example matmul`
//!
//! It uses the first GPU if there is one, in fp16, and else the CPU, in bf16.
//!
//! In Python the first has the decorators `custom_fwd` and `custom_bwd`, without which its backward would mix dtypes.
//! Here the backward of every function runs in the autocast state of its forward. The second has `cast_inputs`.

use std::sync::mpsc::{Receiver, Sender, channel};

use anyhow::{Result, ensure};
use tch::{Device, Kind, Tensor};
use tch_amp::autocast::{autocast_dtype, is_autocast_enabled};
use tch_amp::function::{BackwardContext, ForwardContext, Function, FunctionResult, GradOutputs};
use tch_amp::gradcheck::gradcheck;
use tch_amp::try_autocast;

/// What a pass of a function saw.
#[derive(Debug)]
struct Pass {
    name: &'static str,
    is_autocast: bool,
    given: Kind,
    product: Kind,
}

impl Pass {
    fn new(name: &'static str, given: &Tensor, product: &Tensor) -> Self {
        let is_autocast = is_autocast_enabled(given.device());
        Self { name, is_autocast, given: given.kind(), product: product.kind() }
    }
}

/// The manual's example of a function with several inputs, written with an operation that autocast casts.
#[derive(Clone)]
struct MyMm {
    // On a GPU the backward runs on a thread of libtorch's, hence the channel.
    passes: Sender<Pass>,
}

impl Function for MyMm {
    type Outputs = Tensor;
    type Gradients = [Option<Tensor>; 2];

    fn forward(&self, ctx: &mut ForwardContext, inputs: &[&Tensor]) -> FunctionResult<Tensor> {
        ctx.save_for_backward(inputs);
        let product = inputs[0].f_mm(inputs[1])?;
        self.passes.send(Pass::new("MyMm forward", inputs[0], &product))?;
        Ok(product)
    }

    fn backward(
        &self,
        ctx: &BackwardContext<'_>,
        grads: &GradOutputs<'_>,
    ) -> FunctionResult<Self::Gradients> {
        // `a` and `b` are f32, and the gradient has the dtype of the region. The region of the forward, which is
        // restored for the backward, casts all of them.
        let [a, b] = ctx.saved_tensors()?;
        let gradients = [
            ctx.needs_input_grad(0)?.then(|| grads[0].f_mm(&b.f_tr()?)).transpose()?,
            ctx.needs_input_grad(1)?.then(|| a.f_tr()?.f_mm(&grads[0])).transpose()?,
        ];
        for gradient in gradients.iter().flatten() {
            self.passes.send(Pass::new("MyMm backward", &grads[0], gradient))?;
        }
        Ok(gradients)
    }
}

/// The squared distances between the rows of two matrices, from their norms and their product. The small distance of
/// two nearby rows is a difference of large numbers, of which half precision leaves hardly a correct digit.
struct SquaredDistances {
    passes: Sender<Pass>,
    /// Whether the function declares that it needs f32.
    needs_f32: bool,
}

impl Function for SquaredDistances {
    type Outputs = Tensor;
    type Gradients = [Tensor; 2];

    fn forward(&self, ctx: &mut ForwardContext, inputs: &[&Tensor]) -> FunctionResult<Tensor> {
        ctx.save_for_backward(inputs);
        let [x, y] = [inputs[0], inputs[1]];
        let squares = |rows: &Tensor| (rows * rows).sum_dim_intlist(1, true, None::<Kind>);
        let product = x.f_mm(&y.f_tr()?)?;
        self.passes.send(Pass::new("distances forward", x, &product))?;
        Ok(squares(x) + squares(y).f_tr()? - 2.0 * product)
    }

    fn backward(
        &self,
        ctx: &BackwardContext<'_>,
        grads: &GradOutputs<'_>,
    ) -> FunctionResult<[Tensor; 2]> {
        let [x, y] = ctx.saved_tensors()?;
        let gradient = |g: &Tensor, x: &Tensor, y: &Tensor| -> FunctionResult<Tensor> {
            let product = g.f_mm(y)?;
            self.passes.send(Pass::new("distances backward", g, &product))?;
            Ok((g.sum_dim_intlist(1, true, None::<Kind>) * x - product) * 2.0)
        };
        let g = &grads[0];
        Ok([gradient(g, &x, &y)?, gradient(&g.f_tr()?, &y, &x)?])
    }

    /// PyTorch's `custom_fwd(cast_inputs=torch.float32)`: inside a region the inputs are cast to f32, and both passes
    /// run with autocast off.
    fn cast_inputs(&self, _: Device) -> Option<Kind> {
        self.needs_f32.then_some(Kind::Float)
    }
}

/// Prints the passes since the last call, and fails if there are not three or a product has another dtype.
fn report(passes: &Receiver<Pass>, is_autocast: bool, product: Kind) -> Result<()> {
    let passes: Vec<Pass> = passes.try_iter().collect();
    ensure!(passes.len() == 3, "expected a forward and two gradients: {passes:?}");
    for pass in &passes {
        let state = if pass.is_autocast { "on" } else { "off" };
        let Pass { name, given, .. } = pass;
        println!("{name:18}  autocast {state:3}  given {given:?}, computed in {:?}", pass.product);
        ensure!(pass.product == product && pass.is_autocast == is_autocast, "{pass:?}");
    }
    Ok(())
}

/// The largest relative error of one rounding.
fn unit_roundoff(dtype: Kind) -> f64 {
    if dtype == Kind::BFloat16 { 2f64.powi(-8) } else { 2f64.powi(-11) }
}

/// The largest error of a product in units of what three roundings allow: one of each factor and one of the result.
fn error_in_units(found: &Tensor, a: &Tensor, b: &Tensor, dtype: Kind) -> f64 {
    // The sums themselves are in f32, whose roundings the fourth unit covers.
    let bound = a.abs().mm(&b.abs()) * (4.0 * unit_roundoff(dtype));
    ((found.to_kind(Kind::Float) - a.mm(b)).abs() / bound).max().double_value(&[])
}

/// The error of a tensor relative to the expected one, in the 2-norm.
fn relative(found: &Tensor, expected: &Tensor) -> f64 {
    let norm = |x: &Tensor| x.to_kind(Kind::Double).square().sum(Kind::Double).sqrt();
    (norm(&(found - expected)) / norm(expected)).double_value(&[])
}

/// Applies the matrix product in a region, and compares its gradients with plain f32.
fn matrix_product(device: Device) -> Result<()> {
    let (sender, passes) = channel();
    let my_mm = MyMm { passes: sender };
    let random = |size: [i64; 2]| Tensor::randn(size, (Kind::Float, device));
    let a = random([32, 64]).set_requires_grad(true);
    let b = random([64, 16]).set_requires_grad(true);
    let weights = random([32, 16]);

    let (product, dtype) = try_autocast(device, || {
        anyhow::Ok((my_mm.clone().apply(&[&a, &b])?, autocast_dtype(device)?))
    })?;
    // Outside of the region, as always.
    (product.to_kind(Kind::Float) * &weights).sum(Kind::Float).f_backward()?;
    report(&passes, true, dtype)?;

    // In plain f32 these are the product and its derivatives.
    let (a_f32, b_f32) = (a.detach(), b.detach());
    let errors = [
        error_in_units(&product.detach(), &a_f32, &b_f32, dtype),
        error_in_units(&a.grad(), &weights, &b_f32.tr(), dtype),
        error_in_units(&b.grad(), &a_f32.tr(), &weights, dtype),
    ];
    println!("errors of the product and of both gradients, as shares of the bound: {errors:.2?}");
    ensure!(errors.iter().all(|error| *error <= 1.0), "the gradients are not those of f32");
    ensure!((a.grad().kind(), b.grad().kind()) == (Kind::Float, Kind::Float), "leaves are f32");

    // Without a region nothing is cast, and the derivative can be compared with finite differences.
    let [a, b] = [[3, 4], [4, 2]]
        .map(|size| Tensor::randn(size, (Kind::Double, device)).set_requires_grad(true));
    gradcheck(|inputs| my_mm.clone().apply(inputs), &[&a, &b])?;
    ensure!(passes.try_iter().all(|pass| !pass.is_autocast && pass.product == Kind::Double));
    println!("gradcheck: ok");
    Ok(())
}

/// Applies the distances in a region, with and without `cast_inputs`, and compares them with plain f32.
fn distances(device: Device) -> Result<()> {
    let (sender, passes) = channel();
    // Two clouds of nearby points that are far from the origin.
    let x = Tensor::randn([16, 8], (Kind::Float, device)) + 30.0;
    let y = Tensor::randn([16, 8], (Kind::Float, device)) + 30.0;

    let mut errors = Vec::new();
    for needs_f32 in [false, true] {
        let function = SquaredDistances { passes: sender.clone(), needs_f32 };
        let [x, y] = [&x, &y].map(|points| points.detach().set_requires_grad(true));
        let (found, dtype) = try_autocast(device, || {
            anyhow::Ok((function.apply(&[&x, &y])?, autocast_dtype(device)?))
        })?;
        (found.to_kind(Kind::Float).square().mean(Kind::Float)).f_backward()?;
        report(&passes, !needs_f32, if needs_f32 { Kind::Float } else { dtype })?;

        // The same in plain f32, from the differences themselves.
        let [x2, y2] = [&x, &y].map(|points| points.detach().set_requires_grad(true));
        let expected =
            (x2.unsqueeze(1) - y2.unsqueeze(0)).square().sum_dim_intlist(-1, false, Kind::Float);
        expected.square().mean(Kind::Float).f_backward()?;
        let error = [
            relative(&found.detach(), &expected.detach()),
            relative(&x.grad(), &x2.grad()),
            relative(&y.grad(), &y2.grad()),
        ];
        let how = if needs_f32 { "with cast_inputs" } else { "without cast_inputs" };
        let [value, dx, dy] = error;
        println!("relative errors {how}: distances {value:.0e}, gradients {dx:.0e} and {dy:.0e}");
        errors.push(error);
    }
    // The squares are about 7200 and rounded to 24 bits, so distances of about 16 lose at most nine bits of them.
    ensure!(errors[1].iter().all(|error| *error < 2f64.powi(-12)), "f32 was lost: {errors:?}");
    ensure!(errors[0][0] > 100.0 * errors[1][0], "half precision was not used: {errors:?}");
    Ok(())
}

/// Runs both functions on a device.
///
/// # Errors
///
/// If a pass ran in another dtype than it should, or a result differs from that of plain f32.
pub fn run(device: Device) -> Result<()> {
    tch::manual_seed(1);
    matrix_product(device)?;
    println!();
    distances(device)
}

/// Runs both functions on the first GPU, or on the CPU.
pub fn main() -> Result<()> {
    run(Device::cuda_if_available())
}
