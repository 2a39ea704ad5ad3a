//! The floating-point operations of matrix products, convolutions and attention, from the shapes of their tensors.

use crate::ffi::insight::RecordedEvent;

use super::report::ProductKind;

/// A product of matrices, or what is computed like one: `batch` products of `m` by `k` and `k` by `n` numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Product {
    pub(super) kind: ProductKind,
    pub(super) batch: u64,
    pub(super) m: u64,
    pub(super) n: u64,
    pub(super) k: u64,
    pub(super) flops: u64,
}

/// Whether an operator computes a product itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// It does. What it runs is a part of it.
    Kernel,
    /// Only if it runs no other operator that does.
    Otherwise,
}

/// The kernels of convolutions, of all devices.
const CONVOLUTIONS: &[&str] = &[
    "mkldnn_convolution",
    "_slow_conv2d_forward",
    "slow_conv3d_forward",
    "slow_conv_dilated2d",
    "slow_conv_dilated3d",
    "_conv_depthwise2d",
    "conv_depthwise3d",
    "_nnpack_spatial_convolution",
    "cudnn_convolution",
    "cudnn_convolution_relu",
    "cudnn_convolution_add_relu",
    "miopen_convolution",
    "miopen_depthwise_convolution",
    "_mps_convolution",
];

const TRANSPOSED: &[&str] = &[
    "slow_conv_transpose2d",
    "slow_conv_transpose3d",
    "cudnn_convolution_transpose",
    "miopen_convolution_transpose",
    "_mps_convolution_transpose",
];

/// The product that an operator computes, from the sizes of its tensors and its booleans.
pub(super) fn product(event: &RecordedEvent) -> Option<(Level, Product)> {
    use Level::{Kernel, Otherwise};
    let input = |place: usize| event.inputs.get(place).map(|tensor| tensor.sizes());
    let name = event.name.strip_prefix("aten::")?;
    // One that failed has no result.
    event.outputs.first()?;
    let found = match name {
        "mm" => (Kernel, matrices(input(0)?, input(1)?)?),
        "bmm" => (Kernel, matrices(input(0)?, input(1)?)?),
        "addmm" | "addmm_" | "_addmm_activation" | "baddbmm" | "baddbmm_" | "addmv" | "addmv_" => {
            (Kernel, matrices(input(1)?, input(2)?)?)
        }
        "mv" | "dot" | "vdot" => (Otherwise, matrices(input(0)?, input(1)?)?),
        "addbmm" | "addbmm_" => (Otherwise, matrices(input(1)?, input(2)?)?),
        "linear" | "mkldnn_linear" => (Otherwise, linear(input(0)?, input(1)?)?),
        "_convolution" | "convolution" => {
            let output = event.outputs.first()?.sizes();
            (Otherwise, convolution(input(0)?, input(1)?, output, flag(event, 0))?)
        }
        "convolution_backward" => {
            let passes = count(event, 1..3);
            let forward = convolution(input(1)?, input(2)?, input(0)?, flag(event, 0))?;
            (Otherwise, times(forward, passes))
        }
        "_slow_conv2d_backward" => {
            let forward = convolution(input(1)?, input(2)?, input(0)?, false)?;
            (Kernel, times(forward, count(event, 0..2)))
        }
        name if CONVOLUTIONS.contains(&name) => {
            let output = event.outputs.first()?.sizes();
            (Kernel, convolution(input(0)?, input(1)?, output, false)?)
        }
        name if TRANSPOSED.contains(&name) => {
            let output = event.outputs.first()?.sizes();
            (Kernel, convolution(input(0)?, input(1)?, output, true)?)
        }
        name => attention(name, &input)?,
    };
    // A gradient that nobody asked for is no product.
    (found.1.flops > 0).then_some(found)
}

/// A product of two matrices, of two batches of them, or with vectors.
fn matrices(a: &[i64], b: &[i64]) -> Option<Product> {
    let (batch, m, k) = match *a {
        [k] => (1, 1, k),
        [m, k] => (1, m, k),
        [batch, m, k] => (batch, m, k),
        _ => return None,
    };
    let n = if b.len() == 1 { 1 } else { *b.last()? };
    Some(product_of(ProductKind::Matrix, [batch, m, n, k]))
}

