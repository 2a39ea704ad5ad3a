//! A custom autograd function for an operation that libtorch lacks: sparsemax, a softmax whose outputs can be exactly
//! zero.
//!
//! `cargo run --example sparsemax`
//!
//! Source of the formulas, the projection onto the simplex and its Jacobian: Martins and Astudillo, "From Softmax to
//! Sparsemax: A Sparse Model of Attention and Multi-Label Classification" (2016).

use anyhow::{Result, ensure};
use tch::{Device, Kind, Tensor};
use tch_amp::function::{BackwardContext, ForwardContext, Function, FunctionResult, GradOutputs};
use tch_amp::gradcheck::{gradcheck, gradgradcheck};
use tch_amp::try_autocast;

/// Sparsemax along the last dimension.
struct Sparsemax;

impl Function for Sparsemax {
    type Outputs = Tensor;
    type Gradients = Tensor;

    fn forward(&self, ctx: &mut ForwardContext, inputs: &[&Tensor]) -> FunctionResult<Tensor> {
        let z = inputs[0];
        let length = z.size().last().copied().ok_or("sparsemax needs a dimension")?;
        // In descending order, the support is the prefix in which 1 + k z_k exceeds the sum of the k largest.
        let (sorted, _) = z.f_sort(-1, true)?;
        let sums = sorted.f_cumsum(-1, z.kind())?;
        let k = Tensor::arange_start(1, length + 1, (z.kind(), z.device()));
        let is_inside = (&sorted * &k + 1.0).gt_tensor(&sums);
        let size = is_inside.f_sum_dim_intlist(-1, true, Kind::Int64)?;
        let threshold = (sums.gather(-1, &(&size - 1), false) - 1.0) / size;
        let p = (z - threshold).relu();
        ctx.save_for_backward(&[&p]);
        Ok(p)
    }

    fn backward(
        &self,
        ctx: &BackwardContext<'_>,
        grads: &GradOutputs<'_>,
    ) -> FunctionResult<Tensor> {
        let [p] = ctx.saved_tensors()?;
        // On the support, the gradient minus its mean over the support; zero elsewhere.
        let support = p.gt(0.0).to_kind(p.kind());
        let count = support.sum_dim_intlist(-1, true, p.kind());
        let mean = (&grads[0] * &support).sum_dim_intlist(-1, true, p.kind()) / count;
        Ok((&grads[0] - mean) * support)
    }

    /// The cumulative sums need f32.
    fn cast_inputs(&self, _: Device) -> Option<Kind> {
        Some(Kind::Float)
    }
}

/// Prints a sparsemax, checks its derivatives, and runs it under autocast.
pub fn main() -> Result<()> {
    let z = Tensor::from_slice(&[1.0f64, 0.8, 0.1, -1.0]).set_requires_grad(true);
    let p = Sparsemax.apply(&[&z])?;
    println!("softmax   {:.3?}", Vec::<f64>::try_from(z.softmax(0, Kind::Double))?);
    println!("sparsemax {:.3?}", Vec::<f64>::try_from(&p)?);
    let sum = p.sum(Kind::Double).double_value(&[]);
    ensure!((sum - 1.0).abs() < 1e-12, "the outputs sum to one, not to {sum}");

    // Compare both derivatives with finite differences.
    let batch = Tensor::randn([3, 5], (Kind::Double, Device::Cpu)).set_requires_grad(true);
    gradcheck(|x| Sparsemax.apply(x), &[&batch])?;
    gradgradcheck(|x| Sparsemax.apply(x), &[&batch])?;
    println!("gradcheck and gradgradcheck: ok");

    // Under autocast the input is bf16. The function runs in f32, and the gradient flows back through the cast.
    let w = Tensor::randn([5, 5], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let x = Tensor::randn([3, 5], (Kind::Float, Device::Cpu));
    let p = try_autocast(Device::Cpu, || Sparsemax.apply(&[x.matmul(&w)]))?;
    p.select(1, 0).sum(Kind::Float).backward();
    println!("under autocast: output {:?}, gradient of the weight {:?}", p.kind(), w.grad().kind());
    ensure!((p.kind(), w.grad().kind()) == (Kind::Float, Kind::Float), "both are f32");
    Ok(())
}
