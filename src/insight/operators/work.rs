//! Each event's own work in a recording: its own time, whether it computes, and its matrix product.

use std::collections::HashSet;

use super::report::ProductKind;
use crate::ffi::insight::{EventKind, RecordedEvent, RecordedTensor, Usage};
use crate::insight::recording::{Pass, Recording};

/// A recording with what follows from the nesting of its events.
pub(super) struct Work<'a> {
    pub(super) recording: &'a Recording,
    /// The nanoseconds of each event without those that it ran.
    pub(super) own: Vec<i64>,
    /// The same with those that it ran.
    pub(super) total: Vec<i64>,
    /// Whether an event computes, as opposed to operators that only call others, allocate memory or make views.
    pub(super) computes: Vec<bool>,
    /// Whether autocast called an event again, on inputs that it has cast.
    pub(super) called_again: Vec<bool>,
    /// The matrix product of an event, if it is the innermost that computes it.
    pub(super) products: Vec<Option<Product>>,
}

impl<'a> Work<'a> {
    pub(super) fn new(recording: &'a Recording) -> Self {
        let (mut own, total) = recording.times();
        let called_again = called_again(&recording.events);
        let products = products(recording, &called_again);
        let in_copy = in_copies(&recording.events);
        for (index, event) in recording.events.iter().enumerate() {
            if in_copy[index] {
                own[index] = 0;
            } else if event.name == COPY {
                own[index] = total[index];
            }
        }
        let computes = computing(&recording.events, &products, &in_copy);
        Self { recording, own, total, computes, called_again, products }
    }

    /// The operators that ended, in the order of their ends.
    pub(super) fn operators(&self) -> impl Iterator<Item = (usize, &RecordedEvent)> {
        let ended = self.recording.ended().into_iter();
        ended
            .map(|index| (index, &self.recording.events[index]))
            .filter(|(_, event)| event.kind == EventKind::Operator)
    }

    /// The pass and the part of the model of an event.
    pub(super) fn place(&self, index: usize) -> (Pass, Option<String>) {
        (self.recording.pass(index).0, self.recording.part(index))
    }
}

/// The product of each event. Of operators that are nested, one is counted: a kernel rather than what calls it or what
/// it calls, and a convolution rather than the matrix products by which it is computed. One that autocast has called
/// again did not compute it.
fn products(recording: &Recording, called_again: &[bool]) -> Vec<Option<Product>> {
    let events = &recording.events;
    let is_operator =
        |event: &RecordedEvent| event.kind == EventKind::Operator && event.ended.is_some();
    let found: Vec<_> = events
        .iter()
        .zip(called_again)
        .map(|(event, again)| if is_operator(event) && !again { product(event) } else { None })
        .collect();
    let mut counted = vec![None; events.len()];
    // Marks events that ran one that is counted.
    let mut covered = vec![false; events.len()];
    for (is_matrix, level) in [
        (false, Level::Kernel),
        (false, Level::Otherwise),
        (true, Level::Kernel),
        (true, Level::Otherwise),
    ] {
        let mut order: Vec<usize> = (0..events.len()).collect();
        if level == Level::Otherwise {
            order.reverse();
        }
        for index in order {
            let Some((at, product)) = found[index] else { continue };
            let is_its_turn = at == level && (product.kind == ProductKind::Matrix) == is_matrix;
            let is_part =
                |index| recording.ancestors(index).any(|(above, _)| counted[above].is_some());
            if !is_its_turn || covered[index] || is_part(index) {
                continue;
            }
            counted[index] = Some(product);
            recording.ancestors(index).for_each(|(above, _)| covered[above] = true);
        }
    }
    counted
}

/// Operators that change the shape or the memory of a tensor in place, and compute nothing.
const PASSIVE: &[&str] = &[
    "aten::as_strided_",
    "aten::detach_",
    "aten::requires_grad_",
    "aten::resize_",
    "aten::resize_as_",
    "aten::set_",
    "aten::squeeze_",
    "aten::t_",
    "aten::transpose_",
    "aten::unsqueeze_",
];

/// A copy may copy to a temporary tensor first, or to the other device and then cast. It counts as one.
const COPY: &str = "aten::copy_";

/// Which events are steps of a copy.
fn in_copies(events: &[RecordedEvent]) -> Vec<bool> {
    let mut inside = vec![false; events.len()];
    for (index, event) in events.iter().enumerate() {
        if let Some(parent) = event.parent {
            inside[index] = inside[parent] || events[parent].name == COPY;
        }
    }
    inside
}