fn linear(x: &[i64], weight: &[i64]) -> Option<Product> {
    let (&k, rows) = x.split_last()?;
    let n = if weight.len() == 1 { 1 } else { *weight.first()? };
    Some(product_of(ProductKind::Matrix, [1, numbers(rows), n, k]))
}

/// A convolution's product: for each group, pixels by output channels, over input channels and the kernel. A transposed
/// one computes for each pixel of its input what others do for each of their output.
fn convolution(x: &[i64], weight: &[i64], y: &[i64], transposed: bool) -> Option<Product> {
    let (wide, narrow) = if transposed { (x, y) } else { (y, x) };
    let [channels, per_group, kernel @ ..] = weight else { return None };
    // `[batch, channels, …]`, or without a batch.
    let spatial = kernel.len();
    let first = wide.len().checked_sub(spatial + 1)?;
    let channels_in = *narrow.get(narrow.len().checked_sub(spatial + 1)?)?;
    let groups = (channels_in / (*per_group).max(1)).max(1);
    let pixels = numbers(&wide[..first]).saturating_mul(numbers(&wide[first + 1..]));
    let sizes = [groups, pixels, channels / groups, per_group.saturating_mul(numbers(kernel))];
    Some(product_of(ProductKind::Convolution, sizes))
}

/// The two products of attention, and the five of its backward pass, which computes the scores again.
fn attention<'a>(
    name: &str,
    input: &impl Fn(usize) -> Option<&'a [i64]>,
) -> Option<(Level, Product)> {
    let backward = name.ends_with("_backward");
    let rest = name.trim_end_matches("_backward");
    // Heads come before or behind the sequence.
    let (level, heads, sequence) = match rest {
        "_scaled_dot_product_flash_attention_for_cpu"
        | "_scaled_dot_product_cudnn_attention"
        | "_scaled_dot_product_fused_attention_overrideable" => (Level::Kernel, 1, 2),
        "_scaled_dot_product_flash_attention" | "_scaled_dot_product_efficient_attention" => {
            (Level::Otherwise, 1, 2)
        }
        "_flash_attention" | "_efficient_attention" => (Level::Kernel, 2, 1),
        "_flash_attention_forward" | "_efficient_attention_forward" => (Level::Kernel, 2, 1),
        _ => return None,
    };
    let first = usize::from(backward);
    let (q, k, v) = (input(first)?, input(first + 1)?, input(first + 2)?);
    if [q, k, v].iter().any(|sizes| sizes.len() != 4) {
        return None;
    }
    let (batch, rows, columns) = (q[0].saturating_mul(q[heads]), q[sequence], k[sequence]);
    let mut found = product_of(ProductKind::Attention, [batch, rows, columns, q[3]]);
    let values = product_of(ProductKind::Attention, [batch, rows, v[3], columns]);
    let (with_keys, with_values) = if backward { (3, 2) } else { (1, 1) };
    found.flops = found
        .flops
        .saturating_mul(with_keys)
        .saturating_add(values.flops.saturating_mul(with_values));
    Some((level, found))
}

fn product_of(kind: ProductKind, sizes: [i64; 4]) -> Product {
    let [batch, m, n, k] = sizes.map(|size| u64::try_from(size).unwrap_or(0));
    let flops = [m, n, k].into_iter().fold(batch.saturating_mul(2), u64::saturating_mul);
    Product { kind, batch, m, n, k, flops }
}

fn times(product: Product, factor: u32) -> Product {
    Product { flops: product.flops.saturating_mul(u64::from(factor)), ..product }
}

fn numbers(sizes: &[i64]) -> i64 {
    sizes.iter().copied().fold(1, i64::saturating_mul)
}

fn flag(event: &RecordedEvent, place: u32) -> bool {
    event.flags >> place & 1 == 1
}

/// How many of some booleans are true.
fn count(event: &RecordedEvent, places: std::ops::Range<u32>) -> u32 {
    places.map(|place| u32::from(flag(event, place))).sum()
}