/// Which events autocast has called again, on inputs that it has cast, outside of the region.
fn called_again(events: &[RecordedEvent]) -> Vec<bool> {
    let mut again = vec![false; events.len()];
    for inner in events {
        let Some(above) = inner.parent else { continue };
        let outer = &events[above];
        let is_again = outer.autocast.is_some() && inner.autocast.is_none();
        again[above] |= is_again && outer.name == inner.name;
    }
    again
}

/// Operators that prepare memory for the operator that runs them, which then writes to it as well.
const FILLING: &[&str] = &[COPY, "aten::fill_", "aten::zero_"];

/// Which events compute. An operator that runs others computes itself if it writes memory that they did not write, such
/// as a product whose factor is a number, which is first cast. One without a kernel does if it runs nothing that does,
/// and none does that runs one of its own name, such as a sum in half precision on some CPUs.
fn computing(
    events: &[RecordedEvent],
    products: &[Option<Product>],
    in_copy: &[bool],
) -> Vec<bool> {
    let mut computes = vec![false; events.len()];
    // The work of the operators in it.
    let mut below = vec![Below::default(); events.len()];
    for index in (0..events.len()).rev() {
        let event = &events[index];
        let mut inside = std::mem::take(&mut below[index]);
        if event.kind != EventKind::Operator || event.ended.is_none() || in_copy[index] {
            continue;
        }
        let is_fill = FILLING.contains(&event.name.as_str());
        let is_own = match event.composite || is_fill {
            true => !inside.computes,
            false => {
                written(event).any(|memory| !inside.written.contains(&memory)) || !inside.computes
            }
        };
        let is_again = inside.names.contains(&*event.name);
        computes[index] = products[index].is_some() || (is_own && !is_again && !is_passive(event));
        let Some(parent) = event.parent else { continue };
        if computes[index] {
            inside.names.insert(&event.name);
        }
        if computes[index] && !is_fill {
            inside.written.extend(written(event));
        }
        below[parent].computes |= inside.computes || computes[index];
        below[parent].written.extend(inside.written);
        below[parent].names.extend(inside.names);
    }
    computes
}

/// The work of the operators in an event.
#[derive(Clone, Debug, Default)]
struct Below<'e> {
    computes: bool,
    /// The names of those that compute.
    names: HashSet<&'e str>,
    /// The memory that they wrote.
    written: HashSet<u64>,
}

/// The memory that an operator writes.
pub(super) fn written(event: &RecordedEvent) -> impl Iterator<Item = u64> {
    let all = event.outputs.iter().chain(&event.inputs);
    all.filter(|tensor| is_written(tensor)).filter_map(|tensor| tensor.memory)
}

/// Returns whether an operator only allocates memory or makes views.
fn is_passive(event: &RecordedEvent) -> bool {
    let name = event.name.as_str();
    let allocates = name.starts_with("aten::empty") || name.starts_with("aten::new_empty");
    let reads_a_number = name == "aten::_local_scalar_dense";
    let writes = event.inputs.iter().chain(&event.outputs).any(is_written);
    allocates || PASSIVE.contains(&name) || !(writes || reads_a_number)
}

pub(super) fn is_written(tensor: &RecordedTensor) -> bool {
    matches!(tensor.usage, Usage::Write | Usage::Overwrite)
}

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

/// When an operator counts as the one that computes a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// Always. What it runs is a part of it.
    Kernel,
    /// Only if it runs no other operator that does.
    Otherwise,
}

/// The kernels of convolutions, of all devices, with those that are transposed.
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
    let output = event.outputs.first()?.sizes();
    let found = match name {
        "mm" | "bmm" => (Kernel, matrices(input(0)?, input(1)?)?),
        "addmm" | "addmm_" | "_addmm_activation" | "baddbmm" | "baddbmm_" | "addmv" | "addmv_" => {
            (Kernel, matrices(input(1)?, input(2)?)?)
        }
        "mv" | "dot" | "vdot" => (Otherwise, matrices(input(0)?, input(1)?)?),
        "addbmm" | "addbmm_" => (Otherwise, matrices(input(1)?, input(2)?)?),
        "linear" | "mkldnn_linear" => (Otherwise, linear(input(0)?, input(1)?)?),
        "_convolution" | "convolution" => {
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
            let is_transposed = name.contains("transpose");
            (Kernel, convolution(input(0)?, input(1)?, output, is_transposed)?)
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
